"""The front end's side of a group, with workers that are threads: who is let in, what ends it, in which order."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing import AuthenticationError
from typing import Any

import numpy as np
import pytest

from jaxinfer.config import EngineConfig, SchedulerConfig
from jaxinfer.engine import control
from jaxinfer.engine.control import Channel, Kind, Pulse, dial
from jaxinfer.engine.group import Group, RemoteRunner
from jaxinfer.engine.plan_codec import MalformedMessageError, decode_plan, encode_tokens
from jaxinfer.errors import EngineDeadError, InvalidArgumentError, JaxinferError
from jaxinfer.types import SAMPLING_ROW, StepPlan, StepTokens
from sharding.distributed import Role, RoleError

TIMEOUT = 20.0
CONFIG = EngineConfig(max_num_seqs=2)
SCHEDULER = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=16, page_size=4, num_pages=8)


def plan(step: int) -> StepPlan:
    one, nothing = np.ones(1, np.int32), np.zeros((0, 2), np.int32)
    return StepPlan(step, one, one, one, one, one[:, None], one.astype(bool), np.zeros(1, SAMPLING_ROW), nothing,
                    np.zeros((0, 3), np.int32))  # fmt: skip


class Workers:
    """All workers of a group, and in place of the front end's own child."""

    def __init__(self, number: int):
        self.joined: Future[tuple[int, int]] = Future()
        self.joined.set_result((0, number))
        self.channel, self.ended, self.failure, self.how_it_ended = self, threading.Event(), None, "ended by signal 9"
        self.number, self.door = number, Future[dict[str, Any]]()
        self.config = [asdict(CONFIG) for _ in range(number)]
        self.fronts: dict[int, Channel] = {}
        self.heard: list[tuple[int, Kind]] = []
        self.killed = False
        self.answers: Callable[[int, StepPlan], StepTokens | None] = lambda rank, plan: StepTokens(plan.slots + rank)

    def say(self, kind: Kind, **door: Any) -> None:
        assert kind is Kind.DOOR
        self.door.set_result(door)
        for rank in range(self.number):
            threading.Thread(target=self._live, args=(rank,), daemon=True).start()

    def kill(self, after_s: float = 0.0) -> None:
        self.killed = True

    def dial(self, key: str | None = None) -> Channel:
        door = self.door.result(TIMEOUT)
        return dial(door["host"], door["port"], bytes.fromhex(key or door["key"]))

    def _live(self, rank: int) -> None:
        front = self.fronts[rank] = self.dial()
        front.say(Kind.HELLO, rank=rank, config=self.config[rank])
        front.say(Kind.BEAT, compiles=rank)
        ready = {"replicas": [0], "num_replicas": 1, "mesh": "tensor=2", "scheduler": asdict(SCHEDULER), "seconds": {}}
        front.say(Kind.READY, **ready)
        with suppress(EOFError, OSError):
            while (message := front.receive(TIMEOUT)).kind is not Kind.STOP:
                self.heard.append((rank, message.kind))
                if message.kind is Kind.PLAN:
                    plan = decode_plan(message.payload)
                    tokens = self.answers(rank, plan)
                    if rank == 0 and tokens is not None:
                        front.send(Kind.TOKENS, encode_tokens(tokens), replica=message.replica, step=plan.step)
            self.heard.append((rank, Kind.STOP))
            front.shut()


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    for front in workers.fronts.values():
        front.shut()


def begin(workers: Workers, stuck_after_s: float = 5.0) -> tuple[Group, RemoteRunner, list[EngineDeadError]]:
    group = Group(workers, CONFIG, lambda stage, done, total: None)  # type: ignore[arg-type]
    group.gather("127.0.0.1")
    assert group.wait_ready() == SCHEDULER
    (runner,) = group.runners(stuck_after_s)
    lost: list[EngineDeadError] = []
    group.serve(lost.append)
    return group, runner, lost


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def test_all_get_the_plans_and_the_first_answers(workers: Workers):
    group, runner, lost = begin(workers)
    flights = [runner.dispatch(plan(step)) for step in (3, 4)]
    assert [runner.read(flight).token_ids.tolist() for flight in flights] == [[1], [1]]
    runner.reset()
    until(lambda: runner.compiles_after_warm_up == 1)  # of both together
    group.stop()
    assert not lost
    for rank in range(2):
        kinds = [kind for who, kind in workers.heard if who == rank and kind is not Kind.BEAT]
        assert kinds == [Kind.PLAN, Kind.PLAN, Kind.RESET, Kind.STOP]
    assert [rank for rank, kind in workers.heard if kind is Kind.STOP] == [1, 0]  # the coordinator's goes last
    assert workers.killed  # if it had not ended by itself


def test_one_that_hangs_up_wakes_who_waits_for_tokens(workers: Workers):
    group, runner, lost = begin(workers)
    workers.answers = lambda rank, plan: None
    flight = runner.dispatch(plan(0))
    threading.Timer(0.1, workers.fronts[1].shut).start()
    with pytest.raises(EngineDeadError, match="process 1 of 2 is lost: its connection closed"):
        runner.read(flight)
    until(lambda: lost and workers.killed)
    assert len(lost) == 1
    with pytest.raises(EngineDeadError, match="process 1 of 2"):
        runner.dispatch(plan(1))
    group.stop()  # changes nothing
    until(lambda: not any(kind is Kind.STOP for _, kind in workers.heard))


def test_a_step_that_never_comes_back_ends_it_though_all_give_signs_of_life(workers: Workers):
    _, runner, lost = begin(workers, stuck_after_s=0.1)
    workers.answers = lambda rank, plan: None
    with pytest.raises(EngineDeadError, match=r"step 7 has not come back for 0\.3 s"):
        runner.read(runner.dispatch(plan(7)))
    until(lambda: lost)


def test_a_step_out_of_order_ends_it(workers: Workers):
    _, runner, _ = begin(workers)
    runner.dispatch(plan(7))
    with pytest.raises(EngineDeadError, match="step 7 came for step 8"):
        runner.read(runner.dispatch(plan(8)))


def test_the_cause_is_who_ended_and_not_who_tells_of_it_first(workers: Workers):
    _, runner, lost = begin(workers)
    workers.answers = lambda rank, plan: None
    flight = runner.dispatch(plan(0))
    workers.fronts[0].say(Kind.FAILED, code="internal", message="step 0: connection reset by peer")
    threading.Timer(0.1, workers.fronts[1].shut).start()
    with pytest.raises(EngineDeadError, match="process 1 of 2 is lost"):
        runner.read(flight)
    until(lambda: lost)


def test_a_silent_one_is_lost(workers: Workers, monkeypatch: pytest.MonkeyPatch):
    _, _, lost = begin(workers)  # these give one sign each
    monkeypatch.setattr("jaxinfer.engine.group.LOST_S", 0.2)
    until(lambda: lost)
    assert "gave no sign of life for 0.2 s" in str(lost[0])


def test_what_cannot_be_read_ends_it(workers: Workers):
    _, _, lost = begin(workers)
    workers.fronts[1]._connection.send_bytes(b"nonsense")
    until(lambda: lost)
    assert "process 1 of 2 is lost: it said what cannot be read: 8 bytes that are no message" in str(lost[0])


def test_a_stranger_is_not_let_in(workers: Workers, caplog: pytest.LogCaptureFixture):
    ready = threading.Event()
    live = workers._live
    workers._live = lambda rank: (ready.wait(TIMEOUT), live(rank))  # type: ignore[method-assign, assignment]
    begun: list[Any] = []
    starting = threading.Thread(target=lambda: begun.append(begin(workers)), daemon=True)
    starting.start()
    with pytest.raises((AuthenticationError, EOFError, OSError)):
        workers.dial(key="00" * 32)
    door = workers.door.result(TIMEOUT)
    silent = socket.create_connection((door["host"], door["port"]))  # says nothing, and holds nobody up
    ready.set()
    starting.join(TIMEOUT)
    silent.close()
    _, runner, _ = begun[0]
    assert runner.read(runner.dispatch(plan(0))).token_ids.tolist() == [1]
    until(lambda: "who is no worker" in caplog.text)
    until(lambda: not _listens(door))  # nobody else is let in later


def _listens(door: dict[str, Any]) -> bool:
    with suppress(OSError), socket.create_connection((door["host"], door["port"]), 1):
        return True
    return False


def test_other_settings_are_refused_by_name(workers: Workers):
    workers.config[1] = asdict(replace(CONFIG, mesh="tensor=4"))
    with pytest.raises(InvalidArgumentError, match="mesh = None is not allowed: process 1 was started with 'tensor=4'"):
        begin(workers)


def test_a_worker_that_ends_before_it_came_ends_the_start(workers: Workers):
    workers._live = lambda rank: workers.ended.set()  # type: ignore[method-assign]
    with pytest.raises(EngineDeadError, match="process 0 of 2 is lost: the worker ended by signal 9"):
        begin(workers)


def test_a_control_host_that_is_not_this_machines(workers: Workers):
    group = Group(workers, CONFIG, lambda stage, done, total: None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"control_host = '192\.0\.2\.1' is not allowed"):
        group.gather("192.0.2.1")


def test_a_process_that_slept_itself_takes_nobody_for_silent(monkeypatch: pytest.MonkeyPatch):
    now = [100.0]
    monkeypatch.setattr(control.time, "monotonic", lambda: now[0])
    pulse = Pulse()
    for expected in (0.5, 1.0, 1.5):
        now[0] += 0.5
        assert pulse.silent_s() == expected
    now[0] += 600
    assert pulse.silent_s() == 0.0
    now[0] += 0.5
    assert pulse.silent_s() == 0.5
    pulse.beat()
    assert pulse.silent_s() == 0.0


def test_errors_keep_their_codes():
    told = control.failure(InvalidArgumentError("mesh", "x", "y"))
    error = control.error_of("process 1", told)
    assert (error.code, str(error)) == ("invalid_argument", "process 1: mesh = 'x' is not allowed: y")
    assert control.failure(MemoryError("no room")) == {"code": "internal", "message": "MemoryError: no room"}
    assert JaxinferError.code == "internal"


def test_messages_that_are_no_json():
    message = control.Message(Kind.BEAT, 0, 0, memoryview(b"{"))
    with pytest.raises(MalformedMessageError, match="kind BEAT that is no JSON"):
        _ = message.fields


@pytest.mark.parametrize(
    ("given", "detect", "said"),
    [
        (("a:1", None, None), False, "go together"),
        ((None, 2, 0), False, "go together"),
        (("a", 2, 0), False, "not host:port"),
        (("a:0", 2, 0), False, "not host:port"),
        ((":1", 2, 0), False, "not host:port"),
        (("a:1", 2, 2), False, "process_id 2 is not from 0 to num_processes - 1 = 1"),
        (("a:1", 2, 0), True, "either"),
    ],
)
def test_roles_that_do_not_go_together(given: tuple[Any, Any, Any], detect: bool, said: str):
    with pytest.raises(RoleError, match=said):
        Role.of(*given, detect=detect)


def test_roles():
    assert Role.of(None, None, None, detect=False) is None
    assert Role.of(None, None, None, detect=True) == Role()
    role = Role.of("[::1]:80", 2, 1, detect=False)
    assert role is not None
    assert (role.coordinator_host, role.process_id) == ("::1", 1)
