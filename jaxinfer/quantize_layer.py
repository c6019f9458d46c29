"""One decoder layer under calibration: what its matrices multiply, and the ways to round them.

A layer is the decoder's own, run over whole sequences without pages; its matrices are the fused ones: qkv, o, gate_up,
down. Letters as in `models.layers`, with B sequences of length L.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import LayerSpec, ModelConfig
from jaxinfer.models.decoder import DecoderLayer
from jaxinfer.models.layers import Tapped, rope_tables
from jaxinfer.models.partition import Partition
from jaxinfer.quantization.calibrate import round_to_nearest
from jaxinfer.quantization.calibrate_awq import choose_scales, round_clipped
from jaxinfer.quantization.calibrate_gptq import gptq
from jaxinfer.quantization.tensor import Packed, Scheme

MATRICES = ("qkv", "o", "gate_up", "down")  # in the order they run

type Weights = dict[str, jax.Array]  # of a layer, float32, by name


class Moments(NamedTuple):
    """Of a matrix's inputs over all calibration tokens: means of x xᵀ [I, I] and of |x| [I]."""

    squares_II: jax.Array
    sizes_I: jax.Array


class Batch(NamedTuple):
    """Hidden states of some sequences; of those, the ones that are not there to fill it up."""

    x_BLD: jax.Array
    real_B: jax.Array


class Devices:
    """Devices that share the work: sequences are split over them, and rows of matrices; the layer lies on each."""

    def __init__(self, devices: Sequence[jax.Device]):
        self._mesh = Mesh(np.array(devices), ("devices",))

    @property
    def count(self) -> int:
        return self._mesh.size

    def split(self, array: Any) -> jax.Array:
        """On all of them along its first dimension, or whole on each if that does not divide."""
        spec = PartitionSpec("devices") if array.shape[0] % self.count == 0 else PartitionSpec()
        return jax.device_put(array, NamedSharding(self._mesh, spec))

    def whole(self, array: Any) -> jax.Array:
        return jax.device_put(array, NamedSharding(self._mesh, PartitionSpec()))


def _run(config: ModelConfig, x_BLD: jax.Array, value: Callable[[str], Any]) -> jax.Array:
    """Runs the only layer of `config` with these weights."""
    B, L, D = x_BLD.shape
    spec = config.layers[0]

    def attend(q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, pool: Any, layer: Any, window: int | None) -> Any:
        q, k, v = (x.reshape(B, L, *x.shape[1:]) for x in (q_TNH, k_TKH, v_TKH))
        before = None if window is None else (window - 1, 0)
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=before)
        return pool, out.reshape(q_TNH.shape)

    def declare(name: str, *_: Any, **__: Any) -> nnx.Param:
        return nnx.Param(value(name))

    layer = DecoderLayer(config, Partition.of(config), spec, jnp.float32, declare)
    rope = rope_tables(jnp.tile(jnp.arange(L), B), spec.rope, config.head_dim)
    y_TD, _ = layer(x_BLD.reshape(B * L, D), rope, jnp.zeros(()), attend, 0)
    return y_TD.reshape(x_BLD.shape)


@partial(jax.jit, static_argnames="config")
def _outputs(config: ModelConfig, weights: Weights, x_BLD: jax.Array) -> jax.Array:
    return _run(config, x_BLD, weights.__getitem__)


@partial(jax.jit, static_argnames=("config", "names"))
def _sums(config: ModelConfig, weights: Weights, batch: Batch, names: tuple[str, ...]) -> dict[str, Moments]:
    """Moments of the inputs of some matrices, summed; what those do not need is not computed."""
    seen: dict[str, jax.Array] = {}

    def value(name: str) -> Any:
        return Tapped(weights[name], partial(seen.__setitem__, name)) if name in names else weights[name]

    _run(config, batch.x_BLD, value)
    _, L, _ = batch.x_BLD.shape
    real_T1 = jnp.repeat(batch.real_B, L)[:, None]
    sums = {}
    for name, x_TI in seen.items():
        x_TI = x_TI * real_T1
        squares_II = lax.dot_general(x_TI, x_TI, (((0,), (0,)), ((), ())), precision=lax.Precision.HIGHEST)
        sums[name] = Moments(squares_II, jnp.abs(x_TI).sum(0))
    return sums


@dataclass(frozen=True)
class Layer:
    """A layer of a model, with the calibration's hidden states that enter it.

    Attributes:
      rows: of fused matrices, the rows of each part by its name.
    """

    config: ModelConfig
    spec: LayerSpec
    rows: Mapping[str, slice]
    batches: Sequence[Batch]
    devices: Devices

    @property
    def _alone(self) -> ModelConfig:
        return replace(self.config, layers=(self.spec,))  # equal layers share programs

    def moments(self, weights: Weights, names: Iterable[str]) -> dict[str, Moments]:
        """Of the inputs of these matrices.

        Raises:
          ValueError: activations that are not finite.
        """
        names, total = tuple(names), None
        for batch in self.batches:
            sums = _sums(self._alone, weights, batch, names)
            total = sums if total is None else jax.tree.map(jnp.add, total, sums)
        assert total is not None
        count = sum(int(batch.real_B.sum()) * batch.x_BLD.shape[1] for batch in self.batches)
        for name, moments in total.items():
            if not bool(jnp.isfinite(moments.squares_II).all()):
                raise ValueError(f"{name}: the activations that enter it are not finite")
        return jax.tree.map(lambda x: self.devices.whole(x / count), total)

    def outputs(self, weights: Weights) -> list[Batch]:
        """The hidden states that leave it."""
        return [batch._replace(x_BLD=_outputs(self._alone, weights, batch.x_BLD)) for batch in self.batches]


def round_rtn(layer: Layer, weights: Weights, scheme: Scheme) -> tuple[Weights, dict[str, Packed]]:
    """Each matrix to the nearest; returns (weights as they now are, the rounded matrices). Looks at no activations."""
    rounded = {name: round_to_nearest(layer.devices.split(weights[name]), scheme) for name in MATRICES}
    return _settled(layer, weights, {name: each.packed(scheme) for name, each in rounded.items()})


def round_gptq(layer: Layer, weights: Weights, scheme: Scheme) -> tuple[Weights, dict[str, Packed]]:
    """Each matrix by GPTQ, for the inputs that the rounded ones before it give; returns as `round_rtn`."""
    packed: dict[str, Packed] = {}
    for name in MATRICES:
        moments = layer.moments(weights, [name])[name]
        try:
            rounded = gptq(layer.devices.split(weights[name]), moments.squares_II, scheme)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        weights, packed = _settled(layer, weights, packed | {name: rounded.packed(scheme)})
    return weights, packed


def round_awq(layer: Layer, weights: Weights, scheme: Scheme) -> tuple[Weights, dict[str, Packed]]:
    """Inputs scaled, the scales folded into what comes before, then each matrix clipped and rounded; as `round_rtn`."""
    moments = layer.moments(weights, MATRICES)
    scales = {}
    for name in MATRICES:
        sizes_I = moments[name].sizes_I
        if name == "o":
            sizes_I = _shared_by_heads(layer.config, sizes_I)
        scales[name], _ = choose_scales(layer.devices.split(weights[name]), moments[name].squares_II, sizes_I, scheme)
    weights = folded(layer.config, weights, scales, layer.rows)
    packed = {}
    for name in MATRICES:
        s_I = scales[name]
        squares_II = moments[name].squares_II / s_I / s_I[:, None]
        packed[name] = round_clipped(layer.devices.split(weights[name]), squares_II, scheme).packed(scheme)
    return _settled(layer, weights, packed)


ROUND = {"rtn": round_rtn, "gptq": round_gptq, "awq": round_awq}


def folded(
    config: ModelConfig, weights: Weights, scales: Mapping[str, jax.Array], rows: Mapping[str, slice]
) -> Weights:
    """The same layer with the inputs of its matrices multiplied by `scales`, which what gives them is divided by.

    A norm gives the inputs of qkv and of gate_up; rows of v those of o, each to all query heads that share it; rows of
    up those of down.
    """
    w = {name: value * scales[name] if name in scales else value for name, value in weights.items()}
    for matrix, norm in (("qkv", "attn_norm"), ("gate_up", "mlp_norm")):
        w[norm] = w[norm] / scales[matrix]
    of_v = scales["o"].reshape(config.num_kv_heads, -1, config.head_dim)[:, 0].ravel()
    for matrix, part, s in (("qkv", "v", of_v), ("gate_up", "up", scales["down"])):
        w[matrix] = w[matrix].at[rows[part]].divide(s[:, None])
        if (bias := f"{matrix}_bias") in w:
            w[bias] = w[bias].at[rows[part]].divide(s)
    return w


def _shared_by_heads(config: ModelConfig, sizes_I: jax.Array) -> jax.Array:
    """The mean over query heads of one KV head, whose values they all read."""
    sizes_KGH = sizes_I.reshape(config.num_kv_heads, -1, config.head_dim)
    return jnp.broadcast_to(sizes_KGH.mean(1, keepdims=True), sizes_KGH.shape).ravel()


def _settled(layer: Layer, weights: Weights, packed: dict[str, Packed]) -> tuple[Weights, dict[str, Packed]]:
    """Matrices as a reader of the file will have them."""
    return weights | {name: layer.devices.whole(each.dequantize()) for name, each in packed.items()}, packed
