"""What a model family must give: its config and its tensor names, from each kind of checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxinfer.config import ModelConfig


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint's tensor goes.

    Attributes:
      path: of the weight, as `DecoderStructure.specs` names it.
      part: which part of a fused weight the tensor is; None if it is the whole weight.
      interleaved: head dim H if the tensor's rows lie, in each head, in interleaved rope order (pairs 2j, 2j + 1)
        and must be put into rotate-half order (pairs j, j + H/2); None if they are in order.
    """

    path: str
    part: str | None = None
    interleaved: int | None = None

    @property
    def key(self) -> str:
        """As `WeightSpec.keys` has it."""
        return self.path if self.part is None else f"{self.path}.{self.part}"


@dataclass(frozen=True, slots=True)
class NameMap:
    """Every tensor of a checkpoint by name.

    Attributes:
      targets: those that must be there.
      ignored: those that may be there and are not used.
      zeros: those of `targets`, vectors all, that are not there and count as zeros.
    """

    targets: Mapping[str, Target]
    ignored: frozenset[str] = frozenset()
    zeros: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Family:
    """A model family, and how its checkpoints are recognised and read.

    Attributes:
      hf_architectures: values of `architectures` in a Hugging Face config.json; `hf_model_types` of `model_type`,
        for files without the former.
      gguf_architectures: values of `general.architecture` in a GGUF file.
      config_from_hf: config.json -> config.
      config_from_gguf: metadata, shape of each tensor by name, rope factors [H / 2] or None -> config.
      config_to_hf: config -> config.json.
      hf_names, gguf_names: config -> names.
    """

    name: str
    hf_architectures: tuple[str, ...]
    hf_model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_from_gguf: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]], np.ndarray | None], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    hf_names: Callable[[ModelConfig], NameMap]
    gguf_names: Callable[[ModelConfig], NameMap]
