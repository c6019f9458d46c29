"""What fails, whom it takes along, and that nothing hangs and no page is lost; aborts, drain and close."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from engine_harness import TIMEOUT, Answer, House, Reference, random_prompt

from jaxinfer.engine import live_request
from jaxinfer.engine.engine import Engine, EngineState
from jaxinfer.engine.loop import MAX_FAILED_STEPS
from jaxinfer.errors import (
    DrainingError,
    EngineDeadError,
    InvalidArgumentError,
    RequestExistsError,
    RequestFailedError,
    StepFailedError,
)
from jaxinfer.text.detokenizer import Detokenizer
from jaxinfer.types import Delta, Failed, Finished, FinishReason

BAD = [66, 6, 66]  # the prompt whose text breaks

# One request's host work.


@pytest.fixture(params=["push", "flush"])
def broken_text(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detokenizer that breaks for one prompt: at its third token, or at its end."""

    class Broken(Detokenizer):
        def __init__(self, *args: Any, prompt_ids: Any = (), **options: Any):
            super().__init__(*args, prompt_ids=prompt_ids, **options)
            self._bad, self._pushes = list(prompt_ids) == BAD, 0

        def push(self, token_id: int):
            self._pushes += 1
            if self._bad and request.param == "push" and self._pushes == 3:
                raise ZeroDivisionError("no text of token three")
            return super().push(token_id)

        def flush(self):
            if self._bad and request.param == "flush":
                raise ZeroDivisionError("no text of the end")
            return super().flush()

    monkeypatch.setattr(live_request, "Detokenizer", Broken)


@pytest.mark.usefixtures("broken_text")
@pytest.mark.parametrize("n", [1, 3])
def test_a_broken_detokenizer_ends_its_request_alone(house: House, reference: Reference, n: int):
    resume = house.pause()
    prompts = [random_prompt(seed, 9) for seed in range(3)]
    others = [house.send(prompt, max_tokens=15) for prompt in prompts[:2]]
    bad = house.send(BAD, max_tokens=12, n=n)
    others.append(house.send(prompts[2], max_tokens=15))
    resume()
    assert isinstance(bad.error, RequestFailedError)
    assert "ZeroDivisionError" in str(bad.error)
    for prompt, answer in zip(prompts, others, strict=True):
        reference.check(answer.wait().tokens, prompt, 15)
    assert house.engine.state is EngineState.READY


@pytest.mark.usefixtures("broken_text")
def test_a_broken_detokenizer_and_an_abort(house: House):
    bad = house.send(BAD, max_tokens=None)
    house.engine.abort(bad.request_id)
    assert bad.wait()  # whichever came first, it has one end
    assert house.ask([5], max_tokens=2).reason is FinishReason.LENGTH


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_broken_sink_ends_its_request_alone(house: House, reference: Reference, at: str):
    def broken(events: list) -> None:
        if at == "first" or isinstance(events[-1], (Finished, Failed)):
            raise OSError("the client's side is gone")

    resume = house.pause()
    prompt = random_prompt(1, 9)
    other = house.send(prompt, max_tokens=15)
    answer = house.send([7, 8], max_tokens=10, on_events=broken)
    resume()
    reference.check(other.wait().tokens, prompt, 15)
    answer.check()
    # Nothing is computed for it any more, and its id is free.
    assert house.ask([7, 8], request_id=answer.request_id, max_tokens=1).reason is FinishReason.LENGTH


# A step.


class Fault:
    """Makes the runner's `dispatch` or `read` raise when `when` says so; counts how often it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: Engine, where: str, when: Callable[[Any, Any], bool]):
        runner, self.times, self.newest = engine.runners[0], 0, None
        dispatch, read = runner.dispatch, runner.read

        def failing_dispatch(plan):
            if where == "dispatch" and when(plan, None):
                self.times += 1
                raise RuntimeError("out of luck")
            self.newest = plan
            return dispatch(plan)

        def failing_read(flight):
            if where == "read" and when(flight.plan, self.newest):
                self.times += 1
                raise RuntimeError("out of luck")
            return read(flight)

        monkeypatch.setattr(runner, "dispatch", failing_dispatch)
        monkeypatch.setattr(runner, "read", failing_read)


def once(at: int) -> Callable[[Any, Any], bool]:
    """True at the call of that number, from 0."""
    calls = iter(range(10**9))
    return lambda plan, newest: next(calls) == at


@pytest.mark.parametrize("where", ["dispatch", "read"])
@pytest.mark.parametrize("at", [0, 1, 6])
def test_a_failed_step_ends_what_was_in_it(
    open_house, reference: Reference, monkeypatch: pytest.MonkeyPatch, where: str, at: int
):
    house = open_house(max_num_seqs=2)
    prompts = [random_prompt(seed, 10) for seed in range(5)]
    warm = house.ask(prompts[4], max_tokens=9)  # leaves pages in the prefix cache, which are lost with the step
    house.check_idle()
    fault = Fault(monkeypatch, house.engine, where, once(at))
    resume = house.pause()
    answers = [house.send(prompt, max_tokens=12) for prompt in prompts[:4]]
    resume()
    for answer in answers[:2]:
        assert isinstance(answer.error, StepFailedError)
        assert "out of luck" in str(answer.error)
    for prompt, answer in zip(prompts[2:4], answers[2:], strict=True):
        reference.check(answer.wait().tokens, prompt, 12)
    assert fault.times == 1
    again = house.ask(prompts[4], max_tokens=9)
    assert again.tokens == warm.tokens
    assert again.finished.usage.cached_tokens == 0
    assert house.engine.state is EngineState.READY


def test_who_runs_but_was_not_in_the_failed_step_goes_on(
    house: House, reference: Reference, monkeypatch: pytest.MonkeyPatch
):
    """The second request joins in the step behind the one that fails: its work is lost, its tokens are not."""
    prompts = [random_prompt(seed, 10) for seed in range(2)]
    when = lambda plan, newest: plan.num_seqs == 1 and newest is not plan and newest.num_seqs == 2
    fault = Fault(monkeypatch, house.engine, "read", lambda plan, newest: not fault.times and when(plan, newest))
    second: list[Answer] = []

    def join(events: list) -> None:
        if not second:
            second.append(house.send(prompts[1], max_tokens=12))

    first = house.send(prompts[0], max_tokens=40, on_events=join)
    assert isinstance(first.error, StepFailedError)
    assert first.tokens == reference.generate(prompts[0], len(first.tokens))
    reference.check(second[0].wait().tokens, prompts[1], 12)
    assert fault.times == 1


def test_all_samples_of_a_request_fail_as_one(house: House, monkeypatch: pytest.MonkeyPatch):
    Fault(monkeypatch, house.engine, "read", once(4))
    answer = house.send(random_prompt(1, 10), n=4, temperature=1.0, max_tokens=12)
    assert isinstance(answer.error, StepFailedError)


def test_failures_with_successes_between_do_not_kill(open_house, monkeypatch: pytest.MonkeyPatch):
    house = open_house(max_num_seqs=1)
    calls = iter(range(10**9))
    fault = Fault(monkeypatch, house.engine, "read", lambda plan, newest: next(calls) % 3 == 2)
    resume = house.pause()
    answers = [house.send([5 + number], max_tokens=6) for number in range(6)]
    resume()
    assert all(isinstance(answer.error, StepFailedError) for answer in answers)
    assert fault.times == 6 > MAX_FAILED_STEPS
    assert house.engine.state is EngineState.READY


@pytest.mark.parametrize("where", ["dispatch", "read"])
def test_failures_in_a_row_kill_the_engine(open_house, monkeypatch: pytest.MonkeyPatch, where: str):
    house = open_house(max_num_seqs=1)
    fault = Fault(monkeypatch, house.engine, where, lambda plan, newest: True)
    resume = house.pause()
    answers = [house.send([5 + number], max_tokens=6) for number in range(6)]
    resume()
    errors = [answer.error for answer in answers]
    assert [type(error) for error in errors] == [StepFailedError] * 2 + [EngineDeadError] * 4
    assert fault.times == MAX_FAILED_STEPS
    _assert_dead(house, "3 steps failed in a row.*out of luck")


def _assert_dead(house: House, cause: str) -> None:
    assert house.engine.state is EngineState.DEAD
    with pytest.raises(EngineDeadError, match=cause):
        house.send([5])

    async def stream() -> None:
        async for _ in house.engine.stream(house.request([5])):
            pytest.fail("a dead engine answers")

    with pytest.raises(EngineDeadError, match=cause):
        asyncio.run(asyncio.wait_for(stream(), TIMEOUT))
    assert house.engine.abort("r0") is False
    assert asyncio.run(house.engine.drain(1.0)) is True
    house.engine.close()
    house.engine.close()  # twice does no harm


@pytest.mark.parametrize("books_too", [False, True])
def test_a_bug_in_the_scheduler_kills_the_engine_but_hangs_nobody(
    house: House, monkeypatch: pytest.MonkeyPatch, books_too: bool
):
    def bug(*args: Any) -> None:
        raise AssertionError("a bug")

    resume = house.pause()
    answers = [house.send([5 + number], max_tokens=6) for number in range(3)]
    monkeypatch.setattr(house.scheduler, "plan", bug)
    if books_too:
        monkeypatch.setattr(house.scheduler, "abort", bug)
    resume()
    assert [type(answer.error) for answer in answers] == [EngineDeadError] * 3
    _assert_dead(house, "a bug")


# A slow tokenizer.


class SlowTokenizer:
    """Holds every tokenization of the engine until `go`."""

    def __init__(self, house: House, monkeypatch: pytest.MonkeyPatch):
        self.begun, self._go = threading.Event(), threading.Event()
        tokenize = house.engine.tokenize

        def slow(*args: Any, **options: Any) -> list[int]:
            self.begun.set()
            assert self._go.wait(TIMEOUT)
            return tokenize(*args, **options)

        monkeypatch.setattr(house.engine, "tokenize", slow)

    def go(self) -> None:
        self._go.set()


class Submission(threading.Thread):
    """A submit on a thread of its own, and what came of it."""

    def __init__(self, house: House, request_id: str, prompt: str, **params: Any):
        super().__init__(daemon=True)
        self.answer, self.error = Answer(request_id), None
        self._call = lambda: house.engine.submit(
            house.request(prompt, request_id=request_id, **params), self.answer.sink
        )
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self.error = error

    def finish(self) -> Submission:
        self.join(TIMEOUT)
        assert not self.is_alive()
        return self


def test_abort_while_the_prompt_is_tokenized(house: House, monkeypatch: pytest.MonkeyPatch):
    slow = SlowTokenizer(house, monkeypatch)
    submission = Submission(house, "slow", "hello", max_tokens=None)
    assert slow.begun.wait(TIMEOUT)
    with pytest.raises(RequestExistsError):
        house.send([5], request_id="slow")
    assert house.engine.abort("slow") is True
    slow.go()
    submission.finish()
    assert submission.error is None
    submission.answer.check()
    assert submission.answer.reason is FinishReason.ABORT
    assert submission.answer.tokens == []
    # The abort is not kept for the next request of this id.
    assert house.ask("hello", request_id="slow", max_tokens=2).reason is FinishReason.LENGTH


def test_abort_while_a_bad_prompt_is_tokenized(house: House, monkeypatch: pytest.MonkeyPatch):
    slow = SlowTokenizer(house, monkeypatch)
    submission = Submission(house, "slow", "hello" * 200)
    assert slow.begun.wait(TIMEOUT)
    assert house.engine.abort("slow") is True
    slow.go()
    assert isinstance(submission.finish().error, InvalidArgumentError)  # too long
    assert house.ask("hello", request_id="slow", max_tokens=2).reason is FinishReason.LENGTH


@pytest.mark.parametrize("cancel", ["task", "event loop"])
def test_a_client_that_goes_while_its_prompt_is_tokenized(house: House, monkeypatch: pytest.MonkeyPatch, cancel: str):
    slow = SlowTokenizer(house, monkeypatch)
    resume = house.pause()  # so that no step overtakes the news that the client has gone

    async def client() -> None:
        async for _ in house.engine.stream(house.request("hello", request_id="gone", max_tokens=None)):
            pytest.fail("nobody listens to this")

    async def main() -> None:
        task = asyncio.create_task(client())
        await asyncio.to_thread(slow.begun.wait, TIMEOUT)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if cancel == "task":
            slow.go()
            while house.engine._loops[0]._inbox.qsize() < 2:  # the request and its abort
                await asyncio.sleep(0.001)
            resume()
            while house.engine._live:  # it was aborted: without that it would run for 120 tokens
                await asyncio.sleep(0.001)
        else:  # asyncio.run waits for the thread, and closes the loop
            threading.Timer(0.2, slow.go).start()

    begun = time.monotonic()
    asyncio.run(main())
    resume()
    while house.engine._live:
        time.sleep(0.001)
        assert time.monotonic() - begun < TIMEOUT
    house.check_idle()
    # One step may have been on its way.
    assert house.engine.stats().output_tokens_total <= 3


@pytest.mark.parametrize("how", ["closed", "died"])
def test_an_engine_that_ends_while_a_prompt_is_tokenized(house: House, monkeypatch: pytest.MonkeyPatch, how: str):
    slow = SlowTokenizer(house, monkeypatch)
    submission = Submission(house, "slow", "hello")
    assert slow.begun.wait(TIMEOUT)
    if how == "closed":
        house.engine.close()
    else:
        monkeypatch.setattr(house.scheduler, "plan", None)
        assert isinstance(house.ask([5]).error, EngineDeadError)
    house.engine._loops[0]._thread.join(TIMEOUT)
    slow.go()
    assert isinstance(submission.finish().error, EngineDeadError)
    assert submission.answer.events == []
    assert not house.engine._live


# Abort.


def test_abort_while_queued(open_house, reference: Reference):
    house = open_house(max_num_seqs=1)
    resume = house.pause()
    prompt = random_prompt(1, 9)
    running = house.send(prompt, max_tokens=15)
    queued = house.send([5, 6, 7], max_tokens=15)
    behind = house.send(prompt, max_tokens=3)
    assert house.engine.abort(queued.request_id) is True
    resume()
    assert queued.wait().reason is FinishReason.ABORT
    assert queued.tokens == []
    assert queued.finished.usage.output_tokens == 0
    reference.check(running.wait().tokens, prompt, 15)
    reference.check(behind.wait().tokens, prompt, 3)


def test_abort_in_prefill(open_house, monkeypatch: pytest.MonkeyPatch):
    house = open_house(max_num_seqs=2, max_num_batched_tokens=4)
    answer: list[Answer] = []
    dispatch, plans = house.engine.runners[0].dispatch, []

    def counting(plan):
        plans.append(plan)
        if len(plans) == 5:
            house.engine.abort(answer[0].request_id)
        return dispatch(plan)

    monkeypatch.setattr(house.engine.runners[0], "dispatch", counting)
    resume = house.pause()
    answer.append(house.send(random_prompt(1, 100), max_tokens=5))
    resume()
    assert answer[0].wait().reason is FinishReason.ABORT
    assert answer[0].tokens == []
    house.check_idle()
    assert len(plans) == 5  # of 25


def test_abort_in_decode(house: House, reference: Reference):
    prompts = [random_prompt(seed, 9) for seed in range(2)]

    def stop(events: list) -> None:
        if len(answer.deltas) == 4:
            house.engine.abort(answer.request_id)

    resume = house.pause()
    answer = house.send(prompts[0], max_tokens=100, on_events=stop)
    other = house.send(prompts[1], max_tokens=30)
    resume()
    assert answer.wait().reason is FinishReason.ABORT
    reference.check(answer.tokens, prompts[0], len(answer.tokens))
    assert 4 <= len(answer.tokens) <= 8  # the step on its way, and what waited for the rest of a character
    reference.check(other.wait().tokens, prompts[1], 30)


def test_abort_of_all_samples(house: House):
    def stop(events: list) -> None:
        house.engine.abort(answer.request_id)

    resume = house.pause()
    answer = house.send(random_prompt(1, 9), n=4, temperature=1.0, max_tokens=100, on_events=stop)
    resume()
    assert [end.finish_reason for end in answer.finished.ends] == [FinishReason.ABORT] * 4


def test_abort_of_what_has_ended_or_never_was(house: House):
    answer = house.ask([5, 6], max_tokens=3)
    assert house.engine.abort(answer.request_id) is False
    assert house.engine.abort("never was") is False
    late: list[bool] = []

    def stop(events: list) -> None:
        if isinstance(events[-1], Finished):
            late.append(house.engine.abort("x"))

    house.ask([5, 6], request_id="x", max_tokens=3, on_events=stop)
    assert late == [False]


@pytest.mark.parametrize("after", [0, 3])
def test_a_client_that_closes_its_stream(house: House, after: int):
    """client-gone: before the first token, and in the middle."""

    async def client() -> None:
        events = house.engine.stream(house.request([5, 6, 7], max_tokens=None))
        if after == 0:
            task = asyncio.ensure_future(anext(events))
            while not house.engine._live:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            for _ in range(after):
                assert isinstance(await anext(events), Delta)
            await events.aclose()
        while house.engine._live:
            await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(client(), TIMEOUT))
    house.check_idle()
    assert house.engine.stats().output_tokens_total < 60  # of 125


def test_a_client_whose_event_loop_is_gone(house: House):
    async def client() -> None:
        events = house.engine.stream(house.request([5, 6, 7], max_tokens=None))
        await anext(events)
        leaked.append(events)  # neither closed nor collected before its loop is

    leaked: list = []
    loop = asyncio.new_event_loop()
    loop.run_until_complete(client())
    loop.close()
    deadline = time.monotonic() + TIMEOUT
    while house.engine._live:
        time.sleep(0.001)
        assert time.monotonic() < deadline


# Drain and close.


def test_drain_waits_for_the_live_and_refuses_the_new(house: House, reference: Reference):
    prompt = random_prompt(1, 9)
    resume = house.pause()
    answer = house.send(prompt, max_tokens=30)

    async def drain() -> bool:
        draining = asyncio.create_task(house.engine.drain(TIMEOUT))
        while house.engine.state is not EngineState.DRAINING:
            await asyncio.sleep(0)
        with pytest.raises(DrainingError):
            house.send([5])
        assert not draining.done()
        resume()
        return await draining

    assert asyncio.run(drain()) is True
    reference.check(answer.wait().tokens, prompt, 30)


def test_drain_waits_for_a_prompt_that_is_tokenized(house: House, monkeypatch: pytest.MonkeyPatch):
    slow = SlowTokenizer(house, monkeypatch)
    submission = Submission(house, "slow", "hello", max_tokens=2)
    assert slow.begun.wait(TIMEOUT)
    threading.Timer(0.1, slow.go).start()
    assert asyncio.run(house.engine.drain(TIMEOUT)) is True
    assert submission.finish().answer.reason is FinishReason.LENGTH


def test_drain_that_runs_out_of_time(house: House):
    resume = house.pause()
    answers = [house.send([5 + number], max_tokens=100) for number in range(3)]
    threading.Timer(0.3, resume).start()
    assert asyncio.run(house.engine.drain(0.05)) is False
    for answer in answers:
        assert isinstance(answer.error, DrainingError)
        assert "0.05 s" in str(answer.error)


def test_close_ends_what_is_live(house: House):
    resume = house.pause()
    answers = [house.send([5 + number], max_tokens=100) for number in range(3)]
    threading.Timer(0.1, resume).start()
    house.engine.close()
    assert all(isinstance(answer.error, EngineDeadError) for answer in answers)
    _assert_dead(house, "closed")


def test_close_stops_the_thread(open_house):
    house = open_house()
    thread = house.engine._loops[0]._thread
    assert thread.is_alive()
    with house.engine:
        house.ask([5], max_tokens=1)
    assert not thread.is_alive()
