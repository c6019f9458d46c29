"""Health through a server's life, reflection, drain, signals, and addresses that cannot be had."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import grpc
import pytest
from fake_engine import FakeEngine, State
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from server_harness import run, serving, until

from jaxinfer.errors import DeadlineExceededError, DrainingError, EngineDeadError, InvalidArgumentError
from jaxinfer.types import Finished
from server import inference_pb2 as pb
from server import info, wire
from server.client import AsyncClient, Client
from server.grpc_service import CannotListenError, GrpcServer, serve

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SERVICES = ("", "jaxinfer.v1.Inference")
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def health_of(channel: grpc.aio.Channel) -> int:
    """The status, which must be the same for both names."""
    stub = health_pb2_grpc.HealthStub(channel)
    one, two = [(await stub.Check(health_pb2.HealthCheckRequest(service=name))).status for name in SERVICES]
    assert one == two
    return one


def test_health_follows_the_engine_and_watch_tells():
    async def main():
        async with serving(None) as (server, _client), grpc.aio.insecure_channel(server.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            watches = [stub.Watch(health_pb2.HealthCheckRequest(service=name)) for name in SERVICES]

            async def told() -> int:
                one, two = [(await asyncio.wait_for(watch.read(), 2)).status for watch in watches]
                assert one == two == await health_of(channel)
                return one

            assert await told() == NOT_SERVING  # no engine yet
            engine = FakeEngine(State.STARTING)
            server.set_engine(engine)
            await asyncio.sleep(0.2)
            assert await health_of(channel) == NOT_SERVING  # an engine, but not a ready one
            engine.state = State.READY
            assert await told() == SERVING
            for state in (State.STUCK, State.DRAINING, State.DEAD, State.STUCK):
                engine.state = state
                assert await health_of(channel) == NOT_SERVING  # at once
                assert await told() == NOT_SERVING
                engine.state = State.READY
                assert await told() == SERVING
            draining = asyncio.create_task(server.drain(1))
            assert await told() == NOT_SERVING
            assert await draining
            engine.state = State.READY  # whatever it says now
            await asyncio.sleep(0.2)
            assert await health_of(channel) == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Check(health_pb2.HealthCheckRequest(service="other"))
            assert raised.value.code() is grpc.StatusCode.NOT_FOUND
            strange = stub.Watch(health_pb2.HealthCheckRequest(service="other"))
            assert (await strange.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            listed = await stub.List(health_pb2.HealthListRequest())
            assert {name: each.status for name, each in listed.statuses.items()} == dict.fromkeys(SERVICES, NOT_SERVING)

    run(main())


def test_before_the_engine_is_there():
    async def main():
        async with serving(None) as (server, client):
            said = await client.server_info()
            assert (said.state, said.stats) == (info.ServerState.STARTING, None)
            for call in (
                anext(client.generate("abc")),
                client.tokenize("abc"),
                client.detokenize([1]),
                client.model_info(),
            ):
                with pytest.raises(wire.WarmingUpError, match="warming up"):
                    await call
            assert not await client.abort("any")
            with pytest.raises(DeadlineExceededError, match=r"not ready after 0\.2 s; its health: NOT_SERVING"):
                await client.wait_ready(0.2)
            server.set_engine(FakeEngine(State.STARTING))
            with pytest.raises(wire.WarmingUpError):
                await anext(client.generate("abc"))

    run(main())


def test_a_dead_engine():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            engine.state, engine.refuse_with = State.DEAD, EngineDeadError("out of memory")
            with pytest.raises(EngineDeadError, match="out of memory"):
                await anext(client.generate("abc"))
            assert (await client.server_info()).state is info.ServerState.DEAD

    run(main())


def test_drain_lets_live_streams_end_and_refuses_new_ones():
    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        async with serving(engine) as (server, client):
            stream = client.generate("abc")
            await until(lambda: engine.live)
            draining = asyncio.create_task(server.drain(5))
            await until(lambda: engine.state is State.DRAINING)
            with pytest.raises(DrainingError):
                await anext(client.generate("new"))
            assert (await client.server_info()).state is info.ServerState.DRAINING
            assert await client.tokenize("a", add_bos=False) == [97]
            assert not draining.done()
            engine.gate.set()
            events = [event async for event in stream]
            assert isinstance(events[-1], Finished)
            assert await draining

    run(main())


def test_drain_that_takes_too_long_fails_what_is_left_with_unavailable():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, client):
            engine.gate.clear()
            stream = client.generate("abc")
            await until(lambda: engine.live)
            started = time.monotonic()
            draining = asyncio.create_task(server.drain(0.3))
            with pytest.raises(DrainingError, match="before the request ended"):
                await anext(stream)
            assert not await draining
            assert time.monotonic() - started < 2

    run(main())


def test_stop_does_not_wait_for_health_watches():
    async def main():
        async with serving(FakeEngine()) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await watch.read()
            started = time.monotonic()
            assert await server.drain(5)
            await server.stop()
            assert time.monotonic() - started < 2

    run(main())


def test_reflection_lists_and_describes_the_service():
    async def main():
        async with serving(None) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="jaxinfer.v1.Inference"),
            ]
            listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
            names = {each.name for each in listed.list_services_response.service}
            assert {"jaxinfer.v1.Inference", "grpc.health.v1.Health"} <= names
            (file,) = described.file_descriptor_response.file_descriptor_proto
            found = descriptor_pb2.FileDescriptorProto.FromString(file)
            assert [each.name for each in found.service[0].method] == [
                each.name for each in pb.DESCRIPTOR.services_by_name["Inference"].methods
            ]

    run(main())


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="grpcurl is not installed")
def test_grpcurl():
    async def main():
        async with serving(FakeEngine()) as (server, _):

            async def grpcurl(*arguments: str) -> str:
                process = await asyncio.create_subprocess_exec(
                    "grpcurl", "-plaintext", *arguments, stdout=asyncio.subprocess.PIPE
                )
                output, _ = await asyncio.wait_for(process.communicate(), 10)
                assert process.returncode == 0
                return output.decode()

            assert "jaxinfer.v1.Inference" in await grpcurl(server.address, "list")
            assert "rpc Generate" in await grpcurl(server.address, "describe", "jaxinfer.v1.Inference")
            request = '{"text": "hi", "sampling_params": {"max_tokens": 1, "temperature": 0}}'
            answer = await grpcurl("-d", request, server.address, "jaxinfer.v1.Inference/Generate")
            assert '"text": "h"' in answer
            assert "FINISH_REASON_LENGTH" in answer
            assert "SERVING" in await grpcurl(server.address, "grpc.health.v1.Health/Check")

    run(main())


def test_a_port_that_is_taken_is_said_to_be():
    async def main():
        async with serving(None) as (first, _):
            second = GrpcServer(port=first.port)
            with pytest.raises(CannotListenError, match=f"127.0.0.1:{first.port}: Address already in use"):
                await second.start()
            await second.stop()  # does nothing
            with pytest.raises(CannotListenError, match="already in use"):
                await serve(FakeEngine, port=first.port)  # type: ignore[arg-type]
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(CannotListenError, match="already in use"):
                await GrpcServer(port=taken.getsockname()[1]).start()

    run(main())


def test_addresses_that_cannot_be():
    async def main():
        with pytest.raises(CannotListenError, match=r"192\.0\.2\.1:0: Cannot assign requested address"):
            await GrpcServer(host="192.0.2.1", port=0).start()

    for port in (-1, 65536, "80", True):
        with pytest.raises(InvalidArgumentError, match="port = "):
            GrpcServer(port=port)  # type: ignore[arg-type]
    run(main())


def test_serve_fails_with_what_loading_raised():
    async def main():
        ports: list[int] = []

        def load():
            raise MemoryError("no room for the weights")

        with pytest.raises(MemoryError, match="no room"):
            await serve(load, port=0, on_listening=ports.append)
        async with AsyncClient(f"127.0.0.1:{ports[0]}") as client:
            with pytest.raises(wire.ServerUnreachableError):
                await client.server_info(timeout_s=2)

    run(main())


SERVE = """
import asyncio, sys, time
sys.path[:0] = [{here!r}, {root!r}]
from fake_engine import FakeEngine
from server.grpc_service import serve

async def main():
    engine = FakeEngine(step_s=0.02)
    def load():
        time.sleep({load_s})
        return engine
    say = lambda *words: print(*words, flush=True)
    drained = await serve(load, port=0, drain_timeout_s={drain_s}, on_listening=say, on_ready=lambda _: say("ready"))
    say("drained" if drained else "cut", "closed" if engine.closed else "never loaded")

asyncio.run(main())
"""


def start(load_s: float = 0.0, drain_s: float = 10.0) -> tuple[subprocess.Popen[str], str]:
    code = SERVE.format(here=str(HERE), root=str(ROOT), load_s=load_s, drain_s=drain_s)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, f"127.0.0.1:{int(process.stdout.readline())}"


def last_words(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=10)
    assert process.returncode == 0
    return output.splitlines()[-1]


@pytest.mark.parametrize("which", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_mid_stream_drains(which):
    process, address = start()
    try:
        with Client(address) as client:
            client.wait_ready(10)
            stream = client.generate("0123456789" * 2)
            events = [next(stream)]
            process.send_signal(which)
            events += stream
            assert "".join(event.text for event in events[:-1]) == "0123456789" * 2
            assert isinstance(events[-1], Finished)
        assert last_words(process) == "drained closed"
    finally:
        process.kill()


def test_a_drain_that_times_out_and_one_cut_short():
    for second_signal in (False, True):
        process, address = start(drain_s=10.0 if second_signal else 0.2)
        try:
            with Client(address) as client:
                client.wait_ready(10)
                stream = client.generate("x" * 10_000)
                next(stream)
                started = time.monotonic()
                process.terminate()
                if second_signal:
                    time.sleep(0.2)
                    process.terminate()
                with pytest.raises(DrainingError):
                    list(stream)
            assert last_words(process) == "cut closed"
            assert time.monotonic() - started < 5
        finally:
            process.kill()


def test_a_signal_while_loading_does_not_wait_for_it():
    process, address = start(load_s=30)
    try:
        with Client(address) as client:
            with pytest.raises(wire.WarmingUpError):
                next(client.generate("abc"))
            process.terminate()
        assert last_words(process) == "drained never loaded"
    finally:
        process.kill()
