"""Compares the kernels that serve on this device with the float32 reference, here where they run.

    python scripts/check_kernels.py [--only TEXT] [--json] [--tiny]

`scripts/bench_kernels.py` does the same before it times anything. Each step of attention has long sequences beside
short ones, chunks of prompts, slots with nothing to do and pages never written, which are NaN; the pool is compared as
well. Between them the checks have every head dim, group, page size, kind of pool and kind of weight that the kernels
know. `--tiny` shrinks them, to try the script where there is no accelerator. The exit status is 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import KernelError, current_device
from pallas_kernels.paged_attention import paged_attention, pool_spec
from pallas_kernels.paged_attention.layout import PageLayout, values_of
from pallas_kernels.quantized_matmul import ChannelWeight, GroupedWeight, quantized_matmul

bf16, int8, fp8 = jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn
# Largest difference in units of the outputs' root mean square, of which the largest outputs are some five: bfloat16
# rounds these by 2**-9 of themselves, 0.01, and weights before their product with values, or XLA's dequantized ones,
# by as much, which adds up to 0.01 more at five sigma. What is wrong is off by 1. XLA's attention, unlike the kernels,
# rounds keys of 8 bits times their scales to bfloat16: scores of four sigma, and so weights, are off by up to 0.02, and
# the largest outputs by five times that.
ALLOWED, ALLOWED_OF_XLA_IN_8_BITS = 0.03, 0.1
PLATFORMS = {"tpu": "tpu", "gpu": "gpu", "mosaic_gpu": "gpu"}  # implementation -> what it is for
CHUNK = 32  # query tokens at a time of the reference, which gathers every token's pages


class AttentionShape(NamedTuple):
    K: int
    G: int
    H: int
    page_size: int
    kv: Any
    window: int | None = None
    soft_cap: float | None = None

    @property
    def name(self) -> str:
        own = "".join(f" {name} {value}" for name, value in (("window", self.window), ("cap", self.soft_cap)) if value)
        kind = jnp.dtype(self.kv).name
        return f"attention {kind}: {self.K} x {self.G} heads of {self.H}, pages of {self.page_size}{own}"


ATTENTION = (
    AttentionShape(8, 4, 128, 64, bf16),
    AttentionShape(2, 8, 128, 16, int8, window=3000),
    AttentionShape(2, 7, 128, 32, fp8, soft_cap=30.0),
    AttentionShape(2, 16, 64, 128, bf16, window=1000, soft_cap=50.0),
    AttentionShape(3, 3, 64, 64, int8),
    AttentionShape(4, 1, 256, 16, bf16, window=300),
    AttentionShape(2, 4, 256, 128, fp8),
    AttentionShape(2, 5, 96, 32, bf16),
    AttentionShape(2, 4, 64, 16, fp8, window=100),
)
# (tokens before, tokens now): a decode's blocks are many for each worker, a chunk has several tiles and blocks.
STEP = ((20000, 1), (0, 0), (1500, 200), (40, 1), (0, 300), (700, 1), (9, 0), (63, 1), (2500, 1), (130, 90), (0, 1))
MATMULS = (
    *((kind, None, rows) for kind in ("int8", "w8a8", "fp8") for rows in (1, 64, 2048)),
    *(("int4", group, rows) for group, rows in ((16, 64), (32, 1), (64, 2048), (128, 1), (128, 64))),
    *(("int4 zeros", group, rows) for group, rows in ((16, 2048), (32, 64), (64, 1), (128, 2048))),
    *(("uint4 minima", group, rows) for group, rows in ((16, 1), (32, 2048), (64, 64), (128, 1))),
)


class AttentionStep(NamedTuple):
    """The arrays of a call up to `num_seqs`, less the layer, and its sequences."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    pool: Any
    page_table: np.ndarray
    kv_lens: np.ndarray
    query_starts: np.ndarray
    num_seqs: np.int32
    lens: tuple[tuple[int, int], ...]


def attention_step(shape: AttentionShape, lens: tuple[tuple[int, int], ...]) -> AttentionStep:
    """Random tokens in pages of any order; what nobody wrote is NaN."""
    rng = np.random.default_rng(0)
    K, G, H, page_size, kv, *_ = shape
    pages = [-(-sum(each) // page_size) for each in lens]
    spec = pool_spec(1, sum(pages) + 2, page_size, K, H, kv, current_device())
    layout = PageLayout.of(spec, K, H)
    bad = lambda dtype: 127 if dtype in (jnp.int8, jnp.uint8) else np.nan  # a byte of 127 is NaN in fp8
    pool = jax.tree.map(lambda leaf: np.full(leaf.shape, bad(leaf.dtype), np.float32).astype(leaf.dtype), spec)
    table, ids = np.zeros((len(lens), max(pages)), np.int32), rng.permutation(sum(pages) + 2)
    random = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32), bf16)
    for s, (before, _) in enumerate(lens):
        table[s, : pages[s]], ids = ids[: pages[s]], ids[pages[s] :]
        at, pad = np.arange(before), ((0, 0), (0, 0), (0, layout.head_dim - H))
        k, v = (jnp.pad(random(before, K, H), pad) for _ in range(2))
        rows = layout.rows(k, v, values_of(spec).dtype)
        for leaf, new in zip(jax.tree.leaves(pool), jax.tree.leaves(rows), strict=True):
            leaf[0, table[s, at // page_size], :, at % page_size] = np.asarray(new)
    T = sum(now for _, now in lens) + 3  # the last ones are padding
    starts = np.cumsum([0, *(now for _, now in lens)], dtype=np.int32)
    kv_lens = np.array([sum(each) for each in lens], np.int32)
    q, k, v = random(T, K * G, H), random(T, K, H), random(T, K, H)
    return AttentionStep(q, k, v, jax.tree.map(jnp.asarray, pool), table, kv_lens, starts, np.int32(len(lens)), lens)


def options_of(shape: AttentionShape) -> dict[str, Any]:
    # Scores of four sigma: a row attends to few positions, so that a single wrong one shows.
    return {"scale": 4 * shape.H**-0.5, "window": shape.window, "soft_cap": shape.soft_cap}


@partial(jax.jit, static_argnames=("scale", "window", "soft_cap"))
def _reference(pool, q, k, v, *step, **options):
    return paged_attention(q, k, v, pool, 0, *step, **options, implementation="reference")


def attention_truth(shape: AttentionShape, step: AttentionStep) -> tuple[Any, np.ndarray]:
    """The pool and the outputs in float32, a few query tokens at a time."""
    pool, out = step.pool, np.zeros(step.q.shape, np.float32)
    longest = max((sum(each) for each in step.lens if each[1] > 1), default=0)
    few = max(-(-longest // shape.page_size), 1)  # pages of chunks; decodes have more, and a program of their own
    for s, (before, now) in enumerate(step.lens):
        T, M = (1, step.page_table.shape[1]) if now == 1 else (CHUNK, few)
        for begin in range(0, now, T):
            count, first = min(T, now - begin), int(step.query_starts[s]) + begin
            tokens = (jnp.zeros((T, *each.shape[1:])).at[:count].set(each[first : first + count])
                      for each in (step.q, step.k, step.v))  # fmt: skip
            lens, starts = np.int32([before + begin + count]), np.int32([0, count])
            table = step.page_table[s : s + 1, :M]
            pool, own = _reference(pool, *tokens, table, lens, starts, np.int32(1), **options_of(shape))
            out[first : first + count] = np.asarray(own)[:count]
    return pool, out


def check_attention(shape: AttentionShape, lens: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """What served, and how far it was from the reference.

    Raises:
      ValueError: the pool that was written is another.
    """
    step = attention_step(shape, lens)
    arrays = (step.pool, *step[:3], *step[4:8])

    def call(pool, q, k, v, *rest, implementation=None):
        return paged_attention(q, k, v, pool, 0, *rest, **options_of(shape), implementation=implementation)

    row = served(call, arrays, ("tpu", "gpu", "xla"))
    pool, out = jax.jit(call)(*arrays)
    want_pool, want = attention_truth(shape, step)
    compare_pools(pool, want_pool)
    rounds_keys = row["implementation"] == "xla" and jnp.dtype(shape.kv).itemsize == 1
    allowed = ALLOWED_OF_XLA_IN_8_BITS if rounds_keys else ALLOWED
    return row | {"difference": difference(out, want), "allowed": allowed}


def served(call: Callable, arrays: tuple, names: tuple[str, ...]) -> dict[str, Any]:
    """The implementation that serves a call, and why kernels of this platform did not."""
    refused = []
    for name in names:
        try:
            jax.eval_shape(partial(call, implementation=name), *arrays)
        except KernelError as error:
            if PLATFORMS.get(name) == current_device().platform:
                refused.append(str(error))
        else:
            return {"implementation": name, "passed_over": refused}
    raise KernelError("; ".join(refused))


def difference(out: Any, want: Any) -> float:
    """The largest, in units of what is wanted; NaN where either is no number."""
    # In NumPy: the largest of numbers and NaN is NaN there on every platform.
    out, want = np.asarray(out, np.float64), np.asarray(want, np.float64)
    return float(np.max(np.abs(out - want)) / np.sqrt(np.mean(want**2)))


def compare_pools(pool: Any, want: Any) -> None:
    """Floats are equal. Numbers of 8 bits may be a step off, since a scale may be rounded otherwise."""
    for name, (leaf, wanted) in zip(
        ("values", "scales"), zip(jax.tree.leaves(pool), jax.tree.leaves(want), strict=True), strict=False
    ):
        dtype = leaf.dtype
        if dtype == jnp.uint8:  # as a CPU keeps float8_e4m3fn
            leaf, wanted, dtype = (*(jax.lax.bitcast_convert_type(each, fp8) for each in (leaf, wanted)), fp8)
        got, wanted = (np.asarray(each, np.float32) for each in (leaf, wanted))
        step = {"int8": 1.0, "float8_e4m3fn": np.abs(wanted) / 8 + 2**-9}.get(jnp.dtype(dtype).name, 0.0)
        step = np.abs(wanted) * 1e-6 if name == "scales" else step
        wrong = ~((np.isnan(got) & np.isnan(wanted)) | (np.abs(got - wanted) <= step))
        if wrong.any():
            place = tuple(map(int, np.argwhere(wrong)[0]))
            first = f"the first, at {place}, is {got[place]}, not {wanted[place]}"
            raise ValueError(f"{wrong.sum()} {name} of the pool are wrong; {first}")


def random_weight(kind: str, group: int | None, I: int, O: int) -> Any:  # noqa: E741
    """Numbers near 0.02 whose scales, zero points and minima all differ."""
    rng = np.random.default_rng(1)
    scales = lambda *shape: rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if group is None:
        values = rng.standard_normal((I, O), np.float32)
        if kind == "fp8":
            return ChannelWeight(jnp.asarray(values).astype(fp8), jnp.asarray(0.02 * scales(O)))
        return ChannelWeight(
            jnp.asarray(np.clip(np.round(40 * values), -127, 127), int8), jnp.asarray(scales(O) / 2000)
        )
    few = lambda low, high, dtype: jnp.asarray(rng.integers(low, high, (I // group, O)), dtype)
    low, dtype = (0, jnp.uint4) if kind.startswith("uint4") else (-8, jnp.int4)
    values = jnp.asarray(rng.integers(low, low + 16, (I // group, group, O)), jnp.int32).astype(dtype)
    return GroupedWeight(
        values,
        jnp.asarray(scales(I // group, O) / 200, bf16),
        few(-3, 4, int8) if kind.endswith("zeros") else None,
        few(-3, 4, bf16) * bf16(0.01) if kind.endswith("minima") else None,
    )


def check_matmul(kind: str, group: int | None, rows: int, I: int, O: int) -> dict[str, Any]:  # noqa: E741
    """What served, and how far it was from the reference."""
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, I), np.float32), bf16)
    options = {"activations": "int8" if kind == "w8a8" else None}

    def call(x, w, implementation=None):
        return quantized_matmul(x, w, **options, implementation=implementation)

    arrays = x, random_weight(kind, group, I, O)
    row = served(call, arrays, ("mosaic_gpu", "xla"))
    out = jax.jit(call)(*arrays)
    want = quantized_matmul(*arrays, **options, out_dtype=jnp.float32, implementation="reference")
    return row | {"difference": difference(out, want), "allowed": ALLOWED}


def checks(tiny: bool) -> dict[str, tuple[str, Callable[[], dict[str, Any]]]]:
    """Name -> (what it stands for, as "attention int8", and what does it)."""
    found: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {}
    lens = tuple((before // 20, -(-now // 4)) for before, now in STEP) if tiny else STEP
    for shape in ATTENTION[:3] if tiny else ATTENTION:
        small = shape._replace(K=1, window=shape.window and 100) if tiny else shape
        found[small.name] = f"attention {jnp.dtype(shape.kv).name}", partial(check_attention, small, lens)
    I, O = (256, 512) if tiny else (4096, 1024)  # noqa: E741
    for kind, group, rows in MATMULS:
        if not tiny or rows == 1:
            name = f"matmul {kind}{f' groups of {group}' if group else ''}, {rows} rows"
            found[name] = f"matmul {kind}", partial(check_matmul, kind, group, rows, I, O)
    return found


def run_checks(tiny: bool, wanted: Callable[[str], bool], say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """A row for each check of what is wanted, as "attention int8"; one that failed has an "error"."""
    for name, (stands_for, check) in checks(tiny).items():
        if not wanted(stands_for):
            continue
        begun = time.perf_counter()
        row: dict[str, Any] = {"check": name, "of": stands_for}
        try:
            row |= check()
            if not row["difference"] <= row["allowed"]:
                row["error"] = f"off by {row['difference']:.4f}, allowed {row['allowed']}"
        except Exception as error:  # what does not compile or launch is a row that says so
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        row["seconds"] = round(time.perf_counter() - begun, 1)
        by = f"by {row.get('implementation')}" + "".join(f" ({reason})" for reason in row.get("passed_over", ()))
        outcome = f"WRONG: {row['error']}" if "error" in row else f"{row['difference']:.4f}"
        say(f"{name:64s} {outcome}, {by}, {row['seconds']} s")
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares this device's kernels with the float32 reference.")
    parser.add_argument("--only", default="", help="checks of what holds this, as 'attention', 'int8' or 'matmul int4'")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    say = lambda text: print(text, file=sys.stderr if args.json else sys.stdout, flush=True)
    say(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    rows = list(run_checks(args.tiny, lambda what: args.only in what, say))
    if args.json:
        print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}, indent=1))
    failed = sum("error" in row for row in rows)
    say(f"{len(rows)} checks, {failed} failed")
    sys.exit(failed > 0 or not rows)


if __name__ == "__main__":
    main()
