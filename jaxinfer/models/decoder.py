"""The one decoder, in Flax NNX. A `ModelConfig` describes its layers; families add no code here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxinfer.config import LayerSpec, ModelConfig
from jaxinfer.models.layers import LayerChoice, WeightSpec, apply_rope, linear, rms_norm, rope_tables

MANY_ROWS = 32  # from here on the head's matmul gains nothing from another order of operands on CPUs

# Gives the value of a declared weight: an array, or a ShapeDtypeStruct where no bytes are wanted.
type MakeWeight = Callable[[str, WeightSpec], Any]


class Attend(Protocol):
    """Attention bound to one step's page table: writes k and v of `layer` into the pool, then reads it."""

    def __call__(
        self,
        q_TNH: jax.Array,
        k_TKH: jax.Array,
        v_TKH: jax.Array,
        pool: jax.Array,
        layer: int | jax.Array,
        window: int | None,
    ) -> tuple[jax.Array, jax.Array]: ...


class DecoderLayer(nnx.Module):
    """Attention and MLP with pre-norms and residuals, as its `LayerSpec` says. `declare(name, ...)` gives a weight."""

    def __init__(self, config: ModelConfig, spec: LayerSpec, dtype: Any, declare: Callable[..., nnx.Param]):
        c = self.config = config
        self.spec = spec
        D, N, K, H, F = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size
        qkv = (("q", N * H), ("k", K * H), ("v", K * H))
        gate_up = (("gate", F), ("up", F))
        self.attn_norm = declare("attn_norm", (D,), jnp.float32, ("model",))
        self.qkv = declare("qkv", ((N + 2 * K) * H, D), dtype, ("heads", "model"), qkv)
        self.o = declare("o", (D, N * H), dtype, ("model", "heads"))
        self.mlp_norm = declare("mlp_norm", (D,), jnp.float32, ("model",))
        self.gate_up = declare("gate_up", (2 * F, D), dtype, ("feed_forward", "model"), gate_up)
        self.down = declare("down", (D, F), dtype, ("model", "feed_forward"))
        # Absent biases are None, which holds no leaf.
        has = spec.attention_bias
        self.qkv_bias = declare("qkv_bias", ((N + 2 * K) * H,), dtype, ("heads",), qkv) if has else None
        self.o_bias = declare("o_bias", (D,), dtype, ("model",)) if spec.output_bias else None
        has = spec.mlp_bias
        self.gate_up_bias = declare("gate_up_bias", (2 * F,), dtype, ("feed_forward",), gate_up) if has else None
        self.down_bias = declare("down_bias", (D,), dtype, ("model",)) if has else None

    def __call__(
        self,
        x_TD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        pool: jax.Array,
        attend: Attend,
        index: int | jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        c = self.config
        T, N, K, H = x_TD.shape[0], c.num_heads, c.num_kv_heads, c.head_dim
        y_TD = rms_norm(x_TD, self.attn_norm[...], c.rms_norm_eps)
        qkv = linear(y_TD, self.qkv.get_value(), _value(self.qkv_bias))
        q, k, v = jnp.split(qkv, (N * H, (N + K) * H), axis=-1)
        q_TNH = apply_rope(q.reshape(T, N, H), *rope)
        k_TKH = apply_rope(k.reshape(T, K, H), *rope)
        pool, out_TNH = attend(q_TNH, k_TKH, v.reshape(T, K, H), pool, index, self.spec.window)
        x_TD = x_TD + linear(out_TNH.reshape(T, N * H), self.o.get_value(), _value(self.o_bias))
        y_TD = rms_norm(x_TD, self.mlp_norm[...], c.rms_norm_eps)
        gate_TF, up_TF = jnp.split(linear(y_TD, self.gate_up.get_value(), _value(self.gate_up_bias)), 2, axis=-1)
        x_TD = x_TD + linear(jax.nn.silu(gate_TF) * up_TF, self.down.get_value(), _value(self.down_bias))
        return x_TD, pool


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head. Layers are unrolled, or run as one loop (`scan`)."""

    def __init__(self, config: ModelConfig, dtype: Any, make: MakeWeight, *, scan: bool = False):
        V, D = config.vocab_size, config.hidden_size
        self.config, self.scan = config, scan

        def declare(prefix: str, name: str, *spec: Any) -> nnx.Param:
            return nnx.Param(make(prefix + name, WeightSpec(*spec)))

        self.embed = declare("", "embed", (V, D), dtype, ("vocab", "model"))
        self.layers = nnx.List(
            [
                DecoderLayer(config, spec, dtype, partial(declare, f"layers.{i}."))
                for i, spec in enumerate(config.layers)
            ]
        )
        self.final_norm = declare("", "final_norm", (D,), jnp.float32, ("model",))
        self.head = None if config.tie_embeddings else declare("", "head", (V, D), dtype, ("vocab", "model"))

    def __call__(
        self, token_ids_T: jax.Array, positions_T: jax.Array, pool: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (hidden_TD after the last layer, pool with the tokens' keys and values written)."""
        x_TD = self.embed[...][token_ids_T]
        tables = {r: rope_tables(positions_T, r, self.config.head_dim) for r in {s.rope for s in self.config.layers}}
        if self.scan:
            layer_at = _one_layer(self.layers)

            def body(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                layer = layer_at(index)
                return layer(carry[0], tables[layer.spec.rope], carry[1], attend, index)

            return lax.fori_loop(0, len(self.layers), body, (x_TD, pool))
        for index, layer in enumerate(self.layers):
            x_TD, pool = layer(x_TD, tables[layer.spec.rope], pool, attend, index)
        return x_TD, pool

    def logits(self, hidden_RD: jax.Array) -> jax.Array:
        """Logits [R, V] in float32 of hidden states that the last layer gave."""
        y_RD = rms_norm(hidden_RD, self.final_norm[...], self.config.rms_norm_eps)
        head_VD = (self.embed if self.head is None else self.head)[...]
        return linear(y_RD, head_VD, dtype=jnp.float32, weight_first=self.scan and len(y_RD) < MANY_ROWS)


def _one_layer(layers: nnx.List) -> Callable[[jax.Array], DecoderLayer]:
    """Index -> the layer of that index, where the index is traced; all layers must be alike."""
    graphdef, _ = nnx.split(layers[0])
    states = [nnx.state(layer) for layer in layers]
    # Vectors are small: stacked once a step, ahead of the loop.
    choices = jax.tree.map(lambda *leaves: leaves if leaves[0].ndim > 1 else jnp.stack(leaves), *states)

    def layer_at(index: jax.Array) -> DecoderLayer:
        def choose(_: jax.Array, choice: jax.Array | tuple[jax.Array, ...]) -> jax.Array | LayerChoice:
            return LayerChoice(index, choice) if isinstance(choice, tuple) else choice[index]

        return nnx.merge(graphdef, jax.tree.map(choose, states[0], choices))

    return layer_at


def _value(param: nnx.Param | None) -> jax.Array | None:
    return None if param is None else param[...]


@dataclass(frozen=True)
class DecoderStructure:
    """A decoder without its weights: jitted steps take these as a flat tuple, which dispatches fastest.

    Attributes:
      specs: path -> declaration, in the order of the leaves.
    """

    graphdef: Any
    treedef: Any
    specs: dict[str, WeightSpec]

    @property
    def num_bytes(self) -> int:
        """Of all weights together."""
        return sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in self.specs.values())

    def merge(self, leaves: tuple[jax.Array, ...]) -> Decoder:
        """The module over these weights; leaves are in the order of `specs`."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def flatten(self, weights: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Weights by path, as `weight_specs` names them -> leaves in the order `merge` takes them."""
        return tuple(weights[path] for path in self.specs)


def decoder_structure(config: ModelConfig, dtype: Any, *, scan: bool = False) -> DecoderStructure:
    """Builds the decoder with no bytes behind it.

    Args:
      scan: roll the layers into one loop; they must all be alike. On CPUs this compiles and runs faster.
    """
    assert not scan or len(set(config.layers)) == 1, "only layers that are all alike can be scanned"
    declared: dict[str, WeightSpec] = {}

    def make(path: str, spec: WeightSpec) -> jax.ShapeDtypeStruct:
        declared[path] = spec
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype)

    graphdef, state = nnx.split(Decoder(config, dtype, make, scan=scan))
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    assert sorted(paths) == sorted(declared), "a weight's declared path differs from its place in the module"
    return DecoderStructure(graphdef, jax.tree.structure(state), {path: declared[path] for path in paths})


def weight_specs(config: ModelConfig, dtype: Any) -> dict[str, WeightSpec]:
    """Path -> declaration of every weight of the model, layer by layer, as a checkpoint has them."""
    return decoder_structure(config, dtype).specs
