from __future__ import annotations

import itertools
import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import CHARS, tokenizer_of
from tokenizers import decoders, models

from jaxinfer.errors import InvalidArgumentError
from jaxinfer.text.detokenizer import Detokenizer, Piece
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import SamplingParams

# Few characters, of one to four bytes, so that stop strings and broken characters are met often.
ALPHABET = "abc é你🌶\ufffd"


def run(detokenizer: Detokenizer, ids: list[int]) -> list[Piece]:
    pieces = []
    for token_id in ids:
        piece = detokenizer.push(token_id)
        if piece is not None:
            pieces.append(piece)
            if piece.stop is not None:
                return pieces
    return [*pieces, detokenizer.flush()]


def texts(pieces: list[Piece]) -> list[str]:
    return [piece.text for piece in pieces if piece.text]


def cut(text: str, stop: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The plain reference: all the text, cut at the match that begins first, then is complete first."""
    matches = [(text.find(s), len(s)) for s in stop if s in text]
    if not matches:
        return text, None
    start, length = min(matches)
    return text[: start + length if include else start], text[start : start + length]


def split(data: bytes, at: list[int]) -> list[bytes]:
    edges = [0, *sorted(i % (len(data) + 1) for i in at), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


def test_stop_held_back() -> None:
    """Case stop-held-back."""
    tokenizer = tokenizer_of([b"ABC", b"DEF", b"G", b"HI", b"J", b"X"])
    stopped = run(Detokenizer(tokenizer, stop=("DEFGHIJ",)), [0, 1, 2, 3, 4])
    assert stopped == [Piece("ABC", (0,)), Piece("", (1, 2, 3, 4), "DEFGHIJ")]
    spared = run(Detokenizer(tokenizer, stop=("DEFGHIJ",)), [0, 1, 2, 3, 5])
    assert spared == [Piece("ABC", (0,)), Piece("DEFGHIX", (1, 2, 3, 5)), Piece("", ())]
    ended = run(Detokenizer(tokenizer, stop=("DEFGHIJ",)), [0, 1, 2, 3])
    assert ended == [Piece("ABC", (0,)), Piece("DEFGHI", (1, 2, 3))]


def test_stop_inside_token() -> None:
    """Case stop-inside-token."""
    tokenizer = tokenizer_of([b"xDEy"])
    assert Detokenizer(tokenizer, stop=("DE",)).push(0) == Piece("x", (0,), "DE")
    assert Detokenizer(tokenizer, stop=("DE",), include_stop=True).push(0) == Piece("xDE", (0,), "DE")


def test_split_utf8(byte_level: Tokenizer) -> None:
    """Case split-utf8: characters in halves, and a prompt that ends in half of one."""
    text = "今天🌶️ é"
    ids = byte_level.encode(text)
    pieces = run(Detokenizer(byte_level), ids)
    assert texts(pieces) == list(text)
    assert [i for piece in pieces for i in piece.token_ids] == ids
    # The prompt stops in the middle of 天: the first piece completes it and holds nothing of the prompt before it.
    prompt, generated = ids[:5], ids[5:]
    assert texts(run(Detokenizer(byte_level, prompt_ids=prompt), generated)) == list("天🌶️ é")
    assert texts(run(Detokenizer(byte_level, prompt_ids=ids), byte_level.encode("b"))) == ["b"]


def test_several_stops() -> None:
    tokenizer = tokenizer_of([b"a", b"b", b"c", b"d"])
    # "bc" is complete first, but "abcd" began before it, so it is awaited ...
    assert run(Detokenizer(tokenizer, stop=("bc", "abcd")), [0, 1, 2, 3]) == [Piece("", (0, 1, 2, 3), "abcd")]
    # ... until it can no longer come, or no more comes at all.
    assert run(Detokenizer(tokenizer, stop=("bc", "abcd")), [0, 1, 2, 0, 3]) == [Piece("a", (0, 1, 2, 0), "bc")]
    assert run(Detokenizer(tokenizer, stop=("bc", "abcd")), [0, 1, 2]) == [Piece("a", (0, 1, 2), "bc")]
    assert run(Detokenizer(tokenizer, stop=("abc", "ab")), [0, 1, 2]) == [Piece("", (0, 1), "ab")]


def test_what_follows_a_stop_is_ignored() -> None:
    detokenizer = Detokenizer(tokenizer_of([b"a", b"b"]), stop=("a",))
    assert detokenizer.push(0) == Piece("", (0,), "a")
    assert detokenizer.push(1) is None
    assert detokenizer.flush() == Piece("", ())


def test_special_tokens(byte_level: Tokenizer) -> None:
    start, h = byte_level.encode("<|im_start|>h", parse_special=True)
    assert run(Detokenizer(byte_level), [h, start, h]) == [Piece("h", (h,)), Piece("h", (start, h)), Piece("", ())]
    shown = run(Detokenizer(byte_level, skip_special_tokens=False), [h, start, h])
    assert texts(shown) == ["h", "<|im_start|>", "h"]
    assert run(Detokenizer(byte_level), [h, start]) == [Piece("h", (h,)), Piece("", (start,))]


def test_ids_out_of_range() -> None:
    detokenizer = Detokenizer(tokenizer_of([b"a"]))
    with pytest.raises(InvalidArgumentError, match="-1"):
        detokenizer.push(-1)
    assert detokenizer.push(7) is None  # one of the logits that only pad the model's vocabulary
    assert detokenizer.push(0) == Piece("a", (7, 0))


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(ALPHABET, max_size=16),
    noise=st.binary(max_size=3),
    at=st.lists(st.integers(0, 63), max_size=12),
    stop=st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=4),
    include=st.booleans(),
)
def test_any_split(text: str, noise: bytes, at: list[int], stop: list[str], include: bool) -> None:
    """However the bytes lie in tokens, the joined pieces are the whole text cut at its first stop string."""
    tokens = split(text.encode() + noise + text.encode(), at)
    tokenizer = tokenizer_of(tokens)
    ids = list(range(len(tokens)))
    detokenizer = Detokenizer(tokenizer, stop=tuple(stop), include_stop=include)
    pieces = run(detokenizer, ids)
    want, reason = cut(tokenizer.decode(ids), tuple(stop), include)
    assert "".join(piece.text for piece in pieces) == want
    assert [piece.stop for piece in pieces] == [None] * (len(pieces) - 1) + [reason]
    reported = [i for piece in pieces for i in piece.token_ids]
    assert reported == ids[: len(reported)]
    assert reason is not None or reported == ids


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab", max_size=12),
    at=st.lists(st.integers(0, 63), max_size=12),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_all_that_is_decided_is_sent_and_no_more(text: str, at: list[int], stop: list[str]) -> None:
    tokens = split(text.encode(), at)
    detokenizer = Detokenizer(tokenizer_of(tokens), stop=tuple(stop))
    sent, known, reported = "", "", []
    for i, token in enumerate(tokens):
        piece = detokenizer.push(i)
        known += token.decode()
        sent += piece.text if piece else ""
        reported += piece.token_ids if piece else ()
        if piece and piece.stop:
            return
        may_start = [n for n in range(len(known)) if any(s.startswith(known[n:]) for s in stop)]
        matches = [known.find(s) for s in stop if s in known]
        assert sent == known[: min([*may_start, *matches, len(known)])]
        # No text comes before its token, and a token waits no longer than its text.
        begins = [len("".join(t.decode() for t in tokens[:n])) for n in range(i + 1)]
        assert len(reported) == max([n + 1 for n in range(i + 1) if begins[n] < len(sent)], default=0)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=5), max_size=8), st.lists(st.integers(0, 7), max_size=3))
def test_bytes_decode_as_the_library_does(tokens: list[bytes], special: list[int]) -> None:
    """Valid or not, the bytes become what the library's byte-level decoder makes of them, special tokens or none."""
    names = ["".join(CHARS[bytes([byte])] for byte in token) for token in tokens]
    decoded = decoders.ByteLevel().decode(names)
    tokenizer = tokenizer_of([*tokens, b"<s>"], special=(len(tokens),))
    ids = list(range(len(tokens)))
    for i in special:
        ids.insert(i, len(tokens))
    assert tokenizer.decode(ids) == decoded
    assert "".join(texts(run(Detokenizer(tokenizer), ids))) == decoded


def test_sentencepiece_strips_only_the_first_space_of_all(spm: Tokenizer) -> None:
    ids = spm.encode("ab ab", add_bos=False)
    assert spm.decode(ids) == "ab ab"
    assert "".join(texts(run(Detokenizer(spm), ids))) == "ab ab"
    assert "".join(texts(run(Detokenizer(spm, prompt_ids=[1]), ids))) == "ab ab"
    assert "".join(texts(run(Detokenizer(spm, prompt_ids=[1, *spm.encode("a")]), ids))) == " ab ab"


def test_window_decoding(tmp_path) -> None:
    """A decoder that is no join of bytes: WordPiece puts spaces between words."""
    vocab = {"[UNK]": 0, "he": 1, "##llo": 2, "wor": 3, "##ld": 4, "!": 5, "é": 6}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.token_bytes(True) is None
    ids = [1, 2, 3, 4, 5, 1, 6]
    pieces = run(Detokenizer(tokenizer), ids)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids) == "hello world! he é"
    assert [i for piece in pieces for i in piece.token_ids] == ids
    assert "".join(texts(run(Detokenizer(tokenizer, prompt_ids=ids[:3]), ids[3:]))) == "ld! he é"
    assert "".join(texts(run(Detokenizer(tokenizer, stop=("o w",)), ids))) == "hell"


def test_the_cost_of_a_token_does_not_grow() -> None:
    tokenizer = tokenizer_of([b"ab", b"a"])

    def seconds(count: int) -> float:
        detokenizer = Detokenizer(tokenizer, stop=("aab" * 40, "zz"))
        start = time.perf_counter()
        for i in range(count):
            detokenizer.push(i & 1)
        return time.perf_counter() - start

    seconds(1000)
    assert seconds(40_000) < 40 * 20 * min(seconds(1000) for _ in range(5))


def test_stop_strings_are_short():
    with pytest.raises(InvalidArgumentError, match=r"stop = '8193 characters' is not allowed: at most 8192"):
        SamplingParams(stop=["a" * 8000, "b" * 193])
    assert len(SamplingParams(stop=["a" * 8000, "b" * 192]).stop_strings) == 2
