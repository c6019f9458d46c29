"""GGUF files: metadata and tensors, unpacked a few rows at a time.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Sizes of blocks come from the gguf package. Its
GGUFReader is not used: it makes an array object of every string of a vocabulary, which takes seconds (4.7 s for
49,152 tokens, where the parser below takes a tenth of one), and does not check that tensors lie within the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxinfer.checkpoints.reader import Index, MappedFile, TensorInfo, check_disjoint, shown
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.quantization.gguf_blocks import SCHEMES, unpack
from jaxinfer.quantization.tensor import Packed, Scheme

_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

# Value types of metadata, by their number in the file: scalars as struct codes, then the two others.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
# Of all metadata together, several times what the largest vocabularies need: each becomes an object of Python's.
_MAX_VALUES = 1 << 23


class _Place(NamedTuple):
    offset: int
    size: int


class GGUFReader:
    """A GGUF file's metadata and tensors; a `TensorReader`. Shapes are in row-major order, [out, in].

    Attributes:
      metadata: every key of the file, as plain Python values.

    Raises:
      CheckpointError: not a GGUF file, or one that ends too early; the message names the file and the tensor.
      UnsupportedError: a version or byte order of the format that is not read here.
    """

    dtypes = frozenset((*_FLOATS, *SCHEMES))

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._places: dict[str, _Place] = {}
        self._file = MappedFile(path)
        if self._file.buffer[:4] != b"GGUF":
            raise CheckpointError(f"{path}: not a GGUF file")
        try:
            self._read_header()
        except (struct.error, IndexError) as error:
            raise CheckpointError(f"{path}: truncated within its header") from error
        except (ValueError, RecursionError) as error:
            raise CheckpointError(f"{path}: bad GGUF header: {shown(error)}") from error
        self.schemes: Mapping[str, Scheme] = {
            name: SCHEMES[info.dtype]
            for name, info in self.tensors.items()
            if info.dtype in SCHEMES and len(info.shape) == 2
        }
        check_disjoint(
            path,
            ((place.offset, place.offset + place.size, name) for name, place in self._places.items()),
        )

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        info, place = self.tensors[name], self._places[name]
        if info.dtype in _FLOATS:
            return self._file.array(place.offset, info.shape, _FLOATS[info.dtype])[index]
        elements, _ = GGML_QUANT_SIZES[GGMLQuantizationType[info.dtype]]
        outer, columns = info.shape[:-1], info.shape[-1]
        start, stop, _ = index[len(outer)].indices(columns) if len(index) > len(outer) else (0, columns, 1)
        first, end = start // elements, -(-stop // elements)  # whole blocks
        where: tuple[Any, ...] = (*index[: len(outer)], ..., slice(first, end), slice(None))
        blocks = self._blocks(name)[where]
        floats = unpack(blocks.reshape(-1, *blocks.shape[-2:]), info.dtype).dequantize()
        return floats[:, start - first * elements : stop - first * elements].reshape(*blocks.shape[:-2], stop - start)

    def read_packed(self, name: str, rows: slice = slice(None)) -> Packed:
        return unpack(self._blocks(name)[rows], self.tensors[name].dtype).check(f"{self.path}: {shown(name)}")

    def _blocks(self, name: str) -> np.ndarray:
        """Bytes of a quantized tensor: [..., blocks of a row, bytes of a block]."""
        info = self.tensors[name]
        elements, size = GGML_QUANT_SIZES[GGMLQuantizationType[info.dtype]]
        shape = (*info.shape[:-1], info.shape[-1] // elements, size)
        return self._file.array(self._places[name].offset, shape, np.dtype(np.uint8))

    def chunks(self, name: str) -> None:
        return None

    def release(self, name: str) -> None:
        place = self._places[name]
        self._file.release(place.offset, place.size)

    def _read_header(self) -> None:
        cursor = _Cursor(self._file.buffer, offset=4)
        version = cursor.scalar("I")
        if version & 0xFFFF == 0:
            raise UnsupportedError(f"{self.path}: a big-endian GGUF file is not supported")
        if version not in (2, 3):
            raise UnsupportedError(f"{self.path}: GGUF version {version} is not supported; known: 2, 3")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        for _ in range(num_keys):
            key = cursor.string()
            if key in self.metadata:
                raise ValueError(f"key {key} is there twice")
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        entries = []
        for _ in range(num_tensors):
            name = cursor.string()
            num_dims = cursor.scalar("I")
            if num_dims > _MAX_DIMS:
                raise ValueError(f"tensor {name} has {num_dims} dimensions")
            shape = tuple(reversed([cursor.scalar("Q") for _ in range(num_dims)]))
            entries.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or isinstance(alignment, bool) or alignment < 1:
            raise ValueError(f"general.alignment = {alignment!r}")
        data_start = -(-cursor.offset // alignment) * alignment
        for name, shape, type_number, offset in entries:
            if offset % alignment:
                raise ValueError(f"tensor {name} is not aligned: its offset {offset} is no multiple of {alignment}")
            self._add_tensor(name, shape, type_number, data_start + offset)

    def _add_tensor(self, name: str, shape: tuple[int, ...], type_number: int, offset: int) -> None:
        if name in self.tensors:
            raise CheckpointError(f"{self.path}: tensor {shown(name)} is there twice")
        try:
            ggml_type = GGMLQuantizationType(type_number)
        except ValueError:
            # Newer than the gguf package: named so that it can be refused if the model needs it.
            self.tensors[name] = TensorInfo(shape, f"ggml type {type_number}")
            self._places[name] = _Place(offset, 0)
            return
        block_elements, block_bytes = GGML_QUANT_SIZES[ggml_type]
        if 0 in shape or not shape or shape[-1] % block_elements:
            raise CheckpointError(
                f"{self.path}: tensor {shown(name)} has shape {list(shape)}, but {ggml_type.name} needs rows of a "
                f"multiple of {block_elements}, above 0"
            )
        size = math.prod(shape) // block_elements * block_bytes
        if offset + size > self._file.size:
            raise CheckpointError(
                f"{self.path}: truncated: tensor {shown(name)} ends at byte {offset + size} of a file of "
                f"{self._file.size}"
            )
        self.tensors[name] = TensorInfo(shape, ggml_type.name)
        self._places[name] = _Place(offset, size)


class _Cursor:
    """Reads the header's values one after another; little-endian, unaligned."""

    def __init__(self, buffer: memoryview, offset: int):
        self.buffer = buffer
        self.offset = offset
        self.values_left = _MAX_VALUES

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.buffer, self.offset)
        self.offset += struct.calcsize(f"<{code}")
        return value

    def string(self) -> str:
        return self._take(self.scalar("Q")).decode()

    def value(self, kind: int) -> Any:
        if code := _SCALARS.get(kind):
            return self.scalar(code)
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            kind, length = self.scalar("I"), self.scalar("Q")
            if length > len(self.buffer):  # every value has a byte at least
                raise IndexError("past the end of the file")
            self.values_left -= length
            if self.values_left < 0:
                raise ValueError(f"over {_MAX_VALUES} values in arrays")
            if code := _SCALARS.get(kind):
                return list(struct.unpack(f"<{length}{code}", self._take(length * struct.calcsize(f"<{code}"))))
            if kind == _STRING:
                return self._strings(length)
            return [self.value(kind) for _ in range(length)]
        raise ValueError(f"metadata of unknown type {kind}")

    def _take(self, size: int) -> bytes:
        if size > len(self.buffer) - self.offset:
            raise IndexError("past the end of the file")
        self.offset += size
        return bytes(self.buffer[self.offset - size : self.offset])

    def _strings(self, length: int) -> list[str]:
        """As `string` many times, in one loop over locals: a vocabulary has hundreds of thousands."""
        buffer, offset, end = self.buffer, self.offset, len(self.buffer)
        unpack, strings = struct.Struct("<Q").unpack_from, []
        for _ in range(length):
            (size,) = unpack(buffer, offset)
            offset += 8 + size
            if offset > end:
                raise IndexError("past the end of the file")
            strings.append(str(buffer[offset - size : offset], "utf-8"))
        self.offset = offset
        return strings
