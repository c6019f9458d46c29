"""Whole decode steps, compiled for chips that are not here and with no weights in memory."""

from __future__ import annotations

import re
from pathlib import Path

import compilers
import pytest

STEPS = Path(__file__).with_name("decode_steps.py")
CANDIDATES_BYTES = 64 * 64 * 8 + 512  # 64 of 64 rows, with their ids; a gathered vocabulary has 33 MB


@pytest.mark.slow
@compilers.newest_environment
@pytest.mark.parametrize(("chips", "attention"), [("h200:1", "mosaic_gpu"), ("v6e:2", "tpu_custom_call")])
def test_llama_3_8b_with_64_sequences_of_4096_tokens(environment, chips, attention):
    step = compilers.run(environment, STEPS, "forward", "llama-3-8b", chips)
    check(step, attention, layers=32)
    # Nothing as large as a layer's smallest matrix is written to main memory, let alone the live KV.
    assert step["smallest_matrix_bytes"] > 12 << 20


@pytest.mark.slow
@compilers.newest_environment
@pytest.mark.parametrize(("chips", "attention"), [("h200:1", "mosaic_gpu"), ("v6e:2", "tpu_custom_call")])
def test_llama_3_8b_with_weights_of_4_bits(environment, chips, attention):
    """No weight is dequantized in memory: all that is large are parts of the kernel's sums, on the GPU."""
    step = compilers.run(environment, STEPS, "forward", "llama-3-8b", chips, "int4")
    assert all(re.fullmatch(r".* f32\[\d+,64,\d+\] \d+", result) for result in step["large_results"])
    check(step | {"large_results": []}, attention, layers=32)
    # Of 32 layers' 6.98e9 weights 4 bits each, with 3 bytes for each 128; embedding and head are in 16 bits.
    packed = 32 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) * (0.5 + 3 / 128)
    wide = 2 * 128256 * 4096 * 2
    assert step["weight_bytes"] == pytest.approx((packed + wide) / step["num_chips"], rel=1e-3)


@pytest.mark.slow
@compilers.newest_environment
@pytest.mark.parametrize(("chips", "attention"), [("h200:1", "mosaic_gpu"), ("v6e:2", "tpu_custom_call")])
def test_llama_3_8b_with_pages_of_int8(environment, chips, attention):
    """Values and scales are aliased, and neither is copied: scales alone are 0.13 GB of 8 layers."""
    step = compilers.run(environment, STEPS, "forward", "llama-3-8b", chips, "float", "int8", "8")
    # A TPU has rows of 128 scales, for pages of 64 tokens.
    check(step, attention, layers=8, overhead=1.07)
    assert step["temp_bytes"] < 40e6
    assert step["pool_bytes"] < 0.54 * (4097 * 64 * 8 * 2 * 8 * 128 * 2) / step["num_chips"]


@pytest.mark.slow
@compilers.newest_environment
@pytest.mark.parametrize(("chips", "attention"), [("h200:8", "mosaic_gpu"), ("v6e:8", "tpu_custom_call")])
def test_llama_3_70b_on_eight_chips(environment, chips, attention):
    check(compilers.run(environment, STEPS, "forward", "llama-3-70b", chips), attention, layers=80)


@pytest.mark.slow
@compilers.newest_environment
@pytest.mark.parametrize(
    ("model", "chips"),
    [("llama-3-8b", "h200:1"), ("llama-3-8b", "v6e:2"), ("llama-3-70b", "h200:8"), ("llama-3-70b", "v6e:8")],
)
def test_sampling_exchanges_candidates(environment, model, chips):
    """But for the exact fallback, which few rows ever need."""
    step = compilers.run(environment, STEPS, "sample", model, chips)
    several = step["num_chips"] > 1
    assert bool(step["collectives"]) == several
    large = [each for each in step["collectives"] if each["bytes"] > CANDIDATES_BYTES * step["num_chips"]]
    assert [(each["kind"], each["in_branch"]) for each in large] == ([("all-gather", True)] if several else [])


def check(step: dict, attention: str, layers: int, overhead: float = 1.05) -> None:
    assert step["alias_bytes"] == step["pool_bytes"]
    assert step["temp_bytes"] < 0.5e9
    assert step["large_results"] == []
    assert any(target.startswith(attention) for target in step["custom_calls"])
    assert step["num_custom_calls"] >= layers
    assert step["live_kv_bytes"] <= step["transferred_bytes"] <= overhead * step["live_kv_bytes"]
    counts = {(each["kind"], each["in_branch"]): each["count"] for each in step["collectives"]}
    assert counts == ({("all-reduce", False): 2 * layers + 1} if step["num_chips"] > 1 else {})
