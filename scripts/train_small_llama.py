"""Trains a small Llama on text that comes with Python, for checks of quality where no model hub can be reached.

    nice python scripts/train_small_llama.py FOLDER

It takes about eight minutes on two idle CPU cores (0.5 s a step). FOLDER becomes a Hugging Face folder, in float32, and
gets held-out text of the same kind, `held_out.txt`. Same seed, same Python, same machine: same weights.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from jaxinfer.checkpoints.source import default_cache_dir
from jaxinfer.config import LayerSpec, ModelConfig, RopeConfig
from jaxinfer.models.decoder import decoder_structure
from jaxinfer.models.llama import hf_names

VOCAB, LENGTH, BATCH, STEPS = 2048, 256, 8, 900
PEAK, WARM_UP = 3e-3, 40  # learning rate, and the steps that it takes to get there
END = "<|endoftext|>"
CONFIG = ModelConfig(
    family="llama",
    vocab_size=VOCAB,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    intermediate_size=768,
    layers=(LayerSpec(rope=RopeConfig(theta=10_000.0)),) * 4,
    rms_norm_eps=1e-5,
    max_position=1024,
    tie_embeddings=True,
    eos_token_ids=(0,),
)
LEFT_OUT = ("test", "tests", "idlelib", "site-packages", "encodings", "turtledemo", "pydoc_data", "__pycache__")


def texts() -> tuple[list[str], str]:
    """(texts to train on, text held out): the reference manual that `help()` shows, and the standard library."""
    topics = importlib.import_module("pydoc_data.topics").topics
    manual = [text for _, text in sorted(topics.items())]
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in sorted(root.rglob("*.py")) if not set(path.relative_to(root).parts) & set(LEFT_OUT)]
    sources = [path.read_text("utf-8", errors="replace") for path in files]
    held_out = [*manual[7::12], *sources[7::40]]
    kept = [text for number, text in enumerate(manual) if number % 12 != 7]
    # The manual is a twentieth of it all, and the only prose: four times.
    return kept * 4 + [text for number, text in enumerate(sources) if number % 40 != 7], "\n\n".join(held_out)


def train_tokenizer(corpus: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(END, special=True)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def batches(tokens: np.ndarray, steps: int, seed: int) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        starts = rng.integers(0, len(tokens) - LENGTH - 1, BATCH)
        yield np.stack([tokens[start : start + LENGTH + 1] for start in starts])


def attend(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, pool: Any, layer: Any, window: Any) -> Any:
    """Causal attention inside each sequence, without pages."""
    q, k, v = (x.reshape(-1, LENGTH, *x.shape[1:]) for x in (q_TNH, k_TKH, v_TKH))
    return pool, jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(q_TNH.shape)


STRUCTURE = decoder_structure(CONFIG, jnp.float32)


def loss_of(weights: dict[str, jax.Array], tokens_BL: jax.Array) -> jax.Array:
    """Mean cross entropy in nats."""
    decoder = STRUCTURE.merge(STRUCTURE.flatten(weights))
    positions = jnp.tile(jnp.arange(LENGTH), len(tokens_BL))
    hidden_TD, _ = decoder(tokens_BL[:, :-1].ravel(), positions, jnp.zeros(()), attend)
    logits_TV = decoder.logits(hidden_TD)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits_TV), tokens_BL[:, 1:].reshape(-1, 1), axis=1).mean()


@partial(jax.jit, donate_argnums=(0, 1, 2))
def train_step(weights: Any, first: Any, second: Any, tokens_BL: jax.Array, step: jax.Array, steps: int) -> Any:
    """One step of Adam (arXiv:1412.6980) with decoupled decay, gradients clipped to a norm of 1."""
    loss, grads = jax.value_and_grad(loss_of)(weights, tokens_BL)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g / jnp.maximum(norm, 1), grads)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, grads)
    second = jax.tree.map(lambda v, g: 0.95 * v + 0.05 * g * g, second, grads)
    rate = PEAK * jnp.minimum((step + 1) / WARM_UP, 0.05 + 0.95 * (1 + jnp.cos(math.pi * step / steps)) / 2)

    def moved(w: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        update = m / (1 - 0.9 ** (step + 1)) / (jnp.sqrt(v / (1 - 0.95 ** (step + 1))) + 1e-8)
        return w - rate * (update + (0.05 * w if w.ndim > 1 else 0))

    return jax.tree.map(moved, weights, first, second), first, second, loss


def initial(seed: int) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    weights = {}
    for path, spec in STRUCTURE.specs.items():
        scale = 0.04 / math.sqrt(2 * len(CONFIG.layers)) if path.endswith((".o", ".down")) else 0.04
        value = rng.normal(0, scale, spec.shape) if len(spec.shape) > 1 else np.ones(spec.shape)
        weights[path] = jnp.asarray(value, jnp.float32)
    return weights


def write_folder(folder: Path, weights: dict[str, jax.Array], tokenizer: Tokenizer, held_out: str) -> None:
    tensors = {}
    for name, target in hf_names(CONFIG).targets.items():
        spec, value, first = STRUCTURE.specs[target.path], np.asarray(weights[target.path]), 0
        for part in spec.parts:
            if part.name == target.part:
                value = value[first : first + part.rows]
                break
            first += part.rows
        tensors[name] = np.ascontiguousarray(value)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(safetensors.numpy.save(tensors, {"format": "pt"}))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "model_max_length": CONFIG.max_position}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))
    (folder / "held_out.txt").write_text(held_out, "utf-8")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": CONFIG.hidden_size,
        "intermediate_size": CONFIG.intermediate_size,
        "num_attention_heads": CONFIG.num_heads,
        "num_key_value_heads": CONFIG.num_kv_heads,
        "head_dim": CONFIG.head_dim,
        "num_hidden_layers": len(CONFIG.layers),
        "max_position_embeddings": CONFIG.max_position,
        "rms_norm_eps": CONFIG.rms_norm_eps,
        "rope_theta": CONFIG.layers[0].rope.theta,
        "vocab_size": VOCAB,
        "tie_word_embeddings": CONFIG.tie_embeddings,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))  # last: a folder without one is no model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = default_cache_dir(os.environ) / "models" / "small-llama"
    parser.add_argument("folder", type=Path, nargs="?", default=default, help=f"by default {default}")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    corpus, held_out = texts()
    tokenizer = train_tokenizer(corpus)
    order = np.random.default_rng(options.seed).permutation(len(corpus))
    ids = [tokenizer.encode(corpus[i]).ids for i in order]
    tokens = np.concatenate([np.array([0, *each], np.int32) for each in ids])
    weights = initial(options.seed)
    first, second = (jax.tree.map(jnp.zeros_like, weights) for _ in range(2))
    size = sum(w.size for w in weights.values())
    print(f"{size / 1e6:.1f} M weights, {len(tokens) / 1e6:.1f} M tokens, {len(held_out)} bytes held out", flush=True)
    began, losses = time.perf_counter(), []
    for step, batch in enumerate(batches(tokens, options.steps, options.seed)):
        weights, first, second, loss = train_step(weights, first, second, batch, jnp.float32(step), options.steps)
        losses.append(loss)
        if step % 50 == 49 or step == 0:
            mean = float(np.mean([float(each) for each in losses[-50:]]))
            print(f"step {step + 1}: loss {mean:.3f}, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
    write_folder(options.folder, weights, tokenizer, held_out)
    print(options.folder)


if __name__ == "__main__":
    main()
