"""Blocks of GGUF files -> values, scales and minima.

Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h; the gguf package dequantizes them in NumPy.
Scales and minima of the K types are products of two numbers of a block, which are exact in float32 alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from jaxinfer.quantization.tensor import Packed, Scheme

SCHEMES: Mapping[str, Scheme] = {
    "Q4_0": Scheme("int4", 32, "float16"),
    "Q4_1": Scheme("uint4", 32, "float16", "minima"),
    "Q5_0": Scheme("int8", 32, "float16"),
    "Q5_1": Scheme("int8", 32, "float16", "minima"),
    "Q8_0": Scheme("int8", 32, "float16"),
    "Q2_K": Scheme("uint4", 16, "float32", "minima"),
    "Q3_K": Scheme("int4", 16, "float32"),
    "Q4_K": Scheme("uint4", 32, "float32", "minima"),
    "Q5_K": Scheme("int8", 32, "float32", "minima"),
    "Q6_K": Scheme("int8", 16, "float32"),
}

# Of n blocks: values [n, inputs], scales [n, groups] and minima [n, groups]. Values are uint8, to be seen as int8.
type _Parts = tuple[np.ndarray, np.ndarray, np.ndarray | None]


def unpack(blocks_OBX: np.ndarray, kind: str) -> Packed:
    """Rows of blocks as numbers; as float32 they are those of `gguf.quants.dequantize`, bit for bit.

    Args:
      blocks_OBX: uint8: of each row its blocks, each of X bytes.
      kind: a key of `SCHEMES`.
    """
    O, B, X = blocks_OBX.shape  # noqa: E741
    values, scales, minima = _UNPACK[kind](blocks_OBX.reshape(O * B, X))
    return Packed(
        SCHEMES[kind],
        values.view(np.int8).reshape(O, B * values.shape[1]),
        scales.reshape(O, B * scales.shape[1]),
        minima_OG=None if minima is None else minima.reshape(O, B * minima.shape[1]),
    )


def _fields(packed: np.ndarray, bits: int, width: int) -> np.ndarray:
    """Fields of some bits: a run of `width` bytes holds the lowest of each byte first, then the next of each.

    Args:
      packed: uint8 [n, bytes].

    Returns:
      uint8 [n, bytes * 8 / bits].
    """
    n, size = packed.shape
    packed = np.ascontiguousarray(packed).reshape(n, size // width, width)
    fields = np.empty((n, size // width, 8 // bits, width), np.uint8)
    for i, shift in enumerate(range(0, 8, bits)):
        np.right_shift(packed, shift, out=fields[:, :, i])
    fields &= (1 << bits) - 1
    return fields.reshape(n, size * 8 // bits)


def _half(blocks: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at an offset of each block: [n, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16)


def _single(blocks: np.ndarray, offset: int) -> np.ndarray:
    return _half(blocks, offset).astype(np.float32)


# ---- Blocks of 32: a float16 scale, a float16 minimum in some, values


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    return np.unpackbits(np.ascontiguousarray(blocks), axis=1, bitorder="little") << 4


def _q4_0(blocks: np.ndarray) -> _Parts:
    return _fields(blocks[:, 2:], 4, 16) - np.uint8(8), _half(blocks, 0), None


def _q4_1(blocks: np.ndarray) -> _Parts:
    return _fields(blocks[:, 4:], 4, 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: np.ndarray) -> _Parts:
    values = _fields(blocks[:, 6:], 4, 16) | _fifth_bits(blocks[:, 2:6])
    return values - np.uint8(16), _half(blocks, 0), None


def _q5_1(blocks: np.ndarray) -> _Parts:
    return _fields(blocks[:, 8:], 4, 16) | _fifth_bits(blocks[:, 4:8]), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: np.ndarray) -> _Parts:
    return np.ascontiguousarray(blocks[:, 2:]), _half(blocks, 0), None


# ---- Blocks of 256: float16 scales of the scales and minima of their groups


def _q2_k(blocks: np.ndarray) -> _Parts:
    by_group = blocks[:, :16]
    scales = _single(blocks, 80) * (by_group & 15)
    minima = -(_single(blocks, 82) * (by_group >> 4))
    return _fields(blocks[:, 16:80], 2, 32), scales, minima


def _q3_k(blocks: np.ndarray) -> _Parts:
    values = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    by_group = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    return values - np.uint8(4), _single(blocks, 108) * (by_group.astype(np.float32) - 32), None


def _scales_and_minima(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of Q4_K and Q5_K: 6 bits each, of the first four groups in one piece, of the last four in two."""
    low, high, last = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, last & 15 | low >> 6 << 4], axis=1)
    minima = np.concatenate([high & 63, last >> 4 | high >> 6 << 4], axis=1)
    return _single(blocks, 0) * scales, -(_single(blocks, 2) * minima)


def _q4_k(blocks: np.ndarray) -> _Parts:
    return _fields(blocks[:, 16:], 4, 32), *_scales_and_minima(blocks)


def _q5_k(blocks: np.ndarray) -> _Parts:
    values = _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << 4
    return values, *_scales_and_minima(blocks)


def _q6_k(blocks: np.ndarray) -> _Parts:
    values = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    by_group = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return values - np.uint8(32), _single(blocks, 208) * by_group, None


_UNPACK: Mapping[str, Callable[[np.ndarray], _Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
