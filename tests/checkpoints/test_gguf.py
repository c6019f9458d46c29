"""GGUF files: metadata, every type of tensor, and what each kind of damage says."""

from __future__ import annotations

import time

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from fused import fused_weights
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import K_TYPES, VARIANTS, write_gguf, write_hf_folder

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.gguf import GGUFReader
from jaxinfer.checkpoints.source import Source
from jaxinfer.errors import CheckpointError, JaxinferError, UnsupportedError
from jaxinfer.quantization.gguf_blocks import SCHEMES


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path, VARIANTS["llama2"])
    return path


def load(path, dtype=jnp.float32):
    return open_checkpoint(Source("gguf", path, path.stem)).load(dtype=dtype)


def assert_same(weights, expected, **tolerance):
    assert weights.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_allclose(np.asarray(weights[path], np.float32), value, err_msg=path, **tolerance)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_gguf_and_a_folder_of_the_same_weights_are_the_same_model(tmp_path, variant):
    tiny = VARIANTS[variant]
    weights = write_hf_folder(tmp_path / "hf", tiny)
    write_gguf(tmp_path / "tiny.gguf", tiny)
    from_hf = open_checkpoint(Source("hf", tmp_path / "hf", "hf"))
    from_gguf = open_checkpoint(Source("gguf", tmp_path / "tiny.gguf", "gguf"))
    for name in (
        *("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"),
        *("max_position", "tie_embeddings", "eos_token_ids", "bos_token_id"),
    ):
        assert getattr(from_gguf.config, name) == getattr(from_hf.config, name), name
    assert from_gguf.config.rms_norm_eps == pytest.approx(from_hf.config.rms_norm_eps)
    assert len(from_gguf.config.layers) == len(from_hf.config.layers)
    ours, theirs = from_gguf.config.layers[0], from_hf.config.layers[0]
    assert (ours.attention_bias, ours.output_bias, ours.mlp_bias) == (
        *(theirs.attention_bias, theirs.output_bias, theirs.mlp_bias),
    )
    assert ours.rope.theta == theirs.rope.theta
    if theirs.rope.factors is None:
        assert ours.rope.factors is None
    else:
        np.testing.assert_allclose(ours.rope.factors, theirs.rope.factors, rtol=1e-6)
    expected = fused_weights(tiny, weights)
    assert_same(from_hf.load(dtype=jnp.float32), expected, rtol=0)
    assert_same(from_gguf.load(dtype=jnp.float32), expected, rtol=0)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", *SCHEMES])
def test_every_type_of_tensor(tmp_path, dtype):
    tiny = VARIANTS["blocks"]
    held = write_gguf(tmp_path / "tiny.gguf", tiny, dtype)
    checkpoint = open_checkpoint(Source("gguf", tmp_path / "tiny.gguf", "tiny"))
    natural = {"F32": jnp.float32, "F16": jnp.float16}.get(dtype, jnp.bfloat16)
    assert checkpoint.dtype == natural
    expected = fused_weights(tiny, held)
    assert all(np.isfinite(value).all() for value in expected.values())
    assert_same(checkpoint.load(dtype=jnp.float32), expected, rtol=0)
    as_is = checkpoint.load()
    assert as_is["layers.0.qkv"].dtype == natural
    assert as_is["layers.0.attn_norm"].dtype == jnp.float32


def test_the_k_types_are_all_there():
    assert set(K_TYPES) <= set(SCHEMES)


def test_metadata_is_what_the_gguf_package_reads(tiny_file):
    theirs = {name: field.contents() for name, field in gguf.GGUFReader(tiny_file).fields.items()}
    ours = GGUFReader(tiny_file).metadata
    assert ours == {name: value for name, value in theirs.items() if not name.startswith("GGUF.")}


def test_every_type_of_metadata(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "all.gguf", "llama")
    numbers = {"uint8": 200, "int8": -3, "uint16": 60_000, "int16": -300, "uint32": 2**32 - 1, "int32": -(2**31)}
    numbers |= {"uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": 0.1, "bool": True}
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_string("string", "Ünï\n")
    writer.add_array("strings", ["a", "", "Ġ世界"])
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("floats", [0.5, -1.0])
    writer.add_array("bools", [True, False])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = GGUFReader(tmp_path / "all.gguf").metadata
    assert metadata.pop("general.architecture") == "llama"
    assert metadata == numbers | {
        "string": "Ünï\n",
        "strings": ["a", "", "Ġ世界"],
        "ints": [1, -2, 3],
        "floats": [0.5, -1.0],
        "bools": [True, False],
    }


def test_rows_are_read_alone(tmp_path):
    held = write_gguf(tmp_path / "tiny.gguf", VARIANTS["blocks"], "Q4_1")
    reader = GGUFReader(tmp_path / "tiny.gguf")
    expected = held["model.layers.0.mlp.down_proj.weight"]
    np.testing.assert_array_equal(reader.read("blk.0.ffn_down.weight", (slice(3, 7),)), expected[3:7])
    reader.release("blk.0.ffn_down.weight")
    np.testing.assert_array_equal(reader.read("blk.0.ffn_down.weight"), expected)


@pytest.mark.parametrize("dtype", SCHEMES)
def test_rows_are_read_packed(tmp_path, dtype):
    held = write_gguf(tmp_path / "tiny.gguf", VARIANTS["blocks"], dtype)
    reader = GGUFReader(tmp_path / "tiny.gguf")
    name = "blk.0.ffn_down.weight"
    assert {reader.tensors[name].dtype for name in reader.schemes} == {dtype}
    assert reader.schemes.keys() == {name for name, info in reader.tensors.items() if len(info.shape) == 2}
    packed = reader.read_packed(name, slice(3, 7))
    assert packed.scheme == reader.schemes[name] == SCHEMES[dtype]
    np.testing.assert_array_equal(packed.dequantize(), held["model.layers.0.mlp.down_proj.weight"][3:7])
    np.testing.assert_array_equal(reader.read(name, (slice(3, 7), slice(40, 300))), packed.dequantize()[:, 40:300])


def test_scales_that_are_not_finite_name_file_and_tensor(tmp_path):
    path = tmp_path / "tiny.gguf"
    write_gguf(path, VARIANTS["blocks"], "Q4_0")
    place = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.0.ffn_up.weight")
    raw = bytearray(path.read_bytes())
    raw[place.data_offset : place.data_offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: blk\.0\.ffn_up\.weight: scales that are not finite"):
        GGUFReader(path).read_packed("blk.0.ffn_up.weight")


def test_a_type_that_is_not_read_here_is_named(tmp_path):
    path = tmp_path / "iq.gguf"
    write_gguf(path, VARIANTS["blocks"], "Q4_0")
    header = GGUFReader(path)
    # The same file, but for the type number of one tensor: same size a block.
    raw = bytearray(path.read_bytes())
    name = b"blk.0.ffn_up.weight"
    at = raw.index(name) + len(name) + 4 + 2 * 8
    assert raw[at] == gguf.GGMLQuantizationType.Q4_0
    for number, named in ((gguf.GGMLQuantizationType.IQ4_NL, "IQ4_NL"), (250, "ggml type 250")):
        raw[at] = number
        path.write_bytes(raw)
        assert GGUFReader(path).tensors.keys() == header.tensors.keys()
        with pytest.raises(UnsupportedError, match=rf"blk\.0\.ffn_up\.weight is {named}.*Q4_K"):
            load(path)


def test_a_truncated_file_names_the_tensor_that_is_cut(tiny_file, tmp_path):
    path = tmp_path / "cut.gguf"
    whole = tiny_file.read_bytes()
    last = gguf.GGUFReader(tiny_file).tensors[-1]
    path.write_bytes(whole[: last.data_offset + last.n_bytes - 1])
    with pytest.raises(CheckpointError, match=rf"cut\.gguf: truncated: tensor {last.name} ends"):
        GGUFReader(path)
    first = gguf.GGUFReader(tiny_file).tensors[0]
    for size in (0, 3, 4, 8, 20, 24, 100, 3000, first.data_offset - 100):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFReader(path)


def test_what_is_no_gguf_file(tmp_path):
    path = tmp_path / "not.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(CheckpointError, match=r"not\.gguf: not a GGUF file"):
        GGUFReader(path)
    with pytest.raises(CheckpointError, match=r"absent\.gguf: cannot be read"):
        GGUFReader(tmp_path / "absent.gguf")
    path.write_bytes(b"GGUF" + (3).to_bytes(4, "big") + bytes(100))
    with pytest.raises(UnsupportedError, match="big-endian"):
        GGUFReader(path)
    path.write_bytes(b"GGUF" + (1).to_bytes(4, "little") + bytes(100))
    with pytest.raises(UnsupportedError, match="version 1"):
        GGUFReader(path)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damaged_headers_never_raise_anything_else(tiny_file, tmp_path_factory, data):
    raw = bytearray(tiny_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.one_of(st.integers(4, 900), st.integers(4, 9500)))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "tiny.gguf"
    path.write_bytes(raw)
    try:
        checkpoint = open_checkpoint(Source("gguf", path, "tiny"))
    except JaxinferError:
        return
    assert checkpoint.config.hidden_size > 0


def test_the_default_model_opens_fast(smollm2_path):
    start = time.perf_counter()
    checkpoint = open_checkpoint(Source("gguf", smollm2_path, "smollm2"))
    seconds = time.perf_counter() - start
    config = checkpoint.config
    assert (len(config.layers), config.hidden_size, config.num_heads, config.num_kv_heads) == (30, 576, 9, 3)
    assert (config.head_dim, config.vocab_size, config.tie_embeddings) == (64, 49152, True)
    assert (config.eos_token_ids, config.bos_token_id) == ((2,), 1)
    assert checkpoint.dtype == jnp.bfloat16
    assert len(checkpoint.tokenizer_metadata["tokenizer.ggml.tokens"]) == 49152
    assert seconds < 2  # 0.1 to 0.2 s alone; the machine may be busy
