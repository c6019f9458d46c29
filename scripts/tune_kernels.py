"""Measures block sizes of the kernels on this device and writes them where the kernels look for them.

    python scripts/tune_kernels.py [--op NAME] [--minutes 10] [--dry-run]

For each shape of the models' layers every candidate is compiled and timed; the fastest goes to
`pallas_kernels/<op>/tuned/<device>.json`, which replaces what an earlier run measured there. A candidate that does not
compile or fit is passed over. When the minutes are up the shapes measured so far are written. Only devices with a
kernel of their own have anything to tune: TPUs their attention, Hopper its attention and its 4-bit matmul.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from bench_kernels import CACHE_BYTES, Case, attention_step, random, seconds_of, weight

from jaxinfer.config import ModelConfig
from jaxinfer.models.cards import CARDS
from pallas_kernels.dispatch import Device, current_device
from pallas_kernels.paged_attention import gpu, pool_spec, tpu
from pallas_kernels.paged_attention.layout import PageLayout, values_of
from pallas_kernels.quantized_matmul import gpu as matmul_gpu
from pallas_kernels.tuning import tuned_file

type Lens = tuple[tuple[int, int], ...]

TENSOR = (1, 2, 4, 8)
KV_DTYPES = (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)
PAGE_SIZE = 32  # what engines have by default
# Half a step's work in decodes and half in a prefill, so that each block size has its part: (tokens before, now).
LENS = ((4095, 1),) * 32 + ((0, 1024),)


class Candidate(NamedTuple):
    """A block for a shape, and what times it."""

    shape: dict[str, Any]
    block: dict[str, int]
    case: Case


def attention_candidate(
    kernel: Any, blocks: Any, shape: dict[str, Any], heads: tuple[int, int, int], kv: Any, lens: Lens
) -> Candidate:
    """A step through two layers of a kernel's module."""
    N, K, H = heads

    def build(calls: int):
        q, k, v, pool, step = attention_step(N, K, H, list(lens), kv, calls, PAGE_SIZE)
        layout = PageLayout.of(pool, K, H)

        def program(pool, q, k, v, step):
            rows = layout.rows(k, v, values_of(pool).dtype)
            options = {"scale": H**-0.5, "window": None, "soft_cap": None, "blocks": blocks}
            for layer in range(calls):
                pool, q = kernel.paged_attention(q, rows, pool, layout, layer, *step, **options)
            return pool, q

        return jax.jit(program, donate_argnums=0), (pool, q, k, v, step)

    return Candidate(shape, blocks._asdict(), Case("", build, 0, 0, CACHE_BYTES / 2, donates=True))


def heads_of(cards: Iterable[ModelConfig]) -> list[tuple[int, int, int]]:
    """Query heads, KV heads and head dims of shards."""
    return sorted(
        {(c.num_heads // t, c.num_kv_heads // t, c.head_dim) for c in cards for t in TENSOR if c.num_kv_heads % t == 0}
    )


def attention_on_tpu(cards: Iterable[ModelConfig], lens: Lens) -> Iterator[Candidate]:
    for heads, kv in itertools.product(heads_of(cards), KV_DTYPES):
        N, K, H = heads
        shape = tpu.shape_key(pool_spec(1, 1, PAGE_SIZE, K, H, kv, current_device()), N // K)
        for sizes in itertools.product((128, 256, 512, 1024), (128, 256, 512), (32, 64, 128)):
            yield attention_candidate(tpu, tpu.Blocks(*sizes), shape, heads, kv, lens)


def attention_on_hopper(cards: Iterable[ModelConfig], lens: Lens) -> Iterator[Candidate]:
    most_heads = {(N // K, H): (N, K, H) for N, K, H in heads_of(cards)}  # how many KV heads there are changes nothing
    for heads, kv in itertools.product(most_heads.values(), KV_DTYPES):
        N, K, H = heads
        pool = pool_spec(1, 1, PAGE_SIZE, K, H, kv, current_device())
        for sizes in itertools.product((64, 128), (64, 128), (1, 2)):
            yield attention_candidate(gpu, gpu.Blocks(*sizes), gpu.shape_key(pool, N // K), heads, kv, lens)


def matmul_on_hopper(cards: Iterable[ModelConfig]) -> Iterator[Candidate]:
    shapes = set()
    for card, tensor in itertools.product(cards, TENSOR):
        D, F, H = card.hidden_size, card.intermediate_size // tensor, card.head_dim
        heads = card.num_heads // tensor * H
        shapes |= {(D, heads + 2 * max(card.num_kv_heads // tensor, 1) * H), (heads, D), (D, 2 * F), (F, D)}
    for (inputs, outputs), rows in itertools.product(sorted(shapes), (1, 16, 64)):
        if inputs % 128 or outputs % matmul_gpu.TILE_OUT:
            continue
        shape = {"rows": rows, "in": inputs, "out": outputs, "group": 128}
        splits = [n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= inputs // matmul_gpu.BLOCK_IN]
        for warpgroups, split, stages in itertools.product((1, 2), splits, (2, 3, 4, 6)):
            block = matmul_gpu.Block(-(-rows // 8) * 8, warpgroups, split, stages)

            def build(calls: int, rows=rows, inputs=inputs, outputs=outputs, block=block):
                multiply = partial(matmul_gpu.quantized_matmul, out_dtype=jnp.dtype(jnp.bfloat16), block=block)
                ws = [weight("int4", inputs, outputs, i) for i in range(calls)]
                return jax.jit(lambda x, ws: [multiply(x, w) for w in ws]), (random(0, (rows, inputs)), ws)

            yield Candidate(shape, block._asdict(), Case("", build, 0, 0, inputs * outputs / 2))


def candidates(
    op: str, device: Device, cards: Iterable[ModelConfig] = CARDS.values(), lens: Lens = LENS
) -> Iterator[Candidate] | None:
    """In order of shapes; None where there is nothing to choose."""
    if op == "paged_attention" and device.platform == "tpu":
        return attention_on_tpu(cards, lens)
    if op == "paged_attention" and gpu.HOPPER.search(device.kind):
        return attention_on_hopper(cards, lens)
    if op == "quantized_matmul" and any(name in device.kind for name in ("H100", "H200")):
        return matmul_on_hopper(cards)
    return None


def tune(found: Iterable[Candidate], until: float) -> list[dict[str, Any]]:
    """The fastest block of each shape, until the time is up."""
    entries = []
    for shape, group in itertools.groupby(found, key=lambda candidate: candidate.shape):
        best: dict[str, Any] | None = None
        for candidate in group:
            if time.monotonic() > until:
                return entries
            try:
                us = seconds_of(candidate.case) * 1e6
            except Exception as error:  # does not compile, or does not fit
                print(f"  {candidate.block}: {type(error).__name__}: {str(error)[:80]}")
                continue
            if best is None or us < best["us"]:
                best = {"shape": shape, "block": candidate.block, "us": round(us, 2)}
        if best is not None:
            entries.append(best)
            print(f"{shape}: {best['block']}, {best['us']} us", flush=True)
    return entries


def write(op: str, device: Device, entries: list[dict[str, Any]]) -> Path:
    """Puts the file where the kernels look for it."""
    measured = {"device": device.kind, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
    path = tuned_file(op, device.kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(measured | {"entries": entries}, indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures block sizes on this device.")
    parser.add_argument("--op", choices=("paged_attention", "quantized_matmul"))
    parser.add_argument("--minutes", type=float, default=10, help="for each op")
    parser.add_argument("--dry-run", action="store_true", help="print what was measured instead of writing it")
    args = parser.parse_args()
    device, tuned = current_device(), 0
    for op in (args.op,) if args.op else ("paged_attention", "quantized_matmul"):
        found = candidates(op, device)
        if found is None:
            print(f"{op}: nothing to tune on {device.kind}")
            continue
        entries = tune(found, time.monotonic() + 60 * args.minutes)
        tuned += len(entries)
        if args.dry_run:
            print(json.dumps(entries, indent=1))
        elif entries:
            print(f"wrote {write(op, device, entries)}")
    sys.exit(0 if tuned else 1)


if __name__ == "__main__":
    main()
