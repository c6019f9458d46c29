"""Requests that would take long to read are refused before they are read, and stop nobody."""

import asyncio
import re
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest
from fake_engine import FakeEngine
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from server_harness import run, serving

from jaxinfer.engine.engine import PromptLimits
from jaxinfer.errors import InvalidArgumentError, UnsupportedError
from jaxinfer.text.token_bound import TokenBound
from jaxinfer.types import Finished, SamplingParams
from server import inference_pb2 as pb
from server import message_sizes
from server.message_sizes import MAX_MESSAGES, MAX_TOKENS_OF_TEXT, Limits, check

LIMITS = Limits(PromptLimits(1000, TokenBound(100, b"\x04")), vocab_size=5000)
LARGE = 400_000
GENERATE = pb.GenerateRequest.DESCRIPTOR

REFUSED = [
    (pb.GenerateRequest(text="a" * LARGE), r"text = 'a text of 400000 bytes'.* 1000 tokens.* 100000 bytes"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * LARGE)), r"token_ids = '400\d+ bytes'.*at most 75536 bytes"),
    (
        pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage()] * LARGE)),
        f"messages = 'over {MAX_MESSAGES} messages'",
    ),
    (pb.GenerateRequest(text="a", request_id="r" * LARGE), "request_id = '400000 bytes'.*at most 65536"),
    (
        pb.GenerateRequest(text="a", sampling_params=pb.SamplingParams(logit_bias=dict.fromkeys(range(LARGE), 1.0))),
        r"sampling_params = '\d+ bytes'.*at most 185536",
    ),
    (pb.TokenizeRequest(text="a" * (4 << 20) + "a"), "text = '4194305 bytes'.*at most 4194304"),
    (pb.DetokenizeRequest(token_ids=[1 << 30] * (MAX_TOKENS_OF_TEXT + 1)), "token_ids = '2621445 bytes'"),
    (pb.AbortRequest(request_id="r" * LARGE), "request_id = '400000 bytes'"),
]
TAKEN = [
    pb.GenerateRequest(text="a" * 100_000 + "\x04" * LARGE),  # of these no token comes
    pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="a" * LARGE)])),
    pb.GenerateRequest(messages=pb.ChatMessages(messages=[pb.ChatMessage(content="a" * 50)] * MAX_MESSAGES)),
    pb.TokenizeRequest(text="a" * LARGE),
    pb.DetokenizeRequest(token_ids=[1] * LARGE),
]


@pytest.mark.parametrize(("message", "why"), REFUSED, ids=lambda each: getattr(type(each), "__name__", ""))
def test_what_would_take_long_is_refused(message, why):
    with pytest.raises(InvalidArgumentError, match=why):
        check(message.SerializeToString(), message.DESCRIPTOR, LIMITS)


@pytest.mark.parametrize("message", TAKEN, ids=lambda each: type(each).__name__)
def test_what_may_fit_is_taken(message):
    check(message.SerializeToString(), message.DESCRIPTOR, LIMITS)


def test_a_field_in_pieces_counts_as_a_whole():
    half = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 70_000)).SerializeToString()
    with pytest.raises(InvalidArgumentError, match="token_ids"):
        check(half * 5, GENERATE, LIMITS)
    with pytest.raises(InvalidArgumentError, match="over 1000 fields"):
        check(pb.GenerateRequest(priority=1).SerializeToString() * LARGE, GENERATE, LIMITS)


def test_unknown_fields_are_refused_without_reading_them_all():
    with pytest.raises(UnsupportedError, match="field 99 of GenerateRequest"):
        check(b"\x98\x06\x01" * LARGE, GENERATE, LIMITS)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60), st.integers(0, 30))
def test_bytes_that_are_no_message(junk, cut):
    """They raise as protobuf would, or are left to it."""
    raw = (junk + pb.GenerateRequest(text="a" * 20).SerializeToString())[: 30 + cut]
    old, message_sizes.MEASURED_BYTES = message_sizes.MEASURED_BYTES, 0
    try:
        check(raw, GENERATE, LIMITS)
    except (DecodeError, InvalidArgumentError, UnsupportedError):
        pass
    finally:
        message_sizes.MEASURED_BYTES = old


@asynccontextmanager
async def channel_to(server):
    async with grpc.aio.insecure_channel(server.address) as channel:
        yield channel


async def prompt_tokens(client) -> int:
    """Of a short request, which is served."""
    events = [event async for event in client.generate("abc", SamplingParams(max_tokens=2))]
    assert isinstance(events[-1], Finished)
    return events[-1].usage.prompt_tokens


def test_through_a_server():
    """Each is refused with its field and limit, no engine sees it, and the next request is served."""

    async def main():
        engine = FakeEngine()
        engine.prompt_limits = LIMITS.prompt
        engine.model_config = replace(engine.model_config, vocab_size=LIMITS.vocab_size)
        async with serving(engine) as (server, client), channel_to(server) as channel:
            for message, why in REFUSED:
                name = type(message).__name__.removesuffix("Request")
                kind = channel.unary_stream if name == "Generate" else channel.unary_unary
                call = kind(f"/jaxinfer.v1.Inference/{name}")(message.SerializeToString())
                assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert re.search(why, await call.details())
            assert not engine.requests
            assert await prompt_tokens(client) == 3

    run(main())


def test_a_request_is_not_behind_a_long_text():
    """While a long text becomes tokens, which cannot be stopped, others come and go; those after it wait."""

    async def main():
        engine, long = FakeEngine(), "a" * 100_000
        begun, may_go_on = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        tokenize = engine.tokenize

        def slowly(text, **options):
            if len(text) > 1000:
                loop.call_soon_threadsafe(begun.set)
                asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result()
            return tokenize(text, **options)

        engine.tokenize = slowly
        async with serving(engine) as (_, client):
            first, second = (asyncio.create_task(client.tokenize(long, add_bos=False)) for _ in range(2))
            await begun.wait()
            assert await client.tokenize("abc", add_bos=False) == [97, 98, 99]
            assert await prompt_tokens(client) == 3
            assert not first.done()
            may_go_on.set()
            assert len(await first) == len(await second) == len(long)

    run(main())
