"""Hugging Face folders: one safetensors file, or several with an index.

Format: https://huggingface.co/docs/safetensors/index#format. The header is read here rather than through the
safetensors package so that an error can say which tensor of which file it is about.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.reader import Index, MappedFile, TensorInfo, check_disjoint, read_json, shown
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.quantization.tensor import Packed, Scheme

logger = logging.getLogger(__name__)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_FLOATS = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
# What quantized weights are made of.
_DTYPES = _FLOATS | {
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MAX_DIMS = 8
_MAX_ELEMENTS = 1 << 60  # NumPy counts bytes in 63 bits, even of an array that one dimension of 0 makes empty


class _Place(NamedTuple):
    file: MappedFile
    offset: int
    size: int


class SafetensorsReader:
    """The tensors of a Hugging Face folder; a `TensorReader`.

    Raises:
      CheckpointError: no weights, a missing shard, a bad header, a truncated file, or a tensor that the index
        promises and its shard has not; the message names the file and the tensor.
    """

    dtypes = frozenset(_FLOATS)
    schemes: Mapping[str, Scheme] = {}

    def __init__(self, folder: Path):
        self.path = folder
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        if (folder / SINGLE).exists():
            self._add_file(folder / SINGLE)
            if (folder / INDEX).exists():
                self._choose(folder)
        elif (folder / INDEX).exists():
            self._add_shards(folder)
        else:
            raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}{_instead(folder)}")

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        return self.mapped(name)[index]

    def mapped(self, name: str) -> np.ndarray:
        """A view of the mapped file, in floats or not; raises UnsupportedError for a dtype that NumPy has not."""
        info, place = self.tensors[name], self._places[name]
        if info.dtype not in _DTYPES:
            raise UnsupportedError(f"{place.file.path}: tensor {shown(name)} is {info.dtype}, which is not supported")
        return place.file.array(place.offset, info.shape, _DTYPES[info.dtype])

    def file_of(self, name: str) -> Path:
        return self._places[name].file.path

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives tensors other names: old -> new."""
        self.tensors = {names.get(name, name): info for name, info in self.tensors.items()}
        self._places = {names.get(name, name): place for name, place in self._places.items()}

    def read_packed(self, name: str, rows: slice = slice(None)) -> Packed:
        raise AssertionError(f"{name} is in floats")

    def chunks(self, name: str) -> None:
        return None

    def release(self, name: str) -> None:
        place = self._places[name]
        place.file.release(place.offset, place.size)

    def _choose(self, folder: Path) -> None:
        """Of a single file and an index: the former, as transformers does, unless the latter knows more tensors."""
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or set(map(str, weight_map.values())) <= {SINGLE}:
            return
        if missing := sorted(weight_map.keys() - self.tensors.keys()):
            logger.warning("%s: %s has no %s and is not used, %s is", folder, SINGLE, shown(missing[0]), INDEX)
            self.tensors, self._places = {}, {}
            self._add_shards(folder)
        else:
            logger.warning("%s: %s is used, %s and the files it names are not", folder, SINGLE, INDEX)

    def _add_shards(self, folder: Path) -> None:
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX}: has no weight_map of names to files")
        for shard in sorted(set(weight_map.values())):
            name = shown(next(name for name, its_shard in weight_map.items() if its_shard == shard))
            if not _is_file_name(shard):
                raise CheckpointError(f"{folder / INDEX}: {shown(shard)} (for {name}) is no file name in this folder")
            if not os.path.isfile(folder / shard):
                raise CheckpointError(f"{folder / shown(shard)}: missing, though {INDEX} names it (for {name})")
            self._add_file(folder / shard)
        for name, shard in weight_map.items():
            if name not in self.tensors:
                raise CheckpointError(f"{folder / shard}: has no tensor {shown(name)}, though {INDEX} says so")

    def _add_file(self, path: Path) -> None:
        file = MappedFile(path)
        header_size = int.from_bytes(file.buffer[:8], "little")
        data_start = 8 + header_size
        if file.size < 8 or data_start > file.size:
            raise CheckpointError(f"{path}: truncated: a header of {header_size} bytes in a file of {file.size}")
        if header_size > _MAX_HEADER:
            raise CheckpointError(f"{path}: a header of {header_size} bytes, over the format's {_MAX_HEADER}")
        try:
            header = json.loads(str(file.buffer[8:data_start], "utf-8"), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a safetensors header: {shown(error)}") from error
        if not isinstance(header, dict):
            raise CheckpointError(f"{path}: not a safetensors header: no JSON object")
        header.pop("__metadata__", None)
        entries = [(name, *_entry(path, name, entry)) for name, entry in header.items()]
        check_disjoint(path, ((start, stop, name) for name, _, start, stop in entries))
        for name, info, start, stop in entries:
            if name in self.tensors:
                raise CheckpointError(f"{path}: tensor {shown(name)} is also in {self._places[name].file.path.name}")
            if data_start + stop > file.size:
                raise CheckpointError(
                    f"{path}: truncated: tensor {shown(name)} ends at byte {data_start + stop} of a file of {file.size}"
                )
            dtype = _DTYPES.get(info.dtype)
            if dtype and stop - start != math.prod(info.shape) * dtype.itemsize:
                raise CheckpointError(
                    f"{path}: tensor {shown(name)} has {stop - start} bytes, which is not {info.dtype} "
                    f"{list(info.shape)}"
                )
            self.tensors[name] = info
            self._places[name] = _Place(file, data_start + start, stop - start)


def _entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int, int]:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [start, stop]}:
            sizes = [*shape, start, stop]
            # type() rather than isinstance(): true and false are integers to Python.
            if (
                len(shape) <= _MAX_DIMS
                and all(type(n) is int and 0 <= n <= _MAX_ELEMENTS for n in sizes)
                and start <= stop
                and math.prod(n or 1 for n in shape) <= _MAX_ELEMENTS
            ):
                return TensorInfo(tuple(shape), shown(dtype)), start, stop
    raise CheckpointError(
        f"{path}: tensor {shown(name)} is described by {shown(entry)}; expected dtype, shape and data_offsets"
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        repeated = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"{repeated} is there twice")
    return unique


def _instead(folder: Path) -> str:
    """What a folder has in their place, for a message."""
    for name in (SINGLE, INDEX):
        if (folder / name).is_symlink():
            return f": {name} is a link to {shown((folder / name).readlink())}, which is not there"
    adapters = sorted(folder.glob("adapter_model.*"))
    if adapters:
        return f", but {adapters[0].name}: a LoRA adapter, which must be merged into its base model first"
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    if found:
        return f", but {shown(found[0].name)}, whose tensors have other names as a rule; save it with transformers"
    found = sorted(path for pattern in ("*.bin", "*.pth", "*.pt") for path in folder.glob(pattern) if path.is_file())
    if found:
        return f", but {shown(found[0].name)}, whose format (pickle) is not read; save it as safetensors"
    return ""


def _is_file_name(name: str) -> bool:
    """Whether a name from a checkpoint stays in the checkpoint's folder, on any system."""
    surrogates = any("\ud800" <= char <= "\udfff" for char in name)  # which no file system can write
    return name not in ("", ".", "..") and not set(name) & set("/\\:\0") and not surrogates
