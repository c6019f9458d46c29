"""The pieces every decoder is made of, and the key of dimension letters.

Arrays in traced code end in the letters of their dimensions:

    B sequences   T packed tokens   R sampled rows   D model        N query heads   K KV heads
    G query heads of a KV head      H head dim       F feed-forward V vocabulary    L layers
    P pages       S sequences of a step              M pages of a sequence
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.config import RopeConfig


class Part(NamedTuple):
    """One of the checkpoint's tensors in a fused weight.

    Attributes:
      rows: along axis 0, in the checkpoint.
      copies: how many shards in a row hold the same rows: more than 1 where KV heads are fewer than shards.
    """

    name: str
    rows: int
    copies: int = 1


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A weight, declared once: initialisation, sharding, the loader's target and abstract trees come from this.

    Attributes:
      shape: matrices are `[out, in]`, as Hugging Face stores them.
      axes: logical axis of each dimension, which `sharding.rules` maps to mesh axes; None is never sharded.
      parts: of a fused weight, in order.
      ways: blocks along axis 0 that each hold an equal share of every part, in order: one a shard, so that a device
        splits what it has without asking another.
      unpadded: the shape without padding and copies; `shape` where there are none.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    parts: tuple[Part, ...] = ()
    ways: int = 1
    unpadded: tuple[int, ...] = ()

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """Of the weight as a checkpoint has it, parts one after another."""
        return self.unpadded or self.shape

    def share(self, part: Part) -> int:
        """Rows of a part in one block."""
        return -(-part.rows * part.copies // self.ways)


def _precision(x: jax.Array) -> lax.Precision:
    # TPUs multiply float32 in bfloat16 unless told otherwise.
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


class LayerChoice(NamedTuple):
    """The weight of one layer in a loop over layers: picked without copying it, as slicing stacked ones would."""

    layer: jax.Array
    weights: tuple[jax.Array, ...]


class Tapped(NamedTuple):
    """A weight, and who wants to see what it is multiplied with: calibration, while a layer is traced."""

    weight: jax.Array
    see: Callable[[jax.Array], None]


def linear(
    x_TI: jax.Array,
    w_OI: jax.Array | LayerChoice | Tapped,
    bias_O: jax.Array | None = None,
    *,
    dtype: Any = None,
    weight_first: bool = False,
) -> jax.Array:
    """`x @ w.T + bias`: every matmul of every model goes through here. Returns [T, O] of x's dtype, or `dtype`.

    Args:
      weight_first: multiply `w @ x.T` instead: up to twice as fast on CPUs for few rows. A `LayerChoice` always is.
    """
    if isinstance(w_OI, Tapped):
        w_OI.see(x_TI)
        w_OI = w_OI.weight
    if x_TI.shape[0] == 1 and (isinstance(w_OI, LayerChoice) or x_TI.dtype != jnp.float32):
        # On CPUs a few rows take no longer than one, which in 16 bits is many times slower.
        rows = jnp.broadcast_to(x_TI, (4, x_TI.shape[1]))
        return linear(rows, w_OI, bias_O, dtype=dtype, weight_first=weight_first)[:1]
    multiply = partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=_precision(x_TI),
        preferred_element_type=dtype or x_TI.dtype,
    )
    if isinstance(w_OI, LayerChoice):
        y_TO = lax.switch(w_OI.layer, [partial(multiply, w) for w in w_OI.weights], x_TI).T
    elif weight_first:
        y_TO = lax.optimization_barrier(multiply(w_OI, x_TI)).T  # or XLA swaps the operands back
    else:
        y_TO = multiply(x_TI, w_OI)
    return y_TO if bias_O is None else y_TO + bias_O


def rms_norm(x_TD: jax.Array, weight_D: jax.Array, eps: float) -> jax.Array:
    """Root mean square norm (arXiv:1910.07467), in float32. Returns [T, D] of x's dtype."""
    x = x_TD.astype(jnp.float32)
    x = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return (x * weight_D).astype(x_TD.dtype)


def rope_tables(positions_T: jax.Array, rope: RopeConfig, head_dim: int) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines of rotary embedding (arXiv:2104.09864), each [T, H / 2] float32."""
    inv_freq = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.factors is not None:
        inv_freq = inv_freq / np.asarray(rope.factors, np.float64)
    angles = positions_T.astype(jnp.float32)[:, None] * jnp.asarray(inv_freq, jnp.float32)
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x_TNH: jax.Array, cos_TH: jax.Array, sin_TH: jax.Array) -> jax.Array:
    """Rotates pairs (j, j + H/2), as Hugging Face checkpoints expect. Tables are [T, H / 2]."""
    a, b = jnp.split(x_TNH.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_TH[:, None], sin_TH[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_TNH.dtype)
