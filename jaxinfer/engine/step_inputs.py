"""A `StepPlan`, padded to a compiled shape and packed into one int32 buffer: one transfer a step.

T packed tokens, S sequences, M pages of a sequence, R sampled rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.sampling.sampler import SamplingInputs
from jaxinfer.types import StepPlan


class StepInputs(NamedTuple):
    """What one jitted step takes, besides weights and device state.

    A token id of -1 stands for the token its slot sampled last. Rows name the tokens whose logits are sampled and
    the slot each result belongs to (the last slot is nobody's); today there is one row a sequence, and nothing in
    the step assumes so.
    """

    token_ids_T: jax.Array
    slots_S: jax.Array
    page_table_SM: jax.Array
    kv_lens_S: jax.Array
    query_starts_S1: jax.Array
    num_seqs: jax.Array
    row_tokens_R: jax.Array
    row_slots_R: jax.Array
    sampling: SamplingInputs


@dataclass(frozen=True)
class StepShape:
    """The sizes a program is compiled for."""

    num_tokens: int
    max_num_seqs: int
    max_pages_per_seq: int

    @property
    def num_seqs(self) -> int:
        # Every sequence has a token at least.
        return min(self.num_tokens, self.max_num_seqs)

    @cached_property
    def fields(self) -> dict[str, tuple[int, tuple[int, ...], type]]:
        """Name -> (offset, shape, dtype) within the buffer."""
        T, S, M = self.num_tokens, self.num_seqs, self.max_pages_per_seq
        shapes: list[tuple[str, tuple[int, ...], type]] = [
            ("num_seqs", (), np.int32),
            ("token_ids", (T,), np.int32),
            ("slots", (S,), np.int32),
            ("page_table", (S, M), np.int32),
            ("kv_lens", (S,), np.int32),
            ("query_starts", (S + 1,), np.int32),
            ("row_tokens", (S,), np.int32),
            ("row_slots", (S,), np.int32),
            ("temperature", (S,), np.float32),
            ("top_p", (S,), np.float32),
            ("top_k", (S,), np.int32),
            ("min_p", (S,), np.float32),
            ("seed", (S, 2), np.uint32),
            ("num_logprobs", (S,), np.int32),
        ]
        fields, offset = {}, 0
        for name, shape, dtype in shapes:
            fields[name] = (offset, shape, dtype)
            offset += int(np.prod(shape, dtype=np.int64))
        return fields

    @cached_property
    def size(self) -> int:
        offset, shape, _ = self.fields["num_logprobs"]
        return offset + shape[0]


def pack(plan: StepPlan, shape: StepShape) -> np.ndarray:
    """The plan as int32 [shape.size]. The plan must fit the shape."""
    packed = np.zeros(shape.size, np.int32)

    def view(name: str) -> np.ndarray:
        offset, dims, dtype = shape.fields[name]
        size = int(np.prod(dims, dtype=np.int64))
        return packed[offset : offset + size].view(dtype).reshape(dims)

    S, T = plan.num_seqs, plan.num_tokens
    ends = np.cumsum(plan.query_lens, dtype=np.int32)
    view("num_seqs")[...] = S
    view("token_ids")[:T] = plan.token_ids
    view("slots")[:S] = plan.slots
    view("page_table")[:S, : plan.page_table.shape[1]] = plan.page_table
    view("kv_lens")[:S] = plan.starts + plan.query_lens
    starts = view("query_starts")
    starts[1 : S + 1] = ends
    starts[S + 1 :] = T
    view("row_tokens")[:S] = ends - 1
    nobody = shape.max_num_seqs
    row_slots = view("row_slots")
    row_slots[:] = nobody
    row_slots[:S] = np.where(plan.sampled, plan.slots, nobody)
    # Padding rows and rows that sample nothing are greedy and ask for no logprobs: they cost the step nothing.
    sampled = plan.sampled
    view("temperature")[:S] = np.where(sampled, plan.sampling["temperature"], 0)
    view("top_p")[:S] = plan.sampling["top_p"]
    view("top_k")[:S] = plan.sampling["top_k"]
    view("min_p")[:S] = plan.sampling["min_p"]
    view("seed")[:S] = plan.sampling["seed"]
    num_logprobs = view("num_logprobs")
    num_logprobs[:] = -1
    num_logprobs[:S] = np.where(sampled, plan.sampling["num_logprobs"], -1)
    return packed


def unpack(packed: jax.Array, shape: StepShape) -> StepInputs:
    """The buffer's fields, inside the jitted step."""

    def field(name: str) -> jax.Array:
        offset, dims, dtype = shape.fields[name]
        size = int(np.prod(dims, dtype=np.int64))
        flat = packed[offset : offset + size]
        return (flat if dtype is np.int32 else lax.bitcast_convert_type(flat, dtype)).reshape(dims)

    kv_lens_S = field("kv_lens")
    return StepInputs(
        token_ids_T=field("token_ids"),
        slots_S=field("slots"),
        page_table_SM=field("page_table"),
        kv_lens_S=kv_lens_S,
        query_starts_S1=field("query_starts"),
        num_seqs=field("num_seqs"),
        row_tokens_R=field("row_tokens"),
        row_slots_R=field("row_slots"),
        sampling=SamplingInputs(
            temperature_R=field("temperature"),
            top_p_R=field("top_p"),
            top_k_R=field("top_k"),
            min_p_R=field("min_p"),
            seed_R2=field("seed"),
            position_R=kv_lens_S,  # a sequence of n tokens samples the one at position n
            num_logprobs_R=field("num_logprobs"),
        ),
    )


def resolve_tokens(inputs: StepInputs, last_tokens: jax.Array) -> jax.Array:
    """Token ids [T] with each -1 replaced by the token its slot sampled last."""
    t = jnp.arange(inputs.token_ids_T.shape[0])
    S = inputs.slots_S.shape[0]
    sequence_T = jnp.clip(jnp.sum(t[:, None] >= inputs.query_starts_S1[None, 1:], axis=1), 0, S - 1)
    return jnp.where(inputs.token_ids_T < 0, last_tokens[inputs.slots_S[sequence_T]], inputs.token_ids_T)
