"""Fixtures that several folders of tests share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_checkpoints

from jaxinfer.checkpoints.source import default_cache_dir, resolve
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine


@pytest.fixture(scope="session")
def cache_dir() -> Path:
    """Downloads and compiled programs of the tests: the user's own cache, so that a second run is quick."""
    return default_cache_dir(os.environ)


@pytest.fixture(scope="session")
def smollm2_path(cache_dir: Path) -> Path:
    """The default model's GGUF file, fetched if need be."""
    return resolve("smollm2-135m-instruct", cache_dir=cache_dir).path


# One tiny model, compiled once for all tests of engines.


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "llama3"
    tiny_checkpoints.write_hf_folder(folder, tiny_checkpoints.VARIANTS["llama3"])
    return folder


@pytest.fixture(scope="session")
def tiny_config(tiny_folder: Path) -> EngineConfig:
    """Programs for 1, 8 and 32 tokens."""
    return EngineConfig(
        model=str(tiny_folder),
        dtype="float32",
        max_num_seqs=32,
        max_num_batched_tokens=32,
        page_size=4,
        max_model_len=128,
    )


@pytest.fixture(scope="session")
def base(tiny_config: EngineConfig, cache_dir: Path) -> Engine:
    """A closed engine, whose runner others use."""
    engine = Engine.start(tiny_config, cache_dir=cache_dir)
    engine.close()
    return engine


@pytest.fixture(autouse=True)
def no_audit_breach(request: pytest.FixtureRequest) -> Iterator[None]:
    """The page books of every engine add up whenever it idles; tests that break them on purpose say `audit_breach`."""
    breaches: list[str] = []

    class Breaches(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.msg.startswith("idle audit"):
                breaches.append(record.getMessage())

    handler, loop = Breaches(), logging.getLogger("jaxinfer.engine.loop")
    loop.addHandler(handler)
    yield
    loop.removeHandler(handler)
    assert bool(breaches) == (request.node.get_closest_marker("audit_breach") is not None), breaches
