"""Runs the tests' properties over damaged files, hostile templates, split texts and requests for longer than CI does.

    python scripts/fuzz.py --target all --seconds 300 --seed 1

It prints progress and, at the first example that fails, the example and the command that finds it again; that
example is also written to a file. Exit status: 0 if all held, 1 if one failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / folder) for folder in ("", "checkpoints", "text", "server"))]

import hypothesis  # noqa: E402

TARGETS = ("gguf", "safetensors", "template", "text", "requests")
ROUND = 100  # examples a round: the clock is looked at between two of them
MOST_ROUNDS = 100_000


def properties(target: str) -> list[tuple[Callable[..., None], dict[str, Any]]]:
    if target == "template":
        warnings.simplefilter("ignore", SyntaxWarning)  # of the code that Jinja makes of nonsense
        from test_chat_fuzz import TEMPLATE_FUZZ

        return [TEMPLATE_FUZZ]
    if target == "text":
        from test_detokenizer_splits import LONG_FUZZ, SPLIT_FUZZ

        return [SPLIT_FUZZ, LONG_FUZZ]
    if target == "requests":
        return [_requests()]
    from test_fuzz_headers import GGUF_FUZZ, SAFETENSORS_FUZZ, warm_up

    warm_up()
    return [GGUF_FUZZ if target == "gguf" else SAFETENSORS_FUZZ]


def _requests() -> tuple[Callable[..., None], dict[str, Any]]:
    import logging
    import os

    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # of the servers that come and go

    from test_fuzz_requests import REQUESTS, check_requests
    from tiny_engines import closed_engine, config_of, write_tiny_model

    from jaxinfer.checkpoints.source import default_cache_dir

    logging.disable(logging.WARNING)  # refusals are what is made here
    folder = write_tiny_model(Path(tempfile.mkdtemp(prefix="tiny-")) / "model")
    base = closed_engine(config_of(folder), default_cache_dir(os.environ))
    return (lambda messages: check_requests(base, messages)), REQUESTS


def run(target: str, seconds: float, seed: int, rounds: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Runs rounds until the time or their number is up, or one fails; says what happened."""
    checks, examples, done = properties(target), 0, 0
    start = said = time.monotonic()
    while done < rounds and time.monotonic() - start < seconds:
        for check, strategies in checks:
            last: dict[str, Any] = {}

            def counted(**example: Any) -> None:
                nonlocal examples
                examples += 1
                last.update(example)  # noqa: B023  (called within this turn of the loop alone)
                check(**example)  # noqa: B023

            settings = hypothesis.settings(
                max_examples=ROUND,
                deadline=None,
                database=None,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            try:
                hypothesis.seed(seed + done)(settings(hypothesis.given(**strategies)(counted)))()
            # Whatever it is, it is what is looked for. Hypothesis runs the smallest example last.
            except Exception as error:
                name = f"fuzz-{target}-{seed + done}.txt"
                path = Path(tempfile.gettempdir()) / name
                path.write_text("".join(f"{key} = {value!r}\n" for key, value in last.items()))
                return {
                    "target": target,
                    "examples": examples,
                    "seconds": round(time.monotonic() - start, 1),
                    "failure": f"{type(error).__name__}: {str(error)[:2000]}",
                    "example": str(path),
                    "again": f"python scripts/fuzz.py --target {target} --seed {seed + done} --rounds 1",
                }
        done += 1
        if time.monotonic() - said > 10:
            said = time.monotonic()
            say(f"{target}: {examples} examples in {said - start:.0f} s")
    return {"target": target, "examples": examples, "seconds": round(time.monotonic() - start, 1), "failure": None}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", choices=(*TARGETS, "all"), default="all")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target; the round under way is ended")
    parser.add_argument("--seed", type=int, default=0, help="of the first round; each after it adds one")
    parser.add_argument("--rounds", type=int, default=MOST_ROUNDS, help=f"of {ROUND} examples, at most")
    parser.add_argument("--json", action="store_true", help="print the results as one JSON list")
    args = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    results = []
    for target in TARGETS if args.target == "all" else (args.target,):
        result = run(target, args.seconds, args.seed, args.rounds, say)
        results.append(result)
        say(f"{target}: {result['examples']} examples in {result['seconds']} s, {result['failure'] or 'all held'}")
        if result["failure"]:
            say(f"  the example: {result['example']}\n  again: {result['again']}")
    if args.json:
        print(json.dumps(results, indent=2))
    return any(result["failure"] for result in results)


if __name__ == "__main__":
    sys.exit(main())
