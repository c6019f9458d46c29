"""An engine computed by hand: it echoes its prompt, one token a step. A token is a character's code point."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from jaxinfer.config import LayerSpec, ModelConfig, SchedulerConfig
from jaxinfer.errors import DrainingError, InvalidArgumentError, JaxinferError, RequestExistsError
from jaxinfer.types import (
    Delta,
    EngineStats,
    Failed,
    Finished,
    FinishReason,
    PositionLogprobs,
    Request,
    SampleEnd,
    Timings,
    TokenLogprob,
    Usage,
)

VOCAB_SIZE = 0x110000
BOS = 2  # U+0002


class State(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


@dataclass
class Live:
    aborted: bool = False
    error: JaxinferError | None = None


class FakeEngine:
    """Sample i of a prompt `abc` is `abc` with every code point raised by i; it ends with STOP, or at max_tokens.

    Attributes:
      gate: while cleared, no token comes.
      step_s: seconds a token takes.
      refuse_with: raised in place of the first event.
      fail_after: (tokens, error): after so many tokens, a JaxinferError is yielded as Failed, another is raised, and
        None ends the stream with no last event.
      closed_early: ids of requests whose stream was closed before its end.
    """

    def __init__(self, state: State = State.READY, step_s: float = 0.0) -> None:
        self.model_name = "echo"
        self.model_config = ModelConfig(
            family="fake",
            vocab_size=VOCAB_SIZE,
            hidden_size=64,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            intermediate_size=128,
            layers=(LayerSpec(),) * 3,
            rms_norm_eps=1e-5,
            max_position=200_000,
            tie_embeddings=True,
            eos_token_ids=(3, 4),
            bos_token_id=BOS,
        )
        self.scheduler_config = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200_000, page_size=16, num_pages=100
        )
        self.state = state
        self.step_s = step_s
        self.gate = asyncio.Event()
        self.gate.set()
        self.refuse_with: Exception | None = None
        self.fail_after: tuple[int, Exception | None] | None = None
        self.live: dict[str, Live] = {}
        self.requests: list[Request] = []
        self.closed_early: list[str] = []
        self.closed = False

    async def stream(self, request: Request):
        if self.state is State.DRAINING:
            raise DrainingError("the engine is draining")
        if self.refuse_with is not None:
            raise self.refuse_with
        if request.request_id in self.live:
            raise RequestExistsError(f"request {request.request_id!r} is live already")
        prompt = self._prompt_ids(request)
        if not prompt:
            raise InvalidArgumentError("prompt", "", "at least one token")
        self.requests.append(request)
        live = self.live[request.request_id] = Live()
        params = request.params
        count = min(len(prompt), params.max_tokens or len(prompt))
        made, over = 0, False
        try:
            for at in range(count):
                if not await self._step(live):
                    break
                if self.fail_after is not None and self.fail_after[0] == at:
                    error = self.fail_after[1]
                    over = True
                    if error is None:
                        return
                    if not isinstance(error, JaxinferError):
                        raise error
                    yield Failed(error)
                    return
                made += 1
                for index in range(params.n):
                    token = prompt[at] + index
                    logprobs = ()
                    if params.logprobs is not None:
                        top = tuple(TokenLogprob(token + rank, -0.5 * rank, rank) for rank in range(params.logprobs))
                        logprobs = (PositionLogprobs(TokenLogprob(token, -0.25, 1), top),)
                    yield Delta(index, chr(token), (token,), logprobs)
            over = True
            if live.error is not None:
                yield Failed(live.error)
                return
            reason = (
                FinishReason.ABORT
                if live.aborted
                else FinishReason.LENGTH
                if count < len(prompt)
                else FinishReason.STOP
            )
            stop_reasons = (None, "stop!", 3)  # one of each kind
            yield Finished(
                tuple(SampleEnd(index, reason, stop_reasons[index % 3]) for index in range(params.n)),
                Usage(len(prompt), made * params.n, 16),
                Timings(0.25, 0.5, 1.5),
            )
        finally:
            del self.live[request.request_id]
            if not over:
                self.closed_early.append(request.request_id)

    async def _step(self, live: Live) -> bool:
        if self.step_s:
            await asyncio.sleep(self.step_s)
        while not self.gate.is_set() and not live.aborted and live.error is None:
            await asyncio.sleep(0.002)
        return not live.aborted and live.error is None

    def _prompt_ids(self, request: Request) -> list[int]:
        if request.token_ids is not None:
            return list(request.token_ids)
        return self.tokenize(request.text, add_bos=False) if request.text else self.tokenize_chat(request.messages)

    def abort(self, request_id: str) -> bool:
        live = self.live.get(request_id)
        if live is not None:
            live.aborted = True
        return live is not None

    def tokenize(self, text: str, *, parse_special: bool = False, add_bos: bool = True) -> list[int]:
        if parse_special:
            text = text.replace("<s>", "\3")
        return [BOS] * add_bos + [ord(character) for character in text]

    def tokenize_chat(self, messages) -> list[int]:
        return [ord(each) for turn in messages or () for each in f"{turn['role']}:{turn['content']};"]

    def detokenize(self, token_ids, *, skip_special_tokens: bool = True) -> str:
        for token_id in token_ids:
            if not 0 <= token_id < VOCAB_SIZE:
                raise InvalidArgumentError("token_ids", token_id, f"0 to {VOCAB_SIZE - 1}")
        return "".join(chr(token_id) for token_id in token_ids if token_id > 4 or not skip_special_tokens)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.live),
            waiting=2,
            total_pages=100,
            free_pages=60,
            cached_pages=15,
            page_size=16,
            output_tokens_per_s=12.5,
            prompt_tokens_total=10,
            output_tokens_total=20,
            cached_tokens_total=16,
            preemptions_total=1,
            steps_total=9,
            compiles_after_warmup=0,
            host_ms_per_step=0.75,
        )

    async def drain(self, timeout_s: float) -> bool:
        self.state = State.DRAINING
        end = asyncio.get_running_loop().time() + timeout_s
        while self.live and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.005)
        left = list(self.live.values())
        for live in left:
            live.error = DrainingError("the engine shut down before the request ended")
        return not left

    def close(self) -> None:
        self.closed = True
