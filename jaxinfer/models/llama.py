"""The Llama family: Llama 2, 3 and 3.x, TinyLlama, SmolLM2. Its config and its tensor names; no code of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.config import LayerSpec, ModelConfig, RopeConfig
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models.family import Family, NameMap, Target

# Beyond any model there is: a damaged file must not make lists of billions.
_MOST_LAYERS, _MOST_HEAD_DIM = 4096, 65_536

# ---- Hugging Face


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json as transformers' LlamaConfig does, its defaults included.

    Raises:
      CheckpointError: a key is missing or no number; the message names it.
      UnsupportedError: a setting the decoder does not have; the message names it.
    """
    if (act := config.get("hidden_act", "silu")) != "silu":
        raise UnsupportedError(f"hidden_act {act} is not supported: a Llama uses silu")
    hidden_size, num_heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    head_dim = _head_dim(config, "head_dim", hidden_size, num_heads)
    attention_bias = bool(config.get("attention_bias", False))
    layer = LayerSpec(
        rope=_rope_from_hf(config, head_dim),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )
    ends = config.get("eos_token_id")
    return ModelConfig(
        family="llama",
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_count(config, "num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        intermediate_size=_count(config, "intermediate_size"),
        layers=(layer,) * _count(config, "num_hidden_layers", most=_MOST_LAYERS),
        rms_norm_eps=_number(config, "rms_norm_eps"),
        max_position=_count(config, "max_position_embeddings"),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=_token_ids(ends if isinstance(ends, list) else [ends]),
        bos_token_id=next(iter(_token_ids([config.get("bos_token_id")])), None),
    )


def _rope_from_hf(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Transformers 5 writes `rope_parameters`, with the theta inside; 4 writes `rope_scaling` and `rope_theta`."""
    rope = _mapping(config, "rope_parameters") or _mapping(config, "rope_scaling")
    theta = _number(rope, "rope_theta", default=_number(config, "rope_theta", default=10_000.0))
    if (fraction := rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0:
        raise UnsupportedError(f"partial_rotary_factor {fraction} is not supported: a Llama rotates whole heads")
    match rope.get("rope_type", rope.get("type", "default")):
        case "default":
            return RopeConfig(theta=theta)
        case "linear":
            return RopeConfig(theta=theta, factors=(_number(rope, "factor"),) * (head_dim // 2))
        case "llama3":
            factors = _llama3_factors(
                theta,
                head_dim,
                factor=_number(rope, "factor"),
                low_freq_factor=_number(rope, "low_freq_factor"),
                high_freq_factor=_number(rope, "high_freq_factor"),
                original_context=_number(
                    rope, "original_max_position_embeddings", default=config.get("max_position_embeddings")
                ),
            )
            return RopeConfig(theta=theta, factors=factors)
        case other:
            raise UnsupportedError(f"rope type {other} is not supported; known: default, linear, llama3")


def _llama3_factors(
    theta: float,
    head_dim: int,
    *,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_context: float,
) -> tuple[float, ...]:
    """Divisors of the inverse frequencies, [H / 2], of Llama 3.1's scaling to a longer context.

    A frequency that turns more than `high_freq_factor` times within the original context stays as it is, one that
    turns less than `low_freq_factor` times is divided by `factor`, and those between are blended.
    """
    factors = []
    for j in range(head_dim // 2):
        turns = original_context * theta ** (-2 * j / head_dim) / (2 * math.pi)
        kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor)
        kept = min(max(kept, 0.0), 1.0)
        factors.append(1 / (kept + (1 - kept) / factor))
    return tuple(factors)


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json that `config_from_hf` and transformers read as this config.

    Raises:
      UnsupportedError: rope factors that no setting there gives, or biases that none allows.
    """
    layer = config.layers[0]
    assert len(set(config.layers)) == 1, "a Llama's layers are alike"
    if layer.attention_bias != layer.output_bias:
        raise UnsupportedError("a Llama's config.json cannot say that only some matrices of attention have a bias")
    rope: dict[str, Any] = {"rope_theta": layer.rope.theta}
    if layer.rope.factors is not None:
        if len(set(layer.rope.factors)) > 1:
            raise UnsupportedError(
                "rope factors of each frequency, as this GGUF file has them, have no form in a config.json; take the "
                "model's Hugging Face folder"
            )
        rope["rope_scaling"] = {"rope_type": "linear", "factor": layer.rope.factors[0]}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": len(config.layers),
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": layer.attention_bias,
        "mlp_bias": layer.mlp_bias,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": list(config.eos_token_ids) or None,
        **rope,
    }


def hf_names(config: ModelConfig) -> NameMap:
    """Names in a Hugging Face checkpoint, of `LlamaForCausalLM`."""
    targets = {
        "model.embed_tokens.weight": Target("embed"),
        "model.norm.weight": Target("final_norm"),
    }
    ignored = set()
    if config.tie_embeddings:
        ignored.add("lm_head.weight")  # some files repeat the embedding under this name
    else:
        targets["lm_head.weight"] = Target("head")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
        ignored.add(f"{theirs}.self_attn.rotary_emb.inv_freq")  # older files keep what the config implies
        targets[f"{theirs}.input_layernorm.weight"] = Target(f"{ours}.attn_norm")
        targets[f"{theirs}.post_attention_layernorm.weight"] = Target(f"{ours}.mlp_norm")
        for kind, suffix, attention, output, mlp in (
            ("weight", "", True, True, True),
            ("bias", "_bias", layer.attention_bias, layer.output_bias, layer.mlp_bias),
        ):
            if attention:
                for part in ("q", "k", "v"):
                    targets[f"{theirs}.self_attn.{part}_proj.{kind}"] = Target(f"{ours}.qkv{suffix}", part)
            if output:
                targets[f"{theirs}.self_attn.o_proj.{kind}"] = Target(f"{ours}.o{suffix}")
            if mlp:
                for part in ("gate", "up"):
                    targets[f"{theirs}.mlp.{part}_proj.{kind}"] = Target(f"{ours}.gate_up{suffix}", part)
                targets[f"{theirs}.mlp.down_proj.{kind}"] = Target(f"{ours}.down{suffix}")
    return NameMap(targets, frozenset(ignored))


# ---- GGUF


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> ModelConfig:
    """Reads the `llama.*` keys of a GGUF file's metadata, and from its tensors what those leave unsaid.

    Args:
      shapes: of each tensor, by name.
      rope_factors: [H / 2], the content of `rope_freqs.weight`, if the file has it.

    Raises: as `config_from_hf`.
    """
    if metadata.get("llama.expert_count"):
        raise UnsupportedError("llama.expert_count: mixture-of-experts models are not supported")
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedError("split.count: a GGUF in several files is not supported; merge it with llama-gguf-split")
    hidden_size = _count(metadata, "llama.embedding_length")
    num_heads = _count(metadata, "llama.attention.head_count")
    head_dim = _head_dim(metadata, "llama.attention.key_length", hidden_size, num_heads)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if metadata.get(key, head_dim) != head_dim:
            raise UnsupportedError(f"{key} {metadata[key]} is not supported: only the head dim, {head_dim}")
    layer = LayerSpec(
        rope=_rope_from_gguf(metadata, head_dim, rope_factors),
        attention_bias="blk.0.attn_q.bias" in shapes,
        output_bias="blk.0.attn_output.bias" in shapes,
        mlp_bias="blk.0.ffn_gate.bias" in shapes,
    )
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    embedding = shapes.get("token_embd.weight", (None,))
    return ModelConfig(
        family="llama",
        vocab_size=_count(metadata, "llama.vocab_size", default=embedding[0]),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=_count(metadata, "llama.attention.head_count_kv", default=num_heads),
        head_dim=head_dim,
        intermediate_size=_count(metadata, "llama.feed_forward_length"),
        layers=(layer,) * _count(metadata, "llama.block_count", most=_MOST_LAYERS),
        rms_norm_eps=_number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        max_position=_count(metadata, "llama.context_length"),
        tie_embeddings="output.weight" not in shapes,
        eos_token_ids=_token_ids(ends),
        bos_token_id=next(iter(_token_ids([metadata.get("tokenizer.ggml.bos_token_id")])), None),
    )


def _rope_from_gguf(metadata: Mapping[str, Any], head_dim: int, rope_factors: np.ndarray | None) -> RopeConfig:
    theta = _number(metadata, "llama.rope.freq_base", default=10_000.0)
    factors = np.ones(head_dim // 2) if rope_factors is None else rope_factors.astype(np.float64)
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(f"rope_freqs.weight has shape {factors.shape}, expected ({head_dim // 2},)")
    match metadata.get("llama.rope.scaling.type", "none"):
        case "none":
            pass
        case "linear":
            factors = factors * _number(metadata, "llama.rope.scaling.factor")
        case other:
            raise UnsupportedError(f"llama.rope.scaling.type {other} is not supported; known: none, linear")
    return RopeConfig(theta=theta, factors=tuple(factors.tolist()) if (factors != 1).any() else None)


def gguf_names(config: ModelConfig) -> NameMap:
    """Names in a GGUF file. Its q and k rows are permuted for interleaved rope: the targets say so."""
    targets = {
        "token_embd.weight": Target("embed"),
        "output_norm.weight": Target("final_norm"),
    }
    if not config.tie_embeddings:
        targets["output.weight"] = Target("head")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layers.{i}", f"blk.{i}"
        targets[f"{theirs}.attn_norm.weight"] = Target(f"{ours}.attn_norm")
        targets[f"{theirs}.ffn_norm.weight"] = Target(f"{ours}.mlp_norm")
        for kind, suffix, attention, output, mlp in (
            ("weight", "", True, True, True),
            ("bias", "_bias", layer.attention_bias, layer.output_bias, layer.mlp_bias),
        ):
            if attention:
                for part in ("q", "k", "v"):
                    interleaved = None if part == "v" else config.head_dim
                    targets[f"{theirs}.attn_{part}.{kind}"] = Target(f"{ours}.qkv{suffix}", part, interleaved)
            if output:
                targets[f"{theirs}.attn_output.{kind}"] = Target(f"{ours}.o{suffix}")
            if mlp:
                for part in ("gate", "up"):
                    targets[f"{theirs}.ffn_{part}.{kind}"] = Target(f"{ours}.gate_up{suffix}", part)
                targets[f"{theirs}.ffn_down.{kind}"] = Target(f"{ours}.down{suffix}")
    return NameMap(targets, frozenset({"rope_freqs.weight"}))  # its content is in the config


# ---- Checked look-ups


def _count(config: Mapping[str, Any], key: str, default: int | None = None, most: int = 1 << 31) -> int:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the model's config has no {key}")
    # A GGUF may give one value a layer; a decoder whose layers differ in it is not built here.
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, list):
        raise UnsupportedError(f"{key} differs between layers, which is not supported")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise CheckpointError(f"the model's config has {key} = {value!r}, expected an integer from 1 to {most}")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    if value is None:
        value = default
    if value is None:
        raise CheckpointError(f"the model's config has no {key}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CheckpointError(f"the model's config has {key} = {value!r}, expected a positive number")
    return float(value)


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"the model's config has {key} = {value!r}, expected an object")
    return value


def _token_ids(values: list[Any]) -> tuple[int, ...]:
    ids = tuple(dict.fromkeys(value for value in values if value is not None))
    for value in ids:
        if isinstance(value, bool) or not isinstance(value, int):
            raise CheckpointError(f"the model's config has {value!r} for a token id")
    return ids


def _head_dim(config: Mapping[str, Any], key: str, hidden_size: int, num_heads: int) -> int:
    if config.get(key) is None and hidden_size % num_heads:
        raise CheckpointError(f"the model's config has no {key}, and {num_heads} heads do not divide {hidden_size}")
    head_dim = _count(config, key, default=hidden_size // num_heads, most=_MOST_HEAD_DIM)
    if head_dim % 2:
        raise UnsupportedError(f"head dim {head_dim} is not supported: rope rotates pairs")
    return head_dim


FAMILY = Family(
    name="llama",
    hf_architectures=("LlamaForCausalLM",),
    hf_model_types=("llama",),
    gguf_architectures=("llama",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    config_to_hf=config_to_hf,
    hf_names=hf_names,
    gguf_names=gguf_names,
)
