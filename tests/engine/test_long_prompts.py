"""Long prompts: refused by their size where that says enough, and never in the way of others."""

import asyncio
import threading
from contextlib import suppress

import numpy as np
import pytest
from engine_harness import House

from jaxinfer.engine.logprob_rows import LogprobRows, position_logprobs
from jaxinfer.engine.text_threads import SHORT_TEXT_BYTES
from jaxinfer.errors import InvalidArgumentError
from jaxinfer.types import Request, SamplingParams, StepTokens


@pytest.mark.parametrize(
    "prompt",
    [
        {"text": "a" * 10_000_000},
        {"messages": [{"role": "user", "content": "a" * 10_000_000}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 10_000_000}]}]},
    ],
    ids=["text", "chat", "parts"],
)
def test_what_cannot_fit_is_refused_before_it_is_encoded(house: House, prompt, monkeypatch):
    monkeypatch.setattr(house.engine.tokenizer, "encode_segments", None)
    params = SamplingParams(max_tokens=1)
    with pytest.raises(InvalidArgumentError, match=r"10000\d+ characters.* at most \d+"):
        house.engine.submit(Request(request_id="long", params=params, **prompt), lambda events: None)

    async def stream():
        async for _ in house.engine.stream(Request(request_id="long", params=params, **prompt)):
            pass

    with pytest.raises(InvalidArgumentError, match="10000"):
        asyncio.run(stream())
    assert house.ask([5, 6, 7], max_tokens=2).tokens


def test_a_cancelled_prompt_that_waits_for_a_long_one_leaves_nothing(house: House, monkeypatch):
    """Its place is free at once, though the thread is still busy with the one before."""
    engine, go_on = house.engine, threading.Event()
    encode = engine.tokenizer.encode
    begun = threading.Event()

    def slowly(text, **options):
        begun.set()
        go_on.wait(20)
        return encode("short", **options)

    monkeypatch.setattr(engine.tokenizer, "encode", slowly)
    monkeypatch.setattr(engine.tokenizer, "check_size", lambda *_: None)
    long = "a" * (SHORT_TEXT_BYTES + 1)

    async def main():
        def start(name):
            params = SamplingParams(max_tokens=1)
            return asyncio.create_task(
                engine.submit_async(Request(request_id=name, params=params, text=long), lambda events: None)
            )

        first, second = start("first"), start("second")
        await asyncio.to_thread(begun.wait, 20)
        second.cancel()
        with suppress(asyncio.CancelledError):
            await second
        assert not engine.abort("second")  # nobody knows it any more
        assert engine.abort("first")
        go_on.set()
        await first

    asyncio.run(main())


def test_logprobs_are_made_as_they_are_looked_at():
    rng = np.random.default_rng(0)

    def step(rows: int) -> StepTokens:
        ids = rng.integers(0, 50, (rows, 5)).astype(np.int32)
        values = rng.normal(size=(rows, 5)).astype(np.float32)
        return StepTokens(ids[:, 0], values[:, 0], np.arange(1, rows + 1, dtype=np.int32), ids, values)

    made, expected = LogprobRows(3), []
    for rows, part in ((4, slice(1, 3)), (5, slice(0, 5)), (2, slice(0, 0)), (3, slice(2, 3))):
        tokens = step(rows)
        made.append(tokens, part)
        expected += [position_logprobs(tokens, row, 3) for row in range(rows)[part]]
    assert len(made) == len(expected) == 8
    assert list(made) == expected
    assert made == tuple(expected)
    assert made != expected[1:]
    assert made[2:-1] == tuple(expected[2:-1])
    assert made[-1] == expected[-1]
    with pytest.raises(IndexError):
        made[8]
