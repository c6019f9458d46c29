"""The scheduler's rules, one at a time, on hand-made tokens. The whole of it is in test_scheduler_simulation.py."""

from __future__ import annotations

import numpy as np
import pytest

from jaxinfer.config import SchedulerConfig
from jaxinfer.engine.scheduler import NewToken, Scheduler
from jaxinfer.engine.sequence import Sequence, Status, make_samples, sample_seed
from jaxinfer.errors import InvalidArgumentError, RequestExistsError
from jaxinfer.types import FinishReason, SamplingParams, StepPlan, StepTokens

EOS = 2
END, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


def make(**changes: int | bool) -> Scheduler:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "page_size": 4, "num_pages": 32}
    return Scheduler(SchedulerConfig(**(values | changes)), eos_token_ids=(EOS,))


def add(
    scheduler: Scheduler,
    name: str,
    prompt: int | list[int],
    *,
    seed: int = 0,
    priority: int = 0,
    cache_namespace: bytes = b"",
    **params,
) -> list[Sequence]:
    """Queue a request; a prompt given as a number has that many tokens, different from every other name's."""
    if isinstance(prompt, int):
        prompt = [1000 * (ord(name[0]) % 32) + i for i in range(prompt)]
    samples = make_samples(
        name,
        np.array(prompt),
        SamplingParams(**params),
        seed=seed,
        priority=priority,
        cache_namespace=cache_namespace,
    )
    scheduler.add(samples)
    return samples


def commit(scheduler: Scheduler, plan: StepPlan, *ids: int) -> list[NewToken]:
    """Commit with the given sampled tokens, the last one repeated; 50 if none are given."""
    ids = ids or (50,)
    tokens = [*ids, *[ids[-1]] * plan.num_seqs][: plan.num_seqs]
    return scheduler.commit(plan, StepTokens(np.array(tokens, np.int32)))


def plan(scheduler: Scheduler) -> StepPlan:
    made = scheduler.plan()
    assert made is not None
    return made


def step(scheduler: Scheduler, *ids: int) -> StepPlan:
    made = plan(scheduler)
    commit(scheduler, made, *ids)
    return made


def idle(scheduler: Scheduler) -> bool:
    scheduler.audit()
    pages = scheduler.pages
    return pages.num_free + pages.num_cached == pages.num_pages and not scheduler.has_unfinished


# What a plan says.


def test_prefill_then_decode() -> None:
    scheduler = make()
    [a] = add(scheduler, "a", [10, 11, 12, 13, 14], temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, seed=5 << 32 | 6)
    first = plan(scheduler)
    assert first.slots.tolist() == [0]
    assert first.starts.tolist() == [0]
    assert first.query_lens.tolist() == [5]
    assert first.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert first.page_table.tolist() == [[1, 2]]
    assert first.sampled.tolist() == [True]
    assert first.page_copies.shape == (0, 2)
    row = first.sampling[0]
    assert row["seed"].tolist() == [5, 6]
    assert (row["top_k"], row["num_logprobs"]) == (0, -1)
    np.testing.assert_allclose([row["temperature"], row["top_p"], row["min_p"]], [0.5, 0.9, 0.1], rtol=1e-6)
    assert commit(scheduler, first, 77) == [(a, 77, 0, None)]
    second = plan(scheduler)
    assert second.step == first.step + 1
    assert second.token_ids.tolist() == [77]
    assert second.starts.tolist() == [5]


def test_logprobs_reach_the_sampling_row() -> None:
    scheduler = make()
    add(scheduler, "a", 3, logprobs=0)
    add(scheduler, "b", 3, logprobs=5)
    assert plan(scheduler).sampling["num_logprobs"].tolist() == [0, 5]


def test_overlapped_decode_points_at_the_token_on_the_device() -> None:
    scheduler = make()
    [a] = add(scheduler, "a", 4)
    first = plan(scheduler)
    second = plan(scheduler)
    assert second.token_ids.tolist() == [-1]
    assert second.starts.tolist() == [4]
    assert second.slots.tolist() == first.slots.tolist()
    assert a.num_in_flight == 2
    with pytest.raises(RuntimeError, match="two are in flight"):
        scheduler.plan()
    with pytest.raises(ValueError, match="oldest"):
        commit(scheduler, second)
    commit(scheduler, first, 70)
    assert plan(scheduler).token_ids.tolist() == [-1]
    commit(scheduler, second, 71)
    assert a.output_token_ids == [70, 71]


def test_plans_do_not_change_when_the_scheduler_goes_on() -> None:
    scheduler = make()
    add(scheduler, "a", 4, max_tokens=8)
    first = plan(scheduler)
    second = plan(scheduler)
    table, sampling = second.page_table.copy(), second.sampling.copy()
    commit(scheduler, first, EOS)
    commit(scheduler, second)
    add(scheduler, "b", 16, temperature=0.1)
    plan(scheduler)
    assert (second.page_table == table).all()
    assert (second.sampling == sampling).all()


def test_chunks_share_the_budget_with_decodes_which_come_first() -> None:
    scheduler = make(max_num_batched_tokens=8, max_num_seqs=3)
    add(scheduler, "a", 2, max_tokens=20)
    step(scheduler)
    add(scheduler, "b", 10)
    add(scheduler, "c", 6)
    first = plan(scheduler)
    assert first.query_lens.tolist() == [1, 7]
    assert first.sampled.tolist() == [True, False]
    # The next chunk needs no token, so it may follow while this one is in flight.
    second = plan(scheduler)
    assert second.starts.tolist() == [3, 7, 0]
    assert second.query_lens.tolist() == [1, 3, 4]
    assert second.sampled.tolist() == [True, True, False]
    assert second.token_ids.tolist() == [-1, 2007, 2008, 2009, 3000, 3001, 3002, 3003]
    assert [new.row for new in commit(scheduler, first)] == [0]
    assert [new.row for new in commit(scheduler, second)] == [0, 1]


def test_rows_of_one_token_come_first_even_if_they_end_a_prompt() -> None:
    scheduler = make(max_num_batched_tokens=8)
    add(scheduler, "a", 7)
    add(scheduler, "b", 2)  # its first token fills the step
    assert plan(scheduler).query_lens.tolist() == [1, 7]
    add(scheduler, "c", 3)
    second = plan(scheduler)
    assert second.query_lens.tolist() == [1, 1, 3]
    assert second.token_ids.tolist() == [-1, 2001, 3000, 3001, 3002]


# Order and admission.


def test_smaller_priority_first_then_first_come() -> None:
    scheduler = make(max_num_seqs=1)
    for name, priority in [("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", -1)]:
        add(scheduler, name, 3, priority=priority, max_tokens=1)
    seen = []
    while scheduler.has_unfinished:
        made = plan(scheduler)
        seen += [new.sequence.request_id for new in commit(scheduler, made)]
    assert seen == ["e", "b", "d", "a", "c"]


def test_never_fits_is_refused_at_once_and_names_the_pool() -> None:
    scheduler = make(num_pages=4)
    add(scheduler, "a", 5)
    with pytest.raises(InvalidArgumentError, match=r"17 tokens.*at most 16 tokens.*page pool"):
        add(scheduler, "b", 17)
    add(scheduler, "c", 16, max_tokens=5)
    ends = {}
    while scheduler.has_unfinished:
        for new in commit(scheduler, plan(scheduler)):
            ends[new.sequence.request_id] = (len(new.sequence.output_token_ids), new.finish)
    assert ends == {"a": (12, LENGTH), "c": (1, LENGTH)}
    assert idle(scheduler)


def test_same_id_twice_leaves_the_first_unharmed() -> None:
    scheduler = make()
    [first] = add(scheduler, "a", 3, max_tokens=1)
    with pytest.raises(RequestExistsError, match="'a'"):
        add(scheduler, "a", 5)
    step(scheduler)
    assert first.finished
    assert idle(scheduler)
    add(scheduler, "a", 5)


def test_nobody_is_admitted_into_pages_that_running_ones_are_about_to_need() -> None:
    scheduler = make(num_pages=5)
    [a] = add(scheduler, "a", 8, max_tokens=8)
    step(scheduler)
    [b] = add(scheduler, "b", 8, max_tokens=8)  # fits exactly, and would take a's next page
    while not a.finished:
        assert b.status is Status.WAITING
        step(scheduler)
    step(scheduler)
    assert b.status is Status.RUNNING
    assert scheduler.num_preemptions == 0


# Ends.


@pytest.mark.parametrize(("prompt", "tokens"), [(62, 2), (63, 1)])
def test_context_limit(prompt: int, tokens: int) -> None:
    scheduler = make(max_num_batched_tokens=64)
    [a] = add(scheduler, "a", prompt, max_tokens=None)
    for _ in range(tokens):
        step(scheduler)
    assert len(a.output_token_ids) == tokens
    assert (a.finish_reason, a.stop_reason) == (LENGTH, None)
    assert idle(scheduler)


def test_prompt_that_fills_the_context_is_refused() -> None:
    for prompt in (64, 65):
        with pytest.raises(InvalidArgumentError, match=rf"{prompt} tokens.*at most 63 tokens"):
            add(make(), "a", prompt)
    with pytest.raises(InvalidArgumentError, match="at least one token"):
        add(make(), "a", 0)


def test_known_ends_are_never_planned_past() -> None:
    scheduler = make()
    add(scheduler, "a", 4, max_tokens=2)
    first, second = plan(scheduler), plan(scheduler)
    commit(scheduler, first)
    assert scheduler.plan() is None
    [new] = commit(scheduler, second)
    assert new.finish is LENGTH
    assert idle(scheduler)


def test_end_token_lags_a_step_and_its_successor_is_dropped() -> None:
    scheduler = make()
    [a] = add(scheduler, "a", 4)
    first, second = plan(scheduler), plan(scheduler)
    assert commit(scheduler, first, EOS) == [(a, EOS, 0, END)]
    assert (a.finish_reason, a.stop_reason, a.output_token_ids) == (END, EOS, [EOS])
    assert scheduler.pages.num_in_use == 2  # the step in flight still writes there
    assert scheduler.plan() is None
    assert commit(scheduler, second, 60) == []
    assert a.output_token_ids == [EOS]
    assert idle(scheduler)


def test_ignore_eos_spares_the_models_end_tokens_but_not_the_requests() -> None:
    scheduler = make()
    [a] = add(scheduler, "a", 4, ignore_eos=True, stop_token_ids=[9])
    for token_id in (EOS, 8, 9):
        step(scheduler, token_id)
    assert a.output_token_ids == [EOS, 8, 9]
    assert (a.finish_reason, a.stop_reason) == (END, 9)


def test_loop_ends_a_sequence_on_a_stop_string() -> None:
    scheduler = make()
    [a] = add(scheduler, "a", 4)
    first, second = plan(scheduler), plan(scheduler)
    commit(scheduler, first)
    scheduler.finish(a, END, "stop")
    scheduler.finish(a, LENGTH)  # has ended: nothing happens
    assert (a.finish_reason, a.stop_reason) == (END, "stop")
    assert commit(scheduler, second) == []
    assert idle(scheduler)


@pytest.mark.parametrize("when", ["queued", "in flight", "between steps"])
def test_abort_ends_all_samples_and_gives_their_pages_back(when: str) -> None:
    scheduler = make()
    samples = add(scheduler, "a", 6, n=3)
    [b] = add(scheduler, "b", 6)
    first = None if when == "queued" else plan(scheduler)
    if when == "between steps":
        assert first is not None
        commit(scheduler, first)
        first = plan(scheduler)
    assert scheduler.abort("a") == samples
    assert {sample.finish_reason for sample in samples} == {ABORT}
    assert scheduler.abort("a") == scheduler.abort("nobody") == []
    if first is not None:
        assert {new.sequence for new in commit(scheduler, first)} == {b}
    assert scheduler.pages.num_in_use <= 2
    scheduler.abort("b")
    assert idle(scheduler)


def test_slot_of_an_ended_sequence_waits_for_the_step_in_flight() -> None:
    scheduler = make(max_num_seqs=1)
    add(scheduler, "a", 4)
    first, second = plan(scheduler), plan(scheduler)
    commit(scheduler, first, EOS)
    add(scheduler, "b", 4)
    assert scheduler.plan() is None
    commit(scheduler, second)
    assert plan(scheduler).slots.tolist() == [0]


# Preemption.


def test_last_in_order_is_preempted_and_resumes_with_its_tokens() -> None:
    scheduler = make(num_pages=6, prefix_caching=False)
    [a] = add(scheduler, "a", 7, max_tokens=12)
    [b] = add(scheduler, "b", 6, max_tokens=12)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert (a.status, b.status) == (Status.RUNNING, Status.WAITING)
    kept = list(b.output_token_ids)
    assert kept
    [c] = add(scheduler, "c", 3)
    while b.status is Status.WAITING:
        resumed = plan(scheduler)
        assert b.status is Status.RUNNING or c.status is Status.WAITING  # the preempted one goes first
        commit(scheduler, resumed)
    row = resumed.slots.tolist().index(b.slot)
    assert (resumed.starts[row], resumed.query_lens[row]) == (0, 6 + len(kept))
    offset = resumed.query_lens[:row].sum()
    assert resumed.token_ids[offset : offset + 6 + len(kept)].tolist() == [*b.prompt_token_ids.tolist(), *kept]
    assert b.output_token_ids[:-1] == kept


def test_low_priority_is_preempted_though_it_came_first() -> None:
    scheduler = make(num_pages=6)
    [low] = add(scheduler, "a", 7, max_tokens=12, priority=1)
    step(scheduler)
    [high] = add(scheduler, "b", 7, max_tokens=12)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert (low.status, high.status) == (Status.WAITING, Status.RUNNING)


def test_preempted_sequence_keeps_the_token_in_flight_and_waits_for_it() -> None:
    scheduler = make()
    [a] = add(scheduler, "a", 7)
    [b] = add(scheduler, "b", 7)
    first = plan(scheduler)
    scheduler._suspend(b)
    second = plan(scheduler)
    assert second.slots.tolist() == [a.slot]  # there is room for b, but its next token is not known yet
    commit(scheduler, first, 60, 61)
    assert b.output_token_ids == [61]
    third = plan(scheduler)
    assert third.token_ids.tolist() == [-1, *b.prompt_token_ids[4:].tolist(), 61]  # its own first page is a hit
    commit(scheduler, second)
    commit(scheduler, third)
    assert len(b.output_token_ids) == 2


def overlapped(scheduler: Scheduler, steps: int) -> StepPlan:
    """Run some steps, each planned before the one before it is committed; returns the last one, in flight."""
    last = plan(scheduler)
    for _ in range(steps - 1):
        following = plan(scheduler)
        commit(scheduler, last)
        last = following
    return last


def test_one_victim_is_enough_while_its_pages_are_on_their_way() -> None:
    scheduler = make(num_pages=6)
    a, b, c = (add(scheduler, name, 4, max_tokens=20)[0] for name in "abc")
    last = overlapped(scheduler, 5)  # 8 tokens each: the pool is full
    assert scheduler.plan() is None
    assert scheduler.num_preemptions == 1
    assert c.status is Status.WAITING
    commit(scheduler, last)
    assert plan(scheduler).slots.tolist() == [a.slot, b.slot]
    assert scheduler.num_preemptions == 1


def test_nobody_is_preempted_for_pages_that_a_known_end_gives_back() -> None:
    scheduler = make(num_pages=5)
    [a] = add(scheduler, "a", 8, max_tokens=20)
    [b] = add(scheduler, "b", 4, max_tokens=5)
    last = overlapped(scheduler, 5)  # b's last token is in flight, and a needs its fourth page
    assert scheduler.plan() is None
    commit(scheduler, last)
    assert b.finished
    assert plan(scheduler).slots.tolist() == [a.slot]
    assert scheduler.num_preemptions == 0


# The prefix cache.


def test_whole_prompt_hit_still_computes_the_last_token() -> None:
    scheduler = make()
    for name, cached, computed in [("a", 0, 8), ("b", 4, 4)]:
        [sequence] = add(scheduler, name, list(range(8)), max_tokens=1)
        made = step(scheduler)
        assert made.query_lens.tolist() == [computed]
        assert made.starts.tolist() == [cached]
        assert sequence.num_cached_tokens == cached
    assert scheduler.num_cached_tokens == 4


def test_next_turn_of_a_chat_reads_the_pages_its_answer_filled() -> None:
    scheduler = make()
    [a] = add(scheduler, "a", 5, max_tokens=8)
    while scheduler.has_unfinished:
        step(scheduler, 7)
    [b] = add(scheduler, "b", [*a.prompt_token_ids.tolist(), *a.output_token_ids, 1, 2])
    made = plan(scheduler)
    assert made.starts.tolist() == [12]  # 5 + 8 tokens, the last of which was never computed
    assert b.num_cached_tokens == 12


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"cache_namespace": b"x"}, {"cache_namespace": b"y"}),
        ({}, {"prompt_logprobs": 0}),
    ],
)
def test_prefixes_that_must_not_be_shared(first: dict, second: dict) -> None:
    scheduler = make()
    for options, name in ((first, "a"), (second, "b")):
        add(scheduler, name, list(range(9)), max_tokens=1, **options)
        assert step(scheduler).starts.tolist() == [0]


def test_prefix_caching_off_keeps_no_pages() -> None:
    scheduler = make(prefix_caching=False)
    for name in "ab":
        add(scheduler, name, list(range(9)), max_tokens=1)
        assert step(scheduler).starts.tolist() == [0]
    assert scheduler.pages.num_cached == 0


def test_only_computed_pages_can_be_hit() -> None:
    scheduler = make()
    add(scheduler, "a", list(range(9)))
    plan(scheduler)
    add(scheduler, "b", list(range(9)))
    assert plan(scheduler).starts.tolist() == [9, 0]  # the first step is not committed


# Samples of one request.


def test_samples_wait_for_the_prompt_and_then_copy_its_last_page() -> None:
    scheduler = make(max_num_batched_tokens=4)
    samples = add(scheduler, "a", 7, n=3, seed=7)
    assert plan(scheduler).query_lens.tolist() == [4]
    first = plan(scheduler)
    assert first.query_lens.tolist() == [3]
    assert [sample.status for sample in samples[1:]] == [Status.WAITING] * 2
    scheduler.commit(scheduler._in_flight[0].plan, StepTokens(np.zeros(1, np.int32)))
    second = plan(scheduler)
    assert second.query_lens.tolist() == [1, 1, 1]
    assert second.starts.tolist() == [7, 6, 6]
    assert second.token_ids.tolist() == [-1, 1006, 1006]
    assert second.page_table[:, 0].tolist() == [1, 1, 1]
    assert second.page_copies.tolist() == [[2, second.page_table[1, 1]], [2, second.page_table[2, 1]]]
    assert second.sampling["seed"].tolist() == [[s.seed >> 32, s.seed & 0xFFFFFFFF] for s in samples]
    assert scheduler.pages.num_in_use == 4
    assert [sample.num_cached_tokens for sample in samples] == [0, 0, 0]


def test_samples_need_no_copy_when_the_last_token_begins_a_page() -> None:
    scheduler = make()
    add(scheduler, "a", 5, n=2)
    step(scheduler)
    second = plan(scheduler)
    assert second.page_copies.shape == (0, 2)
    assert second.page_table[1].tolist() == [1, 3]


def test_samples_left_behind_by_the_first_read_the_prefix_index() -> None:
    scheduler = make(max_num_seqs=1)
    samples = add(scheduler, "a", 9, n=2, max_tokens=1)
    step(scheduler)
    assert samples[0].finished
    made = step(scheduler)
    assert made.starts.tolist() == [8]
    assert made.page_copies.shape == (0, 2)
    assert samples[1].finished
    assert idle(scheduler)


def test_pages_a_plan_copies_from_wait_for_it() -> None:
    scheduler = make(prefix_caching=False)
    first, second = add(scheduler, "a", 7, n=2, max_tokens=1)
    prefill = plan(scheduler)
    fork = plan(scheduler)
    source = int(fork.page_copies[0, 0])
    commit(scheduler, prefill)
    assert first.finished
    assert scheduler.pages.ref_counts[source] == 1
    commit(scheduler, fork)
    assert second.finished
    assert idle(scheduler)


def test_seeds_of_samples() -> None:
    assert sample_seed(7, 0) == 7
    assert sample_seed(-1, 0) == 2**64 - 1
    seeds = {sample_seed(seed, index) for seed in range(50) for index in range(128)}
    assert len(seeds) == 50 * 128
    assert all(0 <= seed < 2**64 for seed in seeds)
    high = np.array([sample_seed(1, index) >> 32 for index in range(1, 129)])
    assert len(set((high % 16).tolist())) == 16  # the high word varies too
    assert sample_seed(7, 1) == 0x27E8AC81E7BC3B89  # the same in every release: people rely on seeds


# A failed step.


def test_failed_step_ends_whole_requests_and_suspends_the_rest() -> None:
    scheduler = make(max_num_seqs=2)
    samples = add(scheduler, "a", 9, n=2)
    [b] = add(scheduler, "b", 9)
    first = plan(scheduler)  # sample 0 and b
    commit(scheduler, first)
    assert scheduler.pages.index.longest_prefix(b.page_keys)
    scheduler.finish(samples[0], END)
    second = plan(scheduler)
    assert samples[1].slot in second.slots.tolist()
    third = plan(scheduler)
    [c] = add(scheduler, "c", 9)
    assert scheduler.fail(second) == [samples[1], b]
    assert c.status is Status.WAITING
    assert scheduler.num_in_flight == 0
    assert scheduler.pages.num_free == 32
    for call in (commit, Scheduler.fail):
        with pytest.raises(ValueError, match=r"not.* in flight"):
            call(scheduler, third)
    scheduler.audit()
    assert plan(scheduler).starts.tolist() == [0]


def test_sequences_behind_a_failed_step_start_again_without_its_tokens() -> None:
    scheduler = make()
    [a] = add(scheduler, "a", 5)
    step(scheduler, 60)
    first = plan(scheduler)
    [b] = add(scheduler, "b", 5)
    plan(scheduler)
    assert scheduler.fail(first) == [a]
    assert (b.status, b.num_tokens, b.num_computed_tokens) == (Status.WAITING, 5, 0)
    again = plan(scheduler)
    assert again.token_ids.tolist() == b.prompt_token_ids.tolist()
    scheduler.reset_cache()
    assert plan(scheduler).query_lens.tolist() == [5]
