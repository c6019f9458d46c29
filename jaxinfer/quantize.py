"""`jaxinfer quantize`: a checkpoint rounded to 4 or 8 bits with the help of a text, layer after layer.

The result is a Hugging Face folder that other engines read too. While it is made, what is done lies in a folder of its
own inside, a file a layer; config.json, without which nothing takes a folder for a model, is written last.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import filelock
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy

from jaxinfer import __version__
from jaxinfer.checkpoints.checkpoint import Checkpoint
from jaxinfer.checkpoints.placement import Weights as Stored
from jaxinfer.checkpoints.reader import read_json
from jaxinfer.config import ModelConfig
from jaxinfer.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from jaxinfer.models.decoder import decoder_structure
from jaxinfer.models.family import NameMap
from jaxinfer.models.layers import WeightSpec
from jaxinfer.models.registry import family_named
from jaxinfer.quantization import writers
from jaxinfer.quantization.calibrate import scheme_of
from jaxinfer.quantization.tensor import Packed, Scheme
from jaxinfer.quantize_layer import MATRICES, ROUND, Batch, Devices, Layer
from jaxinfer.text.gguf_folder import write_tokenizer
from pallas_kernels.quantized_matmul import GROUP_SIZES

LENGTH = 512  # tokens of a calibration sequence, if the model's context has as many
MAX_SEQUENCES = 128
MIN_TOKENS = 1024
BATCH = 8  # sequences at a time, at least
STATE = ".quantize"
_SETTINGS, _LOCK = "settings.json", "lock"
_FILE_BYTES = 2 << 30  # of a safetensors file
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.model", "vocab.txt", "merges.txt", "*.tiktoken")
_NOT_COPIED = ("config.json", "quantize_config.json", "model.safetensors.index.json")

type Progress = Callable[[int, int], None]  # (layers done, layers in all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to quantize.

    Attributes:
      method: "rtn" (to the nearest), "awq" or "gptq".
      bits: 8 or 4.
      group_size: inputs that share a scale.
      symmetric: no zero points; None is what loaders of the format know best: AWQ has them, the others do not.
      act_order: GPTQ alone: inputs are grouped by how much they matter, which costs a gather in each product.
    """

    method: Literal["rtn", "awq", "gptq"]
    bits: int = 4
    group_size: int = 128
    symmetric: bool | None = None
    act_order: bool = False

    def __post_init__(self) -> None:
        if self.method not in ROUND:
            raise InvalidArgumentError("method", self.method, f"one of {', '.join(ROUND)}")
        if self.bits not in ((4,) if self.method == "awq" else (4, 8)):
            raise InvalidArgumentError("bits", self.bits, "4 or 8; 4 alone for awq, whose layout has no others")
        if self.group_size not in GROUP_SIZES:
            raise InvalidArgumentError("group_size", self.group_size, f"one of {', '.join(map(str, GROUP_SIZES))}")
        if self.act_order and self.method != "gptq":
            raise InvalidArgumentError("act_order", True, "for gptq alone")

    @property
    def is_symmetric(self) -> bool:
        return self.method != "awq" if self.symmetric is None else self.symmetric

    def dtype(self, natural: np.dtype) -> np.dtype:
        """Of scales, and of all that stays in floats. The layouts of AWQ and GPTQ have float16."""
        return natural if self.method == "rtn" else np.dtype(np.float16)

    def scheme(self, natural: np.dtype) -> Scheme:
        return scheme_of(self.bits, self.group_size, self.is_symmetric, self.dtype(natural).name, self.act_order)

    def described(self) -> dict[str, Any]:
        """`quantization_config` of config.json."""
        if self.method == "awq":
            return {
                "quant_method": "awq",
                "version": "gemm",
                "bits": self.bits,
                "group_size": self.group_size,
                "zero_point": True,
                "modules_to_not_convert": None,
            }
        if self.method == "gptq":
            return {
                "quant_method": "gptq",
                "checkpoint_format": "gptq",
                "bits": self.bits,
                "group_size": self.group_size,
                "sym": self.is_symmetric,
                "desc_act": self.act_order,
                "lm_head": False,
                "pack_dtype": "int32",
                "meta": {"quantizer": [f"jaxinfer:{__version__}"]},
            }
        weights = {
            "num_bits": self.bits,
            "type": "int",
            "symmetric": self.is_symmetric,
            "strategy": "group",
            "group_size": self.group_size,
            "actorder": None,
            "block_structure": None,
            "dynamic": False,
            "observer": "minmax",
            "observer_kwargs": {},
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
        }


_WRITE = {"rtn": writers.compressed_tensors, "awq": writers.awq, "gptq": writers.gptq}


def read_text(file: Path | None) -> str:
    """A calibration text; None is the one that comes with the package. Raises InvalidArgumentError."""
    try:
        return (file or resources.files("jaxinfer") / "calibration.txt").read_text("utf-8")
    except (OSError, ValueError) as error:
        raise InvalidArgumentError("calibration", str(file), f"a text file in UTF-8 ({error})") from error


def quantize(
    checkpoint: Checkpoint,
    encode: Callable[[str], list[int]],
    text: str,
    output: Path,
    settings: Settings,
    *,
    devices: Sequence[jax.Device] | None = None,
    progress: Progress | None = None,
) -> None:
    """Quantizes the matrices of a checkpoint's layers; embedding, head, norms and biases stay in floats.

    Devices hold one layer, the hidden states that enter it and the moments of what its matrices multiply, in float32;
    host memory a layer more, and at the end 2 GB of the result. Interrupted, it goes on where it stopped, and the files
    are the same.

    Args:
      encode: text -> token ids.
      text: for calibration; rtn does without.
      output: a new or empty folder, or one that an interrupted run with the same settings left.
      devices: that share the work; one by default.
      progress: called with the layers done and the layers in all.

    Raises:
      InvalidArgumentError: a group size that does not fit, too short a text, a folder that holds something else.
      CheckpointError: a checkpoint that is broken or whose activations are not finite, or a folder that cannot be
        written.
      UnsupportedError: a config or a tokenizer that has no form in such a folder.
    """
    model = checkpoint.config
    specs = decoder_structure(model, jnp.float32).specs
    _check_sizes(specs, settings)
    family = family_named(model.family)
    config = _config(checkpoint, family.config_to_hf)
    sequences = None if settings.method == "rtn" else cut(encode(text), min(LENGTH, model.max_position))
    work = Devices(list(devices or jax.devices()[:1]))
    dtype = settings.dtype(checkpoint.dtype)
    floats = decoder_structure(model, dtype).specs
    said = asdict(settings) | {
        "model": str(checkpoint.source.path.absolute()),
        "version": __version__,
        "tokens": None if sequences is None else hashlib.sha256(sequences.tobytes()).hexdigest(),
    }
    with checkpoint.weights(specs) as stored, checkpoint.weights(floats) as in_dtype, _state(output, said) as state:
        batches = [] if sequences is None else _embedded(_whole(in_dtype, "embed"), sequences, work)
        _round_layers(checkpoint, stored, batches, state, settings, work, progress)
        tensors = _tensors(family.hf_names(model), in_dtype, state, settings, settings.scheme(checkpoint.dtype))
        _write_files(tensors, state, output)
        _copy_tokenizer(checkpoint, output)
        config |= {"torch_dtype": dtype.name, "quantization_config": settings.described()}
        _write(output / "config.json", json.dumps(config, indent=2))
        shutil.rmtree(state)


def cut(tokens: Sequence[int], length: int) -> np.ndarray:
    """Sequences [B, length] of a text's tokens. Raises InvalidArgumentError for too few."""
    if len(tokens) < max(MIN_TOKENS, length):
        allowed = f"a text of at least {max(MIN_TOKENS, length)} tokens"
        raise InvalidArgumentError("calibration", f"{len(tokens)} tokens", allowed)
    count = min(len(tokens) // length, MAX_SEQUENCES)
    return np.asarray(tokens[: count * length], np.int32).reshape(count, length)


def _check_sizes(specs: Mapping[str, WeightSpec], settings: Settings) -> None:
    matrices = {path: spec for path, spec in specs.items() if path.split(".")[-1] in MATRICES}
    for path, spec in matrices.items():
        inputs = spec.shape[1]
        if inputs % settings.group_size:
            fit = [str(size) for size in GROUP_SIZES if all(each.shape[1] % size == 0 for each in matrices.values())]
            allowed = (
                f"a divisor of {inputs}, the inputs of {path}; {', '.join(fit) or 'no size'} would fit all matrices"
            )
            raise InvalidArgumentError("group_size", settings.group_size, allowed)
        for rows in [part.rows for part in spec.parts] or [spec.shape[0]]:
            if rows % 8:
                raise UnsupportedError(f"{path} has {rows} outputs; the formats pack multiples of 8")


# ---- Layer after layer


def _round_layers(
    checkpoint: Checkpoint,
    stored: Stored,
    batches: list[Batch],
    state: Path,
    settings: Settings,
    devices: Devices,
    progress: Progress | None,
) -> None:
    """Leaves a file for each layer in `state`; those that are there already are only run through."""
    model, scheme, dtype = checkpoint.config, settings.scheme(checkpoint.dtype), settings.dtype(checkpoint.dtype)
    for index, spec in enumerate(model.layers):
        prefix = f"layers.{index}."
        names = [path.removeprefix(prefix) for path in stored.specs if path.startswith(prefix)]
        rows = {part: rows for name in MATRICES for part, rows in _parts(stored.specs[prefix + name]) if part}
        layer = Layer(model, spec, rows, batches, devices)
        file = state / f"{index:05}.safetensors"
        if file.exists():
            weights, packed = _read_layer(file, scheme)
            current = {name: devices.whole(value) for name, value in weights.items()}
            current |= {name: devices.whole(each.dequantize()) for name, each in packed.items()}
        else:
            current = {name: devices.whole(_whole(stored, prefix + name)) for name in names}
            for name in names:
                stored.release(prefix + name)
            try:
                current, packed = ROUND[settings.method](layer, current, scheme)
                for name, each in packed.items():
                    each.check(name)
            except (ValueError, CheckpointError) as error:
                raise CheckpointError(f"{checkpoint.source.path}: {prefix}{error}") from error
            others = {
                name: _cast(prefix + name, np.asarray(current[name]), dtype) for name in names if name not in packed
            }
            current |= {name: devices.whole(value.astype(np.float32)) for name, value in others.items()}
            _write_layer(file, others, packed)
        if batches and index + 1 < len(model.layers):
            batches = layer.outputs(current)
        if progress:
            progress(index + 1, len(model.layers))


def _embedded(embed_VD: np.ndarray, sequences: np.ndarray, devices: Devices) -> list[Batch]:
    size = -(-min(BATCH, len(sequences)) // devices.count) * devices.count
    batches = []
    for start in range(0, len(sequences), size):
        tokens_BL = sequences[start : start + size]
        missing = size - len(tokens_BL)
        tokens_BL = np.pad(tokens_BL, ((0, missing), (0, 0)))
        x_BLD = embed_VD[tokens_BL].astype(np.float32)
        batches.append(Batch(devices.split(x_BLD), devices.whole((np.arange(size) < size - missing) * 1.0)))
    return batches


def _whole(stored: Stored, path: str) -> np.ndarray:
    return stored.read(path, tuple(slice(0, size) for size in stored.specs[path].shape))


def _cast(path: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """As the folder keeps it."""
    cast = value.astype(dtype)
    if not np.isfinite(cast.astype(np.float32)).all():
        raise UnsupportedError(f"{path} has numbers that are not finite in {dtype.name}, which the format keeps")
    return cast


def _parts(spec: WeightSpec) -> Iterator[tuple[str | None, slice]]:
    """The parts of a weight by name, with their rows; None and all rows of one that is not fused."""
    first = 0
    for part in spec.parts:
        yield part.name, slice(first, first + part.rows)
        first += part.rows
    if not spec.parts:
        yield None, slice(0, spec.shape[0])


_KEPT = ("values_OI", "scales_OG", "zeros_OG", "order_I")  # of a `Packed`


def _write_layer(file: Path, others: Mapping[str, np.ndarray], packed: Mapping[str, Packed]) -> None:
    tensors = dict(others)
    for name, each in packed.items():
        arrays = {key: getattr(each, key) for key in _KEPT}
        tensors |= {f"{name}/{key}": value for key, value in arrays.items() if value is not None}
    _save(tensors, file)


def _read_layer(file: Path, scheme: Scheme) -> tuple[dict[str, np.ndarray], dict[str, Packed]]:
    tensors = safetensors.numpy.load_file(file)
    packed = {
        name: Packed(scheme, **{key: tensors[f"{name}/{key}"] for key in _KEPT if f"{name}/{key}" in tensors})
        for name in MATRICES
    }
    others = {name: value.astype(np.float32) for name, value in tensors.items() if "/" not in name}
    return others, packed


# ---- The folder


@contextmanager
def _state(output: Path, said: Mapping[str, Any]) -> Iterator[Path]:
    """The folder for what is done, of this run or of one like it that was interrupted."""
    state = output / STATE
    try:
        if output.exists() and not output.is_dir():
            raise InvalidArgumentError("output", str(output), "a folder")
        found = {entry.name for entry in output.iterdir()} if output.exists() else set()
        if "config.json" in found or (found and STATE not in found):
            raise InvalidArgumentError("output", str(output), "a new or empty folder; this one has files")
        state.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(state / _LOCK, timeout=0):
            file = state / _SETTINGS
            if not file.exists():
                _write(file, json.dumps(said, indent=2))
            elif (before := read_json(file)) != said:
                differ = ", ".join(key for key in said if before.get(key) != said[key])
                raise InvalidArgumentError(
                    "output", str(output), f"begun with another {differ}; quantize into another folder, or remove it"
                )
            yield state
    except filelock.Timeout:
        raise InvalidArgumentError("output", str(output), "a folder that no other run is writing to") from None
    except OSError as error:
        raise CheckpointError(f"{output}: could not be written: {error}; run it again to go on") from error


def _config(checkpoint: Checkpoint, config_to_hf: Callable[[ModelConfig], dict[str, Any]]) -> dict[str, Any]:
    """config.json of the folder, but for what quantizing adds."""
    if checkpoint.source.kind == "hf":
        config = read_json(checkpoint.source.path / "config.json")
        for key in ("dtype", "quantization_config"):
            config.pop(key, None)
        return config
    return config_to_hf(checkpoint.config)


def _tensors(
    names: NameMap, in_dtype: Stored, state: Path, settings: Settings, scheme: Scheme
) -> Iterator[tuple[str, np.ndarray]]:
    """Everything that the folder holds, by the names of Hugging Face, a layer in memory at a time."""
    loaded: tuple[int, Any] = (-1, None)
    for name, target in names.targets.items():
        if not target.path.startswith("layers."):
            whole = _whole(in_dtype, target.path)
            yield name, _cast(target.path, whole, settings.dtype(whole.dtype))
            continue
        _, number, own = target.path.split(".")
        if loaded[0] != int(number):
            loaded = int(number), _read_layer(state / f"{int(number):05}.safetensors", scheme)
        others, packed = loaded[1]
        rows = next(rows for part, rows in _parts(in_dtype.specs[target.path]) if part == target.part)
        if own in packed:
            tensors = _WRITE[settings.method](_rows(packed[own], rows))
            yield from ((f"{name.removesuffix('.weight')}.{key}", value) for key, value in tensors.items())
        else:
            yield name, others[own][rows]


def _rows(packed: Packed, rows: slice) -> Packed:
    zeros_OG = None if packed.zeros_OG is None else packed.zeros_OG[rows]
    return packed._replace(values_OI=packed.values_OI[rows], scales_OG=packed.scales_OG[rows], zeros_OG=zeros_OG)


def _write_files(tensors: Iterator[tuple[str, np.ndarray]], state: Path, output: Path) -> None:
    """As one safetensors file, or as several of about 2 GB with an index."""
    weight_map: dict[str, int] = {}
    part: dict[str, np.ndarray] = {}
    size, total, count = 0, 0, 0
    for name, value in tensors:
        if size and size + value.nbytes > _FILE_BYTES:
            _save(part, state / f"part-{count}")
            part, size, count = {}, 0, count + 1
        part[name], weight_map[name] = value, count
        size, total = size + value.nbytes, total + value.nbytes
    _save(part, state / f"part-{count}")
    if count == 0:
        os.replace(state / "part-0", output / "model.safetensors")
        return
    files = [f"model-{number + 1:05}-of-{count + 1:05}.safetensors" for number in range(count + 1)]
    for number, file in enumerate(files):
        os.replace(state / f"part-{number}", output / file)
    index = {"metadata": {"total_size": total}, "weight_map": {name: files[n] for name, n in weight_map.items()}}
    _write(output / "model.safetensors.index.json", json.dumps(index, indent=2))


def _copy_tokenizer(checkpoint: Checkpoint, output: Path) -> None:
    """With it the settings of generation."""
    if checkpoint.tokenizer_metadata is not None:
        write_tokenizer(checkpoint.tokenizer_metadata, output)
        return
    assert checkpoint.folder is not None
    for pattern in _TOKENIZER_FILES:
        for file in checkpoint.folder.glob(pattern):
            if file.is_file() and file.name not in _NOT_COPIED:
                shutil.copyfile(file, output / file.name)


def _save(tensors: Mapping[str, np.ndarray], file: Path) -> None:
    """Under its name once it is whole."""
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)  # of a run that was interrupted
    partial.touch()
    mode = partial.stat().st_mode
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(each) for name, each in tensors.items()}, partial, {"format": "pt"}
    )
    partial.chmod(mode)  # safetensors lets nobody but the owner read what it writes; an engine may run as another user
    _replace(partial, file)


def _write(file: Path, text: str) -> None:
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    _replace(partial, file)


def _replace(partial: Path, file: Path) -> None:
    with partial.open("rb+") as written:
        os.fsync(written.fileno())
    os.replace(partial, file)
