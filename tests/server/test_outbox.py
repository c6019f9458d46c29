"""Events between the engine's thread and a client: nothing lost, nothing out of order, little held."""

from __future__ import annotations

import asyncio
import sys
import threading
from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import run

from jaxinfer.errors import StepFailedError
from jaxinfer.types import (
    Delta,
    Failed,
    Finished,
    PositionLogprobs,
    PromptLogprobs,
    Timings,
    TokenLogprob,
    Usage,
)
from server import outbox as outbox_module
from server.outbox import MAX_MERGED_TOKENS, Outbox, merge_deltas

END = Finished((), Usage(1, 1, 0), Timings(0, 0, 0))
PROMPT = PromptLogprobs(())


def at(token_id: int) -> PositionLogprobs:
    return PositionLogprobs(TokenLogprob(token_id, -0.5, 1), ())


def delta(index: int, text: str, *token_ids: int, logprobs: bool = False) -> Delta:
    return Delta(index, text, token_ids, tuple(map(at, token_ids)) if logprobs else ())


deltas = st.lists(
    st.builds(
        lambda index, text, ids: delta(index, text, *ids, logprobs=index == 0),
        st.integers(0, 2),
        st.text(max_size=3),
        st.lists(st.integers(0, 9), max_size=4),
    ),
    max_size=40,
)


def whole(events, index):
    """All that a sample has said, in one."""
    mine = [event for event in events if isinstance(event, Delta) and event.index == index]
    return (
        "".join(each.text for each in mine),
        [token_id for each in mine for token_id in each.token_ids],
        [position for each in mine for position in each.logprobs],
    )


def test_adjacent_deltas_of_a_sample_become_one():
    events = [delta(0, "a", 1), delta(0, "", 2), delta(0, "bc", 3, 4), END]
    assert merge_deltas(events) == [delta(0, "abc", 1, 2, 3, 4), END]
    assert merge_deltas([delta(0, "a", 1, logprobs=True)] * 2) == [delta(0, "aa", 1, 1, logprobs=True)]


def test_samples_do_not_part_each_other_and_keep_apart():
    events = [PROMPT, delta(1, "x", 1), delta(0, "a", 2), delta(1, "y", 3), delta(0, "b", 4), END]
    assert merge_deltas(events) == [PROMPT, delta(1, "xy", 1, 3), delta(0, "ab", 2, 4), END]


def test_what_cannot_be_merged_is_the_same_object():
    one = delta(0, "a", 1)
    assert merge_deltas([one])[0] is one
    assert merge_deltas([]) == []
    assert merge_deltas([one, END, one]) == [one, END, one]


def test_a_merged_delta_is_at_most_so_long():
    full = delta(0, "x", *range(MAX_MERGED_TOKENS))
    assert merge_deltas([full, delta(0, "a", 1)]) == [full, delta(0, "a", 1)]
    assert merge_deltas([full, delta(0, "no tokens")]) == [delta(0, "xno tokens", *range(MAX_MERGED_TOKENS))]
    larger = delta(0, "x", *range(MAX_MERGED_TOKENS + 1))
    assert merge_deltas([delta(0, "a", 1), larger, delta(0, "b", 2)]) == [delta(0, "a", 1), larger, delta(0, "b", 2)]
    sizes = [len(each.token_ids) for each in merge_deltas([delta(0, "", 1)] * (3 * MAX_MERGED_TOKENS + 5))]
    assert sizes == [MAX_MERGED_TOKENS] * 3 + [5]


@settings(max_examples=200, deadline=None)
@given(deltas, st.integers(1, 12))
def test_merging_loses_nothing(events, limit):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(outbox_module, "MAX_MERGED_TOKENS", limit)
        merged = merge_deltas(events)
    for index in range(3):
        assert whole(merged, index) == whole(events, index)
        sizes = [len(each.token_ids) for each in merged if each.index == index]
        assert all(one + two > limit for one, two in pairwise(sizes))  # no two could be one


def test_a_reader_that_keeps_up_gets_each_as_it_came():
    async def main():
        box = Outbox()
        sent = [delta(0, "a", 1), delta(0, "b", 2), END]
        got = []
        for event in sent:
            threading.Thread(target=box.put, args=([event],)).start()
            got.append(await anext(box))
        assert got == sent
        assert box.over
        with pytest.raises(StopAsyncIteration):
            await anext(box)

    run(main())


def test_a_reader_that_lags_gets_little_and_little_is_held():
    async def main():
        box = Outbox()
        count = 50_000
        for number in range(count):
            box.put([delta(0, chr(97 + number % 26), number)])
            assert len(box._waiting) < 200
        held = sum(sys.getsizeof(each.text) + sys.getsizeof(each.token_ids) for each in box._waiting)
        assert held < 12 * count
        box.put([END])
        *got, last = [event async for event in box]
        assert last is END
        assert len(got) <= count / MAX_MERGED_TOKENS + 1
        assert whole(got, 0) == ("".join(chr(97 + number % 26) for number in range(count)), [*range(count)], [])

    run(main())


def test_an_engine_and_a_reader_in_a_race():
    async def main():
        for _ in range(30):
            box = Outbox()

            def fill(box: Outbox) -> None:
                for number in range(500):
                    box.put([delta(number % 2, "", number)])
                box.put([delta(0, "end"), END])

            thread = threading.Thread(target=fill, args=(box,))
            thread.start()
            got = []
            async for event in box:
                got.append(event)
                await asyncio.sleep(0)
            thread.join()
            assert whole(got, 0)[:2] == ("end", [*range(0, 500, 2)])
            assert whole(got, 1)[1] == [*range(1, 500, 2)]
            assert [is_end for is_end, _ in groupby(event is END for event in got)] == [False, True]

    run(main())


def test_an_error_comes_after_what_came_before_it():
    async def main():
        box = Outbox()
        box.put([delta(0, "a", 1), Failed(StepFailedError("it failed"))])
        assert (await anext(box)).text == "a"
        with pytest.raises(StepFailedError):
            await anext(box)

    run(main())


def test_nothing_follows_the_last_event():
    async def main():
        box = Outbox()
        box.put([END])
        box.put([Failed(StepFailedError("too late"))])
        assert [event async for event in box] == [END]

    run(main())


def test_the_whole_comes_when_the_last_event_is_in():
    async def main():
        box = Outbox()
        waiting = asyncio.create_task(box.whole())
        for text in "abc":
            box.put([delta(0, text, 1)])
            await asyncio.sleep(0.01)
        assert not waiting.done()
        threading.Thread(target=box.put, args=([END],)).start()
        assert await asyncio.wait_for(waiting, 2) == [delta(0, "abc", 1, 1, 1), END]
        failed = Outbox()
        failed.put([delta(0, "a", 1), Failed(StepFailedError("it failed"))])
        with pytest.raises(StepFailedError):
            await failed.whole()

    run(main())


def test_a_closed_one_holds_nothing_and_takes_nothing():
    async def main():
        box = Outbox()
        box.put([delta(0, "a", 1), delta(0, "b", 2)])
        box.close()
        box.put([END])
        assert box.over
        assert not box._waiting
        assert [event async for event in box] == []

    run(main())


def test_an_engine_may_outlive_the_event_loop():
    async def main():
        return Outbox()

    box = asyncio.run(main())
    box.put([delta(0, "a", 1)])
    box.put([END])
    assert box.over
