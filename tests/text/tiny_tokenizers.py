"""Tiny tokenizers, made of metadata as a GGUF file has it: no model file is needed."""

from __future__ import annotations

from typing import Any

import tokenizers

from jaxinfer.text.gguf_vocab import byte_level_bytes
from jaxinfer.text.tokenizer import Backend, Tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Byte-level BPE's character for each byte.
CHARS = {byte_level_bytes(chr(code)): chr(code) for code in range(0x144) if len(byte_level_bytes(chr(code))) == 1}


def byte_level_metadata() -> dict[str, Any]:
    """256 byte tokens, four words by merges, two control tokens, and a user-defined one."""
    words = ["he", "ll", "hell", "Ġ<"]
    merges = ["h e", "l l", "he ll", "Ġ <"]
    tokens = [CHARS[bytes([byte])] for byte in range(256)] + words + ["<|im_start|>", "<|im_end|>", "<think>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 260 + [3, 3, 4],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 260,
        "tokenizer.ggml.eos_token_id": 261,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    }


SPM_PIECES = ["▁", "a", "b", "c", "<", "s", ">", "/", "ab", "▁a", "▁ab", "abc", "▁▁", "aa", "é"]


def spm_metadata() -> dict[str, Any]:
    """<unk>, <s>, </s>, the 256 bytes, and a few pieces, the earlier the better."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_PIECES]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(SPM_PIECES))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(SPM_PIECES),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def tokenizer_of(pieces: list[bytes], *, special: tuple[int, ...] = (), strip_space: bool = False) -> Tokenizer:
    """A tokenizer that only decodes: id i stands for the i-th piece."""
    return Tokenizer(
        vocab_size=len(pieces),
        backend=Backend(tokenizers.Tokenizer(tokenizers.models.BPE()), lambda text, first: text),
        control={},
        user_defined={},
        special_ids=frozenset(special),
        special_tokens={},
        bos_token_id=None,
        eos_token_ids=(),
        prefix_ids=[],
        suffix_ids=[],
        chat_template=None,
        token_bytes=pieces,
        strip_space=strip_space,
    )
