"""The sync client, and what is particular to clients."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import grpc
import pytest
from fake_engine import BOS, FakeEngine
from server_harness import run, serving, until

from jaxinfer.errors import DeadlineExceededError, InvalidArgumentError, RequestExistsError
from jaxinfer.types import Delta, Finished, FinishReason, SamplingParams, Timings, Usage
from server import inference_pb2 as pb
from server import wire
from server.client import AsyncClient, AsyncGenerateStream, Client, GenerateStream
from server.grpc_service import GrpcServer


def with_sync_client(work: Callable[[Client, FakeEngine], None]) -> None:
    """Runs `work` in a thread, against a server in this one."""

    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, _):
            with Client(server.address) as client:
                await asyncio.to_thread(work, client, engine)

    run(main())


def test_every_method():
    def work(client: Client, engine: FakeEngine) -> None:
        client.wait_ready(5)
        *deltas, finished = client.generate("abc", SamplingParams(n=2), request_id="mine", timeout_s=5)
        assert all(isinstance(event, Delta) for event in deltas)
        assert ["".join(each.text for each in deltas if each.index == index) for index in (0, 1)] == ["abc", "bcd"]
        assert isinstance(finished, Finished)
        answer = client.unary_generate("abc", SamplingParams(n=2), request_id="mine", timeout_s=5)
        assert [sample.output.text for sample in answer.samples] == ["abc", "bcd"]
        assert client.tokenize("hi") == [BOS, 104, 105]
        assert client.tokenize([{"role": "user", "content": "x"}], timeout_s=5) == [ord(each) for each in "user:x;"]
        assert client.detokenize([104, 105]) == "hi"
        assert not client.abort("mine")
        assert client.model_info().model == "echo"
        assert client.server_info().stats == engine.stats()

    with_sync_client(work)


def test_closing_the_stream_cancels_the_call():
    def work(client: Client, engine: FakeEngine) -> None:
        with client.generate("x" * 100_000, request_id="a") as stream:
            assert stream.request_id == "a"
            next(stream)
        assert list(stream) == []
        dropped = client.generate("x" * 100_000, request_id="b")
        next(dropped)
        del dropped
        end = time.monotonic() + 5
        while engine.aborted != ["a", "b"] and time.monotonic() < end:
            time.sleep(0.01)
        assert engine.aborted == ["a", "b"]

    with_sync_client(work)


def test_closing_from_another_thread_ends_the_iteration():
    def work(client: Client, engine: FakeEngine) -> None:
        engine.gate.clear()
        stream = client.generate("abc")
        threading.Timer(0.1, stream.close).start()
        assert list(stream) == []

    with_sync_client(work)


def test_requests_start_before_they_are_read_and_can_be_aborted_by_the_streams_id():
    def work(client: Client, engine: FakeEngine) -> None:
        engine.gate.clear()
        streams = [client.generate("abc") for _ in range(3)]
        end = time.monotonic() + 5
        while len(engine.live) < 3 and time.monotonic() < end:
            time.sleep(0.01)
        for stream in streams:
            assert client.abort(stream.request_id)
            (finished,) = stream
            assert finished.ends[0].finish_reason is FinishReason.ABORT

    with_sync_client(work)


def test_errors():
    def work(client: Client, engine: FakeEngine) -> None:
        engine.refuse_with = RequestExistsError("it lives")
        stream = client.generate("abc")
        with pytest.raises(RequestExistsError, match="it lives"):
            next(stream)
        assert list(stream) == []
        engine.refuse_with = None
        engine.gate.clear()
        with pytest.raises(DeadlineExceededError):
            list(client.generate("abc", timeout_s=0.2))
        with pytest.raises(TimeoutError):
            list(client.generate("abc", timeout_s=0.2))

    with_sync_client(work)


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (b"abc", "prompt"),
        (7, "prompt"),
        ({"prompt": "abc"}, "prompt"),
        ([1, "a"], "prompt"),
        ([2**31], "prompt"),
        ([1.5], "prompt"),
        ("\ud800", "text"),
        ([{"role": "user"}], r"messages\[0\]"),
        ([{"role": "user", "content": "x", "name": "me"}], r"messages\[0\]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "content"),
        ([{"role": "user", "content": "x"}, "y"], r"messages\[1\]"),
    ],
)
def test_a_prompt_that_cannot_be_sent_is_refused_before_it_is(prompt, named):
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgumentError, match=f"^{named} = "):
        client.generate(prompt)


def test_nobody_listens():
    with Client("127.0.0.1:1") as client:
        with pytest.raises(wire.ServerUnreachableError):
            client.server_info(timeout_s=5)
        with pytest.raises(ConnectionError):
            next(client.generate("abc", timeout_s=5))
        with pytest.raises(DeadlineExceededError, match="UNAVAILABLE"):
            client.wait_ready(0.3)


def test_wait_ready_from_before_the_server_listens_until_it_is_ready():
    async def main():
        probe = GrpcServer(port=0)
        port = await probe.start()
        await probe.stop(0)
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            waiting = asyncio.create_task(client.wait_ready(10))
            await asyncio.sleep(0.3)
            server = GrpcServer(port=port)
            await server.start()
            try:
                await asyncio.sleep(0.2)
                assert not waiting.done()
                server.set_engine(FakeEngine())
                await asyncio.wait_for(waiting, 3)
            finally:
                await server.stop(0)

    run(main())


def test_a_stream_whose_server_vanishes():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, client):
            engine.gate.clear()
            stream = client.generate("abc")
            await until(lambda: engine.live)
            await server.stop(0)
            with pytest.raises((wire.ServerUnreachableError, wire.CallFailedError)):
                await anext(stream)
            await until(lambda: not engine.live)

    run(main())


def test_closing_the_client_fails_its_calls_and_cancels_no_task():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, _):
            engine.gate.clear()
            client = AsyncClient(server.address)
            reading = asyncio.create_task(anext(client.generate("abc")))
            await until(lambda: engine.live)
            await client.close()
            with pytest.raises(wire.CallFailedError, match="CANCELLED"):
                await asyncio.wait_for(reading, 2)
            await until(lambda: not engine.live)

    run(main())


def test_aclose_from_another_task_ends_the_iteration():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            engine.gate.clear()
            stream = client.generate("abc")

            async def read():
                return [event async for event in stream]

            reading = asyncio.create_task(read())
            await until(lambda: engine.live)
            await stream.aclose()
            assert await asyncio.wait_for(reading, 2) == []

    run(main())


class TooLate(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.DEADLINE_EXCEEDED

    def details(self) -> str:
        return "Stream removed (Deadline Exceeded)"

    def trailing_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()


def test_a_deadline_between_the_last_message_and_the_status_is_no_error():
    """All is here then; one end is enough."""
    last = Finished((), Usage(1, 0, 0), Timings(0.0, 0.0, 0.0))

    def messages():
        yield pb.GenerateResponse.FromString(wire.event_to_bytes("r", last))
        raise TooLate

    async def messages_async():
        for message in messages():
            yield message

    async def main():
        return [event async for event in AsyncGenerateStream(messages_async(), "r")]

    assert list(GenerateStream(messages(), "r")) == [last]
    assert run(main()) == [last]

    def too_early():
        raise TooLate
        yield

    with pytest.raises(DeadlineExceededError):
        list(GenerateStream(too_early(), "r"))
