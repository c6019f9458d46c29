"""Weights from a checkpoint to their places on the devices, a shard at a time."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Sharding

from jaxinfer.checkpoints.reader import Index, TensorReader, shown
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models.family import NameMap

if TYPE_CHECKING:
    from jaxinfer.models.layers import WeightSpec

type Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

# Rows are read and converted in blocks of about this: 256 KB in float32. With twice as many, temporaries come from
# fresh pages each time, and page faults cost as much as the conversion.
_BLOCK_ELEMENTS = 1 << 16
_MAX_THREADS = 8
_MAX_PROBLEMS = 8  # named in one message


class _Source(NamedTuple):
    """Rows of a checkpoint's tensor, and the rows of its weight that they fill.

    Attributes:
      rows: (first row in the tensor, first row in the weight, number of rows), in pieces that lie together.
      interleaved: as `Target` has it.
    """

    name: str
    rows: list[tuple[int, int, int]]
    interleaved: int | None


class Weights:
    """A model's weights as a checkpoint holds them, put together a slice at a time, in their own dtype.

    Raises:
      CheckpointError: tensors are missing, not known to the model, or wrongly shaped; found before any is read.
      UnsupportedError: a tensor's dtype is not read here.
    """

    def __init__(self, reader: TensorReader, names: NameMap, specs: Mapping[str, WeightSpec]):
        self.specs = specs
        self._reader = reader
        self._sources = _match(reader, names, specs)
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def read(self, path: str, index: Index) -> np.ndarray:
        """Returns `weight[index]`, which is the caller's to keep; on the CPU `jax.device_put` takes it without a copy.

        Args:
          index: of every dimension of the weight, as its spec shapes it: padding and copies included.
        """
        spec = self.specs[path]
        region = tuple(range(*part.indices(size)) for part, size in zip(index, spec.shape, strict=True))
        host = _empty_aligned(tuple(map(len, region)), np.dtype(spec.dtype))
        if spec.shape != spec.checkpoint_shape:
            host[...] = 0  # what is padded
        blocks = [block for source in self._sources[path] for block in _blocks(self._reader, source, region, host)]
        for _ in self._threads.map(lambda block: block(), blocks):
            pass
        return host

    def release(self, path: str) -> None:
        """Lets the system drop what was read of a weight from memory."""
        for source in self._sources[path]:
            self._reader.release(source.name)


def load_weights(
    weights: Weights, shardings: Mapping[str, Sequence[Sharding]], progress: Progress | None = None
) -> dict[str, list[jax.Array]]:
    """Loads every weight straight to its devices; returns arrays by path, one for each sharding.

    A shard is put together in host memory, sent to the devices that hold it, and forgotten before the next: a device
    never holds more of a weight than its own part, and host memory stays near the largest shard (two, while a
    transfer is under way). Only this process's devices are sent anything.

    Args:
      shardings: of every weight: one for each replica, and for each stage that has it.
      progress: called as weights are placed, with the bytes done and the bytes in all.
    """
    sizes = {path: math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for path, spec in weights.specs.items()}
    done, total = 0, sum(sizes.values())
    loaded: dict[str, list[jax.Array]] = {}
    last: list[jax.Array] = []
    for path, spec in weights.specs.items():
        holders: dict[tuple[tuple[int, int, int], ...], list[jax.Device]] = {}
        for sharding in shardings[path]:
            for device, index in sharding.addressable_devices_indices_map(spec.shape).items():
                assert index is not None
                ranges = tuple(part.indices(size) for part, size in zip(index, spec.shape, strict=True))
                holders.setdefault(ranges, []).append(device)
        shards: dict[jax.Device, jax.Array] = {}
        for ranges, devices in holders.items():
            host = weights.read(path, tuple(slice(*each) for each in ranges))
            jax.block_until_ready(last)  # else host copies pile up behind a slow transfer
            last = [jax.device_put(host, device) for device in devices]
            shards |= zip(devices, last, strict=True)
        weights.release(path)
        loaded[path] = [
            jax.make_array_from_single_device_arrays(
                spec.shape, sharding, [shards[d] for d in sharding.addressable_devices_indices_map(spec.shape)]
            )
            for sharding in shardings[path]
        ]
        done += sizes[path]
        if progress:
            progress(done, total)
    return loaded


def _match(reader: TensorReader, names: NameMap, specs: Mapping[str, WeightSpec]) -> dict[str, list[_Source]]:
    """Finds the tensors of each weight, and every fault that can be found without reading one."""
    sources: dict[str, list[_Source]] = {path: [] for path in specs}
    missing, misshaped, unreadable = [], [], []
    for name, target in names.targets.items():
        if target.path not in specs:
            misshaped.append(f"{shown(name)} is of {shown(target.path)}, which is no weight of this model")
            continue
        spec = specs[target.path]
        rows, pieces = _rows_of(spec, target.part)
        expected = (rows, *spec.checkpoint_shape[1:])
        sources[target.path].append(_Source(name, pieces, target.interleaved))
        info = reader.tensors.get(name)
        if info is None:
            missing.append(f"{name} is missing (expected shape {list(expected)})")
        elif info.shape != expected:
            misshaped.append(f"{name} has shape {list(info.shape)}, expected {list(expected)}")
        elif info.dtype not in reader.dtypes:
            unreadable.append(f"{name} is {info.dtype}")
    unknown = reader.tensors.keys() - names.targets.keys() - names.ignored
    extra = [
        f"{shown(name)} ({list(reader.tensors[name].shape)}) is not a tensor of this model" for name in sorted(unknown)
    ]
    if problems := missing + misshaped + extra:
        raise CheckpointError(f"{reader.path}: {_listed(problems)}")
    if unreadable:
        raise UnsupportedError(f"{reader.path}: {_listed(unreadable)}; readable: {', '.join(sorted(reader.dtypes))}")
    for path, found in sources.items():
        filled = sum(reader.tensors[source.name].shape[0] for source in found)
        whole = specs[path].checkpoint_shape
        if filled != whole[0]:
            raise CheckpointError(f"{reader.path}: {path} {list(whole)} has tensors for {filled} rows")
    return sources


def _rows_of(spec: WeightSpec, part: str | None) -> tuple[int, list[tuple[int, int, int]]]:
    """Rows of the tensor that is `part` of a weight, or all of it, and where they go: see `_Source.rows`."""
    if not spec.parts:
        rows = spec.checkpoint_shape[0]
        return rows, [(0, 0, rows)]
    pieces, first, offset = [], 0, 0
    for each in spec.parts:
        (name, rows, copies), share = each, spec.share(each)
        if part in (None, name):
            for block in range(spec.ways):
                start = block // copies * share
                if start < rows:
                    into = block * (spec.shape[0] // spec.ways) + offset
                    pieces.append((first + start, into, min(share, rows - start)))
            first += rows
        offset += share
    return first, pieces


def _listed(problems: list[str]) -> str:
    more = len(problems) - _MAX_PROBLEMS
    return "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _blocks(
    reader: TensorReader, source: _Source, region: tuple[range, ...], host: np.ndarray
) -> list[Callable[[], None]]:
    """Returns calls that each fill a part of `host`, which is a `region` of the weight, in any order or at once."""
    name, pieces, head_dim = source
    rest = [
        range(min(wanted.start, size), min(wanted.stop, size))  # beyond is padding
        for wanted, size in zip(region[1:], reader.tensors[name].shape[1:], strict=True)
    ]
    columns = math.prod(map(len, rest))
    step = max(1, _BLOCK_ELEMENTS // max(1, columns))
    if head_dim:
        step = -(-step // head_dim) * head_dim  # whole heads
    chunks = reader.chunks(name) or (step, *(max(1, len(each)) for each in rest))

    def fill(rows: range, into: int, others: tuple[range, ...]) -> None:
        block = reader.read(name, tuple(slice(each.start, each.stop) for each in (rows, *others)))
        if head_dim:
            pairs = block.reshape(-1, head_dim // 2, 2, *block.shape[1:])
            block = pairs.swapaxes(1, 2).reshape(block.shape)
        places = [
            slice(each.start - wanted.start, each.stop - wanted.start)
            for each, wanted in zip(others, region[1:], strict=True)
        ]
        host[(slice(into, into + len(rows)), *places)] = block

    calls: list[Callable[[], None]] = []
    for first, into, count in pieces:
        start, stop = max(into, region[0].start), min(into + count, region[0].stop)
        shift = first - into  # from rows of the weight to rows of the tensor
        rows = range(start + shift, max(start, stop) + shift)
        for cut in itertools.product(*map(_cuts, (rows, *rest), chunks)):
            calls.append(partial(fill, cut[0], cut[0].start - shift - region[0].start, cut[1:]))
    return calls


def _cuts(whole: range, step: int) -> list[range]:
    """The range, cut at the multiples of `step`."""
    edges = [whole.start, *range((whole.start // step + 1) * step, whole.stop, step), whole.stop]
    return [range(*pair) for pair in itertools.pairwise(edges) if pair[0] < pair[1]]


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype, alignment: int = 64) -> np.ndarray:
    """As `np.empty`, but aligned as XLA wants it, so that on the CPU the array becomes the weight without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)
