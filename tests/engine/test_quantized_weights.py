"""Weights that stay packed, through the engine: the tokens of the same numbers in floats, and no float copy."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
import tiny_checkpoints
from engine_harness import Answer

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.source import Source
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.errors import CheckpointError
from jaxinfer.quantize import Settings, quantize
from jaxinfer.types import Request, SamplingParams

TINY = replace(tiny_checkpoints.VARIANTS["llama2"], hidden=64, heads=4, kv_heads=2, head_dim=16, intermediate=96)


GGUF = replace(TINY, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=256)  # whole blocks of 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "model"
    tiny_checkpoints.write_hf_folder(folder, TINY)
    return folder


def start(model: Path, cache_dir: Path, **options) -> Engine:
    config = EngineConfig(
        model=str(model), dtype="float32", max_num_seqs=4, max_num_batched_tokens=8, page_size=4, max_model_len=64,
        **options,
    )  # fmt: skip
    return Engine.start(config, cache_dir=cache_dir)


def tokens(engine: Engine) -> list[list[int]]:
    rng, answers = np.random.default_rng(0), []
    for number in range(6):
        answers.append(Answer(f"r{number}"))
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, skip_special_tokens=False)
        prompt = rng.integers(5, 380, int(rng.integers(1, 20))).tolist()
        engine.submit(Request(request_id=f"r{number}", params=params, token_ids=prompt), answers[-1].sink)
    return [answer.tokens for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "scan"), [("int4:16", True), ("int4:128", False), ("int8", False), ("fp8", True)])
def test_packed_weights_give_the_tokens_of_their_numbers_in_floats(folder, cache_dir, kind, scan):
    """In float32 both multiply the same numbers; groups of 128 are filled up where there are 64 or 96 inputs."""
    options = {"quantize": kind, "scan_layers": scan, "quantize_rules": ("layers.1.qkv.k=float",)}
    with start(folder, cache_dir, packed=True, **options) as engine:
        packed = tokens(engine)
        assert engine.stats().compiles_after_warmup == 0
    with start(folder, cache_dir, packed=False, **options) as engine:
        assert tokens(engine) == packed


@pytest.mark.slow
def test_a_device_holds_the_packed_bytes_and_no_float_copy(folder, cache_dir):
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    with start(folder, cache_dir, quantize="int4:32", packed=True) as engine:
        structure = engine._started.layout.structures[0]
        held = sum(leaf.on_device_size_in_bytes() for leaf in engine.runners[0].leaves[0])
        assert held == structure.num_bytes
        matrices = TINY.layers * (4 * 64 * 64 - 2 * 32 * 64 + 3 * 64 * 96)
        wide = (2 * 384 * 64 + (2 * TINY.layers + 1) * 64) * 4
        assert held == wide + matrices // 2 + matrices // 32 * 3
        vocabulary = 384 * 64
        ours = [array for array in jax.live_arrays() if id(array) not in before and array.ndim == 2]
        assert sum(array.size == vocabulary for array in ours) == 2
        assert not any(array.dtype == np.float32 and array.size >= 32 * 64 and array.size != vocabulary and
                       min(array.shape) >= 32 for array in ours)  # fmt: skip


def test_a_weight_that_is_not_finite_is_named(folder, cache_dir, tmp_path):
    tiny_checkpoints.write_hf_folder(tmp_path / "bad", TINY)
    file = tmp_path / "bad" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][3, 5] = np.nan
    safetensors.numpy.save_file(tensors, file)
    with pytest.raises(CheckpointError, match=rf"{name}: weights that are not finite"):
        start(tmp_path / "bad", cache_dir, quantize="int4:32", packed=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_1", "Q5_0", "Q4_K"])
def test_a_gguf_stays_packed_and_gives_the_same_tokens(cache_dir, tmp_path, kind):
    tiny_checkpoints.write_gguf(tmp_path / "m.gguf", GGUF, dtype=kind)
    with start(tmp_path / "m.gguf", cache_dir) as engine:
        floats = tokens(engine)
    with start(tmp_path / "m.gguf", cache_dir, packed=True) as engine:
        assert tokens(engine) == floats
        assert any(leaf.ndim == 3 for leaf in engine.runners[0].leaves[0])


@pytest.fixture(scope="module")
def quantized(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Folders that `jaxinfer quantize` writes."""
    prompt = np.random.default_rng(0).integers(5, 380, 1100).tolist()

    def make(method: str, **settings) -> Path:
        output = tmp_path_factory.mktemp("quantized") / method
        checkpoint = open_checkpoint(Source("hf", folder, "model"))
        quantize(checkpoint, lambda text: prompt, "", output, Settings(method=method, group_size=16, **settings))
        return output

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "settings"),
    [("awq", {}), ("gptq", {"act_order": True, "symmetric": False}), ("gptq", {"bits": 8}), ("rtn", {})],
    ids=["awq", "gptq act-order", "gptq 8", "compressed-tensors"],
)
def test_what_quantize_writes_is_served_packed(quantized, cache_dir, method, settings):
    """Inputs of o and down in an order of their own are gathered from both devices."""
    model = quantized(method, **settings)
    with start(model, cache_dir) as engine:
        floats = tokens(engine)
    for mesh in (None, "tensor=2") if "act_order" in settings else (None,):
        with start(model, cache_dir, packed=True, mesh=mesh) as engine:
            assert len(engine._started.choice.schemes) == 7 * TINY.layers
            assert tokens(engine) == floats
