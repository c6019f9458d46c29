"""The pieces every decoder is made of, and the key of dimension letters.

Arrays in traced code end in the letters of their dimensions:

    B sequences   T packed tokens   R sampled rows   D model        N query heads   K KV heads
    G query heads of a KV head      H head dim       F feed-forward V vocabulary    L layers
    P pages       S sequences of a step              M pages of a sequence
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.config import RopeConfig
from jaxinfer.quantization.linear import quantized_linear, quantized_rows
from jaxinfer.quantization.tensor import ArraySpec, QuantizedWeight, Scheme


class Part(NamedTuple):
    """One of the checkpoint's tensors in a fused weight.

    Attributes:
      rows: along axis 0, in the checkpoint.
      copies: how many shards in a row hold the same rows: more than 1 where KV heads are fewer than shards.
      padded: rows with padding, of all shards together; by default only what makes their shares equal.
    """

    name: str
    rows: int
    copies: int = 1
    padded: int = 0


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
      schemes: of each part, or of the weight if it has none; None is in floats. Empty: all of it is.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    parts: tuple[Part, ...] = ()
    ways: int = 1
    unpadded: tuple[int, ...] = ()
    schemes: tuple[Scheme | None, ...] = ()

    @property
    def checkpoint_shape(self) -> tuple[int, ...]:
        """Of the weight as a checkpoint has it, parts one after another."""
        return self.unpadded or self.shape

    def share(self, part: Part) -> int:
        """Rows of a part in one block."""
        return -(-max(part.rows * part.copies, part.padded) // self.ways)

    def keys(self, path: str) -> list[str]:
        """What its parts are called, or it itself if it has none, as "layers.0.qkv.q"."""
        return [f"{path}.{part.name}" for part in self.parts] or [path]

    @property
    def pieces(self) -> tuple[WeightSpec, ...]:
        """The weights that it is kept as: itself, or one for each part where parts are quantized differently, or may
        be in orders of their own."""
        if len(set(self.schemes)) <= 1 and not (self.parts and any(s and s.reordered for s in self.schemes)):
            return (self,)
        return tuple(
            replace(
                self,
                shape=(self.share(part) * self.ways, *self.shape[1:]),
                unpadded=(part.rows, *self.checkpoint_shape[1:]),
                parts=(part,),
                schemes=(scheme,),
            )
            for part, scheme in zip(self.parts, self.schemes, strict=True)
        )

    @property
    def scheme(self) -> Scheme | None:
        """Of a weight that is kept in one piece."""
        (scheme,) = set(self.schemes) or {None}
        return scheme

    @property
    def arrays(self) -> Any:
        """What it is kept as: a pytree with an `ArraySpec` for each array, in the form that `linear` takes."""
        pieces = self.pieces
        if len(pieces) > 1:
            return FusedWeight(tuple(piece.arrays for piece in pieces), self.ways)
        if self.scheme is None:
            return ArraySpec(self.shape, np.dtype(self.dtype), self.axes)
        (outputs, inputs), (out, into) = self.shape, self.axes
        return self.scheme.arrays(outputs, inputs, (out, into))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in jax.tree.leaves(self.arrays))


@partial(jax.tree_util.register_dataclass, data_fields=["pieces"], meta_fields=["ways"])
@dataclass(frozen=True, slots=True)
class FusedWeight:
    """A fused weight whose parts are kept differently: each by itself, in order."""

    pieces: tuple[jax.Array | QuantizedWeight, ...]
    ways: int


def _precision(x: jax.Array) -> lax.Precision:
    # TPUs multiply float32 in bfloat16 unless told otherwise.
    return lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT


type Weight = jax.Array | QuantizedWeight | FusedWeight


class LayerChoice(NamedTuple):
    """The weight of one layer in a loop over layers: picked without copying it, as slicing stacked ones would."""

    layer: jax.Array
    weights: tuple[Weight, ...]


class Tapped(NamedTuple):
    """A weight, and who wants to see what it is multiplied with: calibration, while a layer is traced."""

    weight: jax.Array
    see: Callable[[jax.Array], None]


def linear(
    x_TI: jax.Array,
    w: Weight | LayerChoice | Tapped,
    bias_O: jax.Array | None = None,
    *,
    dtype: Any = None,
    weight_first: bool = False,
    split: tuple[str | None, str | None] = (None, None),
) -> jax.Array:
    """`x @ w.T + bias`: every matmul of every model goes through here. Returns [T, O] of x's dtype, or `dtype`.

    Args:
      w: [O, I], in floats or quantized.
      weight_first: multiply `w @ x.T` instead: up to twice as fast on CPUs for few rows. A `LayerChoice` always is.
      split: mesh axes that the weight's outputs and inputs lie on. Products of quantized weights are taken on each
        device by itself, since the partitioner cannot split a kernel.
    """
    if isinstance(w, Tapped):
        w.see(x_TI)
        w = w.weight
    is_array = all(isinstance(each, jax.Array) for each in (w.weights if isinstance(w, LayerChoice) else [w]))
    if is_array and x_TI.shape[0] == 1 and (isinstance(w, LayerChoice) or x_TI.dtype != jnp.float32):
        # On CPUs a few rows take no longer than one, which in 16 bits is many times slower.
        rows = jnp.broadcast_to(x_TI, (4, x_TI.shape[1]))
        return linear(rows, w, bias_O, dtype=dtype, weight_first=weight_first)[:1]
    dtype = dtype or x_TI.dtype
    if isinstance(w, LayerChoice):
        multiply = _weight_first if is_array else partial(_product, split=split)
        branches = [partial(multiply, w=weight, dtype=dtype) for weight in w.weights]
        y_TO = lax.switch(w.layer, branches, x_TI)
        y_TO = y_TO.T if is_array else y_TO
    elif weight_first and is_array:
        y_TO = lax.optimization_barrier(_weight_first(x_TI, w, dtype)).T  # or XLA swaps the operands back
    else:
        y_TO = _product(x_TI, w, dtype, split)
    return y_TO if bias_O is None else y_TO + bias_O


def _weight_first(x_TI: jax.Array, w: Weight, dtype: Any) -> jax.Array:
    assert isinstance(w, jax.Array)
    return _dot(w, x_TI, dtype)


def _dot(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(a, b, dimensions, precision=_precision(a), preferred_element_type=dtype)


def _product(x_TI: jax.Array, w: Weight, dtype: Any, split: tuple[str | None, str | None]) -> jax.Array:
    if isinstance(w, FusedWeight):
        T = x_TI.shape[0]
        blocks = [_product(x_TI, piece, dtype, split).reshape(T, w.ways, -1) for piece in w.pieces]
        return jnp.concatenate(blocks, axis=-1).reshape(T, -1)
    if isinstance(w, QuantizedWeight):
        return quantized_linear(x_TI, w, dtype, split)
    return _dot(x_TI, w, dtype)


def take_rows(w: Weight, rows_T: jax.Array, dtype: Any) -> jax.Array:
    """Rows of a matrix [O, I], as an embedding has them; [T, I] of `dtype`."""
    assert not isinstance(w, FusedWeight)
    return w[rows_T] if isinstance(w, jax.Array) else quantized_rows(w, rows_T, dtype)


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
