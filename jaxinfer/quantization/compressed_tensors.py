"""compressed-tensors, as llm-compressor writes it: integers of 4 and 8 bits, and float8.

Format: https://github.com/vllm-project/compressed-tensors/tree/main/src/compressed_tensors/compressors. Of a matrix
with I inputs and O outputs: `weight` [O, I], or `weight_packed` int32 [O, I * bits / 32] and `weight_shape`;
`weight_scale` [O, G], or fewer rows; `weight_zero_point` like it, packed by outputs if the weight is packed. Static
scales of activations are left alone, as in `fp8.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.quantization.fp8 import ACTIVATION_SCALES, block_size, by_rows, float8
from jaxinfer.quantization.gptq import input_order
from jaxinfer.quantization.packing import (
    INT32,
    Matrix,
    Parts,
    integer_scheme,
    integers,
    positive,
    regrouped,
    taken,
    unpacked,
)
from jaxinfer.quantization.tensor import Packed

_PACKED, _PLAIN = "pack-quantized", ("int-quantized", "float-quantized", "naive-quantized")
_FLOAT = ("dense", "fakequant")
_MARKS = {"weight_packed", "weight_scale", "weight_zero_point"}


@dataclass(frozen=True, slots=True)
class _Weights:
    """What the config says of the weights of some modules.

    Attributes:
      targets: names of modules, patterns, or classes of modules.
      block: outputs and inputs that share a scale; None: a row's or the matrix's, as the shape of the scales says.
      reordered: whether `weight_g_idx` may be there.
      rounds_activations: to int8, each token by itself.
    """

    targets: tuple[str, ...]
    form: str
    bits: int
    is_float: bool
    symmetric: bool
    block: tuple[int, int] | None
    reordered: bool
    rounds_activations: bool


class CompressedTensors:
    """A `Method`."""

    def __init__(self, config: Mapping[str, Any]):
        # How keys and values are rounded in a cache is a matter of `kv_cache_dtype`, not of the weights.
        if config.get("transform_config"):
            raise UnsupportedError("compressed-tensors with transform_config is not supported")
        sparsity = config.get("sparsity_config") or {}
        if (form := sparsity.get("format", "dense")) != "dense":
            raise UnsupportedError(f"compressed-tensors with sparsity ({form}) is not supported")
        self._ignored = tuple(config.get("ignore") or ())
        form = config.get("format", "dense")
        # A group without weights says how activations are rounded, as those of a cache's keys and values.
        groups = {
            name: group
            for name, group in config["config_groups"].items()
            if not isinstance(group, Mapping) or group.get("weights", True)
        }
        self._groups = [_weights(name, group, form) for name, group in groups.items()]

    def matrix(self, module: str, parts: Parts) -> Matrix | None:
        if not parts.keys() & _MARKS:
            return None
        weights = self._of(module)
        if weights is None:
            raise CheckpointError("is quantized, but no config group is for it")
        if weights.form == _PACKED:
            return _packed(weights, parts)
        if weights.is_float:
            weight = taken(parts, "weight", ("float8_e4m3fn",), (None, None))
            return float8(parts, weight, "weight_scale", weights.block)
        if weights.form in _PLAIN:
            return _plain(weights, parts)
        raise CheckpointError(f"is quantized, though its format is {weights.form}")

    def _of(self, module: str) -> _Weights | None:
        """Names go before patterns, these before classes, which a checkpoint does not tell but for embeddings."""
        names = (module, "Embedding" if module.endswith("embed_tokens") else "Linear")
        if _rank(names, self._ignored) is not None:
            return None
        ranked = [(rank, weights) for weights in self._groups if (rank := _rank(names, weights.targets)) is not None]
        return min(ranked, key=lambda each: each[0])[1] if ranked else None


def _rank(names: tuple[str, str], targets: Sequence[str]) -> int | None:
    module, kind = names
    if module in targets:
        return 0
    try:
        if any(target.startswith("re:") and re.match(target[3:], module) for target in targets):
            return 1
    except re.error as error:
        raise CheckpointError(f"its config has a target that is no pattern: {error}") from error
    return 2 if kind in targets else None


def _weights(name: str, group: Any, form: str) -> _Weights:
    if not isinstance(group, Mapping):
        raise UnsupportedError(f"compressed-tensors with a scheme by name ({name}) is not supported")
    args, inputs = group.get("weights") or {}, group.get("input_activations") or {}
    form = group.get("format") or form
    if form not in (_PACKED, *_PLAIN, *_FLOAT):
        raise UnsupportedError(
            f"compressed-tensors of format {form} is not supported; known: {', '.join((_PACKED, *_PLAIN))}"
        )
    bits, kind = args.get("num_bits", 8), args.get("type", "int")
    if (kind, bits) not in (("int", 8), ("float", 8)) and (kind, bits, form) != ("int", 4, _PACKED):
        raise UnsupportedError(f"compressed-tensors of {kind} {bits} bits, {form}, is not supported")
    size = int(args.get("group_size") or 0)
    block: tuple[int, int] | None = None
    match args.get("strategy") or ("group" if size > 0 else "channel"):
        case "group":
            block = (1, positive(size, "group_size"))
        case "block":
            block = block_size(args["block_structure"])
        case "channel" | "tensor":
            pass
        case other:
            raise UnsupportedError(f"compressed-tensors of strategy {other} is not supported")
    dynamic = [inputs.get(key) for key in ("num_bits", "type", "strategy", "dynamic")] == [8, "int", "token", True]
    return _Weights(
        targets=tuple(group["targets"]),
        form=form,
        bits=bits,
        is_float=kind == "float",
        symmetric=args.get("symmetric", True),
        block=block,
        reordered=args.get("actorder") in (True, "group", "dynamic"),
        rounds_activations=dynamic and inputs.get("symmetric", True),
    )


def _packed(weights: _Weights, parts: Parts) -> Matrix:
    bits, group = weights.bits, None if weights.block is None else weights.block[1]
    per_word = 32 // bits
    outputs, inputs = map(int, taken(parts, "weight_shape", ("int64", "int32"), (2,)))
    words = taken(parts, "weight_packed", INT32, (outputs, -(-inputs // per_word)))
    scales, share = by_rows(parts, "weight_scale", (outputs, inputs), weights.block)
    groups = scales.shape[1]
    zeros = None
    if not weights.symmetric:
        zeros = taken(parts, "weight_zero_point", INT32, (-(-outputs // per_word), groups))
    group_I = parts.get("weight_g_idx")
    order = None
    if group_I is not None and not (group_I == -1).all():  # which says that there is none
        order = input_order(taken(parts, "weight_g_idx", INT32, (inputs,)), group or inputs)
        if order is not None and not weights.reordered:
            raise CheckpointError("weight_g_idx gives inputs an order of their own, though actorder is not group")
    scheme = integer_scheme(bits, group, scales.dtype, symmetric=weights.symmetric, reordered=order is not None)

    def read(rows: slice) -> Packed:
        which = np.arange(outputs)[rows]
        values = unpacked(words[rows], bits)[:, :inputs]
        if order is not None:
            values = np.take(values, order, axis=1)
        its_zeros = None if zeros is None else unpacked(zeros.T, bits).T[which]
        return integers(scheme, values, scales[which // share], its_zeros, group, order)

    used = {"weight_shape", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"}
    return Matrix((outputs, inputs), scheme, ACTIVATION_SCALES | used, read)


def _plain(weights: _Weights, parts: Parts) -> Matrix:
    weight = taken(parts, "weight", ("int8",), (None, None))
    outputs, inputs = weight.shape
    group = None if weights.block is None else weights.block[1]
    scales, share = by_rows(parts, "weight_scale", weight.shape, weights.block)
    zeros = None
    if not weights.symmetric or "weight_zero_point" in parts:
        zeros, _ = by_rows(parts, "weight_zero_point", weight.shape, weights.block, ("int8",))
    scheme = integer_scheme(8, group, scales.dtype, symmetric=weights.symmetric)
    if scheme.group is None and weights.rounds_activations:
        scheme = replace(scheme, activations="int8")

    def read(rows: slice) -> Packed:
        which = np.arange(outputs)[rows] // share
        its_zeros = None if zeros is None else zeros[which]
        if its_zeros is not None and scheme.offset is None:
            if its_zeros.any():
                raise CheckpointError("has zero points other than 0, though it is said to be symmetric")
            its_zeros = None
        return Packed(
            scheme,
            weight[rows],
            regrouped(scales[which], inputs, group, scheme),
            None if its_zeros is None else regrouped(its_zeros, inputs, group, scheme),
        )

    return Matrix((outputs, inputs), scheme, ACTIVATION_SCALES | {"weight", "weight_scale", "weight_zero_point"}, read)
