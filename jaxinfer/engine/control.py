"""What the processes of a group say to each other: framed messages, and who is silent for how long.

Messages go over connections of `multiprocessing.connection`, of which only the framing and the mutual challenge by a
shared key are used: nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from enum import IntEnum
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

from jaxinfer.engine.plan_codec import MalformedMessageError
from jaxinfer.errors import JaxinferError

BEAT_S = 1.0  # between two signs of life
LOST_S = 8.0  # a process that gives none for so long is taken for lost
START_LOST_S = 120.0  # before it is ready: drivers that start, and files that are slow, may hold up all its threads
CONNECT_S = 60.0  # how long a worker may take to come to the front end
_AWAKE_S = 2.0  # who looks around more rarely than this slept itself

_HEADER = struct.Struct("<BxHI")  # kind, replica, step; 8 bytes, so that arrays in a payload are aligned
_STEPS = 1 << 32


class Kind(IntEnum):
    """What a message is about; its payload is JSON but for PLAN and TOKENS."""

    JOB = 1  # parent to worker: what to do
    JOINED = 2  # worker to parent: its rank
    DOOR = 3  # parent to worker 0: where the front end listens, and the key
    HELLO = 4  # worker to front end: its rank and settings
    PROGRESS = 5
    READY = 6  # worker to front end: what it has; to its parent: nothing more
    FAILED = 7  # worker to parent and front end: why it ends
    BEAT = 8  # a sign of life, both ways
    PLAN = 9  # to run
    TOKENS = 10  # of a plan
    RESET = 11  # a new, empty state
    STOP = 12  # all is done


class Message(NamedTuple):
    """A message as it came."""

    kind: Kind
    replica: int
    step: int  # modulo 2^32
    payload: memoryview

    @property
    def fields(self) -> dict[str, Any]:
        try:
            return json.loads(bytes(self.payload)) if self.payload else {}
        except ValueError as error:
            raise MalformedMessageError(f"a message of kind {self.kind.name} that is no JSON") from error


class Channel:
    """A connection to another process. Any thread may send; one receives."""

    def __init__(self, connection: Connection):
        self._connection, self._sending = connection, threading.Lock()
        # A second name for the socket, by which it can be ended under a thread that waits for it.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        if self._socket.family != socket.AF_UNIX:
            # Else a plan waits until the one before is acknowledged, for up to 40 ms.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, kind: Kind, payload: bytes = b"", *, replica: int = 0, step: int = 0) -> None:
        """Raises: OSError if the other end is gone."""
        with self._sending:
            self._connection.send_bytes(_HEADER.pack(kind, replica, step % _STEPS) + payload)

    def say(self, kind: Kind, **fields: Any) -> None:
        """Sends JSON. Raises: as `send`."""
        self.send(kind, json.dumps(fields).encode())

    def receive(self, timeout: float | None = None) -> Message:
        """The next message.

        Raises:
          EOFError, OSError: the other end is gone; TimeoutError: it said nothing.
          MalformedMessageError: what came is no message.
        """
        if timeout is not None and not self._connection.poll(timeout):
            raise TimeoutError(f"nothing came for {timeout:g} s")
        data = self._connection.recv_bytes()
        try:
            kind, replica, step = _HEADER.unpack_from(data)
            return Message(Kind(kind), replica, step, memoryview(data)[_HEADER.size :])
        except (struct.error, ValueError) as error:
            raise MalformedMessageError(f"{len(data)} bytes that are no message") from error

    def shut(self) -> None:
        """Ends it both ways; threads that send or receive get an error."""
        with suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)


def admit(connected: socket.socket, key: bytes) -> Channel:
    """A channel with who came, once each has shown the other that it has the key.

    Raises:
      AuthenticationError, EOFError, OSError: it has not.
    """
    connection = Connection(connected.detach())
    deliver_challenge(connection, key)
    answer_challenge(connection, key)
    return Channel(connection)


def dial(host: str, port: int, key: bytes) -> Channel:
    """Goes to where `admit` is called. Raises: as that."""
    connected = socket.create_connection((host, port), CONNECT_S)
    connected.settimeout(None)
    connection = Connection(connected.detach())
    answer_challenge(connection, key)
    deliver_challenge(connection, key)
    return Channel(connection)


def failure(error: BaseException) -> dict[str, str]:
    """An error as the fields of a FAILED message."""
    if isinstance(error, JaxinferError):
        return {"code": error.code, "message": str(error)}
    return {"code": JaxinferError.code, "message": f"{type(error).__name__}: {error}"}


def error_of(who: str, fields: dict[str, Any]) -> JaxinferError:
    """The error that another process told of, under its code."""
    error = JaxinferError(f"{who}: {fields.get('message')}")
    error.code = str(fields.get("code"))
    return error


class Pulse:
    """When somebody was last heard, in time in which this process was awake itself. For one watching thread."""

    def __init__(self) -> None:
        self._heard = self._looked = time.monotonic()

    def beat(self) -> None:
        """From any thread."""
        self._heard = time.monotonic()

    def silent_s(self) -> float:
        """For how long nothing was heard; to be called more often than every two seconds."""
        now = time.monotonic()
        if now - self._looked > _AWAKE_S:
            self._heard = now
        self._looked = now
        return now - self._heard
