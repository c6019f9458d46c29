"""Words that must not be generated, as the token sequences that would write them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxinfer.errors import InvalidArgumentError
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import MAX_BAD_WORD_TOKENS


def bad_word_rows(tokenizer: Tokenizer, words: Sequence[str]) -> np.ndarray:
    """Token sequences [B, MAX_BAD_WORD_TOKENS] int32 of the words, padded with -1 in front.

    As in vLLM, a word counts as it begins a text and as it stands inside one, behind a space, where that is another
    token sequence of the same length. Spellings by other tokens are not found.

    Raises:
      InvalidArgumentError: a word is nothing but spaces, or has too many tokens.
    """
    rows: list[list[int]] = []
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise InvalidArgumentError("bad_words", word, "words that are more than spaces")
        first = tokenizer.encode(bare, add_bos=False)
        behind_space = tokenizer.encode(f" {bare}", add_bos=False)
        if len(first) > MAX_BAD_WORD_TOKENS:
            raise InvalidArgumentError("bad_words", word, f"at most {MAX_BAD_WORD_TOKENS} tokens; it has {len(first)}")
        rows.append(first)
        if len(behind_space) == len(first) and behind_space[0] != first[0]:
            rows.append(behind_space)
    padded = np.full((len(rows), MAX_BAD_WORD_TOKENS), -1, np.int32)
    for number, row in enumerate(rows):
        padded[number, MAX_BAD_WORD_TOKENS - len(row) :] = row
    return padded
