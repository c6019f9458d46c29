"""A model's sizes on a mesh: padding, copies of KV heads, and what does not divide."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.models.cards import CARDS
from jaxinfer.models.decoder import Stage, decoder_structure
from jaxinfer.models.partition import Partition
from sharding.rules import MeshError, ShardingRules


def on(name: str, tensor: int, **changes: str) -> Partition:
    return Partition.of(CARDS[name], ShardingRules.of({"tensor": tensor}, changes))


def test_what_divides_is_left_alone():
    partition = on("llama-3-70b", 8)
    assert (partition.num_kv_heads, partition.intermediate_size, partition.vocab_size) == (8, 28672, 128256)
    assert partition.notes(CARDS["llama-3-70b"]) == []


def test_kv_heads_are_copied_and_the_rest_padded():
    model = CARDS["llama-3-70b"]
    partition = on("llama-3-70b", 16)
    assert (partition.num_kv_heads, partition.kv_copies) == (16, 2)
    assert partition.notes(model) == ["8 KV heads, each kept 2 times",
                                      "vocab_size 128256 padded with zeros to 128512 (+0.2%)"]  # fmt: skip
    qkv = decoder_structure(model, jnp.bfloat16, partition).specs["layers.0.qkv"]
    assert qkv.shape == ((64 + 2 * 16) * 128, 8192)
    assert qkv.checkpoint_shape == ((64 + 2 * 8) * 128, 8192)


@pytest.mark.parametrize(("name", "tensor", "fits"), [("smollm2-135m-instruct", 2, "1, 3, 9 can"),
                                                      ("qwen2-7b", 8, "1, 2, 4, 28 can")])  # fmt: skip
def test_heads_that_do_not_divide(name, tensor, fits):
    with pytest.raises(MeshError, match=f"tensor={tensor} cannot split .* query heads .* evenly; {fits}"):
        on(name, tensor)


def test_a_table_that_splits_a_weight_twice():
    with pytest.raises(MeshError, match="'heads' and 'model'"):
        on("llama-3-8b", 2, model="tensor")


def test_every_device_holds_its_share():
    whole = decoder_structure(CARDS["llama-3-8b"], jnp.bfloat16).num_bytes
    share = decoder_structure(CARDS["llama-3-8b"], jnp.bfloat16, on("llama-3-8b", 8)).bytes_per_device()
    norms = 65 * 4096 * 4  # whole everywhere
    assert share == (whole - norms) / 8 + norms


@given(layers=st.integers(1, 100), ways=st.integers(1, 100), head=st.integers(0, 40))
def test_stages_cover_all_layers_once(layers: int, ways: int, head: int):
    if ways > layers:
        with pytest.raises(MeshError, match=f"stage={ways}: the model has {layers} layers"):
            Stage.split(layers, ways, head)
        return
    stages = Stage.split(layers, ways, head)
    assert [layer for s in stages for layer in range(s.first_layer, s.end_layer)] == list(range(layers))
    assert [stage.is_first for stage in stages] == [True] + [False] * (ways - 1)
    assert [stage.is_last for stage in stages] == [False] * (ways - 1) + [True]
    sizes = [stage.end_layer - stage.first_layer for stage in stages]
    assert min(sizes) >= 1
    # The stage with most to do has no more than the mean, rounded up, or what cannot be shared out.
    mean = -(-(layers + head) // ways)
    assert max([*sizes[:-1], sizes[-1] + head]) <= max(mean, 1 + head)
