"""A process's worker, seen from its parent: the child that may touch devices and `jax.distributed`, and may be lost.

The parent itself does neither, so nothing that befalls the group can block or kill it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import asdict
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from jaxinfer.config import EngineConfig
from jaxinfer.engine.control import LOST_S, Channel, Kind, Pulse, error_of
from jaxinfer.engine.plan_codec import MalformedMessageError
from jaxinfer.errors import JaxinferError
from sharding.distributed import Role

logger = logging.getLogger(__name__)

EXIT_S = 5.0  # how long a worker may take to end once it has hung up
SILENT_S = LOST_S + 4.0  # the front end is to be the first to say which process is lost
_WATCH_S = 0.5


class WorkerProcess:
    """A running worker. It ends when this process does.

    Args:
      logs: how it logs: `format`, a `LogFormat`, and `level` of our own loggers.

    Attributes:
      joined: its rank and the number of processes, once all are there; or the error that it ended with before.
      failure: what it said of its end, if it failed.
      ended: set when it has.
    """

    def __init__(self, role: Role, config: EngineConfig, *, cache_dir: Path, offline: bool, logs: Mapping[str, Any]):
        ours, theirs = Pipe()
        # It is to find the same packages as this process, and no other ones in the current folder. Ctrl-C is not for
        # it, and what libraries print belongs to the log.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxinfer.worker", str(theirs.fileno())],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=2,
            start_new_session=True,
        )
        theirs.close()
        self.channel = Channel(ours)
        self.joined: Future[tuple[int, int]] = Future()
        self._rank = role.process_id
        self.failure: JaxinferError | None = None
        self._pulse: Pulse | None = (
            None  # none until it is ready: before that it may be busy, and the front end watches
        )
        self.ended = threading.Event()
        job = {"config": asdict(config), "role": asdict(role), "cache_dir": str(cache_dir), "offline": offline}
        self.channel.say(Kind.JOB, **job, logs=dict(logs))
        threading.Thread(target=self._receive, name="jaxinfer-worker", daemon=True).start()

    def _receive(self) -> None:
        try:
            while True:
                message = self.channel.receive()
                if self._pulse is not None:
                    self._pulse.beat()
                if message.kind is Kind.READY:
                    self._pulse = Pulse()
                elif message.kind is Kind.JOINED:
                    self.joined.set_result((message.fields["rank"], message.fields["num_processes"]))
                elif message.kind is Kind.FAILED:
                    self.failure = error_of("worker", message.fields)
        except (EOFError, OSError, MalformedMessageError):
            self.kill(after_s=EXIT_S)
            if not self.joined.done():
                self.joined.set_exception(self.failure or JaxinferError(f"the worker {self.how_it_ended}"))
            self.ended.set()

    @property
    def rank(self) -> int:
        """Of its process, which may have to wait for all of them. Raises: JaxinferError if it ended before that."""
        return self.joined.result()[0] if self._rank is None else self._rank

    @property
    def how_it_ended(self) -> str:
        status = self._process.poll()
        if status is None:
            return "has not ended"
        return f"ended by signal {-status}" if status < 0 else f"ended with status {status}"

    def wait(self) -> int:
        """Until it has ended; its exit status. One that gives no sign of life for a while is killed."""
        while not self.ended.wait(_WATCH_S):
            if self._pulse is not None and self._pulse.silent_s() > SILENT_S:
                logger.error("the worker gave no sign of life for %g s, and is ended", SILENT_S)
                self.kill()
        return self._process.wait()

    def kill(self, after_s: float = 0.0) -> None:
        """Ends it if it does not end by itself within a time."""
        try:
            self._process.wait(after_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def follow(worker: WorkerProcess) -> int:
    """The life of a process that has no front end: until its worker ends; the exit status, 0 after a drain.

    A signal waits for the front end, since supervisors send it to all processes at once; a second one does not.

    Raises:
      JaxinferError: what ended the worker.
    """
    signals = 0

    def on_signal(number: int, _: Any) -> None:
        nonlocal signals
        signals += 1
        if signals > 1:
            worker.kill()
        else:
            logger.warning("%s: going on until the front end has ended", signal.Signals(number).name)

    before = {each: signal.signal(each, on_signal) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        status = worker.wait()
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    if worker.failure is not None:
        raise worker.failure
    if status:
        logger.error("the worker %s", worker.how_it_ended)
    return min(abs(status), 1)
