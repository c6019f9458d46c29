"""Damaged checkpoints: opening and loading one gives the right tensors or an error that names the file.

Nothing else is raised, nothing hangs, and no more memory is taken than the file's size accounts for. The properties
and what they run over stand in GGUF_FUZZ and SAFETENSORS_FUZZ, for scripts/fuzz.py to run for longer.
"""

from __future__ import annotations

import json
import math
import os
import struct
import tempfile
import tracemalloc
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import Tiny, write_gguf, write_hf_folder

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.gguf import GGUFReader
from jaxinfer.checkpoints.safetensors import SafetensorsReader
from jaxinfer.checkpoints.source import Source
from jaxinfer.errors import CheckpointError, JaxinferError
from jaxinfer.text.tokenizer import Tokenizer

TINY = Tiny(9, hidden=8, heads=2, kv_heads=1, intermediate=8, layers=1)
SHARDED = Tiny(9, hidden=8, heads=2, kv_heads=1, intermediate=8, layers=1, shards=2)
# Python's objects for what a header describes take several times its bytes; the rest is libraries' own.
BYTES_A_BYTE, BYTES_BESIDES = 16, 8 << 20

HUGE = [0, 1, 2, 255, 1 << 15, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]


def open_all(source: Source) -> None:
    """All that serving a model reads of it."""
    checkpoint = open_checkpoint(source)
    weights = checkpoint.load(dtype=jnp.float32)
    total = sum(math.prod(info.shape) for info in checkpoint._reader.tensors.values())
    assert 0 < sum(value.size for value in weights.values()) <= total


def make_tokenizer(source: Source) -> None:
    if source.kind == "gguf":
        tokenizer = Tokenizer.from_gguf(GGUFReader(source.path).metadata)
    else:
        tokenizer = Tokenizer.from_folder(source.path)
    tokenizer.decode(tokenizer.encode("the quick brown fox <|im_end|> é"))


def error_of(call: Callable[[Source], None], source: Source) -> JaxinferError | None:
    try:
        call(source)
    except JaxinferError as error:
        return error
    return None


def check_opens_or_names(source: Source, size: int) -> None:
    """Opens, loads and tokenizes, with memory counted."""
    tracemalloc.start()
    try:
        error = error_of(open_all, source)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < BYTES_A_BYTE * size + BYTES_BESIDES
    if error is not None:
        assert error.code in ("bad_checkpoint", "unsupported"), repr(error)
        assert str(source.path) in str(error), error
        assert len(str(error)) < 5000
        str(error).encode()  # no half of a surrogate pair, which no terminal or RPC takes
    error = error_of(make_tokenizer, source)
    if error is not None:
        assert "token" in str(error) or str(source.path) in str(error), error


# ---- GGUF


@cache
def gguf_file() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        write_gguf(path, TINY)
        return path.read_bytes()


@cache
def gguf_fields() -> list[tuple[int, int]]:
    """Where every number of the header lies, and its bytes: found by walking through it as the format says."""
    raw, fields = gguf_file(), []
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
    at = 4

    def number(size: int) -> int:
        nonlocal at
        fields.append((at, size))
        at += size
        return int.from_bytes(raw[at - size : at], "little")

    def text() -> None:
        nonlocal at
        length = number(8)
        at += length

    def value(kind: int) -> None:
        if kind == 8:
            text()
        elif kind == 9:
            kind, length = number(4), number(8)
            for _ in range(length):
                value(kind)
        else:
            number(sizes[kind])

    number(4)
    tensors, keys = number(8), number(8)
    for _ in range(keys):
        text()
        value(number(4))
    for _ in range(tensors):
        text()
        for _ in range(number(4)):
            number(8)
        number(4), number(8)
    return fields


@st.composite
def gguf_files(draw) -> bytes:
    raw = bytearray(gguf_file())
    fields = gguf_fields()
    # The vocabulary's strings are most of the fields; the others are where the structure lies.
    few = [field for i, field in enumerate(fields) if i < 60 or i > len(fields) - 60]
    for _ in range(draw(st.integers(0, 3))):
        at, size = draw(st.one_of(st.sampled_from(few), st.sampled_from(fields)))
        old = int.from_bytes(raw[at : at + size], "little")
        new = draw(st.one_of(st.sampled_from(HUGE), st.integers(old - 3, old + 3), st.integers(0, 40)))
        raw[at : at + size] = (new % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(draw(damaged(raw, header=fields[-1][0] + 8)))


@st.composite
def damaged(draw, raw: bytearray, header: int) -> bytearray:
    """With bytes changed, put in, taken out, or the end cut off."""
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, max(0, min(header, len(raw)) - 1)))
        match draw(st.sampled_from(["flip", "insert", "delete", "copy"])):
            case "flip" if raw:
                raw[at] ^= 1 << draw(st.integers(0, 7))
            case "insert":
                raw[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "delete":
                del raw[at : at + draw(st.integers(1, 64))]
            case "copy":
                raw[at:at] = raw[at : at + draw(st.integers(1, 64))]
    if draw(st.integers(0, 4)) == 0:
        del raw[draw(st.integers(0, len(raw))) :]
    return raw


def check_gguf(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        path.write_bytes(raw)
        check_opens_or_names(Source("gguf", path, "tiny"), len(raw))
        try:
            ours = GGUFReader(path)
            theirs = gguf.GGUFReader(path)
        except Exception:  # theirs raises of many kinds; of ours it is checked above
            return
        for tensor in theirs.tensors:
            if tensor.tensor_type.name == "F32":
                np.testing.assert_array_equal(ours.read(tensor.name).ravel(), np.ravel(tensor.data))


# ---- Hugging Face folders

JSON_VALUES: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, False, math.nan, math.inf, -1, 0, 1, 10**400, 1e308, -(1 << 63), *HUGE]),
    st.sampled_from(
        ["", "\ud800", "\0", "..", "/etc/passwd", "../model.safetensors", "F32", "x" * 10_000, "\U0001f336"]
    ),
    st.integers(),
    st.text(max_size=5),
    st.recursive(
        st.none() | st.integers(-5, 1 << 65) | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=8,
    ),
)
DEEP = "[" * 100_000 + "]" * 100_000


@st.composite
def damaged_json(draw, text: str) -> str:
    """With some values replaced, taken out, renamed or given twice, anywhere in the tree; or too deep."""
    whole = {"": json.loads(text)}
    for _ in range(draw(st.integers(1, 3))):
        holder: Any = whole
        key: Any = ""
        while isinstance(holder[key], (dict, list)) and holder[key] and draw(st.integers(0, 3)):
            holder = holder[key]
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = draw(st.sampled_from(keys[:40] + keys[-10:]))
        match draw(st.sampled_from(["replace", "replace", "delete", "rename"])):
            case "replace":
                holder[key] = draw(JSON_VALUES)
            case "delete" if holder is not whole:
                del holder[key]
            case "rename" if isinstance(holder, dict) and holder is not whole:
                holder[draw(st.sampled_from([*list(holder)[:40], "\ud800", "", "x" * 1000]))] = holder.pop(key)
    root = whole[""]
    damaged = json.dumps(root)
    match draw(st.integers(0, 12)):
        case 0:
            return damaged.replace("{", '{"a": ' + DEEP + ",", 1)
        case 1 if isinstance(root, dict) and root:  # a key again
            key = draw(st.sampled_from(list(root)[:40]))
            return damaged[:-1] + f", {json.dumps(key)}: {json.dumps(root[key])}}}"
    return damaged


@cache
def hf_folder(shards: int) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        write_hf_folder(Path(folder), TINY if shards == 1 else SHARDED)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


@st.composite
def hf_folders(draw) -> dict[str, bytes]:
    files = dict(hf_folder(draw(st.sampled_from([1, 2]))))
    name = draw(st.sampled_from(sorted(files)))
    raw = files[name]
    if name.endswith(".json"):
        if draw(st.integers(0, 3)):
            files[name] = draw(damaged_json(raw.decode())).encode(errors="surrogatepass")
        else:
            files[name] = bytes(draw(damaged(bytearray(raw), len(raw))))
        return files
    size = int.from_bytes(raw[:8], "little")
    header, data = raw[8 : 8 + size], raw[8 + size :]
    if draw(st.booleans()):
        header = draw(damaged_json(header.decode())).encode(errors="surrogatepass")
        files[name] = len(header).to_bytes(8, "little") + header + data
    elif draw(st.booleans()):
        files[name] = draw(st.sampled_from(HUGE)).to_bytes(8, "little") + raw[8:]
    else:
        files[name] = bytes(draw(damaged(bytearray(raw), 8 + size)))
    return files


def check_folder(files: dict[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, raw in files.items():
            (Path(folder) / name).write_bytes(raw)
        check_opens_or_names(Source("hf", Path(folder), "tiny"), sum(map(len, files.values())))


GGUF_FUZZ = (check_gguf, {"raw": gguf_files()})
SAFETENSORS_FUZZ = (check_folder, {"files": hf_folders()})


def warm_up() -> None:
    """What the first load imports and compiles is not the files' memory."""
    with tempfile.TemporaryDirectory() as folder:
        write_hf_folder(Path(folder), TINY)
        open_checkpoint(Source("hf", Path(folder), "tiny")).load(dtype=jnp.float32)


@pytest.fixture(scope="module", autouse=True)
def warm():
    warm_up()


@pytest.mark.timeout(120)
@settings(max_examples=150, deadline=None)
@given(**GGUF_FUZZ[1])
def test_damaged_gguf_files(raw):
    check_gguf(raw)


@pytest.mark.timeout(120)
@settings(max_examples=150, deadline=None)
@given(**SAFETENSORS_FUZZ[1])
def test_damaged_folders(files):
    check_folder(files)


def test_what_is_whole_loads():
    """Else the properties above could hold because nothing loads."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tiny.gguf"
        held = write_gguf(path, TINY)
        weights = open_checkpoint(Source("gguf", path, "tiny")).load(dtype=jnp.float32)
        np.testing.assert_array_equal(weights["embed"], held["model.embed_tokens.weight"])
        assert Tokenizer.from_gguf(GGUFReader(path).metadata).vocab_size == 384


@pytest.mark.timeout(300)
def test_cut_at_any_byte(tmp_path):
    path = tmp_path / "cut.gguf"
    raw = gguf_file()
    header = gguf_fields()[-1][0] + 8
    for size in {*range(0, 400), *range(400, header, 97), *range(header - 300, header + 40), len(raw) - 1}:
        path.write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFReader(path)
    raw = hf_folder(1)["model.safetensors"]
    for size in {*range(0, len(raw), 61), len(raw) - 1}:
        (tmp_path / "model.safetensors").write_bytes(raw[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            SafetensorsReader(tmp_path)


# ---- Faults that were found, one of each kind


def write_header(path: Path, pairs: list[tuple[bytes, int, bytes]], tensors: list[bytes] = (), data: int = 256) -> None:
    body = b"".join(struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value for key, kind, value in pairs)
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(pairs)) + body + b"".join(tensors) + bytes(data)
    )


def tensor(name: bytes, shape: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    dims = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return struct.pack("<Q", len(name)) + name + dims + struct.pack("<IQ", kind, offset)


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


@pytest.mark.parametrize(
    ("pairs", "tensors", "says"),
    [
        ([(b"a", 4, u32(1)), (b"a", 4, u32(2))], [], "key a is there twice"),
        ([], [tensor(b"a", (8,), 0), tensor(b"b", (8,), 0)], "tensor b overlaps tensor a"),
        ([], [tensor(b"a", (16,), 0), tensor(b"b", (8,), 32)], "tensor b overlaps tensor a"),
        ([], [tensor(b"a", (8,), 4)], "offset 4 is no multiple of 32"),
        ([(b"general.alignment", 7, b"\1")], [], "general.alignment = True"),
        ([], [tensor(b"a", (1 << 63, 0), 0)], "above 0"),
        ([], [tensor(b"a\x1b[2J\n", (1 << 63,), 0)], r"tensor a\\x1b\[2J\\n ends"),
        ([(b"a", 8, struct.pack("<Q", 1 << 63))], [], "truncated"),
        ([(b"a", 9, struct.pack("<IQ", 0, 1 << 63))], [], "truncated"),
        ([(b"a", 9, struct.pack("<IQ", 9, 1 << 40))], [], "truncated"),
        ([(b"a", 9, struct.pack("<IQ", 8, 2) + struct.pack("<Q", 1 << 63))], [], "truncated"),
        ([(b"a", 9, struct.pack("<IQ", 9, 1) * 5000)], [], "recursion"),
        ([(b"a\xff", 4, u32(1))], [], "utf-8"),
    ],
)
def test_gguf_headers(tmp_path, pairs, tensors, says):
    write_header(tmp_path / "a.gguf", pairs, tensors)
    with pytest.raises(CheckpointError, match=rf"a\.gguf: .*{says}"):
        GGUFReader(tmp_path / "a.gguf")


def test_an_array_of_more_values_than_any_vocabulary_is_refused_before_it_is_made(tmp_path):
    count = 9 << 20
    write_header(tmp_path / "a.gguf", [(b"a", 9, struct.pack("<IQ", 0, count) + bytes(count))])
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"a\.gguf: .*over 8388608 values"):
        GGUFReader(tmp_path / "a.gguf")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_layers_that_are_not_there_are_not_declared(tmp_path):
    write_hf_folder(tmp_path, TINY)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_hidden_layers": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"config\.json: 4096 layers, but only"):
        open_checkpoint(Source("hf", tmp_path, "tiny"))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": 5}, "TypeError"),
        ({"architectures": {"a": 1}}, "KeyError"),
        ({"rms_norm_eps": 10**400}, "OverflowError"),
        ({"num_hidden_layers": [[1]]}, "TypeError"),
        ({"hidden_size": "8"}, "hidden_size"),
    ],
)
def test_a_config_that_describes_no_model_is_named(tmp_path, change, says):
    write_hf_folder(tmp_path, TINY)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{says}"):
        open_checkpoint(Source("hf", tmp_path, "tiny"))


def safetensors_file(header: str, data: int = 64) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode() + bytes(data)


def entry(start: int = 0, stop: int = 8, shape: str = "[2]", dtype: str = '"F32"') -> str:
    return f'{{"dtype": {dtype}, "shape": {shape}, "data_offsets": [{start}, {stop}]}}'


@pytest.mark.parametrize(
    ("header", "says"),
    [
        (f'{{"a": {entry()}, "a": {entry()}}}', "a is there twice"),
        (f'{{"a": {entry()}, "b": {entry(4, 12)}}}', "tensor b overlaps tensor a"),
        (f'{{"a": {entry(0, 4, "[true]")}}}', "tensor a is described by"),
        (f'{{"a": {entry(0, 8, "[NaN]")}}}', "tensor a is described by"),
        (f'{{"a": {entry(0, 8, "[1e999]")}}}', "tensor a is described by"),
        (f'{{"a": {entry(0, 8, "[" + "9223372036854775807," * 50000 + "1]")}}}', "tensor a is described by"),
        (f'{{"a": {entry(0, 0, "[0, 1152921504606846976, 64]")}}}', "tensor a is described by"),
        (f'{{"a": {entry(dtype="[1]")}}}', "tensor a is described by"),
        (f'{{"a": {DEEP}}}', "recursion"),
        (f'{{"a": {"9" * 5000}}}', "integer string conversion"),
        ('"a"', "no JSON object"),
    ],
)
def test_safetensors_headers(tmp_path, header, says):
    (tmp_path / "model.safetensors").write_bytes(safetensors_file(header))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{says}") as caught:
        SafetensorsReader(tmp_path)
    assert len(str(caught.value)) < 1500


def test_a_header_that_is_not_utf8(tmp_path):
    for raw in (b'{"\xff": 1}', '{"a": 1}'.encode("utf-16")):
        (tmp_path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
        with pytest.raises(CheckpointError, match=r"model\.safetensors: .*utf-8"):
            SafetensorsReader(tmp_path)


@pytest.mark.parametrize(
    "shard", ["../w.safetensors", "/etc/passwd", "..", ".", "", "a/b", "a\\b", "C:w", "w\0", "\ud800"]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(tmp_path, shard):
    (tmp_path / "w.safetensors").write_bytes(safetensors_file(f'{{"a": {entry()}}}'))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match=r"index\.json: .*\(for a\) is no file name in this folder"):
        SafetensorsReader(folder)


@pytest.mark.skipif(not hasattr(os, "symlink"), reason="needs links")
def test_links_are_followed_and_bad_ones_named(tmp_path):
    """A link is the decision of whoever has the folder; a path in an index is that of whoever made the files."""
    content = safetensors_file(f'{{"a": {entry()}}}')
    snapshot, blobs = tmp_path / "models--org--name" / "snapshots" / "123", tmp_path / "models--org--name" / "blobs"
    for folder in (snapshot, blobs, tmp_path / "plain"):
        folder.mkdir(parents=True)
    (blobs / "abc").write_bytes(content)
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    assert SafetensorsReader(snapshot).tensors.keys() == {"a"}
    (tmp_path / "linked").symlink_to(snapshot)  # the folder itself may be a link
    assert SafetensorsReader(tmp_path / "linked").tensors.keys() == {"a"}
    (tmp_path / "plain" / "model.safetensors").symlink_to(blobs / "abc")
    assert SafetensorsReader(tmp_path / "plain").tensors.keys() == {"a"}
    for target in ("/etc/passwd", "/dev/zero", "model.safetensors", "nothing", blobs):
        (tmp_path / "plain" / "model.safetensors").unlink()
        (tmp_path / "plain" / "model.safetensors").symlink_to(target)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            SafetensorsReader(tmp_path / "plain")


def read_folder(folder: Path) -> None:
    open_checkpoint(Source("hf", folder, "tiny"))
    Tokenizer.from_folder(folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    write_hf_folder(tmp_path, TINY)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=rf"{name}.*not a regular file"):
        read_folder(tmp_path)


# ---- Tokenizers


def gguf_tokenizer(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", "<0x41>", "a", "b", "ab"]
    metadata = {"model": "llama", "tokens": tokens, "scores": [0.0] * 7, "token_type": [2, 3, 3, 6, 1, 1, 1]} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items() if value is not None}


def gpt2_tokenizer(**changes: Any) -> dict[str, Any]:
    metadata = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab"], "merges": ["a b"]} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (gguf_tokenizer(tokens=5), "tokens is not an array of str"),
        (gguf_tokenizer(tokens="abcdefg"), "tokens is not an array of str"),
        (gguf_tokenizer(tokens=[1] * 7), "tokens is not an array of str"),
        (gguf_tokenizer(token_type=[1, 1]), "token_type has 2 entries for 7"),
        (gguf_tokenizer(token_type=["a"] * 7), "token_type is not an array of int"),
        (gguf_tokenizer(scores=None), "no tokenizer.ggml.scores"),
        (gguf_tokenizer(scores=[0.0]), "scores has 1 entries for 7"),
        (gguf_tokenizer(scores=["a"] * 7), "scores is not an array of float"),
        (gguf_tokenizer(scores=[math.nan] * 7), "scores has one that is not a number"),
        (gguf_tokenizer(token_type=[6] * 7), "'<unk>' for a byte"),
        (gguf_tokenizer(tokens=["a" * n for n in range(1, 7)] + ["a" * 100_000]), "one of 100000 characters"),
        (gguf_tokenizer(bos_token_id="1"), "bos_token_id = '1'"),
        (gguf_tokenizer(eot_token_id=[1]), r"eot_token_id = \[1\]"),
        (gguf_tokenizer(bos_token_id=7, add_bos_token=True), "no such token"),
        (gpt2_tokenizer(merges=["a c"]), "merges do not fit"),
        (gpt2_tokenizer(merges=[1]), "merges is not an array of str"),
        (gpt2_tokenizer() | {"tokenizer.chat_template": 5}, "chat_template is not a string"),
    ],
)
@pytest.mark.timeout(60)
def test_gguf_tokenizers(metadata, says):
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_gguf(metadata)


def test_ids_beyond_the_vocabulary_name_no_token():
    tokenizer = Tokenizer.from_gguf(gguf_tokenizer(eos_token_id=7, pad_token_id=1 << 31))
    assert tokenizer.eos_token_ids == ()
    assert tokenizer.special_tokens == {"bos_token": "<s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("pre", [5, ["gpt-2"], "no such"])
def test_a_pre_tokenizer_that_is_not_known(pre):
    with pytest.raises(JaxinferError, match=r"tokenizer\.ggml\.pre"):
        Tokenizer.from_gguf(gpt2_tokenizer(pre=pre))


def test_an_id_of_billions_makes_no_table_of_billions(tmp_path):
    write_hf_folder(tmp_path, TINY)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["Ā"] = (1 << 32) - 1
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(CheckpointError, match="ids up to 4294967295"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("tokenizer_config.json", {"chat_template": 5}, "chat_template that is not a string"),
        ("tokenizer_config.json", {"chat_template": [{"name": "default", "template": 5}]}, "not a string"),
        ("chat_template.json", {"chat_template": {"a": 1}}, "not a string"),
    ],
)
def test_chat_templates_that_are_no_text(tmp_path, name, content, says):
    write_hf_folder(tmp_path, TINY)
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=says):
        Tokenizer.from_folder(tmp_path)


def test_settings_of_odd_kinds_are_left_out(tmp_path):
    write_hf_folder(tmp_path, TINY)
    settings = {"bos_token": {}, "eos_token": ["a"], "chat_template": ["a", {"name": "other"}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [true, -1, 2]}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.special_tokens, tokenizer.chat_template, tokenizer.eos_token_ids) == ({}, None, (2,))


def test_a_chat_template_that_is_not_utf8(tmp_path):
    write_hf_folder(tmp_path, TINY)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja cannot be read: .*utf-8"):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_config_too_deep(tmp_path):
    write_hf_folder(tmp_path, TINY)
    (tmp_path / "tokenizer_config.json").write_text('{"a": ' + DEEP + "}")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
