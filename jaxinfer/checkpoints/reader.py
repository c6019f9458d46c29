"""What a checkpoint's file format must offer, and the mapped file under each of them."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from jaxinfer.errors import CheckpointError


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
    """

    path: Path
    tensors: dict[str, TensorInfo]
    dtypes: frozenset[str]

    def read(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns rows [start, stop) along axis 0, as floats: a view of the mapped file, or a dequantized copy."""

    def release(self, name: str) -> None:
        """Lets the system drop the pages of the tensor from memory; a later read brings them back."""


class MappedFile:
    """A file mapped read-only."""

    def __init__(self, path: Path):
        try:
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
