"""Paged attention: writes new keys and values into the page pool and attends over it, in one op."""

from pallas_kernels.paged_attention.api import check_step, paged_attention
from pallas_kernels.paged_attention.layout import KV, QuantizedKV, pool_shape, pool_spec

__all__ = ["KV", "QuantizedKV", "check_step", "paged_attention", "pool_shape", "pool_spec"]
