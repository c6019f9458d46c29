"""Faults that users of serving engines report, each as a test of its whole kind, through a real gRPC server."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from typing import Any

import grpc
import pytest
from behaviour_harness import EOS, GREEDY, Answer, Script, answer_of, params, service_on
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_harness import run, until

from jaxinfer.engine.engine import Engine
from jaxinfer.errors import (
    InvalidArgumentError,
    RequestExistsError,
    StepFailedError,
)
from jaxinfer.types import Delta, FinishReason, SamplingParams
from server import inference_pb2 as pb
from server import wire

LENGTH, STOP, ABORT = FinishReason.LENGTH, FinishReason.STOP, FinishReason.ABORT
PROMPT = list(range(100, 112))
quickly = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))


def prompt_of(number: int, length: int = 12) -> list[int]:
    return [3 + (7 * number + 13 * i) % 381 for i in range(length)]


@pytest.fixture
def script(base: Engine, monkeypatch: pytest.MonkeyPatch) -> Script:
    return Script(base, monkeypatch)


def tokens_of(base: Engine, *texts: str) -> list[int]:
    return [token for text in texts for token in base.tokenizer.encode(text, add_bos=False)]


# Text: stop strings and characters in streams.


def cut(text: str, stop: str, *, include: bool = False) -> str:
    at = text.find(stop)
    return text if at < 0 else text[: at + len(stop) * include]


def check_stream(answer: Answer, whole: str) -> None:
    """What was sent is always a beginning of what is right; and nothing was sent twice or too late."""
    sent = ""
    for delta in answer.deltas:
        sent += delta.text
        assert whole.startswith(sent)
    assert sent == whole


@pytest.mark.parametrize(
    ("pieces", "stop", "right"),
    [
        (["DEF", "G", "HI", "J", "K"], "DEFGHIJ", ""),
        (["DEF", "G", "HI", "X", "Y"], "DEFGHIJ", "DEFGHIXY"),  # it was none after all: sent whole
        (["D", "E", "D", "E", "F"], "DEF", "DE"),
        (["x", "x", "aab", "c"], "aabc", "xx"),
        (["DEF", "G"], "DEFGHIJ", "DEFG"),  # cut short by max_tokens
    ],
)
def test_stop_held_back(base: Engine, script: Script, pieces: list[str], stop: str, right: str):
    async def main() -> None:
        async with service_on(base) as service:
            tokens = tokens_of(base, *pieces)
            script.play(tokens)
            answer = await service.ask(PROMPT, params(max_tokens=len(tokens), stop=stop))
            check_stream(answer, right)
            assert answer.reason is (STOP if stop in "".join(pieces) else LENGTH)
            assert answer.stop_reason == (stop if stop in "".join(pieces) else None)

    run(main())


@pytest.mark.parametrize(("stop", "bare", "included"), [("ui", "x q", "x qui"), ("k b", "x quic", "x quick b")])
def test_stop_inside_token(base: Engine, script: Script, stop: str, bare: str, included: str):
    async def main() -> None:
        async with service_on(base) as service:
            tokens = tokens_of(base, "x quick brown fox")
            for include, right in ((False, bare), (True, included)):
                await service.idle()  # a step behind a stop string would take a word of the script
                script.play(tokens)
                given = params(max_tokens=len(tokens), stop=stop, include_stop_str_in_output=include)
                check_stream(await service.ask(PROMPT, given), right)

    run(main())


@quickly
@given(
    said=st.lists(st.integers(3, 383), min_size=1, max_size=20),
    at=st.integers(0, 60),
    length=st.integers(1, 8),
    include=st.booleans(),
)
def test_any_stop_string_of_any_text(base: Engine, said: list[int], at: int, length: int, include: bool):
    whole = base.tokenizer.decode(said)
    stop = whole[at : at + length].replace("\ufffd", "") or "no such text"

    async def main() -> None:
        with pytest.MonkeyPatch.context() as patch:
            script = Script(base, patch)
            async with service_on(base) as service:
                script.play(said)
                given = params(max_tokens=len(said), stop=stop, include_stop_str_in_output=include)
                check_stream(await service.ask(PROMPT, given), cut(whole, stop, include=include))

    run(main())


CHARACTERS = ["你好，世界", "🙂🙃", "👩‍👩‍👧", "क्षि", "naïve", "a\u0301bc", "日本語とemoji🎉混ぜる"]


@pytest.mark.parametrize("text", CHARACTERS)
def test_split_utf8(base: Engine, script: Script, text: str):
    """Characters that span tokens come whole, whatever the prompt ends with."""

    async def main() -> None:
        async with service_on(base) as service:
            tokens = tokens_of(base, text)
            for prompt in (PROMPT, text):
                script.play(tokens)
                answer = await service.ask(prompt, params(max_tokens=len(tokens)))
                check_stream(answer, text)
                assert answer.tokens() == tokens
            # The prompt's last token ends inside a character: what is generated completes it, and no more is sent.
            for half in range(1, len(tokens)):
                script.play(tokens[half:])
                answer = await service.ask([*PROMPT, *tokens[:half]], params(max_tokens=len(tokens) - half))
                assert "\ufffd" not in answer.text()
                assert text.endswith(answer.text())
                assert len(answer.text()) <= len(text)
                shown = base.tokenizer.decode(tokens[:half]).rstrip("\ufffd")
                assert answer.text() == text[len(shown) :]

    run(main())


# Log-probabilities, samples, seeds, ends.


def test_prompt_logprobs_twice(base: Engine):
    async def main() -> None:
        async with service_on(base) as service:
            prompt = prompt_of(1, 33)
            asked = params(prompt_logprobs=2, logprobs=2)
            await service.ask(prompt)  # its pages are in the cache now
            first, second = [await service.ask(prompt, asked) for _ in range(2)]
            assert [at.chosen.token_id for at in first.prompt_logprobs[0].positions] == prompt[1:]
            assert first.prompt_logprobs == second.prompt_logprobs
            generated = [list(itertools.chain(*(delta.logprobs for delta in each.deltas))) for each in (first, second)]
            assert generated[0] == generated[1]
            assert len(generated[0]) == len(first.tokens()) == 8
            for at in [*first.prompt_logprobs[0].positions, *generated[0]]:
                assert at.chosen in at.top
                assert [each.logprob for each in at.top] == sorted((each.logprob for each in at.top), reverse=True)

    run(main())


def test_n_with_seed(base: Engine):
    async def main() -> None:
        async with service_on(base) as service:
            asked = params(n=4, seed=7, temperature=1.0, max_tokens=12)
            first = await service.ask(PROMPT, asked)
            assert len({tuple(first.tokens(index)) for index in range(4)}) == 4
            assert [end.finish_reason for end in first.finished.ends] == [LENGTH] * 4
            others = [service.send(prompt_of(i), params(temperature=1.0, max_tokens=20)) for i in range(20)]
            second = await service.ask(PROMPT, asked)
            for index in range(4):
                assert second.tokens(index) == first.tokens(index)
            await asyncio.gather(*others)

    run(main())


@pytest.mark.parametrize("ends", [{7: 90.0, 8: 70.0}, {8: 90.0, 7: 70.0}, {EOS: 90.0, 7: 70.0, 8: 50.0}])
def test_several_eos(base: Engine, ends: dict[int, float]):
    async def main() -> None:
        async with service_on(base, eos=(7, 8)) as service:
            likeliest = max(ends, key=ends.__getitem__)
            asked = params(ignore_eos=False, logit_bias=ends, max_tokens=40)
            assert (await service.ask(PROMPT, asked)).tokens() == [likeliest]
            held = await service.ask(PROMPT, SamplingParams(**_fields(asked) | {"min_tokens": 20}))
            assert not set(held.tokens()[:20]) & {EOS, 7, 8}
            assert held.tokens()[20:] == [likeliest]
            assert (held.reason, held.stop_reason) == (STOP, likeliest)
            ignored = await service.ask(PROMPT, SamplingParams(**_fields(asked) | {"ignore_eos": True}))
            assert ignored.tokens() == [likeliest] * 40
            assert ignored.reason is LENGTH

    run(main())


def _fields(given: SamplingParams) -> dict[str, Any]:
    return {name: getattr(given, name) for name in SamplingParams.__dataclass_fields__}


def test_neighbour(base: Engine):
    async def main() -> None:
        async with service_on(base) as service:
            asked = params(seed=11, temperature=1.0, top_p=0.95, max_tokens=24)
            alone = await service.ask(PROMPT, asked)
            others = [
                service.send(prompt_of(i, 5 + i), params(temperature=1.2, max_tokens=30, logprobs=i % 3))
                for i in range(31)
            ]
            among = await service.ask(PROMPT, asked)
            assert among.tokens() == alone.tokens()
            assert among.text() == alone.text()
            await asyncio.gather(*others)

    run(main())


# The page pool.


def test_tiny_pool(base: Engine):
    prompts = [prompt_of(i, 20) for i in range(8)]

    async def answers(num_pages: int) -> tuple[list[list[int]], int]:
        async with service_on(base, num_pages=num_pages, max_num_seqs=8) as service:
            tasks = [service.send(prompt, params(max_tokens=40, n=1 + i % 2)) for i, prompt in enumerate(prompts)]
            done = await asyncio.gather(*tasks)
            assert all(answer.reason is LENGTH for answer in done)
            return [
                a.tokens(i) for a in done for i in range(len(a.finished.ends))
            ], service.engine.stats().preemptions_total

    async def main() -> None:
        small, preemptions = await answers(32)  # a request needs 15 pages
        large, none = await answers(400)
        assert small == large
        assert preemptions > 0 == none

    run(main(), 60)


def test_never_fits(base: Engine):
    async def main() -> None:
        async with service_on(base, num_pages=6) as service:
            behind = [service.send(prompt_of(i), params(max_tokens=6)) for i in range(3)]
            refused = await service.ask(prompt_of(9, 60))
            assert isinstance(refused.error, InvalidArgumentError)
            assert "at most 24 tokens" in str(refused.error)
            assert all(answer.reason is LENGTH for answer in await asyncio.gather(*behind))

    run(main())


@pytest.mark.parametrize("n", [1, 3])
def test_outgrows_pool(base: Engine, n: int):
    async def main() -> None:
        async with service_on(base, num_pages=6) as service:
            answer = await service.ask(prompt_of(1, 10), params(max_tokens=100, n=n))
            for index, end in enumerate(answer.finished.ends):
                assert end.finish_reason is LENGTH
                assert len(answer.tokens(index)) == 6 * 4 + 1 - 10

    run(main())


# Ids, limits, bad values.


def test_same_id_twice(base: Engine):
    async def main() -> None:
        async with service_on(base) as service:
            right = (await service.ask(PROMPT, params(max_tokens=60))).tokens()
            stream = service.client.generate(PROMPT, params(max_tokens=60), request_id="twin")
            first = asyncio.create_task(answer_of(stream))
            await until(lambda: "twin" in service.engine._live)
            second = await service.ask(PROMPT, request_id="twin")
            assert isinstance(second.error, RequestExistsError)
            assert (await first).tokens() == right
            assert (await service.ask(PROMPT, request_id="twin")).error is None  # ended: the id is free

    run(main())


def test_at_the_limit(base: Engine):
    limit = base.scheduler_config.max_model_len

    async def main() -> None:
        async with service_on(base) as service:
            for length in (limit, limit + 1):
                answer = await service.ask(prompt_of(1, length))
                assert isinstance(answer.error, InvalidArgumentError)
                assert f"{length} tokens" in str(answer.error)
                assert str(limit - 1) in str(answer.error)
            answer = await service.ask(prompt_of(1, limit - 1))
            assert (len(answer.tokens()), answer.reason) == (1, LENGTH)
            assert answer.finished.usage.prompt_tokens == limit - 1

    run(main())


@pytest.mark.parametrize("over", [0, 1, 10**6])
def test_asks_too_many(base: Engine, over: int):
    limit = base.scheduler_config.max_model_len

    async def main() -> None:
        async with service_on(base) as service:
            prompt = prompt_of(1, limit - 10)
            answer = await service.ask(prompt, params(max_tokens=10 + over))
            assert (len(answer.tokens()), answer.reason) == (10, LENGTH)

    run(main())


@pytest.mark.parametrize("empty", ["", []])
def test_empty_prompt(base: Engine, empty: str | list[int]):
    async def main() -> None:
        async with service_on(base) as service:
            good = [service.send(prompt_of(i)) for i in range(3)]
            message = pb.GenerateRequest(sampling_params=wire.params_to_proto(GREEDY))
            if empty == "":
                message.text = ""
            else:
                message.token_ids.SetInParent()
            assert (await status_of(service.client, message)).code().name == "INVALID_ARGUMENT"
            answers = await asyncio.gather(*good)
            assert [len(answer.tokens()) for answer in answers] == [8] * 3

    run(main())


@pytest.mark.parametrize("bad", [384, 10**6, 2**31 - 1, -1])
@pytest.mark.parametrize("where", ["token_ids", "logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_ids_out_of_range(base: Engine, where: str, bad: int):
    async def main() -> None:
        async with service_on(base) as service:
            message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
            if where == "token_ids":
                message.token_ids.ids.append(bad)
            elif where == "logit_bias":
                message.sampling_params.logit_bias[bad] = 1.0
            elif where == "allowed_token_ids":
                message.sampling_params.allowed_token_ids.ids.extend([5, bad])
            else:
                message.sampling_params.stop_token_ids.append(bad)
            failed = await status_of(service.client, message)
            assert failed.code().name == "INVALID_ARGUMENT"
            assert where in failed.details()
            assert str(bad) in failed.details()
            assert bad < 0 or "384" in failed.details()
            assert len((await service.ask(PROMPT)).tokens()) == 8

    run(main())


async def status_of(client: Any, message: pb.GenerateRequest) -> Any:
    with pytest.raises(grpc.RpcError) as raised:
        async for _ in client._stub.Generate(message):
            pass
    return raised.value


BAD = [
    *[("temperature", value) for value in (-1.0, math.nan, math.inf, 1e9)],
    *[("top_p", value) for value in (0.0, 1.1, -0.5, math.nan)],
    *[("min_p", value) for value in (-0.1, 1.5, math.nan)],
    *[("top_k", value) for value in (-2, -(2**31))],
    *[("max_tokens", value) for value in (0, -5)],
    *[("min_tokens", value) for value in (-1, 9)],  # max_tokens is 8
    *[("n", value) for value in (0, -1, 129, 10**9)],
    *[("logprobs", value) for value in (10**9, -1, 21)],
    *[("prompt_logprobs", value) for value in (10**9, -1)],
    *[("presence_penalty", value) for value in (-2.1, 3.0, math.nan)],
    *[("frequency_penalty", value) for value in (-2.1, 3.0, math.inf)],
    *[("repetition_penalty", value) for value in (0.0, -1.0, math.nan, math.inf)],
    *[("stop", value) for value in ([""], ["a", ""], ["x"] * 65)],
    *[("bad_words", value) for value in ([""], ["x"] * 65, [" "])],
    ("allowed_token_ids", []),
    *[("logit_bias", {5: value}) for value in (101.0, -1e9, math.nan)],
]


def test_bad_parameter(base: Engine):
    async def main() -> None:
        async with service_on(base) as service:
            for name, value in BAD:
                message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT))
                said = message.sampling_params
                said.max_tokens = 8
                if name == "allowed_token_ids":
                    said.allowed_token_ids.SetInParent()
                elif isinstance(value, dict):
                    said.logit_bias.update(value)
                elif isinstance(value, list):
                    getattr(said, name).extend(value)
                else:
                    setattr(said, name, value)
                failed = await status_of(service.client, message)
                assert failed.code().name == "INVALID_ARGUMENT", (name, value)
                assert failed.details().startswith(name), failed.details()
                assert " is not allowed: " in failed.details()
            assert len((await service.ask(PROMPT)).tokens()) == 8

    run(main())


# Ends.


@pytest.mark.parametrize("moment", ["queued", "before the first token", "in the middle"])
@pytest.mark.parametrize("n", [1, 3])
def test_client_gone(base: Engine, moment: str, n: int, monkeypatch: pytest.MonkeyPatch):
    """The request stops within a step, and its pages come back."""
    read = base.runners[0].read
    # The news of it travels faster than a step, as with a model of a useful size.
    monkeypatch.setattr(base.runners[0], "read", lambda flight: (time.sleep(0.06), read(flight))[1])

    async def main() -> None:
        async with service_on(base, max_num_seqs=4) as service:
            others = [service.send(prompt_of(i), params(max_tokens=20)) for i in range(4 if moment == "queued" else 0)]
            await until(lambda: service.engine.stats().running == len(others))
            stream = service.client.generate(prompt_of(9, 90), params(max_tokens=30, n=n), request_id="gone")
            if moment == "in the middle":
                async for event in stream:
                    if isinstance(event, Delta):
                        break
            else:
                await until(lambda: service.engine._live.get("gone") is not None)
            await stream.aclose()
            before = service.engine.stats().steps_total
            await until(lambda: "gone" not in service.engine._live)
            # One step was in flight, and one may have been planned while the news was on its way.
            assert service.engine.stats().steps_total - before <= 3
            for answer in await asyncio.gather(*others):
                assert len(answer.tokens()) == 20
            await service.idle()

    run(main())


def test_no_silent_end(base: Engine, monkeypatch: pytest.MonkeyPatch):
    """Every end is one last message or one error; `answer_of` checks that of every stream of these tests."""

    async def main() -> None:
        async with service_on(base) as service:
            assert (await service.ask(PROMPT)).reason is LENGTH
            assert (await service.ask(PROMPT, params(allowed_token_ids=[9], stop_token_ids=[9]))).reason is STOP
            long = service.send(PROMPT, params(max_tokens=110), request_id="long")
            await until(lambda: service.engine.stats().running)
            assert await service.client.abort("long")
            assert (await long).reason is ABORT
            assert not await service.client.abort("long")
            late = await service.ask(prompt_of(3, 100), params(max_tokens=20), timeout_s=0.001)
            assert late.error.code == "deadline_exceeded"

            def broken(flight: Any) -> Any:
                monkeypatch.undo()
                raise RuntimeError("the device is on fire")

            monkeypatch.setattr(base.runners[0], "read", broken)
            failed = await service.ask(PROMPT)
            assert isinstance(failed.error, StepFailedError)
            assert "the device is on fire" in str(failed.error)
            assert (await service.ask(PROMPT)).reason is LENGTH
            live = [service.send(prompt_of(i), params(max_tokens=100)) for i in range(3)]
            await until(lambda: service.engine.stats().running == 3)
            await asyncio.to_thread(service.engine.close)
            assert [answer.error.code for answer in await asyncio.gather(*live)] == ["engine_dead"] * 3
            assert (await service.ask(PROMPT)).error.code == "engine_dead"

    run(main())
