"""A text that is refused by its bytes has too many tokens, whatever the tokenizer."""

import itertools
import sys
import threading

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import spm_metadata
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxinfer.errors import InvalidArgumentError
from jaxinfer.text.token_bound import TokenBound, token_bound
from jaxinfer.text.tokenizer import Backend, TextToken, Tokenizer

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(*words: str, normalizer=None, lacking: str = "", unk_token=None, added=()) -> tokenizers.Tokenizer:
    """Byte-level BPE whose merges make up the words, all of them of ASCII letters."""
    tokens = [character for character in ALPHABET if character not in lacking]
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in tokens:
                tokens.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    vocab = {token: i for i, token in enumerate(tokens)}
    if unk_token:
        vocab[unk_token] = len(vocab)
    made = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token=unk_token, fuse_unk=unk_token is not None))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_tokens(list(added))
    return made


def of(library: tokenizers.Tokenizer, control=None) -> Tokenizer:
    return Tokenizer(
        vocab_size=library.get_vocab_size(),
        backend=Backend(library, lambda text, first: text),
        control=control or {},
        user_defined={},
        special_ids=frozenset(),
        special_tokens={},
        bos_token_id=None,
        eos_token_ids=(),
        prefix_ids=[],
        suffix_ids=[],
        chat_template=None,
        token_bytes=[b""] * library.get_vocab_size(),
    )


STRIPPING = tokenizers.AddedToken("[X]", lstrip=True, rstrip=True, normalized=False)
TOKENIZERS = {
    "plain": of(byte_level("hello", "aaaaaaaa")),
    "some bytes have no token": of(byte_level("aaa", lacking="\u0104\u0144z")),
    "nfc": of(byte_level("aaaa", normalizer=normalizers.NFC())),
    "nfkc, lower case": of(
        byte_level("kkkk", normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]))
    ),
    "replaced": of(byte_level("aaaa", normalizer=normalizers.Replace("llll", "l"))),
    "an added token strips spaces": of(byte_level("aaaa", added=[STRIPPING])),
    "a control token strips spaces": of(byte_level("aaaa"), {"<x>": TextToken(1, lstrip=True, rstrip=True)}),
    "sentencepiece": Tokenizer.from_gguf(spm_metadata()),
}
# What makes the fewest tokens of the most bytes, with each of these tokenizers.
pieces = st.sampled_from(
    (
        *("a", "aaaaaaaa", "hello", "llll", "z", "€", " ", "\u3000", "[X]", "<x>", "\x04", "\U00050000"),
        *("\u212a", "\u1112\u1161\u11ab", "\U0001d400", "K\u030c", "\u0390"),
    )
)
texts = st.lists(st.tuples(pieces, st.integers(1, 40)), max_size=6).map(
    lambda parts: "".join(piece * count for piece, count in parts)
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=80, deadline=None)
@given(text=texts | st.text(max_size=200))
@example(text=" " * 100 + "[X]" + " " * 100)
@example(text=" " * 100 + "<x>" + "\u3000" * 100)
@example(text="\x04" * 200 + "a")
@example(text="\u1112\u1161\u11ab" * 50)
@example(text="\u212a" * 50)
def test_what_is_refused_by_its_bytes_has_too_many_tokens(name, text):
    tokenizer = TOKENIZERS[name]
    bound = tokenizer.token_bound
    assert bound is not None
    count = len(tokenizer.encode(text, parse_special=True, add_bos=False))
    for given_text in (text, memoryview(text.encode())):
        assert not bound.exceeded(given_text, count)
    # And a text of ASCII letters, which nothing makes smaller, is refused from the first byte that cannot fit.
    letters = "b" * (count * bound.max_bytes)
    assert not bound.exceeded(letters, count)
    assert bound.exceeded(letters + "b", count)


@pytest.mark.parametrize(
    "library",
    [
        byte_level("a", normalizer=normalizers.Strip()),
        byte_level("a", normalizer=normalizers.Replace(tokenizers.Regex(" +"), " ")),
        byte_level("a", normalizer=normalizers.Replace("a", "")),
        byte_level("a", lacking="z", unk_token="?"),
        tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]")),
    ],
    ids=["strips", "collapses", "drops", "joins what is unknown", "words"],
)
def test_where_text_may_vanish_there_is_no_bound(library):
    assert token_bound(library, ()) is None


def test_a_text_that_cannot_fit_is_not_encoded(monkeypatch):
    tokenizer = of(byte_level("abcdefgh"))
    assert tokenizer.token_bound == TokenBound(8)
    assert len(tokenizer.encode("abcdefgh" * 10, max_tokens=10)) == 10
    with pytest.raises(InvalidArgumentError, match=r"prompt = 'at least 11 tokens'.* at most 10 tokens"):
        tokenizer.encode("abcdefgh" * 9 + "xy", max_tokens=10)
    monkeypatch.setattr(tokenizer, "encode_segments", None)
    with pytest.raises(InvalidArgumentError, match=r"text of 81 characters.*10 tokens, which are at most 80 bytes"):
        tokenizer.encode("a" * 81, max_tokens=10)


def test_a_long_text_lets_other_threads_go_on():
    """Counted, not timed: a thread that counts stands still while a call keeps the interpreter to itself."""
    library = byte_level("hello")
    tokenizer, text = of(library), "hello you " * 100_000
    numbers, stop = itertools.count(), threading.Event()
    at = 0

    def count() -> None:
        nonlocal at
        while not stop.is_set():
            at = next(numbers)

    def counted_during(call) -> int:
        begun = at
        call()
        return at - begun

    thread, interval = threading.Thread(target=count), sys.getswitchinterval()
    sys.setswitchinterval(1e-4)  # else it counts for some milliseconds before and after the call
    thread.start()
    try:
        kept = counted_during(lambda: library.encode(text))
        assert counted_during(lambda: tokenizer.encode(text)) > 10 * max(kept, 1000)
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
