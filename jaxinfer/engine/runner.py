"""The one jitted step, in a closed list of shapes, over device state that never leaves the device."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import ModelConfig, SchedulerConfig
from jaxinfer.engine.executables import ExecutableCache, compile_count
from jaxinfer.engine.step_inputs import StepShape, pack, resolve_tokens, unpack
from jaxinfer.errors import InvalidArgumentError, NotCompiledError
from jaxinfer.kv_cache.pool import COPIES_PER_CALL, copy_pages, pool_spec
from jaxinfer.models.decoder import DecoderStructure
from jaxinfer.sampling.sampler import SampledTokens, sample
from jaxinfer.types import StepPlan, StepTokens
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_attention.reference import token_positions

logger = logging.getLogger(__name__)


class DeviceState(NamedTuple):
    """Donated to each step and given back by it.

    Attributes:
      pool: the pages, see `kv_cache.pool`.
      last_tokens: [max_num_seqs + 1] int32, the token each slot sampled last; the last entry is nobody's.
    """

    pool: jax.Array
    last_tokens: jax.Array


class Flight(NamedTuple):
    """A step that has been dispatched: its plan, and outputs that may still be on their way."""

    plan: StepPlan
    sampled: SampledTokens


def make_step(structure: DecoderStructure, model: ModelConfig, shape: StepShape) -> Callable[..., Any]:
    """The step of one shape: (weight leaves, DeviceState, packed inputs) -> (DeviceState, SampledTokens)."""
    scale = model.head_dim**-0.5

    def step(leaves: tuple[jax.Array, ...], state: DeviceState, packed: jax.Array) -> tuple[DeviceState, SampledTokens]:
        inputs = unpack(packed, shape)
        decoder = structure.merge(leaves)

        def attend(q_TNH, k_TKH, v_TKH, pool, layer, window):
            return paged_attention(
                q_TNH,
                k_TKH,
                v_TKH,
                pool,
                layer,
                inputs.page_table_SM,
                inputs.kv_lens_S,
                inputs.query_starts_S1,
                inputs.num_seqs,
                scale=scale,
                window=window,
            )

        token_ids_T = resolve_tokens(inputs, state.last_tokens)
        _, positions_T, _ = token_positions(shape.num_tokens, inputs.kv_lens_S, inputs.query_starts_S1, inputs.num_seqs)
        hidden_TD, pool = decoder(token_ids_T, positions_T, state.pool, attend)
        sampled = sample(decoder.logits(hidden_TD[inputs.row_tokens_R]), inputs.sampling)
        last_tokens = state.last_tokens.at[inputs.row_slots_R].set(sampled.token_R)
        return DeviceState(pool, last_tokens), sampled

    return step


class Runner:
    """Owns weights and device state; runs plans in the order given. Used by one thread.

    Args:
      leaves: weights in the order of `structure.specs`, on their devices.
      sharding: of the pool and the small state.
      step_sizes: packed-token counts that programs are compiled for; the largest is the step's token budget.
      kv_dtype: of the pool.
    """

    def __init__(
        self,
        structure: DecoderStructure,
        leaves: tuple[jax.Array, ...],
        model: ModelConfig,
        scheduler: SchedulerConfig,
        *,
        max_pages_per_seq: int,
        step_sizes: tuple[int, ...],
        kv_dtype: Any,
        sharding: jax.sharding.Sharding,
        executables: ExecutableCache,
    ):
        if step_sizes[-1] < scheduler.max_num_batched_tokens:
            raise InvalidArgumentError(
                "step_sizes", step_sizes, f"up to max_num_batched_tokens = {scheduler.max_num_batched_tokens}"
            )
        self.model, self.scheduler, self.structure, self.leaves = model, scheduler, structure, leaves
        self._shapes = [StepShape(size, scheduler.max_num_seqs, max_pages_per_seq) for size in step_sizes]
        self._sharding, self._executables = sharding, executables
        spec = pool_spec(model, scheduler.num_pages, scheduler.page_size, kv_dtype)
        self._state_spec: Any = DeviceState(
            pool=jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=sharding),  # type: ignore[arg-type]
            last_tokens=jax.ShapeDtypeStruct((scheduler.max_num_seqs + 1,), jnp.int32, sharding=sharding),  # type: ignore[arg-type]
        )
        self.state: DeviceState
        self._programs: dict[int, jax.stages.Compiled] = {}
        self._compiles_at_warm_up: int | None = None
        self.recorded: list[tuple[int, np.ndarray]] | None = None  # (program, inputs) of steps, when a list is set

    @property
    def compiles_after_warm_up(self) -> int:
        """Compilations since warm-up ended: anything but 0 is a bug."""
        return 0 if self._compiles_at_warm_up is None else compile_count() - self._compiles_at_warm_up

    def warm_up(self, progress: Callable[[str, int, int], None] = lambda label, done, total: None) -> None:
        """Loads or compiles every program and runs each once; `progress` gets (what, done, total)."""
        total = len(self._shapes) + 2
        leaf_specs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.leaves)
        progress("page copies", 0, total)
        copies = jax.ShapeDtypeStruct((COPIES_PER_CALL, 2), jnp.int32, sharding=self._sharding)
        self._copy = self._compile("copy", copy_pages, (self._state_spec.pool, copies), donate=0)
        progress("empty state", 1, total)
        zeros = jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), self._state_spec))
        self._zeros = zeros.lower().compile()
        for number, shape in enumerate(self._shapes):
            progress(f"step of {shape.num_tokens} tokens", 2 + number, total)
            packed = jax.ShapeDtypeStruct((shape.size,), jnp.int32, sharding=self._sharding)
            function = make_step(self.structure, self.model, shape)
            key = f"step {shape}"
            self._programs[shape.num_tokens] = self._compile(
                key, function, (leaf_specs, self._state_spec, packed), donate=1
            )
        progress("all programs", total, total)
        self.reset()
        for shape in self._shapes:  # the first run allocates; no request should pay for it
            self.state, sampled = self._programs[shape.num_tokens](self.leaves, self.state, self._empty(shape))
            jax.block_until_ready(sampled)
        self._copy_pages(np.zeros((1, 2), np.int32))
        jax.block_until_ready(self.state)
        self._compiles_at_warm_up = compile_count()

    def _empty(self, shape: StepShape) -> np.ndarray:
        packed = np.zeros(shape.size, np.int32)
        offset, dims, _ = shape.fields["row_slots"]
        packed[offset : offset + dims[0]] = shape.max_num_seqs
        return packed

    def _compile(self, key: str, function: Callable[..., Any], specs: tuple[Any, ...], donate: int) -> Any:
        # The key holds all that shapes the program; the cache adds source, versions and device.
        full_key = f"{key} {self.model} {self.scheduler} {self._state_spec} {specs[0]}"
        compiled = self._executables.load(full_key)
        if compiled is None:
            compiled = jax.jit(function, donate_argnums=donate).lower(*specs).compile()
            self._executables.store(full_key, compiled)
        return compiled

    def reset(self) -> None:
        """A new, empty state; all pages lose their content."""
        self.state = self._zeros()

    def dispatch(self, plan: StepPlan) -> Flight:
        """Starts the step and returns at once.

        Raises:
          NotCompiledError: no program holds as many tokens (counted as an engine bug).
        """
        shape = next((s for s in self._shapes if s.num_tokens >= plan.num_tokens and s.num_seqs >= plan.num_seqs), None)
        if shape is None:
            largest = self._shapes[-1].num_tokens
            raise NotCompiledError(f"a step of {plan.num_tokens} tokens is larger than any program ({largest})")
        if len(plan.page_copies):
            self._copy_pages(plan.page_copies)
        packed = pack(plan, shape)
        if self.recorded is not None:
            self.recorded.append((shape.num_tokens, packed))
        self.state, sampled = self._programs[shape.num_tokens](self.leaves, self.state, packed)
        return Flight(plan, sampled)

    def _copy_pages(self, copies: np.ndarray) -> None:
        for first in range(0, len(copies), COPIES_PER_CALL):
            batch = np.zeros((COPIES_PER_CALL, 2), np.int32)
            part = copies[first : first + COPIES_PER_CALL]
            batch[: len(part)] = part
            self.state = self.state._replace(pool=self._copy(self.state.pool, batch))

    def read(self, flight: Flight) -> StepTokens:
        """Waits for a step's tokens."""
        plan, sampled = flight
        rows = plan.num_seqs
        token_ids = np.asarray(sampled.token_R)[:rows]
        if not (plan.sampled & (plan.sampling["num_logprobs"] >= 0)).any():
            return StepTokens(token_ids)
        rest = jax.device_get(sampled[1:])
        return StepTokens(token_ids, *(np.asarray(x)[:rows] for x in rest))

    def replay(self, recorded: list[tuple[int, np.ndarray]]) -> None:
        """Runs recorded inputs back to back, as fast as the device goes, and waits for the end.

        The pages' content is overwritten: nothing may be live or cached that still counts on it.
        """
        sampled = None
        for size, packed in recorded:
            self.state, sampled = self._programs[size](self.leaves, self.state, packed)
        jax.block_until_ready((self.state, sampled))
