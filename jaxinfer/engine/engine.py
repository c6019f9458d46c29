"""The engine: a model on its devices, serving requests from any thread."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from enum import StrEnum
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxinfer.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoints.source import resolve
from jaxinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.admission import Admission
from jaxinfer.engine.executables import ExecutableCache
from jaxinfer.engine.live_request import LiveRequest, Sink
from jaxinfer.engine.loop import EngineLoop
from jaxinfer.engine.observer import GuardedObserver, Observer
from jaxinfer.engine.programs import load_or_compile
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import NO_WORDS, make_samples
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
from jaxinfer.kv_cache.pool import page_bytes
from jaxinfer.models.decoder import DecoderStructure, decoder_structure
from jaxinfer.sampling.logit_rules import rules_bytes
from jaxinfer.text.bad_words import bad_word_rows
from jaxinfer.text.chat import encode_chat
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import EngineStats, Event, Failed, Finished, Request, SamplingParams
from pallas_kernels.dispatch import device_of
from sharding.mesh import MeshConfig, MeshError

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
CPU_KV_CACHE_BYTES = 1 << 30
START_THREADS = 2  # a compilation is part serial, part parallel: two at once keep a few cores busy
CLOSE_JOIN_S, STUCK_JOIN_S = 60.0, 1.0  # how long `close` waits for the step that runs
FAIL_S = 10.0  # how long a drain waits for the requests it has failed
DEVICE_MEMORY_FRACTION = 0.9  # of an accelerator's memory, weights and pages together; the rest is temporaries

# (stage, done, total): stages are "download", "load" (bytes) and "warm-up" (programs).
type Progress = Callable[[str, int, int], None]


class EngineState(StrEnum):
    """Where an engine stands; only `READY` takes requests."""

    STARTING = "starting"
    READY = "ready"
    STUCK = "stuck"  # at one step for too long; ready again when the step ends
    DRAINING = "draining"
    DEAD = "dead"


class Engine:
    """Serves one model. `Engine.start` makes one; `stream` and `submit` may be called from any thread.

    Attributes:
      model_name: as the user gave it.
      startup_seconds: what each part of the start took.
    """

    def __init__(
        self,
        name: str,
        model: ModelConfig,
        scheduler: SchedulerConfig,
        tokenizer: Tokenizer,
        runner: Runner,
        *,
        stuck_after_s: float = EngineConfig().stuck_after_s,
    ):
        self._stuck_after_s = stuck_after_s
        self.model_name, self.model_config, self.scheduler_config = name, model, scheduler
        self.tokenizer, self.runner = tokenizer, runner
        self.startup_seconds: dict[str, float] = {}
        self._lock = threading.Lock()
        self._live: dict[str, LiveRequest | None] = {}  # None while its prompt is being tokenized
        self._aborted_early: set[str] = set()  # aborted in that time
        self._admission = Admission(scheduler.max_waiting, scheduler.max_waiting_tokens)
        self._observer = GuardedObserver()
        self._state = EngineState.STARTING
        self._death: EngineDeadError | None = None
        self._eos = tuple(dict.fromkeys((*model.eos_token_ids, *tokenizer.eos_token_ids)))
        self._loop = EngineLoop(
            Scheduler(scheduler, self._eos),
            runner,
            observer=self._observer,
            on_start=self._on_start,
            on_end=self._on_end,
            on_death=self._on_death,
        )

    @classmethod
    def start(
        cls, config: EngineConfig, *, cache_dir: Path, offline: bool = False, progress: Progress | None = None
    ) -> Engine:
        """Finds, loads and warms up a model; returns when it is ready.

        Raises:
          ModelNotFoundError, CheckpointError, UnsupportedError, InvalidArgumentError: what is wrong and where.
        """
        report: Progress = progress or (lambda stage, done, total: None)
        clock = _Clock()
        mesh = _mesh(config)
        if config.quantize is not None:
            raise UnsupportedError(f"quantize={config.quantize!r}: this version serves weights in float only")
        if config.dtype not in DTYPES:
            raise InvalidArgumentError("dtype", config.dtype, f"one of {', '.join(DTYPES)}")
        source = resolve(
            config.model,
            cache_dir=cache_dir,
            offline=offline,
            progress=lambda done, all_: report("download", done, all_),
        )
        clock.lap("find")
        checkpoint = open_checkpoint(source)
        model = checkpoint.config
        dtype = checkpoint.dtype if config.dtype == "auto" else np.dtype(_jax_dtype(config.dtype))
        sharding = NamedSharding(mesh, PartitionSpec())
        structure = decoder_structure(model, dtype, scan=_scans_layers(config, model, mesh))
        scheduler = _scheduler_config(config, model, structure, dtype, mesh)
        threads = ThreadPoolExecutor(START_THREADS, "start")
        try:
            tokenizer = threads.submit(_tokenizer, checkpoint)
            # Programs are made from declarations, so they need not wait for the weights.
            programs = load_or_compile(
                structure,
                model,
                scheduler,
                dtype=dtype,
                mesh=mesh,
                executables=ExecutableCache(cache_dir / "programs" if config.compile_cache else None),
                threads=threads,
                progress=lambda done, total: report("warm-up", done, total),
            )
            weights = checkpoint.load(
                place=lambda path, array: jax.device_put(array, sharding),
                dtype=dtype,
                progress=lambda done, all_: report("load", done, all_),
            )
            clock.lap("load")
            runner = Runner(programs(), structure.flatten(weights))
            runner.warm_up()
            clock.lap("warm-up")
            engine = cls(config.model, model, scheduler, tokenizer.result(), runner, stuck_after_s=config.stuck_after_s)
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
        engine.startup_seconds = clock.laps
        logger.info(
            "%s: %s, %d layers, %s; %d sequences at once, context %d, %d pages of %d tokens; started in %s",
            config.model,
            model.family,
            len(model.layers),
            dtype,
            scheduler.max_num_seqs,
            scheduler.max_model_len,
            scheduler.num_pages,
            scheduler.page_size,
            ", ".join(f"{name} {seconds:.1f} s" for name, seconds in clock.laps.items()),
        )
        engine._begin()
        return engine

    def _begin(self) -> None:
        self._state = EngineState.READY
        self._loop.start()

    @property
    def state(self) -> EngineState:
        if self._state is EngineState.READY and self._loop.seconds_without_progress > self._stuck_after_s:
            return EngineState.STUCK
        return self._state

    def stats(self) -> EngineStats:
        """A snapshot as of the last step."""
        return self._loop.stats

    def observe(self, observer: Observer) -> None:
        """From now on the observer hears what the engine does; one at a time."""
        self._observer.inner = observer

    # Text.

    def tokenize(self, text: str, *, parse_special: bool = False, add_bos: bool = True) -> list[int]:
        """Token ids of a text; control-token strings in it stay text unless `parse_special`."""
        return self.tokenizer.encode(text, parse_special=parse_special, add_bos=add_bos)

    def tokenize_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation by the model's chat template, ready for the reply."""
        return encode_chat(self.tokenizer, messages)

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
        try:
            return self._submit(request, sink)
        except JaxinferError as error:
            self._observer.on_refuse(error.code)
            raise

    def _submit(self, request: Request, sink: Sink) -> Sequence[int]:
        self._enter(request)
        num_tokens = 0
        try:
            self._check_params(request.params)
            prompt = self._prompt_ids(request)
            self.scheduler_config.check_prompt(len(prompt))
            self._admission.bring(len(prompt))
            num_tokens = len(prompt)
            live = self._make_live(request, prompt, sink)
            # Under the lock, so that an abort comes either before this (and is found here) or after it in the inbox,
            # and the end of the engine either before this (and is found here) or after it.
            with self._lock:
                if self._state is EngineState.DEAD:
                    raise self._death or EngineDeadError("the engine is closed")
                self._live[request.request_id] = live
                self._loop.submit(live)
                if request.request_id in self._aborted_early:
                    self._aborted_early.discard(request.request_id)
                    self._loop.abort(request.request_id)
            return prompt
        except BaseException:
            with self._lock:
                del self._live[request.request_id]
                self._aborted_early.discard(request.request_id)
            self._admission.go(num_tokens, started=False)
            raise

    def _enter(self, request: Request) -> None:
        with self._lock:
            self._check_open()
            if request.request_id in self._live:
                raise RequestExistsError(f"request {request.request_id!r} is live already")
            if request.timeout_s is not None and request.timeout_s <= 0:
                raise DeadlineExceededError("the request's time is over already")
            self._admission.come()
            self._live[request.request_id] = None

    def _check_open(self) -> None:
        if self._state is EngineState.DEAD:
            raise self._death or EngineDeadError("the engine is closed")
        if self._state is EngineState.DRAINING:
            raise DrainingError("the engine is shutting down")
        if self.state is EngineState.STUCK:
            seconds = self._loop.seconds_without_progress
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

    def _make_live(self, request: Request, prompt: Sequence[int], sink: Sink) -> LiveRequest:
        seed = request.params.seed
        samples = make_samples(
            request.request_id,
            np.asarray(prompt, np.int32),
            request.params,
            seed=secrets.randbits(64) if seed is None else seed,
            priority=request.priority,
            banned_words=bad_word_rows(self.tokenizer, request.params.bad_words)
            if request.params.bad_words
            else NO_WORDS,
        )
        return LiveRequest(samples, self.tokenizer, sink, self._observer, request.timeout_s)

    def _prompt_ids(self, request: Request) -> Sequence[int]:
        if request.token_ids is not None:
            _check_vocabulary("token_ids", request.token_ids, self.model_config.vocab_size)
            return request.token_ids
        if request.messages is not None:
            return self.tokenize_chat(request.messages)
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
        return self.tokenize(request.text, parse_special=request.parse_special)

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

        # Tokenizing a long prompt takes long enough to stall every other stream of the event loop.
        submitting = asyncio.ensure_future(asyncio.to_thread(self.submit, request, sink))
        over = False
        try:
            # The thread cannot be stopped: whoever goes meanwhile leaves a request that has to be aborted.
            await asyncio.shield(submitting)
        except asyncio.CancelledError:
            submitting.add_done_callback(lambda done: done.exception() or self.abort(request.request_id))
            raise
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
            if self._live[request_id] is None:
                self._aborted_early.add(request_id)
            else:
                self._loop.abort(request_id)
            return True

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function on the loop thread between two steps; it must not raise. For benchmarks and tests."""
        self._loop.call(function)

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
        self._loop.fail_all(DrainingError(f"the engine shut down before the request ended ({timeout_s:g} s)"))
        end = time.monotonic() + (STUCK_JOIN_S if self._loop.seconds_without_progress > self._stuck_after_s else FAIL_S)
        while self._live and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return False

    def close(self) -> None:
        """Stops the loop; live requests fail with EngineDeadError. A step that does not end is not waited for long."""
        stuck = self._loop.seconds_without_progress > self._stuck_after_s
        with self._lock:
            if self._state is not EngineState.DEAD:
                self._state = EngineState.DEAD
        self._loop.fail_all(EngineDeadError("the engine is closed"))
        self._loop.stop(timeout=STUCK_JOIN_S if stuck else CLOSE_JOIN_S)

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
        with self._lock:
            if self._live.get(live.request_id) is live:
                del self._live[live.request_id]

    def _on_death(self, error: EngineDeadError) -> None:
        with self._lock:
            self._state, self._death = EngineState.DEAD, error


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 2)
        self._last = now


def _check_vocabulary(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, (int, np.integer)):
            raise InvalidArgumentError(name, token_id, "integers")
        if not 0 <= token_id < vocab_size:
            raise InvalidArgumentError(name, token_id, f"0 to {vocab_size - 1} (the vocabulary has {vocab_size})")


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.tokenizer_metadata is not None:
        return Tokenizer.from_gguf(checkpoint.tokenizer_metadata)
    assert checkpoint.folder is not None
    return Tokenizer.from_folder(checkpoint.folder)


def _mesh(config: EngineConfig) -> jax.sharding.Mesh:
    try:
        mesh = MeshConfig.parse(config.mesh)
        if mesh.num_devices > 1:
            raise UnsupportedError(f"mesh {config.mesh!r}: this version serves on one device; use tensor=1")
        return mesh.build()
    except MeshError as error:
        raise InvalidArgumentError("mesh", config.mesh, str(error)) from error


def _jax_dtype(name: str) -> Any:
    return getattr(jax.numpy, name)


def _scans_layers(config: EngineConfig, model: ModelConfig, mesh: jax.sharding.Mesh) -> bool:
    alike = len(set(model.layers)) == 1
    if config.scan_layers is None:
        return alike and mesh.devices.flat[0].platform == "cpu"
    if config.scan_layers and not alike:
        raise UnsupportedError("scan_layers: this model's layers differ from each other")
    return config.scan_layers


def _scheduler_config(
    config: EngineConfig, model: ModelConfig, structure: DecoderStructure, dtype: Any, mesh: jax.sharding.Mesh
) -> SchedulerConfig:
    max_model_len = model.max_position if config.max_model_len is None else config.max_model_len
    if max_model_len > model.max_position:
        raise InvalidArgumentError("max_model_len", max_model_len, f"at most the model's context, {model.max_position}")
    per_page = page_bytes(model, config.page_size, dtype, device_of(mesh.devices.flat[0]))
    budget = config.kv_cache_bytes
    if budget is None:
        rules = rules_bytes(config.max_num_seqs + 1, model.vocab_size)
        budget = _pool_memory(mesh.devices.flat[0], structure.num_bytes + rules)
    num_pages = budget // per_page
    if num_pages < 1:
        raise InvalidArgumentError("kv_cache_bytes", budget, f"at least one page, {per_page} bytes")
    # More pages than all sequences can use would never be touched.
    most = config.max_num_seqs * -(-max_model_len // config.page_size)
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=min(num_pages, most),
        prefix_caching=config.prefix_caching,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
    )


def _pool_memory(device: jax.Device, other_bytes: int) -> int:
    """Bytes the pool may take on a device that is to hold the weights and the rest of the state too."""
    stats = device.memory_stats()
    if device.platform == "cpu" or not stats:
        return CPU_KV_CACHE_BYTES
    return int(stats["bytes_limit"] * DEVICE_MEMORY_FRACTION) - stats["bytes_in_use"] - other_bytes
