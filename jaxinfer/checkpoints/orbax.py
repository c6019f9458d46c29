"""Arrays of an Orbax checkpoint, read a slice at a time.

They are read through TensorStore, which Orbax itself stands on, since a weight in memory is made of slices of several
arrays, laid out by mesh (docs/decisions/0009-orbax-layout.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import tensorstore

from jaxinfer.checkpoints.reader import Index, TensorInfo, shown
from jaxinfer.errors import CheckpointError
from jaxinfer.quantization.tensor import Packed, Scheme

_NODE_CACHE_BYTES = 100_000_000  # of the index of arrays and chunks, which else is read once for each of them


class OrbaxReader:
    """Some arrays of an Orbax checkpoint; a `TensorReader`.

    Args:
      path: its folder.
      names: the arrays that are wanted.

    Raises:
      CheckpointError: an array is missing, or its description is damaged; the message names the folder and the array.
    """

    dtypes = frozenset({"float32", "bfloat16", "float16"})
    schemes: Mapping[str, Scheme] = {}

    def __init__(self, path: Path, names: Iterable[str]):
        self.path = path
        store = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{path.absolute()}/"},
            "cache_pool": "cache_pool#index",
        }
        context = tensorstore.Context({"cache_pool#index": {"total_bytes_limit": _NODE_CACHE_BYTES}})
        opening = {}
        for name in names:
            spec = {
                "driver": "zarr",
                "kvstore": store | {"path": f"{name}/"},
                "fill_missing_data_reads": False,  # or what is missing would be read as zeros
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
            }
            opening[name] = tensorstore.open(spec, open=True, read=True, context=context)
        self._arrays = {name: self._said(name, future) for name, future in opening.items()}
        self.tensors = {name: TensorInfo(array.shape, array.dtype.name) for name, array in self._arrays.items()}

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        return self._said(name, self._arrays[name][index].read())

    def read_packed(self, name: str, rows: slice = slice(None)) -> Packed:
        raise AssertionError(f"{name} is in floats")

    def chunks(self, name: str) -> tuple[int, ...]:
        return self._arrays[name].chunk_layout.read_chunk.shape  # type: ignore[return-value]  # zarr always has one

    def release(self, name: str) -> None:
        pass  # nothing is mapped

    def _said[T](self, name: str, future: tensorstore.Future[T]) -> T:
        try:
            return future.result()
        except (ValueError, OSError) as error:
            said = str(error).split(" [tensorstore_spec")[0]
            raise CheckpointError(f"{self.path}: array {shown(name)}: {shown(said)}") from error
