"""Rounded matrices as public formats keep them: tensors by the last part of their names.

- awq: https://github.com/casper-hansen/AutoAWQ, GEMM layout: [in, out / 8], eight outputs to a word, interleaved.
- gptq: https://github.com/ModelCloud/GPTQModel, `checkpoint_format: gptq`: [in / 8, out] (or / 4), inputs in order,
  zero points less one.
- compressed-tensors: https://github.com/neuralmagic/compressed-tensors, `pack-quantized`: [out, in / 8] (or / 4).

Each takes what `calibrate.scheme_of` makes, and every loader of the format reads the same numbers from it.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.quantization.tensor import Packed

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which output each four bits of a word hold, the lowest first


def awq(packed: Packed) -> dict[str, np.ndarray]:
    """Symmetric values get the zero point 8, since the layout has no other place to say it."""
    values_OI, zeros_OG = _unsigned(packed)
    return {
        "qweight": _words(_interleaved(values_OI.T), 4),
        "qzeros": _words(_interleaved(zeros_OG.T), 4),
        "scales": np.ascontiguousarray(packed.scales_OG.T.astype(np.float16)),
    }


def gptq(packed: Packed) -> dict[str, np.ndarray]:
    """Inputs go back to the model's order; `g_idx` says which group each is of."""
    values_OI, zeros_OG = _unsigned(packed)
    bits, groups = packed.scheme.bits, packed.scales_OG.shape[1]
    groups_I = np.repeat(np.arange(groups, dtype=np.int32), values_OI.shape[1] // groups)
    if packed.order_I is not None:
        back = np.argsort(packed.order_I)
        values_OI, groups_I = values_OI[:, back], groups_I[back]
    assert zeros_OG.min() >= 1, "a zero point of 0 has no form that all loaders read alike"
    return {
        "qweight": np.ascontiguousarray(_words(values_OI, bits).T),
        "qzeros": _words(zeros_OG.T - np.uint8(1), bits),
        "scales": np.ascontiguousarray(packed.scales_OG.T.astype(np.float16)),
        "g_idx": groups_I,
    }


def compressed_tensors(packed: Packed) -> dict[str, np.ndarray]:
    values_OI, zeros_OG = _unsigned(packed)
    tensors = {
        "weight_packed": _words(values_OI, packed.scheme.bits),
        "weight_scale": packed.scales_OG,
        "weight_shape": np.array(values_OI.shape, np.int64),
    }
    if packed.zeros_OG is not None:
        tensors["weight_zero_point"] = np.ascontiguousarray(_words(zeros_OG.T, packed.scheme.bits).T)
    return tensors


def _unsigned(packed: Packed) -> tuple[np.ndarray, np.ndarray]:
    """Values [O, I] and zero points [O, G] from 0 on, as uint8."""
    scheme = packed.scheme
    shift = 1 << (scheme.bits - 1)
    zeros = np.zeros_like(packed.scales_OG, np.int16) if packed.zeros_OG is None else packed.zeros_OG.astype(np.int16)
    return (packed.values_OI.astype(np.int16) + shift).astype(np.uint8), (zeros + shift).astype(np.uint8)


def _interleaved(numbers: np.ndarray) -> np.ndarray:
    return numbers.reshape(len(numbers), -1, 8)[..., _AWQ_ORDER].reshape(numbers.shape)


def _words(numbers: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [rows, n] -> int32 [rows, n * bits / 32], the first number lowest."""
    each = 32 // bits
    assert numbers.shape[1] % each == 0, numbers.shape
    apart = numbers.reshape(len(numbers), -1, each).astype(np.uint32)
    return np.bitwise_or.reduce(apart << (bits * np.arange(each, dtype=np.uint32)), axis=-1).view(np.int32)
