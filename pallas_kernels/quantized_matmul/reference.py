"""The matmul in plain float32, the weight dequantized whole: the truth for every implementation. For tests only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.quantized_matmul.weights import ChannelWeight, GroupedWeight, Weight


def dequantize(w: Weight) -> jax.Array:
    """The weight's numbers, float32 [I, O]."""
    if isinstance(w, ChannelWeight):
        return w.values_IO.astype(jnp.float32) * w.scale_O.astype(jnp.float32)
    values = w.values_GJO.astype(jnp.float32)
    if w.zeros_GO is not None:
        values -= w.zeros_GO.astype(jnp.float32)[:, None]
    values *= w.scales_GO.astype(jnp.float32)[:, None]
    if w.minima_GO is not None:
        values += w.minima_GO.astype(jnp.float32)[:, None]
    return values.reshape(w.shape)


def quantize_rows(x_TI: jax.Array, inputs_axis: str | None = None) -> tuple[jax.Array, jax.Array]:
    """Each row to int8, its largest magnitude to 127: (values int8 [T, I], scale float32 [T, 1]).

    A row with a NaN has the scale NaN, and one with an infinity that: no integer would show them.

    Args:
      inputs_axis: the mesh axis that the inputs are split over, if they are.
    """
    x_TI = x_TI.astype(jnp.float32)
    largest_T1 = jnp.max(jnp.abs(x_TI), axis=-1, keepdims=True)
    if inputs_axis is not None:
        # Maxima between devices can pass over a NaN; its own device's part of the sum keeps it.
        largest_T1 = jnp.where(jnp.isnan(largest_T1), largest_T1, lax.pmax(largest_T1, inputs_axis))
    scale_T1 = jnp.where(largest_T1 == 0, 1.0, largest_T1) / 127
    return jnp.round(x_TI / scale_T1).astype(jnp.int8), scale_T1


def quantized_matmul(
    x_TI: jax.Array, w: Weight, *, activations: str | None, out_dtype: jnp.dtype, inputs_axis: str | None = None
) -> jax.Array:
    """See `api.quantized_matmul`."""
    if activations == "int8":
        assert isinstance(w, ChannelWeight)
        q_TI, scale_T1 = quantize_rows(x_TI, inputs_axis)
        y_TO = lax.dot(q_TI, w.values_IO, preferred_element_type=jnp.int32).astype(jnp.float32)
        return (y_TO * scale_T1 * w.scale_O.astype(jnp.float32)).astype(out_dtype)
    y_TO = jnp.dot(x_TI.astype(jnp.float32), dequantize(w), precision=lax.Precision.HIGHEST)
    return y_TO.astype(out_dtype)


def group_sums(x_TI: jax.Array, w: GroupedWeight) -> jax.Array:
    """Sums of x over each group's inputs, float32 [T, G]: what minima are multiplied by."""
    G, J, _ = w.values_GJO.shape
    return x_TI.astype(jnp.float32).reshape(-1, G, J).sum(-1)
