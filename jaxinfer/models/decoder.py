"""The one decoder, in Flax NNX. A `ModelConfig` describes its layers; families add no code here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.config import LayerSpec, ModelConfig
from jaxinfer.models.layers import LayerChoice, Part, WeightSpec, apply_rope, linear, rms_norm, rope_tables
from jaxinfer.models.partition import Partition
from sharding.rules import MeshError, ShardingRules

RESIDUAL = ("activation_tokens", "activation_model")  # logical axes of the residual stream
MANY_ROWS = 32  # from here on the head's matmul gains nothing from another order of operands on CPUs

# Gives the value of a declared weight: an array, or a ShapeDtypeStruct where no bytes are wanted.
type MakeWeight = Callable[[str, WeightSpec], Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of a model's layers, on devices of its own: `first_layer` up to, not including, `end_layer`."""

    first_layer: int
    end_layer: int
    num_layers: int

    @classmethod
    def split(cls, num_layers: int, ways: int, head_layers: int = 0) -> list[Stage]:
        """All layers in as many stages, so that the one with most to do has least.

        Args:
          head_layers: what the head takes, in layers; it is the last stage's.

        Raises:
          MeshError: more stages than layers.
        """
        if ways > num_layers:
            raise MeshError(f"stage={ways}: the model has {num_layers} layers, and a stage needs one at least")
        if ways == 1:
            return [cls(0, num_layers, num_layers)]

        def most(last: int) -> tuple[int, int]:
            return max(-(-(num_layers - last) // (ways - 1)), last + head_layers), -last

        before = num_layers - min(range(1, num_layers - ways + 2), key=most)
        ends = [*(before * (number + 1) // (ways - 1) for number in range(ways - 1)), num_layers]
        return [cls(first, end, num_layers) for first, end in zip([0, *ends], ends, strict=False)]

    @property
    def is_first(self) -> bool:
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        return self.end_layer == self.num_layers

    def layers_of(self, config: ModelConfig) -> tuple[LayerSpec, ...]:
        return config.layers[self.first_layer : self.end_layer]

    def model_path(self, path: str) -> str:
        """A weight's path in the whole model, of its path in the stage."""
        kind, number, *rest = path.split(".") if path.startswith("layers.") else ("", "0")
        return path if not rest else ".".join((kind, str(int(number) + self.first_layer), *rest))


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


def constrain(x: jax.Array, rules: ShardingRules, axes: Sequence[str]) -> jax.Array:
    """Holds an activation to the rules, so that the compiler's choices cannot spread; whole where it cannot divide."""
    if all(size == 1 for _, size in rules.sizes):
        return x
    spec = PartitionSpec(*(
        axis if size % rules.ways(logical) == 0 else None
        for size, logical, axis in zip(x.shape, axes, rules.spec(axes), strict=True)
    ))  # fmt: skip
    return lax.with_sharding_constraint(x, spec)


class DecoderLayer(nnx.Module):
    """Attention and MLP with pre-norms and residuals, as its `LayerSpec` says. `declare(name, ...)` gives a weight."""

    def __init__(
        self,
        config: ModelConfig,
        partition: Partition,
        spec: LayerSpec,
        dtype: Any,
        declare: Callable[..., nnx.Param],
    ):
        c, p = config, partition
        self.config, self.partition, self.spec = c, p, spec
        D, N, K, H, F = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_dim, c.intermediate_size
        heads, feed_forward = p.rules.ways("heads"), p.rules.ways("feed_forward")

        def matrix(name: str, rows: int, columns: int, axes: tuple[str, str], **options: Any) -> nnx.Param:
            return declare(name, (rows, columns), dtype, axes, **options)

        qkv = Part("q", N * H), Part("k", K * H, p.kv_copies), Part("v", K * H, p.kv_copies)
        gate_up = Part("gate", F), Part("up", F)
        qkv_rows, padded = (N + 2 * p.num_kv_heads) * H, p.intermediate_size
        self.attn_norm = declare("attn_norm", (D,), jnp.float32, ("model",))
        self.qkv = matrix("qkv", qkv_rows, D, ("heads", "model"), parts=qkv, ways=heads, unpadded=((N + 2 * K) * H, D))
        self.o = matrix("o", D, N * H, ("model", "heads"))
        self.mlp_norm = declare("mlp_norm", (D,), jnp.float32, ("model",))
        self.gate_up = matrix(
            "gate_up", 2 * padded, D, ("feed_forward", "model"), parts=gate_up, ways=feed_forward, unpadded=(2 * F, D)
        )
        self.down = matrix("down", D, padded, ("model", "feed_forward"), unpadded=(D, F))

        def bias(has: bool, name: str, rows: int, axis: str, **options: Any) -> nnx.Param | None:
            """None, which holds no leaf, where there is none."""
            return declare(name, (rows,), dtype, (axis,), **options) if has else None

        options = {"parts": qkv, "ways": heads, "unpadded": ((N + 2 * K) * H,)}
        self.qkv_bias = bias(spec.attention_bias, "qkv_bias", qkv_rows, "heads", **options)
        self.o_bias = bias(spec.output_bias, "o_bias", D, "model")
        options = {"parts": gate_up, "ways": feed_forward, "unpadded": (2 * F,)}
        self.gate_up_bias = bias(spec.mlp_bias, "gate_up_bias", 2 * padded, "feed_forward", **options)
        self.down_bias = bias(spec.mlp_bias, "down_bias", D, "model")

    def __call__(
        self,
        x_TD: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        pool: jax.Array,
        attend: Attend,
        index: int | jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        c, rules = self.config, self.partition.rules
        T, N, K, H = x_TD.shape[0], c.num_heads, self.partition.num_kv_heads, c.head_dim
        y_TD = rms_norm(x_TD, self.attn_norm[...], c.rms_norm_eps)
        qkv = linear(y_TD, self.qkv.get_value(), _value(self.qkv_bias))
        q, k, v = _split(qkv, rules.ways("heads"), (N * H, K * H, K * H))
        q_TNH = apply_rope(q.reshape(T, N, H), *rope)
        k_TKH = apply_rope(k.reshape(T, K, H), *rope)
        pool, out_TNH = attend(q_TNH, k_TKH, v.reshape(T, K, H), pool, index, self.spec.window)
        out_TD = linear(out_TNH.reshape(T, N * H), self.o.get_value(), _value(self.o_bias))
        x_TD = constrain(x_TD + out_TD, rules, RESIDUAL)
        y_TD = rms_norm(x_TD, self.mlp_norm[...], c.rms_norm_eps)
        gate_up = linear(y_TD, self.gate_up.get_value(), _value(self.gate_up_bias))
        F = self.partition.intermediate_size
        gate_TF, up_TF = _split(gate_up, rules.ways("feed_forward"), (F, F))
        out_TD = linear(jax.nn.silu(gate_TF) * up_TF, self.down.get_value(), _value(self.down_bias))
        return constrain(x_TD + out_TD, rules, RESIDUAL), pool


def _split(y_TO: jax.Array, ways: int, sizes: tuple[int, ...]) -> list[jax.Array]:
    """The parts of a fused projection's output; each of the `ways` blocks has its share of every one."""
    T = y_TO.shape[0]
    ends = np.cumsum(sizes)[:-1] // ways
    return [part.reshape(T, -1) for part in jnp.split(y_TO.reshape(T, ways, -1), ends, axis=-1)]


class Decoder(nnx.Module):
    """Embedding, layers, final norm and head, or a stage of them. Layers are unrolled, or run as one loop (`scan`)."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: Any,
        make: MakeWeight,
        partition: Partition,
        stage: Stage,
        *,
        scan: bool = False,
    ):
        V, D = config.vocab_size, config.hidden_size
        self.config, self.partition, self.stage, self.scan = config, partition, stage, scan

        def declare(prefix: str, name: str, *spec: Any, **options: Any) -> nnx.Param:
            return nnx.Param(make(prefix + name, WeightSpec(*spec, **options)))

        def vocabulary(name: str) -> nnx.Param:
            return declare("", name, (partition.vocab_size, D), dtype, ("vocab", "model"), unpadded=(V, D))

        tied = config.tie_embeddings
        self.embed = vocabulary("embed") if stage.is_first or (stage.is_last and tied) else None
        self.layers = nnx.List(
            [
                DecoderLayer(config, partition, spec, dtype, partial(declare, f"layers.{i}."))
                for i, spec in enumerate(stage.layers_of(config))
            ]
        )
        self.final_norm = declare("", "final_norm", (D,), jnp.float32, ("model",)) if stage.is_last else None
        self.head = vocabulary("head") if stage.is_last and not tied else None

    def __call__(
        self, x: jax.Array, positions_T: jax.Array, pool: jax.Array, attend: Attend
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (hidden_TD after the last layer, pool with the tokens' keys and values written).

        Args:
          x: token ids [T] for the first stage, hidden states [T, D] of the stage before for the others.
          pool: of this stage's layers.
        """
        x_TD = self.embed[...][x] if self.stage.is_first and self.embed is not None else x
        x_TD = constrain(x_TD, self.partition.rules, RESIDUAL)
        specs = self.stage.layers_of(self.config)
        tables = {r: rope_tables(positions_T, r, self.config.head_dim) for r in {s.rope for s in specs}}
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
        """Logits [R, V] in float32 of hidden states that the last layer gave; V as the partition pads it."""
        head = self.embed if self.head is None else self.head
        assert self.final_norm is not None, "only the last stage has logits"
        assert head is not None
        y_RD = rms_norm(hidden_RD, self.final_norm[...], self.config.rms_norm_eps)
        head_VD = head[...]
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
    """A decoder, or a stage of one, without its weights: jitted steps take these as a flat tuple, which dispatches
    fastest.

    Attributes:
      specs: path in the model -> declaration, in the order of the leaves.
    """

    graphdef: Any
    treedef: Any
    specs: dict[str, WeightSpec]
    partition: Partition
    stage: Stage

    @property
    def num_bytes(self) -> int:
        """Of all weights together."""
        return sum(math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in self.specs.values())

    def bytes_per_device(self) -> int:
        """Of the weights that one device of the mesh holds."""
        rules = self.partition.rules
        ways = lambda spec: math.prod(rules.ways(axis) for axis in spec.axes)
        return sum(math.prod(w.shape) * np.dtype(w.dtype).itemsize // ways(w) for w in self.specs.values())

    def merge(self, leaves: tuple[jax.Array, ...]) -> Decoder:
        """The module over these weights; leaves are in the order of `specs`."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def flatten(self, weights: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
        """Weights by path -> leaves in the order `merge` takes them."""
        return tuple(weights[path] for path in self.specs)


def decoder_structure(
    config: ModelConfig,
    dtype: Any,
    partition: Partition | None = None,
    stage: Stage | None = None,
    *,
    scan: bool = False,
) -> DecoderStructure:
    """Builds the decoder with no bytes behind it.

    Args:
      partition: how it lies on a mesh; by default on one device.
      stage: which of its layers; by default all.
      scan: roll the layers into one loop; they must all be alike. On CPUs this compiles and runs faster.
    """
    partition = partition or Partition.of(config)
    stage = stage or Stage(0, len(config.layers), len(config.layers))
    assert not scan or len(set(stage.layers_of(config))) == 1, "only layers that are all alike can be scanned"
    declared: dict[str, WeightSpec] = {}

    def make(path: str, spec: WeightSpec) -> jax.ShapeDtypeStruct:
        declared[path] = spec
        return jax.ShapeDtypeStruct(spec.shape, spec.dtype)

    graphdef, state = nnx.split(Decoder(config, dtype, make, partition, stage, scan=scan))
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    assert sorted(paths) == sorted(declared), "a weight's declared path differs from its place in the module"
    specs = {stage.model_path(path): declared[path] for path in paths}
    return DecoderStructure(graphdef, jax.tree.structure(state), specs, partition, stage)
