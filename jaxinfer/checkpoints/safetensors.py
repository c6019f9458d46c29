"""Hugging Face folders: one safetensors file, or several with an index.

Format: https://huggingface.co/docs/safetensors/index#format. The header is read here rather than through the
safetensors package so that an error can say which tensor of which file it is about.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.reader import MappedFile, TensorInfo
from jaxinfer.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


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

    dtypes = frozenset(_DTYPES)

    def __init__(self, folder: Path):
        self.path = folder
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        if (folder / SINGLE).exists():
            self._add_file(folder / SINGLE)
        elif (folder / INDEX).exists():
            self._add_shards(folder)
        else:
            raise CheckpointError(f"{folder}: has neither {SINGLE} nor {INDEX}")

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        info, place = self.tensors[name], self._places[name]
        return place.file.array(place.offset, info.shape, _DTYPES[info.dtype])[start:stop]

    def release(self, name: str) -> None:
        place = self._places[name]
        place.file.release(place.offset, place.size)

    def _add_shards(self, folder: Path) -> None:
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise CheckpointError(f"{folder / INDEX}: has no weight_map of names to files")
        for shard in sorted(set(weight_map.values())):
            if not (folder / shard).is_file():
                name = next(name for name, its_shard in weight_map.items() if its_shard == shard)
                raise CheckpointError(f"{folder / shard}: missing, though {INDEX} names it (for {name})")
            self._add_file(folder / shard)
        for name, shard in weight_map.items():
            if name not in self.tensors:
                raise CheckpointError(f"{folder / shard}: has no tensor {name}, though {INDEX} says so")

    def _add_file(self, path: Path) -> None:
        file = MappedFile(path)
        header_size = int.from_bytes(file.buffer[:8], "little")
        data_start = 8 + header_size
        if file.size < 8 or data_start > file.size:
            raise CheckpointError(f"{path}: truncated: a header of {header_size} bytes in a file of {file.size}")
        try:
            header = json.loads(bytes(file.buffer[8:data_start]))
            entries = [(name, _entry(entry)) for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(f"{path}: not a safetensors header: {error!r}") from error
        for name, (info, start, stop) in entries:
            if name in self.tensors:
                raise CheckpointError(f"{path}: tensor {name} is also in {self._places[name].file.path.name}")
            if data_start + stop > file.size:
                raise CheckpointError(
                    f"{path}: truncated: tensor {name} ends at byte {data_start + stop} of a file of {file.size}"
                )
            dtype = _DTYPES.get(info.dtype)
            if start > stop or (dtype and stop - start != math.prod(info.shape) * dtype.itemsize):
                raise CheckpointError(
                    f"{path}: tensor {name} has {stop - start} bytes, which is not {info.dtype} {list(info.shape)}"
                )
            self.tensors[name] = info
            self._places[name] = _Place(file, data_start + start, stop - start)


def _entry(entry: dict[str, Any]) -> tuple[TensorInfo, int, int]:
    start, stop = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(not isinstance(n, int) or n < 0 for n in (*shape, start, stop)):
        raise ValueError(f"negative or fractional sizes in {entry}")
    return TensorInfo(shape, str(entry["dtype"])), start, stop


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      CheckpointError: the file is missing, or holds no JSON object; the message names it.
    """
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return value
