"""jaxinfer: an inference engine for language models on JAX."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.llm import LLM as LLM
    from jaxinfer.types import SamplingParams as SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0"

_HOMES = {"LLM": "jaxinfer.llm", "SamplingParams": "jaxinfer.types"}


def __getattr__(name: str) -> Any:
    # Imported on first use: `import jaxinfer` alone brings no JAX.
    if name not in _HOMES:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
