"""The families this version knows, found by what a checkpoint says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models import llama
from jaxinfer.models.family import Family

FAMILIES: tuple[Family, ...] = (llama.FAMILY,)


def family_of_hf(config: Mapping[str, Any]) -> Family:
    """Returns the family of a Hugging Face config.json.

    Raises:
      CheckpointError: it names neither `architectures` nor `model_type`.
      UnsupportedError: no family here reads it; the message lists those known.
    """
    if architectures := config.get("architectures"):
        if isinstance(architectures, str):
            architectures = [architectures]
        for family in FAMILIES:
            if architectures[0] in family.hf_architectures:
                return family
        known = [name for family in FAMILIES for name in family.hf_architectures]
        raise UnsupportedError(f"architecture {architectures[0]} is not supported; known: {', '.join(known)}")
    if model_type := config.get("model_type"):
        for family in FAMILIES:
            if model_type in family.hf_model_types:
                return family
        known = [name for family in FAMILIES for name in family.hf_model_types]
        raise UnsupportedError(f"model_type {model_type} is not supported; known: {', '.join(known)}")
    raise CheckpointError("config.json has neither architectures nor model_type")


def family_of_gguf(metadata: Mapping[str, Any]) -> Family:
    """Returns the family of a GGUF file; raises as `family_of_hf` does, of `general.architecture`."""
    architecture = metadata.get("general.architecture")
    if architecture is None:
        raise CheckpointError("the GGUF metadata has no general.architecture")
    for family in FAMILIES:
        if architecture in family.gguf_architectures:
            return family
    known = [name for family in FAMILIES for name in family.gguf_architectures]
    raise UnsupportedError(f"GGUF architecture {architecture} is not supported; known: {', '.join(known)}")


def family_named(name: str) -> Family:
    """The family of a `ModelConfig`."""
    return next(family for family in FAMILIES if family.name == name)
