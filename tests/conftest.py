"""Fixtures that several folders of tests share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from hypothesis import settings
from tiny_engines import closed_engine, config_of, write_tiny_model

from jaxinfer.checkpoints.source import default_cache_dir, resolve
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine

jax.config.update("jax_num_cpu_devices", 8)  # for tests of meshes; all others use the first

# The same examples in every run; scripts/fuzz.py looks for others.
settings.register_profile("same-examples", derandomize=True)
settings.load_profile("same-examples")


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
    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "llama3")


@pytest.fixture(scope="session")
def tiny_config(tiny_folder: Path) -> EngineConfig:
    return config_of(tiny_folder)


@pytest.fixture(scope="session")
def base(tiny_config: EngineConfig, cache_dir: Path) -> Engine:
    """A closed engine, whose runner others use."""
    return closed_engine(tiny_config, cache_dir)


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
