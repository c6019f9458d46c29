"""Requests that hypothesis makes: each gets an answer or a named refusal, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from behaviour_harness import GREEDY, service_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_harness import run

from jaxinfer.engine.engine import Engine
from server import inference_pb2 as pb

wild_ints = st.one_of(st.integers(-2, 30), st.sampled_from([-(2**31), 2**31 - 1, 383, 384]))
wild_floats = st.one_of(st.floats(-3, 3), st.floats(), st.sampled_from([0.0, 1.0, 1e-300, 1e300]))
texts = st.text(max_size=12)
ids = st.lists(st.one_of(st.integers(0, 383), st.integers(0, 383), wild_ints), max_size=40)
tame = {
    "n": st.integers(1, 3),
    "temperature": st.floats(0, 2),
    "top_p": st.floats(0.01, 1),
    "top_k": st.integers(-1, 400),
    "min_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "max_tokens": st.integers(1, 6),
    "logprobs": st.integers(0, 20),
    "min_tokens": st.integers(0, 3),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.1, 3),
    "prompt_logprobs": st.integers(0, 20),
}
FLOATS = {"temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"}
WILD = {name: wild_floats if name in FLOATS else wild_ints for name in tame}
WILD |= {"seed": tame["seed"], "max_tokens": st.integers(-5, 6)}  # few tokens, so that a run is short
FLAGS = (
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "spaces_between_special_tokens",
    "detokenize",
)


@st.composite
def sampling(draw: st.DrawFn) -> pb.SamplingParams:
    message = pb.SamplingParams(max_tokens=draw(tame["max_tokens"]))
    for name in draw(st.lists(st.sampled_from(sorted(tame)), unique=True, max_size=6)):
        kind = WILD if draw(st.integers(0, 5)) == 0 else tame
        setattr(message, name, draw(kind[name]))
    for name in draw(st.lists(st.sampled_from(FLAGS), unique=True, max_size=3)):
        setattr(message, name, draw(st.booleans()))
    some = lambda strategy: draw(strategy) if draw(st.integers(0, 3)) == 0 else None
    message.stop.extend(some(st.lists(texts, max_size=3)) or [])
    message.bad_words.extend(some(st.lists(texts, max_size=3)) or [])
    message.stop_token_ids.extend(some(ids) or [])
    message.logit_bias.update(some(st.dictionaries(st.integers(-1, 390), wild_floats, max_size=3)) or {})
    allowed = some(ids)
    if allowed is not None:
        message.allowed_token_ids.SetInParent()
        message.allowed_token_ids.ids.extend(allowed)
    return message


@st.composite
def requests(draw: st.DrawFn) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    kind = draw(st.sampled_from(["text", "token_ids", "token_ids", "messages", None]))
    if kind == "text":
        message.text = draw(texts)
    elif kind == "token_ids":
        message.token_ids.ids.extend(draw(ids))
        message.token_ids.SetInParent()
    elif kind == "messages":
        message.messages.SetInParent()
        for role, content in draw(st.lists(st.tuples(st.sampled_from(["user", "system", "", "x"]), texts), max_size=3)):
            message.messages.messages.add(role=role, content=content)
    if draw(st.booleans()):
        message.sampling_params.CopyFrom(draw(sampling()))
    else:
        message.sampling_params.max_tokens = 3
    if draw(st.integers(0, 4)) == 0:
        message.request_id = draw(st.one_of(texts, st.just("x" * 300)))
    if draw(st.integers(0, 9)) == 0:
        message.model = draw(texts)
    if draw(st.integers(0, 9)) == 0:
        message.parse_special = draw(st.booleans())
    message.priority = draw(st.one_of(st.integers(-3, 3), st.sampled_from([-(2**31), 2**31 - 1])))
    return message


# For these a client is to blame; INTERNAL is for a request that leaves no token to choose.
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "UNIMPLEMENTED"}


async def outcome(call: Any, parsed: bool = True) -> None:
    """Reads a call to its end, and checks that it is one that a request may have."""
    last: Any = None
    failed: grpc.RpcError | None = None
    try:
        async for response in call:
            assert last != "finished", "something after the last message"
            last = response.WhichOneof("event")
    except grpc.RpcError as error:
        failed = error
    if failed is None:
        assert last == "finished", "an end without a word"
        return
    code, details = failed.code().name, failed.details()
    assert last != "finished", "an error after the last message"
    no_token = code == "INTERNAL" and "no token can be chosen" in details
    # gRPC itself answers bytes that are no message, and says UNKNOWN.
    assert code in REFUSALS or no_token or (not parsed and code == "UNKNOWN"), f"{code}: {details}"
    assert details, "a refusal that says nothing"


def check_requests(base: Engine, messages: list[pb.GenerateRequest]) -> None:
    async def main() -> None:
        async with service_on(base, num_pages=40) as service:
            right = (await service.ask([5, 6, 7])).tokens()
            await asyncio.gather(*(outcome(service.client._stub.Generate(each, timeout=15)) for each in messages))
            assert (await service.ask([5, 6, 7], GREEDY)).tokens() == right

    run(main(), 60)


REQUESTS = {"messages": st.lists(requests(), min_size=1, max_size=16)}


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(**REQUESTS)
def test_any_request_has_one_end_and_leaves_nothing(base: Engine, messages: list[pb.GenerateRequest]):
    check_requests(base, messages)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=st.lists(st.one_of(st.binary(max_size=60), requests().map(lambda m: m.SerializeToString())), max_size=12))
def test_any_bytes(base: Engine, raw: list[bytes]):
    """What is no message at all, or one with fields of tomorrow."""

    async def main() -> None:
        async with service_on(base, num_pages=40) as service:
            method = "/jaxinfer.v1.Inference/Generate"
            call = service.client._channel.unary_stream(method, response_deserializer=pb.GenerateResponse.FromString)
            await asyncio.gather(*(outcome(call(data, timeout=15), parsed=False) for data in raw))
            assert len((await service.ask([5, 6, 7])).tokens()) == 8

    run(main(), 60)
