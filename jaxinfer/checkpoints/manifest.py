"""The folder that `jaxinfer convert` writes, and its manifest, which says what the model is and what lies where.

    DIR/jaxinfer.json   the manifest; `jaxinfer.json.partial` until everything else is there and on disk
    DIR/tokenizer/      files of a Hugging Face folder, or `gguf.json`: what a GGUF file says of its tokenizer
    DIR/weights/        an Orbax checkpoint with an array for each part of a weight, such as `layers.0.qkv.q`

Arrays are as the model has them, without padding, copies or anything else that a mesh asks for.
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

from jaxinfer.checkpoints.reader import read_json, shown
from jaxinfer.config import ModelConfig
from jaxinfer.errors import CheckpointError, UnsupportedError

MANIFEST = "jaxinfer.json"
PARTIAL = "jaxinfer.json.partial"
TOKENIZER = "tokenizer"
GGUF_TOKENIZER = "gguf.json"
WEIGHTS = "weights"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An array in `weights`.

    Attributes:
      array: its name there.
      part: of a fused weight, the part it is; None if the weight has none.
      holds: what of the weight or part it is. In this version always "values", the whole of it; a quantized weight
        has several arrays, each of which holds something else.
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
    """

    format: int
    source: str
    dtype: Literal["float32", "bfloat16", "float16"]
    config: ModelConfig
    weights: dict[str, tuple[Stored, ...]]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1)


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
    for path_, arrays in manifest.weights.items():
        for stored in arrays:
            if stored.holds != "values":
                raise UnsupportedError(
                    f"{path}: array {shown(stored.array)} of {shown(path_)} holds {shown(stored.holds)}, which this "
                    "version does not read"
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
