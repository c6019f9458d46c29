"""What checkpoints carry beyond their config, and what their configs say: seen in logits, against float64 NumPy."""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from test_quantized_folder import CT4, FP8, GPTQ, matrix
from test_quantized_folder import write as write_parts
from tiny_checkpoints import VARIANTS, Tiny, hf_config, make_weights, write_gguf, write_hf_folder, write_tokenizer
from transformers import LlamaConfig
from whole_model import Model, numpy_logits

from jaxinfer.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoints.convert import convert
from jaxinfer.checkpoints.source import resolve
from jaxinfer.errors import CheckpointError
from jaxinfer.models.decoder import decoder_structure

TINY, TIED = VARIANTS["llama2"], VARIANTS["smollm2"]
TOKENS = np.random.default_rng(0).integers(3, 384, 32)
Q0 = "model.layers.0.self_attn.q_proj"
FILE = "model.safetensors"


def write(folder: Path, tensors: dict[str, np.ndarray], tiny: Tiny = TINY, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file({name: np.ascontiguousarray(each) for name, each in tensors.items()}, folder / FILE)
    said = {key: value for key, value in (hf_config(tiny) | config).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(said))
    write_tokenizer(folder)
    return folder


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(resolve(str(path), cache_dir=path.parent, offline=True))


def check_logits(path: Path, weights: dict[str, np.ndarray], tiny: Tiny = TINY, **settings: Any) -> None:
    """Float32 keeps 2**-24 of a number, and its sums in another order keep 1e-6 or so of the largest logit."""
    expected = numpy_logits(tiny, weights, TOKENS, **settings)
    logits = Model(path, scan=True, length=len(TOKENS)).logits(TOKENS)
    assert np.abs(logits - expected).max() <= 1e-4 * np.abs(expected).max()


def inv_freq(theta: float, head_dim: int = TINY.H) -> np.ndarray:
    return theta ** (-np.arange(0, head_dim, 2) / head_dim)


# ---- Keys that change numbers


@pytest.mark.parametrize("metadata", [{"rope.scale_linear": 4.0}, {"rope.scaling.factor": 4.0}])
def test_a_gguf_with_a_linear_factor_and_no_type(tmp_path, metadata):
    path = tmp_path / "tiny.gguf"
    held = write_gguf(path, TINY, metadata={f"llama.{key}": value for key, value in metadata.items()})
    check_logits(path, held, inv_freq=inv_freq(1e4) / 4)


def test_rope_scaling_counts_where_rope_parameters_are_there_as_well(tmp_path, caplog):
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64}
    both = {"rope_scaling": scaling, "rope_parameters": {"rope_type": "default", "rope_theta": 2e4}}
    path = write(tmp_path, make_weights(TINY), **both, rope_theta=5e5)
    theirs = LlamaConfig(**both, rope_theta=5e5).rope_parameters
    assert (theirs["rope_type"], theirs["rope_theta"]) == ("llama3", 5e5)
    frequencies = inv_freq(5e5)
    turns = 64 * frequencies / (2 * np.pi)
    smooth = np.clip((turns - 1) / 3, 0, 1)
    check_logits(path, make_weights(TINY), inv_freq=(1 - smooth) * frequencies / 8 + smooth * frequencies)
    assert "rope_parameters: the latter is not used" in caplog.text


def test_defaults_of_transformers(tmp_path):
    left_out = dict.fromkeys(("rms_norm_eps", "rope_theta", "max_position_embeddings", "num_key_value_heads"), ...)
    weights = make_weights(TINY)
    weights["model.embed_tokens.weight"] *= np.float32(1e-3)  # so that another epsilon shows
    path = write(tmp_path, weights, **left_out)
    assert opened(path).config.max_position == 2048
    check_logits(path, weights, eps=1e-6)


# ---- Heads


def test_a_head_beside_a_tied_embedding_is_used_if_it_differs(tmp_path, caplog):
    weights = make_weights(TIED)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"][::-1].copy()
    check_logits(write(tmp_path / "other", weights, TIED), weights, TIED)
    assert "lm_head.weight differs from the embedding and is used, though tie_word_embeddings is true" in caplog.text
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].copy()
    weights["lm_head.weight"][-1, -1] += 1  # as of a token that was trained alone
    assert "head" in opened(write(tmp_path / "one", weights, TIED)).load()
    caplog.clear()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    checkpoint = opened(write(tmp_path / "same", weights, TIED))
    assert checkpoint.config.tie_embeddings
    assert "head" not in checkpoint.load()
    assert not caplog.records
    weights["lm_head.weight"] = weights["lm_head.weight"].astype(np.float64)
    assert opened(write(tmp_path / "wider", weights, TIED)).config.tie_embeddings


def test_a_tied_matrix_may_have_the_name_of_the_head_alone(tmp_path):
    weights = make_weights(TIED)
    named = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    del named["model.embed_tokens.weight"]
    check_logits(write(tmp_path, named, TIED), weights, TIED)


def test_a_head_that_is_missing_names_the_key_that_would_do_without(tmp_path):
    weights = make_weights(TINY)
    del weights["lm_head.weight"]
    for said in (False, ...):
        path = write(tmp_path, weights, tie_word_embeddings=said)
        with pytest.raises(CheckpointError, match=r"lm_head\.weight is missing .*, and tie_word_embeddings is not set"):
            opened(path).load()


# ---- Biases


def biases_of(weights: dict[str, np.ndarray], make) -> dict[str, np.ndarray]:
    return {
        name.replace(".weight", ".bias"): make(value.shape[0]).astype(np.float32)
        for name, value in weights.items()
        if name.endswith("_proj.weight")
    }


def gptq(weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With every projection quantized at random."""
    packed = {name: value for name, value in weights.items() if not name.endswith("_proj.weight")}
    for name, value in weights.items():
        if name.endswith("_proj.weight"):
            parts = matrix(GPTQ, *value.shape)
            packed |= {f"{name.removesuffix('.weight')}.{part}": each for part, each in parts.items()}
    return packed


def test_zero_biases_that_the_config_knows_nothing_of(tmp_path, caplog):
    weights = make_weights(TINY)
    zeros = biases_of(weights, np.zeros) | {"lm_head.bias": np.zeros(384, np.float32)}
    zeros["model.norm.bias"] = -np.zeros(48, np.float32)
    with caplog.at_level(logging.INFO):
        checkpoint = opened(write(tmp_path / "gptq", gptq(weights) | zeros, quantization_config=GPTQ))
        loaded = checkpoint.load()
    assert not any("bias" in path for path in loaded)
    assert len(checkpoint.schemes) == 14
    assert "16 tensors are not used, as they are all zeros: lm_head.bias, model.layers.0" in caplog.text
    path = write(tmp_path / "float", weights | zeros)
    assert opened(path).config == opened(write(tmp_path / "without", weights)).config
    check_logits(path, weights)


def test_biases_that_are_not_zero_are_added(tmp_path, caplog):
    weights = make_weights(TINY)
    rng = np.random.default_rng(1)
    weights |= biases_of(weights, lambda n: 0.3 * rng.standard_normal(n))
    check_logits(write(tmp_path / "all", weights), weights)
    assert "model.layers.0.mlp.down_proj.bias is not zero and is added" in caplog.text


def test_biases_of_some_matrices_of_some_layers_are_added(tmp_path):
    weights = make_weights(TINY)
    added = 0.5 * np.random.default_rng(1).standard_normal(48).astype(np.float32)
    weights |= {"model.layers.1.self_attn.k_proj.bias": added, f"{Q0}.bias": np.zeros(48, np.float32)}
    path = write(tmp_path / "hf", weights)
    check_logits(path, weights)
    convert(opened(path), tmp_path / "orbax")
    ours, theirs = opened(tmp_path / "orbax").load(), opened(path).load()
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        np.testing.assert_array_equal(ours[name], value)
    assert opened(path).config.layers[0].attention_bias
    assert not opened(path).config.layers[0].output_bias


def test_biases_of_a_gguf_may_be_of_some_matrices_of_some_layers(tmp_path, caplog):
    added = 0.5 * np.random.default_rng(1).standard_normal(80).astype(np.float32)
    extra = {
        "blk.1.ffn_up.bias": added,
        "blk.0.attn_v.bias": added[:48],
        "blk.0.attn_output.bias": np.zeros_like(added[:48]),
    }
    held = write_gguf(tmp_path / "tiny.gguf", TINY, tensors=extra)
    held |= {"model.layers.1.mlp.up_proj.bias": added, "model.layers.0.self_attn.v_proj.bias": added[:48]}
    check_logits(tmp_path / "tiny.gguf", held)
    assert not caplog.records


def test_biases_that_no_layer_has_are_zeros_as_in_transformers(tmp_path, caplog):
    weights = make_weights(VARIANTS["biases"])
    for i in (0, 1):
        del weights[f"model.layers.{i}.self_attn.o_proj.bias"]
    loaded = opened(write(tmp_path, weights, VARIANTS["biases"])).load()
    assert not loaded["layers.0.o_bias"].any()
    assert "o_proj.bias is in no layer and counts as zeros" in caplog.text
    del weights["model.layers.1.mlp.up_proj.bias"]  # which the other layer has
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.bias is missing"):
        opened(write(tmp_path, weights, VARIANTS["biases"])).load()


def test_masks_say_nothing_of_the_weights_dtype(tmp_path):
    weights = {name: value.astype(np.float16) for name, value in make_weights(TINY).items()}
    mask = {"model.layers.0.self_attn.bias": np.ones((1, 1, 512, 512), bool)}
    assert opened(write(tmp_path, weights | mask)).dtype == np.float16


@pytest.mark.parametrize("name", ["model.norm.bias", "lm_head.bias", "model.layers.0.input_layernorm.bias"])
def test_biases_that_the_decoder_cannot_add_are_refused_by_name(tmp_path, name):
    path = write(tmp_path, make_weights(TINY) | {name: np.ones(48, np.float32)})
    with pytest.raises(CheckpointError, match=rf"{name} \(\[48\]\) is not a tensor of this model"):
        opened(path).load()


# ---- Tensors that change nothing


@pytest.mark.parametrize(
    "names",
    [
        ["model.layers.0.self_attn.k_scale", "model.layers.0.self_attn.v_scale"],
        ["model.layers.1.self_attn.kv_scale"],
        ["model.layers.0.self_attn.q_scale", "model.layers.0.self_attn.prob_scale"],
        ["model.layers.0.self_attn.k_proj.output_scale", "model.layers.0.self_attn.v_proj.output_scale"],
        ["model.layers.0.self_attn.k_proj.k_scale", "model.layers.0.self_attn.attn.v_scale"],
        ["model.layers.0.self_attn.k_zero_point", "model.layers.0.mlp.down_proj.input_scale", "lm_head.input_scale"],
    ],
)
def test_scales_of_the_cache_and_of_activations(tmp_path, caplog, names):
    weights = make_weights(TINY)
    quantized = {
        f"{name.removesuffix('.weight')}.{part}": each
        for name, value in weights.items()
        if name.endswith("_proj.weight")
        for part, each in matrix(CT4, *value.shape).items()
    }
    kept = {name: value for name, value in weights.items() if not name.endswith("_proj.weight")}
    extra = {name: np.ones((), np.float32) for name in names}
    config = CT4 | {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}}
    plain = opened(write(tmp_path / "plain", kept | quantized, quantization_config=CT4))
    with caplog.at_level(logging.INFO):
        checkpoint = opened(write(tmp_path / "scaled", kept | quantized | extra, quantization_config=config))
    assert "tensors are not used" in caplog.text
    assert "a scale for each token and head" in caplog.text or "activations are not rounded" in caplog.text
    ours, theirs = checkpoint.load(), plain.load()
    assert all(np.array_equal(ours[path], value) for path, value in theirs.items())
    floats = write(tmp_path / "float", weights | extra)
    assert opened(floats).load().keys() == theirs.keys()


def test_scales_of_the_cache_in_a_folder_of_float8(tmp_path):
    weights = make_weights(TINY)
    modules = {name.removesuffix(".weight"): {"weight": value} for name, value in weights.items()}
    modules[Q0] = matrix(FP8, 48, 48)
    for name in ("k_scale", "v_scale"):
        modules["model.layers.0.self_attn"] = modules.get("model.layers.0.self_attn", {}) | {name: np.float32([0.5])}
    write_parts(tmp_path, modules)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(TINY) | {"quantization_config": FP8}))
    checkpoint = opened(tmp_path)
    assert checkpoint.schemes.keys() == {"layers.0.qkv.q"}
    read = modules[Q0]["weight"].astype(np.float32) * 0.5
    check_logits(tmp_path, weights | {f"{Q0}.weight": read})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.rotary_emb.inv_freq", np.ones(6, np.float32)),
        ("model.layers.1.self_attn.rotary_emb.cos_cached", np.ones((1, 1, 8, 12), np.float32)),
        ("model.causal_mask", np.ones((8, 8), bool)),
        ("model.layers.0.self_attn.bias", np.tril(np.ones((1, 1, 8, 8), bool))),
        ("model.layers.0.self_attn.masked_bias", np.float32(-1e9)),
        ("anything.at_all", np.zeros((0, 4), np.float32)),
        ("lm_head.lora_nothing", np.zeros(0, np.float16)),
    ],
)
def test_leftovers_that_change_no_number(tmp_path, name, value):
    weights = make_weights(TINY)
    assert (
        opened(write(tmp_path, weights | {name: value})).load().keys() == opened(write(tmp_path, weights)).load().keys()
    )
    quantized = write(tmp_path / "gptq", gptq(weights) | {name: value}, quantization_config=GPTQ)
    assert opened(quantized).load()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.2.mlp.up_proj.weight", (80, 48)),
        ("model.layers.0.self_attn.q_norm.weight", (12,)),
        ("model.layers.0.self_attn.sinks", (4,)),
        ("model.layers.0.mlp.gate.weight", (8, 48)),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", (4, 48)),
    ],
)
def test_what_may_change_a_number_is_refused_by_name(tmp_path, name, shape):
    path = write(tmp_path, make_weights(TINY) | {name: np.zeros(shape, np.float32)})
    with pytest.raises(CheckpointError, match=rf"{name} .* is not a tensor of this model"):
        opened(path).load()


def test_norms_may_be_wider_than_the_matrices(tmp_path):
    weights = make_weights(TINY)
    stored = {n: value if value.ndim == 1 else value.astype(ml_dtypes.bfloat16) for n, value in weights.items()}
    held = {name: value.astype(np.float32) for name, value in stored.items()}
    write(tmp_path, stored)
    assert opened(tmp_path).dtype == ml_dtypes.bfloat16
    check_logits(tmp_path, held)


# ---- Names


@pytest.mark.parametrize("prefix", ["", "module.", "language_model.", "base_model.model."])
def test_names_with_another_prefix(tmp_path, prefix):
    weights = make_weights(TINY)
    if prefix:
        named = {prefix + name: value for name, value in weights.items()}
    else:  # as the model without its head is saved
        named = {name.removeprefix("model."): value for name, value in weights.items()}
    path = write(tmp_path, named)
    ours, theirs = opened(path).load(), opened(write(tmp_path / "plain", weights)).load()
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name], value) for name, value in theirs.items())


def test_names_with_a_prefix_in_the_place_of_the_model_s(tmp_path):
    weights = make_weights(TINY)
    named = {name.replace("model.", "language_model."): value for name, value in weights.items()}
    assert opened(write(tmp_path, named)).load()["head"].shape == (384, 48)


def test_names_with_and_without_a_prefix_are_refused(tmp_path):
    weights = {f"module.{name}": value for name, value in make_weights(TINY).items()}
    path = write(tmp_path, weights | {"lm_head.weight": weights["module.lm_head.weight"]})
    with pytest.raises(CheckpointError, match=r"there twice, with the prefix module\.model\. and without it"):
        opened(path)


# ---- Files


links = pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")


@links
@pytest.mark.parametrize("absolute", [True, False])
def test_weights_may_be_links_into_a_hub_s_cache(tmp_path, absolute):
    write_hf_folder(tmp_path / "model", TINY)
    blobs = tmp_path / "hub" / "models--org--name" / "blobs"
    blobs.mkdir(parents=True)
    (tmp_path / "model" / FILE).rename(blobs / "0a1b")
    (tmp_path / "model" / FILE).symlink_to(blobs / "0a1b" if absolute else "../hub/models--org--name/blobs/0a1b")
    assert opened(tmp_path / "model").load()
    (blobs / "0a1b").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is a link to .*0a1b, which is not there"):
        opened(tmp_path / "model")


@links
def test_shards_may_be_links_to_another_folder(tmp_path):
    write_hf_folder(tmp_path / "far", VARIANTS["sharded"])
    shutil.copytree(tmp_path / "far", tmp_path / "near")
    for shard in sorted((tmp_path / "near").glob("model-*")):
        shard.unlink()
        shard.symlink_to(tmp_path / "far" / shard.name)
    assert opened(tmp_path / "near").load()


def with_index(folder: Path, weights: dict[str, np.ndarray]) -> None:
    """Two shards and their index."""
    names, weight_map = list(weights), {}
    for number, each in enumerate((names[::2], names[1::2])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        safetensors.numpy.save_file({name: weights[name] for name in each}, folder / file)
        weight_map |= dict.fromkeys(each, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_of_a_single_file_and_an_index_the_whole_one_counts(tmp_path, caplog):
    ours, others = make_weights(TINY), make_weights(Tiny(99, kv_heads=4))
    write(tmp_path, ours)
    with_index(tmp_path, others)
    embed = opened(tmp_path).load()["embed"]
    np.testing.assert_array_equal(embed, ours["model.embed_tokens.weight"])
    assert "model.safetensors is used, model.safetensors.index.json and the files it names are not" in caplog.text
    part = {name: value for name, value in ours.items() if ".1." not in name}
    write(tmp_path, part)
    np.testing.assert_array_equal(opened(tmp_path).load()["embed"], others["model.embed_tokens.weight"])
    assert "and is not used, model.safetensors.index.json is" in caplog.text


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("pytorch_model.bin", r"pytorch_model\.bin, whose format \(pickle\) is not read"),
        ("consolidated.safetensors", r"consolidated\.safetensors, whose tensors have other names"),
        ("adapter_model.safetensors", r"adapter_model\.safetensors: a LoRA adapter"),
    ],
)
def test_weights_in_other_files_are_named(tmp_path, file, said):
    write(tmp_path, make_weights(TINY))
    (tmp_path / FILE).rename(tmp_path / file)
    with pytest.raises(CheckpointError, match=rf"neither model\.safetensors nor .*, but {said}"):
        opened(tmp_path)


def test_other_files_beside_the_weights_are_of_no_matter(tmp_path):
    write(tmp_path, make_weights(TINY))
    for name in ("consolidated.safetensors", "pytorch_model.bin"):
        (tmp_path / name).write_bytes(b"x")
    assert opened(tmp_path).load()


def test_what_a_stage_or_a_mesh_declares_is_read_where_biases_are_not_there(tmp_path):
    """As padded biases on a mesh are: nothing of what memory held before is left in them."""
    weights = make_weights(TINY) | {"model.layers.1.mlp.up_proj.bias": np.ones(80, np.float32)}
    checkpoint = opened(write(tmp_path, weights))
    with checkpoint.weights(decoder_structure(checkpoint.config, np.float32).specs) as read:
        first, second = (read.read(f"layers.{i}.gate_up_bias", (slice(0, 160),)) for i in (0, 1))
    assert not first.any()
    assert second.tolist() == [0.0] * 80 + [1.0] * 80
