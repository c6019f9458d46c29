"""The Llama family: Llama 2, 3 and 3.x, TinyLlama, SmolLM2. Its config and its tensor names; no code of the model."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxinfer.config import LayerSpec, ModelConfig, RopeConfig
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models.config_keys import (
    GGUF_HARMLESS,
    GGUF_NEUTRAL,
    HF_HARMLESS,
    KeyTable,
    count,
    flag,
    mapping,
    number,
    token_ids,
)
from jaxinfer.models.family import Family, NameMap, Target

logger = logging.getLogger(__name__)

# Beyond any model there is: a damaged file must not make lists of billions.
_MOST_LAYERS, _MOST_HEAD_DIM = 4096, 65_536

# ---- Hugging Face

# Sizes that transformers' LlamaConfig takes where a config.json has none: those of LLaMA 7B.
_SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
_HF_KEYS = KeyTable(
    used=frozenset(
        {
            *("architectures", "model_type", *_SIZES, "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps"),
            *("max_position_embeddings", "original_max_position_embeddings", "rope_theta", "rope_scaling"),
            *("rope_parameters", "partial_rotary_factor", "attention_bias", "mlp_bias", "tie_word_embeddings"),
            *("bos_token_id", "eos_token_id", "attention_multiplier", "query_pre_attn_scalar", "layer_types"),
            *("quantization_config", "compression_config"),
        }
    ),
    # `pretraining_tp` slices products that are summed again; `max_sequence_length` was never read.
    harmless=(*HF_HARMLESS, "pretraining_tp", "max_sequence_length", "is_llama_config"),
    neutral={
        **dict.fromkeys(("text_config", "scale_depth", "dim_model_base", "clip_qkv", "mrope_section"), ()),
        **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"), (1,)),
        **dict.fromkeys(("scale_emb", "embedding_scale", "residual_scale"), (1,)),
        **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "logits_soft_cap"), (0,)),
        **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "num_nextn_predict_layers"), (0,)),
        **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "rope_interleaved"), (False,)),
        **dict.fromkeys(("alibi", "use_alibi", "qk_norm", "use_qk_norm"), (False,)),
        "hidden_activation": ("silu", "swish"),
        "position_embedding_type": ("rope", "rotary"),
    },
    unused={
        **dict.fromkeys(
            ("sliding_window", "use_sliding_window", "max_window_layers"), "a Llama's tokens see all before them"
        ),
        **dict.fromkeys(("layer_norm_eps", "layer_norm_epsilon", "norm_eps"), "a Llama's is rms_norm_eps"),
    },
)
# Of the settings of rope, what each type reads besides its theta; the first names win.
_ROPE_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads config.json as transformers' LlamaConfig does, its defaults included.

    Raises:
      CheckpointError: a key is missing or no number; the message names it.
      UnsupportedError: a setting the decoder does not have; the message names it.
    """
    _HF_KEYS.check(config)
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise UnsupportedError(f"hidden_act {act} is not supported: a Llama uses silu")
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise UnsupportedError(f"layer_types {config['layer_types']!r:.200} is not supported: only full_attention")
    for key, default in _SIZES.items():
        if key not in config:
            logger.warning("config.json has no %s: %d is taken, as transformers does", key, default)
    size = {key: count(config, key, default) for key, default in _SIZES.items() if key != "num_hidden_layers"}
    hidden_size, num_heads = size["hidden_size"], size["num_attention_heads"]
    head_dim = _head_dim(config, "head_dim", hidden_size, num_heads)
    _check_attention_scale("attention_multiplier", config.get("attention_multiplier"), head_dim)
    _check_attention_scale("query_pre_attn_scalar", config.get("query_pre_attn_scalar"), head_dim, power=-0.5)
    attention_bias = flag(config, "attention_bias")
    layer = LayerSpec(
        rope=_rope_from_hf(config, head_dim),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=flag(config, "mlp_bias"),
    )
    ends = config.get("eos_token_id", 2)
    return ModelConfig(
        family="llama",
        vocab_size=size["vocab_size"],
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=count(config, "num_key_value_heads", num_heads, nullable=True),
        head_dim=head_dim,
        intermediate_size=size["intermediate_size"],
        layers=(layer,) * count(config, "num_hidden_layers", _SIZES["num_hidden_layers"], most=_MOST_LAYERS),
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        max_position=count(config, "max_position_embeddings", 2048),
        tie_embeddings=flag(config, "tie_word_embeddings"),
        eos_token_ids=token_ids(ends if isinstance(ends, list) else [ends]),
        bos_token_id=next(iter(token_ids([config.get("bos_token_id", 1)])), None),
    )


def _rope_from_hf(config: Mapping[str, Any], head_dim: int) -> RopeConfig:
    """Transformers 5 writes `rope_parameters`, with the theta inside; 4 writes `rope_scaling` and `rope_theta`.

    Where both are there it heeds `rope_scaling` alone, and a theta beside it, not one in `rope_parameters`.
    """
    scaling, parameters = mapping(config, "rope_scaling"), mapping(config, "rope_parameters")
    if scaling and parameters and scaling != parameters:
        logger.warning("config.json has rope_scaling and rope_parameters: the latter is not used, as in transformers")
    rope, within = (scaling, "rope_scaling.") if scaling else (parameters, "rope_parameters.")
    beside = number(config, "rope_theta", 10_000.0, nullable=True)
    theta = number(rope, "rope_theta", beside, nullable=True, within=within)
    if (fraction := rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))) not in (None, 1.0):
        raise UnsupportedError(f"partial_rotary_factor {fraction} is not supported: a Llama rotates whole heads")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in _ROPE_KEYS:
        raise UnsupportedError(f"rope type {kind!r:.200} is not supported; known: {', '.join(_ROPE_KEYS)}")
    for key, value in rope.items():
        if isinstance(value, Mapping):
            raise UnsupportedError(f"{within}{key}: rope that differs between kinds of layers is not supported")
    read = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", *_ROPE_KEYS[kind]})
    others = f"rope of type {kind} does not read it"
    KeyTable(used=read, unused=dict.fromkeys(rope.keys() - read, others)).check(rope, within)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(theta=theta, factors=(number(rope, "factor", within=within),) * (head_dim // 2))
    key = "original_max_position_embeddings"
    context = number(rope, key, count(config, "max_position_embeddings", 2048), nullable=True, within=within)
    low, high = (number(rope, f"{which}_freq_factor", within=within) for which in ("low", "high"))
    if low >= high:
        raise CheckpointError(f"{within}low_freq_factor is {low}, expected less than high_freq_factor, {high}")
    factors = _llama3_factors(
        theta,
        head_dim,
        factor=number(rope, "factor", within=within),
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=number(config, key, context, nullable=True),
    )
    return RopeConfig(theta=theta, factors=factors)


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
    if not config.tie_embeddings:
        targets["lm_head.weight"] = Target("head")
    for i, layer in enumerate(config.layers):
        ours, theirs = f"layers.{i}", f"model.layers.{i}"
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
    return NameMap(targets)


# ---- GGUF

_GGUF_KEYS = KeyTable(
    used=frozenset(
        {
            *("general.architecture", "general.alignment", "llama.vocab_size", "llama.context_length"),
            *("llama.embedding_length", "llama.block_count", "llama.feed_forward_length", "llama.attention.head_count"),
            *("llama.attention.head_count_kv", "llama.attention.key_length", "llama.attention.value_length"),
            *("llama.attention.layer_norm_rms_epsilon", "llama.attention.scale", "llama.rope.dimension_count"),
            *(
                "llama.rope.freq_base",
                "llama.rope.scaling.type",
                "llama.rope.scaling.factor",
                "llama.rope.scale_linear",
            ),
            *("split.count", "llama.embedding_length_out"),
        }
    ),
    # The length before scaling, and YaRN's two betas, are of YaRN alone, whose type is refused.
    harmless=(
        *(*GGUF_HARMLESS, "llama.rope.scaling.finetuned", "llama.rope.scaling.original_context_length"),
        *(
            "llama.rope.scaling.yarn_beta_*",
            "llama.tensor_data_layout",
            "llama.pooling_type",
            "llama.expert_used_count",
        ),
    ),
    neutral={
        **GGUF_NEUTRAL,
        **{f"llama.{key}": (0, 1) for key in ("logit_scale", "embedding_scale", "residual_scale")},
        **{f"llama.{key}": (0,) for key in ("expert_count", "nextn_predict_layers", "leading_dense_block_count")},
        **{f"llama.{key}_logit_softcapping": (0,) for key in ("attn", "final", "router")},
        **{f"llama.attention.{key}": (0,) for key in ("max_alibi_bias", "clamp_kqv", "temperature_scale")},
        **{f"llama.attention.{key}": (0, 1) for key in ("output_scale", "value_scale")},
        "llama.rope.scaling.attn_factor": (1,),
        "llama.rope.scaling.alpha": (0, 1),
        "llama.rope.scaling.yarn_log_multiplier": (0,),
        "llama.rope.scaling.yarn_ext_factor": (0, -1),
        "llama.rope.scaling.yarn_attn_factor": (1, -1),
        "llama.rope.dimension_sections": ([0, 0, 0, 0],),
        "llama.attention.causal": (True,),
        "llama.use_parallel_residual": (False,),
        "llama.hidden_activation": ("silu",),
    },
    unused={
        **dict.fromkeys(
            ("llama.attention.sliding_window", "llama.attention.sliding_window_pattern"),
            "llama.cpp has no windows in this architecture",
        ),
        "llama.attention.layer_norm_epsilon": "llama.attention.layer_norm_rms_epsilon is",
    },
)


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], rope_factors: np.ndarray | None
) -> ModelConfig:
    """Reads the `llama.*` keys of a GGUF file's metadata as llama.cpp does, and from its tensors what those leave
    unsaid.

    Args:
      shapes: of each tensor, by name.
      rope_factors: [H / 2], the content of `rope_freqs.weight`, if the file has it.

    Raises: as `config_from_hf`.
    """
    _GGUF_KEYS.check(metadata)
    if metadata.get("split.count", 0) not in (0, 1):
        raise UnsupportedError("split.count: a GGUF in several files is not supported; merge it with llama-gguf-split")
    hidden_size = count(metadata, "llama.embedding_length")
    num_heads = count(metadata, "llama.attention.head_count")
    head_dim = _head_dim(metadata, "llama.attention.key_length", hidden_size, num_heads)
    for key, only in (
        *(("llama.rope.dimension_count", head_dim), ("llama.attention.value_length", head_dim)),
        ("llama.embedding_length_out", hidden_size),
    ):
        if metadata.get(key, only) != only:
            raise UnsupportedError(f"{key} {metadata[key]} is not supported: only {only}")
    if metadata.get("llama.attention.scale"):  # 0 is none
        _check_attention_scale("llama.attention.scale", metadata["llama.attention.scale"], head_dim)
    is_sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    if ends[0] is None and is_sentencepiece:
        ends[0] = 2
    return ModelConfig(
        family="llama",
        vocab_size=_gguf_vocab_size(metadata, shapes),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=count(metadata, "llama.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=count(metadata, "llama.feed_forward_length"),
        layers=(LayerSpec(rope=_rope_from_gguf(metadata, head_dim, rope_factors)),)
        * count(metadata, "llama.block_count", most=_MOST_LAYERS),
        rms_norm_eps=number(metadata, "llama.attention.layer_norm_rms_epsilon"),
        max_position=count(metadata, "llama.context_length"),
        tie_embeddings="output.weight" not in shapes,
        eos_token_ids=token_ids(ends),
        bos_token_id=next(
            iter(token_ids([metadata.get("tokenizer.ggml.bos_token_id", 1 if is_sentencepiece else None)])), None
        ),
    )


def _gguf_vocab_size(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of the embedding: llama.cpp does not read `llama.vocab_size` of a file that has a vocabulary."""
    said = metadata.get("llama.vocab_size")
    rows = next(iter(shapes.get("token_embd.weight", ())), None)
    if rows is None:
        return count(metadata, "llama.vocab_size")
    if said not in (None, rows):
        logger.warning("llama.vocab_size is %r, but the embedding has %d rows, which counts", said, rows)
    return count({"llama.vocab_size": rows}, "llama.vocab_size")


def _rope_from_gguf(metadata: Mapping[str, Any], head_dim: int, rope_factors: np.ndarray | None) -> RopeConfig:
    """Of both keys for a linear factor the newer one counts; 0 is none, and so is any where the type is none."""
    theta = number(metadata, "llama.rope.freq_base", 10_000.0)
    factors = np.ones(head_dim // 2) if rope_factors is None else rope_factors.astype(np.float64)
    if factors.shape != (head_dim // 2,):
        raise CheckpointError(f"rope_freqs.weight has shape {factors.shape}, expected ({head_dim // 2},)")
    kind = metadata.get("llama.rope.scaling.type", "linear")
    if kind not in ("none", "linear"):
        raise UnsupportedError(f"llama.rope.scaling.type {kind!r:.200} is not supported; known: none, linear")
    key = "llama.rope.scaling.factor"
    if key not in metadata:
        key = "llama.rope.scale_linear"
    if kind == "linear" and metadata.get(key, 0) != 0:
        factors = factors * number(metadata, key)
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


# ---- Both


def _head_dim(config: Mapping[str, Any], key: str, hidden_size: int, num_heads: int) -> int:
    if config.get(key) is None and hidden_size % num_heads:
        raise CheckpointError(f"the model's config has no {key}, and {num_heads} heads do not divide {hidden_size}")
    head_dim = count(config, key, hidden_size // num_heads, most=_MOST_HEAD_DIM, nullable=True)
    if head_dim % 2:
        raise UnsupportedError(f"head dim {head_dim} is not supported: rope rotates pairs")
    return head_dim


def _check_attention_scale(key: str, value: Any, head_dim: int, power: float = 1.0) -> None:
    """Raises UnsupportedError if what scores are multiplied by, `value ** power`, is not H ** -0.5."""
    if value is not None and not math.isclose(number({key: value}, key) ** power, head_dim**-0.5, rel_tol=1e-6):
        raise UnsupportedError(f"{key} {value} is not supported: scores are divided by the root of the head dim")


FAMILY = Family(
    name="llama",
    hf_architectures=("LlamaForCausalLM", "LLaMAForCausalLM"),
    hf_model_types=("llama",),
    gguf_architectures=("llama",),
    config_from_hf=config_from_hf,
    config_from_gguf=config_from_gguf,
    config_to_hf=config_to_hf,
    hf_names=hf_names,
    gguf_names=gguf_names,
)
