"""The front end of several processes: it plans, their workers run the plans, and when one is lost all end.

The front end touches neither devices nor `jax.distributed`: a worker that dies or hangs can block or kill others, but
not what clients talk to.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any, NamedTuple

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.source import resolve
from jaxinfer.config import EngineConfig, SchedulerConfig
from jaxinfer.engine.control import CONNECT_S, LOST_S, START_LOST_S, Channel, Kind, Message, Pulse, admit, error_of
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.plan_codec import MalformedMessageError, decode_tokens, encode_plan
from jaxinfer.engine.startup import Progress, open_tokenizer
from jaxinfer.engine.worker_process import EXIT_S, WorkerProcess
from jaxinfer.errors import EngineDeadError, InvalidArgumentError, JaxinferError
from jaxinfer.types import StepPlan, StepTokens

logger = logging.getLogger(__name__)

STUCK_TIMES = 3  # a step that takes so many times what makes an engine stuck has lost the group
_WATCH_S = 0.5
_HINDSIGHT_S = 0.3  # a process that ends makes others fail, which may tell of it first


class _Report(NamedTuple):
    """Something that ends the group; `ended` if the process went without a word."""

    rank: int
    why: str
    error: JaxinferError | None = None
    ended: bool = False


class _Member:
    """A worker, as the front end sees it."""

    def __init__(self, rank: int, channel: Channel, config: dict[str, Any]):
        self.rank, self.channel, self.config, self.pulse = rank, channel, config, Pulse()
        self.ready: dict[str, Any] | None = None
        self.compiles = 0
        self.gone = threading.Event()


def start_group(
    worker: WorkerProcess,
    config: EngineConfig,
    *,
    host: str,
    cache_dir: Path,
    offline: bool = False,
    progress: Progress | None = None,
) -> Engine:
    """An engine over the workers of all processes, ready; called where rank 0 is. Closing it ends them all.

    Args:
      worker: this process's own.
      host: an address of this machine that all workers reach.

    Raises:
      JaxinferError: what went wrong, and in which process; all workers have ended, or will.
    """
    report: Progress = progress or (lambda stage, done, total: None)
    begun = time.perf_counter()
    group = Group(worker, config, report)
    try:
        group.gather(host)
        met = time.perf_counter()
        source = resolve(
            config.model,
            cache_dir=cache_dir,
            offline=offline,
            progress=lambda done, total: report("download", done, total),
        )
        checkpoint = open_checkpoint(source)
        tokenizer = open_tokenizer(checkpoint)
        scheduler = group.wait_ready()
        engine = Engine(
            *(config.model, checkpoint.config, scheduler, tokenizer, group.runners(config.stuck_after_s)),
            stuck_after_s=config.stuck_after_s,
            group=group,
        )
        engine.startup_seconds = {"meet": round(met - begun, 2), **group.seconds}
        group.serve(engine.lose)
    except BaseException:
        group.end()
        raise
    engine._begin()
    return engine


class Group:
    """The workers of all processes.

    Attributes:
      mesh: that they run on.
      seconds: what each part of the start took in process 0.
      error: what has ended it, once something has.
    """

    def __init__(self, worker: WorkerProcess, config: EngineConfig, progress: Progress):
        self._worker, self._config, self._progress = worker, config, progress
        self._members: dict[int, _Member] = {}
        self._runners: list[RemoteRunner] = []
        self._changed = threading.Condition()
        self._reports: queue.SimpleQueue[_Report] = queue.SimpleQueue()
        self._on_lost: Callable[[EngineDeadError], None] | None = None
        self._stopping = False
        self._lost = threading.Event()
        self.error: EngineDeadError | None = None
        self._start_error: JaxinferError | None = None
        self.mesh, self.seconds = "", dict[str, float]()
        self._size = 0

    # The start.

    def gather(self, host: str) -> None:
        """Until every worker has come."""
        _, self._size = self._worker.joined.result()
        key = secrets.token_bytes(32)
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        try:
            listener = socket.create_server((host, 0), family=family, backlog=self._size)
        except OSError as error:
            allowed = f"an address of this machine that all processes reach ({error.strerror or error})"
            raise InvalidArgumentError("control_host", host, allowed) from error
        _start(self._watch)
        port = listener.getsockname()[1]
        _start(self._accept, listener, key)
        self._worker.channel.say(Kind.DOOR, host=host, port=port, key=key.hex())
        self._wait(lambda: len(self._members) == self._size, CONNECT_S, "come to the front end")
        for rank, member in sorted(self._members.items()):
            for name, ours in json.loads(json.dumps(asdict(self._config))).items():  # as theirs have come
                if member.config.get(name) != ours:
                    theirs = f"process {rank} was started with {member.config.get(name)!r}"
                    raise InvalidArgumentError(name, ours, f"{theirs}, process 0 with this; they must be the same")

    def _accept(self, listener: socket.socket, key: bytes) -> None:
        listener.settimeout(_WATCH_S)
        with listener:
            while len(self._members) < self._size and not self._stopping:
                try:
                    connected, _ = listener.accept()
                except TimeoutError:
                    continue
                _start(self._meet, connected, key)

    def _meet(self, connected: socket.socket, key: bytes) -> None:
        """The life of a connection."""
        try:
            channel = admit(connected, key)
            hello = channel.receive(CONNECT_S)
            if hello.kind is not Kind.HELLO:
                raise MalformedMessageError(f"{hello.kind.name} in place of a greeting")
            rank, config = hello.fields["rank"], hello.fields["config"]
        except (AuthenticationError, EOFError, OSError, MalformedMessageError, KeyError) as error:
            logger.warning("somebody came to the control port who is no worker: %s", error or type(error).__name__)
            return
        member = _Member(rank, channel, config)
        with self._changed:
            self._members[rank] = member
            self._changed.notify_all()
        self._receive(member)

    def _receive(self, member: _Member) -> None:
        failed = False
        try:
            while True:
                message = member.channel.receive()
                member.pulse.beat()
                failed = failed or message.kind is Kind.FAILED
                self._take(member, message)
        except (EOFError, OSError, MalformedMessageError, KeyError, IndexError) as error:
            if not failed:
                closed = isinstance(error, (EOFError, OSError))
                why = "its connection closed" if closed else f"it said what cannot be read: {error}"
                self._reports.put(_Report(member.rank, why, ended=True))
            member.channel.shut()
            member.gone.set()

    def _take(self, member: _Member, message: Message) -> None:
        if message.kind is Kind.TOKENS:
            self._runners[message.replica].arrived.put(message)
        elif message.kind is Kind.BEAT:
            member.compiles = message.fields["compiles"]
            member.channel.send(Kind.BEAT)
        elif message.kind is Kind.PROGRESS:
            told = message.fields
            self._progress(told["stage"], told["done"], told["total"])
        elif message.kind is Kind.READY:
            with self._changed:
                member.ready = message.fields
                self._changed.notify_all()
        elif message.kind is Kind.FAILED:
            error = error_of(f"process {member.rank}", message.fields)
            self._reports.put(_Report(member.rank, message.fields["message"], error))

    def _wait(self, condition: Callable[[], bool], timeout: float | None, what: str) -> None:
        with self._changed:
            self._changed.wait_for(lambda: condition() or self._start_error is not None, timeout)
        if self._start_error is not None:
            raise self._start_error
        if not condition():
            missing = ", ".join(str(rank) for rank in range(self._size) if rank not in self._members)
            raise JaxinferError(f"processes {missing} had not {what} after {timeout:g} s")

    def wait_ready(self) -> SchedulerConfig:
        """Until every worker has loaded and compiled; what each replica's scheduler is to be."""
        members = list(self._members.values())
        self._wait(lambda: all(member.ready for member in members), None, "begun")
        ready = {member.rank: member.ready for member in members if member.ready}
        self.mesh, self.seconds = ready[0]["mesh"], ready[0]["seconds"]
        for rank, theirs in ready.items():
            for name in ("mesh", "scheduler"):
                if theirs[name] != ready[0][name]:
                    raise JaxinferError(f"process {rank} has {name} {theirs[name]}, process 0 {ready[0][name]}")
        return SchedulerConfig(**ready[0]["scheduler"])

    def runners(self, stuck_after_s: float) -> list[RemoteRunner]:
        """Of every replica."""
        ready = {rank: member.ready for rank, member in sorted(self._members.items()) if member.ready}
        for replica in range(ready[0]["num_replicas"]):
            own = [self._members[rank] for rank, said in ready.items() if replica in said["replicas"]]
            self._runners.append(RemoteRunner(self, replica, own, STUCK_TIMES * stuck_after_s))
        return self._runners

    def serve(self, on_lost: Callable[[EngineDeadError], None]) -> None:
        """From now on `on_lost` hears if the group ends."""
        with self._changed:
            self._on_lost = on_lost
            error = self.error
        if error is not None:
            raise self._start_error or error

    @property
    def compiles_after_warm_up(self) -> int:
        return sum(member.compiles for member in self._members.values())

    # The end.

    def report(self, rank: int, why: str) -> None:
        """A process has to be taken for lost."""
        self._reports.put(_Report(rank, why))

    def _watch(self) -> None:
        while not self._stopping:
            try:
                reports = [self._reports.get(timeout=_WATCH_S)]
            except queue.Empty:
                reports = self._silent()
                if not reports:
                    continue
            end = time.monotonic() + _HINDSIGHT_S
            while (left := end - time.monotonic()) > 0:
                try:
                    reports.append(self._reports.get(timeout=left))
                except queue.Empty:
                    break
            if not self._stopping:
                self._lose(next((report for report in reports if report.ended), reports[0]))
            return

    def _silent(self) -> list[_Report]:
        """Those that give no sign of life, and this process's own worker if it ended before it came here."""
        if 0 not in self._members and self._worker.ended.is_set():
            why = f"the worker {self._worker.how_it_ended}"
            return [_Report(0, why, self._worker.failure, ended=True)]
        limits = {member: LOST_S if member.ready else START_LOST_S for member in list(self._members.values())}
        return [
            _Report(member.rank, f"it gave no sign of life for {limit:g} s", ended=True)
            for member, limit in limits.items()
            if member.pulse.silent_s() > limit
        ]

    def _lose(self, cause: _Report) -> None:
        dead = EngineDeadError(f"process {cause.rank} of {self._size} is lost: {cause.why}")
        logger.error("%s; all end", dead)
        with self._changed:
            self.error, self._start_error = dead, cause.error or dead
            on_lost = self._on_lost
            self._changed.notify_all()
        self._lost.set()
        for runner in self._runners:
            runner.arrived.put(None)
        if on_lost is not None:
            on_lost(dead)
        self.end()

    def lost(self) -> EngineDeadError:
        """The error, where it must come any moment."""
        self._lost.wait(LOST_S + _WATCH_S + _HINDSIGHT_S)
        return self.error or EngineDeadError("a worker does not answer")

    def end(self) -> None:
        """Ends all workers, at once and in whatever state."""
        self._stopping = True
        for member in list(self._members.values()):
            member.channel.shut()  # upon which a worker ends itself
        self._worker.kill()

    def stop(self) -> None:
        """Ends all workers when their work is done. Process 0 goes last, since the others end badly without it."""
        if self.error is not None:
            return
        self._stopping = True
        members, end = self._members.values(), time.monotonic() + EXIT_S
        for some in ([member for member in members if member.rank], [member for member in members if not member.rank]):
            for member in some:
                with suppress(OSError):
                    member.channel.send(Kind.STOP)
            for member in some:
                member.gone.wait(max(0.0, end - time.monotonic()))
        self._worker.kill(after_s=EXIT_S)


class RemoteFlight(NamedTuple):
    """A step that has been sent."""

    plan: StepPlan


class RemoteRunner:
    """Runs a replica's plans on the workers that have its devices: all get them, the first sends the tokens back.

    Any failure of theirs ends the group: they would no longer be in step.
    """

    def __init__(self, group: Group, replica: int, members: Sequence[_Member], patience_s: float):
        self._group, self._replica, self._members, self._patience_s = group, replica, members, patience_s
        self.arrived: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None when the group is lost

    @property
    def compiles_after_warm_up(self) -> int:
        return self._group.compiles_after_warm_up

    def dispatch(self, plan: StepPlan) -> RemoteFlight:
        """Sends a plan.

        Raises:
          EngineDeadError: the group is lost.
        """
        self._send(Kind.PLAN, encode_plan(plan))
        return RemoteFlight(plan)

    def read(self, flight: RemoteFlight) -> StepTokens:
        """Waits for a step's tokens. Raises: as `dispatch`."""
        try:
            message = self.arrived.get(timeout=self._patience_s)
        except queue.Empty:
            rank, step = self._members[0].rank, flight.plan.step
            self._group.report(rank, f"step {step} has not come back for {self._patience_s:g} s")
            message = None
        if message is None:
            raise self._group.lost()
        if message.step != flight.plan.step % (1 << 32):
            self._group.report(self._members[0].rank, f"step {message.step} came for step {flight.plan.step}")
            raise self._group.lost()
        return decode_tokens(message.payload)

    def reset(self) -> None:
        """Raises: as `dispatch`."""
        self._send(Kind.RESET)

    def _send(self, kind: Kind, payload: bytes = b"") -> None:
        if self._group.error is not None:
            raise self._group.error
        try:
            for member in self._members:
                member.channel.send(kind, payload, replica=self._replica)
        except OSError:
            raise self._group.lost() from None


def _start(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, name=f"jaxinfer{function.__name__}", daemon=True).start()
