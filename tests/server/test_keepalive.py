"""Streams that are silent for long, with pings from both sides."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from fake_engine import FakeEngine
from server_harness import run, serving, until
from slow_reader import PING, SlowReader, slow_call

from jaxinfer.types import Finished
from server import client as client_module
from server import grpc_service, inference_pb2_grpc, wire
from server import inference_pb2 as pb

GENERATE = "/jaxinfer.v1.Inference/Generate"


def set_options(monkeypatch: pytest.MonkeyPatch, changed: dict[str, int]) -> None:
    monkeypatch.setattr(grpc_service, "SERVER_OPTIONS", tuple({**dict(grpc_service.SERVER_OPTIONS), **changed}.items()))


def test_pings_that_are_permitted_do_not_end_a_silent_stream(monkeypatch):
    """In small: a client pings every second, which is the most gRPC does; one server permits it, the other does not."""
    interval = "grpc.http2.min_ping_interval_without_data_ms"
    assert dict(grpc_service.SERVER_OPTIONS)[interval] < 10_000
    pinging = {**dict(client_module._OPTIONS), "grpc.keepalive_time_ms": 1_000}
    monkeypatch.setattr(client_module, "_OPTIONS", tuple(pinging.items()))

    def permit_every(milliseconds: int) -> None:
        options = {**dict(grpc_service.SERVER_OPTIONS), interval: milliseconds}
        monkeypatch.setattr(grpc_service, "SERVER_OPTIONS", tuple(options.items()))

    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        permit_every(500)
        async with serving(engine) as (_, welcome):
            permit_every(300_000)
            async with serving(engine) as (_, unwelcome):
                stream = welcome.generate("abc")
                with pytest.raises(wire.ServerUnreachableError, match="Too many pings"):
                    await asyncio.wait_for(anext(unwelcome.generate("abc")), 10)
                await asyncio.sleep(1)
                engine.gate.set()
                assert isinstance([event async for event in stream][-1], Finished)

    run(main())


@pytest.mark.slow
def test_25_silent_seconds_with_a_ping_every_five():
    """Nothing shortened: a client that pings as often as the server permits, on a stream that says nothing."""

    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        options = [("grpc.keepalive_time_ms", 5_500), ("grpc.http2.max_pings_without_data", 0)]
        async with (
            serving(engine) as (server, client),
            grpc.aio.insecure_channel(server.address, options=options) as channel,
        ):
            pinging = inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="abc"))
            ours = client.generate("abc")
            await until(lambda: len(engine.live) == 2)
            await asyncio.sleep(25)
            engine.gate.set()
            assert [each.WhichOneof("event") async for each in pinging][-1] == "finished"
            assert isinstance([event async for event in ours][-1], Finished)

    run(main(), timeout_s=60)


def count_pings(slow: SlowReader) -> list[float]:
    """When each ping of the server came, from now on."""
    times: list[float] = []
    send = slow.send

    def counting(kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        if kind == PING:
            times.append(time.monotonic())
        send(kind, flags, stream, payload)

    slow.send = counting
    return times


def test_the_server_pings_a_silent_client_without_end(monkeypatch):
    """So that proxies keep the connection. In small: one a second."""
    assert dict(grpc_service.SERVER_OPTIONS)["grpc.keepalive_time_ms"] <= 30_000
    set_options(monkeypatch, {"grpc.keepalive_time_ms": 1_000})

    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        request = pb.GenerateRequest(text="abc")
        async with serving(engine) as (server, _), slow_call(server.address, GENERATE, request) as slow:
            pings = count_pings(slow)
            await asyncio.sleep(5.5)
            assert len(pings) >= 4

    run(main())


def test_a_client_that_vanished_without_a_word_is_found(monkeypatch):
    waits = ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    assert all(dict(grpc_service.SERVER_OPTIONS)[each] <= 20_000 for each in waits)
    set_options(monkeypatch, {"grpc.keepalive_time_ms": 1_000, **dict.fromkeys(waits, 500)})

    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        request = pb.GenerateRequest(text="abc", request_id="it")
        async with serving(engine) as (server, _), slow_call(server.address, GENERATE, request) as slow:
            await until(lambda: engine.live)
            slow.send = lambda *_: None  # it answers no ping any more
            await until(lambda: engine.aborted == ["it"] and server.service.live == 0, timeout_s=8)

    run(main())
