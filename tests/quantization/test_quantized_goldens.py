"""Matrices packed by public tools: scripts/make_quantized_goldens.py says how each file was made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoints.checkpoint import _naming
from jaxinfer.checkpoints.quantized_folder import QuantizedFolder, method_of
from jaxinfer.checkpoints.reader import TensorInfo
from jaxinfer.checkpoints.safetensors import SafetensorsReader
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.quantization.tensor import Scheme

GOLDEN = Path(__file__).parents[1] / "golden" / "quantized"

SCHEMES = {
    "awq_gemm_g32": Scheme("int4", 32, "float16", "zeros"),
    "gptq_int4_sym": Scheme("int4", 16, "float16"),
    "gptq_int4_asym": Scheme("int4", 32, "float16", "zeros"),
    "gptq_int8_sym": Scheme("int8", 32, "float16"),
    "gptq_int4_channel": Scheme("int4", 128, "float16"),
    "gptq_int4_act_order": Scheme("int4", 16, "float16", "zeros", reordered=True),
    "gptqmodel_int4_v2": Scheme("int4", 32, "float16", "zeros"),
    "gptqmodel_int4_v1": Scheme("int4", 16, "float16", "zeros"),
    "gptqmodel_int8_v1": Scheme("int8", 16, "float16", "zeros"),
    "ct_int4_group": Scheme("int4", 32, "bfloat16"),
    "ct_int4_asym": Scheme("int4", 16, "float16", "zeros"),
    "ct_int4_channel": Scheme("int4", 128, "bfloat16"),
    "ct_int4_act_order": Scheme("int4", 16, "float32", reordered=True),
    "ct_int8_packed": Scheme("int8", None, "bfloat16"),
    "ct_int8_packed_asym": Scheme("int8", 32, "bfloat16", "zeros"),
    "ct_w8a8": Scheme("int8", None, "bfloat16", activations="int8"),
    "ct_w8_tensor": Scheme("int8", None, "bfloat16"),
    "ct_w8_asym": Scheme("int8", 128, "bfloat16", "zeros"),
    "ct_fp8_channel": Scheme("float8_e4m3fn", None, "bfloat16"),
    "ct_fp8_tensor": Scheme("float8_e4m3fn", None, "float32"),
    "ct_fp8_block": Scheme("float8_e4m3fn", 32, "bfloat16"),
    "fp8_block": Scheme("float8_e4m3fn", 32, "float32"),
    "fp8_block_ue8m0": Scheme("float8_e4m3fn", 32, "float32"),
}


def test_every_file_is_tested():
    assert SCHEMES.keys() == {file.stem for file in GOLDEN.glob("*.safetensors")}


@pytest.mark.parametrize("name", SCHEMES)
def test_the_numbers_that_the_tool_makes_of_it(tmp_path, name):
    file = GOLDEN / f"{name}.safetensors"
    shutil.copy(file, tmp_path / "model.safetensors")
    with safetensors.safe_open(file, "np") as opened:
        config = json.loads(opened.metadata()["quantization_config"])
    method = method_of({"quantization_config": config})
    reader = QuantizedFolder(SafetensorsReader(tmp_path), *method)
    expected = reader.read("expected")
    O, I = expected.shape  # noqa: E741
    assert reader.tensors == {"m.weight": TensorInfo((O, I), method[0]), "expected": TensorInfo((O, I), "F32")}
    assert reader.schemes == {"m.weight": SCHEMES[name]}
    packed = reader.read_packed("m.weight")
    assert packed.scheme == SCHEMES[name]
    assert packed.values_OI.dtype == ("int8" if "int" in packed.scheme.values else packed.scheme.values)
    assert packed.scales_OG.dtype == packed.scheme.scales
    assert packed.scales_OG.shape == (O, -(-I // (packed.scheme.group or I)))
    assert (packed.zeros_OG is not None) == (packed.scheme.offset == "zeros")
    np.testing.assert_array_equal(packed.dequantize(), expected)
    np.testing.assert_array_equal(reader.read("m.weight"), expected)
    for rows in (slice(0, 8), slice(3, 4), slice(5, 29), slice(31, 32), slice(4, 4)):
        np.testing.assert_array_equal(reader.read_packed("m.weight", rows).dequantize(), expected[rows])
        np.testing.assert_array_equal(reader.read("m.weight", (rows, slice(7, 50))), expected[rows, 7:50])
    reader.release("m.weight")
    np.testing.assert_array_equal(reader.read("m.weight"), expected)


NUMBERS = st.sampled_from([None, 0, -1, 1, 3, 4, 8, 16, 24, 32, 128, 1 << 40, 0.5, "x", [], [0, 0], [16], True])


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_damage_never_raises_anything_but_errors_that_name_it(tmp_path_factory, data):
    """Bytes of the header and of the numbers, and a value of the config."""
    name = data.draw(st.sampled_from(sorted(SCHEMES)))
    folder = tmp_path_factory.mktemp("damaged")
    raw = bytearray((GOLDEN / f"{name}.safetensors").read_bytes())
    size = 8 + int.from_bytes(raw[:8], "little")
    start = raw.index(b'"m.')
    for _ in range(data.draw(st.integers(0, 3))):
        raw[data.draw(st.one_of(st.integers(start, size - 1), st.integers(size, len(raw) - 1)))] = data.draw(
            st.integers(0, 255)
        )
    (folder / "model.safetensors").write_bytes(raw)
    with safetensors.safe_open(GOLDEN / f"{name}.safetensors", "np") as opened:
        config = json.loads(opened.metadata()["quantization_config"])
    where = config["config_groups"]["group_0"]["weights"] if "config_groups" in config else config
    if data.draw(st.booleans()):
        where[data.draw(st.sampled_from(sorted(where)))] = data.draw(NUMBERS)
    (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
    try:
        with _naming(folder / "config.json"):
            method = method_of(config={"quantization_config": config})
        reader = QuantizedFolder(SafetensorsReader(folder), *method)
        for tensor in reader.schemes:
            with np.errstate(all="ignore"):
                reader.read_packed(tensor).dequantize()
        said = None
    except (CheckpointError, UnsupportedError) as error:
        said = str(error)
    assert said is None or str(folder) in said
