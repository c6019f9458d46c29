"""Runs plans through the compiled programs, over device state that never leaves the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.engine.executables import stray_compile_count
from jaxinfer.engine.micro_batches import merge_tokens, split_plan
from jaxinfer.engine.programs import Programs
from jaxinfer.engine.step_inputs import ForwardShape, RowShape
from jaxinfer.errors import NotCompiledError
from jaxinfer.kv_cache.pool import COPIES_PER_CALL
from jaxinfer.sampling.logit_rules import SlotRules
from jaxinfer.sampling.sampler import SampledTokens
from jaxinfer.types import MAX_BAD_WORD_TOKENS, SlotEntry, StepPlan, StepTokens
from pallas_kernels.dispatch import KernelError
from pallas_kernels.paged_attention.api import check_step
from pallas_kernels.paged_attention.layout import KV, values_of


class MicroFlight(NamedTuple):
    """A micro-batch under way.

    Attributes:
      which: the sequences of the plan that are in it.
      result: what its last forward program gave.
      sampled: None if it samples none.
    """

    plan: StepPlan
    which: np.ndarray
    result: jax.Array
    sampled: SampledTokens | None


class Flight(NamedTuple):
    """A step that has been dispatched, in one or several micro-batches; its outputs may still be on their way."""

    plan: StepPlan
    micro: tuple[MicroFlight, ...]


class StepBuffers(NamedTuple):
    """The packed inputs of a micro-batch and the shapes they are for; `rows` is None where nothing is sampled."""

    forward: tuple[ForwardShape, np.ndarray]
    rows: tuple[RowShape, np.ndarray] | None


class Runner:
    """Owns weights and device state; runs plans in the order given. Used by one thread.

    With several stages a step is split into micro-batches, so that a stage works on one while the next works on the one
    before; dispatch waits for none of them.

    Args:
      micro_batches: of a step; None is as many as there are stages.
      leaves: of each stage its weights, in the order of `DecoderStructure.specs`, on their devices.

    Attributes:
      recorded: where the inputs of steps are kept, when it is a list.
    """

    def __init__(self, programs: Programs, leaves: Sequence[tuple[jax.Array, ...]], micro_batches: int | None = None):
        self._programs, self.leaves = programs, tuple(leaves)
        self._head_leaves = programs.head_leaves(self.leaves[-1])
        self._micro_batches = len(programs.stages) if micro_batches is None else micro_batches
        self.pools: list[KV]
        self._last_tokens: jax.Array
        self._rules: SlotRules
        self._compiles_at_warm_up: int | None = None
        self.recorded: list[StepBuffers] | None = None

    @property
    def num_stages(self) -> int:
        return len(self._programs.stages)

    @property
    def arrays(self) -> list[jax.Array]:
        """All that it keeps on its devices."""
        return jax.tree.leaves((self.leaves, self.pools, self._last_tokens, self._rules))

    @property
    def compiles_after_warm_up(self) -> int:
        """Compilations since warm-up ended: anything but 0 is a bug."""
        return 0 if self._compiles_at_warm_up is None else stray_compile_count() - self._compiles_at_warm_up

    def warm_up(self) -> None:
        """Runs each program once: the first run allocates, and no request should pay for it."""
        self.reset()
        rows = [(shape, shape.pack(None)) for shape in self._programs.sample]
        for number, shape in enumerate(self._programs.stages[0].forward):
            self._run(StepBuffers((shape, np.zeros(shape.size, np.int32)), rows[min(number, len(rows) - 1)]))
        self._copy_pages(np.zeros((1, 2), np.int32))
        nothing = np.zeros(0, np.int32)
        no_words = np.zeros((0, MAX_BAD_WORD_TOKENS), np.int32)
        self._enter(SlotEntry(0, nothing, nothing, nothing, nothing, nothing, None, no_words))
        jax.block_until_ready((self.pools, self._last_tokens))
        self._compiles_at_warm_up = stray_compile_count()

    def reset(self) -> None:
        """A new, empty state; all pages lose their content."""
        self.pools = [stage.empty_pool() for stage in self._programs.stages]
        self._last_tokens, self._rules = self._programs.empty_state()

    def dispatch(self, plan: StepPlan) -> Flight:
        """Starts the step and returns at once.

        Raises:
          NotCompiledError: no program holds as many tokens (counted as an engine bug).
          KernelError: lengths do not fit each other, or a page is none of the pool's: kernels would go there.
        """
        pool_shape = values_of(self.pools[0]).shape
        ends = np.cumsum([0, *plan.query_lens])
        kv_lens = plan.starts + plan.query_lens
        check_step(plan.page_table, kv_lens, ends, plan.num_seqs, pool_shape=pool_shape, num_tokens=plan.num_tokens)
        if len(plan.page_copies) and not 0 <= plan.page_copies.min() <= plan.page_copies.max() < pool_shape[1]:
            raise KernelError(f"page copies {plan.page_copies.tolist()}; page ids go from 0 to {pool_shape[1] - 1}")
        micro = [(part, which, self._buffers(part)) for part, which in split_plan(plan, self._micro_batches)]
        if len(plan.page_copies):
            self._copy_pages(plan.page_copies)
        for entry in plan.entries:
            self._enter(entry)
        if self.recorded is not None:
            self.recorded += [buffers for _, _, buffers in micro]
        return Flight(plan, tuple(MicroFlight(part, which, *self._run(buffers)) for part, which, buffers in micro))

    def _buffers(self, plan: StepPlan) -> StepBuffers:
        shape = next((shape for shape in self._programs.stages[0].forward if shape.fits(plan)), None)
        num_rows = plan.num_rows
        row_shape = next((shape for shape in self._programs.sample if shape.num_rows >= num_rows), None)
        if shape is None or row_shape is None:
            raise NotCompiledError(
                f"no program holds a step of {plan.num_tokens} tokens of {plan.num_seqs} sequences, {num_rows} rows"
            )
        return StepBuffers((shape, shape.pack(plan)), (row_shape, row_shape.pack(plan)) if num_rows else None)

    def _run(self, buffers: StepBuffers, stages: list[float] | None = None) -> tuple[jax.Array, SampledTokens | None]:
        """Through all stages and the sampling. Where `stages` is given it waits for each and adds its seconds there."""
        shape, packed = buffers.forward
        carried = self._last_tokens
        for number, (stage, leaves) in enumerate(zip(self._programs.stages, self.leaves, strict=True)):
            if self.num_stages > 1:
                carried = jax.device_put(carried, stage.carried)
            begun = time.perf_counter()
            self.pools[number], carried = stage.forward[shape](leaves, self.pools[number], carried, packed)
            if stages is not None:
                jax.block_until_ready(carried)
                stages[number] += time.perf_counter() - begun
        if buffers.rows is None:
            return carried, None
        row_shape, packed_rows = buffers.rows
        sample = self._programs.sample[row_shape]
        begun = time.perf_counter()
        self._last_tokens, self._rules, sampled = sample(
            self._head_leaves, carried, self._last_tokens, self._rules, packed_rows
        )
        if stages is not None:
            jax.block_until_ready(sampled)
            stages[-1] += time.perf_counter() - begun
        return carried, sampled

    def _enter(self, entry: SlotEntry) -> None:
        self._rules = self._programs.enter(self._rules, self._programs.entry_shape.pack(entry))

    def _copy_pages(self, copies: np.ndarray) -> None:
        for first in range(0, len(copies), COPIES_PER_CALL):
            batch = np.zeros((COPIES_PER_CALL, 2), np.int32)
            part = copies[first : first + COPIES_PER_CALL]
            batch[: len(part)] = part
            self.pools = [
                stage.copy(pool, batch) for stage, pool in zip(self._programs.stages, self.pools, strict=True)
            ]

    def read(self, flight: Flight) -> StepTokens:
        """Waits for a step's tokens."""
        parts = [(micro.which, _read(micro)) for micro in flight.micro]
        if len(parts) == 1:
            return parts[0][1]
        return merge_tokens(flight.plan, parts)

    def replay(self, recorded: list[StepBuffers]) -> None:
        """Runs recorded inputs back to back, as fast as the device goes, and waits for the end.

        The pages' content is overwritten: nothing may be live or cached that still counts on it.
        """
        for buffers in recorded:
            self._run(buffers)
        jax.block_until_ready((self.pools, self._last_tokens))

    def stage_seconds(self, recorded: list[StepBuffers]) -> list[float]:
        """What each stage is busy with recorded inputs when nothing else runs; else as `replay`."""
        seconds = [0.0] * self.num_stages
        for buffers in recorded:
            self._run(buffers, seconds)
        return seconds


def _read(micro: MicroFlight) -> StepTokens:
    plan, _, result, sampled = micro
    which = np.flatnonzero(plan.sampled)

    def by_sequence(rows: jax.Array) -> np.ndarray:
        values = np.asarray(rows)[: which.size]
        result = np.zeros((plan.num_seqs, *values.shape[1:]), values.dtype)
        result[which] = values
        return result

    if sampled is None:
        jax.block_until_ready(result)
        return StepTokens(np.zeros(plan.num_seqs, np.int32))
    if len(plan.scored):
        part = slice(which.size, plan.num_rows)
        return _tokens(sampled, by_sequence, _tokens(sampled, lambda rows: np.asarray(rows)[part]))
    if (plan.sampling["num_logprobs"][which] < 0).all():
        return StepTokens(by_sequence(sampled.token_R))
    return _tokens(sampled, by_sequence)


def _tokens(
    sampled: SampledTokens, pick: Callable[[jax.Array], np.ndarray], scored: StepTokens | None = None
) -> StepTokens:
    return StepTokens(
        token_ids=pick(sampled.token_R),
        logprobs=pick(sampled.logprob_R),
        ranks=pick(sampled.rank_R),
        top_ids=pick(sampled.top_ids_RX),
        top_logprobs=pick(sampled.top_logprobs_RX),
        scored=scored,
    )
