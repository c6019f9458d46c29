"""The benchmark: its figures agree with each other, it leaves the engine as it was, and a failure ends it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints

from jaxinfer.bench import throughput
from jaxinfer.config import EngineConfig
from jaxinfer.engine.admission import Admission
from jaxinfer.engine.engine import Engine, EngineState
from jaxinfer.errors import InvalidArgumentError, JaxinferError, QueueFullError, StepFailedError
from jaxinfer.types import Delta, Event, Finished, Request, SamplingParams

CONTEXT, BUDGET = 64, 8


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    tiny_checkpoints.write_hf_folder(
        folder, tiny_checkpoints.Tiny(9, layers=1, config={"max_position_embeddings": CONTEXT})
    )
    config = EngineConfig(
        model=str(folder), dtype="float32", kv_cache_dtype="int8", max_num_seqs=4, max_num_batched_tokens=BUDGET
    )
    with Engine.start(config, cache_dir=cache_dir) as engine:
        yield engine


def ask(engine: Engine, prompt: list[int]) -> list[int]:
    """Greedy tokens."""
    batches: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    engine.submit(Request(request_id="ask", params=params, token_ids=prompt), batches.put)
    tokens: list[int] = []
    while True:
        for event in batches.get(timeout=60):
            if isinstance(event, Finished):
                return tokens
            assert isinstance(event, Delta), event
            tokens += event.token_ids


def test_figures_are_consistent(engine: Engine):
    calls: list[tuple[int, int]] = []
    figures = throughput(
        engine,
        num_prompts=6,
        input_len=9,
        output_len=5,
        rounds=2,
        on_progress=lambda done, total: calls.append((done, total)),
    )
    assert calls == [(0, 2), (1, 2), (2, 2)]
    shape = {"num_prompts": 6, "input_len": 9, "output_len": 5, "rounds": 2, "max_num_seqs": 4, "dtype": "float32"}
    shape |= {"kv_dtype": "int8"}
    assert figures.items() >= shape.items()
    assert figures["compiles_after_warmup"] == 0
    # Of each sequence all tokens but the last are computed.
    assert figures["steps"] >= 6 * (9 + 5 - 1) / BUDGET
    # Both are rounded to a tenth.
    output, total = figures["output_tokens_per_s"], figures["total_tokens_per_s"]
    assert total == pytest.approx(output * (9 + 5) / 5, abs=0.05 * (1 + (9 + 5) / 5) + 1e-9)
    assert min(output, figures["replay_tokens_per_s"], figures["engine_efficiency"], figures["host_ms_per_step"]) > 0
    for name in ("ttft_ms", "itl_ms"):
        assert figures[name]["p99"] >= figures[name]["p50"] >= 0
    assert figures["ttft_ms"]["p50"] > 0


def test_one_token_each_leaves_no_gaps_to_measure(engine: Engine):
    figures = throughput(engine, num_prompts=6, input_len=9, output_len=1, rounds=1)
    assert figures["itl_ms"] == {"p50": 0.0, "p99": 0.0}


def test_prompts_are_new_each_round_and_follow_from_the_seed(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    submitted: list[Request] = []
    submit = engine.submit

    def recording(request: Request, sink: Any) -> None:
        submitted.append(request)
        submit(request, sink)

    monkeypatch.setattr(engine, "submit", recording)

    def prompts(seed: int) -> list[Any]:
        submitted.clear()
        throughput(engine, num_prompts=3, input_len=5, output_len=3, rounds=1, seed=seed)
        return [request.token_ids for request in submitted]

    first = prompts(0)
    assert [len(prompt) for prompt in first] == [5] * 6
    assert len(set(map(tuple, first))) == 6
    assert all(0 <= token < 384 for prompt in first for token in prompt)
    assert prompts(0) == first
    assert prompts(1) != first


def test_the_engine_is_as_it_was(engine: Engine):
    prompt = [i % 300 + 3 for i in range(40)]  # over a page, so that its prefix is kept
    before = ask(engine, prompt)
    throughput(engine, num_prompts=6, input_len=9, output_len=5, rounds=1)
    assert engine.runners[0].recorded is None
    assert engine.state is EngineState.READY
    assert ask(engine, prompt) == before


@pytest.mark.timeout(120)
@pytest.mark.parametrize("where", ["dispatch", "read"])
def test_a_request_that_fails_ends_it_with_its_error(engine: Engine, monkeypatch: pytest.MonkeyPatch, where: str):
    before, calls = ask(engine, [5, 6, 7]), 0
    real = getattr(engine.runners[0], where)

    def failing(step: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise RuntimeError("out of luck")
        return real(step)

    monkeypatch.setattr(engine.runners[0], where, failing)
    with pytest.raises(StepFailedError, match="out of luck"):
        throughput(engine, num_prompts=6, input_len=9, output_len=5, rounds=1)
    assert engine.runners[0].recorded is None
    assert ask(engine, [5, 6, 7]) == before
    assert throughput(engine, num_prompts=2, input_len=3, output_len=2, rounds=1)["steps"] > 0


@pytest.mark.timeout(120)
def test_a_refused_request_ends_those_before_it(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine, "_admission", Admission(3, 10**6))
    with pytest.raises(QueueFullError):
        throughput(engine, num_prompts=40, input_len=9, output_len=50, rounds=1)
    monkeypatch.undo()
    assert len(ask(engine, [5, 6, 7])) == 6
    assert not engine._live


def test_figures_of_one_step(engine: Engine):
    assert throughput(engine, num_prompts=1, input_len=2, output_len=1, rounds=20)["steps"] == 1


@pytest.mark.timeout(120)
def test_lengths_that_do_not_fit_the_context_are_an_error(engine: Engine):
    with pytest.raises(InvalidArgumentError, match="64 tokens"):
        throughput(engine, num_prompts=2, input_len=CONTEXT, output_len=1, rounds=1)
    with pytest.raises(JaxinferError, match="2 requests gave other than 8 tokens"):
        throughput(engine, num_prompts=2, input_len=CONTEXT - 4, output_len=8, rounds=1)
