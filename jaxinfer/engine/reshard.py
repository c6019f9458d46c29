"""Weights from one mesh to another, device to device: no checkpoint is read again, and the host holds none of them.

A fused weight is laid out by shard, KV heads may be copied and dimensions padded, so a weight's layout depends on its
mesh. It changes its shape where it lies before it moves: the old devices cut it into its parts as the new mesh splits
them, each part goes to its new devices, and these put their own pieces together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxinfer.engine.executables import expected_compiles
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.startup import Layout
from jaxinfer.models.decoder import DecoderStructure
from jaxinfer.models.layers import Part, WeightSpec


def weights_by_path(runners: Iterable[Runner], structures: Iterable[DecoderStructure]) -> dict[str, list[jax.Array]]:
    """Every array of each weight, of all replicas and stages."""
    weights: dict[str, list[jax.Array]] = {}
    for runner in runners:
        for structure, leaves in zip(structures, runner.leaves, strict=True):
            for path, leaf in zip(structure.specs, leaves, strict=True):
                weights.setdefault(path, []).append(leaf)
    return weights


def bytes_on_one_device(arrays: Iterable[jax.Array]) -> int:
    """What these take where they take most."""
    total: Counter[str] = Counter()
    for array in arrays:
        # By its shape, since a step may be taking its memory over just now.
        shard_bytes = math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        total.update({str(device): shard_bytes for device in array.sharding.device_set})
    return max(total.values(), default=0)


def move_weights(
    weights: dict[str, list[jax.Array]], old: dict[str, WeightSpec], new: Layout
) -> list[list[tuple[jax.Array, ...]]]:
    """Weights on the devices of a new layout, by replica and stage. Takes each out of `weights` once it has moved.

    Args:
      weights: every array of each weight, by path; replicas and stages that share a weight have one each.
      old: their declarations.
    """
    placed: dict[str, list[jax.Array]] = {}
    for path, spec in new.specs.items():
        copies = weights.pop(path)
        with expected_compiles():
            placed[path] = _moved(copies[0], old[path], spec, new.homes(path))
        jax.block_until_ready(placed[path])
        for copy in copies:
            copy.delete()
    return new.leaves(placed)


def _moved(weight: jax.Array, old: WeightSpec, new: WeightSpec, homes: list[NamedSharding]) -> list[jax.Array]:
    if old.shape == new.shape and old.ways == new.ways:
        return [_owned(jax.device_put(weight, home), weight) for home in homes]
    pieces = _cut(weight, old, new)
    return [_joined(tuple(jax.device_put(piece, home) for piece in pieces), new, home) for home in homes]


def _owned(moved: jax.Array, weight: jax.Array) -> jax.Array:
    """With memory of its own: where nothing had to move, the new array is the old one's, which is to be deleted."""
    old = {shard.data.unsafe_buffer_pointer() for shard in weight.addressable_shards}
    shared = any(shard.data.unsafe_buffer_pointer() in old for shard in moved.addressable_shards)
    return jnp.copy(moved) if shared else moved


@partial(jax.jit, static_argnames=("old", "new"))
def _cut(weight: jax.Array, old: WeightSpec, new: WeightSpec) -> tuple[jax.Array, ...]:
    """The parts of a weight, each as rows in order of the new shards: padded and copied as those want them."""
    if weight.ndim > 1:
        columns = new.shape[1]
        weight = weight[:, : old.checkpoint_shape[1]]
        weight = jnp.pad(weight, ((0, 0), (0, columns - weight.shape[1])))
    blocks = weight.reshape(old.ways, -1, *weight.shape[1:])
    pieces, offset = [], 0
    old_parts, new_parts = (spec.parts or (Part("", spec.checkpoint_shape[0]),) for spec in (old, new))
    for before, after in zip(old_parts, new_parts, strict=True):
        share = old.share(before) if old.parts else blocks.shape[1]
        part = blocks[:: before.copies, offset : offset + share]
        offset += share
        part = part.reshape(-1, *weight.shape[1:])[: before.rows]
        if after.copies > 1:
            heads = part.reshape(new.ways // after.copies, -1, *part.shape[1:])
            part = jnp.repeat(heads, after.copies, axis=0).reshape(-1, *part.shape[1:])
        rows = new.share(after) * new.ways if new.parts else new.shape[0]
        pieces.append(jnp.pad(part, ((0, rows - len(part)), *((0, 0),) * (part.ndim - 1))))
    return tuple(pieces)


def _joined(pieces: tuple[jax.Array, ...], spec: WeightSpec, sharding: NamedSharding) -> jax.Array:
    """The parts, each split over the shards, as one weight in which each shard has its own of every part."""

    def join(pieces: tuple[jax.Array, ...]) -> jax.Array:
        blocks = [piece.reshape(spec.ways, -1, *piece.shape[1:]) for piece in pieces]
        return jnp.concatenate(blocks, axis=1).reshape(spec.shape)

    return jax.jit(join, out_shardings=sharding)(pieces)
