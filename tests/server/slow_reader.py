"""An HTTP/2 client by hand, that calls one method and takes as few bytes as it is told to."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from google.protobuf.message import Message

DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
ACK = END_STREAM = 1
MAX_FRAME = 2**14
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4
STREAM = 1


class SlowReader:
    """Takes no byte of the answer but those that `take` allows for.

    Attributes:
      body: the bytes that came.
      ended: whether the server ended the call.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.body = b""
        self.ended = asyncio.Event()
        self._reader, self._writer = reader, writer

    def send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self._writer.write(struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload)

    def call(self, address: str, method: str, message: Message) -> None:
        self._writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self.send(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, 0))
        headers = {
            **{":method": "POST", ":scheme": "http", ":path": method, ":authority": address},
            **{"content-type": "application/grpc", "te": "trailers"},
        }
        literals = [b"\0" + bytes([len(k)]) + k.encode() + bytes([len(v)]) + v.encode() for k, v in headers.items()]
        self.send(HEADERS, END_HEADERS, STREAM, b"".join(literals))
        body = message.SerializeToString()
        body = struct.pack(">BI", 0, len(body)) + body
        assert len(body) < 2**16, "more than the server takes at first"
        for at in range(0, len(body), MAX_FRAME):
            self.send(DATA, END_STREAM if at + MAX_FRAME >= len(body) else 0, STREAM, body[at : at + MAX_FRAME])

    def take(self, count: int) -> None:
        """Lets the server send so many bytes more."""
        for stream in (0, STREAM):
            self.send(WINDOW_UPDATE, 0, stream, struct.pack(">I", count))

    def messages(self, kind: type[Any]) -> list[Any]:
        """Those that came whole."""
        found, at = [], 0
        while len(self.body) >= at + 5:
            (size,) = struct.unpack(">I", self.body[at + 1 : at + 5])
            if len(self.body) < at + 5 + size:
                break
            found.append(kind.FromString(self.body[at + 5 : at + 5 + size]))
            at += 5 + size
        return found

    async def read(self) -> None:
        while True:
            head = await self._reader.readexactly(9)
            kind, flags, stream = struct.unpack(">BBI", head[3:])
            payload = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind in (SETTINGS, PING) and not flags & ACK:
                self.send(kind, ACK, 0, payload if kind == PING else b"")
            if kind == DATA:
                self.body += payload
            if stream == STREAM and kind in (DATA, HEADERS) and flags & END_STREAM:
                self.ended.set()


@asynccontextmanager
async def slow_call(address: str, method: str, message: Message) -> AsyncIterator[SlowReader]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    slow = SlowReader(reader, writer)
    slow.call(address, method, message)
    reading = asyncio.create_task(slow.read())
    try:
        yield slow
    finally:
        reading.cancel()
        with suppress(asyncio.CancelledError, asyncio.IncompleteReadError, ConnectionError):
            await reading
        writer.close()
