"""A long mixed load on a real server: every request must end exactly once, and nothing may be left behind.

    python scripts/soak.py --requests 10000 --seed 1

Engine, gRPC server and client share this process, on loopback; unless `--model` says otherwise the model is a tiny
random Llama. Its page pool holds a few long sequences, so preemption never stops, and its queue is short, so requests
are refused. Three in ten requests are aborted, at any moment: by cancelling the call, by Abort or by a deadline. Prints
what happened, and the faults; exits with 1 if there are any.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.source import default_cache_dir, resolve
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.observer import GuardedObserver, Observer, RequestRecord
from jaxinfer.errors import JaxinferError, QueueFullError
from jaxinfer.kv_cache.pool import page_bytes
from jaxinfer.types import FinishReason
from pallas_kernels.dispatch import current_device
from server.client import AsyncClient
from server.grpc_service import GrpcServer

sys.path.insert(0, str(Path(__file__).parent))
from soak_cases import Case, Cases, Reply, check

CONTEXT, PAGE_SIZE, NUM_PAGES = 128, 4, 48  # tokens, tokens, pages: one long sequence takes 32 of the 48
MAX_NUM_SEQS, STEP_TOKENS = 8, 32
MAX_WAITING, MAX_WAITING_TOKENS = 12, 400
ROUNDS = 10  # after each, the engine is idle and its books are looked at
SETTLED_ROUNDS = 2  # after which memory must not grow
MAX_RSS_GROWTH_MB = 24.0
NUM_PROBES = 48
MIN_MARGIN = 1e-3  # between the two likeliest tokens of a greedy probe, in logits; float32 noise is far smaller
HANG_S = 60.0
IDLE_S = 10.0  # in which the last aborts must have reached the engine
MAX_ATTEMPTS, MAX_RETRY_S = 100, 1.0  # of refused requests, each waiting longer than the last
MAX_FAULTS_TOLD = 3  # of a kind


class EngineEnd(NamedTuple):
    """How the engine saw a request end; `moment` is "queued", "prefill", "decode" or, not aborted, "after the end"."""

    moment: str
    aborted: bool
    error: str | None


class Ends(GuardedObserver):
    """Notes how requests end in the engine, and hands everything on to the server's own observer."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: dict[str, list[EngineEnd]] = {}

    def on_end(self, record: RequestRecord) -> None:
        times = record.timings  # what has not happened counts as happening at the end
        moment = "queued" if times.queue_s == times.total_s else "prefill"
        moment = "decode" if times.first_token_s < times.total_s else moment
        aborted = any(sample.finish_reason is FinishReason.ABORT for sample in record.samples)
        aborted = aborted or record.error_code == "deadline_exceeded"
        end = EngineEnd(moment if aborted else "after the end", aborted, record.error_code)
        self._ends.setdefault(record.request_id, []).append(end)
        super().on_end(record)

    def take(self) -> dict[str, list[EngineEnd]]:
        ends, self._ends = self._ends, {}
        return ends


class WatchedEngine(Engine):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ends = Ends()
        self.observe(Observer())

    def observe(self, observer: Observer) -> None:
        self.ends.inner = observer
        super().observe(self.ends)


class Soak:
    """The run. Counts and faults only are kept of what is over."""

    def __init__(self, engine: WatchedEngine, server: GrpcServer, client: AsyncClient, cases: Cases, seed: int) -> None:
        self.engine, self.server, self.client, self.cases, self.seed = engine, server, client, cases, seed
        self.requests = self.ended = self.refusals = self.cancelled = self.compared = self.leaked_pages = 0
        self.finished, self.errors, self.aborted = Counter[str](), Counter[str](), Counter[str]()
        self.faults: list[str] = []
        self.fault_kinds = Counter[str]()
        self.rss_mb: list[float] = []
        self._truth: list[Reply] = []
        self._outcomes: dict[str, tuple[Case, str]] = {}  # of this round, by request id
        self._jitter = random.Random(seed)

    def fault(self, what: str, who: str = "") -> None:
        """Notes a fault, "kind: details"; of each kind all are counted, and the first few told."""
        kind = what.partition(":")[0]
        self.fault_kinds[kind] += 1
        if self.fault_kinds[kind] <= MAX_FAULTS_TOLD:
            self.faults.append(f"{what} [{who}]" if who else what)
            print(f"fault: {self.faults[-1]}", file=sys.stderr, flush=True)

    async def find_probes(self) -> None:
        """Requests to be repeated under load, with what they yield alone; greedy ones only with a clear margin."""
        for case in self.cases.probe_candidates():
            if len(self._truth) == NUM_PROBES:
                return
            reply = await self._attempt(case, f"probe {len(self._truth)}")
            for wrong in self._wrong(case, reply):
                self.fault(wrong, f"alone: {describe(case)}")
            if case.params.greedy and reply.margin < MIN_MARGIN:
                continue
            self._truth.append(reply)
            self.cases.probes.append(case)

    async def round(self, numbers: Iterator[int], concurrency: int, deadline: float) -> None:
        async def work() -> None:
            for number in numbers:
                await self._request(number)
                if time.monotonic() > deadline:
                    return

        await asyncio.gather(*(work() for _ in range(concurrency)))
        await self._settle()
        gc.collect()
        self.rss_mb.append(rss_mb())

    async def _request(self, number: int) -> None:
        case = self.cases.draw(number)
        request_id = case.request_id or f"soak-{self.seed}-{number}"
        self.requests += 1
        if number % 20 == 0 and await self.client.abort(f"nobody {number}"):
            self.fault("Abort found an id that never was")
        for attempt in range(MAX_ATTEMPTS):
            reply = await self._attempt(case, request_id)
            if not isinstance(reply.error, QueueFullError):
                break
            self.refusals += 1
            if reply.error.retry_after_s is None:
                self.fault(f"refused without a hint when to retry: {reply.error}", request_id)
            wait_s = min((reply.error.retry_after_s or 0.1) * 1.5**attempt, MAX_RETRY_S)
            await asyncio.sleep(wait_s * self._jitter.uniform(0.5, 1.5))
        for wrong in self._wrong(case, reply):
            self.fault(wrong, f"{request_id}: {describe(case)}")
        self._count(request_id, case, reply)

    async def _attempt(self, case: Case, request_id: str) -> Reply:
        reply = Reply()
        try:
            async with asyncio.timeout(HANG_S):
                await self._ask(case, request_id, reply)
        except TimeoutError:
            reply.faults.append(f"hung: no end in {HANG_S:g} s; the engine: {self.engine.stats()}")
        return reply

    async def _ask(self, case: Case, request_id: str, reply: Reply) -> None:
        client = self.client
        fields: dict[str, Any] = {"request_id": request_id, "model": case.model, "priority": case.priority}
        if case.abort == "deadline":
            fields["timeout_s"] = case.abort_after_s
        timed = None if case.abort_after_s is None or case.abort == "deadline" else case.abort_after_s
        aborting = None
        if case.abort == "rpc" and timed is not None:
            aborting = asyncio.create_task(self._abort_later(request_id, timed))
        try:
            async with asyncio.timeout(timed if case.abort == "cancel" else None) as cut:
                if case.unary:
                    reply.add_whole(await client.unary_generate(case.prompt, case.params, **fields))
                    return
                async with client.generate(case.prompt, case.params, **fields) as stream:
                    due = case.abort_after_tokens
                    async for event in stream:
                        reply.add(event)
                        if due and reply.num_tokens >= due and reply.finished is None:
                            due = None
                            if case.abort == "rpc":
                                await client.abort(request_id)
                            else:
                                reply.cancelled = True
                                await stream.aclose()
        except JaxinferError as error:
            reply.error = error
        except TimeoutError:
            if not cut.expired():
                raise
            reply.cancelled = True
        finally:
            if aborting is not None:
                await aborting
        if case.abort == "rpc" and reply.finished is not None and await client.abort(request_id):
            reply.faults.append("Abort found it after its end")

    async def _abort_later(self, request_id: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        await self.client.abort(request_id)

    def _wrong(self, case: Case, reply: Reply) -> Iterator[str]:
        """What is wrong with how a request ended. Cancelled calls are told nothing; the engine's side is checked later.

        Whoever is refused again and again may give up; that is counted.
        """
        yield from reply.faults
        if reply.error is not None:
            expected = {case.error, "queue_full", "deadline_exceeded" if case.abort == "deadline" else None}
            if reply.error.code not in expected:
                yield f"ended with {reply.error.code}: {reply.error}"
            if reply.finished is not None:
                yield f"ended twice: Finished, then {reply.error.code}: {reply.error}"
        elif reply.finished is None:
            if not reply.cancelled:
                yield "ended with nothing"
        elif case.error is not None:
            yield f"finished: it should have ended with {case.error}"
        else:
            yield from check(self.engine, case, reply)
            if reply.reason is FinishReason.ABORT:
                if case.abort != "rpc":
                    yield "finished as aborted, and nobody asked for it"
            elif case.probe is not None:
                self.compared += 1
                if reply.output != self._truth[case.probe].output:
                    yield f"not as before: {reply.output}, alone {self._truth[case.probe].output}"

    def _count(self, request_id: str, case: Case, reply: Reply) -> None:
        if reply.finished is not None:
            outcome = "finished"
            self.finished[reply.reason.value] += 1
        elif reply.error is not None:
            outcome = reply.error.code
            self.errors[outcome] += 1
        elif reply.cancelled:
            outcome = "cancelled"
            self.cancelled += 1
        else:
            return
        self.ended += 1
        if case.abort and outcome == "finished" and reply.reason is not FinishReason.ABORT:
            self.aborted["after the end"] += 1
        self._outcomes[request_id] = (case, outcome)

    async def _settle(self) -> None:
        """Waits until nothing lives any more, and looks at what the engine made of this round's requests."""
        end = time.monotonic() + IDLE_S
        while (left := self._live()) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        if left:
            self.fault(f"alive after all have ended: {left}")
        await asyncio.sleep(0.2)  # the engine looks at its own books meanwhile
        stats = self.engine.stats()
        self.leaked_pages = stats.total_pages - stats.free_pages - stats.cached_pages
        if self.leaked_pages or stats.waiting_tokens or stats.audit_breaches_total or stats.compiles_after_warmup:
            self.fault(f"left behind: {stats}")
        ends = self.engine.ends.take()
        for request_id, (case, outcome) in self._outcomes.items():
            seen = ends.pop(request_id, [])
            if outcome in ("cancelled", "deadline_exceeded"):
                right = len(seen) <= 1  # none if it never came to the engine
                self.aborted[seen[0].moment if seen else "before the engine"] += 1
            elif outcome in ("finished", "request_failed"):
                right = [end.error for end in seen] == [None if outcome == "finished" else outcome]
                if right and seen[0].aborted:
                    self.aborted[seen[0].moment] += 1
            else:  # it was refused
                right = not seen
            if not right:
                self.fault(f"engine and client differ: {outcome} here, there {seen}", f"{request_id}: {describe(case)}")
        if any(not request_id.startswith("probe") for request_id in ends):
            self.fault(f"ended in the engine and nowhere else: {list(ends)[:5]}")
        self._outcomes.clear()

    def _live(self) -> str:
        stats, calls = self.engine.stats(), self.server.service.live
        live = stats.running or stats.waiting or calls
        return f"{stats.running} run, {stats.waiting} wait, {calls} calls" if live else ""


def describe(case: Case) -> str:
    told = replace(case, prompt=type(case.prompt).__name__, prompt_ids=[])
    return f"{len(case.prompt_ids)} prompt tokens, {told}"


def rss_mb() -> float:
    """Resident memory of this process, by /proc (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def engine_config(model: str) -> EngineConfig:
    config = open_checkpoint(resolve(model, cache_dir=default_cache_dir(os.environ))).config
    heads = len(config.layers), config.num_kv_heads, config.head_dim
    return EngineConfig(
        model=model,
        dtype="float32",
        max_model_len=CONTEXT,
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=STEP_TOKENS,
        page_size=PAGE_SIZE,
        kv_cache_bytes=NUM_PAGES * page_bytes(*heads, PAGE_SIZE, np.float32, current_device()),
        max_waiting=MAX_WAITING,
        max_waiting_tokens=MAX_WAITING_TOKENS,
    )


def tiny_model(folder: Path) -> str:
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    import tiny_checkpoints

    tiny_checkpoints.write_hf_folder(folder, tiny_checkpoints.VARIANTS["llama3"])
    return str(folder)


async def soak(engine: WatchedEngine, *, requests: int, seed: int, concurrency: int, seconds: float) -> dict[str, Any]:
    """Runs it; the figures, `faults` among them. Leaves the engine open."""
    server = GrpcServer(port=0)
    await server.start()
    server.set_engine(engine)
    async with AsyncClient(server.address) as client:
        await client.wait_ready(30)
        run = Soak(engine, server, client, Cases(engine, seed), seed)
        await run.find_probes()
        begun = time.monotonic()
        bounds = [requests * number // ROUNDS for number in range(ROUNDS + 1)]
        for number, (first, last) in enumerate(itertools.pairwise(bounds), 1):
            if time.monotonic() > begun + seconds:
                break
            await run.round(iter(range(first, last)), concurrency, begun + seconds)
            rate = run.requests / (time.monotonic() - begun)
            told = f"{run.requests} requests, {rate:.0f}/s, {run.rss_mb[-1]:.0f} MB, {run.fault_kinds.total()} faults"
            print(f"round {number} of {ROUNDS}: {told}", file=sys.stderr, flush=True)
        took = time.monotonic() - begun
    if not await server.drain(5.0):
        run.fault("the idle server did not drain")
    await server.stop(0)
    growth = run.rss_mb[-1] - run.rss_mb[min(SETTLED_ROUNDS, len(run.rss_mb)) - 1]
    if growth > MAX_RSS_GROWTH_MB:
        run.fault(f"memory grew: by {growth:.1f} MB")
    if run.ended != run.requests:
        run.fault(f"ends: {run.ended} of {run.requests} requests")
    stats = engine.stats()
    return {
        "seed": seed,
        "requests": run.requests,
        "ended": run.ended,
        "finished": dict(run.finished),
        "errors": dict(run.errors),
        "cancelled": run.cancelled,
        "aborted": dict(run.aborted),
        "refusals": run.refusals,
        "repeats_compared": run.compared,
        "leaked_pages": run.leaked_pages,
        "audit_breaches": stats.audit_breaches_total,
        "compiles": stats.compiles_after_warmup,
        "preemptions": stats.preemptions_total,
        "steps": stats.steps_total,
        "output_tokens": stats.output_tokens_total,
        "cached_tokens": stats.cached_tokens_total,
        "rss_mb": [round(each, 1) for each in run.rss_mb],
        "rss_growth_mb": round(growth, 1),
        "seconds": round(took, 1),
        "requests_per_s": round(run.requests / took, 1),
        "fault_kinds": dict(run.fault_kinds),
        "faults": run.faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--concurrency", type=int, default=32, help="requests at once, refused ones included")
    parser.add_argument("--seconds", type=float, default=3600.0, help="no request is begun after so many")
    parser.add_argument("--model", help="what to serve, in float32; default: a tiny random Llama")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = engine_config(arguments.model or tiny_model(Path(folder) / "tiny"))
        with WatchedEngine.start(config, cache_dir=default_cache_dir(os.environ)) as engine:
            load = {name: getattr(arguments, name) for name in ("requests", "seed", "concurrency", "seconds")}
            figures = asyncio.run(soak(engine, **load))
    if arguments.json:
        print(json.dumps(figures))
    else:
        for name, value in figures.items():
            print(f"{name:<17}{value}")
    return 1 if figures["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
