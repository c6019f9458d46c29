"""The decoder's structure: its leaves, its two ways through the layers, and its matmuls."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.config import LayerSpec, ModelConfig
from jaxinfer.models.decoder import decoder_structure
from jaxinfer.models.layers import LayerChoice, linear
from pallas_kernels.paged_attention import paged_attention, pool_shape

CONFIG = ModelConfig(
    family="llama",
    vocab_size=97,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=48,
    layers=(LayerSpec(attention_bias=True, output_bias=True, mlp_bias=True),) * 3,
    rms_norm_eps=1e-5,
    max_position=64,
    tie_embeddings=False,
)


def random_weights(config: ModelConfig, dtype=jnp.float32) -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    specs = decoder_structure(config, dtype).specs
    return {path: jnp.asarray(rng.normal(0, 0.3, s.shape), s.dtype) for path, s in specs.items()}


def run(config: ModelConfig, *, scan: bool, tokens: int, dtype=jnp.float32) -> tuple[np.ndarray, np.ndarray]:
    """(logits, pool) of one prompt."""
    structure = decoder_structure(config, dtype, scan=scan)
    leaves = structure.flatten(random_weights(config, dtype))
    pool = jnp.zeros(pool_shape(len(config.layers), 3, 16, config.num_kv_heads, config.head_dim), dtype)

    @jax.jit
    def forward(leaves, token_ids_T, pool):
        def attend(q, k, v, pool, layer, window):
            return paged_attention(
                q, k, v, pool, layer, jnp.array([[1, 2]]), jnp.array([tokens]), jnp.array([0, tokens]), jnp.int32(1),
                scale=0.3, window=window,
            )  # fmt: skip

        decoder = structure.merge(leaves)
        hidden_TD, pool = decoder(token_ids_T, jnp.arange(tokens), pool, attend)
        return decoder.logits(hidden_TD), pool

    logits, pool = forward(leaves, jnp.arange(5, 5 + tokens), pool)
    return np.asarray(logits), np.asarray(pool)


@pytest.mark.parametrize("tokens", [1, 7, 30])
@pytest.mark.parametrize("bias", [True, False])
def test_loop_over_layers_equals_unrolled(tokens: int, bias: bool):
    config = CONFIG if bias else replace(CONFIG, layers=(LayerSpec(window=5),) * 3)
    logits, pool = run(config, scan=True, tokens=tokens)
    expected, expected_pool = run(config, scan=False, tokens=tokens)
    # The same float32 sums in another order.
    np.testing.assert_allclose(logits, expected, atol=1e-5 * np.abs(expected).max())
    np.testing.assert_allclose(pool, expected_pool, atol=1e-5 * np.abs(expected_pool).max())


def test_layers_that_differ_cannot_be_looped_over():
    config = replace(CONFIG, layers=(LayerSpec(), LayerSpec(window=3)))
    with pytest.raises(AssertionError, match="alike"):
        decoder_structure(config, jnp.float32, scan=True)


@pytest.mark.parametrize("scan", [False, True])
def test_leaves_are_in_the_order_of_their_paths(scan: bool):
    structure = decoder_structure(CONFIG, jnp.float32, scan=scan)
    numbered = {path: jnp.full(spec.shape, i, spec.dtype) for i, (path, spec) in enumerate(structure.specs.items())}
    decoder = structure.merge(structure.flatten(numbered))
    number = {path: i for i, path in enumerate(structure.specs)}
    for index, layer in enumerate(decoder.layers):
        for name in ("attn_norm", "qkv", "o", "mlp_norm", "gate_up", "down", "qkv_bias", "down_bias"):
            assert jnp.all(getattr(layer, name)[...] == number[f"layers.{index}.{name}"]), name
    assert jnp.all(decoder.embed[...] == number["embed"])
    assert jnp.all(decoder.head[...] == number["head"])


def test_bytes_of_all_weights():
    structure = decoder_structure(CONFIG, jnp.bfloat16)
    weights = random_weights(CONFIG, jnp.bfloat16)
    assert structure.num_bytes == sum(array.nbytes for array in weights.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_every_form_of_linear_is_the_same_product(rows: int, dtype: str):
    rng = np.random.default_rng(rows)
    x = jnp.asarray(rng.normal(size=(rows, 40)), dtype)
    weights = tuple(jnp.asarray(rng.normal(size=(24, 40)), dtype) for _ in range(3))
    bias = jnp.asarray(rng.normal(size=24), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(weights[1], np.float64).T + np.asarray(bias, np.float64)
    choice = jax.jit(lambda layer: linear(x, LayerChoice(layer, weights), bias, dtype=jnp.float32))(1)
    first = linear(x, weights[1], bias, dtype=jnp.float32, weight_first=True)
    plain = linear(x, weights[1], bias, dtype=jnp.float32)
    for result in (choice, first, plain):
        assert result.shape == (rows, 24)
        assert result.dtype == jnp.float32
        # Products of 16-bit numbers are exact in float32; 40 of them are summed.
        np.testing.assert_allclose(result, exact, atol=1e-4)
