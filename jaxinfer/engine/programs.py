"""The closed list of compiled programs: made from declarations alone, so that no weight need be loaded yet.

A step is two of them: a forward pass for so many packed tokens, then sampling for so many rows. Apart they are fewer
and smaller than every combination of both, and a step that samples nothing runs no head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import ModelConfig, SchedulerConfig
from jaxinfer.engine.executables import ExecutableCache, expected_compiles
from jaxinfer.engine.step_inputs import EntryShape, ForwardShape, RowShape, resolve_tokens
from jaxinfer.kv_cache.pool import COPIES_PER_CALL, copy_pages, pool_spec
from jaxinfer.models.decoder import DecoderStructure
from jaxinfer.sampling.logit_rules import RULES_AXES, SlotRules, count_tokens, rules_shapes, set_slot
from jaxinfer.sampling.sampler import SampledTokens, SamplingInputs, sample, sampled_shapes
from jaxinfer.sampling.vocabulary import Vocabulary
from pallas_kernels.dispatch import device_of
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.layout import KV
from pallas_kernels.paged_attention.reference import token_positions
from sharding.rules import ShardingRules

POOL_AXES = (None, None, "kv_heads")  # and of scales; what follows is whole


@dataclass(frozen=True)
class StagePrograms:
    """What the runner runs on the devices of one stage; shapes are in order of size.

    Attributes:
      carried: how what `forward` takes from the stage before lies on these devices.
      forward: by shape; (leaves, pool, carried, packed inputs) -> (pool, result). The pool (see `kv_cache.pool`) is
        donated. The first stage is carried the last tokens, the others hidden states [T, D]; the result is hidden
        states [T, D], or those of the rows from the last stage.
      copy: (pool, copies [COPIES_PER_CALL, 2]) -> pool.
      empty_pool: () -> pool.
    """

    carried: NamedSharding
    forward: dict[ForwardShape, jax.stages.Compiled]
    copy: jax.stages.Compiled
    empty_pool: jax.stages.Compiled


@dataclass(frozen=True)
class Programs:
    """The stages in order, and what runs on the devices of the last.

    The state of sampling is the last tokens ([max_num_seqs + 1] int32: what each slot sampled last, with a last entry
    that is nobody's) and the slots' rules (donated; see `sampling.logit_rules`).

    Attributes:
      head_leaves: the last stage's leaves -> those that `sample` takes.
      sample: by shape; (the head's leaves, hidden states, last tokens, rules, packed rows) -> (last tokens, rules,
        sampled).
      enter: (rules, packed entry) -> rules.
      empty_state: () -> (last tokens, rules).
    """

    stages: tuple[StagePrograms, ...]
    head_leaves: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
    sample: dict[RowShape, jax.stages.Compiled]
    enter: jax.stages.Compiled
    empty_state: jax.stages.Compiled
    entry_shape: EntryShape


def _sizes(most: int) -> list[int]:
    """1, 8, 32, and doubling from there up to `most`: programs are few, and no size wastes much where it matters."""
    doubling = itertools.takewhile(lambda size: size < most, (32 << i for i in itertools.count()))
    return sorted({size for size in (1, 8, *doubling, most) if size <= most})


def forward_shapes(scheduler: SchedulerConfig) -> list[ForwardShape]:
    """One for each number of packed tokens, up to the step's budget."""
    max_pages_per_seq = -(-scheduler.max_model_len // scheduler.page_size)
    return [
        ForwardShape(size, scheduler.max_num_seqs, scheduler.max_rows, max_pages_per_seq)
        for size in _sizes(scheduler.max_num_batched_tokens)
    ]


def row_shapes(scheduler: SchedulerConfig) -> list[RowShape]:
    """One for each number of rows, sampled and scored, up to the most of a step."""
    return [RowShape(size, scheduler.max_num_seqs) for size in _sizes(scheduler.max_rows)]


def make_forward(
    structure: DecoderStructure, model: ModelConfig, shape: ForwardShape, mesh: Mesh
) -> Callable[..., Any]:
    """The forward pass of one shape through one stage, as `StagePrograms` has it; each device attends with its own
    heads."""
    scale, rules, stage = model.head_dim**-0.5, structure.partition.rules, structure.stage

    def forward(leaves: tuple[jax.Array, ...], pool: KV, carried: jax.Array, packed: jax.Array) -> tuple[KV, jax.Array]:
        inputs = shape.unpack(packed)
        step = (inputs.page_table_SM, inputs.kv_lens_S, inputs.query_starts_S1, inputs.num_seqs)

        def attend(q_TNH, k_TKH, v_TKH, pool, layer, window):
            call = partial(paged_attention, scale=scale, window=window)
            if mesh.size > 1:
                heads, pages, everywhere = rules.spec((None, "heads", None)), rules.spec(POOL_AXES), PartitionSpec()
                specs = (heads, heads, heads, pages, everywhere, *(everywhere for _ in step))
                call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(pages, heads), check_vma=False)
            return call(q_TNH, k_TKH, v_TKH, pool, jnp.asarray(layer, jnp.int32), *step)

        x = resolve_tokens(inputs, carried) if stage.is_first else carried
        _, positions_T, _ = token_positions(shape.num_tokens, *step[1:])
        hidden_TD, pool = structure.merge(leaves)(x, positions_T, pool, attend)
        return pool, hidden_TD[inputs.row_tokens_R] if stage.is_last else hidden_TD

    return forward


def make_sample(head: DecoderStructure, model: ModelConfig, shape: RowShape, mesh: Mesh) -> Callable[..., Any]:
    """Sampling for one shape, as `Programs` has it; each device samples from its own part of the vocabulary."""
    partition = head.partition
    axis = partition.rules.axis("vocab")
    vocabulary = Vocabulary(model.vocab_size, partition.vocab_size // partition.rules.ways("vocab"), axis)

    def choose(
        logits_RV: jax.Array, inputs: SamplingInputs, slots_R: jax.Array, rules: SlotRules
    ) -> tuple[SlotRules, SampledTokens]:
        sampled = sample(logits_RV, inputs, rules, vocabulary)
        return count_tokens(rules, slots_R, sampled.token_R, vocabulary), sampled

    def sample_rows(
        leaves: tuple[jax.Array, ...], hidden_RD: jax.Array, last_tokens: jax.Array, rules: SlotRules, packed: jax.Array
    ) -> tuple[jax.Array, SlotRules, SampledTokens]:
        rows = shape.unpack(packed)
        logits_RV = head.merge(leaves).logits(hidden_RD[: shape.num_rows])
        call = choose
        if axis is not None:
            everywhere, state = PartitionSpec(), _rules_specs(partition.rules)
            specs = (partition.rules.spec((None, "vocab")), everywhere, everywhere, state)
            call = jax.shard_map(choose, mesh=mesh, in_specs=specs, out_specs=(state, everywhere), check_vma=False)
        rules, sampled = call(logits_RV, rows.sampling, rows.slots_R, rules)
        return last_tokens.at[rows.slots_R].set(sampled.token_R), rules, sampled

    return sample_rows


def _rules_specs(rules: ShardingRules) -> SlotRules:
    return SlotRules(*(rules.spec(axes) for axes in RULES_AXES))  # type: ignore[arg-type]


class StepSpecs(NamedTuple):
    """What the programs of one stage take and give, with shape, dtype and sharding, and no bytes behind it."""

    leaves: tuple[jax.ShapeDtypeStruct, ...]
    pool: Any  # one array, or values and scales: see `kv_cache.pool`
    last_tokens: jax.ShapeDtypeStruct
    hidden_RD: jax.ShapeDtypeStruct
    rules: SlotRules
    everywhere: NamedSharding

    def on_all(self, shape: tuple[int, ...], dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """An array that every device has."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.everywhere)

    @classmethod
    def of(
        cls, structure: DecoderStructure, model: ModelConfig, scheduler: SchedulerConfig, dtype: Any, mesh: Mesh
    ) -> StepSpecs:
        partition, stage = structure.partition, structure.stage

        def spec(shape: tuple[int, ...], dtype: Any, split: PartitionSpec) -> Any:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split))

        pages = pool_spec(
            len(stage.layers_of(model)),
            partition.num_kv_heads,
            model.head_dim,
            scheduler.num_pages,
            scheduler.page_size,
            scheduler.kv_dtype or dtype,
            device_of(mesh.devices.flat[0]),
        )
        num_slots = scheduler.max_num_seqs + 1
        splits: Any = _rules_specs(partition.rules)
        rules = zip(rules_shapes(num_slots, partition.vocab_size), splits, strict=True)
        everywhere = PartitionSpec()
        return cls(
            leaves=structure.flatten(
                {
                    path: jax.tree.map(lambda a: spec(a.shape, a.dtype, partition.rules.spec(a.axes)), weight.arrays)
                    for path, weight in structure.specs.items()
                }
            ),
            pool=jax.tree.map(lambda leaf: spec(leaf.shape, leaf.dtype, partition.rules.spec(POOL_AXES)), pages),
            last_tokens=spec((num_slots,), jnp.int32, everywhere),
            hidden_RD=spec((scheduler.max_rows, model.hidden_size), dtype, everywhere),
            rules=SlotRules(*(spec(*array, split) for array, split in rules)),
            everywhere=NamedSharding(mesh, everywhere),
        )


def compiled(
    name: str, jitted: Any, arguments: tuple[Any, ...], mesh: Mesh, executables: ExecutableCache
) -> jax.stages.Compiled:
    """A program for a mesh, from disk or compiled and stored.

    Args:
      name: all that shapes it beside its arguments and the mesh; the cache adds source, versions and device.
    """
    devices = list(mesh.devices.flat)
    key = f"{name} {arguments} {mesh.shape} {[device.id for device in devices]}"
    program = executables.load(key, devices)
    if program is None:
        # Kernels are chosen by the mesh's devices.
        with expected_compiles(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            program = jitted.lower(*arguments).compile()
        executables.store(key, program)
    return program


def load_or_compile(
    structures: Sequence[DecoderStructure],
    model: ModelConfig,
    scheduler: SchedulerConfig,
    *,
    dtype: Any,
    meshes: Sequence[Mesh],
    executables: ExecutableCache,
    threads: Executor,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Callable[[], Programs]:
    """Takes every program from disk, or compiles and stores it, on `threads`; returns what waits for them.

    Args:
      structures: of the stages, in order; `meshes` has the submesh of each.
      dtype: of activations, and of the pool where the scheduler has no other.
      progress: gets (programs done, in all), from any of the threads.
    """
    futures: list[Future[jax.stages.Compiled]] = []

    def make(
        name: str, function: Callable[..., Any], donated: tuple[int, ...], arguments: tuple[Any, ...], results: Any,
        mesh: Mesh,
    ) -> Any:  # fmt: skip
        shardings = jax.tree.map(lambda result: result.sharding, results)
        jitted = jax.jit(function, donate_argnums=donated, out_shardings=shardings)
        return compiled(f"{name} {results}", jitted, arguments, mesh, executables)

    def zeros(specs: Any) -> Callable[[], Any]:
        return lambda: jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), specs)

    def start(
        mesh: Mesh, name: str, function: Callable[..., Any], *arguments: Any, results: Any,
        donated: tuple[int, ...] = (),
    ) -> Future[jax.stages.Compiled]:  # fmt: skip
        futures.append(threads.submit(make, name, function, donated, arguments, results, mesh))
        return futures[-1]

    stages = []
    for structure, mesh in zip(structures, meshes, strict=True):
        specs = StepSpecs.of(structure, model, scheduler, dtype, mesh)
        pool, stage = specs.pool, structure.stage
        forward = {}
        for s in forward_shapes(scheduler):
            hidden_TD = specs.on_all((s.num_tokens, model.hidden_size), dtype)
            carried, result = specs.last_tokens if stage.is_first else hidden_TD, specs.hidden_RD
            forward[s] = start(
                *(mesh, f"{s} {model} {structure}", make_forward(structure, model, s, mesh)),
                *(specs.leaves, pool, carried, specs.on_all((s.size,))),
                results=(pool, result if stage.is_last else hidden_TD),
                donated=(1,),
            )
        copies = specs.on_all((COPIES_PER_CALL, 2))
        copy = start(mesh, "copy", copy_pages, pool, copies, results=pool, donated=(0,))
        empty = start(mesh, "empty pool", zeros(pool), results=pool)
        stages.append((specs.everywhere, forward, copy, empty))
    head = structure.head
    assert head is not None
    state = specs.last_tokens, specs.rules
    entry = EntryShape(structure.partition.vocab_size)
    empty_state = start(mesh, "empty state", zeros(state), results=state)
    enter = start(
        mesh,
        "enter",
        lambda rules, packed: set_slot(rules, *entry.unpack(packed)),
        *(specs.rules, specs.on_all((entry.size,))),
        results=specs.rules,
        donated=(0,),
    )
    samples = {}
    for rows in row_shapes(scheduler):
        shapes = sampled_shapes(rows.num_rows, model.vocab_size)
        sampled = jax.tree.map(lambda each: specs.on_all(each.shape, each.dtype), shapes)
        samples[rows] = start(
            *(mesh, f"{rows} {model} {head}", make_sample(head, model, rows, mesh)),
            *(structure.head_leaves(specs.leaves), specs.hidden_RD, *state, specs.on_all((rows.size,))),
            results=(*state, sampled),
            donated=(3,),
        )
    for future in futures:
        future.add_done_callback(lambda _: progress(sum(f.done() for f in futures), len(futures)))
    return lambda: Programs(
        stages=tuple(
            StagePrograms(sharding, {s: f.result() for s, f in forward.items()}, copy.result(), empty.result())
            for sharding, forward, copy, empty in stages
        ),
        head_leaves=structure.head_leaves,
        sample={rows: future.result() for rows, future in samples.items()},
        enter=enter.result(),
        empty_state=empty_state.result(),
        entry_shape=entry,
    )
