"""Engines with other limits over the tiny model, and the truth about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import jax.numpy as jnp
import pytest
from engine_harness import House, Reference

from jaxinfer.engine.engine import Engine
from jaxinfer.models.decoder import decoder_structure


@pytest.fixture(scope="session")
def reference(base: Engine) -> Reference:
    return Reference(
        decoder_structure(base.model_config, jnp.float32, scan=True), base.runners[0].leaves[0], base.model_config
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
