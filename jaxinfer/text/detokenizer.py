"""Incremental text of one sample: characters that span tokens, and stop strings, are held back until decided."""

from __future__ import annotations

import codecs
import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from jaxinfer.errors import InvalidArgumentError
from jaxinfer.text.tokenizer import Tokenizer

# Tokens whose text may stay undecided in the windowed decoding; a character has at most four bytes.
_MAX_UNDECIDED = 8


class Piece(NamedTuple):
    """Text to send, the tokens it came from, and the stop string that ends it, if one does.

    A token goes with the first piece that holds some of its text, so no text is sent before its token.
    """

    text: str
    token_ids: tuple[int, ...]
    stop: str | None = None


class Detokenizer:
    """Turns token ids, one at a time, into pieces of text.

    Joined, the pieces are the text of all the tokens, cut at the first stop string: the one that begins
    earliest, and among those the one that is complete first. Each token comes with exactly one piece, in order.
    What may still become a stop string, or the rest of a character, waits. Where a stop string is complete while
    one that began earlier may still become so, the earlier one is waited for too: so the cut does not depend on
    how the text lies in tokens.

    The cost of a token is its own text's, however long the output is.

    Args:
      stop: strings that end the output.
      skip_special_tokens: leave control tokens out of the text.
      include_stop: whether the stop string itself is sent.
      min_tokens: a stop string that is complete within the text of the first so many tokens does not count.
      spaces_between_special_tokens: False takes out the space that some tokenizers put between two control tokens.
      prompt_ids: the tokens before. Only their end matters: where they stop inside a character, the generated
        rest completes it; and only at the start of everything is the space dropped that SentencePiece puts there.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        spaces_between_special_tokens: bool = True,
        prompt_ids: Sequence[int] = (),
    ):
        table = tokenizer.token_bytes(skip_special_tokens)
        self._source: _ByteSource | _WindowSource
        if table is not None:
            self._source = _ByteSource(table, tokenizer.strip_space, prompt_ids)
        else:
            self._source = _WindowSource(tokenizer, skip_special_tokens, spaces_between_special_tokens, prompt_ids)
        self._matcher = _StopMatcher(stop) if stop else None
        self._include_stop = include_stop
        self._unstoppable = min_tokens  # of the tokens to come
        self._held = ""  # decoded text that is not sent yet
        self._sent = 0  # characters sent
        self._waiting: deque[tuple[int, int]] = deque()  # tokens of no piece yet: id, where its text begins
        self._done = False

    def push(self, token_id: int) -> Piece | None:
        """Takes the next token; gives the text that is decided now, if there is some.

        After a piece with a stop string, further tokens are not part of the output: they are ignored.

        Raises:
          InvalidArgumentError: if the id is negative. One over the vocabulary has no text: models pad their logits.
        """
        if self._done:
            return None
        if token_id < 0:
            raise InvalidArgumentError("token_id", token_id, "at least 0")
        matcher = self._matcher
        counts = self._unstoppable <= 0
        self._unstoppable -= 1
        self._waiting.append((token_id, self._sent + len(self._held)))
        text = self._source.push(token_id)
        if not text:
            return None
        self._held += text
        if matcher is None:
            return self._release(self._sent + len(self._held))
        if matcher.feed(text, counts=counts):
            return self._cut(matcher)
        return self._release(matcher.undecided) if matcher.undecided > self._sent else None

    def flush(self) -> Piece:
        """Ends the output; gives all that was held back, unless a stop string in it ends it earlier."""
        if self._done:
            return Piece("", ())
        text = self._source.flush()
        self._held += text
        if self._matcher is not None:
            self._matcher.feed(text)
            if self._matcher.best is not None:  # nothing earlier came of what was awaited
                return self._cut(self._matcher)
        self._done = True
        return Piece(self._held, tuple(token_id for token_id, _ in self._waiting))

    def _cut(self, matcher: _StopMatcher) -> Piece:
        assert matcher.best is not None
        start, stop = matcher.best
        end = start + len(stop) if self._include_stop else start
        self._done = True
        return Piece(self._held[: end - self._sent], tuple(token_id for token_id, _ in self._waiting), stop)

    def _release(self, end: int) -> Piece:
        count = end - self._sent
        text, self._held, self._sent = self._held[:count], self._held[count:], end
        ids = []
        while self._waiting and self._waiting[0][1] < end:
            ids.append(self._waiting.popleft()[0])
        return Piece(text, tuple(ids))


class TokensOnly:
    """As `Detokenizer`, where no text is wanted: every token comes at once, with none."""

    def push(self, token_id: int) -> Piece | None:
        return Piece("", (token_id,))

    def flush(self) -> Piece:
        return Piece("", ())


class _ByteSource:
    """Text of tokens that stand for bytes."""

    def __init__(self, table: Sequence[bytes], strip_space: bool, prompt_ids: Sequence[int]):
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
        self._strip_space = strip_space
        tail: list[bytes] = []
        for token_id in reversed(prompt_ids):
            if token_id < len(table) and (token := table[token_id]):
                tail.append(token)
                if sum(map(len, tail)) >= 4:  # no character has more
                    break
        if tail:
            self._decode(b"".join(reversed(tail)))
            self._strip_space = False

    def push(self, token_id: int) -> str:
        text = self._decode(self._table[token_id] if token_id < len(self._table) else b"")
        return self._strip(text) if self._strip_space else text

    def flush(self) -> str:
        text = self._decode(b"", True)
        return self._strip(text) if self._strip_space else text

    def _strip(self, text: str) -> str:
        if text:
            self._strip_space = False
        return text.removeprefix(" ")


class _WindowSource:
    """Text of tokens whose decoder is not a join of bytes: the last few are decoded again with each new one."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool, spaces: bool, prompt_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._spaces = spaces
        self._after_special = False
        self._window = list(prompt_ids[-_MAX_UNDECIDED:])
        self._read = len(self._window)
        # Of the tokens before `_read`; where they end inside a character, what completes it is new text.
        self._known = self._text().rstrip("\ufffd")

    def _text(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip)

    def push(self, token_id: int) -> str:
        if token_id >= self._tokenizer.vocab_size or (self._skip and token_id in self._tokenizer.special_ids):
            return ""
        self._window.append(token_id)
        text = self._text()
        special = token_id in self._tokenizer.special_ids
        between, self._after_special = special and self._after_special, special
        if text.endswith("\ufffd") and len(self._window) - self._read < _MAX_UNDECIDED:
            return ""
        new = self._advance(text)
        return new.removeprefix(" ") if between and not self._spaces else new

    def flush(self) -> str:
        return self._advance(self._text())

    def _advance(self, text: str) -> str:
        new = text[len(self._known) :]
        if new:
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._known = self._text()
        return new


class _StopAutomaton:
    """Stop strings in the form in which a text is searched for all of them at once (Aho and Corasick, 1975)."""

    def __init__(self, stop: Sequence[str]):
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.match: list[str | None] = [None]  # the longest stop string that ends in a state
        for text in stop:
            self._insert(text)
        self._link()

    def _insert(self, text: str) -> None:
        state = 0
        for char in text:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = self._next[state][char]
        self.match[state] = text

    def _link(self) -> None:
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            if self.match[state] is None:
                self.match[state] = self.match[self._fail[state]]
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char) if state else 0
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """Returns the state after a character."""
        while char not in self._next[state]:
            if not state:
                return 0
            state = self._fail[state]
        return self._next[state][char]


# Samples of a request share it, as do requests with the same stop strings.
_automaton = functools.lru_cache(maxsize=64)(_StopAutomaton)


class _StopMatcher:
    """Finds stop strings in a text given in pieces; each character is looked at once."""

    def __init__(self, stop: tuple[str, ...]):
        self._automaton = _automaton(stop)
        self._state = 0
        self._seen = 0
        self.best: tuple[int, str] | None = None  # where the first match so far begins, and the stop string
        self.undecided = 0  # no stop string can begin before this

    def feed(self, text: str, *, counts: bool = True) -> bool:
        """Takes the text's next piece; says whether the first match is known, in `best`.

        A match that ends in a piece that does not count is passed over.
        """
        automaton, state, best = self._automaton, self._state, self.best
        for seen, char in enumerate(text, self._seen + 1):
            state = automaton.step(state, char)
            match = automaton.match[state]
            if counts and match is not None and (best is None or seen - len(match) < best[0]):
                best = self.best = (seen - len(match), match)
            if best is not None and seen - automaton.depth[state] >= best[0]:
                return True
        self._state, self._seen = state, self._seen + len(text)
        self.undecided = self._seen - automaton.depth[state]
        return False
