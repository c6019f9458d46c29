"""Configs and tensor names of the Llama family."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny_checkpoints
from tiny_checkpoints import VARIANTS, hf_config

from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models.family import NameMap
from jaxinfer.models.llama import config_from_gguf, config_from_hf, gguf_names, hf_names
from jaxinfer.models.registry import family_of_gguf, family_of_hf

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tiny_config(**changes) -> dict:
    config = hf_config(VARIANTS["llama2"]) | changes
    return {key: value for key, value in config.items() if value is not ...}


GGUF_METADATA = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.context_length": 512,
    "llama.embedding_length": 48,
    "llama.feed_forward_length": 80,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}
GGUF_SHAPES = {"token_embd.weight": (384, 48)}


def gguf_config(rope_factors=None, **changes):
    metadata = {key: value for key, value in (GGUF_METADATA | changes).items() if value is not ...}
    return config_from_gguf(metadata, GGUF_SHAPES, rope_factors)


def test_every_field_of_a_hugging_face_config():
    config = config_from_hf(hf_config(VARIANTS["wide_heads"]) | {"eos_token_id": [2, 0, 2]})
    assert (config.family, config.vocab_size, config.hidden_size) == ("llama", 384, 48)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (3, 1, 20)
    assert (config.intermediate_size, len(config.layers), config.max_position) == (80, 3, 512)
    assert (config.rms_norm_eps, config.tie_embeddings) == (1e-5, False)
    assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 0))


def test_what_older_files_leave_out():
    config = config_from_hf(
        tiny_config(
            num_key_value_heads=..., tie_word_embeddings=..., rope_theta=..., eos_token_id=..., bos_token_id=...
        )
    )
    assert (config.num_kv_heads, config.head_dim, config.tie_embeddings) == (4, 12, False)
    assert (config.layers[0].rope.theta, config.layers[0].rope.factors) == (10_000.0, None)
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)


def test_biases():
    layer = config_from_hf(tiny_config(attention_bias=True, mlp_bias=True)).layers[0]
    assert layer.attention_bias
    assert layer.output_bias
    assert layer.mlp_bias


@pytest.mark.parametrize("type_key", ["rope_type", "type"])
@pytest.mark.parametrize("form", ["rope_scaling", "rope_parameters"])
def test_linear_rope_in_the_forms_of_both_versions_of_transformers(form, type_key):
    rope = {type_key: "linear", "factor": 4.0}
    theta = {"rope_theta": 5e5} if form == "rope_scaling" else {"rope_theta": ...}
    if form == "rope_parameters":
        rope["rope_theta"] = 5e5
    rope_config = config_from_hf(tiny_config(**theta, **{form: rope})).layers[0].rope
    assert rope_config.theta == 5e5
    assert rope_config.factors == (4.0,) * 6


def test_llama3_rope_keeps_fast_frequencies_slows_slow_ones_and_blends_between():
    config = config_from_hf(tiny_config(head_dim=64, rope_theta=5e5, rope_scaling=LLAMA3_SCALING))
    factors = np.array(config.layers[0].rope.factors)
    wavelengths = 2 * math.pi * 5e5 ** (np.arange(0, 64, 2) / 64)
    assert (factors[wavelengths < 8192 / 4] == 1).all()
    assert (factors[wavelengths > 8192] == 32).all()
    between = factors[(wavelengths > 8192 / 4) & (wavelengths < 8192)]
    assert len(between)
    assert ((between > 1) & (between < 32)).all()
    assert (np.diff(factors) >= 0).all()


def test_a_null_or_default_rope_scaling_is_none():
    for scaling in (None, {"rope_type": "default"}, {"type": "default"}):
        assert config_from_hf(tiny_config(rope_scaling=scaling)).layers[0].rope.factors is None


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"head_dim": 13}, "13"),
    ],
)
def test_what_is_not_supported_is_named(changes, named):
    with pytest.raises(UnsupportedError, match=named):
        config_from_hf(tiny_config(**changes))


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
@pytest.mark.parametrize("value", [..., None, "12", 0, -1, True, [1, "2"]])
def test_a_missing_or_senseless_key_is_named(key, value):
    with pytest.raises((CheckpointError, UnsupportedError), match=key):
        config_from_hf(tiny_config(**{key: value}))


def test_senseless_nested_values_are_named():
    for changes in ({"rope_scaling": ["linear"]}, {"eos_token_id": "</s>"}):
        with pytest.raises(CheckpointError):
            config_from_hf(tiny_config(**changes))
    with pytest.raises(CheckpointError, match="factor"):
        config_from_hf(tiny_config(rope_scaling={"rope_type": "linear"}))
    with pytest.raises(CheckpointError, match="low_freq_factor"):
        config_from_hf(tiny_config(rope_scaling=LLAMA3_SCALING | {"low_freq_factor": None}))
    with pytest.raises(CheckpointError, match="5 heads do not divide 48"):
        config_from_hf(tiny_config(num_attention_heads=5))


def test_a_gguf_config_with_defaults():
    config = gguf_config()
    assert (config.vocab_size, config.head_dim, config.tie_embeddings) == (384, 12, True)
    assert (config.layers[0].rope.theta, config.layers[0].rope.factors) == (10_000.0, None)
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)


def test_gguf_tensors_say_what_metadata_does_not():
    names = ["output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_gate.bias"]
    config = config_from_gguf(GGUF_METADATA, GGUF_SHAPES | dict.fromkeys(names, (48,)), None)
    layer = config.layers[0]
    assert not config.tie_embeddings
    assert layer.attention_bias
    assert layer.output_bias
    assert layer.mlp_bias


def test_gguf_end_tokens():
    ids = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
    assert gguf_config(**ids).eos_token_ids == (5, 7)


def test_gguf_rope_factors_multiply():
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert gguf_config(**linear).layers[0].rope.factors == (4.0,) * 6
    factors = np.array([1, 1, 2, 4, 8, 8], np.float32)
    assert gguf_config(factors).layers[0].rope.factors == (1, 1, 2, 4, 8, 8)
    assert gguf_config(factors, **linear).layers[0].rope.factors == (4, 4, 8, 16, 32, 32)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight"):
        gguf_config(factors[:-1])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"split.count": 2}, "split.count"),
        ({"llama.rope.dimension_count": 6}, "dimension_count"),
        ({"llama.attention.value_length": 16}, "value_length"),
        ({"llama.attention.head_count_kv": [2, 4]}, "head_count_kv"),
    ],
)
def test_what_is_not_supported_in_a_gguf_is_named(changes, named):
    with pytest.raises(UnsupportedError, match=named):
        gguf_config(**changes)


def test_one_value_a_layer_is_fine_where_they_agree():
    assert gguf_config(**{"llama.attention.head_count_kv": [2, 2]}).num_kv_heads == 2


def test_a_missing_gguf_key_is_named():
    for key in GGUF_METADATA:
        if key not in ("general.architecture", "llama.attention.head_count_kv"):
            with pytest.raises(CheckpointError, match=key):
                gguf_config(**{key: ...})


def test_names_are_those_of_the_files():
    for tiny in VARIANTS.values():
        weights = tiny_checkpoints.make_weights(tiny)
        config = config_from_hf(hf_config(tiny))
        assert hf_names(config).targets.keys() == weights.keys()
        assert {(t.path, t.part) for t in hf_names(config).targets.values()} == {
            (t.path, t.part) for t in gguf_names(config).targets.values()
        }


def test_only_q_and_k_of_a_gguf_are_interleaved():
    names: NameMap = gguf_names(config_from_hf(hf_config(VARIANTS["biases"])))
    interleaved = {name for name, target in names.targets.items() if target.interleaved}
    assert interleaved == {f"blk.{i}.attn_{p}.{kind}" for i in (0, 1) for p in "qk" for kind in ("weight", "bias")}


def test_families_are_found_by_what_a_checkpoint_says():
    assert family_of_hf({"architectures": ["LlamaForCausalLM"]}).name == "llama"
    assert family_of_hf({"model_type": "llama"}).name == "llama"
    assert family_of_gguf({"general.architecture": "llama"}).name == "llama"
    with pytest.raises(UnsupportedError, match=r"FalconForCausalLM.*LlamaForCausalLM"):
        family_of_hf({"architectures": ["FalconForCausalLM"], "model_type": "llama"})
    with pytest.raises(UnsupportedError, match=r"falcon.*llama"):
        family_of_hf({"model_type": "falcon"})
    with pytest.raises(UnsupportedError, match=r"falcon.*llama"):
        family_of_gguf({"general.architecture": "falcon"})
    with pytest.raises(CheckpointError, match="architectures"):
        family_of_hf({})
    with pytest.raises(CheckpointError, match=r"general\.architecture"):
        family_of_gguf({})
