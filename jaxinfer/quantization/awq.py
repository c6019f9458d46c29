"""AWQ as AutoAWQ writes it, in its version "gemm".

Format: https://github.com/casper-hansen/AutoAWQ/blob/main/awq/modules/linear/gemm.py. Of a matrix with I inputs and O
outputs: `qweight` int32 [I, O / 8], `qzeros` int32 [G, O / 8], `scales` [G, O]; a weight is (value - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.quantization.packing import FLOATS, INT32, Matrix, Parts, group_size, integer_scheme, integers, taken
from jaxinfer.quantization.tensor import Packed

_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of its eight outputs each four bits of a word are, from the lowest


class Awq:
    """A `Method`. With `zero_point` false all zero points are 8, which is checked when they are read."""

    def __init__(self, config: Mapping[str, Any]):
        version = str(config.get("version") or config.get("checkpoint_format") or "gemm").lower()
        if version != "gemm":
            raise UnsupportedError(f"AWQ version {version} is not supported; known: gemm")
        if (bits := config.get("bits", config.get("w_bit", 4))) != 4:
            raise UnsupportedError(f"AWQ of {bits} bits is not supported; known: 4")
        self._group = group_size(config)
        self._symmetric = not config.get("zero_point", True)

    def matrix(self, module: str, parts: Parts) -> Matrix | None:
        if not parts.keys() & {"qweight", "qzeros"}:
            return None
        qweight = taken(parts, "qweight", INT32, (None, None))
        inputs, words = qweight.shape
        group = self._group or inputs
        if inputs % group:
            raise CheckpointError(f"qweight has {inputs} inputs, which are no whole groups of {group}")
        scales = taken(parts, "scales", FLOATS, (inputs // group, words * 8))
        qzeros = taken(parts, "qzeros", INT32, (inputs // group, words))
        scheme = integer_scheme(4, self._group, scales.dtype, symmetric=self._symmetric)

        def read(rows: slice) -> Packed:
            return integers(scheme, _outputs(qweight, rows), scales[:, rows].T, _outputs(qzeros, rows), self._group)

        return Matrix((words * 8, inputs), scheme, frozenset({"qweight", "qzeros", "scales"}), read)


def _outputs(words: np.ndarray, rows: slice) -> np.ndarray:
    """Words [n, O / 8] -> uint8 [outputs in `rows`, n]."""
    start, stop, _ = rows.indices(words.shape[1] * 8)
    first = start // 8
    octets = np.ascontiguousarray(words[:, first : -(-stop // 8)].T).view(np.uint8)
    octets = octets.reshape(-1, words.shape[0], 4)
    outputs = np.empty((octets.shape[0], 8, words.shape[0]), np.uint8)
    for i in range(4):
        np.bitwise_and(octets[..., i], 15, out=outputs[:, _ORDER[2 * i]])
        np.right_shift(octets[..., i], 4, out=outputs[:, _ORDER[2 * i + 1]])
    return outputs.reshape(-1, words.shape[0])[start - first * 8 : stop - first * 8]
