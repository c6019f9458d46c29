"""A GGUF file's tokenizer, rebuilt from its metadata: byte-level BPE (`gpt2`) and SentencePiece BPE (`llama`).

The keys are those of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md; how each kind encodes is what
llama.cpp does with the same file. Where its word patterns are known to differ from the ones the model was made
with, the model's own stand here: `tekken` and `gpt-4o` take combining marks for letters, and the DeepSeek ones
take the spaces from U+2000 on for part of their ideograph range.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from jaxinfer.errors import CheckpointError, UnsupportedError


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How byte-level BPE cuts a text into words: patterns, each applied to what the one before left.

    Attributes:
      ignore_merges: whether a word that is itself a token is taken whole, whatever the merges say.
      add_bos: whether a prompt begins with BOS where the file does not say.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# The contractions are spelled out: under (?i:) the long s, U+017F, would match an s as well.
_SUFFIX = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(number: str, mark: str = "") -> str:
    """The pattern of Llama 3, Qwen and others; they differ in how they cut numbers, and in what is a letter."""
    return (
        rf"(?:{_SUFFIX})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{mark}]+|{number}"
        rf"| ?[^\s\p{{L}}{mark}\p{{N}}]+[\r\n]*|{_SPACES}"
    )


def _cased(suffix: str, number: str) -> str:
    """The pattern of GPT-4o and Tekken, which cuts words where lower case turns to upper."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    lead = r"[^\r\n\p{L}\p{N}]?"
    words = f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
    return rf"{words}|{number}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_DEEPSEEK_HAN = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_LETTERS = (  # cased letters, as far as the model's makers listed them
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)

_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_KINDS: dict[PreTokenizer, tuple[str, ...]] = {
    PreTokenizer((_GPT2,)): ("gpt-2", "phi-2", "mpt", "olmo", "jais", "exaone4", "trillion", "granite-docling"),
    PreTokenizer((r"\p{N}", _GPT2)): (
        *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")): ("default",),
    PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")): ("falcon",),
    _LLAMA3: ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2"),
    PreTokenizer(_LLAMA3.patterns): ("dbrx", "smaug-bpe", "chatglm-bpe"),
    PreTokenizer(_LLAMA3.patterns, ignore_merges=True): ("glm4",),
    PreTokenizer((_words(r"\p{N}"),)): ("qwen2", "stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"),
    PreTokenizer((_words(r"\p{N}", mark=r"\p{M}"),)): ("qwen35",),
    PreTokenizer((_cased("", r"\p{N}"),), ignore_merges=True, add_bos=True): ("tekken",),
    PreTokenizer((_cased(f"(?:{_SUFFIX})?", r"\p{N}{1,3}"),)): ("gpt-4o", "llama4"),
    PreTokenizer(
        (r"[\r\n]", rf"\s?[{_DEEPSEEK_LETTERS}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _DEEPSEEK_HAN, r"\p{N}+")
    ): ("deepseek-llm",),
    PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_HAN, r"\p{N}")): ("deepseek-coder",),
    PreTokenizer((r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK_WORDS)): ("deepseek-v3", "hunyuan-dense"),
}
PRE_TOKENIZERS = {name: kind for kind, names in _KINDS.items() for name in names}


# Control tokens that end a turn by the convention of their name: many files give only one of theirs.
_TURN_ENDS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>"),
        *("<end_of_turn>", "<EOT>", "<｜end▁of▁sentence｜>"),
    )
)
# Template variable -> the key's middle part ("seperator" is the format's own spelling).
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_ROLES |= {"sep_token": "seperator", "cls_token": "cls", "mask_token": "mask"}


@dataclass(frozen=True)
class GgufVocab:
    """What a file's metadata says of its tokenizer, checked.

    Attributes:
      types: of each id, its `TokenType`.
      backend: encodes text that holds no control or user-defined token, once it went through `prepare`.
      prepare: leaves a text as it is (`is_byte_level`), or writes `▁` for its spaces.
      token_bytes: of each id, the bytes it stands for.
      role_ids: `bos_token` and the like -> id.
      eos_ids: every token that ends the model's output.
      strip_space: whether a text's very first space is the one that encoding put there.
    """

    tokens: Sequence[str]
    types: Sequence[int]
    backend: tokenizers.Tokenizer
    prepare: Callable[[str], str]
    is_byte_level: bool
    token_bytes: list[bytes]
    role_ids: Mapping[str, int]
    eos_ids: tuple[int, ...]
    add_bos: bool
    add_eos: bool
    strip_space: bool


def read(metadata: Mapping[str, Any]) -> GgufVocab:
    """Builds the tokenizer that `tokenizer.ggml.*` describes.

    Raises:
      CheckpointError: if a key is missing or does not fit the others.
      UnsupportedError: if the kind of tokenizer or of pre-tokenizer is not known here.
    """
    kind = _need(metadata, "model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedError(f"tokenizer.ggml.model = {kind!r:.100} is not supported: only 'gpt2' and 'llama' are")
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, [TokenType.NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    turn_ends = {i: token for i, token in enumerate(tokens) if token in _TURN_ENDS}
    for i in turn_ends:
        types[i] = TokenType.CONTROL
    build = _byte_level if kind == "gpt2" else _sentencepiece
    backend, prepare, token_bytes, defaults = build(metadata, tokens, types)

    def token_id(name: str, default: int | None = None) -> int | None:
        i = _get(metadata, f"{name}_token_id", default)
        if i is not None and type(i) is not int:
            raise CheckpointError(f"tokenizer.ggml.{name}_token_id = {i!r:.100}, expected an integer")
        # Some converters write ids beyond the vocabulary for roles that the model does not have.
        return i if i is not None and 0 <= i < len(tokens) else None

    ids = {role: token_id(name, defaults.get(role)) for role, name in _ROLES.items()}
    role_ids = {role: i for role, i in ids.items() if i is not None}
    ends: list[Any] = [role_ids.get("eos_token"), token_id("eot"), token_id("eom"), *turn_ends]
    if {"<|return|>", "<|call|>"} <= set(tokens):  # the Harmony format, where <|end|> ends a message, not a turn
        ends = [i for i in ends if turn_ends.get(i) != "<|end|>"]
    eos_ids = tuple(dict.fromkeys(i for i in ends if i is not None))
    add_bos = bool(_get(metadata, "add_bos_token", defaults["add_bos"]))
    add_eos = bool(_get(metadata, "add_eos_token", False))
    for add, role in ((add_bos, "bos_token"), (add_eos, "eos_token")):
        if add and role not in role_ids:
            raise CheckpointError(f"tokenizer.ggml.add_{role} is set, but there is no such token")
    strip_space = kind == "llama" and bool(_get(metadata, "add_space_prefix", True))
    return GgufVocab(
        *(tokens, types, backend, prepare, kind == "gpt2", token_bytes, role_ids, eos_ids),
        *(add_bos, add_eos, strip_space),
    )


def _get(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    return metadata.get(f"tokenizer.ggml.{key}", default)


def _need(metadata: Mapping[str, Any], key: str, default: Any = None) -> Any:
    value = _get(metadata, key, default)
    if value is None:
        raise CheckpointError(f"the GGUF file has no tokenizer.ggml.{key}")
    return value


def _list(metadata: Mapping[str, Any], key: str, kind: type, default: Any = None) -> list[Any]:
    values = _need(metadata, key, default)
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise CheckpointError(f"tokenizer.ggml.{key} is not an array of {kind.__name__}")
    return list(values)


# Byte-level BPE writes every byte as a printable character: itself, or, where it has no printable one, the next
# from U+0100 on (GPT-2, https://github.com/openai/gpt-2/blob/master/src/encoder.py).
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTE_OF_CHAR = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}


BYTE_CHARACTERS = [char for _, char in sorted((byte, char) for char, byte in _BYTE_OF_CHAR.items())]


def byte_level_bytes(token: str) -> bytes:
    """The bytes a byte-level token stands for; one written with other characters stands for its own UTF-8."""
    try:
        return bytes([_BYTE_OF_CHAR[char] for char in token])
    except KeyError:
        return token.encode()


# Characters of a SentencePiece piece, several times what any model has: all ways to cut one in two are tried.
_MAX_PIECE = 512

type _Built = tuple[tokenizers.Tokenizer, Callable[[str], str], list[bytes], dict[str, Any]]


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> _Built:
    name = _get(metadata, "pre", "default")
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise UnsupportedError(f"tokenizer.ggml.pre = {name!r:.100} is not supported; these are: {known}")
    # Tokens that only their own string may yield are no part of the model, so no merge can lead to them.
    literal = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    apart = {token for token, kind in zip(tokens, types, strict=True) if kind in literal}
    vocab = {token: i for i, token in enumerate(tokens) if token not in apart}
    merges = []
    for merge in _list(metadata, "merges", str):
        left, _, right = merge.partition(" ")
        if left + right not in apart:
            merges.append((left, right))
    backend = tokenizers.Tokenizer(_bpe(vocab, merges, ignore_merges=pre.ignore_merges))
    cuts = [pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, byte_level])
    token_bytes = [
        token.encode() if kind in literal else byte_level_bytes(token)
        for token, kind in zip(tokens, types, strict=True)
    ]
    return backend, lambda text: text, token_bytes, {"add_bos": pre.add_bos}


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> _Built:
    scores = _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise CheckpointError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    if any(map(math.isnan, scores)):
        raise CheckpointError("tokenizer.ggml.scores has one that is not a number")  # and has no rank among the others
    normal = {token: i for i, token in enumerate(tokens) if types[i] == TokenType.NORMAL}
    if (longest := max(map(len, normal), default=0)) > _MAX_PIECE:
        raise CheckpointError(f"tokenizer.ggml.tokens has one of {longest} characters, the most is {_MAX_PIECE}")
    for token, kind in zip(tokens, types, strict=True):
        if kind == TokenType.BYTE and not re.fullmatch("<0x[0-9A-Fa-f]{2}>", token):
            raise CheckpointError(f"tokenizer.ggml.tokens has {token!r:.100} for a byte, expected <0x00> to <0xFF>")
    vocab = normal | {token: i for i, token in enumerate(tokens) if types[i] == TokenType.BYTE}
    # SentencePiece joins any two neighbours whose join is a piece, best score first, leftmost first among equals.
    # As merges: every way to cut a piece in two pieces, ranked by score. Equals can only be cuts of one piece.
    merges = []
    for token, i in normal.items():
        cuts = ((token[:at], token[at:]) for at in range(len(token) - 1, 0, -1))
        merges += [(-scores[i], cut) for cut in cuts if cut[0] in normal and cut[1] in normal]
    merges.sort(key=lambda merge: merge[0])
    backend = tokenizers.Tokenizer(_bpe(vocab, [cut for _, cut in merges], byte_fallback=True))
    prefix = "▁" if _get(metadata, "add_space_prefix", True) else ""

    def to_bytes(token: str, kind: int) -> bytes:
        if kind == TokenType.BYTE:
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode() if kind == TokenType.NORMAL else token.encode()

    token_bytes = [to_bytes(token, kind) for token, kind in zip(tokens, types, strict=True)]
    defaults = {"unk_token": 0, "bos_token": 1, "eos_token": 2, "add_bos": True}
    return backend, lambda text: prefix + text.replace(" ", "▁"), token_bytes, defaults


def _bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: bool) -> models.BPE:
    try:
        return models.BPE(vocab=vocab, merges=merges, **options)
    except Exception as error:  # the library raises no narrower one
        raise CheckpointError(f"tokenizer.ggml.merges do not fit tokenizer.ggml.tokens: {error}") from None
