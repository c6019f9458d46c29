"""The engine: a model on its devices, serving requests from any thread."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.admission import Admission
from jaxinfer.engine.live_request import LiveRequest, Sink
from jaxinfer.engine.loop import EngineLoop, StepRunner
from jaxinfer.engine.observer import GuardedObserver, Observer
from jaxinfer.engine.reshard import bytes_on_one_device, move_weights, weights_by_path
from jaxinfer.engine.router import Router
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import NO_WORDS, make_samples
from jaxinfer.engine.startup import Progress, Started, compile_programs, described, lay_out, start_threads, start_up
from jaxinfer.engine.text_threads import TextThreads, result_or_undo
from jaxinfer.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    EngineStuckError,
    InvalidArgumentError,
    JaxinferError,
    RequestExistsError,
    UnsupportedError,
)
from jaxinfer.text.bad_words import bad_word_rows
from jaxinfer.text.chat import encode_chat
from jaxinfer.text.token_bound import TokenBound
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import EngineStats, Event, Failed, Finished, Request, SamplingParams

logger = logging.getLogger(__name__)

CLOSE_JOIN_S, STUCK_JOIN_S = 60.0, 1.0  # how long `close` waits for the step that runs
MESSAGE_SIZE = 16  # characters that a message is taken for, besides what it says
MIN_CHAT_LIMIT = 1 << 20  # characters of a conversation that are taken in any case
FAIL_S = 10.0  # how long a drain waits for the requests it has failed


class EngineState(StrEnum):
    """Where an engine stands; only `READY` takes requests."""

    STARTING = "starting"
    READY = "ready"
    STUCK = "stuck"  # at one step for too long; ready again when the step ends
    DRAINING = "draining"
    DEAD = "dead"


class Processes(Protocol):
    """The processes that an engine runs on, where it does not run on its own."""

    mesh: str

    def stop(self) -> None:
        """Ends them."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt may be at most.

    Attributes:
      max_tokens: as token ids.
      bound: how much text one token can be; None where that is not known.
    """

    max_tokens: int
    bound: TokenBound | None

    @property
    def max_bytes(self) -> int | None:
        """Of text that is all tokens."""
        return None if self.bound is None else self.max_tokens * self.bound.max_bytes


class Engine:
    """Serves one model. `Engine.start` makes one; `stream` and `submit` may be called from any thread.

    Each replica has a loop with its own scheduler and pages; a request stays with the one that the router chose.

    Attributes:
      model_name: as the user gave it.
      scheduler_config: of each replica.
      text_threads: where prompts become tokens, for those who must not wait on an event loop.
      runners: of the replicas; see `EngineLoop` for what they do where other processes have the devices.
      startup_seconds: what each part of the start took.
    """

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        scheduler: SchedulerConfig,
        tokenizer: Tokenizer,
        runners: Sequence[Runner] | Sequence[StepRunner],
        *,
        stuck_after_s: float = EngineConfig().stuck_after_s,
        group: Processes | None = None,
    ):
        self._stuck_after_s, self._group = stuck_after_s, group
        self.model_name, self.model_config, self.scheduler_config = name, model, scheduler
        self.tokenizer, self.runners = tokenizer, tuple[Any, ...](runners)
        self.startup_seconds: dict[str, float] = {}
        self.text_threads = TextThreads()
        _ = tokenizer.token_bound  # found now, which takes a while, and not while requests wait
        self._started: Started | None = None
        self._resharding = threading.Lock()
        self._held: list[LiveRequest] | None = None  # what came while weights move; None while none do
        self._past: list[EngineStats] = []  # of loops that were left
        self._lock = threading.Lock()
        self._live: dict[str, LiveRequest | None] = {}  # None while its prompt is being tokenized
        self._aborted_early: set[str] = set()  # aborted in that time
        self._admission = Admission(scheduler.max_waiting, scheduler.max_waiting_tokens)
        self._observer = GuardedObserver()
        self._state = EngineState.STARTING
        self._death: EngineDeadError | None = None
        self._eos = tuple(dict.fromkeys((*model.eos_token_ids, *tokenizer.eos_token_ids)))
        self._make_loops()

    def _make_loops(self) -> None:
        scheduler = self.scheduler_config
        self._router = Router(
            len(self.runners), page_size=scheduler.page_size, pages=scheduler.num_pages, slots=scheduler.max_num_seqs
        )
        self._loops = [
            EngineLoop(
                Scheduler(scheduler, self._eos),
                runner,
                observer=self._observer,
                on_start=self._on_start,
                on_end=self._on_end,
                on_death=self._on_death,
            )
            for runner in self.runners
        ]

    @classmethod
    def start(
        cls, config: EngineConfig, *, cache_dir: Path, offline: bool = False, progress: Progress | None = None
    ) -> Engine:
        """Finds, loads and warms up a model; returns when it is ready.

        Raises:
          ModelNotFoundError, CheckpointError, UnsupportedError, InvalidArgumentError: what is wrong and where.
        """
        started = start_up(config, cache_dir=cache_dir, offline=offline, progress=progress)
        engine = cls(
            config.model,
            started.model,
            started.layout.scheduler,
            started.tokenizer,
            started.runners,
            stuck_after_s=config.stuck_after_s,
        )
        engine._started, engine.startup_seconds = started, started.seconds
        engine._begin()
        return engine

    def _begin(self) -> None:
        self._state = EngineState.READY
        for loop in self._loops:
            loop.start()

    @property
    def state(self) -> EngineState:
        """Stuck is one whose every replica is: until then the others serve."""
        if self._state is EngineState.READY and all(map(self._is_stuck, self._loops)):
            return EngineState.STUCK
        return self._state

    def _is_stuck(self, loop: EngineLoop) -> bool:
        return loop.seconds_without_progress > self._stuck_after_s

    def stats(self) -> EngineStats:
        """A snapshot as of the last step, of all replicas together."""
        return EngineStats.total([*(loop.stats for loop in self._loops), *self._past])

    def replica_stats(self) -> list[EngineStats]:
        """The same, of each replica."""
        return [loop.stats for loop in self._loops]

    def observe(self, observer: Observer) -> None:
        """From now on the observer hears what the engine does; one at a time."""
        self._observer.inner = observer

    # Text.

    @property
    def prompt_limits(self) -> PromptLimits:
        """What a prompt may be at most; a larger one is refused before it is tokenized."""
        return PromptLimits(self.scheduler_config.max_prompt_tokens, self.tokenizer.token_bound)

    def tokenize(
        self, text: str, *, parse_special: bool = False, add_bos: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Returns the token ids of a text; control-token strings in it stay text unless `parse_special`.

        Raises:
          InvalidArgumentError: there are more than `max_tokens`.
        """
        return self.tokenizer.encode(text, parse_special=parse_special, add_bos=add_bos, max_tokens=max_tokens)

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]], *, max_tokens: int | None = None) -> list[int]:
        """Returns the token ids of a conversation by the model's chat template, ready for the reply.

        Raises:
          InvalidArgumentError: there are more than `max_tokens`.
        """
        return encode_chat(self.tokenizer, messages, max_tokens=max_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    # Requests.

    def submit(self, request: Request, sink: Sink) -> Sequence[int]:
        """Starts a request; its events go to `sink`, on the loop thread, and end in one Finished or Failed.

        Returns the prompt's token ids.

        Raises:
          InvalidArgumentError, RequestExistsError, QueueFullError, DeadlineExceededError, DrainingError,
            EngineStuckError, EngineDeadError: nothing was started, and `sink` will not be called.
        """
        with self._refusals():
            self._enter(request)
            return self._proceed(request, sink)

    async def submit_async(self, request: Request, sink: Sink) -> Sequence[int]:
        """As `submit`, for an event loop: prompts become tokens on other threads, long ones one after another.

        A prompt that is too large is refused at once. If the caller is cancelled, the request is aborted.
        """
        with self._refusals():
            size = _text_size(request)
            self._check_size(request)
            self._enter(request)
            return await result_or_undo(
                self.text_threads.submit(size, self._proceed, request, sink),
                never_began=lambda: self._leave(request, 0),
                undo=lambda: self.abort(request.request_id),
            )

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        try:
            yield
        except JaxinferError as error:
            self._observer.on_refuse(error.code)
            raise

    def _proceed(self, request: Request, sink: Sink) -> Sequence[int]:
        """Takes on a request that has entered."""
        num_tokens = 0
        try:
            self._check_alive()
            self._check_params(request.params)
            self._check_size(request)
            prompt = self._prompt_ids(request)
            self.scheduler_config.check_prompt(len(prompt))
            self._admission.bring(len(prompt))
            num_tokens = len(prompt)
            live = self._make_live(request, prompt, sink)
            # Under the lock, so that an abort comes either before this (and is found here) or after it in the inbox,
            # and the end of the engine either before this (and is found here) or after it.
            with self._lock:
                self._check_alive()
                self._live[request.request_id] = live
                if self._held is not None:
                    self._held.append(live)
                else:
                    self._place(live)
            return prompt
        except BaseException:
            self._leave(request, num_tokens)
            raise

    def _leave(self, request: Request, num_tokens: int) -> None:
        """Forgets a request that has entered and is not taken on."""
        with self._lock:
            del self._live[request.request_id]
            self._aborted_early.discard(request.request_id)
        self._admission.go(num_tokens, started=False)

    def _place(self, live: LiveRequest) -> None:
        """To the replica that the router chooses. Under the lock."""
        closed = [self._is_stuck(loop) for loop in self._loops]
        live.replica = self._router.choose(live.samples[0].prompt_token_ids, len(live.samples), closed=closed)
        self._loops[live.replica].submit(live)
        if live.request_id in self._aborted_early:
            self._aborted_early.discard(live.request_id)
            self._loops[live.replica].abort(live.request_id)

    def _enter(self, request: Request) -> None:
        with self._lock:
            self._check_open()
            if request.request_id in self._live:
                raise RequestExistsError(f"request {request.request_id!r} is live already")
            if request.timeout_s is not None and request.timeout_s <= 0:
                raise DeadlineExceededError("the request's time is over already")
            self._admission.come()
            self._live[request.request_id] = None

    def _check_alive(self) -> None:
        if self._state is EngineState.DEAD:
            raise self._death or EngineDeadError("the engine is closed")

    def _check_open(self) -> None:
        self._check_alive()
        if self._state is EngineState.DRAINING:
            raise DrainingError("the engine is shutting down")
        if self.state is EngineState.STUCK:
            seconds = min(loop.seconds_without_progress for loop in self._loops)
            raise EngineStuckError(
                f"the device has been at one step for {seconds:.0f} s; nothing new is taken meanwhile"
            )

    def _check_params(self, params: SamplingParams) -> None:
        """What depends on the model."""
        vocab = self.model_config.vocab_size
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            _check_vocabulary(name, getattr(params, name) or (), vocab)
        if params.allowed_token_ids is not None and params.min_tokens:
            ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else self._eos)}
            if ends.issuperset(params.allowed_token_ids):
                allowed = "a token that does not end the output too, since min_tokens is set"
                raise InvalidArgumentError("allowed_token_ids", list(params.allowed_token_ids), allowed)

    def _check_size(self, request: Request) -> None:
        """Refuses a prompt that is too long whatever its tokens are."""
        if request.token_ids is not None:
            self.scheduler_config.check_prompt(len(request.token_ids))
        elif isinstance(request.text, str):
            self.tokenizer.check_size("text", request.text, self.scheduler_config.max_prompt_tokens)
        elif request.messages is not None:
            # Templates may leave some of it out, so that a conversation may be somewhat larger than what comes of it.
            limits = self.prompt_limits
            size, most = _text_size(request), limits.max_bytes and max(limits.max_bytes, MIN_CHAT_LIMIT)
            if most is not None and size > most:
                allowed = f"at most {most} characters, of which {limits.max_tokens} tokens may come"
                raise InvalidArgumentError("messages", f"{size} characters", allowed)

    def _make_live(self, request: Request, prompt: Sequence[int], sink: Sink) -> LiveRequest:
        seed = request.params.seed
        samples = make_samples(
            request.request_id,
            np.asarray(prompt, np.int32),
            request.params,
            seed=secrets.randbits(64) if seed is None else seed,
            priority=request.priority,
            cache_namespace=(self.scheduler_config.kv_dtype or "").encode(),
            banned_words=bad_word_rows(self.tokenizer, request.params.bad_words)
            if request.params.bad_words
            else NO_WORDS,
        )
        return LiveRequest(samples, self.tokenizer, sink, self._observer, request.timeout_s)

    def _prompt_ids(self, request: Request) -> Sequence[int]:
        if request.token_ids is not None:
            _check_vocabulary("token_ids", request.token_ids, self.model_config.vocab_size)
            return request.token_ids
        most = self.scheduler_config.max_prompt_tokens
        if request.messages is not None:
            return self.tokenize_chat(request.messages, max_tokens=most)
        assert request.text is not None
        if not request.text:
            raise InvalidArgumentError("text", "", "at least one character")
        if not request.parse_special and (found := self._control_string(request.text)):
            logger.warning(
                "request %s: the prompt holds the control token's string %r as plain text; set parse_special if it "
                "is meant as the token",
                request.request_id,
                found,
                extra={"request_id": request.request_id},
            )
        return self.tokenize(request.text, parse_special=request.parse_special, max_tokens=most)

    def _control_string(self, text: str) -> str | None:
        ids = [part for part in self.tokenizer.split_control(text) if isinstance(part, int)]
        return self.tokenizer.decode(ids[:1], skip_special_tokens=False) if ids else None

    async def stream(self, request: Request) -> AsyncGenerator[Event]:
        """Events of a request, ending in one Finished or Failed. Closing the iterator early aborts the request.

        Raises: before the first event, as `submit`.
        """
        events: asyncio.Queue[list[Event]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def sink(batch: list[Event]) -> None:
            try:
                loop.call_soon_threadsafe(events.put_nowait, batch)
            except RuntimeError:  # the client's event loop is closed: nobody listens
                if not isinstance(batch[-1], (Finished, Failed)):
                    self.abort(request.request_id)

        await self.submit_async(request, sink)
        over = False
        try:
            while not over:
                for event in await events.get():
                    over = isinstance(event, (Finished, Failed))
                    yield event
        finally:
            if not over:
                self.abort(request.request_id)

    def abort(self, request_id: str) -> bool:
        """Ends a request with finish reason ABORT; False if none of that id lives."""
        with self._lock:
            if request_id not in self._live:
                return False
            live = self._live[request_id]
            if live is None or self._held is not None:
                self._aborted_early.add(request_id)
            else:
                self._loops[live.replica].abort(request_id)
            return True

    def call(self, function: Callable[[], None], replica: int = 0) -> None:
        """Runs a function on a replica's loop thread between two steps; it must not raise."""
        self._loops[replica].call(function)

    # Another mesh.

    @property
    def mesh(self) -> str:
        """The mesh it runs on, as `axis=size,...`."""
        if self._group is not None:
            return self._group.mesh
        return "tensor=1" if self._started is None else str(self._started.layout.mesh)

    @property
    def dtype(self) -> str:
        """Of activations, and of what is not quantized; empty where other processes have them."""
        return "" if self._started is None else np.dtype(self._started.dtype).name

    def reshard(self, mesh: str, *, progress: Progress | None = None) -> None:
        """Moves the weights to another mesh, from device to device, and goes on there.

        Requests under way keep their tokens, compute their prompts again, and continue; new ones wait meanwhile.
        Serving stops only for the move: programs are compiled before it.

        Raises:
          InvalidArgumentError: the mesh cannot work; nothing has changed.
          UnsupportedError: the engine runs on several processes.
          EngineDeadError: it failed midway; the engine has ended.
        """
        started = self._started
        if self._group is not None:
            raise UnsupportedError(
                "reshard: an engine on several processes keeps its mesh; start it with another --mesh"
            )
        if started is None:
            raise UnsupportedError("reshard: only an engine that Engine.start made has weights to move")
        with self._resharding:
            self._check_open()
            config = replace(started.config, mesh=mesh)
            ours = [array for runner in self.runners for array in runner.arrays]
            room = bytes_on_one_device(ours)
            schemes = started.choice.schemes
            layout = lay_out(config, started.model, started.dtype, schemes, started.executables, room)
            report: Progress = progress or (lambda stage, done, total: None)
            begun = time.perf_counter()
            with start_threads() as threads:
                made = compile_programs(layout, started.model, started.dtype, started.executables, threads, report)
                programs = made()
            with self._lock:
                self._check_open()
                self._held = []
            stopped = time.perf_counter()
            try:
                moving = [live for loop in self._loops for live in loop.leave()]
                self._past.append(EngineStats.total([loop.stats for loop in self._loops]).past())
                weights = weights_by_path(self.runners, started.layout.structures)
                self.runners = ()  # with which the old pages go
                leaves = move_weights(weights, started.layout.specs, layout)
                self.runners = tuple(Runner(*both, config.micro_batches) for both in zip(programs, leaves, strict=True))
                for runner in self.runners:
                    runner.warm_up()
                self.scheduler_config = layout.scheduler
                self._started = replace(started, config=config, layout=layout, runners=self.runners)
            except BaseException as error:
                dead = EngineDeadError(f"lost on the way to mesh {mesh}: {type(error).__name__}: {error}")
                self._on_death(dead)
                with self._lock:
                    held, self._held = self._held, None
                for loop in self._loops:
                    loop.end_left(dead, held)
                    held = []
                raise dead from error
            with self._lock:
                closed = self._state is EngineState.DEAD
                held, self._held = self._held, None
                if not closed:
                    self._make_loops()
                    # Each that had begun goes ahead of all that are there, so the newest first.
                    begun_first = sorted(moving, key=lambda live: live.samples[0].order, reverse=True)
                    for live in (live for live in begun_first if live.started):
                        self._place(live)
                    for live in (live for live in [*reversed(begun_first), *held] if not live.started):
                        self._place(live)
                    for loop in self._loops:
                        loop.start()
            if closed:
                for loop in self._loops:
                    loop.end_left(self._death or EngineDeadError("the engine is closed"), held)
                    held = []
                return
            logger.info(
                "%s: %s; programs in %.1f s, moved in %.1f s, with %d requests under way",
                *(self.model_name, described(layout, started.model), stopped - begun, time.perf_counter() - stopped),
                len(moving),
            )

    # The end.

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits for the live ones; those left at the end fail with DrainingError.

        Returns False if some were left.
        """
        with self._lock:
            if self._state is EngineState.READY:
                self._state = EngineState.DRAINING
        end = time.monotonic() + timeout_s
        while self._live and time.monotonic() < end:
            await asyncio.sleep(0.02)
        if not self._live:
            return True
        for loop in self._loops:
            loop.fail_all(DrainingError(f"the engine shut down before the request ended ({timeout_s:g} s)"))
        end = time.monotonic() + (STUCK_JOIN_S if any(map(self._is_stuck, self._loops)) else FAIL_S)
        while self._live and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return False

    def close(self) -> None:
        """Stops the loop; live requests fail with EngineDeadError. A step that does not end is not waited for long."""
        stuck = [self._is_stuck(loop) for loop in self._loops]
        with self._lock:
            if self._state is not EngineState.DEAD:
                self._state = EngineState.DEAD
        for loop in self._loops:
            loop.fail_all(EngineDeadError("the engine is closed"))
        for loop, is_stuck in zip(self._loops, stuck, strict=True):
            loop.stop(timeout=STUCK_JOIN_S if is_stuck else CLOSE_JOIN_S)
        self.text_threads.close()
        if self._group is not None:
            self._group.stop()

    @property
    def death(self) -> EngineDeadError | None:
        """Why it ended by itself, if it did."""
        return self._death

    def lose(self, error: EngineDeadError) -> None:
        """Ends it at once with the error: what it runs on is lost."""
        self._on_death(error)
        for loop in self._loops:
            loop.die(error)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # From the loop thread.

    def _on_start(self, live: LiveRequest) -> None:
        self._admission.go(live.num_prompt_tokens, started=True)

    def _on_end(self, live: LiveRequest) -> None:
        if not live.started:
            self._admission.go(live.num_prompt_tokens, started=False)
        self._router.ended(live.replica, len(live.samples))
        with self._lock:
            if self._live.get(live.request_id) is live:
                del self._live[live.request_id]

    def _on_death(self, error: EngineDeadError) -> None:
        with self._lock:
            self._state, self._death = EngineState.DEAD, self._death or error
        # A replica is lost: the engine ends as a whole, for its supervisor to start it again.
        for loop in self._loops:
            loop.fail_all(error)


def _text_size(request: Request) -> int:
    """Characters of a prompt that nobody has checked yet, or token ids: roughly how long it takes to tokenize."""
    given = request.text or request.messages
    if isinstance(given, str):
        return len(given)
    if isinstance(given, (list, tuple)):
        return sum(map(_content_size, given)) + MESSAGE_SIZE * len(given)
    return 0 if request.token_ids is None else len(request.token_ids)


def _content_size(message: Any) -> int:
    """Characters of what a message says."""
    content = message.get("content") if isinstance(message, Mapping) else None
    if isinstance(content, (list, tuple)):
        return sum(
            len(part["text"]) for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        )
    return len(content) if isinstance(content, str) else 0


def _check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
            raise InvalidArgumentError(name, token_id, "integers")
        if not 0 <= token_id < vocab_size:
            raise InvalidArgumentError(name, token_id, f"0 to {vocab_size - 1} (the vocabulary has {vocab_size})")
