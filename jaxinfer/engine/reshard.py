"""Weights from one mesh to another, device to device: no checkpoint is read again, and the host holds none of them.

A fused weight is laid out by shard, KV heads may be copied and dimensions padded, so a weight's layout depends on its
mesh. It changes its shape where it lies before it moves: the old devices cut it into its parts as the new mesh splits
them, each part goes to its new devices, and these put their own pieces together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.engine.executables import expected_compiles
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.startup import Layout
from jaxinfer.models.decoder import DecoderStructure
from jaxinfer.models.layers import FusedWeight, Part, WeightSpec
from jaxinfer.quantization.tensor import as_rows, from_rows, nbytes


def weights_by_path(runners: Iterable[Runner], structures: Iterable[DecoderStructure]) -> dict[str, list[Any]]:
    """Every copy of each weight, of all replicas and stages."""
    weights: dict[str, list[Any]] = {}
    for runner in runners:
        for structure, leaves in zip(structures, runner.leaves, strict=True):
            for path, weight in structure.unflatten(leaves).items():
                weights.setdefault(path, []).append(weight)
    return weights


def bytes_on_one_device(arrays: Iterable[jax.Array]) -> int:
    """What these take where they take most."""
    total: Counter[str] = Counter()
    for array in arrays:
        # By its shape, since a step may be taking its memory over just now.
        shard_bytes = nbytes(array.sharding.shard_shape(array.shape), array.dtype)
        total.update({str(device): shard_bytes for device in array.sharding.device_set})
    return max(total.values(), default=0)


def move_weights(
    weights: dict[str, list[Any]], old: dict[str, WeightSpec], new: Layout
) -> list[list[tuple[jax.Array, ...]]]:
    """Weights on the devices of a new layout, by replica and stage. Takes each out of `weights` once it has moved.

    Args:
      weights: every copy of each weight, by path; replicas and stages that share a weight have one each.
      old: their declarations.
    """
    placed: dict[str, list[Any]] = {}
    for path, spec in new.specs.items():
        copies = weights.pop(path)
        with expected_compiles():
            placed[path] = _moved(copies[0], old[path], spec, new.homes(path))
        jax.block_until_ready(placed[path])
        for array in jax.tree.leaves(copies):
            array.delete()
    return new.leaves(placed)


def _moved(weight: Any, old: WeightSpec, new: WeightSpec, homes: list[Any]) -> list[Any]:
    """A weight at each of `homes`, which has a sharding for each of its arrays."""
    if old.ways == new.ways and jax.tree.leaves(old.arrays) == jax.tree.leaves(new.arrays):
        return [jax.tree.map(_put, weight, home) for home in homes]
    if isinstance(weight, FusedWeight):
        moved = [
            _moved(piece, before, after, [home.pieces[number] for home in homes])
            for number, (piece, before, after) in enumerate(zip(weight.pieces, old.pieces, new.pieces, strict=True))
        ]
        return [FusedWeight(pieces, new.ways) for pieces in zip(*moved, strict=True)]
    pieces = _cut(weight, old, new)
    return [_joined(jax.device_put(pieces, _of_rows(home, pieces)), new, home) for home in homes]


def _put(array: jax.Array, home: NamedSharding) -> jax.Array:
    """With memory of its own: where nothing has to move, a new array is the old one's, which is to be deleted."""
    moved = jax.device_put(array, home)
    old = {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}
    shared = any(shard.data.unsafe_buffer_pointer() in old for shard in moved.addressable_shards)
    return jnp.copy(moved) if shared else moved


@partial(jax.jit, static_argnames=("old", "new"))
def _cut(weight: Any, old: WeightSpec, new: WeightSpec) -> list[list[jax.Array]]:
    """Of each of a weight's arrays, as rows of outputs, its parts in order of the new shards: padded and copied as
    those want them. Last the order of inputs, if it has one."""
    if new.scheme is None:
        return [_cut_rows(weight, old, new, new.shape[1:])]
    targets = jax.eval_shape(partial(as_rows, scheme=new.scheme), _shapes(new))
    arrays = as_rows(weight, new.scheme)
    cut = [_cut_rows(array, old, new, target.shape[1:]) for array, target in zip(arrays, targets, strict=True)]
    if weight.order_I is not None:
        inputs = new.checkpoint_shape[1]
        cut.append([jnp.concatenate([weight.order_I[:inputs], jnp.arange(inputs, new.shape[1], dtype=jnp.int32)])])
    return cut


def _shapes(spec: WeightSpec) -> Any:
    return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), spec.arrays)


def _cut_rows(array: jax.Array, old: WeightSpec, new: WeightSpec, columns: tuple[int, ...]) -> list[jax.Array]:
    if columns:
        array = array[:, : columns[0]]  # beyond is padding
        array = jnp.pad(array, ((0, 0), (0, columns[0] - array.shape[1])))
    blocks = array.reshape(old.ways, -1, *columns)
    pieces, offset = [], 0
    old_parts, new_parts = (spec.parts or (Part("", spec.checkpoint_shape[0]),) for spec in (old, new))
    for before, after in zip(old_parts, new_parts, strict=True):
        share = old.share(before) if old.parts else blocks.shape[1]
        part = blocks[:: before.copies, offset : offset + share]
        offset += share
        part = part.reshape(-1, *columns)[: before.rows]
        if after.copies > 1:
            heads = part.reshape(new.ways // after.copies, -1, *columns)
            part = jnp.repeat(heads, after.copies, axis=0).reshape(-1, *columns)
        rows = new.share(after) * new.ways if new.parts else new.shape[0]
        pieces.append(jnp.pad(part, ((0, rows - len(part)), *((0, 0),) * len(columns))))
    return pieces


def _of_rows(home: Any, pieces: list[list[jax.Array]]) -> list[list[NamedSharding]]:
    """Where arrays as rows of outputs go, so that they are split as the weight at `home` is."""
    if isinstance(home, NamedSharding):
        return [[home] * len(parts) for parts in pieces]
    values = jax.tree.leaves(home.weight)[0]
    *_, out = into, *_ = values.spec
    split = lambda array: PartitionSpec(*((None,) if array.ndim == 1 else (out, into if array.shape[1] > 1 else None)))
    return [[NamedSharding(values.mesh, split(part)) for part in parts] for parts in pieces]


def _joined(pieces: list[list[jax.Array]], spec: WeightSpec, home: Any) -> Any:
    """The parts, each split over the shards, as one weight in which each shard has its own of every part."""

    def join(pieces: list[list[jax.Array]]) -> Any:
        rows = [
            jnp.concatenate([part.reshape(spec.ways, -1, *part.shape[1:]) for part in parts], axis=1)
            for parts in pieces
        ]
        if spec.scheme is None:
            return rows[0].reshape(spec.shape)
        order = rows.pop().reshape(-1) if spec.scheme.reordered else None
        return from_rows([array.reshape(-1, array.shape[-1]) for array in rows], order, spec.scheme)

    return jax.jit(join, out_shardings=home)(pieces)
