"""Incremental text and stop strings, alone: every way to split a text into tokens gives the same text, cut alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import tokenizer_of

from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.text.tokenizer import Backend, Tokenizer

KINDS = ("bytes", "sentencepiece", "window")


def tokenizer_for(kind: str, tokens: Sequence[bytes]) -> Tokenizer:
    """Id i stands for the i-th token; `window` is one whose decoder cannot be put as a table of bytes."""
    if kind != "window":
        return tokenizer_of(list(tokens), strip_space=kind == "sentencepiece")
    return Tokenizer(
        vocab_size=len(tokens),
        backend=Backend(tokenizers.Tokenizer(tokenizers.models.BPE()), lambda text, first: text),
        control={},
        user_defined={},
        special_ids=frozenset(),
        special_tokens={},
        bos_token_id=None,
        eos_token_ids=(),
        prefix_ids=[],
        suffix_ids=[],
        chat_template=None,
        token_bytes=None,
        decode_ids=lambda ids, skip: b"".join(tokens[i] for i in ids).decode(errors="replace"),
    )


def reference(kind: str, data: bytes, stop: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Brute force over the whole text: of all places where a stop string lies, the first; there, the shortest."""
    text = data.decode(errors="replace")
    if kind == "sentencepiece":
        text = text.removeprefix(" ")
    for start in range(len(text)):
        found = [s for s in stop if text.startswith(s, start)]
        if found:
            shortest = min(found, key=len)
            return text[: start + len(shortest) if include else start], shortest
    return text, None


def all_splits(data: bytes) -> Iterator[list[bytes]]:
    for count in range(len(data)):
        for inner in itertools.combinations(range(1, len(data)), count):
            yield [data[a:b] for a, b in itertools.pairwise((0, *inner, len(data)))]


def check_split(kind: str, tokens: Sequence[bytes], stop: Sequence[str], include: bool) -> None:
    want, reason = reference(kind, b"".join(tokens), stop, include)
    detokenizer = Detokenizer(tokenizer_for(kind, tokens), stop=tuple(stop), include_stop=include)
    sent, reported, stopped = "", [], None
    for i in range(len(tokens)):
        piece = detokenizer.push(i)
        if piece is None:
            continue
        sent += piece.text
        reported += piece.token_ids
        assert want.startswith(sent), (tokens, stop, sent)  # else something sent would have to be taken back
        assert reported == list(range(len(reported))), (tokens, stop, reported)
        assert len(reported) <= i + 1
        if piece.stop is not None:
            stopped = piece.stop
            break
    if stopped is None:
        piece = detokenizer.flush()
        sent, stopped = sent + piece.text, piece.stop
        reported += piece.token_ids
    assert (sent, stopped) == (want, reason), (tokens, stop)
    assert reported == list(range(len(reported)))
    assert stopped is not None or len(reported) == len(tokens)
    assert detokenizer.push(0) is None if stopped else True


# Of every length in UTF-8, of every plane, and the character that stands for broken ones.
CHARACTERS = st.one_of(
    st.sampled_from("ab\u00e9\u4f60\U0001f336\ufffd \u0301"),
    st.builds(lambda plane, low: chr(plane << 16 | low), st.integers(0, 16), st.integers(0, 0xD7FF)),
)
STOPS = st.lists(
    st.one_of(
        st.text("ab", min_size=1, max_size=4),
        st.builds(lambda char, count: char * count, CHARACTERS, st.integers(1, 3)),
        st.text(CHARACTERS, min_size=1, max_size=2),
    ),
    max_size=4,
)


@st.composite
def cases(draw, most: int = 8, longest: int = 8) -> tuple[str, bytes, list[str], bool]:
    """A kind of tokenizer, at most so many bytes, stop strings (some of them out of the text), whether to include."""
    kind = draw(st.sampled_from(KINDS))
    text = draw(st.one_of(st.text("ab", max_size=longest), st.text(CHARACTERS, max_size=longest)))
    data = text.encode()
    if kind != "window" and draw(st.booleans()):  # broken characters: of those a window may show more or fewer
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.binary(min_size=1, max_size=3)) + data[at:]
    data = data[:most]
    if kind == "window":
        data = data.decode(errors="ignore").encode()
    stop = draw(STOPS)
    whole = data.decode(errors="replace")
    for _ in range(draw(st.integers(0, 2))):
        if whole:
            at = draw(st.integers(0, len(whole) - 1))
            stop.append(whole[at : at + draw(st.integers(1, 4))])
    stop += [s[:-1] for s in stop if len(s) > 1 and draw(st.booleans())]  # prefixes of others
    return kind, data, stop, draw(st.booleans())


def check_all_splits(case: tuple[str, bytes, list[str], bool]) -> None:
    kind, data, stop, include = case
    for tokens in all_splits(data):
        check_split(kind, tokens, stop, include)


def check_one_split(case: tuple[str, bytes, list[str], bool], at: list[int], empty: list[int]) -> None:
    kind, data, stop, include = case
    edges = [0, *sorted(i % (len(data) + 1) for i in at), len(data)]
    tokens = [data[a:b] for a, b in itertools.pairwise(edges)]
    for i in empty:  # tokens without text, as control tokens are
        tokens.insert(i % (len(tokens) + 1), b"")
    if kind == "window":  # which looks at a few tokens only, as many as a character can span
        tokens = [token for token in tokens if token]
    check_split(kind, tokens, stop, include)


SPLIT_FUZZ = (check_all_splits, {"case": cases()})
LONG_FUZZ = (
    check_one_split,
    {
        "case": cases(most=200, longest=60),
        "at": st.lists(st.integers(0, 1 << 16), max_size=60),
        "empty": st.lists(st.integers(0, 1 << 16), max_size=4),
    },
)


@settings(max_examples=200, deadline=None)
@given(**SPLIT_FUZZ[1])
@example(("bytes", b"aaaaaaaa", ["aaa", "aaaa", "aa"], True))
@example(("bytes", b"ababacab", ["abac", "bab", "ba"], False))
@example(("bytes", "\U0001f336\U0001f336".encode(), ["\U0001f336\U0001f336"], True))
@example(("bytes", "\U0001f336".encode()[:3] + b"a\xff", ["a\ufffd"], False))
@example(("sentencepiece", b"  a a", [" a", " "], False))
@example(("window", "\ufffd\U0001f336a".encode(), ["\ufffd"], False))
def test_every_split_of_a_short_text(case) -> None:
    check_all_splits(case)


@settings(max_examples=300, deadline=None)
@given(**LONG_FUZZ[1])
def test_splits_of_longer_texts(case, at, empty) -> None:
    check_one_split(case, at, empty)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_text_of_two_letters_and_every_pair_of_stop_strings(kind: str, include: bool) -> None:
    """Small enough to be complete: where stop strings overlap, hold each other, or begin alike."""
    words = ["".join(letters) for count in (1, 2, 3) for letters in itertools.product("ab", repeat=count)]
    for pair in itertools.combinations(words, 2):
        for letters in itertools.product("ab", repeat=5):
            data = "".join(letters).encode()
            # One token each, and all in one: the finest split and the coarsest; those between are above.
            check_split(kind, [bytes([byte]) for byte in data], pair, include)
            check_split(kind, [data], pair, include)


@pytest.mark.parametrize("kind", ["bytes", "window"])
def test_no_replacement_character_for_what_is_completed_later(kind: str) -> None:
    text = "é你\U0001f336\U0010fffd"
    tokens = [bytes([byte]) for byte in text.encode()]
    detokenizer = Detokenizer(tokenizer_for(kind, tokens))
    sent = [piece.text for i in range(len(tokens)) if (piece := detokenizer.push(i)) and piece.text]
    assert sent == list(text)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece", "window"])
def test_every_split_between_prompt_and_output(kind: str) -> None:
    """The prompt may end inside a character, which the output then completes."""
    text = "a é\U0001f336你 b"
    tokens = [bytes([byte]) for byte in text.encode()]
    tokenizer = tokenizer_for(kind, tokens)
    for end in range(1, len(tokens)):
        detokenizer = Detokenizer(tokenizer, prompt_ids=range(end))
        pieces = [detokenizer.push(i) for i in range(end, len(tokens))] + [detokenizer.flush()]
        whole = text.encode()[:end].decode(errors="ignore")
        assert "".join(piece.text for piece in pieces if piece) == text.removeprefix(whole), end
