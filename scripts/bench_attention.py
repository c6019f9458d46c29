"""Times paged attention of decode steps alone, without the rest of a model.

    python scripts/bench_attention.py [--tokens 32] [--layers 4] [--scan] [--json]

Every case runs in one compiled program, and takes turns with the others, so that a busy moment of the machine hits
them all alike. What is timed is the op as the engine calls it, its writes to the pool included, in a chain of layers
of which each depends on the one before. The numbers are for 30 layers, whatever the number of layers run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.paged_attention import paged_attention, pool_shape

REPORTED_LAYERS = 30  # of SmolLM2-135M, whose shapes these are
N, K, H = 9, 3, 64
PAGE_SIZE, MAX_PAGES = 32, 256


def cases(tokens: int) -> dict[str, list[int]]:
    """Name -> length of each sequence, the step's token included."""
    return {
        **{f"{tokens} of {length}": [length] * tokens for length in (128, 500, 1900)},
        f"1 of 4000, {tokens - 1} of 100": [4000, *[100] * (tokens - 1)],
        "1 of 500": [500],
    }


def build(tokens: int, layers: int, num_pages: int, scan: bool, implementation: str | None):
    """The compiled chain of layers, and the seconds its compilation took."""

    def chain(q, k, v, pool, table, lens, starts, num_seqs):
        def one(carry, layer):
            out, pool = carry
            # The keys depend on the layer before, as a model's do; else layers would not have to wait for each other.
            pool, out = paged_attention(
                out, k + 0.01 * out[:, :K], v, pool, layer, table, lens, starts, num_seqs,
                scale=H**-0.5, implementation=implementation,
            )  # fmt: skip
            return (q + out, pool), None

        if scan:
            return lax.scan(one, (q, pool), jnp.arange(layers))[0]
        carry = (q, pool)
        for layer in range(layers):
            carry, _ = one(carry, layer)
        return carry

    spec = lambda shape, dtype=jnp.int32: jax.ShapeDtypeStruct(shape, dtype)
    shapes = [(tokens, N, H), (tokens, K, H), (tokens, K, H), pool_shape(layers, num_pages, PAGE_SIZE, K, H)]
    arrays = [spec(shape, jnp.bfloat16) for shape in shapes]
    step = [spec((tokens, MAX_PAGES)), spec((tokens,)), spec((tokens + 1,)), spec(())]
    begin = time.perf_counter()
    compiled = jax.jit(chain, donate_argnums=3).lower(*arrays, *step).compile()
    return compiled, time.perf_counter() - begin


def step_inputs(lens: list[int], tokens: int, num_pages: int) -> tuple[jax.Array, ...]:
    """Page table, lengths, query starts and number of sequences of one decode step, pages in random order."""
    ids = np.random.default_rng(0).permutation(num_pages)
    table, kv_lens, used = np.zeros((tokens, MAX_PAGES), np.int32), np.zeros(tokens, np.int32), 0
    for s, length in enumerate(lens):
        pages = -(-length // PAGE_SIZE)
        table[s, :pages] = ids[used : used + pages]
        kv_lens[s], used = length, used + pages
    starts = np.minimum(np.arange(tokens + 1), len(lens)).astype(np.int32)
    return tuple(map(jnp.asarray, (table, kv_lens, starts, np.int32(len(lens)))))


def main() -> None:
    parser = argparse.ArgumentParser(description="Times paged attention of decode steps.")
    parser.add_argument("--tokens", type=int, default=32, help="tokens the step is compiled for")
    parser.add_argument("--layers", type=int, default=4, help="layers to run")
    parser.add_argument("--scan", action="store_true", help="roll the layers into one loop, as the engine does on CPUs")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--implementation", help="by name; chosen by device if not given")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    lengths = cases(args.tokens)
    num_pages = max(sum(-(-n // PAGE_SIZE) for n in lens) for lens in lengths.values())
    compiled, compile_s = build(args.tokens, args.layers, num_pages, args.scan, args.implementation)
    inputs = {name: step_inputs(lens, args.tokens, num_pages) for name, lens in lengths.items()}
    rng = np.random.default_rng(0)
    random = lambda *shape: jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    q, k, v = random(args.tokens, N, H), random(args.tokens, K, H), random(args.tokens, K, H)
    pool = jnp.full(pool_shape(args.layers, num_pages, PAGE_SIZE, K, H), 0.1, jnp.bfloat16)
    seconds: dict[str, list[float]] = {name: [] for name in inputs}
    for round_ in range(args.rounds + 1):
        for name, step in inputs.items():
            begin = time.perf_counter()
            out, pool = compiled(q, k, v, pool, *step)
            out.block_until_ready()
            if round_:  # the first warms up
                seconds[name].append(time.perf_counter() - begin)

    to_ms = lambda s: round(s * 1e3 * REPORTED_LAYERS / args.layers, 2)
    report = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "tokens": args.tokens,
        "layers_run": args.layers,
        "scan": args.scan,
        "compile_s": round(compile_s, 2),
        f"ms_per_{REPORTED_LAYERS}_layers": {
            name: {"median": to_ms(statistics.median(s)), "min": to_ms(min(s))} for name, s in seconds.items()
        },
    }
    if args.json:
        print(json.dumps(report, indent=2))
        return
    print(f"jax {report['jax']} on {report['device']}, step of {args.tokens} tokens, {args.layers} layers", end="")
    print(f"{' scanned' if args.scan else ''}, compiled in {compile_s:.1f} s")
    print(f"{'sequences of length':24s} {'median':>8s} {'min':>8s}   ms per {REPORTED_LAYERS} layers")
    for name, ms in report[f"ms_per_{REPORTED_LAYERS}_layers"].items():
        print(f"{name:24s} {ms['median']:8.1f} {ms['min']:8.1f}")


if __name__ == "__main__":
    main()
