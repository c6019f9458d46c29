"""Step plans and their tokens as bytes, so that other processes can run them: flat NumPy, and no pickle.

A message is a header's length (4 bytes), a JSON header with the scalars and every array's name, dtype and shape, and
then the arrays' bytes in that order, each filled up to a multiple of 8. The same plan gives the same bytes. Arrays
that come out are views of the message.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.types import MAX_BAD_WORD_TOKENS, MAX_LOGPROBS, SAMPLING_ROW, SlotEntry, StepPlan, StepTokens

_ALIGNMENT = 8
_LENGTH = struct.Struct("<I")

type _Schema = Mapping[str, tuple[np.dtype, tuple[str | int, ...]]]

# Dtype and shape of every array; a letter stands for the same number wherever it is in one plan, entry or result.
_INT, _FLOAT = np.dtype("<i4"), np.dtype("<f4")
_PLAN: _Schema = {
    "slots": (_INT, ("S",)),
    "starts": (_INT, ("S",)),
    "query_lens": (_INT, ("S",)),
    "token_ids": (_INT, ("T",)),
    "page_table": (_INT, ("S", "M")),
    "sampled": (np.dtype(np.bool_), ("S",)),
    "sampling": (SAMPLING_ROW, ("S",)),
    "page_copies": (_INT, ("C", 2)),
    "scored": (_INT, ("X", 3)),
}
_ENTRY: _Schema = {
    "prompt_token_ids": (_INT, ("P",)),
    "output_token_ids": (_INT, ("O",)),
    "end_token_ids": (_INT, ("E",)),
    "bias_token_ids": (_INT, ("B",)),
    "bias": (_FLOAT, ("B",)),
    "allowed_token_ids": (_INT, ("A",)),
    "banned_words": (_INT, ("W", MAX_BAD_WORD_TOKENS)),
}
_TOKENS: _Schema = {
    "token_ids": (_INT, ("R",)),
    "logprobs": (_FLOAT, ("R",)),
    "ranks": (_INT, ("R",)),
    "top_ids": (_INT, ("R", MAX_LOGPROBS)),
    "top_logprobs": (_FLOAT, ("R", MAX_LOGPROBS)),
}
_OPTIONAL = {"allowed_token_ids", *_TOKENS} - {"token_ids"}


class MalformedMessageError(JaxinferError):
    """Bytes from another process, or what should become such, are not what they should be."""

    code = "malformed_message"


def encode_plan(plan: StepPlan) -> bytes:
    """The plan as bytes.

    Raises:
      MalformedMessageError: an array has another dtype or shape than `StepPlan` says.
    """
    arrays = {name: getattr(plan, name) for name in _PLAN}
    _check(_PLAN, arrays)
    for number, entry in enumerate(plan.entries):
        of_entry = {name: getattr(entry, name) for name in _ENTRY}
        _check(_ENTRY, of_entry)
        arrays |= {f"entries.{number}.{name}": array for name, array in of_entry.items()}
    return _pack({"step": plan.step, "slots": [entry.slot for entry in plan.entries]}, arrays)


def decode_plan(message: bytes | memoryview) -> StepPlan:
    """What `encode_plan` was given.

    Raises:
      MalformedMessageError: it gave no such bytes.
    """
    scalars, arrays = _unpack(message)
    step, slots = scalars.get("step"), scalars.get("slots")
    if not isinstance(slots, list) or not all(isinstance(number, int) for number in (step, *slots)):
        raise MalformedMessageError("a plan without its step and the slots of its entries")
    of_plan = _taken(_PLAN, arrays, "")
    if of_plan["query_lens"].sum() != len(of_plan["token_ids"]):
        raise MalformedMessageError("a plan whose query lengths do not add up to its tokens")
    entries = tuple(
        SlotEntry(slot, **_taken(_ENTRY, arrays, f"entries.{number}.")) for number, slot in enumerate(slots)
    )
    _all_taken(arrays)
    return StepPlan(step=step, entries=entries, **of_plan)  # type: ignore[arg-type]


def encode_tokens(tokens: StepTokens) -> bytes:
    """A step's tokens as bytes. Raises: as `encode_plan`."""
    arrays: dict[str, np.ndarray | None] = {}
    for prefix, part in (("", tokens), ("scored.", tokens.scored)):
        if part is not None:
            own = {name: getattr(part, name) for name in _TOKENS}
            _check(_TOKENS, own)
            arrays |= {f"{prefix}{name}": array for name, array in own.items()}
    return _pack({}, arrays)


def decode_tokens(message: bytes | memoryview) -> StepTokens:
    """What `encode_tokens` was given. Raises: as `decode_plan`."""
    _, arrays = _unpack(message)
    scored = None
    if any(name.startswith("scored.") for name in arrays):
        scored = StepTokens(**_taken(_TOKENS, arrays, "scored."))
    tokens = StepTokens(scored=scored, **_taken(_TOKENS, arrays, ""))
    _all_taken(arrays)
    return tokens


def _check(schema: _Schema, arrays: Mapping[str, np.ndarray | None]) -> None:
    sizes: dict[str, int] = {}
    for name, (dtype, shape) in schema.items():
        array = arrays.get(name)
        if array is None:
            if name not in _OPTIONAL:
                raise MalformedMessageError(f"{name} is missing")
            continue
        expected = [size if isinstance(size, int) else sizes.get(size) for size in shape]
        fits = len(expected) == array.ndim and all(
            size in (None, real) for size, real in zip(expected, array.shape, strict=True)
        )
        if array.dtype != dtype or not fits:
            raise MalformedMessageError(f"{name} is {array.dtype} {list(array.shape)}, expected {dtype} {list(shape)}")
        sizes |= {letter: real for letter, real in zip(shape, array.shape, strict=True) if isinstance(letter, str)}


def _taken(schema: _Schema, arrays: dict[str, np.ndarray], prefix: str) -> dict[str, Any]:
    taken = {name: arrays.pop(prefix + name, None) for name in schema}
    _check(schema, taken)
    return taken


def _all_taken(arrays: Iterable[str]) -> None:
    if unknown := sorted(arrays):
        raise MalformedMessageError(f"unknown arrays: {', '.join(unknown)[:200]}")


_DTYPES = {dtype.name if dtype.names is None else "sampling_row": dtype
           for schema in (_PLAN, _ENTRY, _TOKENS) for dtype, _ in schema.values()}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def _pack(scalars: Mapping[str, Any], arrays: Mapping[str, np.ndarray | None]) -> bytes:
    there = {name: array for name, array in arrays.items() if array is not None}
    described = [[name, _NAMES[array.dtype], array.shape] for name, array in there.items()]
    header = json.dumps({**scalars, "arrays": described}, separators=(",", ":")).encode()
    header += b" " * (-(_LENGTH.size + len(header)) % _ALIGNMENT)
    pieces = [_LENGTH.pack(len(header)), header]
    for array in there.values():
        pieces += [array.tobytes(), b"\0" * (-array.nbytes % _ALIGNMENT)]
    return b"".join(pieces)


def _unpack(message: bytes | memoryview) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    try:
        (length,) = _LENGTH.unpack_from(message)
        scalars = json.loads(bytes(message[_LENGTH.size : _LENGTH.size + length]))
        offset, arrays = _LENGTH.size + length, {}
        for name, dtype_name, shape in scalars.pop("arrays"):
            dtype, count = _DTYPES[dtype_name], math.prod(shape)
            if name in arrays or not all(isinstance(size, int) and size >= 0 for size in shape):
                raise ValueError(f"array {name!r} of shape {shape}")
            arrays[name] = np.frombuffer(message, dtype, count, offset).reshape(shape)
            offset += count * dtype.itemsize + (-count * dtype.itemsize % _ALIGNMENT)
        if offset != len(message):
            raise ValueError(f"{len(message)} bytes, of which {offset} are told")
        return scalars, arrays
    except (struct.error, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise MalformedMessageError(f"a message that cannot be read: {type(error).__name__}: {error}") from error
