"""Hugging Face folders: what is read, and what each kind of damage says."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.checkpoints.reader import TensorInfo
from jaxinfer.checkpoints.safetensors import SafetensorsReader
from jaxinfer.errors import CheckpointError

TENSORS = {
    "a": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.arange(6, dtype=np.float16),
    "c": np.arange(8, dtype=ml_dtypes.bfloat16).reshape(2, 4),
    "d": np.arange(4, dtype=np.float64).reshape(2, 2),
}


@pytest.fixture
def folder(tmp_path):
    safetensors.numpy.save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_what_the_safetensors_package_wrote(folder):
    reader = SafetensorsReader(folder)
    assert reader.tensors == {
        "a": TensorInfo((3, 4), "F32"),
        "b": TensorInfo((6,), "F16"),
        "c": TensorInfo((2, 4), "BF16"),
        "d": TensorInfo((2, 2), "F64"),
    }
    for name, value in TENSORS.items():
        assert reader.read(name).dtype == value.dtype
        np.testing.assert_array_equal(reader.read(name), value)
    np.testing.assert_array_equal(reader.read("a", (slice(1, 3),)), TENSORS["a"][1:3])
    reader.release("a")
    np.testing.assert_array_equal(reader.read("a"), TENSORS["a"])


def test_shards(tmp_path):
    safetensors.numpy.save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    safetensors.numpy.save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    reader = SafetensorsReader(tmp_path)
    for name in ("a", "b"):
        np.testing.assert_array_equal(reader.read(name), TENSORS[name])


def test_a_missing_shard_is_named_with_one_of_its_tensors(tmp_path):
    safetensors.numpy.save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"two\.safetensors: missing.*for b"):
        SafetensorsReader(tmp_path)


def test_a_tensor_promised_by_the_index_alone_is_named(tmp_path):
    safetensors.numpy.save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "one.safetensors"})
    with pytest.raises(CheckpointError, match=r"one\.safetensors: has no tensor b"):
        SafetensorsReader(tmp_path)


def test_a_tensor_in_two_shards_is_named(tmp_path):
    for shard in ("one", "two"):
        safetensors.numpy.save_file({"a": TENSORS["a"], shard: TENSORS["b"]}, tmp_path / f"{shard}.safetensors")
    write_index(tmp_path, {"one": "one.safetensors", "two": "two.safetensors"})
    with pytest.raises(CheckpointError, match=r"two\.safetensors: tensor a is also in one\.safetensors"):
        SafetensorsReader(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 1}}'])
def test_a_bad_index_is_named(tmp_path, index):
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        SafetensorsReader(tmp_path)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        SafetensorsReader(tmp_path)


def test_a_truncated_file_names_the_tensor_that_is_cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    header = safetensors_header(path.read_bytes())
    last = max((name for name in TENSORS), key=lambda name: header[name]["data_offsets"][1])
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: truncated: tensor {last} "):
        SafetensorsReader(folder)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 20])
def test_a_file_cut_within_its_header(folder, size):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsReader(folder)


def safetensors_header(data: bytes) -> dict:
    return json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])


def with_header(path, header: object) -> None:
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(64))


@pytest.mark.parametrize(
    "header",
    [
        [],
        {"a": 1},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": ["2"], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
    ],
)
def test_a_senseless_header_is_an_error(tmp_path, header):
    with_header(tmp_path / "model.safetensors", header)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        SafetensorsReader(tmp_path)


def test_an_unknown_dtype_is_listed_but_not_readable(tmp_path):
    with_header(tmp_path / "model.safetensors", {"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}})
    reader = SafetensorsReader(tmp_path)
    assert reader.tensors["a"].dtype not in reader.dtypes


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_headers_never_raise_anything_else(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("damaged")
    raw = bytearray(safetensors.numpy.save(TENSORS))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 300))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(raw)
    try:
        reader = SafetensorsReader(folder)
    except CheckpointError:
        return
    for name, info in reader.tensors.items():
        if info.dtype in reader.dtypes:
            assert reader.read(name).shape == info.shape
