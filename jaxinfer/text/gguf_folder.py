"""A GGUF file's tokenizer as a Hugging Face folder has it: tokenizer.json and tokenizer_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, normalizers, processors

from jaxinfer.errors import UnsupportedError
from jaxinfer.text import gguf_vocab
from jaxinfer.text.gguf_vocab import TokenType


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """
    Args:
      metadata: the file's keys and values.

    Raises:
      CheckpointError: metadata that describes no tokenizer.
      UnsupportedError: a vocabulary that tokenizer.json cannot hold.
    """
    vocab = gguf_vocab.read(metadata)
    backend = vocab.backend
    if vocab.is_byte_level:
        backend.decoder = decoders.ByteLevel()
    else:
        prefix = [normalizers.Prepend("▁")] if vocab.strip_space else []
        backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
        strip = [decoders.Strip(" ", 1, 0)] if vocab.strip_space else []
        pieces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence([*pieces, *strip])
    apart = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
    backend = _with_ids(backend, vocab, {i for i, kind in enumerate(vocab.types) if kind in apart})
    added = [
        tokenizers.AddedToken(vocab.tokens[i], special=kind != TokenType.USER_DEFINED, normalized=False)
        for i, kind in enumerate(vocab.types)
        if kind in apart
    ]
    backend.add_tokens(added)
    wrong = [token for i, token in enumerate(vocab.tokens) if backend.token_to_id(token) != i]
    if wrong:
        raise UnsupportedError(f"tokenizer.json cannot hold the file's token {wrong[0]!r:.100}, which is there twice")
    bos, eos = (vocab.role_ids.get(role) for role in ("bos_token", "eos_token"))
    before = [bos] if vocab.add_bos and bos is not None else []
    after = [eos] if vocab.add_eos and eos is not None else []
    if before or after:
        around = [vocab.tokens[i] for i in before], [vocab.tokens[i] for i in after]
        backend.post_processor = processors.TemplateProcessing(
            single=[*around[0], "$A", *around[1]],
            special_tokens=[(vocab.tokens[i], i) for i in {*before, *after}],
        )
    backend.save(str(folder / "tokenizer.json"))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= {role: vocab.tokens[i] for role, i in vocab.role_ids.items()}
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2, ensure_ascii=False), "utf-8")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(vocab.eos_ids)}, indent=2))


def _with_ids(backend: tokenizers.Tokenizer, vocab: gguf_vocab.GgufVocab, apart: set[int]) -> tokenizers.Tokenizer:
    """The same tokenizer, its vocabulary with those tokens that only their own string may yield, at their ids."""
    said = json.loads(backend.to_str())
    said["model"]["vocab"] |= {vocab.tokens[i]: i for i in apart}
    return tokenizers.Tokenizer.from_str(json.dumps(said))
