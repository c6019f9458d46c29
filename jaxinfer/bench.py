"""`jaxinfer bench throughput`: what the engine does with many prompts at once, and how near the bare step it comes."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.runner import StepBuffers
from jaxinfer.errors import JaxinferError
from jaxinfer.types import Delta, EngineStats, Event, Failed, Request, SamplingParams


@dataclass
class _Times:
    """When a request was submitted and when its tokens came, in seconds."""

    submitted: float
    tokens: list[float] = field(default_factory=list)


def throughput(
    engine: Engine,
    *,
    num_prompts: int,
    input_len: int,
    output_len: int,
    rounds: int = 3,
    seed: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Runs random prompts, greedy and to full length, then replays the very same steps through the bare program.

    Engine and replay alternate, `rounds` times each after one warm-up; figures are medians over the rounds.

    Args:
      on_progress: called with (rounds done, rounds in all).

    Returns:
      Figures by name: `output_tokens_per_s`, `replay_tokens_per_s`, `engine_efficiency` (the first over the second),
      `ttft_ms` and `itl_ms` (p50 and p99 over all requests and rounds), `host_ms_per_step`, `compiles_after_warmup`;
      of a pipeline also `bubble`, the share of its stages' time in the replay that none of their programs fills.
    """
    rng = np.random.default_rng(seed)
    vocab, output_tokens = engine.model_config.vocab_size, num_prompts * output_len
    engine_s, replay_s, ttft, itl, steps, host, bubbles = [], [], [], [], [], [], []
    for round_number in range(rounds + 1):
        # New prompts each round: a prefix hit would spare the prefill.
        prompts = rng.integers(0, vocab, (num_prompts, input_len)).tolist()
        before = _stats(engine)
        recorded: list[list[StepBuffers]] = [[] for _ in engine.runners]
        _record(engine, recorded)
        try:
            times, seconds = _run(engine, prompts, output_len, f"bench-{round_number}")
        finally:
            _record(engine, [None] * len(recorded))
        after = _stats(engine)
        begun = time.perf_counter()
        _on_loops(engine, [partial(r.replay, each) for r, each in zip(engine.runners, recorded, strict=True)])
        replayed = time.perf_counter() - begun
        if on_progress is not None:
            on_progress(round_number, rounds)
        if round_number == 0:
            continue
        engine_s.append(seconds)
        replay_s.append(replayed)
        if (stages := engine.runners[0].num_stages) > 1:
            busy = _on_loops(
                engine, [partial(r.stage_seconds, each) for r, each in zip(engine.runners, recorded, strict=True)]
            )
            bubbles.append(1 - sum(map(sum, busy)) / (stages * len(busy) * replayed))
        ttft += [1e3 * (t.tokens[0] - t.submitted) for t in times]
        itl += [1e3 * (b - a) for t in times for a, b in zip(t.tokens, t.tokens[1:], strict=False)]
        steps.append(after.steps_total - before.steps_total)
        host.append(
            (after.host_ms_per_step * after.steps_total - before.host_ms_per_step * before.steps_total) / steps[-1]
        )
    rate, bare = output_tokens / statistics.median(engine_s), output_tokens / statistics.median(replay_s)
    return {
        "model": engine.model_name,
        "mesh": engine.mesh,
        "num_prompts": num_prompts,
        "input_len": input_len,
        "output_len": output_len,
        "max_num_seqs": engine.scheduler_config.max_num_seqs,
        "kv_dtype": engine.scheduler_config.kv_dtype,
        "kv_token_bytes": engine.scheduler_config.kv_token_bytes,
        "rounds": rounds,
        "output_tokens_per_s": round(rate, 1),
        "total_tokens_per_s": round(rate * (input_len + output_len) / output_len, 1),
        "replay_tokens_per_s": round(bare, 1),
        "engine_efficiency": round(statistics.median(r / e for r, e in zip(replay_s, engine_s, strict=True)), 4),
        "ttft_ms": _percentiles(ttft),
        "itl_ms": _percentiles(itl),
        "steps": int(statistics.median(steps)),
        "host_ms_per_step": round(statistics.median(host), 3),
        **({"bubble": round(statistics.median(bubbles), 4)} if bubbles else {}),
        "compiles_after_warmup": engine.stats().compiles_after_warmup,
        "device": jax.devices()[0].device_kind,
        "dtype": engine.dtype,
        "jax": jax.__version__,
    }


def _run(engine: Engine, prompts: Sequence[list[int]], output_len: int, name: str) -> tuple[list[_Times], float]:
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True, skip_special_tokens=False)
    times: list[_Times] = []
    left, errors, over = len(prompts), [], threading.Event()

    def sink_of(mine: _Times) -> Callable[[list[Event]], None]:
        def sink(events: list[Event]) -> None:
            nonlocal left
            now = time.perf_counter()
            for event in events:
                if isinstance(event, Delta):
                    mine.tokens += [now] * len(event.token_ids)
                else:
                    if isinstance(event, Failed):
                        errors.append(event.error)
                    left -= 1
                    if left == 0:
                        over.set()

        return sink

    begun = time.perf_counter()
    try:
        for number, prompt in enumerate(prompts):
            times.append(_Times(time.perf_counter()))
            request = Request(request_id=f"{name}-{number}", params=params, token_ids=prompt)
            engine.submit(request, sink_of(times[-1]))
        over.wait()
    except BaseException:
        for number in range(len(times)):
            engine.abort(f"{name}-{number}")
        raise
    seconds = time.perf_counter() - begun
    if errors:
        raise errors[0]
    short = [t for t in times if len(t.tokens) != output_len]
    if short:
        raise JaxinferError(f"{len(short)} requests gave other than {output_len} tokens: the figures would be wrong")
    return times, seconds


def _stats(engine: Engine) -> EngineStats:
    """With all of the last steps counted."""
    _on_loops(engine, [lambda: None for _ in engine.runners])
    return engine.stats()


def _record(engine: Engine, recorded: Sequence[list[StepBuffers] | None]) -> None:
    for runner, steps in zip(engine.runners, recorded, strict=True):
        runner.recorded = steps


def _on_loops[T](engine: Engine, functions: Sequence[Callable[[], T]]) -> list[T]:
    """Runs a function for each replica on its engine's own thread, at once and between steps: there all of the last
    step has been counted, and a replay meets the conditions that the engine meets."""
    results: list[Future[T]] = [Future() for _ in functions]

    def call(function: Callable[[], T], result: Future[T]) -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    for replica, (function, result) in enumerate(zip(functions, results, strict=True)):
        engine.call(partial(call, function, result), replica)
    return [result.result() for result in results]


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, [50, 99]) if values else (0.0, 0.0)
    return {"p50": round(float(p50), 2), "p99": round(float(p99), 2)}
