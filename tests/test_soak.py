"""The soak's short form, the soak's own checks of replies, and the overload's figures."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))

import overload
import soak
from overload import Outcome, percentile
from soak_cases import Case, Cases, Reply, check

from jaxinfer.types import Delta, Finished, FinishReason, SampleEnd, SamplingParams, Timings, Usage

REQUESTS, SECONDS = 300, 40.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[soak.WatchedEngine]:
    config = soak.engine_config(soak.tiny_model(tmp_path_factory.mktemp("soak") / "tiny"))
    with soak.WatchedEngine.start(config, cache_dir=cache_dir) as engine:
        yield engine


@pytest.fixture(scope="module")
def figures(engine: soak.WatchedEngine) -> dict[str, Any]:
    return asyncio.run(soak.soak(engine, requests=REQUESTS, seed=0, concurrency=32, seconds=SECONDS))


@pytest.mark.slow
def test_each_request_of_a_mixed_load_ends_once_and_leaves_nothing(figures: dict[str, Any]):
    assert figures["faults"] == []
    assert figures["fault_kinds"] == {}
    ends = (*figures["finished"].values(), *figures["errors"].values(), figures["cancelled"])
    assert figures["requests"] == figures["ended"] == sum(ends)
    assert figures["leaked_pages"] == figures["audit_breaches"] == figures["compiles"] == 0
    assert figures["rss_growth_mb"] <= soak.MAX_RSS_GROWTH_MB


@pytest.mark.slow
def test_the_load_is_mixed(figures: dict[str, Any]):
    """What does not happen is not tested: a queue that is never full, a pool that always suffices."""
    assert figures["requests"] >= 100
    assert figures["finished"].keys() == {"stop", "length", "abort"}
    assert figures["errors"].keys() >= {"invalid_argument", "deadline_exceeded"}
    assert figures["aborted"].keys() >= {"before the engine", "queued", "decode", "after the end"}
    assert min(figures[name] for name in ("refusals", "preemptions", "cached_tokens", "repeats_compared")) > 0


# What the soak would see.

PROMPT = Case("a", [64, 65], SamplingParams(max_tokens=3, stop=["c"]))


def reply(ids: list[int], text: str, reason: str = "length", stop: str | int | None = None, counted: int = 3) -> Reply:
    made = Reply()
    made.add(Delta(0, text, tuple(ids)))
    ends = (SampleEnd(0, FinishReason(reason), stop),)
    made.add(Finished(ends, Usage(2, counted, 0), Timings(0.1, 0.2, 0.3)))
    return made


def kinds(engine: soak.WatchedEngine, case: Case, made: Reply) -> list[str]:
    return [wrong.partition(":")[0] for wrong in check(engine, case, made)]


def ids_of(engine: soak.WatchedEngine, text: str) -> list[int]:
    return [engine.tokenize(character, add_bos=False)[0] for character in text]


def test_a_sound_reply_has_no_faults(engine: soak.WatchedEngine):
    assert kinds(engine, PROMPT, reply(ids_of(engine, "abd"), "abd")) == []
    assert kinds(engine, PROMPT, reply(ids_of(engine, "abc"), "ab", "stop", "c")) == []


@pytest.mark.parametrize(
    ("text", "of", "how", "kind"),
    [
        ("abd", "abe", {}, "text"),
        ("abc", "abc", {}, "text"),  # a stop string that nobody saw
        ("abcc", "abc", {"reason": "stop", "stop": "c", "counted": 4}, "length"),
        ("ab", "ab", {"counted": 2}, "length"),
        ("abd", "abd", {"counted": 4}, "output tokens"),
        ("abd", "abd", {"reason": "stop"}, "stop"),
    ],
)
def test_a_wrong_reply_has_one(engine: soak.WatchedEngine, text: str, of: str, how: dict[str, Any], kind: str):
    assert kind in kinds(engine, PROMPT, reply(ids_of(engine, text), of, **how))


def test_wrong_tokens_are_seen(engine: soak.WatchedEngine):
    made = reply(ids_of(engine, "abd"), "abd")
    for changes, kind in (
        ({"allowed_token_ids": ids_of(engine, "ab")}, "tokens that are not allowed"),
        ({"bad_words": ["b"]}, "bad words"),
        ({"stop_token_ids": ids_of(engine, "b")}, "went on after an end token"),
        ({"logprobs": 1}, "log-probabilities"),
        ({"prompt_logprobs": 1}, "prompt log-probabilities"),
    ):
        assert kind in kinds(engine, replace(PROMPT, params=replace(PROMPT.params, **changes)), made)
    assert made.faults == []
    made.add(Delta(0, "x", (1,)))
    assert [wrong.partition(":")[0] for wrong in made.faults] == ["event after Finished"]


def test_cases_follow_from_the_seed_and_use_every_parameter(engine: soak.WatchedEngine):
    drawn = [Cases(engine, 7).draw(number) for number in range(300)]
    assert drawn == [Cases(engine, 7).draw(number) for number in range(300)]
    assert drawn != [Cases(engine, 8).draw(number) for number in range(300)]
    default = SamplingParams()
    for name in SamplingParams.__dataclass_fields__:
        assert any(getattr(case.params, name) != getattr(default, name) for case in drawn if case.error is None), name
    aborted = [case for case in drawn if case.abort]
    assert {case.abort for case in aborted} == {"cancel", "rpc", "deadline"}
    assert 0.25 < len(aborted) / len(drawn) < 0.35


# The overload's figures.


def test_percentiles_are_by_nearest_rank():
    values = random.Random(0).sample(range(1, 101), 100)
    assert [percentile(values, percent) for percent in (0, 1, 50, 99, 99.5, 100)] == [1, 1, 50, 99, 100, 100]
    assert percentile([7.0], 50) == 7.0


def phases(ttft_s: float, refusal_s: float, **changes: Any) -> dict[str, Any]:
    """The figures of a run whose baseline has a time to first token of 1 s."""
    accepted = Outcome(0.0, first_s=1.0, total_s=2.0, finished=True)
    refused = Outcome(0.0, total_s=refusal_s, refused=True, hint=True)
    alone = overload.summary([accepted], 1.0)
    pressed = overload.summary([replace(accepted, first_s=ttft_s), *[replace(refused, **changes)] * 3], 2.0)
    after = {"health": "SERVING", "idle_total_ms": 110.0, "pages_in_use": 0, "compiles": 0, "audit_breaches": 0}
    texts = {"bytes": 9, "sent": 3, "ended": ["invalid_argument"], "ended_ms": overload.milliseconds([0.1])}
    beside = alone | {"texts": texts, "total_ratio": {"p50": 1.0, "p99": 1.1}, "ttft_ratio": {"p50": 1.0, "p99": 1.1}}
    figures = {"idle_total_ms": 100.0, "capacity": alone, "baseline": alone, "overload": pressed, "after": after}
    figures |= {"oversized": beside, "longest": beside}
    figures["ttft_ratio"] = overload.ratio(pressed, alone, "ttft_ms")
    return figures | {
        "missed": overload.missed(figures),
        "passed": not overload.missed(figures),
    }


def test_a_summary_counts_each_kind_of_end():
    pressed = phases(1.4, 0.01)["overload"]
    assert (pressed["requests"], pressed["sent_per_s"], pressed["ended_once"]) == (4, 2.0, 4)
    assert (pressed["accepted"], pressed["refused"], pressed["refused_share"]) == (1, 3, 0.75)
    assert pressed["refusal_ms"] == {"p50": 10.0, "p99": 10.0, "max": 10.0}
    assert pressed["ttft_ms"]["p50"] == 1400.0


@pytest.mark.parametrize(
    ("ttft_s", "refusal_s", "changes", "word"),
    [
        (1.6, 0.01, {}, "time to first token (p50)"),
        (1.4, 0.06, {}, "refusals took"),
        (1.4, 0.01, {"hint": False}, "had no hint"),
        (1.4, 0.01, {"refused": False, "hung": True}, "hung"),
        (1.4, 0.01, {"refused": False, "fault": "internal"}, "ended once"),
    ],
)
def test_missed_limits_are_named(ttft_s: float, refusal_s: float, changes: dict[str, Any], word: str):
    figures = phases(ttft_s, refusal_s, **changes)
    assert not figures["passed"]
    assert any(word in each for each in figures["missed"])


def test_the_table_shows_the_phases_and_the_verdict():
    good = overload.table(phases(1.4, 0.01))
    assert [line.split() for line in good.splitlines() if line.startswith("ttft p99")] == [
        ["ttft", "p99,", "ms", "1000.0", "1000.0", "1400.0"]
    ]
    assert good.endswith("passed")
    assert overload.table(phases(1.6, 0.01)).splitlines()[-1].startswith("missed: time to first token")


def test_large_prompts_that_slow_others_fail():
    figures = phases(1.4, 0.01)
    beside = figures["oversized"]
    slow = beside | {"total_ratio": {"p50": 1.0, "p99": 1.21}}
    assert any("27 MB" in each for each in overload.missed(figures | {"oversized": slow}))
    taken = beside | {"texts": beside["texts"] | {"ended": ["served"]}}
    assert any("longest texts ended" in each for each in overload.missed(figures | {"longest": taken}))


def test_a_server_that_is_not_as_before_fails():
    figures = phases(1.4, 0.01)
    for changes in ({"health": "NOT_SERVING"}, {"pages_in_use": 1}, {"compiles": 1}, {"idle_total_ms": 301.0}):
        assert overload.missed(figures | {"after": figures["after"] | changes})
    assert figures["missed"] == []
