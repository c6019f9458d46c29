"""The closed list of compiled programs: made from declarations alone, so that no weight need be loaded yet.

A step is two of them: a forward pass for so many packed tokens, then sampling for so many rows. Apart they are fewer
and smaller than every combination of both, and a step that samples nothing runs no head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.config import ModelConfig, SchedulerConfig
from jaxinfer.engine.executables import ExecutableCache, expected_compiles
from jaxinfer.engine.step_inputs import EntryShape, ForwardShape, RowShape, resolve_tokens
from jaxinfer.kv_cache.pool import COPIES_PER_CALL, copy_pages, pool_spec
from jaxinfer.models.decoder import DecoderStructure
from jaxinfer.sampling.logit_rules import SlotRules, count_tokens, rules_shapes, set_slot
from jaxinfer.sampling.sampler import SampledTokens, sample
from pallas_kernels.dispatch import device_of
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.reference import token_positions
from sharding.rules import partition_spec

POOL_SPLIT = partition_spec((None, None, "kv_heads", None, None))


@dataclass(frozen=True)
class Programs:
    """What the runner runs; shapes are in order of size.

    The device state they pass on is the pool (donated; see `kv_cache.pool`), the last tokens ([max_num_seqs + 1]
    int32: what each slot sampled last, with a last entry that is nobody's) and the slots' rules (donated; see
    `sampling.logit_rules`).

    Attributes:
      forward: by shape; (leaves, pool, last tokens, packed inputs) -> (pool, hidden states of the rows).
      sample: by shape; (leaves, hidden states, last tokens, rules, packed rows) -> (last tokens, rules, sampled).
      enter: (rules, packed entry) -> rules.
      copy: (pool, copies [COPIES_PER_CALL, 2]) -> pool.
      empty_state: () -> (pool, last tokens, rules).
    """

    forward: dict[ForwardShape, jax.stages.Compiled]
    sample: dict[RowShape, jax.stages.Compiled]
    enter: jax.stages.Compiled
    copy: jax.stages.Compiled
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
    structure: DecoderStructure, model: ModelConfig, shape: ForwardShape, mesh: Mesh | None = None
) -> Callable[..., Any]:
    """The forward pass of one shape, as `Programs` has it.

    Args:
      mesh: where its `tensor` axis is larger than 1, each device attends with its own heads.
    """
    scale = model.head_dim**-0.5

    def forward(
        leaves: tuple[jax.Array, ...], pool: jax.Array, last_tokens: jax.Array, packed: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        inputs = shape.unpack(packed)
        step = (inputs.page_table_SM, inputs.kv_lens_S, inputs.query_starts_S1, inputs.num_seqs)

        def attend(q_TNH, k_TKH, v_TKH, pool, layer, window):
            call = partial(paged_attention, scale=scale, window=window)
            if mesh is not None and mesh.shape["tensor"] > 1:
                heads, everywhere = partition_spec((None, "heads", None)), PartitionSpec()
                specs = (heads, heads, heads, POOL_SPLIT, everywhere, *(everywhere for _ in step))
                call = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(POOL_SPLIT, heads), check_vma=False)
            return call(q_TNH, k_TKH, v_TKH, pool, jnp.asarray(layer, jnp.int32), *step)

        token_ids_T = resolve_tokens(inputs, last_tokens)
        _, positions_T, _ = token_positions(shape.num_tokens, *step[1:])
        hidden_TD, pool = structure.merge(leaves)(token_ids_T, positions_T, pool, attend)
        return pool, hidden_TD[inputs.row_tokens_R]

    return forward


def make_sample(structure: DecoderStructure, shape: RowShape) -> Callable[..., Any]:
    """Sampling for one shape, as `Programs` has it."""

    def sample_rows(
        leaves: tuple[jax.Array, ...], hidden_RD: jax.Array, last_tokens: jax.Array, rules: SlotRules, packed: jax.Array
    ) -> tuple[jax.Array, SlotRules, SampledTokens]:
        rows = shape.unpack(packed)
        logits_RV = structure.merge(leaves).logits(hidden_RD[: shape.num_rows])
        sampled = sample(logits_RV, rows.sampling, rules)
        rules = count_tokens(rules, rows.slots_R, sampled.token_R)
        return last_tokens.at[rows.slots_R].set(sampled.token_R), rules, sampled

    return sample_rows


def load_or_compile(
    structure: DecoderStructure,
    model: ModelConfig,
    scheduler: SchedulerConfig,
    *,
    dtype: Any,
    mesh: Mesh,
    executables: ExecutableCache,
    threads: Executor,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Callable[[], Programs]:
    """Takes every program from disk, or compiles and stores it, on `threads`; returns what waits for them.

    Args:
      dtype: of activations and of the pool.
      mesh: whose devices hold a copy of weights, pool and the small state each.
      progress: gets (programs done, in all), from any of the threads.
    """

    sharding = NamedSharding(mesh, PartitionSpec())

    def spec(shape: tuple[int, ...], dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)  # type: ignore[no-untyped-call]

    leaves = tuple(spec(weight.shape, weight.dtype) for weight in structure.specs.values())
    pool = spec(
        pool_spec(model, scheduler.num_pages, scheduler.page_size, dtype, device_of(mesh.devices.flat[0])).shape, dtype
    )
    last_tokens = spec((scheduler.max_num_seqs + 1,))
    hidden = spec((scheduler.max_rows, model.hidden_size), dtype)
    rules = SlotRules(*(spec(*each) for each in rules_shapes(scheduler.max_num_seqs + 1, model.vocab_size)))
    entry = EntryShape(model.vocab_size)

    def enter(rules: SlotRules, packed: jax.Array) -> SlotRules:
        return set_slot(rules, *entry.unpack(packed))

    def empty_state() -> tuple[jax.Array, jax.Array, SlotRules]:
        return jax.tree.map(lambda each: jnp.zeros(each.shape, each.dtype), (pool, last_tokens, rules))

    # The key holds all that shapes the program; the cache adds source, versions and device.
    common = f"{model} {pool} {last_tokens} {rules} {leaves}"
    futures: list[Future[jax.stages.Compiled]] = []

    def make(name: str, function: Callable[..., Any], donated: tuple[int, ...], specs: tuple[Any, ...]) -> Any:
        key = f"{name} {common}"
        compiled = executables.load(key)
        if compiled is None:
            # Kernels are chosen by the mesh's devices.
            with expected_compiles(), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                compiled = jax.jit(function, donate_argnums=donated, out_shardings=sharding).lower(*specs).compile()
            executables.store(key, compiled)
        return compiled

    def start(
        name: str, function: Callable[..., Any], *specs: Any, donated: tuple[int, ...] = ()
    ) -> Future[jax.stages.Compiled]:
        futures.append(threads.submit(make, name, function, donated, specs))
        return futures[-1]

    empty = start("empty", empty_state)
    entering = start("enter", enter, rules, spec((entry.size,)), donated=(0,))
    copy = start("copy", copy_pages, pool, spec((COPIES_PER_CALL, 2)), donated=(0,))
    forward = {
        s: start(f"{s}", make_forward(structure, model, s), leaves, pool, last_tokens, spec((s.size,)), donated=(1,))
        for s in forward_shapes(scheduler)
    }
    samples = {
        s: start(f"{s}", make_sample(structure, s), leaves, hidden, last_tokens, rules, spec((s.size,)), donated=(3,))
        for s in row_shapes(scheduler)
    }
    for future in futures:
        future.add_done_callback(lambda _: progress(sum(f.done() for f in futures), len(futures)))
    return lambda: Programs(
        {shape: future.result() for shape, future in forward.items()},
        {shape: future.result() for shape, future in samples.items()},
        entering.result(),
        copy.result(),
        empty.result(),
        entry,
    )
