"""A model's sizes on a mesh: what is padded, which KV heads are copied, and whether it works at all."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxinfer.config import ModelConfig
from jaxinfer.quantization.tensor import Scheme
from sharding.mesh import MeshConfig
from sharding.rules import MeshError, ShardingRules

WORD = 32  # tokens of a word of flags: a shard of the vocabulary has whole words


@dataclass(frozen=True, slots=True)
class Partition:
    """How a model lies on the devices of one submesh. `Partition.of` makes one.

    Attributes:
      rules: which mesh axis each logical axis is split over.
      num_kv_heads: of the page pool; a model with fewer KV heads than parts has each of them `kv_copies` times.
      intermediate_size, vocab_size: padded with zeros to a multiple of their parts.
    """

    rules: ShardingRules
    num_kv_heads: int
    kv_copies: int
    intermediate_size: int
    vocab_size: int

    @classmethod
    def of(
        cls, model: ModelConfig, rules: ShardingRules | None = None, schemes: Mapping[str, Scheme] | None = None
    ) -> Partition:
        """
        Args:
          schemes: of quantized matrices, by path: the feed-forward dim is filled up so that each shard of it has whole
            groups.

        Raises:
          MeshError: the heads do not divide, or a weight would lie twice on one mesh axis.
        """
        rules = rules or ShardingRules()
        heads, feed_forward, vocab = (rules.ways(axis) for axis in ("heads", "feed_forward", "vocab"))
        fits = [ways for ways in range(1, model.num_heads + 1) if _heads_divide(model, ways)]
        if heads not in fits:
            raise MeshError(
                f"{rules.axis('heads')}={heads} cannot split {model.num_heads} query heads of {model.num_kv_heads} KV "
                f"heads evenly; {', '.join(map(str, fits))} can"
            )
        group = math.lcm(*(each.group or 1 for path, each in (schemes or {}).items() if path.endswith(".down")))
        partition = cls(
            rules=rules,
            num_kv_heads=max(model.num_kv_heads, heads),
            kv_copies=max(heads // model.num_kv_heads, 1),
            intermediate_size=_round_up(model.intermediate_size, feed_forward * group),
            vocab_size=_round_up(model.vocab_size, vocab * WORD) if vocab > 1 else model.vocab_size,
        )
        if (ways := rules.ways("model")) > 1 and model.hidden_size % ways:
            raise MeshError(f"{rules.axis('model')}={ways} does not divide the hidden size, {model.hidden_size}")
        for axes in (("heads", "model"), ("feed_forward", "model"), ("vocab", "model")):
            rules.spec(axes)
        rules.spec(("activation_tokens", "activation_model"))
        return partition

    def notes(self, model: ModelConfig) -> list[str]:
        """What it adds to the model's own arrays, for people."""
        notes = []
        if self.kv_copies > 1:
            notes.append(f"{model.num_kv_heads} KV heads, each kept {self.kv_copies} times")
        for name in ("intermediate_size", "vocab_size"):
            ours, padded = getattr(model, name), getattr(self, name)
            if padded > ours:
                notes.append(f"{name} {ours} padded with zeros to {padded} (+{padded / ours - 1:.1%})")
        return notes


def check_experts(mesh: MeshConfig) -> None:
    """Raises MeshError for a mesh that splits experts."""
    if mesh.expert > 1:
        raise MeshError(f"expert={mesh.expert}: no model here has experts; use expert=1")


def _heads_divide(model: ModelConfig, ways: int) -> bool:
    N, K = model.num_heads, model.num_kv_heads
    return N % ways == 0 and (K % ways == 0 or ways % K == 0)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
