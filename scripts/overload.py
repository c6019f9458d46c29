"""Sends a server many times what it can serve, and shows how it refuses and what those it accepts have to bear.

    python scripts/overload.py --factor 10 --seconds 60

Starts `jaxinfer serve` on a free port of loopback, with few places to run and to wait, and stops it at the end. First
comes what it can serve: a closed loop with as many requests as may run. Then the baseline: a closed loop that keeps
every place to run and to wait taken. Then the overload: requests at random times (a Poisson process), `--factor` times
as many as it can serve. Last, with the places to run taken, another process sends nothing but prompts of 27 MB, which
are refused; and then nothing but texts as long as their limit in bytes, which have too many tokens, as is found out on
one thread. Times are the client's own, from sending; it runs on the same machine and takes its share.

It passes if 99 of 100 refusals come within 50 ms, and each with a hint when to retry; if the time to first token of
those accepted, median and 99th percentile, is at most 1.5 times the baseline's; if requests beside the prompts of 27 MB
take at most 1.2 times as long as without, at the 99th percentile; and if each request ends once, nothing hangs and the
server is as before.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxinfer.errors import InvalidArgumentError, JaxinferError, QueueFullError
from jaxinfer.types import Delta, Finished, SamplingParams
from server.client import AsyncClient

INPUT_LEN, OUTPUT_LEN = 32, 32  # tokens
FIRST_TOKEN_ID = 100  # below lie control tokens, in most vocabularies
MAX_REFUSAL_MS = 50.0
MAX_TTFT_RATIO = 1.5
MAX_IDLE_RATIO = 3.0  # of one request alone, after to before
HANG_S = 60.0
START_S, STOP_S = 600.0, 60.0  # the server's start; its stop, and its answer to a call
WARM_UP_S = 3.0  # of each closed loop, not counted: its queue fills
CLOSED_LOOP_S = 30.0
RETRY_S = 0.005
OVERSIZED_BYTES = 27_000_000
MAX_OVERSIZED_RATIO = 1.2
ONE_PER_TOKEN = " a"  # a text of it has a token for every two bytes, or more


@dataclass
class Outcome:
    """How one request ended. Seconds, from its sending; `first_s` is to its first token.

    `faults` tells how it did not end once, and well or refused.
    """

    sent: float
    first_s: float | None = None
    total_s: float = 0.0
    finished: bool = False
    refused: bool = False
    hint: bool = False
    hung: bool = False
    fault: str | None = None


async def ask(client: AsyncClient, prompt: list[int]) -> Outcome:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    outcome = Outcome(time.perf_counter())
    tokens = 0
    try:
        async with asyncio.timeout(HANG_S), client.generate(prompt, params) as stream:
            async for event in stream:
                if outcome.first_s is None:
                    outcome.first_s = time.perf_counter() - outcome.sent
                if outcome.finished:
                    outcome.fault = f"{type(event).__name__} after Finished"
                tokens += len(event.token_ids) if isinstance(event, Delta) else 0
                outcome.finished = outcome.finished or isinstance(event, Finished)
    except QueueFullError as error:
        outcome.refused, outcome.hint = True, error.retry_after_s is not None
    except JaxinferError as error:
        outcome.fault = f"{error.code}: {error}"
    except TimeoutError:
        outcome.hung = True
    outcome.total_s = time.perf_counter() - outcome.sent
    if outcome.finished and (outcome.refused or tokens != OUTPUT_LEN):
        outcome.fault = f"finished with {tokens} tokens{', and then refused' if outcome.refused else ''}"
    return outcome


class Load:
    """Requests from one client. Each prompt is drawn anew, so that none is in the prefix cache."""

    def __init__(self, client: AsyncClient, vocab_size: int, seed: int) -> None:
        self._client, self._vocab_size, self._rng = client, vocab_size, random.Random(seed)

    async def one(self) -> Outcome:
        low = min(FIRST_TOKEN_ID, self._vocab_size - 1)
        return await ask(self._client, self._rng.choices(range(low, self._vocab_size), k=INPUT_LEN))

    async def closed(self, concurrency: int, seconds: float) -> list[Outcome]:
        """Always so many in the system; those sent in the first WARM_UP_S are left out.

        One that comes before its predecessor's place is free is refused and comes again at once.
        """
        begun = time.perf_counter()
        outcomes: list[Outcome] = []

        async def work(number: int) -> None:
            await asyncio.sleep(0.5 * WARM_UP_S * number / concurrency)  # all at once, some would be refused
            while time.perf_counter() < begun + seconds:
                outcomes.append(await self.one())
                if outcomes[-1].refused:
                    await asyncio.sleep(RETRY_S)

        await asyncio.gather(*map(work, range(concurrency)))
        return [each for each in outcomes if begun + WARM_UP_S <= each.sent]

    async def open(self, rate: float, seconds: float) -> list[Outcome]:
        """Sends `rate` requests per second at random times, whatever becomes of them, and waits for their ends."""
        begun = due = time.perf_counter()
        tasks = []
        while (due := due + self._rng.expovariate(rate)) < begun + seconds:
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            tasks.append(asyncio.create_task(self.one()))
        return await asyncio.gather(*tasks)


async def send_texts(address: str, size: int) -> None:
    """Sends texts of so many bytes, one after another, until it is killed; prints how each ended, and when."""
    text = ONE_PER_TOKEN * (size // len(ONE_PER_TOKEN))
    async with AsyncClient(address) as client:
        while True:
            begun, word = time.perf_counter(), "served"
            try:
                async with client.generate(text, SamplingParams(max_tokens=1)) as stream:
                    async for _ in stream:
                        pass
            except JaxinferError as error:
                word = error.code
            print(word, time.perf_counter() - begun, flush=True)


async def beside(address: str, size: int, work: Coroutine[Any, Any, list[Outcome]]) -> tuple[list[Outcome], Any]:
    """What `work` gives while another process sends such texts, and what became of those."""
    command = [sys.executable, __file__, "--send-texts", address, str(size)]
    sender = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        outcomes = await work
    finally:
        sender.kill()
        printed, _ = await sender.communicate()
    ended = [line.split() for line in printed.decode().splitlines() if line.endswith(tuple("0123456789"))]
    words = sorted({word for word, _ in ended})
    return outcomes, {
        "bytes": size,
        "sent": len(ended),
        "ended": words,
        "ended_ms": milliseconds([float(seconds) for _, seconds in ended]),
    }


# Figures.


def percentile(values: Sequence[float], percent: float) -> float:
    """By nearest rank: the least value that so many percent of the values do not exceed."""
    return sorted(values)[max(math.ceil(percent / 100 * len(values)), 1) - 1]


def milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """Percentiles; None of no values."""
    if not seconds:
        return None
    points = {"p50": percentile(seconds, 50), "p99": percentile(seconds, 99), "max": percentile(seconds, 100)}
    return {name: round(1e3 * value, 1) for name, value in points.items()}


def summary(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Of one phase; `seconds` is how long requests were sent."""
    accepted = [each for each in outcomes if each.finished and not each.fault]
    refused = [each for each in outcomes if each.refused]
    return {
        "requests": len(outcomes),
        "sent_per_s": round(len(outcomes) / seconds, 2),
        "accepted": len(accepted),
        "accepted_per_s": round(len(accepted) / seconds, 2),
        "refused": len(refused),
        "refused_share": round(len(refused) / max(len(outcomes), 1), 4),
        "without_hint": sum(not each.hint for each in refused),
        "hung": sum(each.hung for each in outcomes),
        "faults": [each.fault for each in outcomes if each.fault][:20],
        "ended_once": len(accepted) + len(refused),
        "refusal_ms": milliseconds([each.total_s for each in refused]),
        "ttft_ms": milliseconds([each.first_s for each in accepted if each.first_s is not None]),
        "total_ms": milliseconds([each.total_s for each in accepted]),
    }


def ratio(phase: dict[str, Any], base: dict[str, Any], name: str) -> dict[str, float]:
    """Percentiles of one phase to those of another; empty if either has none."""
    ours, theirs = phase[name], base[name]
    return {point: round(ours[point] / theirs[point], 3) for point in ("p50", "p99")} if ours and theirs else {}


def missed(figures: dict[str, Any]) -> list[str]:
    """The limits that were missed, in words."""
    baseline, overload, after = figures["baseline"], figures["overload"], figures["after"]
    wrong = []
    for name in ("baseline", "overload"):
        phase = figures[name]
        if phase["ended_once"] != phase["requests"] or phase["hung"] or phase["faults"]:
            wrong.append(f"{name}: {phase['hung']} hung, {phase['ended_once']} of {phase['requests']} ended once")
    if not (overload["refused"] and overload["accepted"] and baseline["accepted"]):
        return [*wrong, "no overload: none was refused, or none accepted"]
    if not overload["refusal_ms"]["p99"] <= MAX_REFUSAL_MS:
        wrong.append(f"refusals took {overload['refusal_ms']['p99']} ms (p99), over {MAX_REFUSAL_MS:g}")
    if overload["without_hint"]:
        wrong.append(f"{overload['without_hint']} refusals had no hint when to retry")
    for point, longer in figures["ttft_ratio"].items():
        if not longer <= MAX_TTFT_RATIO:
            wrong.append(f"time to first token ({point}) is {longer:.2f} times the baseline's, over {MAX_TTFT_RATIO:g}")
    for name in ("oversized", "longest"):
        texts = figures[name]["texts"]
        if texts["ended"] != ["invalid_argument"]:
            wrong.append(f"{name} texts ended as {texts['ended']} ({texts['sent']} of them)")
    if not figures["oversized"]["total_ratio"]["p99"] <= MAX_OVERSIZED_RATIO:
        wrong.append(f"beside texts of 27 MB requests take {figures['oversized']['total_ratio']} times as long")
    if after["health"] != "SERVING" or after["pages_in_use"] or after["compiles"] or after["audit_breaches"]:
        wrong.append(f"the server is not as before: {after}")
    if not after["idle_total_ms"] <= MAX_IDLE_RATIO * figures["idle_total_ms"]:
        wrong.append(f"one request alone takes {after['idle_total_ms']} ms, before {figures['idle_total_ms']}")
    return wrong


def table(figures: dict[str, Any]) -> str:
    """The phases side by side, as text."""
    phases = [figures[name] for name in ("capacity", "baseline", "overload")]
    rows: list[tuple[str, ...]] = [("", "capacity", "baseline", "overload")]
    for name in ("sent_per_s", "accepted_per_s", "refused_share", "without_hint", "hung"):
        rows.append((name.replace("_", " "), *(f"{phase[name]:g}" for phase in phases)))
    for name, point in itertools.product(("ttft_ms", "refusal_ms"), ("p50", "p99", "max")):
        shown = (f"{phase[name][point]:.1f}" if phase[name] else "-" for phase in phases)
        rows.append((f"{name.removesuffix('_ms')} {point}, ms", *shown))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(cells))
        for cells in (zip(row, widths, strict=True) for row in rows)
    ]
    alone, after = figures["idle_total_ms"], figures["after"]
    for name in ("oversized", "longest"):
        phase, texts = figures[name], figures[name]["texts"]
        lines.append(
            f"beside texts of {texts['bytes']} bytes ({texts['sent']} sent, {texts['ended']}, {texts['ended_ms']}), to "
            f"without: total {phase['total_ratio']}, time to first token {phase['ttft_ratio']}"
        )
    lines += [
        f"ttft, to the baseline's: {figures['ttft_ratio']}",
        f"one request alone: {alone} ms before, {after['idle_total_ms']} ms after; then {after}",
        "passed" if figures["passed"] else "missed: " + "; ".join(figures["missed"]),
    ]
    return "\n".join(lines)


# The run.


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


async def measure(
    address: str, *, max_num_seqs: int, max_waiting: int, seconds: float, factor: float
) -> dict[str, Any]:
    async with AsyncClient(address) as client:
        await client.wait_ready(START_S)
        load = Load(client, (await client.model_info(timeout_s=STOP_S)).vocab_size, seed=0)

        async def idle_total_ms() -> float:
            return round(1e3 * percentile([(await load.one()).total_s for _ in range(5)], 50), 1)

        figures: dict[str, Any] = {"idle_total_ms": await idle_total_ms()}
        counted = CLOSED_LOOP_S - WARM_UP_S
        figures["capacity"] = summary(await load.closed(max_num_seqs, CLOSED_LOOP_S), counted)
        rate = factor * figures["capacity"]["accepted_per_s"]
        if not rate:
            raise RuntimeError(f"nothing was served in {CLOSED_LOOP_S:g} s: {figures['capacity']}")
        places = max_num_seqs + max_waiting
        say(f"it can serve {figures['capacity']['accepted_per_s']} requests/s; baseline: {places} at once")
        figures["baseline"] = summary(await load.closed(places, CLOSED_LOOP_S + WARM_UP_S), CLOSED_LOOP_S)
        say(f"overload: {rate:.0f} requests/s for {seconds:g} s")
        cpu_s = time.process_time()
        figures["overload"] = summary(await load.open(rate, seconds), seconds)
        figures["overload"]["client_cpu_share"] = round((time.process_time() - cpu_s) / seconds, 3)
        figures["ttft_ratio"] = ratio(figures["overload"], figures["baseline"], "ttft_ms")
        longest = await longest_text(client)
        for name, size in (("oversized", OVERSIZED_BYTES), ("longest", longest)):
            say(f"{name}: beside texts of {size} bytes")
            # Without them before and after, so that a machine that changes meanwhile shows less.
            half = (CLOSED_LOOP_S + WARM_UP_S) / 2
            without = await load.closed(max_num_seqs, half)
            outcomes, texts = await beside(address, size, load.closed(max_num_seqs, CLOSED_LOOP_S))
            without += await load.closed(max_num_seqs, half)
            figures[name] = summary(outcomes, counted) | {"texts": texts, "without": summary(without, CLOSED_LOOP_S)}
            for kind in ("total", "ttft"):
                figures[name][f"{kind}_ratio"] = ratio(figures[name], figures[name]["without"], f"{kind}_ms")
        after = {"idle_total_ms": await idle_total_ms()}
        await asyncio.sleep(0.5)  # the engine looks at its own books once it is idle
        figures["after"] = after | await state(client)
    figures["missed"] = missed(figures)
    return figures | {"passed": not figures["missed"]}


async def longest_text(client: AsyncClient) -> int:
    """Bytes of the longest text that is tokenized before it is refused, found by its limit's own words."""
    try:
        await client.unary_generate(ONE_PER_TOKEN * (OVERSIZED_BYTES // 2), SamplingParams(max_tokens=1))
    except InvalidArgumentError as error:
        if found := re.search(r"at most (\d+) bytes", str(error)):
            return int(found[1])
    raise RuntimeError(f"a text of {OVERSIZED_BYTES} bytes was not refused by a limit in bytes")


async def state(client: AsyncClient) -> dict[str, Any]:
    try:
        await client.wait_ready(5.0)
        health = "SERVING"
    except JaxinferError as error:
        health = str(error)
    stats = (await client.server_info(timeout_s=STOP_S)).stats
    assert stats is not None
    return {
        "health": health,
        "pages_in_use": stats.total_pages - stats.free_pages - stats.cached_pages,
        "compiles": stats.compiles_after_warmup,
        "audit_breaches": stats.audit_breaches_total,
    }


def listening_on(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        if "listening on" in line:
            return line.split("listening on")[1].strip()
    raise RuntimeError(f"the server ended with exit code {server.wait()} before it listened")


def stop(server: subprocess.Popen[str]) -> int:
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        return server.wait(STOP_S)
    except subprocess.TimeoutExpired:
        server.kill()
        return server.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what to serve")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long the overload lasts")
    parser.add_argument("--factor", type=float, default=10.0, help="arrivals, to what it can serve")
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-waiting", type=int, default=16)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--send-texts", nargs=2, metavar=("ADDRESS", "BYTES"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.send_texts:
        address, size = arguments.send_texts
        asyncio.run(send_texts(address, int(size)))
    command = [str(Path(sys.executable).with_name("jaxinfer")), "serve", "--port", "0", "--model", arguments.model]
    sizes = {name: getattr(arguments, name) for name in ("max_num_seqs", "max_waiting")}
    command += [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        figures = asyncio.run(
            measure(listening_on(server), **sizes, seconds=arguments.seconds, factor=arguments.factor)
        )
    finally:
        code = stop(server)
    if code:
        figures["missed"].append(f"the server ended with exit code {code}")
        figures["passed"] = False
    print(json.dumps(vars(arguments) | figures) if arguments.json else table(figures))
    return 0 if figures["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
