"""The decoder's weights, put together from a tiny checkpoint's without the code under test."""

from __future__ import annotations

import numpy as np
from tiny_checkpoints import Tiny


def fused_weights(tiny: Tiny, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    def join(*names: str) -> np.ndarray:
        return np.concatenate([weights[name] for name in names])

    fused = {"embed": weights["model.embed_tokens.weight"], "final_norm": weights["model.norm.weight"]}
    if not tiny.tied:
        fused["head"] = weights["lm_head.weight"]
    for i in range(tiny.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        attention, mlp = f"{theirs}.self_attn", f"{theirs}.mlp"
        fused[f"{ours}.attn_norm"] = weights[f"{theirs}.input_layernorm.weight"]
        fused[f"{ours}.mlp_norm"] = weights[f"{theirs}.post_attention_layernorm.weight"]
        for kind, suffix in (("weight", ""), ("bias", "_bias")):
            if f"{attention}.q_proj.{kind}" in weights:
                fused[f"{ours}.qkv{suffix}"] = join(*(f"{attention}.{part}_proj.{kind}" for part in "qkv"))
                fused[f"{ours}.o{suffix}"] = weights[f"{attention}.o_proj.{kind}"]
            if f"{mlp}.up_proj.{kind}" in weights:
                fused[f"{ours}.gate_up{suffix}"] = join(f"{mlp}.gate_proj.{kind}", f"{mlp}.up_proj.{kind}")
                fused[f"{ours}.down{suffix}"] = weights[f"{mlp}.down_proj.{kind}"]
    return fused
