"""A checkpoint in float32, whole sequences at a time, and the same model in float64 NumPy."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny_checkpoints import Tiny

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.source import resolve
from jaxinfer.config import ModelConfig
from jaxinfer.models.decoder import DecoderStructure, decoder_structure
from pallas_kernels.paged_attention import paged_attention, pool_shape

PAGE_SIZE = 16


@functools.cache
def _program(config: ModelConfig, scan: bool, length: int) -> tuple[DecoderStructure, Callable[..., jax.Array]]:
    structure = decoder_structure(config, jnp.float32, scan=scan)
    pages = -(-length // PAGE_SIZE)
    shape = pool_shape(len(config.layers), pages + 1, PAGE_SIZE, config.num_kv_heads, config.head_dim)
    table_SM = jnp.arange(1, pages + 1)[None]

    @jax.jit
    def run(leaves, token_ids_T, count):
        lens_S, starts_S1 = count[None], jnp.stack([jnp.int32(0), count])

        def attend(q, k, v, pool, layer, window):
            return paged_attention(
                q, k, v, pool, layer, table_SM, lens_S, starts_S1, jnp.int32(1),
                scale=config.head_dim**-0.5, window=window,
            )  # fmt: skip

        decoder = structure.merge(leaves)
        hidden_TD, _ = decoder(token_ids_T, jnp.arange(length), jnp.full(shape, jnp.nan, jnp.float32), attend)
        return decoder.logits(hidden_TD)

    return structure, run


class Model:
    """A checkpoint in float32, run a whole sequence at a time through a fresh pool."""

    def __init__(self, path: Path, *, scan: bool, length: int):
        checkpoint = open_checkpoint(resolve(str(path), cache_dir=path.parent, offline=True))
        structure, self._run = _program(checkpoint.config, scan, length)
        self._leaves = structure.flatten(checkpoint.load(dtype=jnp.float32))
        self._length = length

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        """Logits after every token: [L, V]."""
        padded = np.zeros(self._length, np.int32)
        padded[: len(token_ids)] = token_ids
        return np.asarray(self._run(self._leaves, padded, np.int32(len(token_ids))))[: len(token_ids)]


def numpy_logits(tiny: Tiny, weights: dict[str, np.ndarray], token_ids: np.ndarray, **settings) -> np.ndarray:
    """Logits after every token, [L, V] float64, of a Llama with these weights by their Hugging Face names.

    Biases are added where `weights` has them; without `lm_head.weight` the embedding is the head.

    Args:
      settings: `inv_freq` [H / 2], by default of the variant's theta; `eps` of the norms.
    """
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    H, L, eps = tiny.H, len(token_ids), settings.get("eps", 1e-5)
    inv_freq = settings.get("inv_freq", tiny.config["rope_theta"] ** (-np.arange(0, H, 2) / H))
    angles = np.arange(L)[:, None, None] * inv_freq
    cos, sin = np.cos(angles), np.sin(angles)

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * w[f"{name}.weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x = w["model.embed_tokens.weight"][token_ids]
    for i in range(tiny.layers):
        layer = f"model.layers.{i}"
        y = norm(x, f"{layer}.input_layernorm")
        q = rotated(linear(y, f"{layer}.self_attn.q_proj").reshape(L, tiny.heads, H))
        k = rotated(linear(y, f"{layer}.self_attn.k_proj").reshape(L, tiny.kv_heads, H))
        v = linear(y, f"{layer}.self_attn.v_proj").reshape(L, tiny.kv_heads, H)
        k, v = (np.repeat(each, tiny.heads // tiny.kv_heads, axis=1) for each in (k, v))
        scores = np.einsum("tnh,snh->nts", q, k) / np.sqrt(H) + np.where(np.tri(L), 0.0, -np.inf)
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("nts,snh->tnh", scores / scores.sum(-1, keepdims=True), v).reshape(L, -1)
        x = x + linear(out, f"{layer}.self_attn.o_proj")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate = linear(y, f"{layer}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(y, f"{layer}.mlp.up_proj"), f"{layer}.mlp.down_proj")
    head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
    return norm(x, "model.norm") @ head.T
