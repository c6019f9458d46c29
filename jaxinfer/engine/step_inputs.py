"""A `StepPlan`, padded to compiled shapes and packed into int32 buffers: one for the forward pass, one for sampling,
and one for each sequence that starts with rules for its logits.

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

from jaxinfer.sampling.logit_rules import RuleInputs, SlotRules, rules_shapes
from jaxinfer.sampling.sampler import SamplingInputs
from jaxinfer.types import SlotEntry, StepPlan

# (name, shape, dtype) of what a buffer holds, in order.
type _Fields = list[tuple[str, tuple[int, ...], type]]


class ForwardInputs(NamedTuple):
    """What a forward pass takes, besides weights and device state.

    A token id of -1 stands for the token its slot sampled last. Rows name the tokens whose hidden states are given
    on to be sampled from, several of a sequence if need be; there are always max_rows of them.
    """

    token_ids_T: jax.Array
    slots_S: jax.Array
    page_table_SM: jax.Array
    kv_lens_S: jax.Array
    query_starts_S1: jax.Array
    num_seqs: jax.Array
    row_tokens_R: jax.Array


class RowInputs(NamedTuple):
    """What sampling takes: the slot that each row's token belongs to (the last slot is nobody's) and parameters."""

    slots_R: jax.Array
    sampling: SamplingInputs


class _Layout:
    """Where the fields of a buffer lie in it."""

    def __init__(self, fields: _Fields):
        self._fields, self.size = {}, 0
        for name, shape, dtype in fields:
            end = self.size + int(np.prod(shape, dtype=np.int64))
            self._fields[name] = (slice(self.size, end), shape, dtype)
            self.size = end

    def view(self, packed: np.ndarray, name: str) -> np.ndarray:
        """A field of a host buffer, to be written."""
        where, shape, dtype = self._fields[name]
        return packed[where].view(dtype).reshape(shape)

    def read(self, packed: jax.Array) -> dict[str, jax.Array]:
        """All fields by name, inside a program."""

        def field(where: slice, shape: tuple[int, ...], dtype: type) -> jax.Array:
            flat = packed[where]
            return (flat if dtype is np.int32 else lax.bitcast_convert_type(flat, dtype)).reshape(shape)

        return {name: field(*place) for name, place in self._fields.items()}


@dataclass(frozen=True)
class ForwardShape:
    """The sizes a forward program is compiled for."""

    num_tokens: int
    max_num_seqs: int
    max_rows: int
    max_pages_per_seq: int

    @property
    def num_seqs(self) -> int:
        # Every sequence has a token at least.
        return min(self.num_tokens, self.max_num_seqs)

    @property
    def size(self) -> int:
        return self._layout.size

    @cached_property
    def _layout(self) -> _Layout:
        T, S, M = self.num_tokens, self.num_seqs, self.max_pages_per_seq
        return _Layout(
            [
                ("num_seqs", (), np.int32),
                ("token_ids_T", (T,), np.int32),
                ("slots_S", (S,), np.int32),
                ("page_table_SM", (S, M), np.int32),
                ("kv_lens_S", (S,), np.int32),
                ("query_starts_S1", (S + 1,), np.int32),
                ("row_tokens_R", (self.max_rows,), np.int32),
            ]
        )

    def fits(self, plan: StepPlan) -> bool:
        return self.num_tokens >= plan.num_tokens and self.num_seqs >= plan.num_seqs

    def pack(self, plan: StepPlan) -> np.ndarray:
        """The plan as int32 [size]; it must fit."""
        packed = np.zeros(self.size, np.int32)
        view = lambda name: self._layout.view(packed, name)
        S, T = plan.num_seqs, plan.num_tokens
        ends = np.cumsum(plan.query_lens, dtype=np.int32)
        view("num_seqs")[...] = S
        view("token_ids_T")[:T] = plan.token_ids
        view("slots_S")[:S] = plan.slots
        view("page_table_SM")[:S, : plan.page_table.shape[1]] = plan.page_table
        view("kv_lens_S")[:S] = plan.starts + plan.query_lens
        starts = view("query_starts_S1")
        starts[1 : S + 1] = ends
        starts[S + 1 :] = T
        rows = ends[plan.sampled] - 1
        row_tokens = view("row_tokens_R")
        row_tokens[: rows.size] = rows
        if len(plan.scored):
            sequence, position = plan.scored[:, 0], plan.scored[:, 1]
            # The token before it is what it is predicted from.
            row_tokens[rows.size : plan.num_rows] = starts[sequence] + position - 1 - plan.starts[sequence]
        return packed

    def unpack(self, packed: jax.Array) -> ForwardInputs:
        """The buffer's fields, inside the program."""
        return ForwardInputs(**self._layout.read(packed))


@dataclass(frozen=True)
class RowShape:
    """The sizes a sampling program is compiled for."""

    num_rows: int
    max_num_seqs: int

    @property
    def size(self) -> int:
        return self._layout.size

    @cached_property
    def _layout(self) -> _Layout:
        R = (self.num_rows,)
        return _Layout(
            [
                ("slots_R", R, np.int32),
                ("temperature_R", R, np.float32),
                ("top_p_R", R, np.float32),
                ("top_k_R", R, np.int32),
                ("min_p_R", R, np.float32),
                ("seed_R2", (*R, 2), np.uint32),
                ("position_R", R, np.int32),
                ("num_logprobs_R", R, np.int32),
                ("target_R", R, np.int32),
                ("ruled_R", R, np.int32),
                ("min_position_R", R, np.int32),
                ("presence_penalty_R", R, np.float32),
                ("frequency_penalty_R", R, np.float32),
                ("repetition_penalty_R", R, np.float32),
            ]
        )

    def pack(self, plan: StepPlan | None) -> np.ndarray:
        """The plan's sampled rows, then its scored ones, as int32 [size]; they must fit. None has no rows."""
        packed = np.zeros(self.size, np.int32)
        view = lambda name: self._layout.view(packed, name)
        # Padding belongs to nobody, is greedy and asks for no logprobs: it costs nothing.
        view("slots_R")[:] = self.max_num_seqs
        view("num_logprobs_R")[:] = -1
        view("target_R")[:] = -1
        if plan is not None:
            which = np.flatnonzero(plan.sampled)
            view("slots_R")[: which.size] = plan.slots[which]
            # A sequence of n tokens samples the one at position n.
            view("position_R")[: which.size] = plan.starts[which] + plan.query_lens[which]
            for name in _ROW_FIELDS:
                view(name)[: which.size] = plan.sampling[name.rpartition("_")[0]][which]
            if len(plan.scored):
                # Nobody's too: what is scored is not sampled.
                scored = slice(which.size, plan.num_rows)
                view("target_R")[scored] = plan.scored[:, 2]
                view("num_logprobs_R")[scored] = plan.sampling["num_prompt_logprobs"][plan.scored[:, 0]]
        return packed

    def unpack(self, packed: jax.Array) -> RowInputs:
        """The buffer's fields, inside the program."""
        fields = self._layout.read(packed)
        slots_R = fields.pop("slots_R")
        rules = RuleInputs(slots_R, *(fields.pop(name) for name in RuleInputs._fields[1:]))
        return RowInputs(slots_R, SamplingInputs(**fields, rules=rules))


_ROW_FIELDS = (
    *("temperature_R", "top_p_R", "top_k_R", "min_p_R", "seed_R2", "num_logprobs_R", "ruled_R", "min_position_R"),
    *("presence_penalty_R", "frequency_penalty_R", "repetition_penalty_R"),
)


@dataclass(frozen=True)
class EntryShape:
    """The sizes a slot's entry of `SlotRules` has."""

    vocab_size: int

    @property
    def size(self) -> int:
        return self._layout.size

    @cached_property
    def _layout(self) -> _Layout:
        fields = zip(SlotRules._fields, rules_shapes(1, self.vocab_size), strict=True)
        return _Layout([("slot", (), np.int32), *((name, shape[1:], dtype) for name, (shape, dtype) in fields)])

    def pack(self, entry: SlotEntry) -> np.ndarray:
        """The entry as int32 [size]."""
        packed = np.zeros(self.size, np.int32)
        view = lambda name: self._layout.view(packed, name)
        V = self.vocab_size
        view("slot")[...] = entry.slot
        view("counts_SV")[:] = np.bincount(entry.output_token_ids, minlength=V)
        view("prompt_SW")[:] = _bits(entry.prompt_token_ids, V)
        view("ends_SW")[:] = _bits(entry.end_token_ids, V)
        bias = view("bias_SV")
        if entry.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[entry.allowed_token_ids] = 0
        bias[entry.bias_token_ids] += entry.bias
        words, recent = view("words_SBL"), view("recent_SL")
        words[:] = recent[:] = -1
        words[: len(entry.banned_words)] = entry.banned_words
        newest = entry.output_token_ids[-recent.size :]
        recent[recent.size - newest.size :] = newest
        return packed

    def unpack(self, packed: jax.Array) -> tuple[jax.Array, SlotRules]:
        """The slot and its entry, inside the program."""
        fields = self._layout.read(packed)
        return fields.pop("slot"), SlotRules(**fields)


def _bits(token_ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Flags by token id, 32 a uint32 word, least significant bit first."""
    flags = np.zeros(-(-vocab_size // 32) * 32, np.bool_)
    flags[token_ids[token_ids < vocab_size]] = True
    return np.packbits(flags, bitorder="little").view("<u4")


def resolve_tokens(inputs: ForwardInputs, last_tokens: jax.Array) -> jax.Array:
    """Token ids [T] with each -1 replaced by the token its slot sampled last."""
    t = jnp.arange(inputs.token_ids_T.shape[0])
    S = inputs.slots_S.shape[0]
    sequence_T = jnp.clip(jnp.sum(t[:, None] >= inputs.query_starts_S1[None, 1:], axis=1), 0, S - 1)
    return jnp.where(inputs.token_ids_T < 0, last_tokens[inputs.slots_S[sequence_T]], inputs.token_ids_T)
