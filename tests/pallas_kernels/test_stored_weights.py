"""`stores_floats` against what the chips' own compilers do."""

from __future__ import annotations

from pathlib import Path

import compilers

PRODUCTS = Path(__file__).with_name("stored_weights.py")
AMPERE, LATER = ("a100-80g",), ("h200", "b200")


def check(environment: Path | None, chips: tuple[str, ...]) -> list[tuple]:
    """What is stored, after all is found to be as said."""
    found = compilers.run(environment, PRODUCTS, *chips)
    assert not [product for product in found if bool(product[4]) != (product[5] is not None)]
    return [tuple(product[:4]) for product in found if product[4]]


@compilers.each_environment
def test_ampere(environment):
    stored = check(environment, AMPERE)
    assert ("a100-80g", "float8_e4m3fn", 128, 256) in stored
    oldest = environment.name.endswith("0.11.2")
    assert (("a100-80g", "float8_e4m3fn", None, 64) in stored) == oldest


@compilers.newest_environment
def test_later_gpus(environment):
    stored = check(environment, LATER)
    assert ("b200", "int4", 128, 256) in stored
    assert ("h200", "int4", 128, 256) not in stored
