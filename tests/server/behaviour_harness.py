"""The tiny model behind a real gRPC server, for tests of what clients get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from server_harness import until
from tiny_engines import engine_on

from jaxinfer.engine.engine import Engine, EngineState
from jaxinfer.engine.runner import Flight
from jaxinfer.errors import JaxinferError
from jaxinfer.types import Delta, Finished, FinishReason, PromptLogprobs, SamplingParams, StepTokens
from server.client import AsyncClient, AsyncGenerateStream
from server.grpc_service import GrpcServer

EOS = 2  # the tokenizer's own end token
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def params(**changes: Any) -> SamplingParams:
    return replace(GREEDY, **changes)


@dataclass
class Answer:
    """What one stream gave, and the error that ended it, if one did."""

    deltas: list[Delta] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    finished: Finished | None = None
    error: JaxinferError | None = None

    def tokens(self, index: int = 0) -> list[int]:
        return [token for delta in self.deltas if delta.index == index for token in delta.token_ids]

    def text(self, index: int = 0) -> str:
        return "".join(delta.text for delta in self.deltas if delta.index == index)

    @property
    def reason(self) -> FinishReason:
        assert self.finished is not None, self.error
        return self.finished.ends[0].finish_reason

    @property
    def stop_reason(self) -> str | int | None:
        assert self.finished is not None, self.error
        return self.finished.ends[0].stop_reason


async def answer_of(stream: AsyncGenerateStream) -> Answer:
    """Reads a stream to its end, which must be one last message or one error, and nothing after it."""
    answer = Answer()
    try:
        async for event in stream:
            assert answer.finished is None, "an event after the last one"
            if isinstance(event, Finished):
                answer.finished = event
            elif isinstance(event, PromptLogprobs):
                answer.prompt_logprobs.append(event)
            else:
                answer.deltas.append(event)
    except JaxinferError as error:
        assert answer.finished is None, "an error after the last message"
        answer.error = error
    assert (answer.finished is None) == (answer.error is not None), "an end without a word"
    return answer


class Service:
    """A server on an engine, and a client of it."""

    def __init__(self, engine: Engine, server: GrpcServer, client: AsyncClient):
        self.engine, self.server, self.client = engine, server, client

    def send(self, prompt: Any, given: SamplingParams = GREEDY, **options: Any) -> asyncio.Task[Answer]:
        return asyncio.create_task(answer_of(self.client.generate(prompt, given, **options)))

    async def ask(self, prompt: Any, given: SamplingParams = GREEDY, **options: Any) -> Answer:
        return await self.send(prompt, given, **options)

    @property
    def free_pages(self) -> int:
        stats = self.engine.stats()
        return stats.free_pages + stats.cached_pages

    async def idle(self) -> None:
        """Nothing runs, and every page is back."""
        await until(lambda: not self.engine._live)
        await until(lambda: self.free_pages == self.engine.scheduler_config.num_pages)


@asynccontextmanager
async def service_on(base: Engine, **changes: Any) -> AsyncIterator[Service]:
    """At the end, every page must be back and the page books in order."""
    engine = engine_on(base, **changes)
    compiles = engine.runners[0].compiles_after_warm_up  # other tests of this process count too
    server = GrpcServer(port=0)
    await server.start()
    try:
        server.set_engine(engine)
        async with AsyncClient(server.address) as client:
            await client.wait_ready(10)
            service = Service(engine, server, client)
            yield service
            if engine.state is not EngineState.DEAD:
                await service.idle()
            assert engine.runners[0].compiles_after_warm_up == compiles, "this process compiled something meanwhile"
    finally:
        await server.stop(0)
        await asyncio.to_thread(engine.close)


class Script:
    """Says a script in place of what the model says, to one request of one sample at a time."""

    def __init__(self, base: Engine, monkeypatch: Any):
        self.tokens: list[int] = []
        self._read = base.runners[0].read
        self._said = 0
        monkeypatch.setattr(base.runners[0], "read", self._scripted)

    def play(self, tokens: Sequence[int]) -> None:
        self.tokens, self._said = list(tokens), 0

    def _scripted(self, flight: Flight) -> StepTokens:
        read = self._read(flight)
        if not flight.plan.sampled.any():
            return read
        token = self.tokens[min(self._said, len(self.tokens) - 1)]
        self._said += 1
        return replace(read, token_ids=read.token_ids * 0 + token)
