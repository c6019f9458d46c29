"""What scripts/tune_kernels.py would measure, and the way of a measured block back to its kernel. Nothing is timed."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path

import compilers
import jax.numpy as jnp
import pytest
import tiny_candidates
from pretended import described
from tiny_candidates import abstract_call

from pallas_kernels import tuning
from pallas_kernels.dispatch import Device, KernelError
from pallas_kernels.paged_attention import gpu, pool_spec, tpu
from pallas_kernels.paged_attention.layout import PageLayout
from pallas_kernels.quantized_matmul import gpu as matmul_gpu

tune_kernels = tiny_candidates.tune_kernels
V6E, H200 = Device("tpu", "TPU v6 lite"), Device("gpu", "NVIDIA H200")
OPS = [("paged_attention", V6E), ("paged_attention", H200), ("quantized_matmul", H200)]


@pytest.fixture
def tuned_folder(tmp_path, monkeypatch):
    """Files of blocks are written to and read from here."""
    monkeypatch.setattr(tuning, "_ROOT", tmp_path)
    tuning.tuned_entries.cache_clear()
    yield tmp_path
    tuning.tuned_entries.cache_clear()


@pytest.mark.parametrize(("op", "device"), OPS)
def test_candidates_trace_or_say_what_they_break(op, device):
    with described(device):
        found = tiny_candidates.tiny_candidates(op, device)
        first, *_, last = found.values()
        for group in (first, last):
            refused = 0
            for candidate in (group[0], group[len(group) // 2], group[-1]):
                program, args = abstract_call(candidate)
                try:
                    program.trace(*args)
                except KernelError:
                    refused += 1
            assert refused < 3
    for group in found.values():
        blocks = [tuple(candidate.block.values()) for candidate in group]
        assert len(set(blocks)) == len(blocks) > 1


@pytest.mark.slow
@compilers.newest_environment
@pytest.mark.parametrize(
    ("chip", "op"), [("v6e", "paged_attention"), ("h200", "paged_attention"), ("h200", "quantized_matmul")]
)
def test_candidates_compile(environment, chip, op):
    """Over 41 tokens, of which no tile or copy is a multiple."""
    compilers.run(environment, Path(tiny_candidates.__file__), chip, op)


def tune_and_write(op: str, device: Device, fastest: dict[str, int], monkeypatch) -> None:
    """With a clock that finds blocks of these sizes fast, and the first of each shape too large to compile."""
    with described(device):
        found = tiny_candidates.tiny_candidates(op, device)
        blocks = {id(candidate.case): candidate.block for group in found.values() for candidate in group}
        too_large = {id(group[0].case) for group in found.values()}

        def seconds_of(case):
            if id(case) in too_large:
                raise KernelError("does not fit")
            return 1e-6 if fastest.items() <= blocks[id(case)].items() else 1e-3

        monkeypatch.setattr(tune_kernels, "seconds_of", seconds_of)
        entries = tune_kernels.tune(itertools.chain(*found.values()), time.monotonic() + 60)
    path = tune_kernels.write(op, device, entries)
    assert [json.dumps(entry["shape"]) for entry in json.loads(path.read_text())["entries"]] == list(found)


def test_measured_blocks_reach_the_attention_of_a_tpu(tuned_folder, monkeypatch):
    best = tpu.Blocks(512, 128, 64)
    tune_and_write("paged_attention", V6E, best._asdict(), monkeypatch)
    pool = pool_spec(5, 9, 32, 2, 64, jnp.int8, V6E)
    assert tpu.blocks_for(V6E.kind, PageLayout.of(pool, 2, 64), pool, 3) == best
    assert tpu.blocks_for("TPU v5e", PageLayout.of(pool, 2, 64), pool, 3) != best


def test_measured_blocks_reach_the_attention_of_a_hopper(tuned_folder, monkeypatch):
    best = gpu.Blocks(128, 64, 1)
    tune_and_write("paged_attention", H200, best._asdict(), monkeypatch)
    pool = pool_spec(5, 9, 32, 1, 64, jnp.int8, H200)
    assert gpu.blocks_for(H200.kind, pool, 3) == best
    assert gpu.blocks_for("NVIDIA H20", pool, 3) != best


def test_measured_blocks_reach_the_matmul_of_a_hopper(tuned_folder, monkeypatch):
    tune_and_write("quantized_matmul", H200, {"warpgroups": 1, "splits": 2, "stages": 3}, monkeypatch)
    block = matmul_gpu.block_for(H200.kind, 13, 512, 256, 128, 2)
    assert block == matmul_gpu.Block(16, 1, 2, 3)


def test_bytes_on_hopper_are_those_of_the_measured_block(tuned_folder):
    """Of a page of 128 a block of 64 positions copies half where no more is in use."""
    pool = pool_spec(1, 9, 128, 2, 64, jnp.bfloat16, H200)
    move = lambda: gpu.transferred_bytes(pool, PageLayout(2, 64, False), 6, [1], [50], None)
    with described(H200):
        guessed = move()
        entry = {"shape": gpu.shape_key(pool, 3), "block": gpu.Blocks(128, 128, 1)._asdict(), "us": 1.0}
        tune_kernels.write("paged_attention", H200, [entry])
        tuning.tuned_entries.cache_clear()
        assert move() - guessed == 64 * 2 * 2 * 64 * 2
