"""Writes a checkpoint of any kind as an Orbax one that every mesh loads straight to its devices."""

from __future__ import annotations

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
    MANIFEST,
    PARTIAL,
    TOKENIZER,
    WEIGHTS,
    Manifest,
    Stored,
)
from jaxinfer.checkpoints.placement import Progress, Weights
from jaxinfer.checkpoints.reader import shown
from jaxinfer.errors import CheckpointError, InvalidArgumentError
from jaxinfer.models.decoder import decoder_structure

if TYPE_CHECKING:
    from jaxinfer.models.layers import WeightSpec

_LOCK = ".convert.lock"
# Of a Hugging Face folder, all that its tokenizer may be made of.
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
# A chunk is read whole, so a shard's edges should be edges of chunks: dimensions are halved until they are this small.
_CHUNK_ROWS, _CHUNK_COLUMNS = 1024, 2048
_SLAB_BYTES = 1 << 27  # written at once; each takes another entry in the store's history


def convert(
    checkpoint: Checkpoint, output: Path, *, dtype: np.dtype | None = None, progress: Progress | None = None
) -> None:
    """Writes a checkpoint's weights, config and tokenizer into a folder that `--model` takes.

    Weights are read and written a slab at a time: host memory stays near two slabs of 128 MB, or two of the largest
    array if that is smaller. The manifest gets its name last. A folder without one counts as incomplete, and
    converting into it again begins anew.

    Args:
      output: a new or empty folder, or one that an interrupted convert left.
      dtype: of all weights but norms; by default the checkpoint's own.
      progress: called as weights are written, with the bytes done and the bytes in all.

    Raises:
      InvalidArgumentError: the folder holds something else, or another convert is at work there.
      CheckpointError: the checkpoint is broken, or the folder cannot be written.
    """
    dtype = checkpoint.dtype if dtype is None else dtype
    specs = decoder_structure(checkpoint.config, dtype).specs
    arrays = {path: _arrays(path, spec) for path, spec in specs.items()}
    manifest = Manifest(
        format=FORMAT,
        source=checkpoint.source.name,
        dtype=dtype.name,  # type: ignore[arg-type]
        config=checkpoint.config,
        weights={path: tuple(array.stored for array in each) for path, each in arrays.items()},
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
    """An array to be written: some rows of a weight, read when their turn comes. Orbax sees it as a leaf."""

    path: str
    stored: Stored
    first_row: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def slabs(self, chunks: Sequence[int]) -> Iterator[range]:
        """Its rows, a number of whole chunks at a time."""
        step = max(1, _SLAB_BYTES * self.shape[0] // max(self.nbytes, 1) // chunks[0]) * chunks[0]
        return (range(start, min(start + step, self.shape[0])) for start in range(0, self.shape[0], step))

    def read(self, weights: Weights, rows: range) -> np.ndarray:
        of_weight = slice(self.first_row + rows.start, self.first_row + rows.stop)
        return weights.read(self.path, (of_weight, *(slice(size) for size in self.shape[1:])))


def _arrays(path: str, spec: WeightSpec) -> list[_Array]:
    dtype = np.dtype(spec.dtype)
    if not spec.parts:
        return [_Array(path, Stored(array=path), 0, spec.shape, dtype)]
    arrays, first = [], 0
    for part in spec.parts:
        stored = Stored(array=f"{path}.{part.name}", part=part.name)
        arrays.append(_Array(path, stored, first, (part.rows, *spec.shape[1:]), dtype))
        first += part.rows
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
        for array, info in zip(values, infos, strict=True):
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
            spec["metadata"]["chunks"] = chunks = _chunks(array.shape)
            store = await tensorstore.open(spec, create=True, open=True, context=info.ts_context)
            for rows in array.slabs(chunks):
                slab = array.read(self._weights, rows)
                await store[rows.start : rows.stop].write(slab, can_reference_source_data_indefinitely=True)
                self._wrote(slab.nbytes)
            self._weights.release(array.path)
        return []


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
