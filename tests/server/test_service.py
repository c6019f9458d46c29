"""Every RPC, and every way a request may go, through a real server."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest
from fake_engine import BOS, FakeEngine
from server_harness import run, serving, until

from jaxinfer import errors
from jaxinfer.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    JaxinferError,
    ModelNotFoundError,
    QueueFullError,
    RequestExistsError,
    UnsupportedError,
)
from jaxinfer.types import Delta, Finished, FinishReason, SamplingParams
from server import inference_pb2 as pb
from server import inference_pb2_grpc, info, wire
from server.client import AsyncClient, AsyncGenerateStream


async def collect(stream: AsyncGenerateStream) -> tuple[dict[int, str], Finished]:
    """Text by sample, and the last event; checks that nothing follows it."""
    texts: dict[int, str] = {}
    finished = None
    async for event in stream:
        assert finished is None, "an event after the last"
        if isinstance(event, Delta):
            texts[event.index] = texts.get(event.index, "") + event.text
            assert [ord(each) for each in event.text] == list(event.token_ids)
        else:
            finished = event
    assert isinstance(finished, Finished)
    return texts, finished


def test_generate_from_text():
    async def main():
        async with serving(FakeEngine()) as (_, client):
            stream = client.generate("héllo 🌍", SamplingParams(max_tokens=100))
            texts, finished = await collect(stream)
            assert texts == {0: "héllo 🌍"}
            assert finished.ends[0].finish_reason is FinishReason.STOP
            assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (7, 7)
            assert finished.usage.cached_tokens == 16
            assert (finished.timings.queue_s, finished.timings.first_token_s, finished.timings.total_s) == (
                0.25,
                0.5,
                1.5,
            )

    run(main())


def test_generate_from_token_ids_and_from_messages():
    async def main():
        async with serving(FakeEngine()) as (_, client):
            texts, _ = await collect(client.generate([104, 105]))
            assert texts == {0: "hi"}
            texts, _ = await collect(client.generate([{"role": "user", "content": "hi"}]))
            assert texts == {0: "user:hi;"}

    run(main())


def test_what_is_unset_is_the_servers_default():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            texts, _ = await collect(client.generate("x" * 50))  # all of it: max_tokens is the rest of the context
            assert texts == {0: "x" * 50}
            assert engine.requests[-1].params == SamplingParams(max_tokens=None)
            _, finished = await collect(client.generate("x" * 50, SamplingParams()))  # the Python default is 16
            assert finished.usage.output_tokens == 16
            assert finished.ends[0].finish_reason is FinishReason.LENGTH
            assert engine.requests[-1].priority == 0
            await collect(client.generate("x", priority=-3, parse_special=True))
            assert engine.requests[-1].priority == -3
            assert engine.requests[-1].parse_special

    run(main())


def test_samples_and_their_ends():
    async def main():
        async with serving(FakeEngine()) as (_, client):
            texts, finished = await collect(client.generate("abc", SamplingParams(n=3)))
            assert texts == {0: "abc", 1: "bcd", 2: "cde"}
            assert [end.stop_reason for end in finished.ends] == [None, "stop!", 3]
            assert [end.index for end in finished.ends] == [0, 1, 2]

    run(main())


def test_logprobs():
    async def main():
        async with serving(FakeEngine()) as (_, client):
            events = [event async for event in client.generate("a", SamplingParams(logprobs=2))]
            (position,) = events[0].logprobs
            assert position.chosen == (97, -0.25, 1)
            assert position.top == ((97, 0.0, 0), (98, -0.5, 1))

    run(main())


def test_a_prompt_of_100_000_token_ids():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            ids = [0x10FFF0 + at % 10 for at in range(100_000)]
            _texts, finished = await collect(client.generate(ids, SamplingParams(max_tokens=2)))
            assert finished.usage.prompt_tokens == 100_000
            assert engine.requests[-1].token_ids == ids
            text = "🌍" * 100_000
            _, finished = await collect(client.generate(text, SamplingParams(max_tokens=2)))
            assert finished.usage.prompt_tokens == 100_000
            assert len(await client.tokenize(text, add_bos=False)) == 100_000

    run(main())


def test_many_streams_at_once():
    async def main():
        async with serving(FakeEngine(step_s=0.005)) as (_, client):
            prompts = [f"prompt {number} of many" for number in range(64)]
            answers = await asyncio.gather(
                *(collect(client.generate(prompt, SamplingParams(max_tokens=64))) for prompt in prompts)
            )
            assert [texts[0] for texts, _ in answers] == prompts

    run(main())


def test_tokenize_and_detokenize():
    async def main():
        async with serving(FakeEngine()) as (_, client):
            assert await client.tokenize("hi") == [BOS, 104, 105]
            assert await client.tokenize("hi", add_bos=False) == [104, 105]
            assert await client.tokenize("<s>", add_bos=False) == [60, 115, 62]
            assert await client.tokenize("<s>", add_bos=False, parse_special=True) == [3]
            assert await client.tokenize("", add_bos=False) == []
            chat = [{"role": "user", "content": "hi"}]
            assert await client.detokenize(await client.tokenize(chat)) == "user:hi;"
            assert await client.detokenize([BOS, 104]) == "h"
            assert await client.detokenize([BOS, 104], skip_special_tokens=False) == "\2h"
            assert await client.detokenize([]) == ""
            with pytest.raises(InvalidArgumentError, match="token_ids = -1"):
                await client.detokenize([-1])
            with pytest.raises(InvalidArgumentError, match="add_bos"):
                await client.tokenize(chat, add_bos=True)

    run(main())


def test_reshard():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            with pytest.raises(UnsupportedError, match="--allow-reshard"):
                await client.reshard("tensor=2")
        async with serving(engine, allow_reshard=True) as (_, client):
            assert 0 <= await client.reshard("tensor=2") < 5
            assert (await client.model_info()).mesh == "tensor=2"
            with pytest.raises(InvalidArgumentError, match=r"mesh = 'tensor=3'.*1, 2 or 4"):
                await client.reshard("tensor=3")
            with pytest.raises(InvalidArgumentError, match="axes and sizes"):
                await client.reshard("/etc/passwd.toml")

    run(main())


def test_information():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            model = await client.model_info()
            assert model == info.ModelInfo.of("echo", engine.model_config, engine.scheduler_config, "tensor=1")
            assert (model.model, model.family, model.num_layers, model.bos_token_id) == ("echo", "fake", 3, BOS)
            assert model.eos_token_ids == (3, 4)
            assert model.max_model_len == 200_000
            said = await client.server_info()
            assert said.state is info.ServerState.READY
            assert said.stats == engine.stats()
            assert said.versions["grpcio"] == grpc.__version__
            assert 0 < said.uptime_s < 60
            engine.model_config = wire_config_without_bos(engine)
            assert (await client.model_info()).bos_token_id is None

    def wire_config_without_bos(engine):
        from dataclasses import replace

        return replace(engine.model_config, bos_token_id=None)

    run(main())


def test_kv_use_is_the_share_of_pages_that_live_sequences_hold():
    message = info.server_info_to_proto(
        info.ServerInfo(state=info.ServerState.READY, uptime_s=1.0, stats=FakeEngine().stats())
    )
    assert message.stats.kv_use == pytest.approx(0.25)


def test_abort_by_id():
    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        async with serving(engine) as (_, client):
            stream = client.generate("abc", request_id="mine")
            await until(lambda: "mine" in engine.live)
            assert await client.abort("mine")
            texts, finished = await collect(stream)
            assert texts == {}
            assert finished.ends[0].finish_reason is FinishReason.ABORT
            assert not await client.abort("mine")
            with pytest.raises(InvalidArgumentError, match="request_id"):
                await client.abort("")

    run(main())


@pytest.mark.parametrize("when", ["before the first token", "in the middle"])
@pytest.mark.parametrize("how", ["close", "cancel the task", "disconnect", "deadline"])
def test_a_client_that_goes_away_aborts_its_request(when, how):
    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        async with serving(engine) as (server, client):
            async with AsyncClient(server.address) as leaving:
                stream = leaving.generate(
                    "x" * 100_000, request_id="gone", timeout_s=0.5 if how == "deadline" else None
                )
                await until(lambda: "gone" in engine.live)
                if when == "in the middle":
                    engine.gate.set()
                    await anext(stream)
                    engine.gate.clear()
                if how == "close":
                    await stream.aclose()
                    with pytest.raises(StopAsyncIteration):
                        await anext(stream)
                elif how == "cancel the task":
                    reading = asyncio.create_task(read_all(stream))
                    await asyncio.sleep(0.01)
                    reading.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await reading
                elif how == "disconnect":
                    await leaving.close()
                else:
                    with pytest.raises(DeadlineExceededError):
                        await read_all(stream)
                await until(lambda: not engine.live and server.service.live == 0, timeout_s=2)
                assert engine.aborted == ["gone"] or how == "deadline"  # which the engine may see first
            engine.gate.set()
            texts, _ = await collect(client.generate("next", request_id="gone"))  # its id is free again
            assert texts == {0: "next"}

    async def read_all(stream):
        async for _ in stream:
            pass

    run(main())


def test_an_id_is_free_when_its_last_event_arrives():
    async def main():
        async with serving(FakeEngine()) as (_, client):
            for _ in range(50):
                texts, _ = await collect(client.generate("ab", request_id="again"))
                assert texts == {0: "ab"}

    run(main())


def test_the_same_id_twice():
    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        async with serving(engine) as (_, client):
            first = client.generate("first", request_id="same")
            await until(lambda: "same" in engine.live)
            with pytest.raises(RequestExistsError):
                await collect(client.generate("second", request_id="same"))
            engine.gate.set()
            texts, _ = await collect(first)
            assert texts == {0: "first"}

    run(main())


ALL_ERRORS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, JaxinferError)] + [
    wire.WarmingUpError,
    wire.UnauthenticatedError,
]


def made(error: type[JaxinferError]) -> JaxinferError:
    return error("top_p", 1.1, "(0, 1]") if error is InvalidArgumentError else error("it is so: 100 % über 🌍")


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda each: each.__name__)
def test_every_error_comes_back_as_itself(error):
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            engine.refuse_with = made(error)
            with pytest.raises(error) as raised:
                await collect(client.generate("abc"))
            assert type(raised.value) is error
            assert str(raised.value) == str(made(error))
            if isinstance(raised.value, InvalidArgumentError):
                assert raised.value.field == "top_p"
            engine.refuse_with, engine.fail_after = None, (1, made(error))  # in the middle of the stream
            stream = client.generate("abc")
            assert (await anext(stream)).text == "a"
            with pytest.raises(error):
                await anext(stream)
            with pytest.raises(StopAsyncIteration):
                await anext(stream)

    run(main())


def test_codes_on_the_wire():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            engine.refuse_with = QueueFullError("1024 requests wait already")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await stub.Generate(pb.GenerateRequest(text="a")).read()
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert raised.value.details() == "1024 requests wait already"
            assert ("jaxinfer-error-code", "queue_full") in list(raised.value.trailing_metadata())

    run(main())


def bad(**params) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="abc", sampling_params=pb.SamplingParams(**params))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (bad(temperature=-1), "temperature"),
        (bad(temperature=float("nan")), "temperature"),
        (bad(temperature=float("inf")), "temperature"),
        (bad(top_p=0), "top_p"),
        (bad(top_p=1.1), "top_p"),
        (bad(top_k=-2), "top_k"),
        (bad(min_p=1.5), "min_p"),
        (bad(max_tokens=0), "max_tokens"),
        (bad(n=0), "n"),
        (bad(n=129), "n"),
        (bad(logprobs=10**9), "logprobs"),
        (bad(stop=[""]), "stop"),
        (bad(stop=["x"] * 65), "stop"),
        (bad(stop_token_ids=[-1]), "stop_token_ids"),
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text=""), "prompt"),
        (pb.GenerateRequest(token_ids=pb.TokenIds()), "prompt"),
        (pb.GenerateRequest(messages=pb.ChatMessages()), "prompt"),
        (pb.GenerateRequest(text="a", request_id=""), "request_id"),
        (pb.GenerateRequest(text="a", request_id="x" * 257), "request_id"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), parse_special=True), "parse_special"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_bad_value_is_named(message, field):
    async def main():
        async with serving(FakeEngine()) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await inference_pb2_grpc.InferenceStub(channel).Generate(message).read()
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert raised.value.details().startswith(f"{field} = ")

    run(main())


def test_another_model_is_not_found():
    async def main():
        async with serving(FakeEngine()) as (_, client):
            texts, _ = await collect(client.generate("abc", model="echo"))
            assert texts == {0: "abc"}
            for call in (
                collect(client.generate("abc", model="other")),
                client.tokenize("abc", model="other"),
                client.detokenize([1], model="other"),
            ):
                with pytest.raises(ModelNotFoundError, match=r"'other'.*'echo'"):
                    await call

    run(main())


def test_an_unexpected_error_harms_nobody_else_and_is_logged_with_the_id(caplog):
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            engine.gate.clear()
            neighbour = client.generate("neighbour")
            await until(lambda: engine.live)
            engine.refuse_with = RuntimeError("secret detail")
            with pytest.raises(JaxinferError, match="internal error in request 'bad-one'") as raised:
                await collect(client.generate("abc", request_id="bad-one"))
            assert "secret" not in str(raised.value)
            engine.refuse_with = None
            engine.gate.set()
            texts, _ = await collect(neighbour)
            assert texts == {0: "neighbour"}

    with caplog.at_level(logging.ERROR):
        run(main())
    (record,) = [each for each in caplog.records if each.levelno >= logging.ERROR]
    assert "'bad-one'" in record.getMessage()
    assert "secret detail" in str(record.exc_info)


def test_bytes_that_are_no_message_are_refused_alone():
    async def main():
        async with serving(FakeEngine()) as (server, client):
            async with grpc.aio.insecure_channel(server.address) as channel:
                for garbage in (b"\xff" * 40, b"\x1a\x02\xff\xfe"):  # not protobuf; a text that is not UTF-8
                    raw = channel.unary_stream("/jaxinfer.v1.Inference/Generate")
                    with pytest.raises(grpc.aio.AioRpcError):
                        await raw(garbage).read()
            texts, _ = await collect(client.generate("abc"))
            assert texts == {0: "abc"}

    run(main())


def test_a_message_past_the_limit_is_refused_alone():
    async def main():
        async with serving(FakeEngine()) as (server, client):
            options = [("grpc.max_send_message_length", -1)]
            async with grpc.aio.insecure_channel(server.address, options=options) as channel:
                stub = inference_pb2_grpc.InferenceStub(channel)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stub.Generate(pb.GenerateRequest(text="x" * (65 * 2**20))).read()
                assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            with pytest.raises(wire.CallFailedError, match="RESOURCE_EXHAUSTED"):
                await collect(client.generate("x" * (65 * 2**20)))
            texts, _ = await collect(client.generate("abc"))
            assert texts == {0: "abc"}

    run(main())


def test_a_client_that_does_not_read_slows_nobody():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, client), AsyncClient(server.address) as lazy:
            stream = lazy.generate("x" * 150_000, request_id="lazy")
            await anext(stream)  # and no more
            texts, _ = await asyncio.wait_for(collect(client.generate("quick")), 2)
            assert texts == {0: "quick"}
            await stream.aclose()
            await until(lambda: engine.aborted == ["lazy"])

    run(main())
