"""Writes a checkpoint of any kind as an Orbax one that every mesh loads straight to its devices."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import filelock
import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from orbax.checkpoint import type_handlers

from jaxinfer.checkpoints.checkpoint import Checkpoint
from jaxinfer.checkpoints.manifest import (
    FORMAT,
    GGUF_TOKENIZER,
    HOLDS,
    TOKENIZER,
    WEIGHTS,
    Manifest,
    Stored,
    stored_as,
)
from jaxinfer.checkpoints.placement import Progress, Weights
from jaxinfer.checkpoints.reader import shown
from jaxinfer.checkpoints.source import MANIFEST, PARTIAL
from jaxinfer.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from jaxinfer.models.decoder import decoder_structure
from jaxinfer.quantization.packing import paired
from jaxinfer.quantization.tensor import Scheme

if TYPE_CHECKING:
    from jaxinfer.models.layers import WeightSpec

_LOCK = ".convert.lock"
# Of a Hugging Face folder, all that its tokenizer may be made of.
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# A chunk is read whole, so a shard's edges should be edges of chunks: dimensions are halved until they are this small.
_CHUNK_ROWS, _CHUNK_COLUMNS = 1024, 2048
_SLAB_BYTES = 1 << 27  # read at once
_TOGETHER_BYTES = 1 << 24  # of small arrays, written together


def convert(
    checkpoint: Checkpoint, output: Path, *, dtype: np.dtype | None = None, progress: Progress | None = None
) -> None:
    """Writes a checkpoint's weights, config and tokenizer into a folder that `--model` takes.

    What is quantized stays so.

    Weights are read and written a slab at a time: host memory stays near two slabs of 128 MB, or two of the largest
    array if that is smaller, and 16 MB of small ones. The manifest gets its name last. A folder without one counts as
    incomplete, and converting into it again begins anew.

    Args:
      output: a new or empty folder, or one that an interrupted convert left.
      dtype: of all weights in floats but norms; by default the checkpoint's own.
      progress: called as weights are written, with the bytes done and the bytes in all.

    Raises:
      InvalidArgumentError: the folder holds something else, or another convert is at work there.
      CheckpointError: the checkpoint is broken, or the folder cannot be written.
      UnsupportedError: 4-bit values of a matrix with an odd number of inputs.
    """
    dtype = checkpoint.dtype if dtype is None else dtype
    schemes = checkpoint.schemes
    specs = decoder_structure(checkpoint.config, dtype, schemes=schemes).specs
    arrays = {path: _arrays(path, spec) for path, spec in specs.items()}
    manifest = Manifest(
        format=FORMAT,
        source=checkpoint.source.name,
        dtype=dtype.name,  # type: ignore[arg-type]
        config=checkpoint.config,
        weights={path: tuple(array.stored for array in each) for path, each in arrays.items()},
        schemes=schemes,
    )
    with checkpoint.weights(specs) as weights, _written(output):
        _write(output / PARTIAL, manifest.to_json())
        _write_tokenizer(checkpoint, output / TOKENIZER)
        _write_weights(weights, [array for each in arrays.values() for array in each], output / WEIGHTS, progress)
        os.replace(output / PARTIAL, output / MANIFEST)
        _sync(output)


@contextmanager
def _written(output: Path) -> Iterator[None]:
    """The folder, emptied of what an interrupted convert left, and no other process's meanwhile."""
    _check_free(output)
    try:
        output.mkdir(parents=True, exist_ok=True)
        (output / PARTIAL).touch()  # from here on it counts as incomplete
        with filelock.FileLock(output / _LOCK, timeout=0):
            _check_free(output)
            for left in (output / TOKENIZER, output / WEIGHTS, *output.glob(f"{WEIGHTS}.orbax-checkpoint-tmp*")):
                shutil.rmtree(left, ignore_errors=not left.exists())
            yield
            with suppress(OSError):  # some systems keep a file that is open
                (output / _LOCK).unlink()
    except filelock.Timeout:
        raise InvalidArgumentError("output", str(output), "a folder that no other convert is writing to") from None
    # TensorStore raises ValueError for whatever the file system answers.
    except (OSError, ValueError) as error:
        if isinstance(error, InvalidArgumentError):
            raise
        said = shown(str(error).split(" [tensorstore_spec")[0])
        raise CheckpointError(f"{output}: could not be written: {said}; convert into it again to begin anew") from error


def _check_free(output: Path) -> None:
    if not output.is_dir():
        if output.exists():
            raise InvalidArgumentError("output", str(output), "a folder")
        return
    found = {entry.name for entry in output.iterdir()}
    if MANIFEST in found:
        raise InvalidArgumentError("output", str(output), "a folder without a checkpoint; this one has a whole one")
    if found and PARTIAL not in found:
        raise InvalidArgumentError(
            "output", str(output), "a new or empty folder, or what an interrupted convert left; this one has files"
        )


@dataclass(frozen=True, slots=True)
class _Array:
    """An array to be written: some rows of a weight, read when their turn comes. Orbax sees it as a leaf.

    Attributes:
      piece: of the weight, and the row in it that is the array's first.
    """

    path: str
    stored: Stored
    piece: int
    first_row: int
    shape: tuple[int, ...]
    dtype: np.dtype
    scheme: Scheme | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def read(self, weights: Weights, rows: range) -> dict[str, np.ndarray]:
        """Rows of this array and of those beside it, if they make up a quantized matrix, by what they hold."""
        of_piece = range(self.first_row + rows.start, self.first_row + rows.stop)
        if self.scheme is None:
            index = (slice(of_piece.start, of_piece.stop), *(slice(size) for size in self.shape[1:]))
            return {"values": weights.read(self.path, index, self.piece)}
        packed = weights.read_packed(self.path, of_piece, self.piece)
        values = packed.values_OI if packed.scheme.bits == 8 else paired(packed.values_OI)
        held = dict(zip(HOLDS, (values, *packed[2:]), strict=True))
        return {holds: array for holds, array in held.items() if array is not None}


def _arrays(path: str, spec: WeightSpec) -> list[_Array]:
    arrays, first = [], 0
    pieces = spec.pieces
    for number, key in enumerate(spec.keys(path)):
        part = spec.parts[number] if spec.parts else None
        shape = spec.shape if part is None else (part.rows, *spec.shape[1:])
        piece, row = (number, 0) if len(pieces) > 1 else (0, first)
        scheme = pieces[piece].scheme
        if scheme is None:
            held = {key: ("values", shape, np.dtype(spec.dtype))}
        else:
            if scheme.bits == 4 and shape[1] % 2:
                raise UnsupportedError(f"{key}: 4-bit values of {shape[1]} inputs are not supported: no even number")
            outputs, inputs = shape
            held = {f"{key}.{holds}": (holds, *each) for holds, each in stored_as(scheme, outputs, inputs).items()}
        for name, (holds, its_shape, dtype) in held.items():
            stored = Stored(array=name, part=None if part is None else part.name, holds=holds)
            arrays.append(_Array(path, stored, piece, row, its_shape, dtype, scheme))
        first += shape[0]
    return arrays


def _write_weights(weights: Weights, arrays: Sequence[_Array], folder: Path, progress: Progress | None) -> None:
    tree: dict[str, Any] = {}
    for array in arrays:
        *parents, name = array.stored.array.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = array
    done, total = 0, sum(array.nbytes for array in arrays)

    def wrote(size: int) -> None:
        nonlocal done
        done += size
        if progress:
            progress(done, total)

    # Not compressed: reading is twice as fast so, for a third more bytes.
    registry = type_handlers.create_type_handler_registry(
        (_Array, _StreamedArrays(weights, wrote)), (jax.Array, type_handlers.ArrayHandler())
    )
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_compression=False, use_zarr3=False)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(folder.absolute(), args=ocp.args.PyTreeSave(tree))


class _StreamedArrays(type_handlers.NumpyHandler):
    """Orbax's own format for arrays, but read one slab after another, and in chunks of our choice."""

    def __init__(self, weights: Weights, wrote: Callable[[int], None]):
        super().__init__()
        self._weights = weights
        self._wrote = wrote

    async def serialize(self, values: Sequence[_Array], infos: Sequence[Any], args: Any = None) -> list[Any]:
        # Together, since what is awaited alone is a step in the store's history, which slows down all that follow.
        stores = await asyncio.gather(*(_store(array, info) for array, info in zip(values, infos, strict=True)))
        writes: list[Any] = []
        waiting = 0
        # Arrays of a quantized matrix lie side by side in Orbax's order, and are read together.
        for _, each in itertools.groupby(
            zip(values, stores, strict=True), key=lambda pair: (pair[0].path, pair[0].stored.part)
        ):
            for store, data in self._slabs(list(each)):
                writes.append(store.write(data, can_reference_source_data_indefinitely=True))
                waiting += data.nbytes
                self._wrote(data.nbytes)
                if waiting > _TOGETHER_BYTES:
                    await asyncio.gather(*writes)
                    writes, waiting = [], 0
        await asyncio.gather(*writes)
        return []

    def _slabs(self, group: Sequence[tuple[_Array, Any]]) -> Iterator[tuple[Any, np.ndarray]]:
        """The arrays of a weight or part, some rows at a time: where they go, and what they hold."""
        array, _ = group[0]
        by_row = [array for array, _ in group if array.stored.holds != "order"]
        # Values of 4 bits are read one to a byte.
        size = sum(array.nbytes for array in by_row) * (1 if array.scheme is None else 2)
        for rows in _row_slabs(by_row[0].shape[0], size, _chunks(by_row[0].shape)[0]):
            held = array.read(self._weights, rows)
            for each, store in group:
                if each.stored.holds != "order":
                    yield store[rows.start : rows.stop], held[each.stored.holds]
                elif rows.start == 0:
                    yield store, held["order"]
        self._weights.release(array.path)


async def _store(array: _Array, info: Any) -> Any:
    await info.await_path_creation()
    spec = type_handlers.get_json_tspec_write(
        info,
        use_ocdbt=True,
        global_shape=array.shape,
        local_shape=array.shape,
        dtype=array.dtype,
        process_index=0,
    )
    spec["dtype"] = array.dtype.name  # early 0.12 leaves it out
    spec["metadata"]["chunks"] = _chunks(array.shape)
    return await tensorstore.open(spec, create=True, open=True, context=info.ts_context)


def _row_slabs(rows: int, size: int, chunk: int) -> Iterator[range]:
    """Rows, a number of whole chunks at a time; `size` is that of all of them in bytes."""
    step = max(1, _SLAB_BYTES * rows // max(size, 1) // chunk) * chunk
    return (range(start, min(start + step, rows)) for start in range(0, rows, step))


def _chunks(shape: tuple[int, ...]) -> list[int]:
    if len(shape) < 2:
        return list(shape)
    most = [1] * (len(shape) - 2) + [_CHUNK_ROWS, _CHUNK_COLUMNS]
    return [_halved(size, limit) for size, limit in zip(shape, most, strict=True)]


def _halved(size: int, limit: int) -> int:
    """The size, halved until it is at most the limit; the limit itself where halves would not be whole."""
    while size > limit and size % 2 == 0:
        size //= 2
    return min(size, limit)


def _write_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    folder.mkdir()
    if checkpoint.tokenizer_metadata is not None:
        said = {key: value for key, value in checkpoint.tokenizer_metadata.items() if key.startswith("tokenizer.")}
        _write(folder / GGUF_TOKENIZER, json.dumps(said))
        return
    assert checkpoint.folder is not None
    for file in sorted({file for pattern in _TOKENIZER_FILES for file in checkpoint.folder.glob(pattern)}):
        if file.is_file() and not file.name.endswith(".index.json"):
            shutil.copyfile(file, folder / file.name)
            _sync(folder / file.name)
    _sync(folder)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    _sync(path)


def _sync(path: Path) -> None:
    """Waits until a file, or a folder's list of files, is on disk."""
    if os.name == "nt" and path.is_dir():  # where a folder cannot be opened
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
