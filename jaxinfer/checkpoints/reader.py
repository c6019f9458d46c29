"""What a checkpoint's file format must offer, and the mapped file under each of them."""

from __future__ import annotations

import json
import mmap
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from jaxinfer.errors import CheckpointError

if TYPE_CHECKING:
    from jaxinfer.quantization.tensor import Packed, Scheme

type Index = tuple[slice, ...]  # of the first dimensions of an array, each from a start to a stop


class TensorInfo(NamedTuple):
    """A tensor as its file describes it; `dtype` is the format's own name for it, for example "BF16" or "Q4_K"."""

    shape: tuple[int, ...]
    dtype: str


class TensorReader(Protocol):
    """The tensors of a checkpoint. Opening one reads and checks headers only.

    Attributes:
      path: the file or folder, for messages.
      tensors: every tensor there is, by name.
      dtypes: those dtypes that `read` can turn into floats.
      schemes: of those tensors that are quantized; matrices all.
    """

    path: Path
    tensors: dict[str, TensorInfo]
    dtypes: frozenset[str]
    schemes: Mapping[str, Scheme]

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        """Returns `tensor[index]` as floats: a view of the mapped file, or a copy."""

    def read_packed(self, name: str, rows: slice = slice(None)) -> Packed:
        """Returns rows of a tensor that has a scheme, its numbers exactly those that the file means.

        Raises:
          CheckpointError: they mean none; the message names the tensor.
        """

    def chunks(self, name: str) -> tuple[int, ...] | None:
        """The shape of the pieces that the file keeps whole; None if a slice of any shape costs no more than itself."""

    def release(self, name: str) -> None:
        """Lets the system drop the pages of the tensor from memory; a later read brings them back."""


_MAX_SHOWN = 300


def shown(text: object) -> str:
    """What a file says, fit for a message: no longer than a line or two, and printable whatever is in it."""
    whole = str(text)
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in whole[:_MAX_SHOWN])
    return text + ("..." if len(whole) > _MAX_SHOWN else "")


def check_disjoint(path: Path, ranges: Iterable[tuple[int, int, str]]) -> None:
    """Checks that no two tensors share bytes, so that the weights together are no larger than their file.

    Args:
      ranges: of each tensor its first byte, the byte after its last, and its name.

    Raises:
      CheckpointError: two do; the message names both.
    """
    end, last = 0, ""
    for start, stop, name in sorted(ranges):
        if start < stop:
            if start < end:
                raise CheckpointError(f"{path}: tensor {shown(name)} overlaps tensor {shown(last)}")
            end, last = stop, name


def check_regular(path: Path) -> None:
    """Raises OSError if the path is missing, or no file with an end: a pipe would be waited for without one."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError("not a regular file")


def read_json(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file.

    Raises:
      CheckpointError: the file is missing, or holds no JSON object; the message names it.
    """
    try:
        check_regular(path)
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {shown(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds no JSON object")
    return value


class MappedFile:
    """A file mapped read-only."""

    def __init__(self, path: Path):
        try:
            check_regular(path)
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise CheckpointError(f"{path}: cannot be read: {error}") from error
        self.path = path
        self.size = len(self._map)
        self.buffer = memoryview(self._map)

    def array(self, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Returns a view; the caller has checked that it lies within the file."""
        return np.ndarray(shape, dtype, self._map, offset)

    def release(self, offset: int, size: int) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            start = offset - offset % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, offset + size - start)
