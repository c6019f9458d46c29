"""Configs and tensor names of the Llama family."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import tiny_checkpoints
from tiny_checkpoints import VARIANTS, hf_config
from transformers import LlamaConfig

from jaxinfer.config import LayerSpec, RopeConfig
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


def test_what_files_leave_out_is_what_transformers_takes(caplog):
    config = config_from_hf({"model_type": "llama", "hidden_size": 64})
    theirs = LlamaConfig(hidden_size=64)
    assert (config.vocab_size, config.hidden_size, config.num_heads) == (32000, 64, theirs.num_attention_heads)
    assert (config.num_kv_heads, config.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (config.intermediate_size, len(config.layers)) == (theirs.intermediate_size, theirs.num_hidden_layers)
    assert (config.rms_norm_eps, config.max_position) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert (config.eos_token_ids, config.bos_token_id) == ((theirs.eos_token_id,), theirs.bos_token_id)
    assert config.tie_embeddings == theirs.tie_word_embeddings
    assert config.layers[0] == LayerSpec(rope=RopeConfig(theta=10_000.0))
    for key in ("vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
        assert f"config.json has no {key}: {getattr(theirs, key)} is taken" in caplog.text
    nothing = tiny_config(
        num_key_value_heads=None, head_dim=None, rope_theta=None, eos_token_id=None, bos_token_id=None
    )
    config = config_from_hf(nothing)
    assert (config.num_kv_heads, config.head_dim, config.layers[0].rope.theta) == (4, 12, 10_000.0)
    assert (config.eos_token_ids, config.bos_token_id) == ((), None)


ROPE_FORMS = [
    {"rope_scaling": LLAMA3_SCALING, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
    {"rope_scaling": LLAMA3_SCALING, "rope_parameters": {"rope_type": "default", "rope_theta": 7e5}, "rope_theta": ...},
    {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    {"rope_scaling": None, "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7e5}},
    {"rope_scaling": {"type": "linear", "factor": 2.0, "rope_theta": 7e5}},
    {"rope_scaling": {"type": "linear", "rope_type": "default", "factor": 2.0}},
    {"rope_scaling": {"factor": 2.0}},
    {"rope_parameters": {"rope_type": "default"}, "rope_theta": 7e5},
    {"rope_scaling": LLAMA3_SCALING, "original_max_position_embeddings": 128},
    {"rope_scaling": {k: v for k, v in LLAMA3_SCALING.items() if not k.startswith("original")}},
    {"rope_theta": 10000},
]


@pytest.mark.parametrize("form", ROPE_FORMS)
def test_of_the_forms_of_rope_those_count_that_count_in_transformers(form):
    said = tiny_config(rope_theta=5e5, head_dim=64) | form
    said = {key: value for key, value in said.items() if value is not ...}
    theirs = LlamaConfig(**copy.deepcopy(said))
    theirs.standardize_rope_params()  # as the model does once more when it is made
    rope = theirs.rope_parameters
    ours = config_from_hf(said).layers[0].rope
    assert ours.theta == rope["rope_theta"]
    match rope["rope_type"]:
        case "default":
            assert ours.factors is None
        case "linear":
            assert ours.factors == (rope["factor"],) * 32
        case "llama3":
            alone = {key: value for key, value in said.items() if not key.startswith(("rope", "original"))}
            assert ours == config_from_hf(alone | {"rope_parameters": rope}).layers[0].rope
            slowest = 2 * math.pi * rope["rope_theta"] ** (62 / 64)
            assert (ours.factors[-1] == 32) == (slowest > rope["original_max_position_embeddings"])


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
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, r"rope_parameters\.full_attention"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"text_config": {"hidden_size": 48}}, "text_config"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier 12"),
        ({"residual_multiplier": 0.22}, "residual_multiplier 0.22"),
        ({"logits_scaling": 8.0}, "logits_scaling 8"),
        ({"attention_multiplier": 0.0078}, "attention_multiplier 0.0078"),
        ({"query_pre_attn_scalar": 256}, "query_pre_attn_scalar 256"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping 30"),
        ({"num_local_experts": 8}, "num_local_experts 8"),
        ({"rope_interleaved": True}, "rope_interleaved True"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
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
@pytest.mark.parametrize("value", [None, "12", 0, -1, True, [1, "2"]])
def test_a_senseless_key_is_named(key, value):
    with pytest.raises((CheckpointError, UnsupportedError), match=key):
        config_from_hf(tiny_config(**{key: value}))


def test_senseless_nested_values_are_named():
    for changes in (
        *({"rope_scaling": ["linear"]}, {"rope_scaling": "linear"}, {"eos_token_id": "</s>"}, {"rope_theta": "1e4"}),
        *(
            {"attention_bias": "false"},
            {"tie_word_embeddings": 1},
            {"mlp_bias": "no"},
            {"max_position_embeddings": 2.0},
        ),
    ):
        with pytest.raises(CheckpointError, match=next(iter(changes)).removesuffix("_id").replace("eos_", "")):
            config_from_hf(tiny_config(**changes))
    with pytest.raises(CheckpointError, match=r"low_freq_factor is 4\.0"):
        config_from_hf(tiny_config(rope_scaling=LLAMA3_SCALING | {"low_freq_factor": 4.0}))
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
    config = config_from_gguf(GGUF_METADATA, GGUF_SHAPES | {"output.weight": (384, 48)}, None)
    assert not config.tie_embeddings


def test_the_embedding_of_a_gguf_says_how_large_the_vocabulary_is(caplog):
    assert gguf_config(**{"llama.vocab_size": 380}).vocab_size == 384
    assert "llama.vocab_size is 380, but the embedding has 384 rows" in caplog.text


def test_gguf_end_tokens():
    ids = {"tokenizer.ggml.eos_token_id": 5, "tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 5}
    assert gguf_config(**ids).eos_token_ids == (5, 7)
    sentencepiece = gguf_config(**{"tokenizer.ggml.model": "llama"})
    assert (sentencepiece.eos_token_ids, sentencepiece.bos_token_id) == ((2,), 1)


def test_gguf_rope_factors_multiply():
    linear = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert gguf_config(**linear).layers[0].rope.factors == (4.0,) * 6
    factors = np.array([1, 1, 2, 4, 8, 8], np.float32)
    assert gguf_config(factors).layers[0].rope.factors == (1, 1, 2, 4, 8, 8)
    assert gguf_config(factors, **linear).layers[0].rope.factors == (4, 4, 8, 16, 32, 32)
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight"):
        gguf_config(factors[:-1])


@pytest.mark.parametrize(
    ("rope", "factor"),
    [
        ({"scale_linear": 4.0}, 4),
        ({"scaling.factor": 4.0}, 4),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, 2),
        ({"scaling.factor": 0.0, "scale_linear": 4.0}, None),
        ({"scaling.type": "linear"}, None),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        ({"scaling.type": "none", "scale_linear": 4.0}, None),
        ({"scaling.type": "linear", "scale_linear": 4.0}, 4),
        ({"scaling.factor": 4.0, "scaling.original_context_length": 128, "scaling.attn_factor": 1.0}, 4),
    ],
)
def test_linear_rope_of_a_gguf_as_llama_cpp_reads_it(rope, factor):
    metadata = {f"llama.rope.{key}": value for key, value in rope.items()}
    assert gguf_config(**metadata).layers[0].rope.factors == (None if factor is None else (factor,) * 6)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
        ({"llama.rope.scaling.attn_factor": 1.5}, "attn_factor 1.5"),
        ({"llama.rope.scaling.yarn_ext_factor": 1.0}, "yarn_ext_factor"),
        ({"llama.attention.scale": 0.5}, r"attention\.scale 0.5"),
        ({"llama.logit_scale": 8.0}, "logit_scale 8"),
        ({"llama.embedding_scale": 12.0}, "embedding_scale 12"),
        ({"llama.residual_scale": 0.22}, "residual_scale 0.22"),
        ({"llama.attention.clamp_kqv": 8.0}, "clamp_kqv"),
        ({"llama.attention.causal": False}, "causal False"),
        ({"llama.nextn_predict_layers": 1}, "nextn_predict_layers"),
        ({"general.type": "adapter"}, r"general\.type 'adapter'"),
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


def test_what_changes_nothing_in_a_gguf_is_taken(caplog):
    metadata = {
        **{"llama.attention.scale": 12**-0.5, "llama.logit_scale": 1.0, "llama.expert_count": 0},
        **{"llama.attention.causal": True, "llama.rope.dimension_count": 12, "llama.attention.value_length": 12},
        **{"general.type": "model", "general.file_type": 7, "general.quantization_version": 2, "split.count": 1},
        **{
            "quantize.imatrix.file": "x",
            "tokenizer.ggml.pre": "default",
            "llama.tensor_data_layout": "Meta AI original pth",
        },
    }
    assert gguf_config(**metadata) == gguf_config()
    assert not caplog.records


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
    assert family_of_hf({"architectures": "LlamaForCausalLM"}).name == "llama"
    assert family_of_hf({"architectures": ["LLaMAForCausalLM"], "model_type": "llama"}).name == "llama"  # of 2023
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
