"""How keys and values lie in the pool. A page layout is chosen with the pool, and read off its shape from then on.

Letters beside those of `api`: X rows of a page at one position, E elements of such a row.

- Apart: `[L, P, 2K, page_size, H]`, axis 2 holding k0, v0, k1, v1, ...: K and V of a head are neighbours, so that a
  shard over heads means the same on any mesh.
- Joined: `[L, P, K, page_size, 2H]`, a row being a head's key and then its value. TPUs keep rows in multiples of 128
  elements, which two heads of 64 fill.

Head dims that a device does not store are padded with zeros, which change no score. A CPU keeps float8_e4m3fn as the
bytes it is made of, uint8: it moves no such floats without widening all that it moves them from or to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Device, KernelError

QUANTIZED = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}  # dtype -> its largest value


class QuantizedKV(NamedTuple):
    """Keys and values in int8 or float8_e4m3fn, and what to multiply them by.

    Attributes:
      values: a pool, or the rows [T, X, E] of new tokens; uint8 is float8_e4m3fn.
      scales: float32, one for each token and head, of keys and of values: [L, P, 2K, page_size or more], or [T, 2K].
    """

    values: jax.Array
    scales: jax.Array


def numbers_of(values: jax.Array) -> jax.Array:
    """Values of a `QuantizedKV` as the numbers they are."""
    return lax.bitcast_convert_type(values, jnp.float8_e4m3fn) if values.dtype == jnp.uint8 else values


type KV = jax.Array | QuantizedKV


def values_of(kv: KV) -> jax.Array:
    return kv.values if isinstance(kv, QuantizedKV) else kv


class PageLayout(NamedTuple):
    """The shape of a page: K heads of H elements (padding included), keys and values apart or joined."""

    num_kv_heads: int
    head_dim: int
    joined: bool

    @classmethod
    def of(cls, pool: KV, num_kv_heads: int, head_dim: int) -> PageLayout:
        """The layout of a pool that holds heads of `head_dim`.

        Raises:
          KernelError: it holds other heads.
        """
        shape, K = values_of(pool).shape, num_kv_heads
        if len(shape) == 5 and shape[2] in (K, 2 * K):
            joined = shape[2] == K
            stored = shape[4] // 2 if joined else shape[4]
            if stored >= head_dim:
                return cls(K, stored, joined)
        raise KernelError(
            f"pool {shape} is neither [L, P, {2 * K}, page_size, {head_dim} or more] "
            f"nor [L, P, {K}, page_size, {2 * head_dim} or more]"
        )

    def rows(self, k_TKH: jax.Array, v_TKH: jax.Array, dtype: Any) -> KV:
        """The rows [T, X, E] that a pool of this layout and dtype holds for these keys and values of the layout's H."""
        kv_T2KH = jnp.stack([k_TKH, v_TKH], axis=2).reshape(len(k_TKH), 2 * self.num_kv_heads, self.head_dim)
        as_bytes = dtype == jnp.uint8
        number = jnp.dtype(jnp.float8_e4m3fn if as_bytes else dtype)
        largest = QUANTIZED.get(number)
        if largest is None:
            return self._joined(kv_T2KH.astype(dtype))
        x = kv_T2KH.astype(jnp.float32)
        scales_T2K = jnp.max(jnp.abs(x), axis=-1) / largest
        x = x / jnp.where(scales_T2K > 0, scales_T2K, 1.0)[..., None]
        x = jnp.round(x) if jnp.issubdtype(number, jnp.integer) else x
        x = jnp.clip(x, -largest, largest).astype(number)
        return QuantizedKV(self._joined(lax.bitcast_convert_type(x, dtype) if as_bytes else x), scales_T2K)

    def _joined(self, kv_T2KH: jax.Array) -> jax.Array:
        return kv_T2KH.reshape(len(kv_T2KH), self.num_kv_heads, -1) if self.joined else kv_T2KH

    def part(self, pages: KV, which: int) -> jax.Array:
        """Keys (0) or values (1) [..., K, page_size, H] of pages [..., X, page_size, E]; float32 if quantized."""
        values = values_of(pages)
        if self.joined:
            part = values[..., which * self.head_dim : (which + 1) * self.head_dim]
        else:
            part = values[..., which::2, :, :]
        if not isinstance(pages, QuantizedKV):
            return part
        return numbers_of(part).astype(jnp.float32) * pages.scales[..., which::2, : part.shape[-2], None]


def pool_shape(
    num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, *, joined: bool = False
) -> tuple[int, ...]:
    """The shape of a pool's values, without padding; see the module."""
    rows, elements = (num_kv_heads, 2 * head_dim) if joined else (2 * num_kv_heads, head_dim)
    return (num_layers, num_pages, rows, page_size, elements)


def pool_spec(
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    device: Device,
) -> Any:
    """The pool as `device` keeps it: a ShapeDtypeStruct, or a `QuantizedKV` of two for int8 and float8_e4m3fn."""
    joined, dtype = False, jnp.dtype(dtype)
    if device.platform == "tpu":
        joined = head_dim <= 64
        head_dim = 64 if joined else -(-head_dim // 128) * 128
    elif device.platform == "gpu":
        head_dim = next((size for size in (64, 128, 256) if head_dim <= size), head_dim)
    shape = pool_shape(num_layers, num_pages, page_size, num_kv_heads, head_dim, joined=joined)
    if dtype not in QUANTIZED:
        return jax.ShapeDtypeStruct(shape, dtype)
    as_bytes = device.platform == "cpu" and dtype == jnp.float8_e4m3fn
    values = jax.ShapeDtypeStruct(shape, jnp.uint8 if as_bytes else dtype)
    # A TPU keeps rows of 128 all the same, or else in an order of its own, from which every step would copy them.
    row = -(-page_size // 128) * 128 if device.platform == "tpu" else page_size
    scales = jax.ShapeDtypeStruct((num_layers, num_pages, 2 * num_kv_heads, row), jnp.float32)
    return QuantizedKV(values, scales)  # type: ignore[arg-type]
