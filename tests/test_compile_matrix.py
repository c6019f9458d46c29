"""What scripts/compile_matrix.py would compile; the compiling is its own."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import compile_matrix
from compile_matrix import KERNELS, combinations, pairs_of

from pallas_kernels.quantized_matmul import GROUP_SIZES
from sharding.hardware import CHIPS

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
    assert not sample or len(found) <= 45


@pytest.mark.parametrize("name", [name for name, kernel in KERNELS.items() if not kernel.pairs])
def test_the_whole_has_all_that_is_not_taken_in_turn(name):
    kernel = KERNELS[name]
    of_code = lambda each: tuple((factor, value) for factor, value in each.items() if factor not in kernel.in_turn)
    fixed = {"jax": (0,), **dict(of_code(kernel.factors))}
    every = [dict(zip(fixed, values, strict=True)) for values in itertools.product(*fixed.values())]
    found = [of_code(each) for each in combinations(kernel, 1, False)]
    assert len(found) == len(set(found))
    assert set(found) == {tuple(each.items()) for each in every if compile_matrix._possible(each)}


def test_all_chips_and_weights_are_compiled_for():
    of = lambda name, factor: set(KERNELS[name].factors[factor])
    assert set().union(*(of(name, "chip") for name in KERNELS)) == set(CHIPS)
    by_xla = of("quantized_matmul.xla.gpu", "chip") | of("quantized_matmul.xla.tpu", "chip")
    assert by_xla == set(CHIPS) - {"h100"}  # to XLA an h200
    assert of("quantized_matmul.mosaic_gpu", "group") == set(GROUP_SIZES)
    assert {"fp8", "fp8 groups"} < of("quantized_matmul.xla.gpu", "weight") == of("quantized_matmul.xla.tpu", "weight")


def test_programs_are_equal_where_nothing_in_them_differs():
    each = combinations(KERNELS["quantized_matmul.mosaic_gpu"], 1, False)[0]
    key = lambda **change: compile_matrix.program_of("quantized_matmul.mosaic_gpu", each | change).key("h200")
    assert each["model"] == "llama-3-8b"
    assert key() == key(model="mistral-7b")
    others = [{"model": "llama-3-70b"}, {"tensor": 2}, {"rows": 3}, {"weight": "int4 zeros"}, {"group": 32}]
    assert len({key(), *(key(**change) for change in others)}) == 6


def test_rows_of_json_are_printed_as_they_come(monkeypatch, capsys):
    printed = []

    def rows_of(environment, share, kernels, sample):
        for part in (1, 2):
            yield {"kernel": kernels[0], "chip": share.platform, "jax": environment.name, "shape": {"part": part},
                   "ok": part == 1, "refused": False, "reason": None, "seconds": 0, "same_as": None}  # fmt: skip
            printed.append(capsys.readouterr().out)

    monkeypatch.setattr(compile_matrix, "rows_of", rows_of)
    monkeypatch.setenv("JAXINFER_COMPILERS", "new:old")
    monkeypatch.setattr(sys, "argv", ["compile_matrix.py", "--json", "--kernel", "paged_attention.tpu"])
    monkeypatch.setattr(compile_matrix.os, "cpu_count", lambda: 1)  # one worker after the other
    with pytest.raises(SystemExit) as exited:
        compile_matrix.main()
    assert exited.value.code == 1
    rows = json.loads("".join(printed) + capsys.readouterr().out)["rows"]
    assert [(row["jax"], row["shape"]["part"]) for row in rows] == [("new", 1), ("new", 2), ("old", 1), ("old", 2)]
    for end in range(1, 5):
        assert json.loads("".join(printed[:end]) + "]}")["rows"] == rows[:end]
