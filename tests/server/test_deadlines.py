"""A call's deadline goes into its request, and one that passed is refused."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from fake_engine import FakeEngine
from server_harness import run, serving, until

from jaxinfer.engine.observer import Observer
from jaxinfer.errors import DeadlineExceededError
from server import inference_pb2 as pb
from server import inference_pb2_grpc
from server.grpc_service import InferenceService
from server.tracing import Tracer


@pytest.mark.parametrize("method", ["Generate", "UnaryGenerate"])
def test_the_time_that_is_left_goes_into_the_request(method):
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, _), grpc.aio.insecure_channel(server.address) as channel:

            async def timeout_of(timeout_s: float | None) -> float | None:
                call = getattr(inference_pb2_grpc.InferenceStub(channel), method)(
                    pb.GenerateRequest(text="abc"), timeout=timeout_s
                )
                await (call if method == "UnaryGenerate" else call.read())
                return engine.requests[-1].timeout_s

            assert await timeout_of(None) is None
            assert await timeout_of(1e9) is None  # as some clients write "none"
            assert await timeout_of(60) == pytest.approx(60, abs=1)  # gRPC rounds
            day = 86400
            assert await timeout_of(30 * day) == pytest.approx(30 * day, abs=day / 10)

    run(main())


class Ended(Exception):
    """What `abort` of a call raises."""


class Context:
    """A call with so much time left."""

    def __init__(self, left: float) -> None:
        self.left = left

    def time_remaining(self) -> float:
        return self.left

    async def abort(self, *status) -> None:
        raise Ended(*status)


@pytest.mark.parametrize("left", [0.0, -0.25])
@pytest.mark.parametrize("method", ["Generate", "UnaryGenerate"])
def test_a_deadline_that_is_over_is_refused_before_the_engine(method, left):
    async def main():
        service = InferenceService(Observer(), Tracer())
        service.engine = engine = FakeEngine()
        with pytest.raises(Ended) as raised:
            await getattr(service, method)(pb.GenerateRequest(text="a"), Context(left))
        code, _, metadata = raised.value.args
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert metadata == (("jaxinfer-error-code", "deadline_exceeded"),)
        assert (engine.requests, service.live) == ([], 0)

    run(main())


def test_an_engine_that_gives_a_request_up_says_so_before_its_deadline():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            engine.fail_after = (0, DeadlineExceededError("8 s are left, its first token would take 12 s"))
            started = time.monotonic()
            with pytest.raises(DeadlineExceededError, match="12 s"):
                await anext(client.generate("abc", timeout_s=8))
            with pytest.raises(DeadlineExceededError, match="12 s"):
                await client.unary_generate("abc", timeout_s=8)
            assert time.monotonic() - started < 4

    run(main())


def test_a_deadline_harms_no_neighbour():
    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        async with serving(engine) as (server, client):
            neighbour = asyncio.create_task(client.unary_generate("neighbour"))
            hasty = [asyncio.create_task(client.unary_generate("x" * 100, timeout_s=0.2)) for _ in range(8)]
            for each in hasty:
                with pytest.raises(DeadlineExceededError):
                    await each
            await until(lambda: len(engine.live) == 1 and server.service.live == 1)
            engine.gate.set()
            assert (await neighbour).samples[0].output.text == "neighbour"

    run(main())
