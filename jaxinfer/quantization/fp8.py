"""Float8 (e4m3) weights with scales of blocks, rows or the whole matrix.

Formats: transformers' fine-grained FP8, as DeepSeek-V3 has it (`weight_scale_inv` is what values are multiplied by,
for blocks of 128 x 128), vLLM's "fp8" with one scale, and "fbgemm_fp8" with one for each row. Static scales of
activations are left alone: activations stay in floats, which is nearer to the model than their rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxinfer.errors import UnsupportedError
from jaxinfer.quantization.packing import FLOATS, Matrix, Parts, kept_group, positive, regrouped, taken
from jaxinfer.quantization.tensor import Packed, Scheme

ACTIVATION_SCALES = frozenset({"input_scale", "activation_scale", "input_zero_point"})
_VALUES = ("float8_e4m3fn",)
_POWERS = "float8_e8m0fnu"  # of two, as scales
_BLOCK = (128, 128)  # of `weight_scale_inv`, where a config does not say


class Fp8:
    """A `Method`."""

    def __init__(self, config: Mapping[str, Any]):
        if (form := config.get("fmt") or "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise UnsupportedError(f"fp8 of format {form} is not supported; known: e4m3")
        block = config.get("weight_block_size")
        self._block = None if block is None else block_size(block)

    def matrix(self, module: str, parts: Parts) -> Matrix | None:
        scale = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        weight = parts.get("weight")
        if scale not in parts and (weight is None or weight.dtype.name not in _VALUES):
            return None
        weight = taken(parts, "weight", _VALUES, (None, None))
        block = self._block
        if block is None and scale == "weight_scale_inv":
            shape = parts[scale].shape
            block = _BLOCK if len(shape) == 2 and shape not in ((1, 1), (weight.shape[0], 1)) else None
        return float8(parts, weight, scale, block)


def block_size(block: Sequence[Any]) -> tuple[int, int]:
    """Outputs and inputs, as a config says them; raises CheckpointError."""
    outputs, inputs = (positive(size, "a size of blocks") for size in block)
    return outputs, inputs


def float8(parts: Parts, weight: np.ndarray, scale: str, block: tuple[int, int] | None) -> Matrix:
    """A matrix of float8 values.

    Args:
      weight: [O, I].
      scale: name of its scales.
      block: outputs and inputs that share one; None: what the shape of the scales says, a row's or the matrix's.

    Raises:
      CheckpointError: scales of another shape.
    """
    outputs, inputs = weight.shape
    into = None if block is None else block[1]
    scales, share = by_rows(parts, scale, weight.shape, block, (*FLOATS, _POWERS))
    if scales.dtype.name == _POWERS:
        scales = scales.astype(np.float32)
    scheme = Scheme("float8_e4m3fn", None if into is None else kept_group(into), scales.dtype.name)  # type: ignore[arg-type]

    def read(rows: slice) -> Packed:
        its_scales = scales[np.arange(outputs)[rows] // share]
        return Packed(scheme, weight[rows], regrouped(its_scales, inputs, into, scheme))

    return Matrix((outputs, inputs), scheme, ACTIVATION_SCALES | {"weight", scale}, read)


def by_rows(
    parts: Parts, name: str, shape: Sequence[int], block: tuple[int, int] | None, dtypes: Sequence[str] = FLOATS
) -> tuple[np.ndarray, int]:
    """Scales, or zero points, as [rows of them, groups], and how many outputs share a row. Raises CheckpointError."""
    outputs, inputs = shape
    if block is not None:
        return taken(parts, name, dtypes, (-(-outputs // block[0]), -(-inputs // block[1]))), block[0]
    scales = parts.get(name)
    if scales is not None and scales.size == 1:
        return taken(parts, name, dtypes, scales.shape).reshape(1, 1), outputs
    if scales is not None and scales.ndim == 1:
        return taken(parts, name, dtypes, (outputs,)).reshape(-1, 1), 1
    return taken(parts, name, dtypes, (outputs, 1)), 1
