"""Arrays of an Orbax checkpoint, read a slice at a time.

They are read through TensorStore, which Orbax itself stands on, since a weight in memory is made of slices of several
arrays, laid out by mesh (docs/decisions/0009-orbax-layout.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import tensorstore

from jaxinfer.checkpoints.manifest import stored_as
from jaxinfer.checkpoints.reader import Index, TensorInfo, shown
from jaxinfer.errors import CheckpointError
from jaxinfer.quantization.packing import unpaired
from jaxinfer.quantization.tensor import BITS, Packed, Scheme

_NODE_CACHE_BYTES = 100_000_000  # of the index of arrays and chunks, which else is read once for each of them


class OrbaxReader:
    """Weights of an Orbax checkpoint, whole or a part of each; a `TensorReader`.

    Args:
      path: its folder.
      arrays: of each weight the names of its arrays, by what they hold: see `manifest.HOLDS`.
      schemes: of those weights that are quantized.

    Raises:
      CheckpointError: an array is missing, its description is damaged, or it does not go with the others; the message
        names the folder and the array.
    """

    dtypes = frozenset({"float32", "bfloat16", "float16", *BITS})

    def __init__(self, path: Path, arrays: Mapping[str, Mapping[str, str]], schemes: Mapping[str, Scheme]):
        self.path = path
        self.schemes = schemes
        store = {
            "driver": "ocdbt",
            "base": {"driver": "file", "path": f"{path.absolute()}/"},
            "cache_pool": "cache_pool#index",
        }
        context = tensorstore.Context({"cache_pool#index": {"total_bytes_limit": _NODE_CACHE_BYTES}})
        opening = {}
        for name in (array for held in arrays.values() for array in held.values()):
            spec = {
                "driver": "zarr",
                "kvstore": store | {"path": f"{name}/"},
                "fill_missing_data_reads": False,  # or what is missing would be read as zeros
                "recheck_cached_data": False,
                "recheck_cached_metadata": False,
            }
            opening[name] = tensorstore.open(spec, open=True, read=True, context=context)
        opened = {name: self._said(name, future) for name, future in opening.items()}
        self._arrays = {
            name: {holds: (array, opened[array]) for holds, array in held.items()} for name, held in arrays.items()
        }
        self.tensors = {name: self._info(name) for name in arrays}

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        if name in self.schemes:
            rows, *columns = index or (slice(None),)
            return self.read_packed(name, rows).dequantize()[:, *columns]
        array, store = self._arrays[name]["values"]
        return self._said(array, store[index].read())

    def read_packed(self, name: str, rows: slice = slice(None)) -> Packed:
        scheme, outputs = self.schemes[name], self.tensors[name].shape[0]
        start, stop, _ = rows.indices(outputs)
        reading = {
            holds: (array, (store if holds == "order" else store[start:stop]).read())
            for holds, (array, store) in self._arrays[name].items()
        }
        read = {holds: self._said(array, future) for holds, (array, future) in reading.items()}
        values = read["values"]
        if scheme.bits == 4:
            values = unpaired(values, signed=scheme.values == "int4")
        packed = Packed(scheme, values, read["scales"], *map(read.get, ("zeros", "minima", "order")))
        return packed.check(f"{self.path}: {shown(name)}")

    def chunks(self, name: str) -> tuple[int, ...]:
        chunk: tuple[int, ...] = self._arrays[name]["values"][1].chunk_layout.read_chunk.shape  # type: ignore[assignment]  # zarr always has one
        return (chunk[0], self.tensors[name].shape[1]) if name in self.schemes else chunk

    def release(self, name: str) -> None:
        pass  # nothing is mapped

    def _info(self, name: str) -> TensorInfo:
        """Of a weight; raises CheckpointError if its arrays do not go together."""
        held = self._arrays[name]
        array, values = held["values"]
        scheme = self.schemes.get(name)
        if scheme is None:
            return TensorInfo(values.shape, values.dtype.name)
        if len(values.shape) != 2:
            raise CheckpointError(f"{self.path}: array {shown(array)} has shape {list(values.shape)}, not of a matrix")
        outputs, inputs = values.shape[0], values.shape[1] * (2 if scheme.bits == 4 else 1)
        for holds, (shape, dtype) in stored_as(scheme, outputs, inputs).items():
            array, store = held[holds]
            if (store.shape, store.dtype.name) != (shape, dtype.name):
                raise CheckpointError(
                    f"{self.path}: array {shown(array)} is {store.dtype.name} {list(store.shape)}, expected "
                    f"{dtype.name} {list(shape)}"
                )
        return TensorInfo((outputs, inputs), scheme.values)

    def _said[T](self, name: str, future: tensorstore.Future[T]) -> T:
        try:
            return future.result()
        except (ValueError, OSError) as error:
            said = str(error).split(" [tensorstore_spec")[0]
            raise CheckpointError(f"{self.path}: array {shown(name)}: {shown(said)}") from error
