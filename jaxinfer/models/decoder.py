"""The one decoder, in Flax NNX. A `ModelConfig` describes its layers; families add no code here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import LayerSpec, ModelConfig
from jaxinfer.models.layers import WeightSpec, apply_rope, linear, rms_norm, rope_tables

# Gives the value of a declared weight: an array, or a ShapeDtypeStruct where no bytes are wanted.
type MakeWeight = Callable[[str, WeightSpec], Any]


class Attend(Protocol):
    """Attention bound to one step's page table: writes k and v of `layer` into the pool, then reads it."""

    def __call__(
        self, q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, pool: jax.Array, layer: int, window: int | None
    ) -> tuple[jax.Array, jax.Array]: ...


class DecoderLayer(nnx.Module):
    """Attention and MLP with pre-norms and residuals, as `LayerSpec` says."""

    def __init__(self, config: ModelConfig, index: int, dtype: Any, make: MakeWeight):
        D, N, K, H, F = (
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.intermediate_size,
        )
        self.config, self.index = config, index
        spec = config.layers[index]
        qkv = (("q", N * H), ("k", K * H), ("v", K * H))
        gate_up = (("gate", F), ("up", F))

        def weight(name: str, *args: Any) -> nnx.Param:
            return nnx.Param(make(f"layers.{index}.{name}", WeightSpec(*args)))

        self.attn_norm = weight("attn_norm", (D,), jnp.float32, ("model",))
        self.qkv = weight("qkv", ((N + 2 * K) * H, D), dtype, ("heads", "model"), qkv)
        self.o = weight("o", (D, N * H), dtype, ("model", "heads"))
        self.mlp_norm = weight("mlp_norm", (D,), jnp.float32, ("model",))
        self.gate_up = weight("gate_up", (2 * F, D), dtype, ("feed_forward", "model"), gate_up)
        self.down = weight("down", (D, F), dtype, ("model", "feed_forward"))
        # Absent biases are None, which holds no leaf.
        has = spec.attention_bias
        self.qkv_bias = weight("qkv_bias", ((N + 2 * K) * H,), dtype, ("heads",), qkv) if has else None
        self.o_bias = weight("o_bias", (D,), dtype, ("model",)) if spec.output_bias else None
        has = spec.mlp_bias
        self.gate_up_bias = weight("gate_up_bias", (2 * F,), dtype, ("feed_forward",), gate_up) if has else None
        self.down_bias = weight("down_bias", (D,), dtype, ("model",)) if has else None

    @property
    def spec(self) -> LayerSpec:
        return self.config.layers[self.index]

    def __call__(
        self, x_TD: jax.Array, rope: tuple[jax.Array, jax.Array], pool: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        c = self.config
        T, N, K, H = x_TD.shape[0], c.num_heads, c.num_kv_heads, c.head_dim
        y_TD = rms_norm(x_TD, self.attn_norm[...], c.rms_norm_eps)
        qkv = linear(y_TD, self.qkv[...], _value(self.qkv_bias))
        q, k, v = jnp.split(qkv, (N * H, (N + K) * H), axis=-1)
        q_TNH = apply_rope(q.reshape(T, N, H), *rope)
        k_TKH = apply_rope(k.reshape(T, K, H), *rope)
        pool, out_TNH = attend(q_TNH, k_TKH, v.reshape(T, K, H), pool, self.index, self.spec.window)
        x_TD = x_TD + linear(out_TNH.reshape(T, N * H), self.o[...], _value(self.o_bias))
        y_TD = rms_norm(x_TD, self.mlp_norm[...], c.rms_norm_eps)
        gate_TF, up_TF = jnp.split(linear(y_TD, self.gate_up[...], _value(self.gate_up_bias)), 2, axis=-1)
        x_TD = x_TD + linear(jax.nn.silu(gate_TF) * up_TF, self.down[...], _value(self.down_bias))
        return x_TD, pool


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head."""

    def __init__(self, config: ModelConfig, dtype: Any, make: MakeWeight):
        V, D = config.vocab_size, config.hidden_size
        self.config = config

        def weight(name: str, *args: Any) -> nnx.Param:
            return nnx.Param(make(name, WeightSpec(*args)))

        self.embed = weight("embed", (V, D), dtype, ("vocab", "model"))
        self.layers = nnx.List([DecoderLayer(config, i, dtype, make) for i in range(len(config.layers))])
        self.final_norm = weight("final_norm", (D,), jnp.float32, ("model",))
        self.head = None if config.tie_embeddings else weight("head", (V, D), dtype, ("vocab", "model"))

    def __call__(
        self, token_ids_T: jax.Array, positions_T: jax.Array, pool: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (hidden_TD after the last layer, pool with the tokens' keys and values written)."""
        x_TD = self.embed[...][token_ids_T]
        tables = {r: rope_tables(positions_T, r, self.config.head_dim) for r in {s.rope for s in self.config.layers}}
        for layer in self.layers:
            x_TD, pool = layer(x_TD, tables[layer.spec.rope], pool, attend)
        return x_TD, pool

    def logits(self, hidden_RD: jax.Array) -> jax.Array:
        """Logits [R, V] in float32 of hidden states that the last layer gave."""
        y_RD = rms_norm(hidden_RD, self.final_norm[...], self.config.rms_norm_eps)
        return linear(y_RD, (self.embed if self.head is None else self.head)[...], dtype=jnp.float32)


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

    def merge(self, leaves: tuple[jax.Array, ...]) -> Decoder:
        """The module over these weights; leaves are in the order of `specs`."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def flatten(self, weights: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Weights by path -> leaves in the order `merge` takes them."""
        return tuple(weights[path] for path in self.specs)


def decoder_structure(config: ModelConfig, dtype: Any) -> DecoderStructure:
    """Builds the decoder with no bytes behind it."""
    declared: dict[str, WeightSpec] = {}

    def make(path: str, spec: WeightSpec) -> jax.ShapeDtypeStruct:
        declared[path] = spec
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype)

    graphdef, state = nnx.split(Decoder(config, dtype, make))
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    assert sorted(paths) == sorted(declared), "a weight's declared path differs from its place in the module"
    return DecoderStructure(graphdef, jax.tree.structure(state), {path: declared[path] for path in paths})


def weight_specs(config: ModelConfig, dtype: Any) -> dict[str, WeightSpec]:
    """Path -> declaration of every weight of the model."""
    return decoder_structure(config, dtype).specs
