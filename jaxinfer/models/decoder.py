"""The one decoder, in Flax NNX. A `ModelConfig` describes its layers; families add no code here."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec

from jaxinfer.config import LayerSpec, ModelConfig
from jaxinfer.models.layers import (
    LayerChoice,
    Part,
    Weight,
    WeightSpec,
    apply_rope,
    linear,
    rms_norm,
    rope_tables,
    take_rows,
)
from jaxinfer.models.partition import Partition
from jaxinfer.quantization.tensor import Scheme, nbytes
from pallas_kernels.dispatch import Device
from pallas_kernels.paged_attention.layout import KV
from pallas_kernels.quantized_matmul import stores_floats
from sharding.rules import MeshError, ShardingRules

RESIDUAL = ("activation_tokens", "activation_model")  # logical axes of the residual stream
MANY_ROWS = 32  # from here on the head's matmul gains nothing from another order of operands on CPUs

# Gives the value of a declared weight: arrays, or ShapeDtypeStructs where no bytes are wanted.
type MakeWeight = Callable[[str, WeightSpec], Any]
# Of quantized matrices: path, or path and part of a fused one, as "layers.0.qkv.q" -> scheme.
type Schemes = Mapping[str, Scheme]


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

    @property
    def head(self) -> Stage:
        """What follows the last layer alone: the final norm and the head."""
        return Stage(self.num_layers, self.num_layers, self.num_layers)

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
        pool: KV,
        layer: int | jax.Array,
        window: int | None,
    ) -> tuple[KV, jax.Array]: ...


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
        qkv_rows, padded = (N + 2 * p.num_kv_heads) * H, p.intermediate_size
        gate_up = Part("gate", F, padded=padded), Part("up", F, padded=padded)
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
        pool: KV,
        attend: Attend,
        index: int | jax.Array,
    ) -> tuple[jax.Array, KV]:
        c, rules = self.config, self.partition.rules
        T, N, K, H = x_TD.shape[0], c.num_heads, self.partition.num_kv_heads, c.head_dim
        y_TD = rms_norm(x_TD, self.attn_norm[...], c.rms_norm_eps)
        qkv = self._linear(y_TD, self.qkv, self.qkv_bias, ("heads", "model"))
        q, k, v = _split(qkv, rules.ways("heads"), (N * H, K * H, K * H))
        q_TNH = apply_rope(q.reshape(T, N, H), *rope)
        k_TKH = apply_rope(k.reshape(T, K, H), *rope)
        pool, out_TNH = attend(q_TNH, k_TKH, v.reshape(T, K, H), pool, index, self.spec.window)
        out_TD = self._linear(out_TNH.reshape(T, N * H), self.o, self.o_bias, ("model", "heads"))
        x_TD = constrain(x_TD + out_TD, rules, RESIDUAL)
        y_TD = rms_norm(x_TD, self.mlp_norm[...], c.rms_norm_eps)
        gate_up = self._linear(y_TD, self.gate_up, self.gate_up_bias, ("feed_forward", "model"))
        F = self.partition.intermediate_size
        gate_TF, up_TF = _split(gate_up, rules.ways("feed_forward"), (F, F))
        out_TD = self._linear(jax.nn.silu(gate_TF) * up_TF, self.down, self.down_bias, ("model", "feed_forward"))
        return constrain(x_TD + out_TD, rules, RESIDUAL), pool

    def _linear(self, x_TI: jax.Array, w: nnx.Param, bias: nnx.Param | None, axes: tuple[str, str]) -> jax.Array:
        out, into = map(self.partition.rules.axis, axes)
        return linear(x_TI, w.get_value(), None if bias is None else bias[...], split=(out, into))


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
        schemes: Schemes,
        scan: bool = False,
    ):
        V, D = config.vocab_size, config.hidden_size
        self.config, self.partition, self.stage, self.scan = config, partition, stage, scan
        self.dtype = dtype

        def declare(prefix: str, name: str, *spec: Any, **options: Any) -> nnx.Param:
            path = prefix + name
            return nnx.Param(
                make(path, _quantized(WeightSpec(*spec, **options), stage.model_path(path), schemes, partition))
            )

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

    def __call__(self, x: jax.Array, positions_T: jax.Array, pool: KV, attend: Attend) -> tuple[jax.Array, KV]:
        """Returns (hidden_TD after the last layer, pool with the tokens' keys and values written).

        Args:
          x: token ids [T] for the first stage, hidden states [T, D] of the stage before for the others.
          pool: of this stage's layers.
        """
        x_TD = x
        if self.stage.is_first and self.embed is not None:
            x_TD = take_rows(self.embed.get_value(), x, self.dtype)[:, : self.config.hidden_size]
        x_TD = constrain(x_TD, self.partition.rules, RESIDUAL)
        specs = self.stage.layers_of(self.config)
        tables = {r: rope_tables(positions_T, r, self.config.head_dim) for r in {s.rope for s in specs}}
        if self.scan:
            layer_at = _one_layer(self.layers)

            def body(index: jax.Array, carry: tuple[jax.Array, KV]) -> tuple[jax.Array, KV]:
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
        split = self.partition.rules.axis("vocab"), self.partition.rules.axis("model")
        weight_first = self.scan and len(y_RD) < MANY_ROWS
        return linear(y_RD, head.get_value(), dtype=jnp.float32, weight_first=weight_first, split=split)


def _one_layer(layers: nnx.List) -> Callable[[jax.Array], DecoderLayer]:
    """Index -> the layer of that index, where the index is traced; all layers must be alike."""
    graphdef, _ = nnx.split(layers[0])
    by_layer = [nnx.to_flat_state(nnx.state(layer)) for layer in layers]
    choices: list[tuple[Any, nnx.Param, jax.Array | tuple[Weight, ...]]] = []
    for params in zip(*by_layer, strict=True):
        values = tuple(param.get_value() for _, param in params)
        # Vectors are small: stacked once a step, ahead of the loop.
        is_vector = isinstance(values[0], jax.Array) and values[0].ndim == 1
        choices.append((*params[0], jnp.stack(values) if is_vector else values))

    def layer_at(index: jax.Array) -> DecoderLayer:
        chosen = [
            (path, param.replace(LayerChoice(index, choice) if isinstance(choice, tuple) else choice[index]))
            for path, param, choice in choices
        ]
        return nnx.merge(graphdef, nnx.from_flat_state(chosen))

    return layer_at


def _quantized(spec: WeightSpec, path: str, schemes: Schemes, partition: Partition) -> WeightSpec:
    """The declaration with its schemes, in groups that every shard has whole.

    Raises:
      MeshError: no groups are whole in a shard.
    """
    found = [schemes.get(key) for key in spec.keys(path)]
    if not any(found):
        return spec
    inputs, ways = spec.shape[1], partition.rules.ways(spec.axes[1])
    try:
        return replace(spec, schemes=tuple(each and each.within(inputs, ways) for each in found))
    except ValueError as error:
        raise MeshError(f"{partition.rules.axis(spec.axes[1])}={ways}: {path}: {error}") from error


@dataclass(frozen=True)
class DecoderStructure:
    """A decoder, or a stage of one, without its weights: jitted steps take these as a flat tuple, which dispatches
    fastest.

    Attributes:
      specs: path in the model -> declaration, in the order of the leaves.
      head: of the last stage, its `Stage.head` by itself; else None.
    """

    graphdef: Any
    treedef: Any
    specs: dict[str, WeightSpec]
    partition: Partition
    stage: Stage
    head: DecoderStructure | None

    @property
    def num_bytes(self) -> int:
        """Of all weights together."""
        return sum(spec.nbytes for spec in self.specs.values())

    def bytes_per_device(self) -> int:
        """Of the weights that one device of the mesh holds."""
        return sum(map(self.weight_bytes_per_device, self.specs))

    def weight_bytes_per_device(self, path: str) -> int:
        """Of one weight."""
        ways = lambda array: math.prod(map(self.partition.rules.ways, array.axes))
        return sum(array.nbytes // ways(array) for array in jax.tree.leaves(self.specs[path].arrays))

    def dequantized(self, device: Device, rows: int, dtype: Any) -> tuple[int, str]:
        """Bytes, on a device, of the largest matrix that a step of so many rows writes out in floats first, and why it
        does; 0 where none is."""
        largest, why = 0, ""
        for piece in (piece for spec in self.specs.values() for piece in spec.pieces):
            if piece.scheme is None:
                continue
            outputs, inputs = map(operator.floordiv, piece.shape, map(self.partition.rules.ways, piece.axes))
            shard = piece.scheme.arrays(outputs, inputs, (None, None))
            reason = stores_floats(device, rows, dtype, shard.weight)
            if reason and (size := nbytes((outputs, inputs), dtype)) > largest:
                largest, why = size, reason
        return largest, why

    def merge(self, leaves: tuple[jax.Array, ...]) -> Decoder:
        """The module over these weights; leaves are in the order of `specs`."""
        return nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))

    def head_leaves(self, leaves: tuple[Any, ...]) -> tuple[Any, ...]:
        """Of the last stage's leaves, those of `head`, in its order."""
        assert self.head is not None, "only the last stage has a head"
        return self.head.flatten(self.unflatten(leaves))

    def unflatten(self, leaves: tuple[Any, ...]) -> dict[str, Any]:
        """What `flatten` was given."""
        left = iter(leaves)
        return {path: jax.tree.map(lambda _: next(left), spec.arrays) for path, spec in self.specs.items()}

    def flatten(self, weights: Mapping[str, Any]) -> tuple[Any, ...]:
        """Weights by path -> leaves in the order `merge` takes them."""
        return tuple(leaf for path in self.specs for leaf in jax.tree.leaves(weights[path]))


def decoder_structure(
    config: ModelConfig,
    dtype: Any,
    partition: Partition | None = None,
    stage: Stage | None = None,
    *,
    schemes: Schemes | None = None,
    scan: bool = False,
) -> DecoderStructure:
    """Builds the decoder with no bytes behind it.

    Args:
      partition: how it lies on a mesh; by default on one device.
      stage: which of its layers; by default all.
      schemes: of the matrices that are quantized.
      scan: roll the layers into one loop; they must all be alike. On CPUs this compiles and runs faster.
    """
    partition = partition or Partition.of(config)
    stage = stage or Stage(0, len(config.layers), len(config.layers))
    assert not scan or len(set(stage.layers_of(config))) <= 1, "only layers that are all alike can be scanned"
    declared: dict[str, WeightSpec] = {}

    def make(path: str, spec: WeightSpec) -> Any:
        declared[path] = spec
        return jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), spec.arrays)

    graphdef, state = nnx.split(Decoder(config, dtype, make, partition, stage, schemes=schemes or {}, scan=scan))
    paths = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]
    assert sorted(paths) == sorted(declared), "a weight's declared path differs from its place in the module"
    specs = {stage.model_path(path): declared[path] for path in paths}
    head = None
    if stage.is_last and stage != stage.head:
        head = decoder_structure(config, dtype, partition, stage.head, schemes=schemes, scan=scan)
    return DecoderStructure(graphdef, jax.tree.structure(state), specs, partition, stage, head)


def matrices(config: ModelConfig, dtype: Any) -> dict[str, tuple[int, int]]:
    """Shape [out, in] of each matrix, or of each part of a fused one, by the name that `Schemes` has for it."""
    found: dict[str, tuple[int, int]] = {}
    for path, spec in decoder_structure(config, dtype).specs.items():
        if len(spec.shape) == 2:
            rows = [part.rows for part in spec.parts] or [spec.shape[0]]
            found |= {key: (count, spec.shape[1]) for key, count in zip(spec.keys(path), rows, strict=True)}
    return found
