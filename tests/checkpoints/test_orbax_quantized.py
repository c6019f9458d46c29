"""Converted checkpoints whose matrices stay quantized."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import safetensors
from test_orbax import change, check_same, opened
from tiny_checkpoints import VARIANTS, Tiny, write_gguf, write_hf_folder

from jaxinfer.checkpoints import convert as converting
from jaxinfer.checkpoints.convert import convert
from jaxinfer.checkpoints.manifest import stored_as
from jaxinfer.errors import CheckpointError
from jaxinfer.models.decoder import decoder_structure

GOLDEN = Path(__file__).parents[1] / "golden" / "quantized"
ONE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


@pytest.mark.parametrize(
    "name",
    [
        "awq_gemm_g32",
        "gptq_int4_act_order",
        "gptqmodel_int8_v1",
        "ct_int4_group",
        "ct_int4_channel",
        "ct_w8a8",
        "fp8_block",
    ],
)
def test_what_is_quantized_stays_so(tmp_path, name):
    """Matrices of every kind there is; three of them in one weight, with others in floats beside them."""
    tiny = Tiny(9, hidden=64, heads=2, kv_heads=2, head_dim=16, intermediate=48)
    write_hf_folder(tmp_path / "hf", tiny)
    golden = safetensors.safe_open(GOLDEN / f"{name}.safetensors", "np")
    config = json.loads(golden.metadata()["quantization_config"])
    put_in = [f"model.layers.{layer}.self_attn.{part}_proj" for layer, part in ((0, "q"), (0, "k"), (0, "v"), (1, "v"))]
    _put_matrices(tmp_path / "hf" / "model.safetensors", GOLDEN / f"{name}.safetensors", put_in)
    targets = [group.__setitem__("targets", ["Linear"]) for group in config.get("config_groups", {}).values()]
    assert len(targets) <= 1
    changed = json.loads((tmp_path / "hf" / "config.json").read_text()) | {"quantization_config": config}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(changed))
    theirs = opened(tmp_path / "hf")
    convert(theirs, tmp_path / "orbax")
    ours = opened(tmp_path / "orbax")
    assert ours.schemes == theirs.schemes
    assert ours.schemes.keys() == {"layers.0.qkv.q", "layers.0.qkv.k", "layers.0.qkv.v", "layers.1.qkv.v"}
    check_same(ours, theirs)
    restored = ocp.StandardCheckpointer().restore(tmp_path / "orbax" / "weights")["layers"]["1"]["qkv"]["v"]
    scheme = ours.schemes["layers.1.qkv.v"]
    assert restored.keys() == stored_as(scheme, 32, 64).keys()
    assert {holds: (array.shape, array.dtype) for holds, array in restored.items()} == stored_as(scheme, 32, 64)
    specs = decoder_structure(ours.config, ours.dtype, schemes=ours.schemes).specs
    homes = {path: [jax.tree.map(lambda _: ONE, spec.arrays)] for path, spec in specs.items()}
    expected = theirs.load_sharded(specs, homes)
    for path, (weight,) in ours.load_sharded(specs, homes).items():
        jax.tree.map(np.testing.assert_array_equal, weight, expected[path][0])


def _put_matrices(path: Path, golden: Path, modules: Sequence[str]) -> None:
    """A model's file again, a golden file's matrix in the place of some of its own."""

    def read(file: Path) -> tuple[dict, bytes]:
        raw = file.read_bytes()
        size = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:size])
        header.pop("__metadata__")
        return header, raw[size:]

    (ours, data), (theirs, matrix) = read(path), read(golden)
    entries = [(name, entry, data) for name, entry in ours.items() if name.removesuffix(".weight") not in modules]
    for module in modules:
        named = [(name.replace("m.", f"{module}.", 1), entry) for name, entry in theirs.items() if name != "expected"]
        entries += [(name, entry, matrix) for name, entry in named]
    header, body = {}, b""
    for name, entry, source in entries:
        start, stop = entry["data_offsets"]
        header[name] = entry | {"data_offsets": [len(body), len(body) + stop - start]}
        body += source[start:stop]
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    path.write_bytes(len(head).to_bytes(8, "little") + head + body)


@pytest.mark.parametrize("dtype", ["Q4_1", "Q6_K"])
def test_the_blocks_of_a_gguf_stay_packed_in_slabs(tmp_path, dtype, monkeypatch):
    """Rows of q and k are put in order on the way, whole heads at a time."""
    monkeypatch.setattr(converting, "_CHUNK_ROWS", 48)
    monkeypatch.setattr(converting, "_CHUNK_COLUMNS", 100)
    monkeypatch.setattr(converting, "_SLAB_BYTES", 20_000)
    write_gguf(tmp_path / "tiny.gguf", VARIANTS["blocks"], dtype)
    theirs = opened(tmp_path / "tiny.gguf")
    convert(theirs, tmp_path / "orbax")
    ours = opened(tmp_path / "orbax")
    assert ours.schemes == theirs.schemes
    assert "embed" in ours.schemes
    check_same(ours, theirs)


def test_quantized_arrays_that_do_not_fit(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", VARIANTS["blocks"], "Q4_1")
    convert(opened(tmp_path / "tiny.gguf"), tmp_path / "orbax")
    manifest = json.loads((tmp_path / "orbax" / "jaxinfer.json").read_text())
    down = {stored["holds"]: stored for stored in manifest["weights"]["layers.0.down"]}
    for holds, other, said in (
        (
            "scales",
            "layers.0.o.scales",
            r"array layers\.0\.o\.scales is float16 \[256, 8\], expected float16 \[256, 16\]",
        ),
        ("scales", "layers.0.down.values", r"layers\.0\.down\.values is uint8 "),
        ("values", "final_norm", r"final_norm has shape \[256\], not of a matrix"),
    ):
        arrays = [*(down | {holds: down[holds] | {"array": other}}).values()]
        change(tmp_path / "orbax", weights=manifest["weights"] | {"layers.0.down": arrays})
        with pytest.raises(CheckpointError, match=said):
            opened(tmp_path / "orbax")
