"""However a call ends, it ends once: with one last message and OK, or with one error status and no last message."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import grpc
import pytest
from fake_engine import FakeEngine, State
from server_harness import run, serving, until

from jaxinfer.errors import DrainingError, EngineStuckError, JaxinferError, QueueFullError, StepFailedError
from jaxinfer.types import SamplingParams
from server import grpc_service, inference_pb2_grpc
from server import inference_pb2 as pb
from server.grpc_service import GrpcServer

type Meddle = Callable[[FakeEngine, GrpcServer], Awaitable[object]]


async def nothing(engine: FakeEngine, server: GrpcServer) -> None:
    pass


async def abort(engine: FakeEngine, server: GrpcServer) -> None:
    engine.abort("it")


async def drain_in_time(engine: FakeEngine, server: GrpcServer) -> None:
    draining = asyncio.create_task(server.drain(5))
    await until(lambda: engine.state is State.DRAINING)
    engine.gate.set()
    assert await draining


async def drain_too_late(engine: FakeEngine, server: GrpcServer) -> None:
    assert not await server.drain(0.1)


async def get_stuck_and_drain(engine: FakeEngine, server: GrpcServer) -> None:
    engine.state = State.STUCK
    assert not await server.drain(0.1)


async def fail(engine: FakeEngine, server: GrpcServer) -> None:
    engine.live["it"].error = StepFailedError("step 3 failed")


async def fail_without_words(engine: FakeEngine, server: GrpcServer) -> None:
    engine.live["it"].error = JaxinferError("")


async def stop(engine: FakeEngine, server: GrpcServer) -> None:
    await server.stop(0)


# What happens after two tokens (the gate is closed then, but for "nothing"), and the status it ends with.
ENDINGS: dict[str, tuple[Meddle, grpc.StatusCode]] = {
    "by itself": (nothing, grpc.StatusCode.OK),
    "aborted": (abort, grpc.StatusCode.OK),
    "drained in time": (drain_in_time, grpc.StatusCode.OK),
    "drained too late": (drain_too_late, grpc.StatusCode.UNAVAILABLE),
    "drained while stuck": (get_stuck_and_drain, grpc.StatusCode.UNAVAILABLE),
    "failed": (fail, grpc.StatusCode.INTERNAL),
    "failed without words": (fail_without_words, grpc.StatusCode.INTERNAL),
    "stopped": (stop, grpc.StatusCode.UNAVAILABLE),
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("method", ["Generate", "UnaryGenerate"])
def test_an_ending(method, ending):
    meddle, expected = ENDINGS[ending]

    async def main():
        engine = FakeEngine(step_s=0.001)
        async with serving(engine) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
            message = pb.GenerateRequest(text="abcdefgh", request_id="it", sampling_params=pb.SamplingParams(n=2))
            if meddle is not nothing:
                engine.gate.clear()
            call = getattr(inference_pb2_grpc.InferenceStub(channel), method)(message)
            if meddle is not nothing:
                await until(lambda: "it" in engine.live)
            meddling = asyncio.create_task(meddle(engine, server))
            events = []
            try:
                if method == "UnaryGenerate":
                    events = [await call]
                else:
                    async for response in call:
                        events.append(response.WhichOneof("event"))
            except grpc.aio.AioRpcError:
                assert await call.details()
            except asyncio.CancelledError:  # as gRPC tells of a call that its peer cancelled
                assert ending == "stopped"
            await meddling
            assert await call.code() in (expected, grpc.StatusCode.CANCELLED if ending == "stopped" else expected)
            if method == "Generate":
                assert events.count("finished") == (1 if expected is grpc.StatusCode.OK else 0)
                assert "finished" not in events[:-1]
            else:
                assert len(events) == (1 if expected is grpc.StatusCode.OK else 0)
            await until(lambda: server.service.live == 0)

    run(main())


def test_a_stuck_engine_refuses_and_its_live_requests_go_on_with_it():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, client):
            engine.gate.clear()
            neighbour = asyncio.create_task(client.unary_generate("neighbour"))
            await until(lambda: engine.live)
            engine.state = State.STUCK
            with pytest.raises(EngineStuckError, match="9 s"):
                await anext(client.generate("abc"))
            with pytest.raises(EngineStuckError):
                await client.unary_generate("abc")
            assert (await client.server_info()).state == "stuck"
            with grpc.insecure_channel(server.address) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                with pytest.raises(grpc.RpcError) as raised:
                    await asyncio.to_thread(stub.UnaryGenerate, pb.GenerateRequest(text="abc"))
                assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
            engine.gate.set()
            engine.state = State.READY
            assert (await neighbour).samples[0].output.text == "neighbour"
            assert (await client.unary_generate("abc")).samples[0].output.text == "abc"

    run(main())


def test_a_tokenizer_that_fails_fails_its_request_alone(caplog):
    class Engine(FakeEngine):
        def tokenize(self, text, **options):
            if "\0" in text:
                raise ValueError(f"cannot encode {text!r}")
            return super().tokenize(text, **options)

    async def main():
        engine = Engine()
        async with serving(engine) as (server, client), grpc.aio.insecure_channel(server.address) as channel:
            engine.gate.clear()
            neighbour = asyncio.create_task(client.unary_generate("neighbour"))
            await until(lambda: engine.live)
            stub = inference_pb2_grpc.InferenceStub(channel)
            bad = pb.GenerateRequest(text="a\0secret", request_id="bad")
            for call in (
                stub.Generate(bad).read(),
                stub.UnaryGenerate(bad),
                stub.Tokenize(pb.TokenizeRequest(text="\0")),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call
                assert raised.value.code() is grpc.StatusCode.INTERNAL
                assert ("jaxinfer-error-code", "internal") in list(raised.value.trailing_metadata())
                assert "secret" not in raised.value.details()
            assert server.service.live == 1
            engine.gate.set()
            assert (await neighbour).samples[0].output.text == "neighbour"
            assert (await client.unary_generate("good", request_id="bad")).samples[0].output.text == "good"

    with caplog.at_level(logging.ERROR):
        run(main())
    assert sum("'bad'" in record.getMessage() for record in caplog.records) == 2


def test_an_id_given_twice_harms_the_first_in_no_way():
    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        async with serving(engine) as (server, client), grpc.aio.insecure_channel(server.address) as channel:
            first = asyncio.create_task(client.unary_generate("first", request_id="same"))
            await until(lambda: "same" in engine.live)
            stub = inference_pb2_grpc.InferenceStub(channel)
            again = pb.GenerateRequest(text="second", request_id="same")
            for call in [
                *(stub.Generate(again).read() for _ in range(5)),
                *(stub.UnaryGenerate(again) for _ in range(5)),
            ]:
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await call
                assert raised.value.code() is grpc.StatusCode.ALREADY_EXISTS
            going = stub.Generate(again)  # one that goes away while it is being refused
            going.cancel()
            await asyncio.sleep(0.05)
            assert engine.aborted == []
            engine.gate.set()
            assert (await first).samples[0].output.text == "first"

    run(main())


def test_a_full_queue_says_when_to_come_again():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, client), grpc.aio.insecure_channel(server.address) as channel:
            engine.refuse_with = error = QueueFullError("1024 requests wait already")
            error.retry_after_s = 1.2341
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await inference_pb2_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(text="a")).read()
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert ("grpc-retry-pushback-ms", "1235") in list(raised.value.trailing_metadata())
            for call in (anext(client.generate("a")), client.unary_generate("a")):
                with pytest.raises(QueueFullError) as full:
                    await call
                assert full.value.retry_after_s == 1.235
            error.retry_after_s = None
            with pytest.raises(QueueFullError) as full:
                await client.unary_generate("a")
            assert full.value.retry_after_s is None

    run(main())


def test_a_client_that_goes_while_its_prompt_is_read_leaves_nothing(monkeypatch):
    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        submit, may_go_on = engine.submit, asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow_submit(request, sink):
            asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result()
            return submit(request, sink)

        monkeypatch.setattr(engine, "submit", slow_submit)
        async with serving(engine) as (server, client):
            stream = client.generate("abc", request_id="gone")
            await until(lambda: server.service.live == 1)
            await stream.aclose()
            await until(lambda: server.service.live == 0)
            may_go_on.set()
            await until(lambda: engine.aborted == ["gone"] and not engine.live)

    run(main())


@pytest.mark.slow
def test_a_reply_to_a_prompt_of_100_000_tokens_is_as_long():
    """Log-probabilities of the whole prompt are a message of megabytes; beside it others go on."""

    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            ids = [0xFFFF + at % 10 for at in range(100_000)]
            params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
            answer = asyncio.create_task(client.unary_generate(ids, params, timeout_s=60))
            await until(lambda: engine.requests)
            quick = await asyncio.wait_for(client.unary_generate("quick"), 20)
            assert quick.samples[0].output.text == "quick"
            whole = await answer
            assert whole.prompt_logprobs is not None
            assert len(whole.prompt_logprobs.positions) == 99_999
            first = await anext(client.generate(ids, params))
            assert first == whole.prompt_logprobs

    run(main(), timeout_s=60)


def test_drain_does_not_end_calls_that_the_engine_ends(monkeypatch):
    monkeypatch.setattr(grpc_service, "FLUSH_S", 2.0)

    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, client):
            engine.gate.clear()
            stream = client.generate("abc")
            await until(lambda: engine.live)
            draining = asyncio.create_task(server.drain(0.2))
            with pytest.raises(DrainingError, match="before the request ended"):
                await anext(stream)
            assert not await draining
            await until(lambda: not engine.live)

    run(main())
