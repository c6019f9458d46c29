"""The device's side of the paged cache: pages of all layers in one pool, donated and aliased through every step."""

from __future__ import annotations

from typing import Any

import jax

from pallas_kernels import paged_attention
from pallas_kernels.dispatch import Device
from pallas_kernels.paged_attention.layout import KV

COPIES_PER_CALL = 16


def pool_spec(
    num_layers: int, num_kv_heads: int, head_dim: int, num_pages: int, page_size: int, dtype: Any, device: Device
) -> Any:
    """A pool with `num_pages` usable pages, as `device` keeps it; page 0 is one more, and nobody's.

    A `jax.ShapeDtypeStruct`, or two of them, values and scales, for int8 and float8_e4m3fn.
    """
    return paged_attention.pool_spec(num_layers, num_pages + 1, page_size, num_kv_heads, head_dim, dtype, device)


def page_bytes(num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, dtype: Any, device: Device) -> int:
    """Bytes one page takes over all layers."""
    spec = pool_spec(num_layers, num_kv_heads, head_dim, 0, page_size, dtype, device)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec))


def copy_pages(pool: KV, copies_C2: jax.Array) -> KV:
    """Copies page `copies[i, 0]` to page `copies[i, 1]` in all layers; (0, 0) copies nothing that matters."""
    return jax.tree.map(lambda pages: pages.at[:, copies_C2[:, 1]].set(pages[:, copies_C2[:, 0]]), pool)
