"""Whole decode steps, compiled for chips that are not here and with no weights in memory."""

from __future__ import annotations

from pathlib import Path

import compilers
import pytest


@pytest.mark.slow
@compilers.each_environment
@pytest.mark.parametrize(("chips", "attention"), [("h200:1", "mosaic_gpu"), ("v6e:2", "tpu_custom_call")])
def test_llama_3_8b_with_64_sequences_of_4096_tokens(environment, chips, attention):
    step = compilers.run(environment, Path(__file__).with_name("decode_steps.py"), chips)
    layers = 32
    assert step["alias_bytes"] == step["pool_bytes"]
    assert step["temp_bytes"] < 0.5e9
    # Nothing as large as a layer's smallest matrix is written to main memory, let alone the live KV.
    assert step["smallest_matrix_bytes"] > 12 << 20
    assert step["large_results"] == []
    assert any(target.startswith(attention) for target in step["custom_calls"])
    assert step["num_custom_calls"] >= layers
    assert step["live_kv_bytes"] <= step["transferred_bytes"] <= 1.05 * step["live_kv_bytes"]
