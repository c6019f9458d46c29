"""Text to token ids and back, for GGUF files and Hugging Face folders, over the `tokenizers` library.

Control tokens are found here and not by the library: a text is cut at the control strings that may count, and
each fragment between them is encoded with none in force. So one rule serves both kinds of checkpoint, and a
string like `<|im_end|>` inside a text becomes a control token only where the caller says so.
"""

from __future__ import annotations

import functools
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from jaxinfer.errors import CheckpointError, InvalidArgumentError
from jaxinfer.text import gguf_vocab
from jaxinfer.text.gguf_vocab import TokenType
from jaxinfer.text.token_bound import SPACES, TokenBound, token_bound

# A text is one piece of work, which the library's thread pool cannot share; without it a process that forks is safe.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_BATCH = 1024  # fragments that the library gets at once: it takes them over while no other Python thread runs
_SCANNED = 1 << 16  # characters that a pattern is searched for in at once, for the same reason
_MAX_UNUSED_IDS = 1 << 20  # some vocabularies leave gaps before the tokens that were added
_ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TextToken(NamedTuple):
    """A token that its own string yields: a control token or a user-defined one."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


class Backend(NamedTuple):
    """What encodes text that holds no control or user-defined token.

    Attributes:
      library: the tokenizer of the `tokenizers` library, which takes no string for a control token.
      prepare: (fragment, whether it is the text's first) -> what the library is given.
      skipped: ids that `prepare` puts in front of every fragment but a text's first.
    """

    library: tokenizers.Tokenizer
    prepare: Callable[[str, bool], str]
    skipped: int = 0


class Tokenizer:
    """Encodes and decodes; made by `from_gguf` or `from_folder`. Threads may share one.

    Attributes:
      vocab_size: ids run from 0 to this, exclusive. A model may have more logits than that, as padding.
      bos_token_id: the token a text begins with, if the model has one.
      eos_token_ids: every token that ends the model's output, the tokenizer's own one first.
      special_ids: the control tokens, which `decode` leaves out by default.
      special_tokens: `bos_token`, `eos_token` and the like, as chat templates ask for them.
      chat_template: Jinja source of the model's chat template, if it has one.
      strip_space: whether a text's very first space is the one that encoding put there, and is not shown.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        backend: Backend,
        control: Mapping[str, TextToken],
        user_defined: Mapping[str, TextToken],
        special_ids: frozenset[int],
        special_tokens: Mapping[str, str],
        bos_token_id: int | None,
        eos_token_ids: tuple[int, ...],
        prefix_ids: Sequence[int],
        suffix_ids: Sequence[int],
        chat_template: str | None,
        token_bytes: Sequence[bytes] | None,
        decode_ids: Callable[[list[int], bool], str] | None = None,
        strip_space: bool = False,
    ):
        self.vocab_size = vocab_size
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self.special_ids = special_ids
        self.special_tokens = dict(special_tokens)
        self.chat_template = chat_template
        self.strip_space = strip_space
        self._backend = backend
        # A control token of one character cannot be told from text, so no text yields it.
        self._control = _Splitter({text: token for text, token in control.items() if len(text) > 1})
        self._user_defined = _Splitter({text: token for text, token in user_defined.items() if text})
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self._token_bytes = token_bytes
        self._decode_ids = decode_ids

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer in a GGUF file.

        Args:
          metadata: the file's keys and values, arrays as lists.

        Raises:
          CheckpointError: if a key is missing or does not fit the others.
          UnsupportedError: if the kind of tokenizer or of pre-tokenizer is not known here; the message names it.
        """
        vocab = gguf_vocab.read(metadata)
        chat_template = metadata.get("tokenizer.chat_template")
        if not isinstance(chat_template, str | None):
            raise CheckpointError("tokenizer.chat_template is not a string")

        def of_type(*types: TokenType) -> dict[str, TextToken]:
            return {vocab.tokens[i]: TextToken(i) for i, kind in enumerate(vocab.types) if kind in types}

        control = of_type(TokenType.CONTROL, TokenType.UNKNOWN)
        bos, eos = vocab.role_ids.get("bos_token"), vocab.role_ids.get("eos_token")
        return cls(
            vocab_size=len(vocab.tokens),
            backend=Backend(vocab.backend, lambda text, first: vocab.prepare(text)),
            control=control,
            user_defined=of_type(TokenType.USER_DEFINED),
            special_ids=frozenset(token.id for token in control.values()),
            special_tokens={role: vocab.tokens[i] for role, i in vocab.role_ids.items()},
            bos_token_id=bos,
            eos_token_ids=vocab.eos_ids,
            prefix_ids=[bos] if vocab.add_bos and bos is not None else [],
            suffix_ids=[eos] if vocab.add_eos and eos is not None else [],
            chat_template=chat_template,
            token_bytes=vocab.token_bytes,
            strip_space=vocab.strip_space,
        )

    @classmethod
    def from_folder(cls, path: str | Path) -> Tokenizer:
        """The tokenizer in a Hugging Face folder.

        `tokenizer.json` is read as it is; a folder without one is converted by `transformers`, which takes
        seconds to import.

        Raises:
          CheckpointError: if the folder holds no tokenizer that can be read.
        """
        folder = Path(path)
        backend = _read_backend(folder)
        settings = _read_json(folder / "special_tokens_map.json") | _read_json(folder / "tokenizer_config.json")
        tokens = backend.get_vocab(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        vocab_size = max(tokens.values(), default=-1) + 1
        if vocab_size > 2 * len(tokens) + _MAX_UNUSED_IDS:  # a table of that size is made
            raise CheckpointError(f"{folder} has a tokenizer of {len(tokens)} tokens with ids up to {vocab_size - 1}")

        roles = {role: settings.get(role) for role in _ROLES}
        roles = {role: value.get("content") if isinstance(value, dict) else value for role, value in roles.items()}
        special_tokens = {role: text for role, text in roles.items() if isinstance(text, str)}
        bos, eos = (tokens.get(special_tokens.get(role, "")) for role in ("bos_token", "eos_token"))
        ends = _read_json(folder / "generation_config.json").get("eos_token_id")
        if ends is None:
            ends = _read_json(folder / "config.json").get("eos_token_id")
        ends = [eos, *(ends if isinstance(ends, list) else [ends])]

        prefix, suffix = _translated(folder, lambda: _added_around(backend))
        if (add := settings.get("add_bos_token")) is not None and bos is not None:
            prefix = [bos] * bool(add) + [i for i in prefix if i != bos]
        if (add := settings.get("add_eos_token")) is not None and eos is not None:
            suffix = [i for i in suffix if i != eos] + [eos] * bool(add)

        decoding = _byte_decoding(backend, tokens, added, vocab_size)
        backend.encode_special_tokens = True
        # After a control token the library may encode a text's beginning otherwise than at the very start, so
        # such a fragment follows a token of its own. Nobody can guess its string.
        anchor = tokenizers.AddedToken(f"\ufdd0{secrets.token_hex(16)}\ufdd1", normalized=False, special=False)
        backend.add_tokens([anchor])

        return cls(
            vocab_size=vocab_size,
            backend=Backend(backend, lambda text, first: text if first else anchor.content + text, skipped=1),
            control={t.content: TextToken(i, t.lstrip, t.rstrip) for i, t in added.items() if t.special},
            user_defined={},
            special_ids=frozenset(i for i, token in added.items() if token.special),
            special_tokens=special_tokens,
            bos_token_id=bos,
            eos_token_ids=tuple(dict.fromkeys(i for i in ends if type(i) is int and i >= 0)),
            prefix_ids=prefix,
            suffix_ids=suffix,
            chat_template=_read_chat_template(folder, settings),
            token_bytes=decoding and decoding[0],
            decode_ids=lambda ids, skip: backend.decode_batch([ids], skip_special_tokens=skip)[0],
            strip_space=bool(decoding and decoding[1]),
        )

    @property
    def control_strings(self) -> Iterable[str]:
        """The strings that stand for control tokens where control tokens count."""
        return self._control.tokens

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a text. Other Python threads go on meanwhile, however long it is.

        Args:
          parse_special: whether the strings of control tokens in the text become those tokens.
          add_bos: whether to add what the model's prompts begin with (and end with, where the checkpoint says so).
          max_tokens: refuse a text of more tokens; one that is too large for that is not encoded at all.

        Raises:
          InvalidArgumentError: if the text is no string, holds half of a surrogate pair, or is too long.
        """
        if not isinstance(text, str):
            raise InvalidArgumentError("text", text, "a string")
        self.check_size("text", text, max_tokens)
        ids = self.encode_segments(self.split_control(text) if parse_special else [text], max_tokens=max_tokens)
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_bos else ids

    def check_size(self, field: str, text: str, max_tokens: int | None) -> None:
        """Refuses a text that is more tokens than `max_tokens` however it is encoded.

        Raises:
          InvalidArgumentError: if so; it names the size, and the limit in tokens and in bytes.
        """
        bound = self.token_bound
        if max_tokens is not None and bound is not None and bound.exceeded(text, max_tokens):
            raise too_large(field, f"{len(text)} characters", max_tokens, bound)

    @functools.cached_property
    def token_bound(self) -> TokenBound | None:
        """How much of a text one token can stand for, if there is a limit to it."""
        apart = {**self._control.tokens, **self._user_defined.tokens}
        strips = any(token.lstrip or token.rstrip for token in apart.values())
        return token_bound(self._backend.library, apart, loses_spaces=strips)

    def split_control(self, text: str) -> Iterator[str | int]:
        """Cuts a text at the strings of control tokens, giving those as ids."""
        return self._control.split(text)

    def break_control(self, text: str, mark: str) -> str:
        """Puts a mark, which is in no control string, into each control string of a text, so that none is left."""
        return self._control.break_up(text, mark)

    def encode_segments(self, segments: Iterable[str | int], *, max_tokens: int | None = None) -> list[int]:
        """Token ids of one text given in pieces; strings are plain text, ids stay as they are.

        Raises:
          InvalidArgumentError: if a string holds half of a surrogate pair, or there are more than `max_tokens`.
        """
        ids: list[int] = []
        parts = enumerate(self._parts(segments))
        while batch := list(islice(parts, _BATCH)):
            texts = [self._backend.prepare(part, at == 0) for at, part in batch if isinstance(part, str)]
            # Of a batch, even of one text, the library lets go of the interpreter's lock while it encodes.
            encoded = iter(self._backend.library.encode_batch_fast(texts, add_special_tokens=False))
            for at, part in batch:
                if isinstance(part, int):
                    ids.append(part)
                    continue
                encoding, skipped = next(encoded), self._backend.skipped if at else 0
                count = len(ids) + len(encoding) - skipped  # known before any id is made a Python object
                if max_tokens is not None and count > max_tokens:
                    raise InvalidArgumentError("prompt", f"at least {count} tokens", f"at most {max_tokens} tokens")
                ids += encoding.ids[skipped:]
        return ids

    def _parts(self, segments: Iterable[str | int]) -> Iterator[str | int]:
        for segment in segments:
            for part in self._user_defined.split(segment) if isinstance(segment, str) else (segment,):
                if isinstance(part, str):
                    _check_text(part)
                yield part

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; bytes that are not UTF-8 become U+FFFD.

        Raises:
          InvalidArgumentError: if an id is not in the vocabulary; the message names both.
        """
        self.check_ids("token_ids", ids)
        table = self.token_bytes(skip_special_tokens)
        if table is None:
            assert self._decode_ids is not None
            return self._decode_ids(list(ids), skip_special_tokens)
        text = b"".join([table[i] for i in ids]).decode("utf-8", errors="replace")
        return text.removeprefix(" ") if self.strip_space else text

    def token_bytes(self, skip_special_tokens: bool) -> Sequence[bytes] | None:
        """Of each id, its bytes, such that a text is their join; None if the decoder cannot be put so."""
        return self._shown_bytes if skip_special_tokens else self._token_bytes

    @functools.cached_property
    def _shown_bytes(self) -> Sequence[bytes] | None:
        if self._token_bytes is None:
            return None
        return [b"" if i in self.special_ids else token for i, token in enumerate(self._token_bytes)]

    def check_ids(self, field: str, ids: Sequence[int]) -> None:
        """Raises InvalidArgumentError, naming the id and the vocabulary's size, if an id is not in the vocabulary."""
        if not ids or (min(ids) >= 0 and max(ids) < self.vocab_size):
            return
        wrong = next(i for i in ids if not 0 <= i < self.vocab_size)
        raise InvalidArgumentError(
            field, wrong, f"ids are 0 to {self.vocab_size - 1}, a vocabulary of {self.vocab_size}"
        )


class _Splitter:
    """Cuts texts at the strings of some tokens: leftmost first, the longest among those that begin together."""

    def __init__(self, tokens: Mapping[str, TextToken]):
        self.tokens = dict(tokens)
        texts = sorted(tokens, key=len, reverse=True)
        self._longest = len(texts[0]) if texts else 0
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        # A string's first character with the rest ahead: so strings that overlap are all found.
        firsts = [f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in tokens]
        self._first = re.compile("|".join(firsts)) if firsts else None

    def break_up(self, text: str, mark: str) -> str:
        broken: list[str] = []
        end = 0
        for match in self._matches(self._first, text):
            broken += text[end : match.end()], mark
            end = match.end()
        return "".join([*broken, text[end:]])

    def split(self, text: str) -> Iterator[str | int]:
        end = 0
        for match in self._matches(self._pattern, text):
            token = self.tokens[match[0]]
            before = text[end : match.start()]
            if token.lstrip:
                before = before.rstrip(SPACES)
            if before:
                yield before
            yield token.id
            end = match.end()
            while token.rstrip and end < len(text) and text[end] in SPACES:
                end += 1
        if end < len(text):
            yield text[end:]

    def _matches(self, pattern: re.Pattern[str] | None, text: str) -> Iterator[re.Match[str]]:
        """All matches, found piece by piece: no other Python thread runs while `re` searches."""
        at = 0
        while pattern is not None and at < len(text):
            # A match that begins in the piece may end after it.
            match = pattern.search(text, at, at + _SCANNED + self._longest)
            if match is not None and match.start() < at + _SCANNED:
                yield match
                at = match.end()
            else:
                at += _SCANNED


def too_large(field: str, size: str, max_tokens: int, bound: TokenBound) -> InvalidArgumentError:
    """What says that a text has more tokens than it may have, though nobody has counted them."""
    most = max_tokens * bound.max_bytes
    allowed = f"at most {max_tokens} tokens, which are at most {most} bytes ({bound.max_bytes} bytes a token)"
    return InvalidArgumentError(field, f"a text of {size}", allowed)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError("text", text[error.start], "half of a surrogate pair is no character") from None


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON file's object, or an empty one if there is no such file."""
    try:
        value = json.loads(_read_text(path))
    except FileNotFoundError:
        return {}
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def _read_text(path: Path) -> str:
    if path.exists() and not path.is_file():  # a pipe would be waited for without end
        raise OSError("not a regular file")
    return path.read_text(encoding="utf-8")


def _translated[T](what: Path | str, read: Callable[[], T]) -> T:
    """What `read` returns; whatever the libraries raise, panics of their Rust included, says what cannot be read."""
    try:
        return read()
    except BaseException as error:  # such a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{what} cannot be read: {error!s:.1000}") from None


def _read_backend(folder: Path) -> tokenizers.Tokenizer:
    file = folder / "tokenizer.json"
    if file.exists():
        backend = _translated(file, lambda: tokenizers.Tokenizer.from_str(_read_text(file)))
    else:
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder")
        backend = _translated(f"{folder} has no tokenizer.json, and for transformers", lambda: _convert(folder))
    backend.no_padding()
    backend.no_truncation()
    return backend


def _convert(folder: Path) -> tokenizers.Tokenizer:
    from transformers import AutoTokenizer

    # Refused rather than asked about at the terminal: code that comes with a model is not run.
    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False).backend_tokenizer


def _added_around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What the tokenizer's post-processor puts before and after a text."""
    encoding = backend.encode("a")
    added = encoding.special_tokens_mask
    count = added.index(0) if 0 in added else len(added)
    rest = added[::-1].index(0) if 0 in added else 0
    return encoding.ids[:count], encoding.ids[len(added) - rest :]


def _read_chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return _translated(file, lambda: _read_text(file))
    template = _read_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        entries = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = entries[0].get("template") if entries else None
    if not isinstance(template, str | None):
        raise CheckpointError(f"{folder} has a chat_template that is not a string")
    return template


def _byte_decoding(
    backend: tokenizers.Tokenizer,
    tokens: Mapping[str, int],
    added: Mapping[int, tokenizers.AddedToken],
    vocab_size: int,
) -> tuple[list[bytes], bool] | None:
    """Of each id its bytes, and whether a first space is dropped; None if the decoder cannot be put so."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else None
    steps = [] if decoder is None else decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    strip = False
    if kinds == ["ByteLevel"]:
        to_bytes = gguf_vocab.byte_level_bytes
    elif kinds in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
        replace = steps[0]
        if replace["pattern"] != {"String": "▁"} or replace["content"] != " ":
            return None
        if len(steps) == 4:
            if (steps[3]["content"], steps[3]["start"], steps[3]["stop"]) != (" ", 1, 0):
                return None
            strip = True

        def to_bytes(token: str) -> bytes:
            if re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
                return bytes([int(token[3:5], 16)])
            return token.replace("▁", " ").encode()

    else:
        return None
    table = [b""] * vocab_size
    for token, i in tokens.items():
        # An added token's own string is plain, whatever the model's tokens are written in.
        table[i] = token.encode() if i in added and kinds == ["ByteLevel"] else to_bytes(token)
    return table, strip
