"""The product by a quantized weight, on one device or on each of a mesh's by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.quantization.tensor import QuantizedWeight
from pallas_kernels.quantized_matmul import quantized_matmul
from pallas_kernels.quantized_matmul.reference import dequantize


def quantized_linear(
    x_TI: jax.Array, w: QuantizedWeight, dtype: Any, split: tuple[str | None, str | None] = (None, None)
) -> jax.Array:
    """Returns y_TO of `dtype`; x may have fewer inputs than the weight, which are padding then.

    Args:
      split: mesh axes that the weight's outputs and inputs lie on. With inputs split, parts of the sums meet in an
        all-reduce; if activations are rounded to int8, so do the rows' largest magnitudes.
    """
    if w.order_I is not None:
        # Of a split x this gathers all of it: a group's inputs may lie on any device.
        x_TI = x_TI[:, w.order_I]
    x_TI = jnp.pad(x_TI, ((0, 0), (0, w.weight.shape[0] - x_TI.shape[1])))
    out, into = split
    multiply = partial(quantized_matmul, activations=w.scheme.activations)
    if out is None and into is None:
        return multiply(x_TI, w.weight, out_dtype=dtype)
    specs = jax.tree.map(
        lambda array: PartitionSpec(*{1: (out,), 2: (into, out), 3: (into, None, out)}[array.ndim]), w.weight
    )

    def on_a_device(x_TI: jax.Array, weight: Any) -> jax.Array:
        if into is None:
            return multiply(x_TI, weight, out_dtype=dtype)
        return lax.psum(multiply(x_TI, weight, out_dtype=dtype, inputs_axis=into), into)

    return jax.shard_map(
        on_a_device, in_specs=(PartitionSpec(None, into), specs), out_specs=PartitionSpec(None, out), check_vma=False
    )(x_TI, w.weight)


def quantized_rows(w: QuantizedWeight, rows_T: jax.Array, dtype: Any) -> jax.Array:
    """Rows (outputs) of a matrix, dequantized: [T, I] of `dtype`, in the model's order of inputs."""
    rows = jax.tree.map(lambda array: jnp.take(array, rows_T, axis=-1), w.weight)
    rows_TI = dequantize(rows).T.astype(dtype)
    return rows_TI if w.order_I is None else jnp.zeros_like(rows_TI).at[:, w.order_I].set(rows_TI)
