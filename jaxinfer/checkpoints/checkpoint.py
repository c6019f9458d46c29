"""One door to every kind of checkpoint: what the model is, and how its weights are loaded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.extras import fitted, unwrapped
from jaxinfer.checkpoints.manifest import GGUF_TOKENIZER, TOKENIZER, WEIGHTS, read_manifest
from jaxinfer.checkpoints.placement import Progress, Weights, load_weights
from jaxinfer.checkpoints.reader import TensorReader, read_json, shown
from jaxinfer.checkpoints.source import MANIFEST, Source
from jaxinfer.config import ModelConfig
from jaxinfer.errors import CheckpointError, InvalidArgumentError, JaxinferError, UnsupportedError
from jaxinfer.models.family import NameMap
from jaxinfer.models.registry import family_of_gguf, family_of_hf
from jaxinfer.quantization.tensor import Scheme

if TYPE_CHECKING:
    from jaxinfer.models.layers import WeightSpec

DTYPES = ("auto", "float32", "bfloat16", "float16")


def parse_dtype(name: str) -> np.dtype | None:
    """A dtype for weights by its name; None for "auto", the checkpoint's own. Raises InvalidArgumentError."""
    if name not in DTYPES:
        raise InvalidArgumentError("dtype", name, f"one of {', '.join(DTYPES)}")
    return None if name == "auto" else np.dtype(getattr(jnp, name))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened checkpoint; little but headers has been read.

    Attributes:
      source: where it is.
      config: the model's.
      dtype: its natural dtype: bfloat16, float16 or float32; bfloat16 if it is quantized.
      tokenizer_metadata: a GGUF's metadata, which has its tokenizer and chat template; None for a folder.
      folder: where the tokenizer lies, as Hugging Face has it; None for a GGUF's.
    """

    source: Source
    config: ModelConfig
    dtype: np.dtype
    tokenizer_metadata: dict[str, Any] | None
    folder: Path | None
    _reader: TensorReader = field(repr=False)
    _names: NameMap = field(repr=False)

    @property
    def schemes(self) -> dict[str, Scheme]:
        """Of the matrices that are quantized, by the model's names for them, as "layers.0.qkv.q"."""
        targets = self._names.targets
        return {targets[name].key: scheme for name, scheme in self._reader.schemes.items() if name in targets}

    def load(self, *, dtype: Any = None) -> dict[str, jax.Array]:
        """Loads the whole model onto JAX's default device; returns weights by path.

        Args:
          dtype: of all weights but norms; by default the checkpoint's own.
          raises: as `weights`.
        """
        from jaxinfer.models.decoder import decoder_structure  # brings Flax, which reading a config does not need

        specs = decoder_structure(self.config, self.dtype if dtype is None else dtype).specs
        default = jax.device_put(0).sharding
        loaded = self.load_sharded(specs, {path: [default] for path in specs})
        return {path: array for path, (array,) in loaded.items()}

    def load_sharded(
        self,
        specs: Mapping[str, WeightSpec],
        shardings: Mapping[str, Sequence[Any]],
        progress: Progress | None = None,
        rounded: Mapping[str, Scheme] | None = None,
    ) -> dict[str, list[Any]]:
        """Loads what `specs` declare straight to its devices: see `load_weights`; raises as `weights`."""
        with self.weights(specs, rounded) as weights:
            return load_weights(weights, shardings, progress)

    def weights(self, specs: Mapping[str, WeightSpec], rounded: Mapping[str, Scheme] | None = None) -> Weights:
        """The weights that `specs` declare, by path, to be read a slice at a time; see `Weights`."""
        return Weights(self._reader, self._names, specs, rounded)


def open_checkpoint(source: Source) -> Checkpoint:
    """Opens what `resolve` found.

    Raises:
      CheckpointError: a file is missing, broken or truncated, or the config does not describe a model.
      UnsupportedError: a family, or something in its config, that this version does not have.
    """
    return {"hf": _open_hf, "gguf": _open_gguf, "orbax": _open_orbax}[source.kind](source)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Makes every error name the file it comes from; a config that the family's code chokes on is a broken file."""
    try:
        yield
    except JaxinferError as error:
        kind = UnsupportedError if isinstance(error, UnsupportedError) else CheckpointError
        raise kind(f"{path}: {shown(error)}") from error
    except Exception as error:  # whatever a value of the wrong type or size makes it raise
        raise CheckpointError(f"{path}: describes no model: {type(error).__name__}: {shown(error)}") from error


def _check_layers(config: ModelConfig, reader: TensorReader) -> None:
    # Before the weights are declared, which takes minutes for thousands of layers that are not there.
    if len(config.layers) > len(reader.tensors):
        raise CheckpointError(f"{len(config.layers)} layers, but only {len(reader.tensors)} tensors")


def _open_hf(source: Source) -> Checkpoint:
    from jaxinfer.checkpoints.quantized_folder import QuantizedFolder, method_of, with_older_file
    from jaxinfer.checkpoints.safetensors import SafetensorsReader

    folder = source.path
    config_json = read_json(folder / "config.json")
    if (folder / "generation_config.json").exists():
        # Chat models often name their end-of-turn tokens only there.
        ends = _as_list(read_json(folder / "generation_config.json").get("eos_token_id"))
        if ends:
            config_json["eos_token_id"] = list(dict.fromkeys(_as_list(config_json.get("eos_token_id")) + ends))
    files = SafetensorsReader(folder)
    config_json = with_older_file(config_json, files)
    with _naming(folder / "config.json"):
        method = method_of(config_json)
        family = family_of_hf(config_json)
        said = family.config_from_hf(config_json)
        _check_layers(said, files)
    with _naming(folder):
        files.rename(unwrapped(files.tensors, family.hf_names(said), tied=said.tie_embeddings))
    reader = files if method is None else QuantizedFolder(files, *method)
    config, names = fitted(said, family.hf_names, reader, says_biases=True)
    return Checkpoint(source, config, _natural_dtype(reader, names), None, folder, reader, names)


def _open_gguf(source: Source) -> Checkpoint:
    from jaxinfer.checkpoints.gguf import GGUFReader

    reader = GGUFReader(source.path)
    shapes = {name: info.shape for name, info in reader.tensors.items()}
    with _naming(source.path):
        family = family_of_gguf(reader.metadata)
        said = family.config_from_gguf(reader.metadata, shapes, _rope_factors(reader))
        _check_layers(said, reader)
    config, names = fitted(said, family.gguf_names, reader, says_biases=False)
    return Checkpoint(source, config, _natural_dtype(reader, names), reader.metadata, None, reader, names)


def _open_orbax(source: Source) -> Checkpoint:
    from jaxinfer.checkpoints.orbax import OrbaxReader

    manifest = read_manifest(source.path)
    arrays = {target.key: held for target, held in manifest.arrays().items()}
    names = NameMap({target.key: target for target in manifest.arrays()})
    with _naming(source.path / MANIFEST):
        if len(manifest.config.layers) > len(names.targets):
            raise CheckpointError(f"{len(manifest.config.layers)} layers, but only {len(names.targets)} arrays")
    reader = OrbaxReader(source.path / WEIGHTS, arrays, manifest.schemes)
    folder = source.path / TOKENIZER
    metadata = read_json(folder / GGUF_TOKENIZER) if (folder / GGUF_TOKENIZER).exists() else None
    dtype = np.dtype(getattr(jnp, manifest.dtype))
    return Checkpoint(source, manifest.config, dtype, metadata, folder if metadata is None else None, reader, names)


def _rope_factors(reader: TensorReader) -> np.ndarray | None:
    info = reader.tensors.get("rope_freqs.weight")
    if info is None:
        return None
    if info.dtype != "F32" or len(info.shape) != 1:  # the only tensor read before its shape is known to fit
        raise CheckpointError(f"rope_freqs.weight is {info.dtype} {list(info.shape)}, expected an F32 vector")
    return reader.read("rope_freqs.weight")


def _as_list(ids: Any) -> list[Any]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def _natural_dtype(reader: TensorReader, names: NameMap) -> np.dtype:
    """Returns the dtype that most elements of matrices have; bfloat16 where that is a quantized one."""
    elements: Counter[str] = Counter()
    for name, info in reader.tensors.items():
        if len(info.shape) > 1 and name in names.targets:
            elements[info.dtype] += math.prod(info.shape)
    floats: dict[str, Any] = {"F64": np.float32, "F32": np.float32, "F16": np.float16}
    most = max(elements, key=elements.__getitem__, default="BF16")
    return np.dtype(floats.get(most, ml_dtypes.bfloat16))
