"""Host time of the scheduler: plan and commit of one step, with a device that answers at once.

    python scripts/bench_scheduler.py [--running 1 32 256] [--steps 400] [--json]

Prints the median and the 99th percentile in milliseconds over steady decode steps, pages being taken and
registered as in service, with one plan in flight while the next is made.
"""

from __future__ import annotations

import argparse
import json
from time import perf_counter

import numpy as np

from jaxinfer.config import SchedulerConfig
from jaxinfer.engine.scheduler import Scheduler
from jaxinfer.engine.sequence import make_samples
from jaxinfer.types import SamplingParams, StepTokens

PROMPT_TOKENS, PAGE_SIZE = 64, 16


def measure(running: int, steps: int) -> dict[str, float]:
    """Milliseconds of `plan` and of `commit` over `steps` steps in which `running` sequences decode."""
    length = PROMPT_TOKENS + steps + 64
    config = SchedulerConfig(
        max_num_seqs=running,
        max_num_batched_tokens=running * PROMPT_TOKENS,
        max_model_len=length + 1,
        page_size=PAGE_SIZE,
        num_pages=running * (length // PAGE_SIZE + 2),
    )
    scheduler = Scheduler(config)
    random = np.random.default_rng(0)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for i in range(running):
        # Lengths differ, so that page edges are spread over the steps.
        prompt = random.integers(0, 50_000, PROMPT_TOKENS - i % PAGE_SIZE)
        scheduler.add(make_samples(f"request-{i}", prompt, params, seed=i))
    before = scheduler.plan()
    plans: list[float] = []
    commits: list[float] = []
    while len(plans) < steps:
        started = perf_counter()
        plan = scheduler.plan()
        planned = perf_counter()
        assert plan is not None
        assert before is not None
        answer = StepTokens(random.integers(0, 50_000, before.num_seqs).astype(np.int32))
        committing = perf_counter()
        scheduler.commit(before, answer)
        committed = perf_counter()
        if plan.num_tokens == running:
            plans.append(planned - started)
            commits.append(committed - committing)
        before = plan
    both = np.add(plans, commits)
    return {
        "running": running,
        "plan_ms_median": 1e3 * float(np.median(plans)),
        "plan_ms_p99": 1e3 * float(np.percentile(plans, 99)),
        "commit_ms_median": 1e3 * float(np.median(commits)),
        "commit_ms_p99": 1e3 * float(np.percentile(commits, 99)),
        "both_ms_median": 1e3 * float(np.median(both)),
        "both_ms_p99": 1e3 * float(np.percentile(both, 99)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256], help="sequences that decode at once")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args()
    for running in args.running:
        result = measure(running, args.steps)
        if args.json:
            print(json.dumps(result))
        else:
            print(
                f"{running:4d} running:  "
                + "   ".join(
                    f"{name} {result[f'{name}_ms_median']:.3f} ms (p99 {result[f'{name}_ms_p99']:.3f})"
                    for name in ("plan", "commit", "both")
                )
            )


if __name__ == "__main__":
    main()
