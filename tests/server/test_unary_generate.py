"""UnaryGenerate: the same answer as Generate, in one message, and the same ends."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fake_engine import FakeEngine
from server_harness import run, serving, until

from jaxinfer.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    JaxinferError,
    RequestExistsError,
    StepFailedError,
)
from jaxinfer.types import Delta, Finished, FinishReason, PromptLogprobs, SamplingParams
from server import inference_pb2 as pb
from server import inference_pb2_grpc
from server.client import AsyncClient


def test_it_is_what_generate_says_in_one():
    async def main():
        async with serving(FakeEngine()) as (_, client):
            params = SamplingParams(n=3, max_tokens=8, logprobs=2, prompt_logprobs=1)
            answer = await client.unary_generate("hello 🌍!", params, request_id="mine")
            events = [event async for event in client.generate("hello 🌍!", params)]
            assert answer.request_id == "mine"
            assert answer.prompt_logprobs == events[0]
            assert isinstance(events[0], PromptLogprobs)
            assert len(events[0].positions) == 7
            *deltas, finished = events[1:]
            assert isinstance(finished, Finished)
            assert (answer.usage, answer.timings) == (finished.usage, finished.timings)
            assert tuple(sample.end for sample in answer.samples) == finished.ends
            for index, sample in enumerate(answer.samples):
                mine = [each for each in deltas if each.index == index]
                assert sample.output == Delta(
                    index,
                    "".join(each.text for each in mine),
                    sum((each.token_ids for each in mine), ()),
                    sum((each.logprobs for each in mine), ()),
                )
            assert [sample.output.text[:2] for sample in answer.samples] == ["he", "if", "jg"]

    run(main())


def test_what_is_not_asked_for_is_not_there():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            answer = await client.unary_generate("x" * 50)
            assert answer.samples[0].output.token_ids == (120,) * 50  # max_tokens is the rest of the context
            assert answer.samples[0].output.logprobs == ()
            assert answer.prompt_logprobs is None
            assert answer.request_id == engine.requests[-1].request_id
            answer = await client.unary_generate("ab", SamplingParams(detokenize=False))
            assert (answer.samples[0].output.text, answer.samples[0].output.token_ids) == ("", (97, 98))

    run(main())


def test_a_made_up_id_is_said():
    async def main():
        async with serving(FakeEngine()) as (server, _), grpc.aio.insecure_channel(server.address) as channel:
            answer = await inference_pb2_grpc.InferenceStub(channel).UnaryGenerate(pb.GenerateRequest(text="ab"))
            assert answer.request_id.startswith("request-")
            assert answer.samples[0].output.text == "ab"

    run(main())


@pytest.mark.parametrize("how", ["cancel", "disconnect", "deadline"])
def test_a_client_that_goes_away_aborts_its_request(how):
    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        async with serving(engine) as (server, client), AsyncClient(server.address) as leaving:
            timeout_s = 0.3 if how == "deadline" else None
            call = asyncio.create_task(leaving.unary_generate("abc", request_id="gone", timeout_s=timeout_s))
            await until(lambda: "gone" in engine.live)
            if how == "cancel":
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
            elif how == "disconnect":
                await leaving.close()
                with pytest.raises(JaxinferError):
                    await call
            else:
                with pytest.raises(DeadlineExceededError):
                    await call
            await until(lambda: not engine.live and server.service.live == 0, timeout_s=2)
            assert engine.aborted == ["gone"] or how == "deadline"
            engine.gate.set()
            answer = await client.unary_generate("next", request_id="gone")  # its id is free again
            assert answer.samples[0].output.text == "next"

    run(main())


def test_abort_by_id_and_ids_given_twice():
    async def main():
        engine = FakeEngine()
        engine.gate.clear()
        async with serving(engine) as (_, client):
            call = asyncio.create_task(client.unary_generate("abc", SamplingParams(n=2), request_id="mine"))
            await until(lambda: "mine" in engine.live)
            with pytest.raises(RequestExistsError):
                await client.unary_generate("abc", request_id="mine")
            assert "mine" in engine.live
            assert await client.abort("mine")
            answer = await call
            assert [sample.end.finish_reason for sample in answer.samples] == [FinishReason.ABORT] * 2
            engine.gate.set()
            for _ in range(20):  # an id is free when the answer is there
                await client.unary_generate("ab", request_id="again")

    run(main())


def test_errors_come_as_from_generate():
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (_, client):
            with pytest.raises(InvalidArgumentError, match="prompt = "):
                await client.unary_generate("")
            engine.fail_after = (2, StepFailedError("step 7 failed"))
            with pytest.raises(StepFailedError, match="step 7"):
                await client.unary_generate("abc")
            engine.fail_after, engine.refuse_with = None, RuntimeError("secret")
            with pytest.raises(JaxinferError, match="internal error in request 'bad'") as raised:
                await client.unary_generate("abc", request_id="bad")
            assert "secret" not in str(raised.value)

    run(main())
