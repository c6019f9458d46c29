"""Clients that read slowly, or not at all, cost nobody but themselves."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest
from fake_engine import FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from server_harness import run, serving, until
from slow_reader import slow_call

from jaxinfer.types import SamplingParams
from server import grpc_service
from server import inference_pb2 as pb

GENERATE = "/jaxinfer.v1.Inference/Generate"


def test_one_byte_at_a_time_slows_nobody_and_fills_no_memory():
    """Eight clients take a byte each 20 ms of streams that are made faster than they could be read at all."""

    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, client), AsyncExitStack() as stack:

            async def quick() -> float:
                started = time.monotonic()
                for _ in range(20):
                    answer = await client.unary_generate("quick", SamplingParams(max_tokens=5))
                    assert answer.samples[0].output.text == "quick"
                return time.monotonic() - started

            alone = min([await quick() for _ in range(3)])
            text = "0123456789" * 4000
            request = pb.GenerateRequest(text=text)
            slow = [await stack.enter_async_context(slow_call(server.address, GENERATE, request)) for _ in range(8)]
            await until(lambda: server.service.live == 8)

            async def trickle() -> None:
                while True:
                    for each in slow:
                        each.take(1)
                    await asyncio.sleep(0.02)

            trickling = asyncio.create_task(trickle())
            most = 0
            while engine.live:
                most = max(most, *(len(each._waiting) for each in server.service._outboxes))
                await asyncio.sleep(0.01)
            beside = min([await quick() for _ in range(3)])
            trickling.cancel()
            assert server.service.live == 8
            assert all(0 < len(each.body) < 2000 for each in slow)
            assert 0 < most < 300  # events, of 40,000 tokens each
            assert beside < 3 * alone + 0.1

            slow[0].take(10**7)  # and when it does read at last, it has all, in few messages
            await asyncio.wait_for(slow[0].ended.wait(), 5)
            *deltas, finished = slow[0].messages(pb.GenerateResponse)
            assert "".join(each.delta.text for each in deltas) == text
            assert [token for each in deltas for token in each.delta.token_ids] == [ord(each) for each in text]
            assert finished.WhichOneof("event") == "finished"
            assert len(deltas) < 2000
            await until(lambda: server.service.live == 7)

    run(main(), timeout_s=60)


def test_a_client_that_keeps_up_gets_each_token_as_it_comes():
    async def main():
        async with serving(FakeEngine(step_s=0.01)) as (_, client):
            sizes = [len(each.token_ids) async for each in client.generate("x" * 40) if hasattr(each, "token_ids")]
            assert sum(sizes) == 40
            assert len(sizes) >= 35  # the machine may be busy

    run(main())


def test_one_that_takes_nothing_for_long_is_given_up(monkeypatch):
    monkeypatch.setattr(grpc_service, "STALLED_S", 0.3)

    async def main():
        engine = FakeEngine(step_s=0.001)
        async with serving(engine) as (server, client):
            request = pb.GenerateRequest(text="x" * 50_000, request_id="lazy")
            async with slow_call(server.address, GENERATE, request):
                await until(lambda: "lazy" in engine.live)
                (box,) = server.service._outboxes
                await until(lambda: engine.aborted == ["lazy"] and not engine.live, timeout_s=3)
                assert box.over
                assert not box._waiting  # also where the call itself lingers, until its end can be said
                assert (await client.unary_generate("abc", request_id="lazy")).samples[0].output.text == "abc"
            await until(lambda: server.service.live == 0)  # it hung up

    run(main())


def test_a_silent_engine_is_no_stalled_client(monkeypatch):
    monkeypatch.setattr(grpc_service, "STALLED_S", 0.2)

    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        async with serving(engine) as (_, client):
            stream = client.generate("abc")
            await until(lambda: engine.live)
            await asyncio.sleep(0.5)
            engine.gate.set()
            assert [event async for event in stream]

    run(main())


def test_one_that_hangs_up_in_the_middle_of_a_message_is_aborted():
    async def main():
        engine = FakeEngine(step_s=0.001)
        async with serving(engine) as (server, _):
            async with slow_call(server.address, GENERATE, pb.GenerateRequest(text="x" * 50_000)) as slow:
                slow.take(7)
                await until(lambda: len(slow.body) == 7)
            await until(lambda: not engine.live and server.service.live == 0)
            assert len(engine.aborted) == 1

    run(main())


def test_a_watcher_that_does_not_read_keeps_health_from_nobody():
    async def main():
        engine = FakeEngine()
        watch = "/grpc.health.v1.Health/Watch"
        async with (
            serving(engine) as (server, client),
            slow_call(server.address, watch, health_pb2.HealthCheckRequest()) as slow,
        ):
            await asyncio.sleep(0.2)
            other = health_pb2_grpc.HealthStub(client._channel).Watch(health_pb2.HealthCheckRequest())
            assert (await other.read()).status == health_pb2.HealthCheckResponse.SERVING
            assert await asyncio.wait_for(server.drain(2), 3)
            answer = await asyncio.wait_for(other.read(), 2)
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
            assert slow.body == b""

    run(main())


@pytest.mark.parametrize("reads", [True, False])
def test_drain_tells_those_who_read_and_does_not_wait_for_those_who_do_not(reads, monkeypatch):
    monkeypatch.setattr(grpc_service, "FLUSH_S", 0.3)

    async def main():
        engine = FakeEngine(step_s=0.001)
        request = pb.GenerateRequest(text="x" * 50_000)
        async with serving(engine) as (server, _), slow_call(server.address, GENERATE, request) as slow:
            await until(lambda: engine.live)
            if reads:
                slow.take(10**7)
            started = time.monotonic()
            assert not await server.drain(0.2)
            await server.stop(0.1)
            assert time.monotonic() - started < 3
            if reads:
                await asyncio.wait_for(slow.ended.wait(), 2)

    run(main())
