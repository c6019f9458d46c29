"""The folder that `jaxinfer convert` writes, and its manifest, which says what the model is and what lies where.

    DIR/jaxinfer.json   the manifest; `jaxinfer.json.partial` until everything else is there and on disk
    DIR/tokenizer/      files of a Hugging Face folder, or `gguf.json`: what a GGUF file says of its tokenizer
    DIR/weights/        an Orbax checkpoint with an array for each part of a weight, such as `layers.0.qkv.q`

Arrays are as the model has them, without padding, copies or anything else that a mesh asks for. A matrix that is
quantized has several, such as `layers.0.qkv.q.values`: see `HOLDS`.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from jaxinfer.checkpoints.reader import read_json, shown
from jaxinfer.checkpoints.source import MANIFEST
from jaxinfer.config import ModelConfig
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models.family import Target
from jaxinfer.quantization.tensor import Scheme, np_dtype

TOKENIZER = "tokenizer"
GGUF_TOKENIZER = "gguf.json"
WEIGHTS = "weights"
FORMAT = 1
# What arrays of a quantized matrix [O, I] hold, as `Packed` has it: values are [O, I], or uint8 [O, I / 2] if they have
# 4 bits, two to a byte, the first in its low half.
HOLDS = ("values", "scales", "zeros", "minima", "order")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An array in `weights`.

    Attributes:
      array: its name there.
      part: of a fused weight, the part it is; None if the weight has none.
      holds: what of the weight or part it is: one of `HOLDS`, "values" alone if it is in floats.
    """

    array: str
    part: str | None = None
    holds: str = "values"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What `jaxinfer.json` says.

    Attributes:
      format: changes when an older version could no longer read the folder rightly.
      source: name of the model it was converted from, for people.
      dtype: of all weights but norms.
      weights: the arrays of every weight, by path.
      schemes: of those weights or parts that are quantized, by path, or path and part.
    """

    format: int
    source: str
    dtype: Literal["float32", "bfloat16", "float16"]
    config: ModelConfig
    weights: dict[str, tuple[Stored, ...]]
    schemes: dict[str, Scheme] = dataclasses.field(default_factory=dict)

    def to_json(self) -> str:
        said = dataclasses.asdict(self)
        if not self.schemes:
            del said["schemes"]  # which versions that know none refuse
        return json.dumps(said, indent=1)

    def arrays(self) -> dict[Target, dict[str, str]]:
        """The arrays of every weight or part, by what they hold."""
        arrays: dict[Target, dict[str, str]] = {}
        for path, each in self.weights.items():
            for stored in each:
                arrays.setdefault(Target(path, stored.part), {})[stored.holds] = stored.array
        return arrays


def stored_as(scheme: Scheme, outputs: int, inputs: int) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and dtype of each array of a quantized matrix, by what it holds."""
    groups = -(-inputs // (scheme.group or inputs))
    arrays: dict[str, tuple[tuple[int, ...], np.dtype]] = {
        "values": ((outputs, inputs), np_dtype(scheme.values)),
        "scales": ((outputs, groups), np_dtype(scheme.scales)),
    }
    if scheme.bits == 4:
        arrays["values"] = ((outputs, inputs // 2), np.dtype(np.uint8))
    if scheme.offset is not None:
        arrays[scheme.offset] = ((outputs, groups), np_dtype("int8" if scheme.offset == "zeros" else scheme.scales))
    if scheme.reordered:
        arrays["order"] = ((inputs,), np.dtype(np.int32))
    return arrays


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
      CheckpointError: it cannot be read, or does not describe a model; the message names file and field.
      UnsupportedError: a newer version wrote it, and this one would not read it rightly.
    """
    path = folder / MANIFEST
    value = read_json(path)
    version = value.get("format")
    if type(version) is int and version > FORMAT:
        raise UnsupportedError(f"{path}: format {version} is newer than this version reads ({FORMAT}); update jaxinfer")
    if version != FORMAT:
        raise CheckpointError(f"{path}: is not of jaxinfer convert: format = {shown(version)}")
    manifest: Manifest = _typed(Manifest, value, str(path))
    for path_, stored_ in manifest.weights.items():
        for stored in stored_:
            if stored.holds not in HOLDS:
                raise UnsupportedError(
                    f"{path}: array {shown(stored.array)} of {shown(path_)} holds {shown(stored.holds)}, which this "
                    "version does not read"
                )
    arrays = manifest.arrays()
    if sum(map(len, arrays.values())) < sum(map(len, manifest.weights.values())):
        raise CheckpointError(f"{path}: two arrays hold the same")
    if unknown := sorted(manifest.schemes.keys() - {target.key for target in arrays}):
        raise CheckpointError(f"{path}: {shown(unknown[0])} has a scheme, but no arrays")
    for target, holds in arrays.items():
        scheme = manifest.schemes.get(target.key)
        expected = {"values"} if scheme is None else stored_as(scheme, 1, 2).keys()
        if holds.keys() != expected:
            raise CheckpointError(
                f"{path}: {shown(target.key)} has arrays for {', '.join(holds)}, expected {', '.join(sorted(expected))}"
            )
    return manifest


def _typed(kind: Any, value: Any, where: str) -> Any:
    """A JSON value as the type that a field is declared with, its own fields included; checked all the way down."""
    origin, of = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in of:
            return None
        (kind,) = set(of) - {type(None)}
        return _typed(kind, value, where)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type) and isinstance(value, dict):
        return _fields(kind, value, where)
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(of[0], each, f"{where}: {i}") for i, each in enumerate(value))
    if origin is dict and isinstance(value, dict):
        return {key: _typed(of[1], each, f"{where}: {shown(key)}") for key, each in value.items()}
    if origin is Literal and value in of:
        return value
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise CheckpointError(f"{where}: {shown(value)} is not of type {getattr(kind, '__name__', kind)}")
    return value


def _fields(kind: type, value: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    if unknown := sorted(value.keys() - hints.keys()):
        raise UnsupportedError(f"{where}: has {shown(unknown[0])}, which this version does not know; update jaxinfer")
    needed = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }
    if missing := sorted(needed - value.keys()):
        raise CheckpointError(f"{where}: has no {missing[0]}")
    fields = {name: _typed(hints[name], each, f"{where}: {name}") for name, each in value.items()}
    try:
        return kind(**fields)
    except ValueError as error:  # of the config's own checks
        raise CheckpointError(f"{where}: {shown(error)}") from error
