"""What is packed on the host is what a program reads on the device."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import SchedulerConfig
from jaxinfer.engine.programs import forward_shapes, row_shapes
from jaxinfer.engine.step_inputs import EntryShape, ForwardShape, RowShape, resolve_tokens
from jaxinfer.sampling.logit_rules import unpack_bits
from jaxinfer.types import MAX_BAD_WORD_TOKENS, SAMPLING_ROW, SlotEntry, StepPlan

MAX_NUM_SEQS, MAX_PAGES = 12, 5
MAX_ROWS = 7 * MAX_NUM_SEQS


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    S = draw(st.integers(1, MAX_NUM_SEQS))
    lens = draw(st.lists(st.integers(1, 6), min_size=S, max_size=S))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    M = draw(st.integers(1, MAX_PAGES))
    sampling = np.zeros(S, SAMPLING_ROW)
    for name in ("temperature", "top_p", "min_p"):
        sampling[name] = rng.random(S, np.float32)
    sampling["top_k"] = rng.integers(0, 2**31 - 1, S)
    sampling["seed"] = rng.integers(0, 2**32, (S, 2), np.uint32)
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty"):
        sampling[name] = rng.random(S, np.float32)
    sampling["num_logprobs"], sampling["num_prompt_logprobs"] = rng.integers(-1, 20, (2, S))
    sampling["min_position"], sampling["ruled"] = rng.integers(0, 1000, S), rng.integers(0, 2, S)
    starts = rng.integers(0, 1000, S).astype(np.int32)
    scored = [
        (i, position, rng.integers(0, 50_000))
        for i, length in enumerate(lens)
        for position in range(starts[i] + 1, starts[i] + length + rng.integers(0, 2))
        if draw(st.booleans())
    ]
    return StepPlan(
        step=draw(st.integers(0, 9)),
        slots=rng.permutation(MAX_NUM_SEQS)[:S].astype(np.int32),
        starts=starts,
        query_lens=np.array(lens, np.int32),
        token_ids=rng.integers(-1, 50_000, sum(lens)).astype(np.int32),
        page_table=rng.integers(0, 2**20, (S, M)).astype(np.int32),
        sampled=rng.random(S) < 0.6,
        sampling=sampling,
        page_copies=np.zeros((0, 2), np.int32),
        scored=np.array(scored, np.int32).reshape(-1, 3),
    )


def forward_shape(num_tokens: int) -> ForwardShape:
    return ForwardShape(num_tokens, MAX_NUM_SEQS, MAX_ROWS, MAX_PAGES)


# Few shapes, since each is compiled for.


@settings(deadline=None)
@given(plan=plans())
def test_forward_buffer(plan: StepPlan):
    shape = next(shape for shape in map(forward_shape, (10, 40, MAX_NUM_SEQS * 6)) if shape.fits(plan))
    packed = shape.pack(plan)
    assert packed.shape == (shape.size,)
    assert packed.dtype == np.int32
    inputs = shape.unpack(jnp.asarray(packed))
    S, T = plan.num_seqs, plan.num_tokens
    assert inputs.num_seqs == S
    assert inputs.token_ids_T.shape == (shape.num_tokens,)
    np.testing.assert_array_equal(inputs.token_ids_T[:T], plan.token_ids)
    np.testing.assert_array_equal(inputs.slots_S[:S], plan.slots)
    M = plan.page_table.shape[1]
    np.testing.assert_array_equal(inputs.page_table_SM[:S, :M], plan.page_table)
    assert not np.any(inputs.page_table_SM[:S, M:])
    assert not np.any(inputs.page_table_SM[S:])
    np.testing.assert_array_equal(inputs.kv_lens_S[:S], plan.starts + plan.query_lens)
    starts = np.asarray(inputs.query_starts_S1)
    np.testing.assert_array_equal(np.diff(starts)[:S], plan.query_lens)
    assert starts[0] == 0
    assert (starts[S:] == T).all()
    sampled, rows = plan.sampled.sum(), np.asarray(inputs.row_tokens_R)
    np.testing.assert_array_equal(rows[:sampled], (starts[1 : S + 1] - 1)[plan.sampled])
    # What a row scores comes right after the token it names.
    positions = np.concatenate([np.arange(at, at + n) for at, n in zip(plan.starts, plan.query_lens, strict=True)])
    scored_rows = rows[sampled : plan.num_rows]
    np.testing.assert_array_equal(positions[scored_rows] + 1, plan.scored[:, 1])
    np.testing.assert_array_equal(np.repeat(np.arange(S), plan.query_lens)[scored_rows], plan.scored[:, 0])


@settings(deadline=None)
@given(plan=plans())
def test_row_buffer(plan: StepPlan):
    which = np.flatnonzero(plan.sampled)
    R, X = which.size, len(plan.scored)
    shape = RowShape(4 if plan.num_rows <= 4 else MAX_ROWS, MAX_NUM_SEQS)
    rows = shape.unpack(jnp.asarray(shape.pack(plan)))
    np.testing.assert_array_equal(rows.slots_R[:R], plan.slots[which])
    assert (np.asarray(rows.slots_R)[R:] == MAX_NUM_SEQS).all()
    sampling = rows.sampling
    np.testing.assert_array_equal(sampling.position_R[:R], (plan.starts + plan.query_lens)[which])
    for name, dims in (("temperature", "R"), ("top_p", "R"), ("top_k", "R"), ("min_p", "R"), ("seed", "R2")):
        value = np.asarray(getattr(sampling, f"{name}_{dims}"))
        assert value.dtype == SAMPLING_ROW[name].base
        np.testing.assert_array_equal(value[:R], plan.sampling[name][which])
    np.testing.assert_array_equal(sampling.num_logprobs_R[:R], plan.sampling["num_logprobs"][which])
    for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_position", "ruled"):
        value = np.asarray(getattr(sampling.rules, f"{name}_R"))
        assert value.dtype == SAMPLING_ROW[name].base
        np.testing.assert_array_equal(value[:R], plan.sampling[name][which])
    np.testing.assert_array_equal(sampling.rules.slots_R, rows.slots_R)
    # Rows that are scored, and rows of nobody, are greedy and without rules: a step must not pay for sampling.
    assert not np.any(sampling.temperature_R[R:])
    assert not np.any(sampling.rules.ruled_R[R:])
    assert (np.asarray(sampling.target_R)[:R] == -1).all()
    np.testing.assert_array_equal(sampling.target_R[R : R + X], plan.scored[:, 2])
    np.testing.assert_array_equal(
        sampling.num_logprobs_R[R : R + X], plan.sampling["num_prompt_logprobs"][plan.scored[:, 0]]
    )
    assert (np.asarray(sampling.target_R)[R + X :] == -1).all()
    assert (np.asarray(sampling.num_logprobs_R)[R + X :] == -1).all()


ids = st.lists(st.integers(0, 99), max_size=30)


@settings(deadline=None)
@given(
    prompt=ids, output=ids, ends=ids, bias=st.dictionaries(st.integers(0, 99), st.floats(-100, 100, width=32)),
    allowed=st.none() | ids, words=st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=4), max_size=4),
)  # fmt: skip
def test_slot_entry(prompt, output, ends, bias, allowed, words):
    shape, array = EntryShape(100), lambda values: np.array(values, np.int32)
    rows = np.array([[-1] * (MAX_BAD_WORD_TOKENS - len(word)) + word for word in words], np.int32)
    entry = SlotEntry(
        slot=3,
        prompt_token_ids=array(prompt),
        output_token_ids=array(output),
        end_token_ids=array(ends),
        bias_token_ids=array(list(bias)),
        bias=np.array(list(bias.values()), np.float32),
        allowed_token_ids=None if allowed is None else array(allowed),
        banned_words=rows.reshape(-1, MAX_BAD_WORD_TOKENS),
    )
    slot, rules = shape.unpack(jnp.asarray(shape.pack(entry)))
    assert slot == 3
    np.testing.assert_array_equal(rules.counts_SV, np.bincount(array(output), minlength=100))
    for bits, given_ids in ((rules.prompt_SW, prompt), (rules.ends_SW, ends)):
        np.testing.assert_array_equal(np.flatnonzero(unpack_bits(bits[None], 100)[0]), sorted(set(given_ids)))
    for token in range(100):
        expected = bias.get(token, 0.0) if allowed is None or token in allowed else -np.inf
        assert rules.bias_SV[token] == np.float32(expected)
    np.testing.assert_array_equal(rules.words_SBL[: len(words)], rows.reshape(-1, MAX_BAD_WORD_TOKENS))
    assert (np.asarray(rules.words_SBL)[len(words) :] == -1).all()
    newest = [-1] * MAX_BAD_WORD_TOKENS + output
    np.testing.assert_array_equal(rules.recent_SL, newest[len(newest) - MAX_BAD_WORD_TOKENS + 1 :])


def test_no_rows():
    rows = RowShape(3, MAX_NUM_SEQS).unpack(jnp.asarray(RowShape(3, MAX_NUM_SEQS).pack(None)))
    assert (np.asarray(rows.slots_R) == MAX_NUM_SEQS).all()
    assert not np.any(rows.sampling.temperature_R)


@settings(deadline=None)
@given(plan=plans())
def test_tokens_still_on_the_device(plan: StepPlan):
    shape = forward_shape(MAX_NUM_SEQS * 6)
    last_tokens = np.arange(100, 100 + MAX_NUM_SEQS + 1, dtype=np.int32)
    tokens = resolve_tokens(shape.unpack(jnp.asarray(shape.pack(plan))), jnp.asarray(last_tokens))
    slots_T = np.repeat(plan.slots, plan.query_lens)
    expected = np.where(plan.token_ids < 0, last_tokens[slots_T], plan.token_ids)
    np.testing.assert_array_equal(tokens[: plan.num_tokens], expected)


@pytest.mark.parametrize(
    ("budget", "seqs", "tokens", "rows"),
    [
        (256, 64, [1, 8, 32, 64, 128, 256], [1, 8, 32, 64]),
        (300, 40, [1, 8, 32, 64, 128, 256, 300], [1, 8, 32, 64]),
        (300, 80, [1, 8, 32, 64, 128, 256, 300], [1, 8, 32, 64, 80]),
        (32, 32, [1, 8, 32], [1, 8, 32]),
        (5, 4, [1, 5], [1, 5]),
        (1, 1, [1], [1]),
    ],
)
def test_list_of_programs(budget: int, seqs: int, tokens: list[int], rows: list[int]):
    """Any step within the budget has a program, and any number of rows."""
    config = SchedulerConfig(
        max_num_seqs=seqs, max_num_batched_tokens=budget, max_model_len=100, page_size=8, num_pages=9
    )
    assert [shape.num_tokens for shape in forward_shapes(config)] == tokens
    assert [shape.num_rows for shape in row_shapes(config)] == rows
    assert {shape.max_pages_per_seq for shape in forward_shapes(config)} == {13}
