"""An engine computed by hand: it echoes its prompt, one token a step. A token is a character's code point."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from jaxinfer.config import LayerSpec, ModelConfig, SchedulerConfig
from jaxinfer.engine.engine import PromptLimits
from jaxinfer.engine.text_threads import TextThreads, result_or_undo
from jaxinfer.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineStuckError,
    InvalidArgumentError,
    JaxinferError,
    RequestExistsError,
)
from jaxinfer.types import (
    Delta,
    EngineStats,
    Event,
    Failed,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
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
    STUCK = "stuck"


@dataclass
class Live:
    request: Request
    prompt: list[int]
    sink: Callable[[list[Event]], None]
    steps: Iterator[list[Event]]
    deadline: float | None
    aborted: bool = False
    error: JaxinferError | None = field(default=None)


class FakeEngine:
    """Sample i of a prompt `abc` is `abc` with every code point raised by i; it ends with STOP, or at max_tokens.

    As in the real one, a thread of its own gives every live request a token a step, and calls the sinks.

    Attributes:
      gate: while cleared, no token comes.
      step_s: seconds a token takes.
      refuse_with: raised by `submit`.
      fail_after: (tokens, error): after so many tokens, the request fails.
      aborted: ids of requests that were aborted while they lived.
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
        self.mesh = "tensor=1"
        self.prompt_limits = PromptLimits(max_tokens=200_000, bound=None)
        self.text_threads = TextThreads()
        self.scheduler_config = SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=64, max_model_len=200_000, page_size=16, num_pages=100
        )
        self.state = state
        self.step_s = step_s
        self.gate = threading.Event()
        self.gate.set()
        self.refuse_with: Exception | None = None
        self.fail_after: tuple[int, JaxinferError] | None = None
        self.live: dict[str, Live] = {}
        self.requests: list[Request] = []
        self.aborted: list[str] = []
        self.closed = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)

    def submit(self, request: Request, sink: Callable[[list[Event]], None]) -> list[int]:
        if self.state is State.DRAINING:
            raise DrainingError("the engine is draining")
        if self.state is State.STUCK:
            raise EngineStuckError("the device has been at one step for 9 s")
        if self.refuse_with is not None:
            raise self.refuse_with
        prompt = self._prompt_ids(request)
        if not prompt:
            raise InvalidArgumentError("prompt", "", "at least one token")
        deadline = None if request.timeout_s is None else time.monotonic() + request.timeout_s
        with self._lock:
            if request.request_id in self.live:
                raise RequestExistsError(f"request {request.request_id!r} is live already")
            self.requests.append(request)
            live = Live(request, prompt, sink, self._tokens(request, prompt), deadline)
            self.live[request.request_id] = live
            if not self._thread.ident:
                self._thread.start()
        return prompt

    async def submit_async(self, request: Request, sink: Callable[[list[Event]], None]) -> list[int]:
        return await result_or_undo(
            self.text_threads.submit(0, self.submit, request, sink),
            never_began=lambda: None,
            undo=lambda: self.abort(request.request_id),
        )

    def _run(self) -> None:
        while not self.closed:
            time.sleep(self.step_s if self.live else 0.001)
            if self.state is State.STUCK:
                continue
            for live in list(self.live.values()):
                events = self._step(live)
                if events and isinstance(events[-1], (Finished, Failed)):
                    del self.live[live.request.request_id]  # first, so that the id is free
                if events:
                    live.sink(events)

    def _step(self, live: Live) -> list[Event]:
        if live.error is not None:
            return [Failed(live.error)]
        if live.aborted:
            return [self._finished(live.request, live.prompt, FinishReason.ABORT)]
        if live.deadline is not None and time.monotonic() > live.deadline:
            return [Failed(DeadlineExceededError("the request's time ran out"))]
        return next(live.steps) if self.gate.is_set() else []

    def _tokens(self, request: Request, prompt: list[int]) -> Iterator[list[Event]]:
        params = request.params
        if params.prompt_logprobs is not None:
            yield [PromptLogprobs(tuple(self._position(token, params.prompt_logprobs) for token in prompt[1:]))]
        count = min(len(prompt), params.max_tokens or len(prompt))
        for at in range(count):
            if self.fail_after is not None and self.fail_after[0] == at:
                yield [Failed(self.fail_after[1])]
            deltas: list[Event] = []
            for index in range(params.n):
                token = prompt[at] + index
                logprobs = () if params.logprobs is None else (self._position(token, params.logprobs),)
                deltas.append(Delta(index, chr(token) if params.detokenize else "", (token,), logprobs))
            yield deltas
        yield [self._finished(request, prompt, FinishReason.LENGTH if count < len(prompt) else FinishReason.STOP)]

    def _position(self, token: int, count: int) -> PositionLogprobs:
        top = tuple(TokenLogprob(token + rank, -0.5 * rank, rank) for rank in range(count))
        return PositionLogprobs(TokenLogprob(token, -0.25, 1), top)

    def _finished(self, request: Request, prompt: list[int], reason: FinishReason) -> Finished:
        n = request.params.n
        made = 0 if reason is FinishReason.ABORT else min(len(prompt), request.params.max_tokens or len(prompt))
        stop_reasons = (None, "stop!", 3)  # one of each kind
        ends = tuple(SampleEnd(index, reason, stop_reasons[index % 3]) for index in range(n))
        return Finished(ends, Usage(len(prompt), made * n, 16), Timings(0.25, 0.5, 1.5))

    def _prompt_ids(self, request: Request) -> list[int]:
        if request.token_ids is not None:
            return list(request.token_ids)
        return self.tokenize(request.text, add_bos=False) if request.text else self.tokenize_chat(request.messages)

    def reshard(self, mesh: str) -> None:
        if mesh == "tensor=3":
            raise InvalidArgumentError("mesh", mesh, "1, 2 or 4")
        self.mesh = mesh

    def abort(self, request_id: str) -> bool:
        live = self.live.get(request_id)
        if live is not None:
            live.aborted = True
            self.aborted.append(request_id)
        return live is not None

    def tokenize(self, text: str, *, parse_special: bool = False, add_bos: bool = True, max_tokens=None) -> list[int]:
        if parse_special:
            text = text.replace("<s>", "\3")
        return [BOS] * add_bos + [ord(character) for character in text]

    def tokenize_chat(self, messages, *, max_tokens=None) -> list[int]:
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
            waiting_tokens=321,
            audit_breaches_total=0,
            kv_dtype="int8",
            kv_token_bytes=136,
        )

    async def drain(self, timeout_s: float) -> bool:
        if self.state is not State.STUCK:
            self.state = State.DRAINING
        end = time.monotonic() + timeout_s
        while self.live and time.monotonic() < end:
            await asyncio.sleep(0.005)
        left = list(self.live.values())
        for live in left:
            live.error = DrainingError("the engine shut down before the request ended")
        return not left

    def close(self) -> None:
        self.closed = True
