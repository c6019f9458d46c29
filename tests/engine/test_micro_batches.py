"""A plan in parts is the same plan, and the parts' tokens are put together again."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.engine.micro_batches import merge_tokens, split_plan
from jaxinfer.types import SAMPLING_ROW, StepPlan, StepTokens


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    lens = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    lens.sort(key=lambda n: n > 1)  # decodes first
    S, rng = len(lens), np.random.default_rng(draw(st.integers(0, 99)))
    sampling = np.zeros(S, SAMPLING_ROW)
    sampling["top_k"] = np.arange(S)
    scored = [(s, p, rng.integers(99)) for s, n in enumerate(lens) if n > 2 and rng.random() < 0.5 for p in range(1, n)]
    return StepPlan(
        step=7,
        slots=rng.permutation(S).astype(np.int32),
        starts=rng.integers(0, 5, S).astype(np.int32),
        query_lens=np.array(lens, np.int32),
        token_ids=np.arange(sum(lens), dtype=np.int32),
        page_table=rng.integers(1, 50, (S, 4)).astype(np.int32),
        sampled=rng.random(S) < 0.7,
        sampling=sampling,
        page_copies=np.zeros((0, 2), np.int32),
        scored=np.array(scored, np.int32).reshape(-1, 3),
    )


@given(plan=plans(), ways=st.integers(1, 5))
def test_parts_are_the_plan(plan: StepPlan, ways: int):
    parts = split_plan(plan, ways)
    assert len(parts) == min(ways, plan.num_seqs)
    assert sorted(np.concatenate([which for _, which in parts]).tolist()) == list(range(plan.num_seqs))
    ends = np.cumsum(plan.query_lens)
    for part, which in parts:
        assert which.tolist() == sorted(which.tolist())  # decodes stay first
        for name in ("slots", "starts", "query_lens", "page_table", "sampled", "sampling"):
            np.testing.assert_array_equal(getattr(part, name), getattr(plan, name)[which])
        ids = [plan.token_ids[ends[s] - plan.query_lens[s] : ends[s]] for s in which]
        np.testing.assert_array_equal(part.token_ids, np.concatenate(ids))
        whole = plan.scored[np.isin(plan.scored[:, 0], which)]
        np.testing.assert_array_equal(which[part.scored[:, 0]], whole[:, 0])
        np.testing.assert_array_equal(part.scored[:, 1:], whole[:, 1:])
    # No part has more work than another but for one sequence.
    loads = [part.num_tokens for part, _ in parts]
    assert max(loads) - min(loads) <= plan.query_lens.max()


@given(plan=plans(), ways=st.integers(1, 5), logprobs=st.booleans())
def test_tokens_come_back_in_their_rows(plan: StepPlan, ways: int, logprobs: bool):
    """Each row's token is its slot's number, each scored one's its token id."""
    made = []
    for number, (part, which) in enumerate(split_plan(plan, ways)):
        asked = logprobs and number == 0  # a part where nobody asked has none
        scored = StepTokens(part.scored[:, 2], logprobs=part.scored[:, 2] / 2) if len(part.scored) else None
        ranks = part.slots.astype(np.int32) if asked else None
        made.append((which, StepTokens(part.slots * 3, ranks=ranks, scored=scored)))
    merged = merge_tokens(plan, made)
    np.testing.assert_array_equal(merged.token_ids, plan.slots * 3)
    if logprobs:
        assert merged.ranks is not None
        np.testing.assert_array_equal(merged.ranks[made[0][0]], plan.slots[made[0][0]])
    if len(plan.scored):
        assert merged.scored is not None
        np.testing.assert_array_equal(merged.scored.token_ids, plan.scored[:, 2])
        assert merged.scored.logprobs is not None
        np.testing.assert_array_equal(merged.scored.logprobs, plan.scored[:, 2] / 2)
    else:
        assert merged.scored is None
