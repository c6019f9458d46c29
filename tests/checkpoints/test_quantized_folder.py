"""Quantized Hugging Face folders: whole models, what is refused, and what each kind of damage says."""

from __future__ import annotations

import json

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fused import fused_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import VARIANTS, VOCAB_SIZE, hf_config, make_weights, write_tokenizer

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.quantized_folder import QuantizedFolder, method_of
from jaxinfer.checkpoints.safetensors import SafetensorsReader
from jaxinfer.checkpoints.source import Source
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.quantization.tensor import Scheme

O, I, GROUP = 32, 64, 16  # noqa: E741

AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


def ct(form: str, *, inputs: dict | None = None, targets: tuple[str, ...] = ("Linear",), **weights) -> dict:
    weights = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True} | weights
    group = {"targets": list(targets), "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}


CT4 = ct("pack-quantized", num_bits=4, strategy="group", group_size=GROUP)


def words(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(-(1 << 31), 1 << 31, shape).astype(np.int32)


def matrix(config: dict, outputs: int = O, inputs: int = I) -> dict[str, np.ndarray]:
    """Random tensors of a module, as a config has them: 4-bit groups, or float8."""
    rng = np.random.default_rng(outputs + inputs)
    groups = -(-inputs // GROUP)
    scales = rng.uniform(0.001, 0.02, (groups, outputs)).astype(np.float16)
    match config["quant_method"]:
        case "awq":
            tensors = {"qweight": words(rng, inputs, outputs // 8), "qzeros": words(rng, groups, outputs // 8)}
            return tensors | {"scales": scales}
        case "gptq":
            tensors = {"qweight": words(rng, inputs // 8, outputs), "qzeros": words(rng, groups, outputs // 8)}
            return tensors | {"scales": scales, "g_idx": (np.arange(inputs) // GROUP).astype(np.int32)}
        case "compressed-tensors":
            tensors = {"weight_packed": words(rng, outputs, inputs // 8), "weight_shape": np.array([outputs, inputs])}
            return tensors | {"weight_scale": np.ascontiguousarray(scales.T)}
    values = rng.standard_normal((outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)
    return {"weight": values, "weight_scale": np.float32([0.5]), "input_scale": np.float32([2])}


def write(folder, modules: dict[str, dict[str, np.ndarray]]) -> SafetensorsReader:
    """By hand, since the safetensors package has no float8 without more packages."""
    names = {"float8_e4m3fn": "F8_E4M3", "float16": "F16", "float32": "F32", "int32": "I32", "int64": "I64"}
    names |= {"int8": "I8", "uint8": "U8"}
    header, data, offset = {}, [], 0
    for module, parts in modules.items():
        for part, value in parts.items():
            raw = value.tobytes()
            where = [offset, offset := offset + len(raw)]
            header[f"{module}.{part}"] = {
                "dtype": names[value.dtype.name],
                "shape": value.shape,
                "data_offsets": where,
            }
            data.append(raw)
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + b"".join(data))
    return SafetensorsReader(folder)


def opened(folder, config: dict, parts: dict[str, np.ndarray]) -> QuantizedFolder:
    return QuantizedFolder(write(folder, {"m": parts}), *method_of({"quantization_config": config}))


# ---- Whole models


@pytest.mark.parametrize("config", [AWQ, GPTQ, CT4, FP8], ids=lambda config: config["quant_method"])
def test_a_model_in_a_folder(tmp_path, config):
    tiny = VARIANTS["blocks"]
    modules, held = {}, {}
    for name, value in make_weights(tiny).items():
        module, _, part = name.rpartition(".")
        if name.endswith("_proj.weight"):
            modules[module] = matrix(config, *value.shape)
        else:
            modules[module] = {part: value}
            held[name] = value
    write(tmp_path, modules)
    write_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config(tiny) | {"quantization_config": config}))
    checkpoint = open_checkpoint(Source("hf", tmp_path, "tiny"))
    assert checkpoint.dtype == jnp.bfloat16
    ends = ("qkv.q", "qkv.k", "qkv.v", "o", "gate_up.gate", "gate_up.up", "down")
    assert checkpoint.schemes.keys() == {f"layers.0.{end}" for end in ends}
    for name in make_weights(tiny).keys() - held.keys():
        held[name] = checkpoint._reader.read_packed(name).dequantize()
    loaded = checkpoint.load(dtype=jnp.float32)
    for path, expected in fused_weights(tiny, held).items():
        np.testing.assert_array_equal(np.asarray(loaded[path]), expected, err_msg=path)


def test_what_is_not_quantized_stays_as_it_is(tmp_path):
    floats = np.ones((O, I), np.float16)
    folder = write(tmp_path, {"m": matrix(AWQ) | {"bias": np.ones(O, np.float16)}, "n": {"weight": floats}})
    reader = QuantizedFolder(folder, *method_of({"quantization_config": AWQ}))
    assert {name: info.dtype for name, info in reader.tensors.items()} == {
        **{"m.weight": "awq", "m.bias": "F16", "n.weight": "F16"}
    }
    np.testing.assert_array_equal(reader.read("n.weight", (slice(1, 3),)), floats[1:3])


def test_a_head_that_is_quantized_though_it_is_tied(tmp_path, caplog):
    tiny = VARIANTS["smollm2"]
    modules = {name.removesuffix(".weight"): {"weight": value} for name, value in make_weights(tiny).items()}
    write(tmp_path, modules | {"lm_head": matrix(GPTQ, VOCAB_SIZE, tiny.hidden)})
    config = hf_config(tiny) | {"quantization_config": GPTQ | {"lm_head": True}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(Source("hf", tmp_path, "tiny"))
    assert not checkpoint.config.tie_embeddings
    assert checkpoint.schemes.keys() == {"head"}
    assert "lm_head.weight differs from the embedding and is used" in caplog.text
    expected = checkpoint._reader.read_packed("lm_head.weight").dequantize()
    np.testing.assert_array_equal(checkpoint.load(dtype=jnp.float32)["head"], expected)


@pytest.mark.parametrize(
    ("config", "file", "said"),
    [
        (GPTQ, "quantize_config.json", {"bits": 4, "group_size": GROUP, "sym": False, "desc_act": False}),
        (AWQ, "quant_config.json", {"w_bit": 4, "q_group_size": GROUP, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_settings_in_a_file_of_their_own(tmp_path, config, file, said):
    tiny = VARIANTS["llama2"]
    modules = {name.removesuffix(".weight"): {"weight": value} for name, value in make_weights(tiny).items()}
    name = "model.layers.0.self_attn.q_proj"
    write(tmp_path, modules | {name: matrix(config, 48, 48)})
    (tmp_path / "config.json").write_text(json.dumps(hf_config(tiny)))
    (tmp_path / file).write_text(json.dumps(said))
    checkpoint = open_checkpoint(Source("hf", tmp_path, "tiny"))
    assert checkpoint.schemes.keys() == {"layers.0.qkv.q"}
    checkpoint.load()


def test_blocks_that_a_config_leaves_out_are_of_128(tmp_path):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((256, 384)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1, 2, (2, 3)).astype(np.float32)
    reader = opened(tmp_path, {"quant_method": "fp8"}, {"weight": weight, "weight_scale_inv": scales})
    expected = weight.astype(np.float32) * np.kron(scales, np.ones((128, 128), np.float32))
    np.testing.assert_array_equal(reader.read("m.weight"), expected)


@pytest.mark.parametrize("config", [None, {}])
def test_an_empty_config_is_none(config):
    assert method_of({"quantization_config": config}) is None


def test_keys_that_are_not_known_are_warned_of(caplog):
    method_of({"quantization_config": AWQ | {"modules_to_not_convert": ["lm_head"], "scale_dtype": "x", "note": 1}})
    method_of(
        {"quantization_config": GPTQ | {"damp_percent": 0.1, "static_groups": True, "meta": {}, "desc_act": True}}
    )
    method_of({"quantization_config": CT4 | {"quantization_status": "compressed", "kv_cache_scheme": {"num_bits": 8}}})
    method_of({"quantization_config": FP8 | {"ignored_layers": ["lm_head"], "scale_fmt": "ue8m0"}})
    method_of({"quantization_config": ct("int-quantized", observer="minmax", scale_dtype=None, scale_by=2)})
    assert [message.split(" = ")[0] for message in caplog.messages] == [
        *("quantization_config.scale_dtype", "config_groups.weights.scale_by")
    ]


def test_config_groups_are_chosen_by_name_then_pattern_then_class(tmp_path):
    config = ct("float-quantized", type="float")
    weights = config["config_groups"]["group_0"]["weights"]
    integers = {"targets": ["re:.*k_proj"], "weights": weights | {"type": "int"}, "format": "int-quantized"}
    by_name = {"targets": ["a.v_proj", "x"], "weights": weights | {"type": "int", "symmetric": False}}
    config["config_groups"] |= {"group_1": integers, "group_2": by_name | {"format": "int-quantized"}}
    scale, values = np.ones((O, 1), np.float32), np.ones((O, I), np.int8)
    modules = {
        "a.q_proj": {"weight": values.astype(ml_dtypes.float8_e4m3fn), "weight_scale": scale},
        "a.k_proj": {"weight": values, "weight_scale": scale},
        "a.v_proj": {"weight": values, "weight_scale": scale, "weight_zero_point": np.zeros((O, 1), np.int8)},
    }
    method = method_of({"quantization_config": config})
    reader = QuantizedFolder(write(tmp_path, modules), *method)
    assert [str(scheme) for scheme in reader.schemes.values()] == [
        *("float8_e4m3fn", "int8", "int8 in groups of 128 with zero points")
    ]
    config["ignore"] = ["re:a\\..*"]
    with pytest.raises(CheckpointError, match=r"model\.safetensors: a\.q_proj: is quantized, but no config group"):
        QuantizedFolder(SafetensorsReader(tmp_path), *method_of({"quantization_config": config}))


def test_groups_that_are_about_activations_alone_say_nothing_of_weights(tmp_path):
    config = ct("int-quantized")
    cache = {"targets": ["re:.*m"], "weights": None, "output_activations": {"num_bits": 8, "type": "float"}}
    config["config_groups"]["kv_cache"] = cache
    parts = {"weight": np.ones((O, I), np.int8), "weight_scale": np.ones((O, 1), np.float32)}
    assert opened(tmp_path, config, parts).schemes["m.weight"] == Scheme("int8")


def test_activations_are_rounded_where_the_config_says_each_token_to_int8(tmp_path):
    token = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    parts = {"weight": np.ones((O, I), np.int8), "weight_scale": np.ones((O, 1), np.float32)}
    for changes, rounded in (({}, "int8"), ({"strategy": "tensor"}, None), ({"symmetric": False}, None)):
        reader = opened(tmp_path, ct("int-quantized", inputs=token | changes), parts)
        assert reader.schemes["m.weight"] == Scheme("int8", activations=rounded)
    static = ct("int-quantized", inputs=token | {"strategy": "tensor", "dynamic": False})
    assert opened(tmp_path, static, parts | {"input_scale": np.ones(1, np.float32)}).tensors.keys() == {"m.weight"}


def test_rows_may_have_float8_scales_of_their_own(tmp_path):
    parts = matrix(FP8) | {"weight_scale": np.linspace(1, 2, O, dtype=np.float32)[:, None]}
    del parts["input_scale"]
    reader = opened(tmp_path, {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, parts)
    expected = parts["weight"].astype(np.float32) * parts["weight_scale"]
    np.testing.assert_array_equal(reader.read("m.weight", (slice(3, 9),)), expected[3:9])


def test_a_packed_matrix_may_have_one_scale(tmp_path):
    whole = matrix(CT4)
    by_row = opened(tmp_path, CT4, whole | {"weight_scale": np.full((O, I // GROUP), 0.5, np.float16)})
    expected = by_row.read("m.weight")
    one = ct("pack-quantized", num_bits=4, strategy="tensor")
    reader = opened(tmp_path, one, whole | {"weight_scale": np.float16([0.5])})
    assert reader.schemes["m.weight"] == Scheme("int4", 128, "float16")
    np.testing.assert_array_equal(reader.read("m.weight", (slice(3, 9),)), expected[3:9])


# ---- Symmetric ones


@pytest.mark.parametrize(
    ("config", "stored"),
    [
        (AWQ | {"zero_point": False}, 0x88888888),
        (GPTQ | {"sym": True}, 0x77777777),
        (GPTQ | {"sym": True, "checkpoint_format": "gptq_v2"}, 0x88888888),
    ],
)
def test_zero_points_of_what_is_symmetric_are_checked(tmp_path, config, stored):
    parts = matrix(config)
    parts["qzeros"] = np.full(parts["qzeros"].shape, stored, np.uint32).view(np.int32)
    reader = opened(tmp_path, config, parts)
    assert reader.schemes["m.weight"] == Scheme("int4", GROUP, "float16")
    packed = reader.read_packed("m.weight")
    assert (packed.zeros_OG, packed.values_OI.min(), packed.values_OI.max()) == (None, -8, 7)
    parts["qzeros"][1, 2] ^= 1
    reader = opened(tmp_path, config, parts)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: m\.weight: has zero points other than 8"):
        reader.read_packed("m.weight")


# ---- What is refused


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"bitsandbytes.*known: awq, gptq"),
        ({"quant_method": "quark"}, "quark"),
        ({"load_in_8bit": True}, "of an unnamed method"),
        (AWQ | {"version": "gemv"}, "AWQ version gemv"),
        (AWQ | {"bits": 8}, "AWQ of 8 bits"),
        (GPTQ | {"bits": 3}, "GPTQ of 3 bits"),
        (GPTQ | {"bits": 2}, "GPTQ of 2 bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        (GPTQ | {"dynamic": {"-:lm_head": {}, "+:.*down.*": {"bits": 8}}}, r"dynamic: \+:"),
        (CT4 | {"format": "nvfp4-pack-quantized"}, "format nvfp4"),
        (CT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (CT4 | {"transform_config": {"config_groups": {"r1": {}}}}, "transform_config"),
        (CT4 | {"config_groups": {"FP8": ["Linear"]}}, "FP8"),
        (ct("pack-quantized", num_bits=3), "int 3 bits"),
        (ct("int-quantized", dynamic=True), r"weights\.dynamic True"),
        (ct("float-quantized", type="float", strategy="tensor_group"), "tensor_group"),
        (FP8 | {"fmt": "e5m2"}, "e5m2"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path, config, named):
    tiny = VARIANTS["llama2"]
    write(tmp_path, {"m": {"weight": np.ones((2, 2), np.float32)}})
    (tmp_path / "config.json").write_text(json.dumps(hf_config(tiny) | {"quantization_config": config}))
    with pytest.raises(UnsupportedError, match=rf"config\.json: .*{named}"):
        open_checkpoint(Source("hf", tmp_path, "tiny"))


@pytest.mark.parametrize(
    "config", ["awq", {"quant_method": ["awq"]}, GPTQ | {"group_size": "x"}, {"quant_method": "compressed-tensors"}]
)
def test_a_config_that_makes_no_sense(tmp_path, config):
    write(tmp_path, {"m": {"weight": np.ones((2, 2), np.float32)}})
    (tmp_path / "config.json").write_text(json.dumps(hf_config(VARIANTS["llama2"]) | {"quantization_config": config}))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(Source("hf", tmp_path, "tiny"))


# ---- Damage


def without(*names: str):
    return lambda parts: {name: value for name, value in parts.items() if name not in names}


def put(**changes):
    return lambda parts: parts | changes


def edited(name: str, index, value):
    def edit(parts):
        array = parts[name].copy()
        array[index] = value
        return parts | {name: array}

    return edit


ACT = GPTQ | {"desc_act": True}
CASES = [
    (AWQ | {"group_size": 32}, put(), r"scales is float16 \[4, 32\], expected .*\[2, 32\]"),
    (AWQ | {"group_size": 24}, put(), "64 inputs, which are no whole groups of 24"),
    (AWQ, without("qzeros"), "has no qzeros"),
    (AWQ, without("qweight"), "has no qweight"),
    (AWQ, without("scales"), "has no scales"),
    (AWQ, put(qweight=np.ones((64, 4), np.float32)), r"qweight is float32 \[64, 4\], expected int32 \[any, any\]"),
    (AWQ, put(weight=np.ones((O, I), np.float16)), "has a weight in floats besides"),
    (AWQ, edited("scales", (2, 3), np.nan), "scales that are not finite"),
    (GPTQ | {"bits": 8}, put(), r"scales is float16 \[4, 32\], expected .*\[2, 32\]"),
    (GPTQ | {"bits": 8, "group_size": -1}, put(), r"scales is float16 \[4, 32\]"),
    (GPTQ | {"group_size": 32}, put(), r"scales is float16 \[4, 32\], expected"),
    (GPTQ, without("qzeros"), "has no qzeros"),
    (GPTQ, edited("scales", (0, 0), np.inf), "scales that are not finite"),
    (GPTQ, put(g_idx=(np.arange(I)[::-1] // GROUP).astype(np.int32)), "order of their own, though desc_act is false"),
    (ACT, without("g_idx"), "has no g_idx"),
    (ACT, edited("g_idx", 3, 4), "g_idx has 4, but groups are numbered from 0 to 3"),
    (ACT, edited("g_idx", 3, -1), "g_idx has -1"),
    (ACT, edited("g_idx", 3, 1), "g_idx has groups of other sizes than 16"),
    (CT4, without("weight_shape"), "has no weight_shape"),
    (CT4, without("weight_packed"), "has no weight_packed"),
    (CT4, without("weight_scale"), "has no weight_scale"),
    (CT4, put(weight_shape=np.array([O, 32])), r"weight_packed is int32 \[32, 8\], expected int32 \[32, 4\]"),
    (CT4, put(weight_shape=np.array([-1, -1])), "weight_packed"),
    (CT4, put(weight_g_idx=np.full(I, 1, np.int32)), "g_idx"),
    (CT4, edited("weight_scale", (0, 0), np.nan), "scales that are not finite"),
    (FP8, put(weight=np.ones((O, I), np.float16)), "weight is float16"),
    (FP8, edited("weight", (1, 1), np.nan), "values that are not finite"),
    (FP8 | {"weight_block_size": [16, 16]}, put(), r"weight_scale is float32 \[1\], expected .*\[2, 4\]"),
    (FP8, without("weight_scale"), "has no weight_scale"),
]


@pytest.mark.parametrize(("config", "change", "said"), CASES)
def test_damage_names_file_and_module(tmp_path, config, change, said):
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: m(\.weight)?: .*{said}"):
        opened(tmp_path, config, change(matrix(config))).read_packed("m.weight")


def test_tensors_that_mean_nothing_are_no_tensors_of_the_model(tmp_path):
    reader = opened(tmp_path, AWQ, matrix(AWQ) | {"g_idx": np.zeros(I, np.int32)})
    assert reader.tensors.keys() == {"m.weight", "m.g_idx"}  # which loading refuses by name


def test_a_file_that_is_cut(tmp_path):
    write(tmp_path, {"m": matrix(AWQ)})
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: truncated: tensor m\.scales"):
        SafetensorsReader(tmp_path)


# ---- Every shape


@settings(max_examples=60, deadline=None)
@given(
    config=st.sampled_from([AWQ, GPTQ, CT4, FP8]),
    outputs=st.integers(1, 5).map(lambda n: 8 * n),
    inputs=st.integers(1, 5).map(lambda n: GROUP * n),
    data=st.data(),
)
def test_rows_are_those_of_the_whole(tmp_path_factory, config, outputs, inputs, data):
    reader = opened(tmp_path_factory.mktemp("shapes"), config, matrix(config, outputs, inputs))
    start = data.draw(st.integers(0, outputs))
    rows = slice(start, data.draw(st.integers(start, outputs)))
    whole = reader.read_packed("m.weight")
    assert whole.values_OI.shape == (outputs, inputs)
    for ours, all_of_it in zip(reader.read_packed("m.weight", rows)[1:], whole[1:], strict=True):
        assert (ours is None) == (all_of_it is None)
        if ours is not None:
            np.testing.assert_array_equal(ours, all_of_it[rows])
