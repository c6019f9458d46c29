"""GPTQ as AutoGPTQ and GPTQModel write it, at 4 and 8 bits.

Format: https://github.com/ModelCloud/GPTQModel/blob/main/gptqmodel/nn_modules/qlinear/__init__.py. With p numbers in a
word, of a matrix with I inputs and O outputs: `qweight` int32 [I / p, O], `qzeros` int32 [G, O / p], `scales` [G, O],
`g_idx` int32 [I]: the group of each input; a weight is (value - zero) * scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.quantization.packing import (
    FLOATS,
    INT32,
    Matrix,
    Parts,
    group_size,
    integer_scheme,
    integers,
    taken,
    unpacked,
)
from jaxinfer.quantization.tensor import Packed

# Zero points are stored less one in the first format. Some writers take the one from each number by itself, some from
# whole words, so that what is below zero borrows from the next number. Adding it to whole words, as GPTQModel does,
# is right for both: those of the first kind have no such number, or they have spoilt the word.
_ONES: Mapping[Any, np.uint32] = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}
# Settings that change what the tensors mean, if they are set.
_UNKNOWN = ("rotation", "adapter", "is_marlin_format")


class Gptq:
    """A `Method`. With `sym` true all zero points are in the middle, which is checked when they are read."""

    def __init__(self, config: Mapping[str, Any]):
        bits = config.get("bits")
        if bits not in _ONES:
            raise UnsupportedError(f"GPTQ of {bits} bits is not supported; known: 4, 8")
        form = config.get("checkpoint_format") or config.get("format") or "gptq"
        if form not in ("gptq", "gptq_v2"):
            raise UnsupportedError(f"GPTQ checkpoint_format {form} is not supported; known: gptq, gptq_v2")
        if (words := config.get("pack_dtype") or "int32") != "int32":
            raise UnsupportedError(f"GPTQ pack_dtype {words} is not supported; known: int32")
        for name in _UNKNOWN:
            if config.get(name):
                raise UnsupportedError(f"GPTQ with {name} is not supported")
        # Rules that begin with "-:" name modules that are not quantized, which shows without them.
        if rules := [rule for rule in config.get("dynamic") or () if not rule.startswith("-:")]:
            raise UnsupportedError(f"GPTQ with other settings for some modules (dynamic: {rules[0]}) is not supported")
        self._less_one = form == "gptq"
        self._bits: int = bits  # type: ignore[assignment]
        self._group = group_size(config)
        self._symmetric = bool(config.get("sym", True))
        self._reordered = bool(config.get("desc_act", False))

    def matrix(self, module: str, parts: Parts) -> Matrix | None:
        if not parts.keys() & {"qweight", "qzeros"}:
            return None
        bits = self._bits
        per_word = 32 // bits
        qweight = taken(parts, "qweight", INT32, (None, None))
        inputs, outputs = qweight.shape[0] * per_word, qweight.shape[1]
        groups = -(-inputs // (self._group or inputs))
        scales = taken(parts, "scales", FLOATS, (groups, outputs))
        qzeros = taken(parts, "qzeros", INT32, (groups, -(-outputs // per_word)))
        group_I = taken(parts, "g_idx", INT32, (inputs,)) if "g_idx" in parts or self._reordered else None
        order = input_order(group_I, self._group or inputs) if self._reordered and group_I is not None else None
        scheme = integer_scheme(bits, self._group, scales.dtype, symmetric=self._symmetric, reordered=order is not None)

        def read(rows: slice) -> Packed:
            if group_I is not None and not self._reordered and input_order(group_I, self._group or inputs) is not None:
                raise CheckpointError("g_idx gives inputs an order of their own, though desc_act is false")
            values = unpacked(qweight[:, rows].T, bits)
            words = np.add(qzeros.view(np.uint32), _ONES[bits]) if self._less_one else qzeros
            zeros = np.ascontiguousarray(unpacked(words, bits)[:, :outputs][:, rows].T)
            if order is not None:
                values = np.take(values, order, axis=1)
            return integers(scheme, values, scales[:, rows].T, zeros, self._group, order)

        return Matrix((outputs, inputs), scheme, frozenset({"qweight", "qzeros", "scales", "g_idx"}), read)


def input_order(group_I: np.ndarray, group: int) -> np.ndarray | None:
    """The order that puts inputs into their groups; None if they lie so.

    Args:
      group_I: of each input its group.

    Raises:
      CheckpointError: a group that there is not, or one that is not full.
    """
    positions = np.arange(group_I.size, dtype=np.int32) // group
    if np.array_equal(group_I, positions):
        return None
    last = positions[-1]
    wrong = group_I[(group_I < 0) | (group_I > last)]
    if wrong.size:
        raise CheckpointError(f"g_idx has {wrong[0]}, but groups are numbered from 0 to {last}")
    order = np.argsort(group_I, kind="stable").astype(np.int32)
    if not np.array_equal(group_I[order], positions):
        raise CheckpointError(f"g_idx has groups of other sizes than {group}")
    return order
