"""One tiny model, compiled once for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import jax.numpy as jnp
import pytest
import tiny_checkpoints
from engine_harness import House, Reference

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.models.decoder import decoder_structure


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


@pytest.fixture(scope="session")
def reference(base: Engine) -> Reference:
    return Reference(
        decoder_structure(base.model_config, jnp.float32, scan=True), base.runner.leaves, base.model_config
    )


@pytest.fixture
def open_house(base: Engine) -> Iterator[Callable[..., House]]:
    """Makes engines with other limits, one at a time; at the end, each must be idle and its books in order."""
    houses: list[House] = []

    def make(**changes: object) -> House:
        houses.append(House(base, **changes))
        return houses[-1]

    yield make
    try:
        for house in houses:
            house.check_idle()
    finally:
        for house in houses:
            house.engine.close()


@pytest.fixture
def house(open_house: Callable[..., House]) -> House:
    return open_house()
