"""The runner alone: state stays in place, a step without samples runs no head, and shapes are a closed list."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.runner import Runner
from jaxinfer.errors import NotCompiledError
from jaxinfer.types import SAMPLING_ROW, StepPlan
from pallas_kernels.dispatch import KernelError


def make_plan(lens: list[int], sampled: list[bool], *, copies: int = 0, num_logprobs: int = -1) -> StepPlan:
    S = len(lens)
    sampling = np.zeros(S, SAMPLING_ROW)
    sampling["top_p"], sampling["num_logprobs"] = 1, num_logprobs
    pages = -(-max(lens) // 4)
    return StepPlan(
        step=0,
        slots=np.arange(S, dtype=np.int32),
        starts=np.zeros(S, np.int32),
        query_lens=np.array(lens, np.int32),
        token_ids=np.arange(3, 3 + sum(lens), dtype=np.int32),
        page_table=1 + np.arange(S * pages, dtype=np.int32).reshape(S, pages),
        sampled=np.array(sampled),
        sampling=sampling,
        page_copies=np.full((copies, 2), 40, np.int32),
        scored=np.zeros((0, 3), np.int32),
    )


@pytest.fixture
def runner(base: Engine) -> Runner:
    base.runners[0].reset()
    return base.runners[0]


def test_the_pool_stays_where_it_is(runner: Runner):
    """Donated and aliased: the same bytes through forward passes of every size, and through page copies."""
    runner.read(runner.dispatch(make_plan([3], [True])))
    address = runner.pools[0].unsafe_buffer_pointer()
    for lens in ([1], [2, 5], [20, 9], [1] * 32):
        runner.read(runner.dispatch(make_plan(lens, [True] * len(lens), copies=3)))
        assert runner.pools[0].unsafe_buffer_pointer() == address
    for program in runner._programs.stages[0].forward.values():
        assert program.memory_analysis().alias_size_in_bytes >= runner.pools[0].nbytes


def test_a_step_that_samples_nothing_runs_no_head(runner: Runner, monkeypatch: pytest.MonkeyPatch):
    no_head = replace(runner._programs, sample=dict.fromkeys(runner._programs.sample))
    monkeypatch.setattr(runner, "_programs", no_head)
    flight = runner.dispatch(make_plan([9, 4], [False, False]))
    assert flight.micro[0].sampled is None
    assert runner.read(flight).token_ids.tolist() == [0, 0]


@pytest.mark.parametrize("num_logprobs", [-1, 2])
def test_rows_come_back_by_sequence(runner: Runner, num_logprobs: int):
    """Only two of four sequences are sampled; each gives the token it gives alone, at its own row."""
    lens, sampled = [3, 5, 2, 6], [False, True, False, True]
    plan = make_plan(lens, sampled, num_logprobs=num_logprobs)
    tokens = runner.read(runner.dispatch(plan))
    assert tokens.token_ids.shape == (4,)
    starts = np.cumsum([0, *lens])
    for row in (1, 3):
        alone = make_plan([lens[row]], [True], num_logprobs=num_logprobs)
        alone.token_ids[:] = plan.token_ids[starts[row] : starts[row + 1]]
        expected = runner.read(runner.dispatch(alone))
        assert tokens.token_ids[row] == expected.token_ids[0]
        if num_logprobs >= 0:
            assert tokens.logprobs is not None
            assert expected.logprobs is not None
            np.testing.assert_allclose(tokens.logprobs[row], expected.logprobs[0], atol=1e-4)
    if num_logprobs < 0:
        assert tokens.logprobs is None


@pytest.mark.parametrize(("lens", "what"), [([33], "33 tokens"), ([1] * 33, "33 sequences")])
def test_a_step_larger_than_every_program(runner: Runner, lens: list[int], what: str):
    with pytest.raises(NotCompiledError, match=what):
        runner.dispatch(make_plan(lens, [True] * len(lens)))
    runner.read(runner.dispatch(make_plan([4], [True])))


@pytest.mark.parametrize("page", [-1, 1 << 20])
@pytest.mark.parametrize("where", ["page_table", "page_copies"])
def test_a_page_that_the_pool_has_not_reaches_no_device(runner: Runner, where: str, page: int):
    plan = make_plan([5, 9], [True, True], copies=1)
    getattr(plan, where)[0, 1] = page
    before = [np.asarray(pool) for pool in runner.pools]
    with pytest.raises(KernelError, match=f"{page}.*page ids go from 0 to"):
        runner.dispatch(plan)
    for pool, same in zip(runner.pools, before, strict=True):
        np.testing.assert_array_equal(np.asarray(pool), same)


def test_what_was_recorded_can_be_replayed(runner: Runner):
    runner.recorded = steps = []
    try:
        for lens, sampled in (([7, 2], [False, True]), ([1], [True]), ([5], [False])):
            runner.read(runner.dispatch(make_plan(lens, sampled)))
    finally:
        runner.recorded = None
    assert [step.rows is not None for step in steps] == [True, True, False]
    runner.replay(steps)
    assert len(steps) == 3
