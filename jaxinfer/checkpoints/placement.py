"""Weights from a checkpoint to their places on the devices, a shard at a time."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Sharding

from jaxinfer.checkpoints.reader import Index, TensorReader, shown
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models.family import NameMap
from jaxinfer.quantization.tensor import Packed, QuantizedWeight, Scheme, laid_out, np_dtype, quantize

if TYPE_CHECKING:
    from jaxinfer.models.layers import WeightSpec

type Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

# Rows are read and converted in blocks of about this: 256 KB in float32. With twice as many, temporaries come from
# fresh pages each time, and page faults cost as much as the conversion.
_BLOCK_ELEMENTS = 1 << 16
_PACKED_ELEMENTS = 1 << 20  # of a quantized weight at a time
_MAX_THREADS = 8
_MAX_PROBLEMS = 8  # named in one message


class _Source(NamedTuple):
    """Rows of a checkpoint's tensor, and the rows of its weight that they fill.

    Attributes:
      rows: (first row in the tensor, first row in the weight, number of rows), in pieces that lie together.
      interleaved: as `Target` has it.
      rounded: as `Weights` has it.
    """

    name: str
    rows: list[tuple[int, int, int]]
    interleaved: int | None
    rounded: Scheme | None = None


class Weights:
    """A model's weights as a checkpoint holds them, put together a slice at a time, in their own dtype.

    Args:
      rounded: schemes of matrices that are declared in floats and yet have the numbers of quantized ones; by path, or
        path and part.

    Raises:
      CheckpointError: tensors are missing, not known to the model, or wrongly shaped; found before any is read.
      UnsupportedError: a tensor's dtype is not read here.
    """

    def __init__(
        self,
        reader: TensorReader,
        names: NameMap,
        specs: Mapping[str, WeightSpec],
        rounded: Mapping[str, Scheme] | None = None,
    ):
        self.specs = specs
        self._reader = reader
        self._sources = _match(reader, names, specs, rounded or {})
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown()

    def read(self, path: str, index: Index, piece: int = 0) -> np.ndarray:
        """Returns `weight[index]`, which is the caller's to keep; on the CPU `jax.device_put` takes it without a copy.

        Args:
          index: of every dimension of the weight, as its spec shapes it: padding and copies included.
          piece: which of `WeightSpec.pieces`; it is in floats.
        """
        spec = self.specs[path].pieces[piece]
        region = tuple(range(*part.indices(size)) for part, size in zip(index, spec.shape, strict=True))
        host = _empty_aligned(tuple(map(len, region)), np.dtype(spec.dtype))
        if spec.shape != spec.checkpoint_shape or len(spec.shape) == 1:
            host[...] = 0  # what is padded, and biases that are not there
        blocks = [
            block for source in self._sources[path][piece] for block in _blocks(self._reader, source, region, host)
        ]
        self._run(blocks)
        return host

    def read_quantized(self, path: str, piece: int = 0) -> QuantizedWeight:
        """Returns a piece that is quantized, whole and laid out as devices have it; raises as `read_packed`."""
        rows, inputs = self.specs[path].pieces[piece].shape
        return laid_out(self.read_packed(path, range(rows), piece), inputs)

    def read_packed(self, path: str, rows: range, piece: int = 0) -> Packed:
        """Returns rows of a piece that is quantized, in the model's order.

        Raises:
          CheckpointError: numbers that are not finite, or otherwise mean none; the message names the tensor.
        """
        spec, sources = self.specs[path].pieces[piece], self._sources[path][piece]
        scheme = spec.scheme
        assert scheme is not None
        inputs = spec.checkpoint_shape[1]
        groups = 1 if scheme.group is None else -(-inputs // scheme.group)
        heads = max(source.interleaved or 1 for source in sources)
        region = range(rows.start // heads * heads, -(-rows.stop // heads) * heads)  # whole ones

        def by_group(dtype: str) -> np.ndarray:
            return np.zeros((len(region), groups), np_dtype(dtype))

        whole = Packed(
            scheme,
            np.zeros((len(region), inputs), np.int8 if "int" in scheme.values else np_dtype(scheme.values)),
            by_group(scheme.scales),
            by_group("int8") if scheme.offset == "zeros" else None,
            by_group(scheme.scales) if scheme.offset == "minima" else None,
            np.zeros(inputs, np.int32) if scheme.reordered else None,
        )
        self._run([block for source in sources for block in _packed_blocks(self._reader, source, region, whole)])
        wanted = slice(rows.start - region.start, rows.stop - region.start)
        by_row = [None if array is None else array[wanted] for array in whole[1:5]]
        return Packed(scheme, *by_row, whole.order_I)  # type: ignore[arg-type, call-arg]

    def _run(self, calls: list[Callable[[], None]]) -> None:
        for _ in self._threads.map(lambda call: call(), calls):
            pass

    def release(self, path: str) -> None:
        """Lets the system drop what was read of a weight from memory."""
        for source in itertools.chain(*self._sources[path]):
            self._reader.release(source.name)


def load_weights(
    weights: Weights, shardings: Mapping[str, Sequence[Any]], progress: Progress | None = None
) -> dict[str, list[Any]]:
    """Loads every weight straight to its devices; returns by path what `linear` takes, one for each of `shardings`.

    A shard is put together in host memory, sent to the devices that hold it, and forgotten before the next: a device
    never holds more of a weight than its own part, and host memory stays near the largest shard (two, while a
    transfer is under way); of a quantized weight, near the whole of it. Only this process's devices are sent anything.

    Args:
      shardings: of every weight: one for each replica, and for each stage that has it; each a pytree with a
        `Sharding` for each array of `WeightSpec.arrays`.
      progress: called as weights are placed, with the bytes done and the bytes in all.
    """
    done, total = 0, sum(spec.nbytes for spec in weights.specs.values())
    loaded: dict[str, list[Any]] = {}
    for path, spec in weights.specs.items():
        structure = jax.tree.structure(spec.arrays)
        homes = [jax.tree.leaves(each) for each in shardings[path]]
        placed: list[list[jax.Array]] = [[] for _ in homes]
        for number, piece in enumerate(spec.pieces):
            if piece.scheme is None:
                reads = [partial(weights.read, path, piece=number)]
            else:
                host = jax.tree.leaves(weights.read_quantized(path, number))
                reads = [array.__getitem__ for array in host]
            first = len(placed[0])
            for which, (array, read) in enumerate(zip(jax.tree.leaves(piece.arrays), reads, strict=True), first):
                arrays = _placed(array.shape, read, [home[which] for home in homes])
                for ours, each in zip(placed, arrays, strict=True):
                    ours.append(each)
        weights.release(path)
        loaded[path] = [jax.tree.unflatten(structure, arrays) for arrays in placed]
        done += spec.nbytes
        if progress:
            progress(done, total)
    return loaded


def _placed(
    shape: tuple[int, ...], read: Callable[[Index], np.ndarray], shardings: Sequence[Sharding]
) -> list[jax.Array]:
    """An array on its devices, once for each sharding; `read` gives a slice of it."""
    holders: dict[tuple[tuple[int, int, int], ...], list[jax.Device]] = {}
    for sharding in shardings:
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None
            ranges = tuple(part.indices(size) for part, size in zip(index, shape, strict=True))
            holders.setdefault(ranges, []).append(device)
    shards: dict[jax.Device, jax.Array] = {}
    last: list[jax.Array] = []
    for ranges, devices in holders.items():
        host = read(tuple(slice(*each) for each in ranges))
        jax.block_until_ready(last)  # else host copies pile up behind a slow transfer
        last = [jax.device_put(host, device) for device in devices]
        shards |= zip(devices, last, strict=True)
    return [
        jax.make_array_from_single_device_arrays(
            shape, sharding, [shards[d] for d in sharding.addressable_devices_indices_map(shape)]
        )
        for sharding in shardings
    ]


def _match(
    reader: TensorReader, names: NameMap, specs: Mapping[str, WeightSpec], rounded: Mapping[str, Scheme]
) -> dict[str, list[list[_Source]]]:
    """Finds the tensors of each piece of each weight, and every fault that can be found without reading one."""
    sources: dict[str, list[list[_Source]]] = {path: [[] for _ in spec.pieces] for path, spec in specs.items()}
    missing, misshaped, unreadable = [], [], []
    for name, target in names.targets.items():
        if target.path not in specs:
            misshaped.append(f"{shown(name)} is of {shown(target.path)}, which is no weight of this model")
            continue
        spec = specs[target.path]
        if name in names.zeros:
            continue
        rows = 0
        for piece, its_sources in zip(spec.pieces, sources[target.path], strict=True):
            its_rows, pieces = _rows_of(piece, target.part)
            if pieces:
                pieces = [(first + rows, into, count) for first, into, count in pieces]
                its_sources.append(_Source(name, pieces, target.interleaved, rounded.get(target.key)))
            rows += its_rows
        expected = (rows, *spec.checkpoint_shape[1:])
        info = reader.tensors.get(name)
        if info is None:
            tied = ", and tie_word_embeddings is not set" if target.path == "head" else ""
            missing.append(f"{name} is missing (expected shape {list(expected)}){tied}")
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
    incomplete = {names.targets[name].path for name in names.zeros}
    for path, found in sources.items():
        filled = sum(reader.tensors[source.name].shape[0] for source in itertools.chain(*found))
        whole = specs[path].checkpoint_shape
        if filled != whole[0] and path not in incomplete:
            raise CheckpointError(f"{reader.path}: {path} {list(whole)} has tensors for {filled} rows")
    return sources


def _rows_of(spec: WeightSpec, part: str | None) -> tuple[int, list[tuple[int, int, int]]]:
    """Rows of the tensor that is `part` of a weight, or all of it, and where they go: see `_Source.rows`."""
    if not spec.parts:
        rows = spec.checkpoint_shape[0]
        return rows, [(0, 0, rows)]
    pieces, first, offset = [], 0, 0
    for each in spec.parts:
        (name, rows, copies, _), share = each, spec.share(each)
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
    name, pieces, head_dim, rounded = source
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
        index = tuple(slice(each.start, each.stop) for each in (rows, *others))
        if rounded is None:
            block = reader.read(name, index)
        else:
            block = _packed(reader, name, index[0], rounded).dequantize()[:, *index[1:]]
        block = _in_order(block, head_dim)
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


def _in_order(rows: np.ndarray, head_dim: int | None) -> np.ndarray:
    """Rows of whole heads, out of interleaved rope order if they have a `head_dim`."""
    if head_dim is None:
        return rows
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _packed(reader: TensorReader, name: str, rows: slice, scheme: Scheme) -> Packed:
    """Rows of a tensor in a scheme: those of the file where it has them so, else rounded anew."""
    try:
        theirs = reader.schemes.get(name)
        if theirs is not None and scheme.is_from(theirs):
            packed = reader.read_packed(name, rows)
            return packed.regrouped(scheme.group) if scheme.group else packed
        return quantize(reader.read(name, (rows,)).astype(np.float32), scheme)
    except ValueError as error:
        raise CheckpointError(f"{reader.path}: {shown(name)}: {error}") from error


def _packed_blocks(reader: TensorReader, source: _Source, region: range, whole: Packed) -> list[Callable[[], None]]:
    """Returns calls that each fill some rows of `whole`, which is a region of a quantized weight, in any order or at
    once."""
    name, pieces, head_dim, _ = source
    step = max(1, _PACKED_ELEMENTS // whole.values_OI.shape[1])
    step = -(-step // (head_dim or 1)) * (head_dim or 1)  # whole heads

    def fill(rows: range, into: int) -> None:
        packed = _packed(reader, name, slice(rows.start, rows.stop), whole.scheme)
        for ours, theirs in zip(whole[1:5], packed[1:5], strict=True):
            if ours is not None:
                assert theirs is not None
                ours[into : into + len(rows)] = _in_order(theirs, head_dim)
        if whole.order_I is not None:
            whole.order_I[...] = packed.order_I

    calls: list[Callable[[], None]] = []
    for first, into, count in pieces:
        start, stop = max(into, region.start), min(into + count, region.stop)
        shift = first - into  # from rows of the weight to rows of the tensor
        for rows in _cuts(range(start + shift, max(start, stop) + shift), step):
            calls.append(partial(fill, rows, rows.start - shift - region.start))
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
