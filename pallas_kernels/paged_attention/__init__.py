"""Paged attention: writes new keys and values into the page pool and attends over it, in one op."""

from pallas_kernels.paged_attention.api import paged_attention, pool_shape

__all__ = ["paged_attention", "pool_shape"]
