"""The worker: one process of a group, with devices; runs the plans that the front end sends.

`python -m jaxinfer.worker FD`, where FD is the connection to its parent. It ends at once, whatever its devices are at,
when it is told to, or when its parent or the front end is gone.
"""

from __future__ import annotations

import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.engine.control import BEAT_S, Channel, Kind, Message, dial, failure
from jaxinfer.engine.plan_codec import MalformedMessageError, decode_plan, encode_tokens
from jaxinfer.errors import JaxinferError
from jaxinfer.logs import LogFormat, configure

logger = logging.getLogger("jaxinfer.worker")

# The front end answers every sign of life. One whose machine is gone closes no connection.
FRONT_END_SILENT_S = 30.0
FAREWELL_S = 10.0  # for the front end to hang up on a worker that failed

type Inbox = queue.SimpleQueue[Message]


def main() -> None:
    # They mean the parent, which decides when it is time.
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)
    parent = Channel(Connection(int(sys.argv[1])))
    job = parent.receive().fields
    configure(LogFormat(job["logs"]["format"]))
    for name in ("jaxinfer", "sharding"):
        logging.getLogger(name).setLevel(job["logs"]["level"])
    inbox: Inbox = queue.SimpleQueue()
    _start(_receive, "its parent", parent, inbox, None)
    _start(_beat, parent, dict)
    told = [parent]
    try:
        _work(job, told, inbox)
    except BaseException as error:
        _fail(told, error)


def _start(function: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=function, args=arguments, name=function.__name__, daemon=True).start()


def _fail(told: list[Channel], error: BaseException) -> None:
    """Says why it ends. It does not go before the front end has heard: its end would look like the cause of others'."""
    if not isinstance(error, JaxinferError):
        logger.error("the worker failed", exc_info=error)
    for channel in told:
        try:
            channel.say(Kind.FAILED, **failure(error))
        except OSError:
            continue
    time.sleep(FAREWELL_S)
    os._exit(1)


def _receive(who: str, channel: Channel, inbox: Inbox, silent_s: float | None) -> None:
    try:
        while True:
            message = channel.receive(silent_s)
            if message.kind is Kind.STOP:
                os._exit(0)  # the main thread may be blocked for ever
            if message.kind is not Kind.BEAT:
                inbox.put(message)
    except (EOFError, OSError, MalformedMessageError) as error:
        logger.info("%s is gone (%s); the worker ends", who, error or type(error).__name__)
        os._exit(1)


def _beat(channel: Channel, about: Callable[[], dict[str, Any]]) -> None:
    try:
        while True:
            channel.say(Kind.BEAT, **about())
            time.sleep(BEAT_S)
    except OSError:
        return  # the receiving thread ends the process


def _work(job: dict[str, Any], told: list[Channel], inbox: Inbox) -> None:
    import jax

    from jaxinfer.engine.runner import Runner
    from jaxinfer.engine.startup import Layout, start_up
    from sharding.distributed import Role, broadcast, join, least, own_replicas

    parent, config = told[0], EngineConfig(**job["config"])
    join(Role(**job["role"]))
    rank = jax.process_index()
    parent.say(Kind.JOINED, rank=rank, num_processes=jax.process_count())
    door = broadcast(inbox.get().fields if rank == 0 else None)
    front = dial(door["host"], door["port"], bytes.fromhex(door["key"]))
    told.append(front)
    front.say(Kind.HELLO, rank=rank, config=job["config"])
    runners: dict[int, Runner] = {}
    _start(_receive, "the front end", front, inbox, FRONT_END_SILENT_S)
    compiles = lambda: max((runner.compiles_after_warm_up for runner in list(runners.values())), default=0)
    _start(_beat, front, lambda: {"compiles": compiles()})

    own: dict[int, bool] = {}

    def share(layout: Layout) -> Layout:
        own.update(own_replicas(layout.submeshes))
        # Devices may have unequal room left, but all must compile the same.
        scheduler = replace(layout.scheduler, num_pages=least(layout.scheduler.num_pages))
        return replace(layout, submeshes=[layout.submeshes[number] for number in own], scheduler=scheduler)

    def progress(stage: str, done: int, total: int) -> None:
        if rank == 0 and stage != "download":  # the front end looks for the model itself
            front.say(Kind.PROGRESS, stage=stage, done=done, total=total)

    started = start_up(config, cache_dir=Path(job["cache_dir"]), offline=job["offline"], progress=progress, share=share)
    runners |= zip(own, started.runners, strict=True)
    readers = {
        number: _Reader(number, runner, front if own[number] else None, told) for number, runner in runners.items()
    }
    front.say(
        Kind.READY,
        replicas=list(own),
        num_replicas=started.layout.mesh.data,
        mesh=str(started.layout.mesh),
        scheduler=asdict(started.layout.scheduler),
        seconds=started.seconds,
    )
    parent.say(Kind.READY)
    while True:
        message = inbox.get()
        if message.kind is Kind.PLAN:
            plan = decode_plan(message.payload)
            readers[message.replica].flights.put(runners[message.replica].dispatch(plan))
        elif message.kind is Kind.RESET:
            runners[message.replica].reset()


class _Reader:
    """Reads the steps of a replica on a thread, so that the next are dispatched meanwhile.

    Every process of the replica does, and so learns of a step that failed on it; the first sends the tokens.

    Args:
      front: where they are sent; None for the other processes.
    """

    def __init__(self, replica: int, runner: Any, front: Channel | None, told: list[Channel]):
        self.flights: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._replica, self._runner, self._front, self._told = replica, runner, front, told
        _start(self._read)

    def _read(self) -> None:
        while True:
            flight = self.flights.get()
            step = flight.plan.step
            try:
                payload = encode_tokens(self._runner.read(flight))
            except BaseException as error:
                _fail(self._told, JaxinferError(f"step {step}: {failure(error)['message']}"))
            if self._front is not None:
                try:
                    self._front.send(Kind.TOKENS, payload, replica=self._replica, step=step)
                except OSError:
                    return  # the receiving thread ends the process


if __name__ == "__main__":
    main()
