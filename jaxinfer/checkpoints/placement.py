"""Weights from a checkpoint to their place on the devices, one at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxinfer.checkpoints.reader import TensorReader, shown
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models.family import NameMap

if TYPE_CHECKING:
    from jaxinfer.models.layers import WeightSpec

type Place = Callable[[str, np.ndarray], Any]  # (path, host array) -> array, or arrays, on their devices
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


def load_weights(
    reader: TensorReader,
    names: NameMap,
    specs: Mapping[str, WeightSpec],
    place: Place,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Loads every weight of `specs` and returns them by path.

    Each weight is put together in host memory in its own dtype, handed to `place`, and forgotten before the next:
    beyond what `place` keeps, memory stays near the largest weight (two, while a transfer is under way). The array
    given to `place` is its to keep; on the CPU `jax.device_put` takes it without a copy.

    Args:
      progress: called as weights are placed, with the bytes done and the bytes in all.

    Raises:
      CheckpointError: tensors are missing, not known to the model, or wrongly shaped; found before any is read.
      UnsupportedError: a tensor's dtype is not read here.
    """
    sources = _match(reader, names, specs)
    total = sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in specs.values())
    done = 0
    weights: dict[str, Any] = {}
    last: Any = None
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for path, spec in specs.items():
            host = _empty_aligned(spec.shape, np.dtype(spec.dtype))
            if spec.shape != spec.checkpoint_shape:
                host[...] = 0  # what is padded
            blocks = [block for source in sources[path] for block in _blocks(reader, source, host)]
            for _ in pool.map(lambda block: block(), blocks):
                pass
            for source in sources[path]:
                reader.release(source.name)
            if last is not None:
                jax.block_until_ready(last)  # else host copies pile up behind a slow transfer
            weights[path] = last = place(path, host)
            done += host.nbytes
            if progress:
                progress(done, total)
    return weights


def _match(reader: TensorReader, names: NameMap, specs: Mapping[str, WeightSpec]) -> dict[str, list[_Source]]:
    """Finds the tensors of each weight, and every fault that can be found without reading one."""
    sources: dict[str, list[_Source]] = {path: [] for path in specs}
    missing, misshaped, unreadable = [], [], []
    for name, target in names.targets.items():
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
        assert filled == whole[0], f"the name map fills {filled} rows of {path} {whole}"
    return sources


def _rows_of(spec: WeightSpec, part: str | None) -> tuple[int, list[tuple[int, int, int]]]:
    """Rows of the tensor that is `part` of a weight, or all of it, and where they go: see `_Source.rows`."""
    if not spec.parts:
        rows = spec.checkpoint_shape[0]
        return rows, [(0, 0, rows)]
    pieces, first, offset = [], 0, 0
    for name, rows, copies in spec.parts:
        share = -(-rows * copies // spec.ways)  # of a block
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


def _blocks(reader: TensorReader, source: _Source, host: np.ndarray) -> list[Callable[[], None]]:
    """Returns calls that each fill some rows of `host`; they may run in any order, or at once."""
    name, pieces, head_dim = source
    rest = reader.tensors[name].shape[1:]
    step = max(1, _BLOCK_ELEMENTS // max(1, math.prod(rest)))
    if head_dim:
        step = -(-step // head_dim) * head_dim  # whole heads

    def fill(start: int, into: int, rows: int) -> None:
        block = reader.read(name, start, start + rows)
        if head_dim:
            pairs = block.reshape(-1, head_dim // 2, 2, *block.shape[1:])
            block = pairs.swapaxes(1, 2).reshape(block.shape)
        host[(slice(into, into + rows), *map(slice, rest))] = block

    return [
        partial(fill, first + done, into + done, min(step, rows - done))
        for first, into, rows in pieces
        for done in range(0, rows, step)
    ]


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype, alignment: int = 64) -> np.ndarray:
    """As `np.empty`, but aligned as XLA wants it, so that on the CPU the array becomes the weight without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)
