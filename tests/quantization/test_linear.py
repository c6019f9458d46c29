"""Products by quantized weights: on one device, and over shards of outputs or inputs."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.models.layers import FusedWeight, LayerChoice, linear, take_rows
from jaxinfer.quantization.tensor import Scheme, laid_out, quantize
from sharding.mesh import MeshConfig

SCHEMES = [
    Scheme("int8"),
    Scheme("int8", activations="int8"),
    Scheme("float8_e4m3fn"),
    Scheme("int8", 16),
    Scheme("int4", 32),
    Scheme("int4", 32, "bfloat16", "zeros"),
]
O, I, T = 48, 128, 5  # noqa: E741


def weight(scheme: Scheme, seed: int = 0, inputs: int = I):
    packed = quantize(np.random.default_rng(seed).normal(size=(O, inputs)).astype(np.float32), scheme)
    return packed, jax.tree.map(jnp.asarray, laid_out(packed, inputs))


def rows(inputs: int = I) -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).normal(size=(T, inputs)), jnp.float32)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
@pytest.mark.parametrize("split", [("tensor", None), (None, "tensor")], ids=["outputs", "inputs"])
def test_shards_give_the_product_of_one_device(scheme, split):
    _, w = weight(scheme)
    mesh = MeshConfig(tensor=4).build()[0][0]
    axes = dict(zip(("o", "i"), split, strict=True))
    specs = jax.tree.map(
        lambda a: NamedSharding(mesh, PartitionSpec(*(axes.get(axis) for axis in a.axes))),
        scheme.arrays(O, I, ("o", "i")),
    )
    x = jax.device_put(rows(), NamedSharding(mesh, PartitionSpec(None, split[1])))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        run = jax.jit(lambda x, w: linear(x, w, split=split)).lower(x, jax.device_put(w, specs)).compile()
    # Sums of 128 float32 products in another order; with int8 activations rows are rounded alike everywhere.
    np.testing.assert_allclose(run(x, jax.device_put(w, specs)), linear(rows(), w), atol=2e-5, rtol=1e-5)


def test_inputs_in_their_own_order_are_gathered():
    packed, w = weight(Scheme("int4", 32))
    order = np.random.default_rng(1).permutation(I).astype(np.int32)
    scheme = replace(packed.scheme, reordered=True)
    reordered = packed._replace(scheme=scheme, order_I=order)
    ours = replace(w, scheme=scheme, order_I=jnp.asarray(order))
    truth = np.asarray(rows()) @ reordered.dequantize().T
    np.testing.assert_allclose(linear(rows(), ours), truth, atol=1e-4)
    np.testing.assert_array_equal(take_rows(ours, jnp.array([3, 1]), jnp.float32), reordered.dequantize()[[3, 1]])


def test_inputs_that_fill_no_group_are_padded():
    packed, w = weight(Scheme("int4", 32), inputs=40)
    np.testing.assert_allclose(linear(rows(40), w), np.asarray(rows(40)) @ packed.dequantize().T, atol=1e-4)


def test_parts_that_are_kept_differently_come_out_by_blocks():
    a, b = weight(SCHEMES[0], 1), weight(SCHEMES[4], 2)
    c = np.random.default_rng(3).normal(size=(O, I)).astype(np.float32)
    fused = FusedWeight((a[1], b[1], jnp.asarray(c)), ways=4)
    y = np.asarray(linear(rows(), fused)).reshape(T, 4, 3, O // 4)
    for which, matrix in enumerate((a[0].dequantize(), b[0].dequantize(), c)):
        np.testing.assert_allclose(y[:, :, which].reshape(T, O), np.asarray(rows()) @ matrix.T, atol=1e-4)


def test_layers_of_a_loop_may_be_kept_differently():
    first, second = weight(SCHEMES[4], 1)[1], jnp.asarray(weight(SCHEMES[0], 2)[0].dequantize())
    choose = jax.jit(lambda x, layer: linear(x, LayerChoice(layer, (first, second))))
    for layer, w in enumerate((first, second)):
        np.testing.assert_allclose(choose(rows(), layer), linear(rows(), w), atol=1e-5)
