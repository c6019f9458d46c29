"""Which mesh axis a logical axis is split over, as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import PartitionSpec

# Logical axis -> mesh axis, of weights, activations and KV; what is not here is on every device.
RULES: Mapping[str, str] = {"heads": "tensor", "kv_heads": "tensor", "feed_forward": "tensor", "vocab": "tensor"}


def partition_spec(axes: Sequence[str | None], rules: Mapping[str, str] = RULES) -> PartitionSpec:
    """The split of an array whose dimensions have these logical axes."""
    return PartitionSpec(*(None if axis is None else rules.get(axis) for axis in axes))
