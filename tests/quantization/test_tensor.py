"""Quantized weights: rounding, layouts and groups, on the host and on devices."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.errors import CheckpointError
from jaxinfer.quantization.tensor import Packed, Scheme, as_rows, from_rows, laid_out, nbytes, quantize
from pallas_kernels.quantized_matmul import GROUP_SIZES
from pallas_kernels.quantized_matmul.reference import dequantize

SCHEMES = [
    Scheme("int8"),
    Scheme("int8", activations="int8"),
    Scheme("float8_e4m3fn"),
    Scheme("int8", 16, "float16"),
    Scheme("int4", 32),
    Scheme("int4", 64, "bfloat16", "zeros"),
]
each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=str)


def random(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(outputs, inputs)) * np.exp(rng.normal(size=(outputs, 1)))).astype(np.float32)


def on_device(packed: Packed, inputs: int):
    return jax.tree.map(jnp.asarray, laid_out(packed, inputs))


@each_scheme
@settings(deadline=None, max_examples=20)
@given(st.integers(1, 9), st.integers(1, 150), st.integers(0, 99))
def test_no_number_is_further_than_half_a_step_from_its_weight(scheme, outputs, inputs, seed):
    weights = random(outputs, inputs, seed)
    packed = quantize(weights, scheme).check("w")
    error = np.abs(packed.dequantize() - weights)
    group = scheme.group or inputs
    for first in range(0, inputs, group):
        part, scales = weights[:, first : first + group], packed.scales_OG[:, [first // group]].astype(np.float32)
        if scheme.values == "float8_e4m3fn":
            bound = np.maximum(np.abs(part) * 2.0**-4, scales * 2.0**-10)  # three bits after the first
        else:
            # A zero point is rounded too, and a scale that was rounded down leaves the largest weights beyond.
            rounding = {"float32": 1e-6, "bfloat16": 2.0**-8, "float16": 2.0**-11}[scheme.scales]
            bound = scales * (0.5 if scheme.offset is None else 1.0) + 2 * np.abs(part).max(1, keepdims=True) * rounding
        assert (error[:, first : first + group] <= bound * 1.001 + 1e-12).all()


@each_scheme
def test_devices_hold_the_numbers_that_the_host_means(scheme):
    outputs, inputs = 6, 100
    packed = quantize(random(outputs, inputs), scheme)
    ours = on_device(packed, inputs)
    specs = jax.tree.leaves(scheme.arrays(outputs, inputs, ("o", "i")))
    assert [(a.shape, a.dtype) for a in jax.tree.leaves(ours)] == [(s.shape, s.dtype) for s in specs]
    numbers = np.asarray(dequantize(ours.weight)).T
    np.testing.assert_array_equal(numbers[:, :inputs], packed.dequantize())


@each_scheme
def test_declared_bytes_are_those_that_devices_hold(scheme):
    ours = on_device(quantize(random(256, 256), scheme), 256)
    held = sum(array.on_device_size_in_bytes() for array in jax.tree.leaves(ours))
    assert held == scheme.nbytes(256, 256)


@pytest.mark.parametrize("scheme", [s for s in SCHEMES if s.group], ids=str)
def test_smaller_groups_are_the_same_numbers_and_come_together_again(scheme):
    packed = quantize(random(5, 128), scheme)
    for group in (size for size in GROUP_SIZES if size <= scheme.group):
        smaller = packed.regrouped(group)
        np.testing.assert_array_equal(smaller.dequantize(), packed.dequantize())
        assert smaller.scheme.is_from(scheme)
        ours, split = on_device(packed, 128), on_device(smaller, 128)
        for here, there in ((ours, split), (split, ours)):
            again = from_rows(as_rows(here, there.scheme), None, there.scheme)
            assert jax.tree.structure(again) == jax.tree.structure(there)
            for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(there), strict=True):
                np.testing.assert_array_equal(a, b)


def test_a_scheme_is_no_other():
    int4 = Scheme("int4", 64, "bfloat16", "zeros")
    assert int4.is_from(int4)
    assert Scheme("int8", activations="int8").is_from(Scheme("int8"))
    for other in (replace(int4, group=32), replace(int4, offset=None), replace(int4, scales="float32"), Scheme("int8")):
        assert not int4.is_from(other)


def test_groups_lie_whole_in_every_shard():
    scheme = Scheme("int4", 128)
    assert scheme.within(576, 1) == scheme
    assert scheme.within(576, 3).group == 64
    assert scheme.within(1024, 4).group == 128
    with pytest.raises(ValueError, match="groups of 128 do not lie whole in 3 shards of 120 inputs"):
        scheme.within(120, 3)


def test_inputs_in_their_own_order_come_back_to_the_models():
    weights, order = random(4, 64), np.random.default_rng(1).permutation(64).astype(np.int32)
    plain = quantize(weights[:, order], Scheme("int4", 32))
    packed = plain._replace(scheme=replace(plain.scheme, reordered=True), order_I=order)
    np.testing.assert_array_equal(packed.dequantize()[:, order], plain.dequantize())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(bad):
    weights = random(3, 32)
    weights[1, 5] = bad
    with pytest.raises(ValueError, match="not finite"):
        quantize(weights, Scheme("int4", 16))
    packed = quantize(random(3, 32), Scheme("int4", 16))
    scales = packed.scales_OG.copy()
    scales[0, 0] = bad
    with pytest.raises(CheckpointError, match=r"the\.tensor: scales that are not finite"):
        packed._replace(scales_OG=scales).check("the.tensor")


def test_an_order_that_is_no_permutation_is_refused():
    packed = quantize(random(3, 32), Scheme("int4", 16))
    with pytest.raises(CheckpointError, match=r"the\.tensor: its order of inputs is no permutation"):
        packed._replace(order_I=np.zeros(32, np.int32)).check("the.tensor")


def test_rows_of_zeros_and_of_the_smallest_numbers_stay_what_they_are():
    weights = np.zeros((2, 32), np.float32)
    weights[1] = 1e-42
    for scheme in SCHEMES:
        numbers = quantize(weights, scheme).dequantize()
        assert np.isfinite(numbers).all()
        assert np.abs(numbers).max() < 1e-37


def test_bytes_of_four_bits():
    assert nbytes((3, 4), jnp.int4) == 6
    assert nbytes((3, 4), np.float32) == 48
