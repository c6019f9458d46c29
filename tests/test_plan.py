"""Plans of real models: the questions people ask, by arithmetic; refusals; JSON; and steps compiled without a chip."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import compilers
import jax
import plan_steps
import pytest
import tiny_checkpoints
from rich.console import Console

from jaxinfer import plan_report
from jaxinfer.config import ModelConfig
from jaxinfer.errors import InvalidArgumentError, ModelNotFoundError, UnsupportedError
from jaxinfer.models.cards import CARDS
from jaxinfer.plan import Plan, make_plan
from jaxinfer.plan_sizes import PlanRequest, Sizes
from sharding.compile import CompileError
from sharding.hardware import parse_devices
from sharding.mesh import MeshConfig

STEPS = Path(plan_steps.__file__)


def plan(model: str, chips: str, **options) -> Plan:
    return make_plan(PlanRequest(model=model, chips=chips, **{"compiles": False, **options}))


# ---- What people ask


def test_llama_3_70b_in_16_bits_does_not_fit_one_card_of_80_gb():
    made = plan("llama-3-70b", "h100:1")
    memory = made.deployment.tightest
    assert not made.deployment.fits
    # 70.55 billion parameters in two bytes each, and eight sequences of 8,192 tokens beside them.
    assert memory.weights == pytest.approx(141.1e9, rel=1e-3)
    assert memory.kv_pool == pytest.approx(8 * 8192 * 2 * 80 * 8 * 128 * 2, rel=1e-3)
    assert -memory.left == pytest.approx(79.8e9, rel=5e-3)
    assert made.deployment.max_sequences == 0
    assert plan_report.answer(made).startswith("no: 58.")


def test_llama_3_70b_in_4_bits_fits_two_a100():
    made = plan("llama-3-70b", "a100-80g:2", weights="int4")
    assert made.deployment.fits
    assert str(made.mesh) == "tensor=2"
    # 68.45 billion parameters in 4 bits, with 3 bytes for each 128, and 2.1 billion in 16, on two devices.
    assert made.deployment.tightest.weights == pytest.approx((68.45e9 * (4 / 8 + 3 / 128) + 2.1e9 * 2) / 2, rel=2e-3)
    assert 40 < made.deployment.max_sequences < 50
    assert not plan("llama-3-70b", "a100-40g:1", weights="int4").deployment.fits


def test_qwen2_72b_in_4_bits_fits_one_h200():
    made = plan("qwen2-72b", "h200:1", weights="int4")
    assert made.deployment.fits
    assert made.deployment.context == 32768
    assert made.deployment.tightest.weights == pytest.approx(41.74e9, rel=1e-3)
    assert not plan("qwen2-72b", "h200:1", weights="int4", concurrency=20).deployment.fits


def test_every_card_has_a_plan():
    for name in CARDS:
        assert plan(name, "b200:1", concurrency=1).deployment.fits


def test_chatglm3_6b_has_as_many_parameters_as_published():
    weights = plan("chatglm3-6b", "h200:1").deployment.tightest.weights
    assert weights / 2 == pytest.approx(6.244e9, rel=1e-3)  # 6,243,584,000


# ---- Sizes


@pytest.mark.parametrize(
    ("weights", "matrix"),
    [
        ("bf16", 256 * 512 * 2),
        ("int8", 256 * 512 + 256 * 4),
        ("fp8", 256 * 512 + 256 * 4),
        ("int4", 256 * 4 * (64 + 3)),
    ],
)
def test_bytes_of_a_quantized_weight_by_hand(weights, matrix):
    model = replace(CARDS["llama-3-8b"], hidden_size=256, intermediate_size=512, layers=CARDS["llama-3-8b"].layers[:1])
    structure, wide = (sizes_of(model, kind).structures(MeshConfig())[0] for kind in (weights, "bf16"))
    assert structure.weight_bytes_per_device("layers.0.down") == matrix
    for path in ("embed", "head", "final_norm", "layers.0.attn_norm"):
        assert structure.weight_bytes_per_device(path) == wide.weight_bytes_per_device(path)


def test_every_device_has_whole_groups_of_int4():
    # 29,568 inputs of Qwen2-72B's down projection are 231 groups: with two shards, 116 groups each.
    structure = sizes_of(CARDS["qwen2-72b"], "int4").structures(MeshConfig(tensor=2))[0]
    assert structure.weight_bytes_per_device("layers.0.down") == 8192 * 116 * (64 + 3)
    assert structure.specs["layers.0.gate_up"].shape == (2 * 2 * 116 * 128, 8192)


def sizes_of(model: ModelConfig, weights: str) -> Sizes:
    request = PlanRequest(model="a", chips="h200", weights=weights)
    return Sizes(request, model, parse_devices("h200")[0], 128)


@pytest.mark.parametrize(("kv", "size"), [("bf16", 2 * 128), ("int8", 128 + 4), ("fp8", 128 + 4)])
def test_a_token_of_kv_brings_its_scales(kv, size):
    stage = plan("llama-3-8b", "h200:1", kv=kv).deployment.stages[0]
    assert stage.page_bytes == 32 * 32 * 2 * 8 * size  # layers, tokens, K and V, heads


def test_heads_are_split_and_shared():
    one, four, sixteen = (plan("llama-3-8b", f"h100:{n}", mesh=f"tensor={n}").deployment for n in (1, 4, 16))
    assert four.stages[0].page_bytes * 4 == one.stages[0].page_bytes
    assert sixteen.stages[0].page_bytes * 8 == one.stages[0].page_bytes  # eight KV heads, each on two devices
    assert [e.count for e in four.stages[0].exchanges] == [65]  # two a layer, and the embedding
    assert one.stages[0].exchanges == ()


def test_stages_hold_their_layers():
    whole, parts = (plan("llama-3-8b", "h100:2", mesh=mesh).deployment for mesh in ("tensor=1", "stage=2"))
    assert sum(s.weight_bytes for s in parts.stages) == whole.stages[0].weight_bytes
    assert [s.page_bytes * 2 for s in parts.stages] == [whole.stages[0].page_bytes] * 2
    assert [s.sent_bytes for s in parts.stages] == [4096 * 2, 0]
    assert [s.head.flops > 0 for s in parts.stages] == [False, True]
    assert [s.slot_bytes > 0 for s in parts.stages] == [False, True]


def test_a_tied_embedding_is_held_once_and_read_as_the_head():
    stage = plan("smollm2-135m-instruct", "v5e").deployment.stages[0]
    assert stage.head.read_bytes == 49152 * 576 * 2
    assert stage.weight_bytes == stage.layers.read_bytes + stage.head.read_bytes


def test_auto_compares_every_split_of_all_devices():
    made = plan("llama-3-70b", "h100:8")
    assert len(made.candidates) == 10
    assert str(made.mesh) == "tensor=8"  # few sequences: all devices work on each
    fitting = [each.deployment for each in made.candidates if each.deployment.fits]
    rates = [d.decode(8).tokens_per_second for d in fitting]
    assert made.deployment.decode(8).tokens_per_second == max(rates)
    assert str(plan("smollm2-135m-instruct", "h100:8", concurrency=512).mesh) == "data=8"


def test_meshes_that_cannot_work_are_compared_with_their_reason():
    made = plan("llama-3-8b", "h100:3")
    refused = {str(each.mesh): each.refusal for each in made.candidates if each.deployment is None}
    assert "32 query heads of 8 KV heads evenly" in refused["tensor=3"]
    assert str(made.mesh) in ("data=3", "stage=3")


def test_devices_without_work_are_told():
    made = plan("llama-3-8b", "h100:4", mesh="tensor=2")
    assert any("2 of 4 devices stay idle" in note for note in made.notes)


# ---- Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chips": "h300:1"}, "chips = 'h300:1'.*unknown chip 'h300'"),
        ({"mesh": "tensor=4"}, "mesh = 'tensor=4'.*needs 4 devices; there are 1"),
        ({"mesh": "tensor=x"}, "size of 'tensor' must be"),
        ({"chips": "h100:3", "mesh": "tensor=3"}, "cannot split 32 query heads"),
        ({"chips": "h100:2", "mesh": "expert=2"}, "no model here has experts"),
        ({"chips": "h100:64", "mesh": "stage=64"}, "the model has 32 layers"),
        ({"weights": "int3"}, "weights = 'int3'.*bf16, int8, w8a8, int4, fp8"),
        ({"kv": "int4"}, "kv = 'int4'.*bf16, int8, fp8"),
        ({"context": 9000}, "context = 9000.*at most the model's own, 8192"),
        ({"context": 1}, "context = 1.*at least 2"),
        ({"concurrency": 0}, "concurrency = 0.*at least 1"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        plan(**{"model": "llama-3-8b", "chips": "h100:1", **options})


def test_an_unknown_model_is_told_the_cards():
    with pytest.raises(ModelNotFoundError, match=r"models that need no files: llama-3-8b.*chatglm3-6b"):
        plan("llama-9", "h100:1")


def test_missing_compilers_are_named_with_the_way_around(monkeypatch):
    def missing(**_):
        raise NotImplementedError("no plug-in")

    monkeypatch.setattr("sharding.hardware.topologies.get_topology_desc", missing)
    with pytest.raises(UnsupportedError, match=r"pip install libtpu.*--no-compile"):
        plan("llama-3-8b", "v6e:1", compiles=True)


def test_a_checkpoint_is_planned_from_its_headers(tmp_path):
    tiny_checkpoints.write_hf_folder(tmp_path / "tiny", tiny_checkpoints.Tiny(9, layers=2))
    made = plan(str(tmp_path / "tiny"), "v5e:1")
    assert made.deployment.fits
    assert len(made.model.layers) == 2


def test_what_the_compiler_refuses_does_not_fit(monkeypatch):
    def refuse(*_, **__):
        raise CompileError("v6e x 1: Ran out of memory")

    monkeypatch.setattr("jaxinfer.plan.described_devices", lambda *_: jax.devices()[:1])
    monkeypatch.setattr("jaxinfer.plan.compile_for", refuse)
    made = plan("smollm2-135m-instruct", "v6e:1", compiles=True)
    assert made.deployment.fits
    assert not made.fits
    assert plan_report.answer(made) == "no: v6e's compiler refuses decode: v6e x 1: Ran out of memory"
    given = plan_report.to_json(made)
    assert (given["fits"], given["programs"], given["refusal"]) == (False, [], "decode: v6e x 1: Ran out of memory")


def test_a_tpu_compiler_is_not_asked_for_what_its_memory_cannot_hold(monkeypatch):
    monkeypatch.setattr("jaxinfer.plan.described_devices", lambda *_: jax.devices()[:1])
    made = plan("llama-3-70b", "v5e:1", concurrency=1, compiles=True)
    assert not made.fits
    assert made.programs == ()
    assert any(note.startswith("not compiled: ") for note in made.notes)


# ---- What is shown


def test_json_has_the_keys_that_stay():
    given = json.loads(json.dumps(plan_report.to_json(plan("llama-3-8b", "v6e:2", concurrency=3))))
    assert list(given)[:6] == ["fits", "per_device_bytes", "kv_tokens", "max_sequences", "collectives", "estimate"]
    parts = given["per_device_bytes"]
    held = ("weights", "kv_pool", "sampling_state", "temporaries", "reserve", "left")
    assert sum(parts[name] for name in held) == parts["capacity"]
    assert parts["reserve"] == parts["runtime"] + parts["collectives"] + parts["allocator"]
    assert {each["source"] for each in given["collectives"]} == {"assumed"}
    decode, prefill = ({**each} for each in given["collectives"])
    assert (decode["program"], decode["count"], decode["bytes"]) == ("decode", 65, 3 * 4096 * 2)
    assert (prefill["program"], prefill["bytes"]) == ("prefill", 256 * 4096 * 2)
    estimate = given["estimate"]
    assert [point["concurrency"] for point in estimate["points"]][:4] == [1, 2, 3, 4]
    assert estimate["assumptions"]["bandwidth_reached"] < 1
    assert estimate["ttft_s"] > 0
    assert "nothing was run" in estimate["method"]
    assert estimate["not_seen"]
    assert any("nothing was compiled" in note for note in given["notes"])


def test_json_of_what_does_not_fit_has_no_times():
    given = plan_report.to_json(plan("llama-3-70b", "h100:1"))
    assert not given["fits"]
    assert given["per_device_bytes"]["left"] < 0
    assert (given["max_sequences"], given["estimate"]["ttft_s"], given["estimate"]["points"]) == (0, None, [])


@pytest.mark.parametrize(
    "options", [{"mesh": "stage=2,tensor=2"}, {"weights": "int4", "kv": "fp8"}, {"concurrency": 300}]
)
def test_a_plan_is_shown_with_its_doubts(options):
    out = io.StringIO()
    plan_report.show(plan("llama-3-70b", "a100-80g:4", **options), Console(file=out, width=80))
    text = out.getvalue()
    for part in ("weights", "KV pool", "reserve", "Estimate (roofline; nothing was run)", "assumed, not measured"):
        assert part in text
    assert ("no: " in text) == ("concurrency" in options)
    assert ("send" in text) == ("mesh" in options)
    assert ("write a matrix out in 16 bits first" in " ".join(text.split())) == ("weights" in options)


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'jaxinfer\[plot\]'"):
        plan_report.check_plotting(tmp_path / "plan.png")


@pytest.mark.parametrize("chips", ["h100:1", "h100:4"])
def test_a_picture_is_drawn(chips, tmp_path):
    pytest.importorskip("matplotlib")
    for name, message in (("plan.docx", "ends in"), ("none/plan.png", "a folder that exists")):
        with pytest.raises(InvalidArgumentError, match=message):
            plan_report.check_plotting(tmp_path / name)
    plan_report.check_plotting(tmp_path / "plan.png")
    plan_report.draw(plan("llama-3-70b", chips), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


# ---- With compilers


@pytest.mark.slow
@compilers.newest_environment
@pytest.mark.parametrize(("chips", "kernel"), [("h200:1", "mosaic_gpu"), ("v6e:2", "tpu_custom_call")])
def test_llama_3_8b_is_compiled(environment, chips, kernel):
    made = compilers.run(environment, STEPS, "llama-3-8b, 4 layers", chips, timeout=600)
    assert made["fits"]
    assert [program["name"] for program in made["programs"]] == ["decode", "prefill", "sampling"]
    assert made["per_device_bytes"]["temporaries"] == max(program["temp_bytes"] for program in made["programs"])
    for program in made["programs"][:2]:
        assert any(name.startswith(kernel) for name in program["kernels"])
    # What the arithmetic would have taken for it: it must not promise room that is not there.
    arithmetic = plan_report.to_json(plan("llama-3-8b, 4 layers", chips))
    assert made["per_device_bytes"]["temporaries"] <= arithmetic["per_device_bytes"]["temporaries"]
    compiled, assumed = (
        [(e["program"], e["kind"], e["bytes"], e["count"]) for e in given["collectives"] if e["program"] != "sampling"]
        for given in (made, arithmetic)
    )
    assert compiled == assumed
