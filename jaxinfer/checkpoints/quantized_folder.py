"""Hugging Face folders whose matrices are quantized: the tensors of a module are shown as the weight that they mean."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from jaxinfer.checkpoints.reader import Index, TensorInfo, read_json, shown
from jaxinfer.checkpoints.safetensors import SafetensorsReader
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models.config_keys import KeyTable
from jaxinfer.quantization.awq import Awq
from jaxinfer.quantization.compressed_tensors import CompressedTensors
from jaxinfer.quantization.fp8 import ACTIVATION_SCALES, Fp8
from jaxinfer.quantization.gptq import Gptq
from jaxinfer.quantization.packing import Matrix, Method
from jaxinfer.quantization.tensor import Packed, Scheme

logger = logging.getLogger(__name__)

_NOTES = ("quant_method", "modules_to_not_convert", "ignored_layers", "version", "dequantize", "meta", "tokenizer")
_AWQ_KEYS = KeyTable(
    used=frozenset({"bits", "w_bit", "group_size", "q_group_size", "zero_point", "version", "checkpoint_format"}),
    harmless=(*_NOTES, "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config", "format"),
)
_GPTQ_KEYS = KeyTable(
    used=frozenset(
        {
            *("bits", "group_size", "sym", "desc_act", "checkpoint_format", "format", "pack_dtype", "dynamic"),
            *("rotation", "adapter", "is_marlin_format"),
        }
    ),
    # How the numbers were found, and how others multiply by them.
    harmless=(
        *(
            *_NOTES,
            "backend",
            "damp_*",
            "static_groups",
            "true_sequential",
            "model_name_or_path",
            "dataset",
            "batch_size",
        ),
        *("model_file_base_name", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block"),
        *("modules_in_block_to_quantize", "max_input_length", "cache_block_outputs", "*exllama*", "batch_size"),
        *("pad_token_id", "use_cuda_fp16", "act_group_aware", "hyb_act", "mse", "quantizer", "quant_type", "lm_head"),
        *("uri", "v2*"),
    ),
)
_COMPRESSED_KEYS = KeyTable(
    used=frozenset({"config_groups", "format", "ignore", "kv_cache_scheme", "transform_config", "sparsity_config"}),
    harmless=(*_NOTES, "quantization_status", "global_compression_ratio", "run_compressed", "use_optimized_inference"),
)
_GROUP_KEYS = KeyTable(used=frozenset({"targets", "weights", "input_activations", "output_activations", "format"}))
_WEIGHTS_KEYS = KeyTable(
    used=frozenset({"num_bits", "type", "symmetric", "strategy", "group_size", "block_structure", "actorder"}),
    harmless=("observer*", "scale_dtype", "zp_dtype"),
    neutral={"dynamic": (False,)},
)
_FP8_KEYS = KeyTable(
    used=frozenset({"fmt", "weight_block_size"}),
    # Activations are not rounded, and scales say themselves whether they are powers of two.
    harmless=(*_NOTES, "activation_scheme", "activation_scale_ub", "scale_fmt", "kv_cache_*", "modules_to_convert"),
    neutral={"expert_dtype": ("fp8",)},
)
METHODS: Mapping[str, tuple[Callable[[Mapping[str, Any]], Method], KeyTable]] = {
    "awq": (Awq, _AWQ_KEYS),
    "gptq": (Gptq, _GPTQ_KEYS),
    "compressed-tensors": (CompressedTensors, _COMPRESSED_KEYS),
    "fp8": (Fp8, _FP8_KEYS),
    "fbgemm_fp8": (Fp8, _FP8_KEYS),
}
# Beside a config.json that says nothing of it, as the first AutoGPTQ and AutoAWQ wrote them.
_OLDER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}
_ROWS = 256  # read at once: where outputs lie side by side, a few of them cost as much as many


def method_of(config: Mapping[str, Any]) -> tuple[str, Method] | None:
    """How a config.json says that weights are quantized, by name; None if they are not.

    Raises:
      UnsupportedError: in a way that is not read here.
    """
    quantization = config.get("quantization_config") or config.get("compression_config")
    if not quantization:
        return None
    name = quantization.get("quant_method", "of an unnamed method")
    if name not in METHODS:
        raise UnsupportedError(f"quantization_config ({name}) is not supported; known: {', '.join(METHODS)}")
    method, keys = METHODS[name]
    keys.check(quantization, "quantization_config.")
    for group in (quantization.get("config_groups") or {}).values():
        if isinstance(group, Mapping):
            _GROUP_KEYS.check(group, "config_groups.")
            _WEIGHTS_KEYS.check(group.get("weights") or {}, "config_groups.weights.")
    return name, method(quantization)


def with_older_file(config: dict[str, Any], files: SafetensorsReader) -> dict[str, Any]:
    """A config.json, with the settings of quantization that lie in a file of their own.

    Raises:
      CheckpointError: that file cannot be read.
    """
    if config.get("quantization_config") or not any(name.endswith(".qweight") for name in files.tensors):
        return config
    for name, method in _OLDER_FILES.items():
        if (files.path / name).exists():
            return config | {"quantization_config": {"quant_method": method} | read_json(files.path / name)}
    return config


class QuantizedFolder:
    """The weights of a Hugging Face folder that was quantized; a `TensorReader`.

    A module's tensors, as `q_proj.qweight` and `q_proj.scales`, are one tensor `q_proj.weight` here. What is quantized
    shows by the tensors that are there; modules that are not have their weights in floats.

    Args:
      dtype: the method's name, which quantized tensors have for a dtype.

    Raises:
      CheckpointError: tensors of a module are missing or do not go together; the message names file and module.
      UnsupportedError: something in them that is not read here.
    """

    def __init__(self, folder: SafetensorsReader, dtype: str, method: Method):
        self.path = folder.path
        self.dtypes = folder.dtypes | {dtype}
        self.tensors = dict(folder.tensors)
        self._folder = folder
        self._matrices: dict[str, tuple[Matrix, list[str]]] = {}
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in folder.tensors:
            module, _, part = name.rpartition(".")
            modules[module][part] = name
        unused = 0
        for module, names in modules.items():
            with self._naming(next(iter(names.values())), module):
                # Of a module in floats all that is known is kept, whatever else it has.
                parts = {part: folder.mapped(name) for part, name in names.items()}
                matrix = method.matrix(module, parts)
                if matrix is None:
                    continue
                if "weight" in names and "weight" not in matrix.parts:
                    raise CheckpointError("is quantized, and has a weight in floats besides")
            made_of = [name for part, name in names.items() if part in matrix.parts]
            for name in made_of:
                del self.tensors[name]
            self.tensors[f"{module}.weight"] = TensorInfo(matrix.shape, dtype)
            self._matrices[f"{module}.weight"] = matrix, made_of
            unused += len(names.keys() & ACTIVATION_SCALES)
        if unused:
            logger.info("%s: static scales of activations are not used: activations are not rounded", self.path)
        self.schemes: Mapping[str, Scheme] = {name: matrix.scheme for name, (matrix, _) in self._matrices.items()}

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        if name not in self._matrices:
            return self._folder.read(name, index)
        rows, *columns = index or (slice(None),)
        return self.read_packed(name, rows).dequantize()[:, *columns]

    def read_packed(self, name: str, rows: slice = slice(None)) -> Packed:
        matrix, made_of = self._matrices[name]
        with self._naming(made_of[0], name):
            packed = matrix.read(rows)
        return packed.check(f"{self._folder.file_of(made_of[0])}: {shown(name)}")

    def chunks(self, name: str) -> tuple[int, ...] | None:
        if name not in self._matrices:
            return None
        outputs, inputs = self._matrices[name][0].shape
        return min(_ROWS, outputs), inputs

    def release(self, name: str) -> None:
        for each in self._matrices[name][1] if name in self._matrices else [name]:
            self._folder.release(each)

    @contextmanager
    def _naming(self, tensor: str, name: str) -> Iterator[None]:
        """Makes errors name the file that a tensor is in, and what they are about."""
        try:
            yield
        except (CheckpointError, UnsupportedError) as error:
            raise type(error)(f"{self._folder.file_of(tensor)}: {shown(name)}: {shown(error)}") from error
