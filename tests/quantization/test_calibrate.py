"""GPTQ and AWQ on one matrix, against rounding to the nearest; the writers' layouts against a plain reading of them."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import packed_folders
import pytest

from jaxinfer.quantization import writers
from jaxinfer.quantization.calibrate import Rounded, meant, round_to_nearest, scheme_of
from jaxinfer.quantization.calibrate_awq import choose_scales, round_clipped
from jaxinfer.quantization.calibrate_gptq import gptq
from jaxinfer.quantization.tensor import quantize

O, I, GROUP = 48, 128, 32  # noqa: E741
GRIDS = [(4, True), (4, False), (8, True), (8, False)]


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 1, (O, I)).astype(np.float32)


def hessian(seed: int = 1) -> np.ndarray:
    """Of inputs that go together, a few of them much larger than the others."""
    rng = np.random.default_rng(seed)
    x_TI = rng.normal(0, 1, (512, 24)) @ rng.normal(0, 1, (24, I)) + rng.normal(0, 0.3, (512, I))
    x_TI[:, ::17] *= 8
    return (x_TI.T @ x_TI / len(x_TI)).astype(np.float32)


def error(numbers_OI: np.ndarray, w_OI: np.ndarray, hessian_II: np.ndarray) -> float:
    """Mean square error of the outputs."""
    d = np.asarray(numbers_OI, np.float64) - w_OI
    return float(((d @ hessian_II) * d).sum() / O)


def order_of(rounded: Rounded, scheme) -> np.ndarray:
    return rounded.packed(scheme).dequantize()


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True)])
@pytest.mark.parametrize("scales", ["float16", "bfloat16", "float32"])
def test_rounding_to_the_nearest_is_that_of_the_loader(bits: int, symmetric: bool, scales: str):
    scheme = scheme_of(bits, GROUP, symmetric, scales)
    ours, theirs = round_to_nearest(jnp.asarray(weights()), scheme).packed(scheme), quantize(weights(), scheme)
    np.testing.assert_array_equal(ours.values_OI, theirs.values_OI)
    # In float32, XLA multiplies by the inverse of a constant.
    np.testing.assert_allclose(*(each.scales_OG.astype(np.float32) for each in (ours, theirs)), rtol=2e-7)
    if not symmetric:
        np.testing.assert_array_equal(ours.zeros_OG, theirs.zeros_OG)


@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
def test_gptq_of_independent_inputs_rounds_to_the_nearest(bits: int, symmetric: bool):
    scheme = scheme_of(bits, GROUP, symmetric, "float16")
    ours, nearest = gptq(jnp.asarray(weights()), jnp.eye(I), scheme), round_to_nearest(jnp.asarray(weights()), scheme)
    np.testing.assert_array_equal(ours.values_OI, nearest.values_OI)
    np.testing.assert_array_equal(ours.scales_OG, nearest.scales_OG)


@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_makes_up_for_correlated_inputs(bits: int, symmetric: bool, act_order: bool):
    scheme = scheme_of(bits, GROUP, symmetric, "float16", act_order)
    w_OI, hessian_II = weights(), hessian()
    rounded = gptq(jnp.asarray(w_OI), jnp.asarray(hessian_II), scheme)
    plain = scheme_of(bits, GROUP, symmetric, "float16")
    nearest = meant(round_to_nearest(jnp.asarray(w_OI), plain), plain)
    ours = error(order_of(rounded, scheme), w_OI, hessian_II)
    assert ours < 0.5 * error(nearest, w_OI, hessian_II)


def test_gptq_takes_inputs_that_never_come():
    scheme = scheme_of(4, GROUP, True, "float16")
    hessian_II = hessian()
    hessian_II[5], hessian_II[:, 5] = 0, 0
    rounded = gptq(jnp.asarray(weights()), jnp.asarray(hessian_II), scheme)
    assert np.isfinite(order_of(rounded, scheme)).all()


def test_gptq_refuses_what_is_not_finite():
    hessian_II = hessian()
    hessian_II[3, 3] = np.inf
    with pytest.raises(ValueError, match="not finite"):
        gptq(jnp.asarray(weights()), jnp.asarray(hessian_II), scheme_of(4, GROUP, True, "float16"))


@pytest.mark.parametrize("symmetric", [True, False])
def test_awq_lowers_the_error_of_large_inputs(symmetric: bool):
    scheme = scheme_of(4, GROUP, symmetric, "float16")
    w_OI, hessian_II = weights(), hessian()
    sizes_I = np.sqrt(np.diag(hessian_II))
    s_I, errors = choose_scales(jnp.asarray(w_OI), jnp.asarray(hessian_II), jnp.asarray(sizes_I), scheme)
    assert float(errors.min()) < 0.9 * float(errors[0])  # the first is without scales
    scaled = np.asarray(hessian_II / s_I / s_I[:, None])
    clipped = round_clipped(jnp.asarray(w_OI * s_I), jnp.asarray(scaled), scheme)
    numbers = order_of(clipped, scheme) / np.asarray(s_I)
    assert error(numbers, w_OI, hessian_II) < 0.9 * float(errors[0]) / O


def test_zero_points_of_positive_groups_have_a_form_in_every_format():
    scheme = scheme_of(4, GROUP, False, "float16")
    rounded = round_to_nearest(jnp.asarray(np.abs(weights()) + 1), scheme).packed(scheme)
    assert rounded.zeros_OG is not None
    assert rounded.zeros_OG.min() == 1 - 8
    assert np.abs(rounded.dequantize() - np.abs(weights()) - 1).max() < rounded.scales_OG.max()


@pytest.mark.parametrize(("bits", "symmetric"), GRIDS)
@pytest.mark.parametrize("layout", ["awq", "gptq", "act-order", "compressed-tensors"])
def test_layouts_hold_the_numbers(layout: str, bits: int, symmetric: bool):
    if layout == "awq" and bits == 8:
        pytest.skip("the layout has 4 bits")
    scheme = scheme_of(bits, GROUP, symmetric, "float16", layout == "act-order")
    w_OI, hessian_II = jnp.asarray(weights()), jnp.asarray(hessian())
    packed = (gptq(w_OI, hessian_II, scheme) if "order" in layout else round_to_nearest(w_OI, scheme)).packed(scheme)
    match layout:
        case "awq":
            read = packed_folders.awq(writers.awq(packed), GROUP)
        case "compressed-tensors":
            read = packed_folders.compressed_tensors(writers.compressed_tensors(packed), bits)
        case _:
            tensors = writers.gptq(packed)
            assert (np.diff(tensors["g_idx"]) < 0).any() == (layout == "act-order")
            read = packed_folders.gptq(tensors, bits)
    np.testing.assert_array_equal(read, packed.dequantize())
