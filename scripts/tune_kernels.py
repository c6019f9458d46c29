"""Measures block sizes of the kernels on this device and writes them where the kernels look for them.

    python scripts/tune_kernels.py [--op NAME] [--minutes 10] [--dry-run]

For each shape of the models' layers every candidate is compiled and timed; the fastest goes to
`pallas_kernels/<op>/tuned/<device>.json`, which replaces what an earlier run measured there. A candidate that does not
compile or fit is passed over. When the minutes are up the shapes measured so far are written. Only devices with a
kernel of their own have anything to tune: TPUs their attention, Hopper its 4-bit matmul.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from bench_kernels import Case, attention_step, random, seconds_of, weight

from jaxinfer.models.cards import CARDS
from pallas_kernels.dispatch import Device, current_device
from pallas_kernels.paged_attention.layout import PageLayout
from pallas_kernels.tuning import tuned_file

TENSOR = (1, 2, 4, 8)


class Candidate(NamedTuple):
    """A block for a shape, and what times it."""

    shape: dict[str, Any]
    block: dict[str, int]
    case: Case


def attention_on_tpu() -> Iterator[Candidate]:
    """Half of a step's sequences decode at 4,096 tokens, one prefills: each block size has its part."""
    from pallas_kernels.paged_attention import tpu

    heads = {(c.num_heads // t, c.num_kv_heads // t, c.head_dim) for c in CARDS.values() for t in TENSOR
             if c.num_kv_heads % t == 0}  # fmt: skip
    for (N, K, H), kv in itertools.product(sorted(heads), (jnp.bfloat16, jnp.int8)):
        lens = [(4095, 1)] * 32 + [(0, 1024)]
        q, k, v, pool, step = attention_step(N, K, H, lens, kv, 2)
        layout = PageLayout.of(pool, K, H)
        for decode, prefill, tile in itertools.product((128, 256, 512, 1024), (128, 256, 512), (32, 64, 128)):
            blocks = tpu.Blocks(decode, prefill, tile)

            def build(calls: int, call=(q, k, v, pool, step), layout=layout, blocks=blocks):
                q, k, v, pool, step = call
                rows = layout.rows(k, v, jax.tree.leaves(pool)[0].dtype)

                def program(q, rows, pool, step):
                    for layer in range(2):
                        pool, q = tpu.paged_attention(
                            q, rows, pool, layout, layer, *step, scale=0.1, window=None, soft_cap=None, blocks=blocks
                        )
                    return q

                return jax.jit(program), (q, rows, pool, step)

            case = Case("", build, 0, 0, 1 << 30)
            yield Candidate(tpu.shape_key(pool, N // K), blocks._asdict(), case)


def matmul_on_hopper() -> Iterator[Candidate]:
    from pallas_kernels.quantized_matmul import gpu

    shapes = set()
    for card, tensor in itertools.product(CARDS.values(), TENSOR):
        D, F, H = card.hidden_size, card.intermediate_size // tensor, card.head_dim
        heads = card.num_heads // tensor * H
        shapes |= {(D, heads + 2 * max(card.num_kv_heads // tensor, 1) * H), (heads, D), (D, 2 * F), (F, D)}
    for (inputs, outputs), rows in itertools.product(sorted(shapes), (1, 16, 64)):
        if inputs % 128 or outputs % gpu.TILE_OUT:
            continue
        shape = {"rows": rows, "in": inputs, "out": outputs, "group": 128}
        splits = [n for n in (1, 2, 3, 4, 6, 8, 12, 16) if n <= inputs // gpu.BLOCK_IN]
        for warpgroups, split, stages in itertools.product((1, 2), splits, (2, 3, 4, 6)):
            block = gpu.Block(-(-rows // 8) * 8, warpgroups, split, stages)

            def build(calls: int, rows=rows, inputs=inputs, outputs=outputs, block=block):
                multiply = lambda x, w: gpu.quantized_matmul(x, w, out_dtype=jnp.dtype(jnp.bfloat16), block=block)
                ws = [weight("int4", inputs, outputs, i) for i in range(calls)]
                return jax.jit(lambda x, ws: [multiply(x, w) for w in ws]), (random(0, (rows, inputs)), ws)

            yield Candidate(shape, block._asdict(), Case("", build, 0, 0, inputs * outputs / 2))


def candidates(op: str, device: Device) -> Callable[[], Iterator[Candidate]] | None:
    if op == "paged_attention" and device.platform == "tpu":
        return attention_on_tpu
    if op == "quantized_matmul" and any(name in device.kind for name in ("H100", "H200")):
        return matmul_on_hopper
    return None


def tune(make: Callable[[], Iterator[Candidate]], until: float) -> list[dict[str, Any]]:
    """The fastest block of each shape, until the time is up."""
    entries = []
    for shape, group in itertools.groupby(make(), key=lambda candidate: candidate.shape):
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


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures block sizes on this device.")
    parser.add_argument("--op", choices=("paged_attention", "quantized_matmul"))
    parser.add_argument("--minutes", type=float, default=10, help="for each op")
    parser.add_argument("--dry-run", action="store_true", help="print the file instead of writing it")
    args = parser.parse_args()
    device, tuned = current_device(), 0
    for op in (args.op,) if args.op else ("paged_attention", "quantized_matmul"):
        make = candidates(op, device)
        if make is None:
            print(f"{op}: nothing to tune on {device.kind}")
            continue
        entries = tune(make, time.monotonic() + 60 * args.minutes)
        tuned += len(entries)
        measured = {"device": device.kind, "jax": jax.__version__, "date": datetime.date.today().isoformat()}
        text = json.dumps(measured | {"entries": entries}, indent=1) + "\n"
        if args.dry_run:
            print(text)
        elif entries:
            path = tuned_file(op, device.kind)
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"wrote {path}")
    sys.exit(0 if tuned else 1)


if __name__ == "__main__":
    main()
