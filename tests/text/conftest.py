from __future__ import annotations

import pytest
from tiny_tokenizers import byte_level_metadata, spm_metadata

from jaxinfer.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return Tokenizer.from_gguf(byte_level_metadata())


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    return Tokenizer.from_gguf(spm_metadata())


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path) -> dict:
    """The metadata of the model file, read by the library that defines the format."""
    from gguf import GGUFReader

    return {key: field.contents() for key, field in GGUFReader(smollm2_path).fields.items()}


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata) -> Tokenizer:
    return Tokenizer.from_gguf(smollm2_metadata)
