"""How much of a text one token can stand for: by that a text is too long before anybody has encoded it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import tokenizers

from jaxinfer.text.gguf_vocab import BYTE_CHARACTERS

# Rust's \s, which decides what a token with `lstrip` or `rstrip` swallows; Python's has four separators more.
SPACES = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))

# By how much these make a text's UTF-8 smaller at most, over all of Unicode: NFC joins letters and their marks, and all
# but it make the Kelvin sign, of three bytes, an ASCII letter. NFKD and NFKC do so with mathematical ones, of four.
_SHRINKING = {"ByteLevel": 1, "Prepend": 1, "NFD": 3, "NFC": 4, "NFKD": 4, "NFKC": 4, "Lowercase": 3}
# These cut a text and lose nothing of it.
_CUTTING = ("ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength")
# In UTF-8 these occur in no text.
_PIECE = 1 << 16  # of a text, in characters or bytes
_NO_BYTES = frozenset((0xC0, 0xC1, *range(0xF5, 0x100)))


@dataclass(frozen=True, slots=True)
class TokenBound:
    """How much of a text one token can stand for.

    Attributes:
      max_bytes: most bytes of UTF-8.
      lost_bytes: bytes that may become nothing, however many there are: those for which the vocabulary has no token,
        and those of spaces, where some tokens take in all the spaces around them.
    """

    max_bytes: int
    lost_bytes: bytes = b""

    def exceeded(self, text: str | memoryview, num_tokens: int) -> bool:
        """Returns whether a text, or the bytes of one, is more than so many tokens whatever they are.

        It looks at little more of the text than would fit, and piece by piece, so that other Python threads go on.
        """
        left = num_tokens * self.max_bytes
        if len(text) * (4 if isinstance(text, str) else 1) <= left:
            return False
        for first in range(0, len(text), _PIECE):
            piece = text[first : first + _PIECE]
            data = piece.encode("utf-8", errors="surrogatepass") if isinstance(piece, str) else bytes(piece)
            left -= len(data.translate(None, delete=self.lost_bytes))
            if left < 0:
                return True
        return False


def token_bound(
    library: tokenizers.Tokenizer, strings: Iterable[str], *, loses_spaces: bool = False
) -> TokenBound | None:
    """Returns the bound of a tokenizer; None if none is known.

    There is none where text is dropped, as by normalizers that strip spaces, or where unknown text of any length
    becomes one token.

    Args:
      strings: those that become one token each before the library sees the rest of a text.
      loses_spaces: whether these take in the spaces around them.
    """
    normalizer, pre_tokenizer = _parts(_state(library.normalizer)), _parts(_state(library.pre_tokenizer))
    shrinking = _shrinking(normalizer)
    if shrinking is None or not all(map(_keeps_all, pre_tokenizer)):
        return None
    added = library.get_added_tokens_decoder().values()
    vocabulary = library.get_vocab(with_added_tokens=True)
    by_character = any(part["type"] == "ByteLevel" for part in (*normalizer, *pre_tokenizer))
    if by_character:
        lost = bytes(
            byte
            for byte, character in enumerate(BYTE_CHARACTERS)
            if character not in vocabulary and byte not in _NO_BYTES
        )
    elif getattr(library.model, "byte_fallback", False):
        lost = bytes(byte for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary and byte not in _NO_BYTES)
    else:
        return None
    if lost and (shrinking > 1 or not by_character or getattr(library.model, "unk_token", "") is not None):
        return None  # all of a run of unknown characters may be one token
    plain = {token.content for token in added}
    longest = max(
        # A byte-level token has a character for each byte.
        len(token) if by_character and token not in plain else len(token.encode("utf-8", errors="surrogatepass"))
        for token in (*vocabulary, *strings)
    )
    if loses_spaces or any(token.lstrip or token.rstrip for token in added):
        lost = bytes({*lost, *SPACES.encode()})
    return TokenBound(shrinking * longest, lost)


def _state(part: Any) -> dict[str, Any] | None:
    return None if part is None else json.loads(part.__getstate__())


def _parts(state: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A part of a tokenizer as the simple ones it consists of."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    inner = state.get("normalizers") or state.get("pretokenizers") or []
    return [part for each in inner for part in _parts(each)]


def _shrinking(normalizer: list[dict[str, Any]]) -> int | None:
    """Returns by how much normalizers make a text smaller at most; None if by any factor."""
    factor = 1
    for part in normalizer:
        if part["type"] == "Replace":
            # A pattern, unlike a string, may match any length.
            old, new = part["pattern"].get("String"), part["content"]
            if not old or not new:
                return None
            factor *= -(-len(old.encode()) // len(new.encode()))
        elif part["type"] in _SHRINKING:
            factor *= _SHRINKING[part["type"]]
        else:
            return None
    return factor


def _keeps_all(pre_tokenizer: dict[str, Any]) -> bool:
    cuts = pre_tokenizer["type"] in ("Split", "Punctuation") and pre_tokenizer["behavior"] != "Removed"
    return cuts or pre_tokenizer["type"] in _CUTTING
