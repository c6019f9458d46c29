"""Folders that `jaxinfer quantize` writes: what is in them, and that neither interruptions nor meshes change it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packed_folders
import pytest
import tiny_checkpoints
from typer.testing import CliRunner

from jaxinfer.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoints.source import Source, resolve
from jaxinfer.cli import app
from jaxinfer.config import LayerSpec, ModelConfig, RopeConfig
from jaxinfer.errors import CheckpointError, InvalidArgumentError, ModelNotFoundError, UnsupportedError
from jaxinfer.models.llama import config_from_hf, config_to_hf
from jaxinfer.quantize import Settings, _save, cut, quantize, read_text
from jaxinfer.quantize_layer import MATRICES, Batch, Devices, Layer, folded
from jaxinfer.text.tokenizer import Tokenizer

TINY = replace(
    tiny_checkpoints.VARIANTS["biases"], hidden=64, heads=4, kv_heads=2, intermediate=96, layers=3,
    config={"attention_bias": True, "mlp_bias": True},
)  # fmt: skip
METHODS = ("rtn", "awq", "gptq")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    tiny_checkpoints.write_hf_folder(folder, TINY)
    (folder / "generation_config.json").write_text('{"temperature": 0.3}')
    return folder


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(Source("gguf" if path.is_file() else "hf", path, path.stem))


def tokens_of(text: str) -> list[int]:
    """Plainly random: two sequences' worth and a half."""
    return np.random.default_rng(0).integers(0, tiny_checkpoints.VOCAB_SIZE, 1300).tolist()


def run(folder: Path, output: Path, method: str = "gptq", **options: Any) -> Path:
    settings = {key: options.pop(key) for key in list(options) if key in Settings.__dataclass_fields__}
    encode: Callable[[str], list[int]] = options.pop("encode", tokens_of)
    quantize(opened(folder), encode, "", output, Settings(method=method, **({"group_size": 32} | settings)), **options)
    return output


@pytest.fixture(scope="module")
def written(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("written")
    return {method: run(folder, base / method, method) for method in METHODS}


def is_matrix(name: str) -> bool:
    return "_proj.weight" in name


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_has_the_models_weights(written: dict[str, Path], method: str):
    read, theirs = packed_folders.folder(written[method]), tiny_checkpoints.make_weights(TINY)
    assert set(read) == set(theirs)
    for name, value in theirs.items():
        if method == "awq" and (is_matrix(name) or "v_proj" in name or "up_proj" in name or "layernorm" in name):
            continue  # scales are folded into them
        assert read[name].shape == value.shape
        if is_matrix(name):
            assert np.abs(read[name] - value).mean() < 0.15 * np.abs(value).mean()
        else:
            np.testing.assert_allclose(read[name], value, rtol=1e-3, atol=1e-6)
    config = json.loads((written[method] / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == {"rtn": "compressed-tensors"}.get(method, method)
    assert config["torch_dtype"] == ("float32" if method == "rtn" else "float16")
    files = {file.name for file in written[method].iterdir()}
    assert files == {file.name for file in (written["rtn"]).iterdir()}
    assert {"tokenizer.json", "tokenizer_config.json", "generation_config.json"} < files


@pytest.mark.parametrize("method", METHODS)
def test_who_may_read_the_config_may_read_the_weights(written: dict[str, Path], method: str):
    modes = {file.stat().st_mode for file in written[method].iterdir()}
    assert modes == {(written[method] / "config.json").stat().st_mode}


def test_what_an_interrupted_run_left_decides_no_mode(tmp_path: Path):
    (tmp_path / "model.partial").touch(0o600)
    (tmp_path / "config.json").touch()
    _save({"norm": np.ones(4, np.float32)}, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_mode == (tmp_path / "config.json").stat().st_mode


def logits(folder: Path, weights: dict[str, np.ndarray]) -> np.ndarray:
    """Of some tokens, by an engine-free run of the decoder in float32."""
    checkpoint = opened(folder)
    w: dict[str, Any] = {}
    for name, target in checkpoint._names.targets.items():
        w.setdefault(target.path, []).append(weights[name])
    w = {path: jnp.asarray(np.concatenate(values)) for path, values in w.items()}
    x_BLD = w["embed"][np.asarray(tokens_of("")[:64])][None]
    for index, spec in enumerate(checkpoint.config.layers):
        layer = layer_of(checkpoint.config, spec, x_BLD)
        own = {path.split(".")[2]: value for path, value in w.items() if path.startswith(f"layers.{index}.")}
        x_BLD = layer.outputs(own)[0].x_BLD
    return np.asarray(x_BLD[0] @ w["head"].T)


def layer_of(config: ModelConfig, spec: LayerSpec, x_BLD: jax.Array) -> Layer:
    q, k, F = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    rows = {"v": slice(q + k, q + 2 * k), "up": slice(F, 2 * F)}
    return Layer(config, spec, rows, [Batch(x_BLD, jnp.ones(len(x_BLD)))], Devices(jax.devices()[:1]))


def test_folding_leaves_the_floats_what_they_were(folder: Path):
    checkpoint, rng = opened(folder), np.random.default_rng(3)
    config, loaded = checkpoint.config, checkpoint.load(dtype=jnp.float32)
    own = {path.split(".")[2]: value for path, value in loaded.items() if path.startswith("layers.0.")}
    layer = layer_of(config, config.layers[0], jnp.asarray(rng.normal(0, 1, (2, 16, TINY.hidden)), jnp.float32))
    scales = {name: jnp.asarray(rng.uniform(0.2, 5, own[name].shape[1]), jnp.float32) for name in MATRICES}
    heads_KGH = scales["o"].reshape(config.num_kv_heads, -1, config.head_dim)
    scales["o"] = jnp.broadcast_to(heads_KGH[:, :1], heads_KGH.shape).ravel()
    before, after = (layer.outputs(w)[0].x_BLD for w in (own, folded(config, own, scales, layer.rows)))
    np.testing.assert_allclose(before, after, rtol=1e-4, atol=1e-4)
    assert not np.allclose(own["qkv"], folded(config, own, scales, layer.rows)["qkv"])


def test_the_layers_own_inputs_are_counted(folder: Path):
    """Moments are those of what the first matrix is given, over real sequences alone."""
    checkpoint, rng = opened(folder), np.random.default_rng(3)
    loaded = checkpoint.load(dtype=jnp.float32)
    own = {path.split(".")[2]: value for path, value in loaded.items() if path.startswith("layers.0.")}
    x_BLD = rng.normal(0, 1, (3, 16, TINY.hidden)).astype(np.float32)
    layer = layer_of(checkpoint.config, checkpoint.config.layers[0], jnp.asarray(x_BLD))
    layer = replace(layer, batches=[Batch(jnp.asarray(x_BLD), jnp.array([1.0, 1.0, 0.0]))])
    moments = layer.moments(own, ["qkv"])["qkv"]
    x_TD = x_BLD[:2].reshape(-1, TINY.hidden)
    y_TD = x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + 1e-5) * np.asarray(own["attn_norm"])
    np.testing.assert_allclose(moments.squares_II, y_TD.T @ y_TD / len(y_TD), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(moments.sizes_I, np.abs(y_TD).mean(0), rtol=1e-5)


def test_calibrated_methods_come_nearer_to_the_models_logits(folder: Path, written: dict[str, Path], tmp_path: Path):
    """With the same grid: float16 scales, zero points, groups of 32."""
    exact = logits(folder, tiny_checkpoints.make_weights(TINY))
    errors = {}
    for method in METHODS:
        path = run(folder, tmp_path / method, method, symmetric=False)
        errors[method] = np.square(logits(folder, packed_folders.folder(path)) - exact).mean()
    assert errors["gptq"] < errors["rtn"]
    assert errors["awq"] < errors["rtn"]


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_an_interrupted_run_goes_on_and_gives_the_same_files(
    folder: Path, written: dict[str, Path], tmp_path: Path, method: str
):
    def interrupt(done: int, total: int) -> None:
        if done == 2:
            raise Interrupted

    output = tmp_path / "out"
    with pytest.raises(Interrupted):
        run(folder, output, method, progress=interrupt)
    with pytest.raises(ModelNotFoundError):
        resolve(str(output), cache_dir=tmp_path)
    with pytest.raises(InvalidArgumentError, match="begun with another symmetric"):
        run(folder, output, method, symmetric=method == "awq")
    kept = {file: file.stat().st_mtime_ns for file in (output / ".quantize").glob("0000*.safetensors")}
    assert len(kept) == 2
    run(folder, output, method, progress=lambda done, _: [file.stat() for file in kept])
    assert {file.name for file in output.iterdir()} == {file.name for file in written[method].iterdir()}
    for file in output.iterdir():
        assert file.read_bytes() == (written[method] / file.name).read_bytes(), file.name


def test_a_file_cut_short_never_gets_its_name(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A write that stops in the middle of the result leaves no model, and the next run makes one."""
    real = os.replace

    def fails(source: Any, target: Any) -> None:
        if Path(target).name == "model.safetensors":
            raise OSError("no space left")
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fails)
        with pytest.raises(CheckpointError, match="no space left; run it again"):
            run(folder, tmp_path / "out", "rtn")
    assert not (tmp_path / "out" / "config.json").exists()
    run(folder, tmp_path / "out", "rtn")
    assert packed_folders.folder(tmp_path / "out")


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_devices_that_share_the_work_give_one_devices_numbers(
    folder: Path, written: dict[str, Path], tmp_path: Path, method: str
):
    run(folder, tmp_path / "out", method, devices=jax.devices()[:4])
    ours, theirs = (packed_folders.folder(path) for path in (tmp_path / "out", written[method]))
    for name, value in theirs.items():
        # Sums over sequences are taken in another order, so a number between two values may go to the other one.
        same = np.isclose(ours[name], value, rtol=2e-3, atol=1e-6)
        assert same.mean() > 0.995, (name, same.mean())


def test_a_gguf_file_becomes_a_folder(tmp_path: Path):
    path = tmp_path / "tiny.gguf"
    held = tiny_checkpoints.write_gguf(path, replace(TINY, config={}))
    checkpoint = opened(path)
    assert checkpoint.tokenizer_metadata is not None
    run(path, tmp_path / "out", "rtn", bits=8)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config.pop("quantization_config")
    ours = config_from_hf(config)
    assert replace(ours, eos_token_ids=()) == replace(checkpoint.config, eos_token_ids=())
    assert set(ours.eos_token_ids) >= set(checkpoint.config.eos_token_ids)
    read = packed_folders.folder(tmp_path / "out")
    for name, value in held.items():
        np.testing.assert_allclose(read[name], value, atol=0.03)
    theirs = Tokenizer.from_gguf(checkpoint.tokenizer_metadata)
    written = Tokenizer.from_folder(tmp_path / "out")
    for text in (
        "the quick brown fox",
        "  Hello,\n\n world 123 ",
        "naïve 日本 🙂",
        "<|im_start|>user\nx<|im_end|>",
        "",
    ):
        for special in (False, True):
            ids = theirs.encode(text, parse_special=special)
            assert written.encode(text, parse_special=special) == ids
        assert written.decode(ids) == theirs.decode(ids)
    assert written.chat_template == theirs.chat_template
    assert set(written.eos_token_ids) == set(theirs.eos_token_ids)


@pytest.mark.parametrize("factors", [None, (4.0,) * 8])
def test_a_config_comes_back_from_config_json(factors: tuple[float, ...] | None):
    layer = LayerSpec(rope=RopeConfig(theta=5e5, factors=factors), mlp_bias=True)
    config = ModelConfig(
        family="llama", vocab_size=99, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=96,
        layers=(layer,) * 2, rms_norm_eps=1e-5, max_position=77, tie_embeddings=True,
        eos_token_ids=(2, 5), bos_token_id=1,
    )  # fmt: skip
    assert config_from_hf(config_to_hf(config)) == config
    uneven = replace(layer, rope=RopeConfig(theta=5e5, factors=(1.0,) * 4 + (8.0,) * 4))
    with pytest.raises(UnsupportedError, match="rope factors"):
        config_to_hf(replace(config, layers=(uneven,) * 2))


def test_what_cannot_work_says_so(folder: Path, tmp_path: Path):
    with pytest.raises(
        InvalidArgumentError, match=r"group_size = 128 .* of 96, the inputs of layers.0.down; 16, 32 would"
    ):
        run(folder, tmp_path / "out", group_size=128)
    with pytest.raises(InvalidArgumentError, match="calibration = '300 tokens'"):
        run(folder, tmp_path / "out", encode=lambda text: [1] * 300)
    with pytest.raises(InvalidArgumentError, match="bits = 8"):
        Settings(method="awq", bits=8)
    with pytest.raises(InvalidArgumentError, match="act_order"):
        Settings(method="awq", act_order=True)
    with pytest.raises(InvalidArgumentError, match="method"):
        Settings(method="hqq")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a.txt").touch()
    with pytest.raises(InvalidArgumentError, match="output"):
        run(folder, tmp_path / "full")
    with pytest.raises(InvalidArgumentError, match="output"):
        run(folder, folder)


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_activations_beyond_float32_are_an_error_that_names_the_matrix(tmp_path: Path, method: str):
    weights = tiny_checkpoints.make_weights(TINY)
    tiny_checkpoints.write_hf_folder(tmp_path / "m", TINY)
    weights["model.layers.1.mlp.up_proj.weight"] *= np.float32(1e25)
    tiny_checkpoints.write_safetensors(tmp_path / "m" / "model.safetensors", weights)
    with pytest.raises(CheckpointError, match=r"layers\.1\.down: the activations that enter it are not finite"):
        run(tmp_path / "m", tmp_path / "out", method)


def test_the_packages_own_text_is_there_and_long_enough():
    text = read_text(None)
    assert len(text.encode()) > 20_000
    assert len(set(text.split())) > 2000  # varied
    assert cut(list(text.encode()), 512).shape == (min(128, len(text.encode()) // 512), 512)
    with pytest.raises(InvalidArgumentError, match="calibration"):
        read_text(Path("/nowhere/at/all"))


def test_the_command(folder: Path, tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text(read_text(None)[:4000])
    arguments = [
        "quantize",
        "--model",
        str(folder),
        "--method",
        "awq",
        "--group-size",
        "32",
        "--calibration",
        str(text),
    ]
    result = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "out"), "--mesh", "tensor=2"])
    assert result.exit_code == 0, result.output
    assert packed_folders.folder(tmp_path / "out")
