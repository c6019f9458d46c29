"""The matmul in XLA: on TPU and for int8 weights it fuses, and is the implementation; elsewhere the best form found.

Which form serves, as the compilers for the chips show:

- int8 and float8 per output: the matmul reads 8 bits and the scale multiplies its result. No weight is stored in floats
  anywhere. Ampere has no float8, and XLA would store what it converts itself: there integers make the floats.
- groups on TPU: the dequantized weight lives in the matmul's fusion alone.
- groups on GPU (Ampere, and what the Hopper kernel refuses): XLA stores the dequantized weight, 4.5 bytes of traffic
  a weight instead of 0.5, unless the product is taken group by group and the partial sums scaled, which costs
  8 T / J bytes a weight instead: less while T < J / 2. A loop over chunks of the weight is no way out: XLA transposes
  the whole int4 weight ahead of it. `stores_floats` says what is stored.
- the CPU: chunks of outputs, dequantized into the cache, two to three times faster than the whole. Under 8 rows in
  float32, for bfloat16 is slow there.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Device, current_device
from pallas_kernels.quantized_matmul.reference import group_sums, quantize_rows
from pallas_kernels.quantized_matmul.weights import ChannelWeight, GroupedWeight, Weight

CPU_CHUNK_BYTES = 4 << 20  # of dequantized weight: about what stays in a core's cache
CPU_ROWS = 8  # with fewer, bfloat16 and int8 products are slow on the CPU
AMPERE = re.compile(r"\b(A\d+[A-Z]?|RTX 30\d\d)\b")


def quantized_matmul(
    x_TI: jax.Array, w: Weight, *, activations: str | None, out_dtype: jnp.dtype, inputs_axis: str | None = None
) -> jax.Array:
    """See `api.quantized_matmul`."""
    platform = current_device().platform
    if activations == "int8":
        assert isinstance(w, ChannelWeight)
        return _int8_arithmetic(x_TI, w, inputs_axis, pad=platform == "cpu").astype(out_dtype)
    if platform == "cpu":
        y_TO = _by_chunks(x_TI, w)
    elif isinstance(w, ChannelWeight):
        y_TO = _int8(x_TI, w)
    elif platform != "tpu" and x_TI.shape[0] < w.values_GJO.shape[1] / 2:
        y_TO = _by_groups(x_TI, w)
    else:
        y_TO = _whole(x_TI, w)
    return y_TO.astype(out_dtype)


def stores_floats(device: Device, rows: int, w: Weight) -> bool:
    """Whether XLA, on a GPU of Ampere or later, writes the weight out in 16 bits or more ahead of the product.

    So say the chips' compilers. With one row they may besides do so for a matrix of under some 4 million.

    Args:
      w: the weight, or anything with its shapes and dtypes.
    """
    values = w.values_IO if isinstance(w, ChannelWeight) else w.values_GJO
    if isinstance(w, GroupedWeight):
        if rows >= values.shape[1] / 2:
            return True  # dequantized whole
        if rows == 1:
            return False  # no matmul but a sum, whose fusion reads anything
        if values.dtype == jnp.uint4:
            return True
    # Before 0.12 XLA does not fuse the bitcast in `_floats`.
    return _float8_by_integers(device, values.dtype) and jax.__version_info__ < (0, 12)


def _float8_by_integers(device: Device, dtype: jnp.dtype) -> bool:
    return dtype == jnp.float8_e4m3fn and device.platform == "gpu" and AMPERE.search(device.kind) is not None


def _floats(values: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The weight's values in x's dtype, in a form that XLA fuses into the product. A float8 NaN can become infinite."""
    if not _float8_by_integers(current_device(), values.dtype):
        return values.astype(dtype)
    # e4m3's sign, exponent and mantissa, as a float16's, are its number over 2^8. XLA fuses a chain of 16-bit
    # operations by constants; no shift, no select. Times 144 NaN's bits (480) overflow, while 448 and below stay exact.
    bits = lax.bitcast_convert_type(values, jnp.int8).astype(jnp.int16)
    halves = lax.bitcast_convert_type(bits * 128 & ~0x4000, jnp.float16) * (256 * 144)
    return halves.astype(dtype) * (1 / 144)


def _einsum(axes: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """In float32 all digits count; products of bfloat16 are exact, their sums float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(axes, x, w, precision=precision, preferred_element_type=jnp.float32)


def _int8_arithmetic(x_TI: jax.Array, w: ChannelWeight, inputs_axis: str | None, *, pad: bool) -> jax.Array:
    T = x_TI.shape[0]
    q_TI, scale_T1 = quantize_rows(x_TI, inputs_axis)
    q_TI = jnp.pad(q_TI, ((0, max(CPU_ROWS - T, 0) if pad else 0), (0, 0)))
    y_TO = lax.dot(q_TI, w.values_IO, preferred_element_type=jnp.int32)[:T].astype(jnp.float32)
    return y_TO * scale_T1 * w.scale_O.astype(jnp.float32)


def _int8(x_TI: jax.Array, w: ChannelWeight) -> jax.Array:
    return _einsum("ti,io->to", x_TI, _floats(w.values_IO, x_TI.dtype)) * w.scale_O.astype(jnp.float32)


def _whole(x_TI: jax.Array, w: GroupedWeight) -> jax.Array:
    """Dequantizes in float32 and rounds once, to x's dtype."""
    w_GJO = w.values_GJO.astype(jnp.float32)
    if w.zeros_GO is not None:
        w_GJO -= w.zeros_GO.astype(jnp.float32)[:, None]
    w_GJO *= w.scales_GO.astype(jnp.float32)[:, None]
    if w.minima_GO is not None:
        w_GJO += w.minima_GO.astype(jnp.float32)[:, None]
    # Summed over two axes: with the weight reshaped to [I, O], XLA on TPU stores it dequantized.
    x_TGJ = x_TI.reshape(-1, *w_GJO.shape[:2])
    return _einsum("tgj,gjo->to", x_TGJ, w_GJO.astype(x_TI.dtype))


def _by_groups(x_TI: jax.Array, w: GroupedWeight) -> jax.Array:
    """Integers are exact in bfloat16 and the scales multiply float32 sums: nothing is rounded on the way."""
    G, J, _ = w.values_GJO.shape
    # XLA's fusion on GPUs reads int4 as it is; with zero points taken off first, or uint4, it would store bfloat16.
    sums_GTO = _einsum("tgj,gjo->gto", x_TI.reshape(-1, G, J), _floats(w.values_GJO, x_TI.dtype))
    if w.zeros_GO is not None:
        sums_GTO -= group_sums(x_TI, w).T[:, :, None] * w.zeros_GO.astype(jnp.float32)[:, None]
    y_TO = jnp.sum(sums_GTO * w.scales_GO.astype(jnp.float32)[:, None], axis=0)
    return y_TO if w.minima_GO is None else y_TO + minima_product(x_TI, w)


def minima_product(x_TI: jax.Array, w: GroupedWeight) -> jax.Array:
    """What the minima add to the product, float32 [T, O]."""
    assert w.minima_GO is not None
    return jnp.dot(group_sums(x_TI, w), w.minima_GO.astype(jnp.float32), precision=lax.Precision.HIGHEST)


def _by_chunks(x_TI: jax.Array, w: Weight) -> jax.Array:
    """A loop over chunks of outputs, each dequantized and multiplied while it is in the cache."""
    T = x_TI.shape[0]
    I, O = w.shape  # noqa: E741
    if T < CPU_ROWS:
        x_TI = x_TI.astype(jnp.float32)
    multiply: Callable[..., jax.Array] = _int8 if isinstance(w, ChannelWeight) else _whole
    largest = max(CPU_CHUNK_BYTES // (I * x_TI.dtype.itemsize), 64)
    size = next((size for size in range(min(largest, O), 63, -1) if O % size == 0), O)
    if size == O:
        return multiply(x_TI, w)

    def chunk(i: jax.Array, y_TO: jax.Array) -> jax.Array:
        part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, i * size, size, axis=leaf.ndim - 1), w)
        return lax.dynamic_update_slice_in_dim(y_TO, multiply(x_TI, part), i * size, axis=1)

    return lax.fori_loop(0, O // size, chunk, jnp.zeros((T, O), jnp.float32))
