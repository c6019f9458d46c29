"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxinfer.checkpoints.source import default_cache_dir, resolve


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Downloads and compiled programs of the tests: the user's own cache, so that a second run is quick."""
    return default_cache_dir(os.environ)


@pytest.fixture(scope="session")
def smollm2_path(cache_dir: Path) -> Path:
    """The default model's GGUF file, fetched if need be."""
    return resolve("smollm2-135m-instruct", cache_dir=cache_dir).path
