"""What scripts/compile_matrix.py would compile; the compiling is its own."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import compile_matrix
from compile_matrix import KERNELS, combinations, pairs_of

VERSIONS = 2


def possible_pairs(kernel: compile_matrix.Kernel) -> set[frozenset]:
    factors = {"jax": range(VERSIONS), **kernel.factors}
    every = (dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values()))
    return set().union(*(pairs_of(each) for each in every if compile_matrix._possible(each)))


@pytest.mark.parametrize("sample", [True, False])
@pytest.mark.parametrize("name", KERNELS)
def test_every_two_values_that_can_go_together_do(name, sample):
    found = combinations(KERNELS[name], VERSIONS, sample)
    assert set().union(*map(pairs_of, found)) == possible_pairs(KERNELS[name])
    assert len({tuple(each.items()) for each in found}) == len(found)
    assert not sample or len(found) <= 40


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if not kernel.pairs])
def test_the_whole_has_all_that_is_not_taken_in_turn(name):
    kernel = KERNELS[name]
    of_code = lambda each: tuple((factor, value) for factor, value in each.items() if factor not in kernel.in_turn)
    fixed = {"jax": (0,), **dict(of_code(kernel.factors))}
    every = [dict(zip(fixed, values, strict=True)) for values in itertools.product(*fixed.values())]
    found = [of_code(each) for each in combinations(kernel, 1, False)]
    assert len(found) == len(set(found))
    assert set(found) == {tuple(each.items()) for each in every if compile_matrix._possible(each)}


def test_programs_are_equal_where_nothing_in_them_differs():
    each = combinations(KERNELS["quantized_matmul.mosaic_gpu"], 1, False)[0]
    key = lambda **change: compile_matrix.program_of("quantized_matmul.mosaic_gpu", each | change).key("h200")
    assert each["model"] == "llama-3-8b"
    assert key() == key(model="mistral-7b")
    others = [{"model": "llama-3-70b"}, {"tensor": 2}, {"rows": 3}, {"weight": "int4 zeros"}, {"group": 16}]
    assert len({key(), *(key(**change) for change in others)}) == 6
