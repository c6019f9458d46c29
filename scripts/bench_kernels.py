"""Times the kernels on this device, each beside its floor and beside what one would otherwise call.

    python scripts/bench_kernels.py [--only NAME] [--minutes 6] [--json] [--tiny]

First everything is compared with the float32 reference (`check_kernels.py`); what is wrong is not timed. The floor of a
case is its bytes over the rate of a copy measured here, or its operations over the rate of a bfloat16 matmul measured
here, whichever takes longer. Several calls, on operands that do not fit the caches together, run in one compiled
program; the time is the median of several runs, divided by the calls. Most of the minutes go to compiling; what they
are not enough for is listed as skipped. `--tiny` shrinks every shape, to try the script where there is no accelerator;
its times mean nothing. The exit status is 1 if anything was wrong or failed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from check_kernels import run_checks, served

from pallas_kernels.dispatch import current_device
from pallas_kernels.paged_attention import paged_attention, pool_spec
from pallas_kernels.paged_attention.layout import QuantizedKV
from pallas_kernels.quantized_matmul import ChannelWeight, GroupedWeight, quantized_matmul

bf16 = jnp.bfloat16
RUNS = 7
CACHE_BYTES = 256 << 20  # operands of a program together; more than any chip's last cache
MOST_LAYERS = 4  # of a pool, since one may take gigabytes
PAGE_SIZE = 64
MATRICES = {"qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096)}  # Llama-3-8B


class Case(NamedTuple):
    """What is timed.

    Attributes:
      build: calls -> (jitted program, its arguments); the program makes so many calls. One that donates its first
        argument, as the pool is, returns first what takes its place.
      bytes, flops: of a call, at least.
      call_bytes: of the operands of a call, all of which a cache could keep.
      most_calls: of a program; memory or compiling set a limit.
      checked: which checks must have passed, as "attention int8"; None where nothing of ours runs.
      served: what implementation serves, as `check_kernels.served` says.
    """

    name: str
    build: Callable[[int], tuple[Callable, tuple]]
    bytes: float
    flops: float
    call_bytes: float
    most_calls: int = 32
    checked: str | None = None
    served: Callable[[], dict[str, Any]] = dict
    peer: str | None = None  # name of the case that it stands beside
    donates: bool = False


def seconds_of(case: Case) -> float:
    """Median seconds of a call."""
    calls = min(max(2, math.ceil(CACHE_BYTES / case.call_bytes)), case.most_calls)
    program, args = case.build(calls)
    times = []
    for _ in range(1 + RUNS):
        begin = time.perf_counter()
        out = jax.block_until_ready(program(*args))
        times.append(time.perf_counter() - begin)
        if case.donates:
            args = (out[0], *args[1:])
    return statistics.median(times[1:]) / calls  # the first one compiles


@partial(jax.jit, static_argnames=("shape", "dtype"))
def random(seed: int, shape: tuple[int, ...], dtype: Any = bf16) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.random.normal(jax.random.key(seed), shape, dtype)
    bits = jnp.iinfo(dtype)
    return jax.random.randint(jax.random.key(seed), shape, bits.min, bits.max + 1, jnp.int8).astype(dtype)


def roofs(tiny: bool) -> dict[str, Case]:
    """A copy and a matmul: what the device does at best."""
    size, n = (1 << 20, 256) if tiny else (1 << 29, 8192)

    def copy(calls: int):
        x = random(0, (size,))
        step = lambda x, _: (x + bf16(1), None)
        return jax.jit(lambda x: jax.lax.scan(step, x, None, length=calls)[0]), (x,)

    def matmul(calls: int):
        x, w = random(0, (n, n)), random(1, (n, n))
        step = lambda x, _: (jnp.dot(x, w), None)
        return jax.jit(lambda x: jax.lax.scan(step, x, None, length=calls)[0]), (x,)

    return {"copy": Case("copy", copy, 4 * size, 0, CACHE_BYTES / 8),
            "matmul": Case("matmul", matmul, 6 * n * n, 2 * n**3, CACHE_BYTES / 8)}  # fmt: skip


def attention_step(
    N: int, K: int, H: int, lens: list[tuple[int, int]], kv_dtype: Any, layers: int, page_size: int = PAGE_SIZE
):
    """Arguments of `paged_attention`: sequences of (tokens before, now), all pages filled, in random order."""
    rng = np.random.default_rng(0)
    pages = [-(-(before + now) // page_size) for before, now in lens]
    table, ids = np.zeros((len(lens), max(pages)), np.int32), rng.permutation(sum(pages))
    for s, count in enumerate(pages):
        table[s, :count], ids = ids[:count], ids[count:]
    spec = pool_spec(layers, sum(pages), page_size, K, H, kv_dtype, current_device())
    pool = jax.tree.map(lambda leaf: random(1, leaf.shape, leaf.dtype if leaf.dtype != jnp.float8_e4m3fn else bf16)
                        .astype(leaf.dtype), spec)  # fmt: skip
    if isinstance(pool, QuantizedKV):
        pool = pool._replace(scales=jnp.full_like(pool.scales, 0.01))
    tokens = sum(now for _, now in lens)
    q, k, v = random(2, (tokens, N, H)), random(3, (tokens, K, H)), random(4, (tokens, K, H))
    kv_lens, starts = [b + n for b, n in lens], np.cumsum([0, *(n for _, n in lens)])
    step = map(jnp.asarray, (table, np.int32(kv_lens), starts.astype(np.int32), np.int32(len(lens))))
    return q, k, v, pool, tuple(step)


def attention(name: str, lens: list[tuple[int, int]], kv_dtype: Any, tiny: bool) -> list[Case]:
    """Paged attention of Llama-3-8B's shape and, for bfloat16, `jax.nn.dot_product_attention` over a dense cache."""
    N, K, H = 32, 8, 128
    tokens, live = sum(now for _, now in lens), sum(b + n for b, n in lens)
    token_bytes = 2 * K * (H * jnp.dtype(kv_dtype).itemsize + (4 if jnp.dtype(kv_dtype).itemsize == 1 else 0))
    pairs = sum(n * b + n * (n + 1) / 2 for b, n in lens)  # query tokens times the positions they see

    def call(layers: int, implementation: str | None = None):
        def program(pool, q, k, v, step):
            for layer in range(layers):
                pool, q = paged_attention(q, k, v, pool, layer, *step, scale=H**-0.5, implementation=implementation)
            return pool, q

        return program

    def build(calls: int):
        q, k, v, pool, step = attention_step(N, K, H, lens, kv_dtype, calls)
        return jax.jit(call(calls), donate_argnums=0), (pool, q, k, v, step)

    def by() -> dict[str, Any]:
        q, k, v, pool, step = jax.eval_shape(partial(attention_step, N, K, H, lens, kv_dtype, 1))
        one = lambda *args, implementation: call(1, implementation)(*args)
        return served(one, (pool, q, k, v, step), ("tpu", "gpu", "xla"))

    moved = live * token_bytes + 4 * tokens * N * H
    flops, read = 4 * N * H * pairs, live * token_bytes
    checked = f"attention {jnp.dtype(kv_dtype).name}"
    cases = [Case(name, build, moved, flops, read, MOST_LAYERS, checked, by, donates=True)]
    if kv_dtype != bf16:
        return cases

    def dense(calls: int):
        B, most = len(lens), max(b + n for b, n in lens)
        T = max(n for _, n in lens)
        q = random(0, (B, T, N, H))
        kv = [(random(2 * i, (B, most, K, H)), random(2 * i + 1, (B, most, K, H))) for i in range(calls)]
        kv_lens = jnp.asarray([b + n for b, n in lens], jnp.int32)
        cudnn = current_device().platform == "gpu"

        def program(q, kv):
            for k, v in kv:
                q = jax.nn.dot_product_attention(
                    q, k, v, is_causal=T > 1, key_value_seq_lengths=None if T > 1 else kv_lens,
                    implementation="cudnn" if cudnn else None,
                )  # fmt: skip
            return q

        return jax.jit(program), (q, kv)

    return [*cases, Case(f"{name}: jax.nn, dense", dense, moved, flops, read, MOST_LAYERS, peer=name)]


@jax.jit
def four_bits(x: jax.Array) -> jax.Array:
    return (x >> 4).astype(jnp.int4)


def weight(kind: str, I: int, O: int, seed: int) -> Any:  # noqa: E741
    group = min(128, I)
    if kind in ("int8", "w8a8"):
        return ChannelWeight(random(seed, (I, O), jnp.int8), jnp.full((O,), 1e-3, jnp.float32))
    if kind == "bfloat16":
        return random(seed, (I, O))
    scales = jnp.full((I // group, O), 1e-2, bf16)
    zeros = jnp.full((I // group, O), 1, jnp.int8) if kind == "int4 zeros" else None
    return GroupedWeight(four_bits(random(seed, (I // group, group, O), jnp.int8)), scales, zeros)


def matmul(matrix: str, rows: int, kind: str, tiny: bool) -> Case:
    I, O = (256, 512) if tiny else MATRICES[matrix]  # noqa: E741
    bits = {"bfloat16": 16, "int8": 8, "w8a8": 8}.get(kind, 4)
    weight_bytes = I * O * bits / 8 + (0 if bits > 4 else I * O / 128 * (3 if kind == "int4 zeros" else 2))
    activations = "int8" if kind == "w8a8" else None

    def multiply(x, w, implementation=None):
        if kind == "bfloat16":
            return x @ w
        return quantized_matmul(x, w, activations=activations, implementation=implementation)

    def build(calls: int):
        x = random(0, (rows, I))
        return jax.jit(lambda x, ws: [multiply(x, w) for w in ws]), (x, [weight(kind, I, O, i) for i in range(calls)])

    def by() -> dict[str, Any]:
        arrays = jax.eval_shape(lambda: (random(0, (rows, I)), weight(kind, I, O, 0)))
        return served(multiply, arrays, ("mosaic_gpu", "xla"))

    name = f"matmul {matrix} rows {rows} {kind}"
    moved = weight_bytes + 2 * rows * (I + O)
    flops = 2 * rows * I * O
    if kind == "bfloat16":
        return Case(name, build, moved, flops, weight_bytes)
    peer = f"matmul {matrix} rows {rows} bfloat16"
    return Case(name, build, moved, flops, weight_bytes, checked=f"matmul {kind}", served=by, peer=peer)


def cases(tiny: bool) -> list[Case]:
    contexts, seqs, chunk = (256, 4, 256) if tiny else (4096, 64, 4096)
    decode = [(contexts - 1, 1)] * seqs
    found = [
        *attention(f"decode attention, {seqs} x {contexts}", decode, bf16, tiny),
        *attention(f"decode attention, {seqs} x {contexts}, int8", decode, jnp.int8, tiny),
        *attention(f"decode attention, {seqs} x {contexts}, fp8", decode, jnp.float8_e4m3fn, tiny),
        *attention(f"decode attention, 1 x {8 * contexts}", [(8 * contexts - 1, 1)], bf16, tiny),
        *attention(f"prefill attention, {chunk}", [(0, chunk)], bf16, tiny),
    ]
    for matrix in ("qkv",) if tiny else MATRICES:
        for rows in (1, 64, 2048) if matrix == "gate_up" and not tiny else (1, 64):
            found += [matmul(matrix, rows, kind, tiny) for kind in ("bfloat16", "int8", "w8a8", "int4", "int4 zeros")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Times the kernels beside their floors.")
    parser.add_argument("--only", default="", help="cases whose name holds this, and those that they stand beside")
    parser.add_argument("--minutes", type=float, default=6, help="no case is begun after so many")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    say = lambda text: print(text, file=sys.stderr if args.json else sys.stdout, flush=True)
    device, deadline = jax.devices()[0], time.perf_counter() + 60 * args.minutes
    every = cases(args.tiny)
    wanted = {case.peer for case in every if args.only in case.name} | {c.name for c in every if args.only in c.name}
    chosen = [case for case in every if case.name in wanted]
    say(f"{device.device_kind}, jax {jax.__version__}")
    stand_for = {case.checked for case in chosen}
    checks = list(run_checks(args.tiny, lambda what: not args.only or what in stand_for, say))
    best = roofs(args.tiny)
    copy = best["copy"].bytes / seconds_of(best["copy"])
    flops = best["matmul"].flops / seconds_of(best["matmul"])
    say(f"copy {copy / 1e9:.0f} GB/s, matmul {flops / 1e12:.1f} TFLOP/s")
    say(f"{'case':44s} {'us':>9s} {'floor':>9s} {'of it':>6s}  beside")
    rows: list[dict[str, Any]] = []
    for case in chosen:
        row = {"case": case.name, "bytes": case.bytes, "flops": case.flops}
        rows.append(row)
        row |= timed(case, deadline, [check for check in checks if check["of"] == case.checked])
        if "us" not in row:
            say(f"{case.name:44s} {row.get('error') or row['skipped']}")
            continue
        row["floor_us"] = max(case.bytes / copy, case.flops / flops) * 1e6
        beside = next((other for other in rows if other["case"] == case.peer and "us" in other), None)
        text = "" if beside is None else f"{beside['us'] / row['us']:.2f} times as fast as {beside['case']}"
        text += "".join(f"; by XLA, since {reason}" for reason in row.get("passed_over", ()))
        say(f"{case.name:44s} {row['us']:9.1f} {row['floor_us']:9.1f} {row['floor_us'] / row['us']:6.0%}  {text}")
    if args.json:
        print(json.dumps({"device": device.device_kind, "jax": jax.__version__, "copy_bytes_per_s": copy,
                          "matmul_flops_per_s": flops, "checks": checks, "rows": rows}, indent=1))  # fmt: skip
    skipped = sum("skipped" in row for row in rows)
    if skipped:
        say(f"{skipped} of {len(rows)} cases were skipped: --minutes {args.minutes:g} were not enough")
    sys.exit(any("error" in row for row in (*checks, *rows)))


def timed(case: Case, deadline: float, checks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a case's row says besides its sizes: "us", or why there is none."""
    wrong = [check["check"] for check in checks if "error" in check]
    if wrong or (case.checked and not checks):
        return {"error": f"not timed: {wrong[0]} is wrong" if wrong else f"not timed: nothing checks {case.checked}"}
    if time.perf_counter() > deadline:
        return {"skipped": "no time left"}
    try:
        return case.served() | {"us": seconds_of(case) * 1e6}
    except Exception as error:  # a case that this device cannot run is a row that says so
        return {"error": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    main()
