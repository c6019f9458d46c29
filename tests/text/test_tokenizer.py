from __future__ import annotations

import gzip
import itertools
import json
import random
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import SPM_PIECES, byte_level_metadata, spm_metadata
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from jaxinfer.errors import CheckpointError, InvalidArgumentError, UnsupportedError
from jaxinfer.text.gguf_vocab import PRE_TOKENIZERS
from jaxinfer.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizer_smollm2.json.gz"


# ------------------------------------------------------------------------------------------- llama.cpp


@pytest.fixture(scope="module")
def golden() -> dict:
    return json.loads(gzip.decompress(GOLDEN.read_bytes()))


def test_golden_texts(smollm2: Tokenizer, golden: dict) -> None:
    """Every text gives llama.cpp's ids, with control strings in force and without; there are no exceptions."""
    assert len(golden["cases"]) > 2000
    for text, plain, *special in golden["cases"]:
        assert smollm2.encode(text) == plain, text
        assert smollm2.encode(text, parse_special=True) == (special or [plain])[0], text
        assert smollm2.special_ids.isdisjoint(plain)


def test_golden_decodes_back(smollm2: Tokenizer, smollm2_metadata: dict, golden: dict) -> None:
    """What was encoded comes back, but for the control characters that this vocabulary has no byte for."""
    tokens = smollm2.token_bytes(False)
    missing = {chr(byte) for byte in range(128) if bytes([byte]) not in set(tokens)}
    assert missing <= set(map(chr, range(32)))
    for text, plain, *special in golden["cases"]:
        want = "".join(char for char in text if char not in missing)
        assert smollm2.decode(plain) == want
        assert smollm2.decode((special or [plain])[0], skip_special_tokens=False) == want


def test_golden_unicode_blocks(smollm2: Tokenizer, golden: dict) -> None:
    """No code point is classed otherwise than in llama.cpp: each block's ids have the same checksum."""
    for start, checksum in golden["blocks"]:
        chars = map(chr, range(start, start + golden["block"]))
        text = "".join(golden["block_text"].replace("?", char) for char in chars)
        assert zlib.crc32(json.dumps(smollm2.encode(text)).encode()) == checksum, hex(start)


def test_smollm2_facts(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == (2, 0)  # <|im_end|> by its key, <|endoftext|> by its name
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.special_tokens["eos_token"] == "<|im_end|>"
    assert smollm2.encode("a") == smollm2.encode("a", add_bos=False)  # the file says so


# ------------------------------------------------------------------------------------ byte-level, GGUF


def test_control_strings_stay_text_unless_parsed(byte_level: Tokenizer) -> None:
    text = "he<|im_end|>ll<|im_start|>"
    plain = byte_level.encode(text)
    assert byte_level.special_ids.isdisjoint(plain)
    assert byte_level.decode(plain) == text
    parsed = byte_level.encode(text, parse_special=True)
    assert parsed == [256, 261, 257, 260]
    assert byte_level.decode(parsed) == "hell"
    assert byte_level.decode(parsed, skip_special_tokens=False) == text


def test_user_defined_tokens_always_count(byte_level: Tokenizer) -> None:
    assert byte_level.encode("he<think>") == [256, 262]
    assert byte_level.decode([256, 262]) == "he<think>"


def test_special_sets(byte_level: Tokenizer) -> None:
    assert byte_level.special_ids == {260, 261}
    assert byte_level.eos_token_ids == (261,)
    assert byte_level.bos_token_id == 260
    assert byte_level.vocab_size == 263


def test_end_tokens_of_every_kind() -> None:
    metadata = byte_level_metadata()
    metadata["tokenizer.ggml.tokens"] += ["<e1>", "<e2>", "<|eot_id|>", "<|end|>"]
    metadata["tokenizer.ggml.token_type"] += [3, 3, 3, 3]
    metadata |= {"tokenizer.ggml.eot_token_id": 263, "tokenizer.ggml.eom_token_id": 264}
    assert Tokenizer.from_gguf(metadata).eos_token_ids == (261, 263, 264, 265, 266)
    metadata["tokenizer.ggml.tokens"] += ["<|return|>", "<|call|>"]  # Harmony: <|end|> only ends a message
    metadata["tokenizer.ggml.token_type"] += [3, 3]
    assert 266 not in Tokenizer.from_gguf(metadata).eos_token_ids


def test_bos_and_eos_are_added_as_the_file_says() -> None:
    metadata = byte_level_metadata() | {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.encode("he") == [260, 256, 261]
    assert tokenizer.encode("he", add_bos=False) == [256]
    assert tokenizer.encode("") == [260, 261]
    metadata = byte_level_metadata() | {"tokenizer.ggml.pre": "llama-bpe"}
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(metadata).encode("he") == [260, 256]  # Llama 3 has BOS where nothing is said
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(CheckpointError, match="bos_token"):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_loses_nothing(pre: str) -> None:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata() | {"tokenizer.ggml.pre": pre})
    text = "Hello  World's 12345\r\n\r\n\tx=1; 你好，世界 é e\u0301 🌶 \u3000 DON'T ١٢٣ a\u2028b  "
    assert tokenizer.decode(tokenizer.encode(text, add_bos=False)) == text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("gpt-2", "it's 123", ["it", "'s", " 123"]),
        ("llama-bpe", "IT'S 12345", ["IT", "'S", " ", "123", "45"]),
        ("qwen2", "it's 12\n", ["it", "'s", " ", "1", "2", "\n"]),
        ("tekken", "CamelCase 12", ["Camel", "Case", " ", "1", "2"]),
        ("gpt-4o", "Camel'S 1234", ["Camel'S", " ", "123", "4"]),
        ("deepseek-v3", "x.y 1234你好a", ["x", ".y", " ", "123", "4", "你好", "a"]),
    ],
)
def test_pre_tokenizers_cut_words(pre: str, text: str, words: list[str]) -> None:
    cuts = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in PRE_TOKENIZERS[pre].patterns]
    assert [word for word, _ in pre_tokenizers.Sequence(cuts).pre_tokenize_str(text)] == words


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'made-up'"):
        Tokenizer.from_gguf(byte_level_metadata() | {"tokenizer.ggml.pre": "made-up"})
    with pytest.raises(UnsupportedError, match="'t5'"):
        Tokenizer.from_gguf(byte_level_metadata() | {"tokenizer.ggml.model": "t5"})


@pytest.mark.parametrize("key", ["model", "tokens", "merges"])
def test_broken_metadata(key: str) -> None:
    metadata = byte_level_metadata()
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(CheckpointError, match=key):
        Tokenizer.from_gguf(metadata)


def test_lists_that_do_not_fit() -> None:
    with pytest.raises(CheckpointError, match="merges"):
        Tokenizer.from_gguf(byte_level_metadata() | {"tokenizer.ggml.merges": ["no such"]})
    with pytest.raises(CheckpointError, match="token_type has 1"):
        Tokenizer.from_gguf(byte_level_metadata() | {"tokenizer.ggml.token_type": [1]})
    with pytest.raises(CheckpointError, match="scores has 1"):
        Tokenizer.from_gguf(spm_metadata() | {"tokenizer.ggml.scores": [1.0]})


@pytest.mark.parametrize("wrong", [-1, 263, 2**40])
def test_ids_out_of_range(byte_level: Tokenizer, wrong: int) -> None:
    """Case ids-out-of-range."""
    with pytest.raises(InvalidArgumentError, match=rf"{wrong}\b.*263"):
        byte_level.decode([1, wrong])
    with pytest.raises(InvalidArgumentError, match=rf"prompt = {wrong}\b"):
        byte_level.check_ids("prompt", [wrong])
    byte_level.check_ids("prompt", [])


@pytest.mark.parametrize("text", ["a\ud800b", "\udfff", "🌶"[0] + "\ud83c"])
def test_half_of_a_surrogate_pair(byte_level: Tokenizer, spm: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, spm):
        with pytest.raises(InvalidArgumentError, match="surrogate"):
            tokenizer.encode(text)


def test_text_must_be_a_string(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match="a string"):
        byte_level.encode(b"a")  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30))
def test_round_trip(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, SPM):
        ids = tokenizer.encode(text, add_bos=False)
        assert tokenizer.special_ids.isdisjoint(ids)
        # SentencePiece writes spaces as U+2581, so it cannot tell the two apart.
        assert tokenizer.decode(ids) == (text if tokenizer is BYTE_LEVEL else text.replace("▁", " "))


def test_threads_may_share_one(byte_level: Tokenizer) -> None:
    texts = [f"he{i} <|im_end|> ll" * 20 for i in range(64)]
    want = [byte_level.encode(text, parse_special=bool(i % 2)) for i, text in enumerate(texts)]
    with ThreadPoolExecutor(8) as pool:
        got = pool.map(lambda i: byte_level.encode(texts[i], parse_special=bool(i % 2)), range(64))
    assert list(got) == want


def test_transformers_is_not_imported_in_vain() -> None:
    code = (
        "import sys, jaxinfer.text.chat, jaxinfer.text.detokenizer\n"
        "print([name for name in ('transformers', 'jax') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --------------------------------------------------------------------------------- SentencePiece, GGUF

BYTE_LEVEL = Tokenizer.from_gguf(byte_level_metadata())
SPM = Tokenizer.from_gguf(spm_metadata())


def sentencepiece_reference(text: str) -> list[str]:
    """SentencePiece's BPE in plain Python: join the best neighbours until none can be joined; leftmost of equals."""
    scores = {piece: -i for i, piece in enumerate(SPM_PIECES)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in scores]
        if not joins:
            break
        _, i = min(joins)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    known = [[s] if s in scores else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [token for tokens in known for token in tokens]


@settings(max_examples=300, deadline=None)
@given(st.text("abcé <s>/你", max_size=20))
def test_sentencepiece(text: str) -> None:
    tokens = spm_metadata()["tokenizer.ggml.tokens"]
    got = [tokens[i] for i in SPM.encode(text, add_bos=False)]
    assert got == (sentencepiece_reference(text) if text else [])


def test_sentencepiece_prefix_and_control(spm: Tokenizer) -> None:
    tokens = spm_metadata()["tokenizer.ggml.tokens"]
    ab = tokens.index("▁ab")
    assert spm.encode("ab") == [1, ab]
    assert spm.encode("") == [1]
    # As in llama.cpp, what follows a control token has the prefix as well.
    assert spm.encode("ab</s>ab", parse_special=True) == [1, ab, 2, ab]
    assert 2 not in spm.encode("</s>")
    bare = Tokenizer.from_gguf(spm_metadata() | {"tokenizer.ggml.add_space_prefix": False})
    assert bare.encode("ab") == [1, tokens.index("ab")]
    assert bare.decode(bare.encode(" ab")) == " ab"


def test_sentencepiece_bytes(spm: Tokenizer) -> None:
    ids = spm.encode("你", add_bos=False)
    assert [i - 3 for i in ids[1:]] == list("你".encode())
    assert spm.decode(ids) == "你"
    assert spm.decode(ids[:-1]) == "\ufffd"
    assert spm.decode([*ids[:-1], *ids]) == "\ufffd 你"


# ---------------------------------------------------------------------------------- Hugging Face folder


def save(folder: Path, backend: tokenizers.Tokenizer, **files: dict) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def byte_level_backend() -> tokenizers.Tokenizer:
    metadata = byte_level_metadata()
    vocab = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"][:260])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", AddedToken("</s>", rstrip=True), AddedToken("<m>", lstrip=True), "<sep>"])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("schön", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 260)])
    return backend


def llama_backend(metaspace: bool) -> tokenizers.Tokenizer:
    """As Llama 2 has it: the older form with a normalizer, the newer with Metaspace, which marks only the start."""
    tokens = spm_metadata()["tokenizer.ggml.tokens"]
    pieces = set(SPM_PIECES)
    merges = [(p[:i], p[i:]) for p in SPM_PIECES for i in range(1, len(p)) if {p[:i], p[i:]} <= pieces]
    model = models.BPE(
        {t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    backend = tokenizers.Tokenizer(model)
    if metaspace:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
    return backend


FOLDER_TEXTS = st.lists(
    st.sampled_from([*"abc é你🌶", "he", " ", "  ", "\n", "<s>", "</s>", "<m>", "<think>", "schön"]), max_size=12
)


@pytest.fixture(scope="module", params=["byte level", "llama", "llama metaspace"])
def folder_pair(request, tmp_path_factory) -> tuple[Tokenizer, tokenizers.Tokenizer]:
    backend = byte_level_backend() if request.param == "byte level" else llama_backend("metaspace" in request.param)
    return Tokenizer.from_folder(save(tmp_path_factory.mktemp("folder"), backend)), backend


@settings(max_examples=300, deadline=None)
@given(parts=FOLDER_TEXTS)
def test_folder_encodes_as_the_library_does(folder_pair, parts: list[str]) -> None:
    tokenizer, backend = folder_pair
    text = "".join(parts)
    assert tokenizer.encode(text, parse_special=True) == backend.encode(text).ids
    plain = tokenizer.encode(text, add_bos=False)
    assert tokenizer.special_ids.isdisjoint(plain)
    assert tokenizer.decode(plain) in (text, text.removeprefix(" "))  # Metaspace puts no space before one


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_folder_decodes_as_the_library_does(folder_pair, data) -> None:
    """With two exceptions, both the library's faults.

    Where byte tokens (<0x..>) make up no character, it turns the whole run of them to U+FFFD, good characters
    too. An added token with letters such as the ö it takes for byte-level writing of a byte.
    """
    tokenizer, backend = folder_pair
    parts = data.draw(FOLDER_TEXTS)
    ids = backend.encode("".join(parts)).ids
    if backend.token_to_id("<0x00>") is None:
        ids += data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=8))
        ids = [i for i in ids if i != backend.token_to_id("schön")]
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == backend.decode(ids, skip_special_tokens=skip)


def test_folder_settings(tmp_path: Path) -> None:
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "chat_template": "{{ 1 }}"}
    files = {"tokenizer_config": config, "generation_config": {"eos_token_id": [263, 261]}}
    save(tmp_path, byte_level_backend(), config={"eos_token_id": 262}, **files)
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (260, (261, 263))
    assert tokenizer.vocab_size == 266
    assert tokenizer.special_ids == {260, 261, 262, 263}
    assert tokenizer.encode("he") == [260, 256]
    assert tokenizer.chat_template == "{{ 1 }}"
    with pytest.raises(InvalidArgumentError, match=r"266 is.*266"):
        tokenizer.decode([266])
    (tmp_path / "chat_template.jinja").write_text("{{ 2 }}")
    assert Tokenizer.from_folder(tmp_path).chat_template == "{{ 2 }}"


def test_folder_add_bos_and_eos(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True}
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    save(tmp_path, byte_level_backend(), tokenizer_config=config | {"chat_template": templates})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("he") == [256, 261]
    assert tokenizer.chat_template == "d"


def test_folder_without_tokenizer_json(tmp_path: Path) -> None:
    """GPT-2's older pair of files, which transformers turns into a tokenizer."""
    metadata = byte_level_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"][:260], "<|endoftext|>"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(metadata["tokenizer.ggml.merges"]) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": 260}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("hell") == [258]
    assert tokenizer.eos_token_ids == (260,)


def test_folder_errors(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no folder"):
        Tokenizer.from_folder(tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    save(tmp_path, byte_level_backend())
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="tokenizer_config"):
        Tokenizer.from_folder(tmp_path)


def test_many_control_tokens_are_found_fast(byte_level: Tokenizer) -> None:
    """A thousand reserved tokens, as newer models have, and a text full of their first character."""
    metadata = byte_level_metadata()
    reserved = [f"<|reserved_{i}|>" for i in range(1000)]
    metadata["tokenizer.ggml.tokens"] += reserved
    metadata["tokenizer.ggml.token_type"] += [3] * 1000
    tokenizer = Tokenizer.from_gguf(metadata)
    picked = random.Random(0).sample(range(1000), 50)
    text = "".join(f"he<{reserved[i]}" for i in picked) + "a < b <| c\n" * 1000
    start = time.perf_counter()
    ids = tokenizer.encode(text, parse_special=True)
    assert time.perf_counter() - start < 2
    assert [i - 263 for i in ids if i >= 263] == picked


def test_tokens_that_swallow_spaces_are_found_fast(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(save(tmp_path, byte_level_backend()))
    text = " " * 200_000 + "x <m>\n</s> \n<m>"
    start = time.perf_counter()
    ids = tokenizer.encode(text, parse_special=True, add_bos=False)
    assert time.perf_counter() - start < 5
    assert ids[-5:] == [ord("x"), 262, ord("\n"), 261, 262]
