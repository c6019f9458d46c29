"""Plans and tokens travel as bytes: what comes out is what went in, and bytes that are no message are an error."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays, from_dtype

from jaxinfer.engine.plan_codec import (
    MalformedMessageError,
    decode_plan,
    decode_tokens,
    encode_plan,
    encode_tokens,
)
from jaxinfer.types import MAX_BAD_WORD_TOKENS, MAX_LOGPROBS, SAMPLING_ROW, SlotEntry, StepPlan, StepTokens


def ints(*shape: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.int32, shape)


def floats(*shape: int) -> st.SearchStrategy[np.ndarray]:
    return arrays(np.float32, shape)


@st.composite
def entries(draw: Any) -> SlotEntry:
    size = st.integers(0, 4)
    num_biases = draw(size)
    return SlotEntry(
        slot=draw(st.integers(0, 100)),
        prompt_token_ids=draw(ints(draw(size))),
        output_token_ids=draw(ints(draw(size))),
        end_token_ids=draw(ints(draw(size))),
        bias_token_ids=draw(ints(num_biases)),
        bias=draw(floats(num_biases)),
        allowed_token_ids=draw(st.none() | ints(draw(size))),
        banned_words=draw(ints(draw(size), MAX_BAD_WORD_TOKENS)),
    )


@st.composite
def plans(draw: Any) -> StepPlan:
    S = draw(st.integers(1, 5))
    query_lens = draw(arrays(np.int32, S, elements=st.integers(1, 6)))
    return StepPlan(
        step=draw(st.integers(0, 1 << 40)),
        slots=draw(ints(S)),
        starts=draw(ints(S)),
        query_lens=query_lens,
        token_ids=draw(ints(int(query_lens.sum()))),
        page_table=draw(ints(S, draw(st.integers(1, 4)))),
        sampled=draw(arrays(np.bool_, S)),
        sampling=draw(arrays(SAMPLING_ROW, S, elements=from_dtype(SAMPLING_ROW), fill=st.nothing())),
        page_copies=draw(ints(draw(st.integers(0, 2)), 2)),
        scored=draw(ints(draw(st.integers(0, 3)), 3)),
        entries=tuple(draw(st.lists(entries(), max_size=2))),
    )


@st.composite
def tokens(draw: Any, scored: bool = True) -> StepTokens:
    R = draw(st.integers(0, 5))
    return StepTokens(
        token_ids=draw(ints(R)),
        logprobs=draw(st.none() | floats(R)),
        ranks=draw(st.none() | ints(R)),
        top_ids=draw(st.none() | ints(R, MAX_LOGPROBS)),
        top_logprobs=draw(st.none() | floats(R, MAX_LOGPROBS)),
        scored=draw(st.none() | tokens(scored=False)) if scored else None,
    )


def same(ours: Any, theirs: Any) -> bool:
    """By value and dtype; NaN equals itself."""
    if isinstance(ours, np.ndarray):
        return ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes()
    if isinstance(ours, SlotEntry):
        return all(map(same, ours, theirs))
    if isinstance(ours, tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, (StepPlan, StepTokens)):
        return all(same(getattr(ours, field.name), getattr(theirs, field.name)) for field in fields(ours))
    return ours == theirs


@settings(max_examples=30)
@given(plans())
def test_a_plan_comes_out_as_it_went_in(plan: StepPlan):
    message = encode_plan(plan)
    assert same(plan, decode_plan(message))
    assert encode_plan(decode_plan(message)) == message
    assert same(plan, decode_plan(memoryview(b"12345678" + message)[8:]))


@settings(max_examples=30)
@given(tokens())
def test_tokens_come_out_as_they_went_in(given: StepTokens):
    message = encode_tokens(given)
    assert same(given, decode_tokens(message))
    assert encode_tokens(decode_tokens(message)) == message


@settings(max_examples=30)
@given(plans(), st.data())
def test_bytes_that_are_no_plan_are_an_error(plan: StepPlan, data: st.DataObject):
    message = bytearray(encode_plan(plan))
    cut = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(MalformedMessageError):
        decode_plan(bytes(message[:cut]))
    with pytest.raises(MalformedMessageError):
        decode_plan(bytes(message) + b"12345678")
    # A byte of the header changed: another plan, or an error, but nothing else.
    length = int.from_bytes(message[:4], "little")
    message[data.draw(st.integers(0, 3 + length))] = data.draw(st.integers(0, 255))
    with suppress(MalformedMessageError):
        decode_plan(bytes(message))


@settings(max_examples=30)
@given(st.binary(max_size=60))
def test_any_bytes_are_an_error(message: bytes):
    for decode in (decode_plan, decode_tokens):
        with pytest.raises(MalformedMessageError):
            decode(message)


@settings(max_examples=30)
@given(plans())
def test_a_plan_of_other_dtypes_or_shapes_does_not_travel(plan: StepPlan):
    for wrong in (
        replace(plan, slots=plan.slots.astype(np.int64)),
        replace(plan, starts=np.append(plan.starts, np.int32(0))),
        replace(plan, page_copies=np.zeros((1, 3), np.int32)),
        replace(plan, sampled=None),  # type: ignore[arg-type]
    ):
        with pytest.raises(MalformedMessageError):
            encode_plan(wrong)
