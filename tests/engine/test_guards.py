"""What keeps a service honest: deadlines, bounds on what waits, a stuck device that is seen, an audit when idle."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

import pytest
from engine_harness import TIMEOUT, House, Reference, random_prompt

from jaxinfer.engine.admission import MAX_RETRY_S, MIN_RETRY_S, Admission
from jaxinfer.engine.engine import EngineState
from jaxinfer.engine.observer import Observer, RequestRecord
from jaxinfer.errors import DeadlineExceededError, EngineStuckError, InvalidArgumentError, QueueFullError
from jaxinfer.types import Failed, FinishReason

PROMPT = random_prompt(80, 12)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


# Deadlines.


def test_a_request_ends_at_its_deadline_wherever_it_stands(open_house: Callable[..., House], reference: Reference):
    house = open_house(max_num_seqs=1)
    other = house.send(PROMPT, max_tokens=100)
    queued = house.send(PROMPT, max_tokens=5, timeout_s=0.01)
    assert isinstance(queued.error, DeadlineExceededError)
    assert "before its first token" in str(queued.error)
    assert not queued.deltas
    reference.check(other.wait().tokens, PROMPT, 100)

    began = threading.Event()
    running = house.send(PROMPT, max_tokens=100, timeout_s=0.3, on_events=lambda _: began.wait(0.05))
    assert isinstance(running.error, DeadlineExceededError)
    assert "while it was generated" in str(running.error)
    assert 0 < len(running.tokens) < 100


def test_a_request_that_would_miss_its_deadline_is_not_started(open_house: Callable[..., House], monkeypatch):
    house = open_house(max_num_seqs=1)
    go = house.pause()
    other = house.send(PROMPT, max_tokens=3)
    queued = house.send(PROMPT, max_tokens=5, timeout_s=5.0)
    house.engine.call(lambda: setattr(house.engine._loops[0], "_step_seconds", 10.0))  # a step takes longer than it has
    go()
    assert isinstance(queued.error, DeadlineExceededError)
    assert len(other.wait().tokens) == 3
    assert house.engine.stats().prompt_tokens_total == len(PROMPT)  # the other's alone


@pytest.mark.parametrize("timeout_s", [0.0, -1.0])
def test_a_deadline_that_is_over_is_refused(house: House, timeout_s: float):
    with pytest.raises(DeadlineExceededError):
        house.send(PROMPT, timeout_s=timeout_s)


def test_a_deadline_in_time_changes_nothing(house: House, reference: Reference):
    reference.check(house.ask(PROMPT, max_tokens=8, timeout_s=TIMEOUT).tokens, PROMPT, 8)


# Bounds on what waits.


def test_waiting_tokens_are_bounded(open_house: Callable[..., House]):
    house = open_house(max_num_seqs=1, max_waiting_tokens=40)
    go = house.pause()
    long = house.send(random_prompt(1, 90), max_tokens=2)  # alone, it may be as long as it likes
    with pytest.raises(QueueFullError, match="90 prompt tokens are waiting, the limit is 40") as refused:
        house.send(PROMPT, max_tokens=2)
    assert MIN_RETRY_S <= refused.value.retry_after_s <= MAX_RETRY_S
    go()
    long.wait()
    until(lambda: house.engine._admission.tokens == 0)
    go = house.pause()
    answers = [house.send(PROMPT, max_tokens=2) for _ in range(3)]
    with pytest.raises(QueueFullError, match="this prompt has 12"):
        house.send(PROMPT, max_tokens=2)
    go()
    for answer in answers:
        answer.wait()
    assert house.engine.stats().waiting_tokens == 0


def test_what_was_preempted_is_not_counted_again(open_house: Callable[..., House]):
    """It waits for pages, and still was admitted once: nobody who was let in is refused for it."""
    house = open_house(num_pages=26, max_num_seqs=8, max_waiting=2)
    answers = []
    for i in range(8):
        until(lambda: house.engine._admission.requests < 2)
        answers.append(house.send(random_prompt(i, 20), max_tokens=60))
    assert [answer.error for answer in answers] == [None] * 8
    assert house.scheduler.num_preemptions > 0


def test_a_refused_request_takes_no_place(house: House):
    for bad in ([], [10**6]):
        with pytest.raises(InvalidArgumentError):
            house.send(bad)
    assert (house.engine._admission.requests, house.engine._admission.tokens) == (0, 0)


def test_the_hint_grows_with_the_queue():
    hints = []
    for size in (10, 1000):
        admission = Admission(size, 10**6)
        for number in range(size):
            admission.come()
            if number % 2:
                admission.go(0, started=True)
        admission.requests = size
        with pytest.raises(QueueFullError) as refused:
            admission.come()
        hints.append(refused.value.retry_after_s)
    assert hints[0] <= hints[1]


# A device that hangs.


def test_a_stuck_device_is_seen_and_forgiven(open_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch):
    house = open_house(stuck_after_s=0.2)
    read, hang = house.engine.runners[0].read, threading.Event()
    monkeypatch.setattr(house.engine.runners[0], "read", lambda flight: (hang.wait(TIMEOUT), read(flight))[1])
    answer = house.send(PROMPT, max_tokens=4)
    until(lambda: house.engine.state is EngineState.STUCK)
    with pytest.raises(EngineStuckError, match="at one step for"):
        house.send(PROMPT)
    hang.set()
    assert len(answer.wait().tokens) == 4
    until(lambda: house.engine.state is EngineState.READY)
    assert len(house.ask(PROMPT, max_tokens=2).tokens) == 2


def test_a_stuck_engine_does_not_hold_up_its_end(open_house: Callable[..., House], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("jaxinfer.engine.engine.STUCK_JOIN_S", 0.1)
    house = open_house(stuck_after_s=0.1)
    read, hang = house.engine.runners[0].read, threading.Event()
    monkeypatch.setattr(house.engine.runners[0], "read", lambda flight: (hang.wait(TIMEOUT), read(flight))[1])
    answer = house.send(PROMPT, max_tokens=4)
    until(lambda: house.engine.state is EngineState.STUCK)
    assert not asyncio.run(house.engine.drain(0.05))
    house.engine.close()
    assert not answer.over  # only the loop tells it, once the step ends
    hang.set()
    assert answer.error is not None
    until(lambda: not house.engine._loops[0]._thread.is_alive())


def test_an_idle_engine_is_not_stuck(open_house: Callable[..., House]):
    house = open_house(stuck_after_s=0.05)
    house.ask(PROMPT, max_tokens=2)
    time.sleep(0.3)
    assert house.engine.state is EngineState.READY


# The idle audit.


@pytest.mark.audit_breach
def test_the_idle_audit_finds_a_page_that_is_held_by_nobody(open_house: Callable[..., House], caplog):
    house = open_house()
    house.ask(PROMPT, max_tokens=2)
    leaked: list[int] = []
    with caplog.at_level(logging.ERROR, "jaxinfer.engine.loop"):
        house.ask(PROMPT, max_tokens=2, on_events=lambda _: leaked or leaked.extend(house.scheduler.pages.allocate(1)))
        until(lambda: house.engine.stats().audit_breaches_total)
    assert house.engine.stats().audit_breaches_total == 1
    assert f"page {leaked[0]} has 1 references and 0 holders" in caplog.text
    house.on_loop(lambda: house.scheduler.pages.release(leaked))
    house.engine._loops[0].audit_breaches = 0
    house.ask(PROMPT, max_tokens=2)
    time.sleep(0.2)
    assert house.engine.stats().audit_breaches_total == 0


# The observer.


class Recorder(Observer):
    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.records: list[RequestRecord] = []
        self.fail = False

    def __getattribute__(self, name: str):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def hear(*args) -> None:
            if self.fail:
                raise RuntimeError("broken observer")
            self.calls.append((name, *args))
            if name == "on_end":
                self.records.append(args[0])

        return hear

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


def test_the_observer_hears_all(house: House):
    recorder = Recorder()
    house.engine.observe(recorder)
    answer = house.ask(PROMPT, n=2, max_tokens=5)
    with pytest.raises(InvalidArgumentError):
        house.send([])
    failed = house.send(PROMPT, max_tokens=50, timeout_s=0.05, on_events=lambda _: time.sleep(0.02))
    assert failed.error is not None
    assert recorder.calls[0][0] == "on_start"
    assert recorder.count("on_refuse") == 1
    assert ("on_refuse", "invalid_argument") in recorder.calls
    done, lost = recorder.records
    assert (done.request_id, done.n, done.max_tokens, done.error_code) == (answer.request_id, 2, 5, None)
    assert [sample.finish_reason for sample in done.samples] == [FinishReason.LENGTH] * 2
    assert [sample.output_tokens for sample in done.samples] == [5, 5]
    assert done.usage == answer.finished.usage
    assert done.timings == answer.finished.timings
    for sample in done.samples:
        assert done.timings.queue_s <= sample.first_token_s <= sample.last_token_s <= done.timings.total_s
    assert (lost.error_code, lost.samples) == ("deadline_exceeded", ())
    assert recorder.count("on_first_token") == 2 + bool(failed.deltas)
    assert recorder.count("on_next_token") == 2 * 4 + max(lost.usage.output_tokens - 1, 0)
    steps = [call[1:3] for call in recorder.calls if call[0] == "on_step"]
    assert steps[0] == (12, 1)


def test_a_broken_observer_harms_nothing(house: House, reference: Reference, caplog):
    recorder = Recorder()
    recorder.fail = True
    house.engine.observe(recorder)
    reference.check(house.ask(PROMPT, max_tokens=5).tokens, PROMPT, 5)
    assert caplog.text.count("it hears no more") == 1
    assert not any(isinstance(event, Failed) for answer in house.answers for event in answer.events)
