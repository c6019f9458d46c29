"""Weights from a checkpoint to their place on the devices, one at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from jaxinfer.checkpoints.reader import TensorReader, shown
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models.family import NameMap

if TYPE_CHECKING:
    from jaxinfer.models.layers import WeightSpec

type Place = Callable[[str, np.ndarray], jax.Array]  # (path, host array) -> array on its devices
type Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

# Rows are read and converted in blocks of about this: 256 KB in float32. With twice as many, temporaries come from
# fresh pages each time, and page faults cost as much as the conversion.
_BLOCK_ELEMENTS = 1 << 16
_MAX_THREADS = 8
_MAX_PROBLEMS = 8  # named in one message


class _Source(NamedTuple):
    """A tensor of the checkpoint and the rows of its weight that it fills."""

    name: str
    first_row: int
    interleaved: int | None


def load_weights(
    reader: TensorReader,
    names: NameMap,
    specs: Mapping[str, WeightSpec],
    place: Place,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
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
    weights: dict[str, jax.Array] = {}
    last: jax.Array | None = None
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for path, spec in specs.items():
            host = _empty_aligned(spec.shape, np.dtype(spec.dtype))
            blocks = [block for source in sources[path] for block in _blocks(reader, source, host)]
            for _ in pool.map(lambda block: block(), blocks):
                pass
            for source in sources[path]:
                reader.release(source.name)
            if last is not None:
                last.block_until_ready()  # else host copies pile up behind a slow transfer
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
        first_row, rows = 0, spec.shape[0]
        for part, part_rows in spec.parts:
            if part == target.part:
                rows = part_rows
                break
            first_row += part_rows if target.part else 0
        expected = (rows, *spec.shape[1:])
        sources[target.path].append(_Source(name, first_row, target.interleaved))
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
        assert filled == specs[path].shape[0], f"the name map fills {filled} rows of {path} {specs[path].shape}"
    return sources


def _listed(problems: list[str]) -> str:
    more = len(problems) - _MAX_PROBLEMS
    return "; ".join(problems[:_MAX_PROBLEMS]) + (f"; and {more} more" if more > 0 else "")


def _blocks(reader: TensorReader, source: _Source, host: np.ndarray) -> list[Callable[[], None]]:
    """Returns calls that each fill some rows of `host`; they may run in any order, or at once."""
    name, first_row, head_dim = source
    rows, *rest = reader.tensors[name].shape
    step = max(1, _BLOCK_ELEMENTS // max(1, math.prod(rest)))
    if head_dim:
        step = -(-step // head_dim) * head_dim  # whole heads

    def fill(start: int) -> None:
        block = reader.read(name, start, min(start + step, rows))
        if head_dim:
            pairs = block.reshape(-1, head_dim // 2, 2, *block.shape[1:])
            block = pairs.swapaxes(1, 2).reshape(block.shape)
        host[first_row + start : first_row + start + len(block)] = block

    return [lambda start=start: fill(start) for start in range(0, rows, step)]  # type: ignore[misc]


def _empty_aligned(shape: tuple[int, ...], dtype: np.dtype, alignment: int = 64) -> np.ndarray:
    """As `np.empty`, but aligned as XLA wants it, so that on the CPU the array becomes the weight without a copy."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    return memory[start : start + size].view(dtype).reshape(shape)
