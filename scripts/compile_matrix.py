"""Compiles every kernel for every chip of its kind, over the shapes of real models; needs neither chip nor weights.

    scripts/compilers.sh 0.12.0.1 DIR
    JAXINFER_COMPILERS=DIR python scripts/compile_matrix.py [--sample] [--kernel NAME] [--json]

Each environment of JAXINFER_COMPILERS (folders, joined by colons) compiles everything with its version of jax. The
sample is the fewest combinations found in which every two values that can go together do so once. A combination that
the implementation refuses by name is listed with its reason, as refused; any other that does not compile is a failure,
and the exit status is 1. That a kernel compiles says nothing of its numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TPUS = ("v5e", "v5p", "v6e", "7x")
HOPPERS = ("h100", "h200")
MODELS = ("llama-3-8b", "llama-3-70b", "mistral-7b", "qwen2-7b", "qwen2-72b", "smollm2-135m-instruct")
TENSOR = (1, 2, 4, 8)
ATTENTION: dict[str, tuple] = {
    "model": MODELS,
    "tensor": TENSOR,
    "page_size": (16, 32, 64, 128),
    "kv": ("bfloat16", "int8", "float8_e4m3fn"),
    "tokens": (64, 2048),
    "soft_cap": (None, 50.0),
}
MATMUL: dict[str, tuple] = {
    "model": MODELS,
    "tensor": TENSOR,
    "matrix": ("qkv", "o", "gate_up", "down"),
    "rows": (1, 64, 2048),
}
INT4 = {"weight": ("int4", "int4 zeros", "int4 minima"), "group": (32, 64, 128)}
# XLA's form is one program whatever the heads and pages.
PLAIN = {"model": ("llama-3-8b", "mistral-7b"), "tensor": (1,), "page_size": (32,), "tokens": (64,)}
# Kernel -> (platform, what varies). XLA's forms are compiled where they are what serves.
KERNELS: dict[str, tuple[str, dict[str, tuple]]] = {
    "paged_attention.tpu": ("tpu", {"chip": TPUS, **ATTENTION}),
    "paged_attention.gpu": ("gpu", {"chip": HOPPERS, **ATTENTION}),
    "paged_attention.xla": ("gpu", {"chip": ("a100-80g", "b200"), **ATTENTION, **PLAIN}),
    "quantized_matmul.mosaic_gpu": ("gpu", {"chip": HOPPERS, **MATMUL, **INT4}),
    "quantized_matmul.xla": (
        "tpu",
        {"chip": TPUS, **MATMUL, "rows": (1, 64), "weight": ("int8", "w8a8", *INT4["weight"]), "group": (128,)},
    ),
}


def combinations(factors: dict[str, tuple], sample: bool) -> list[dict[str, Any]]:
    """All combinations that can be, or a sample in which every two values that can go together do."""
    every = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    every = [each for each in every if _possible(each)]
    if not sample:
        return every
    pairs_of = lambda each: {frozenset(pair) for pair in itertools.combinations(each.items(), 2)}
    left = set().union(*map(pairs_of, every))
    chosen = []
    # Greedy, over a tenth of the combinations at a time: quick, and within a few of the fewest.
    while left:
        best = max(every[len(chosen) % 7 :: 7], key=lambda each: len(pairs_of(each) & left))
        if not pairs_of(best) & left:
            best = max(every, key=lambda each: len(pairs_of(each) & left))
        chosen.append(best)
        left -= pairs_of(best)
    return chosen


def _possible(each: dict[str, Any]) -> bool:
    """SmolLM2 has 9 heads, and small models split in eight leave less than a group."""
    tensor = each["tensor"]
    if each["model"].startswith("smollm2"):
        return tensor == 1
    return tensor <= 4 or not each["model"].startswith("qwen2-7b")  # of 28 heads


def _compile(kernel: str, each: dict[str, Any]) -> None:
    from sharding.compile import compile_for

    op, implementation = kernel.split(".")
    function, args, donated = (_attention if op == "paged_attention" else _matmul)(implementation, each)
    compile_for(each["chip"], function, *args, donate_argnums=donated)


def _attention(implementation: str, each: dict[str, Any]) -> tuple:
    import jax
    import jax.numpy as jnp

    from jaxinfer.models.cards import CARDS
    from pallas_kernels.dispatch import device_of
    from pallas_kernels.paged_attention import paged_attention, pool_spec
    from sharding.hardware import described_devices

    model, S, M, T = CARDS[each["model"]], 64, 32, each["tokens"]
    N, K, H = model.num_heads // each["tensor"], max(model.num_kv_heads // each["tensor"], 1), model.head_dim
    device = device_of(described_devices(each["chip"])[0])
    pool = pool_spec(2, 257, each["page_size"], K, H, each["kv"], device)
    spec = jax.ShapeDtypeStruct
    q, kv = spec((T, N, H), jnp.bfloat16), spec((T, K, H), jnp.bfloat16)
    ints = [spec(shape, jnp.int32) for shape in ((S, M), (S,), (S + 1,), ())]

    def layers(pool, q, k, v, *step):
        options = {"window": model.layers[0].window, "soft_cap": each["soft_cap"], "implementation": implementation}
        for layer in range(2):
            pool, q = paged_attention(q, k, v, pool, layer, *step, scale=H**-0.5, **options)
        return pool, q

    return layers, (pool, q, kv, kv, *ints), 0


def _matmul(implementation: str, each: dict[str, Any]) -> tuple:
    from functools import partial

    import jax
    import jax.numpy as jnp

    from jaxinfer.models.cards import CARDS
    from pallas_kernels.quantized_matmul import GroupedWeight, Int8Weight, quantized_matmul

    model, tensor = CARDS[each["model"]], each["tensor"]
    D, F, H = model.hidden_size, model.intermediate_size, model.head_dim
    heads, kv_heads = model.num_heads // tensor, max(model.num_kv_heads // tensor, 1)
    F = -(-F // tensor)
    inputs, outputs = {
        "qkv": (D, (heads + 2 * kv_heads) * H),
        "o": (heads * H, D),
        "gate_up": (D, 2 * F),
        "down": (F, D),
    }[each["matrix"]]
    spec = jax.ShapeDtypeStruct
    kind, groups = each["weight"], -(-inputs // each["group"])
    inputs = groups * each["group"]  # padded to whole groups
    if kind in ("int8", "w8a8"):
        w: Any = Int8Weight(spec((inputs, outputs), jnp.int8), spec((outputs,), jnp.float32))
    else:
        by_group = lambda dtype: spec((groups, outputs), dtype)
        w = GroupedWeight(
            spec((groups, each["group"], outputs), jnp.uint4 if kind == "int4 zeros" else jnp.int4),
            by_group(jnp.bfloat16),
            by_group(jnp.int8) if kind == "int4 zeros" else None,
            by_group(jnp.bfloat16) if kind == "int4 minima" else None,
        )
    activations = "int8" if kind == "w8a8" else None
    function = partial(quantized_matmul, activations=activations, implementation=implementation)
    return lambda x, w: function(x, w), (spec((each["rows"], inputs), jnp.bfloat16), w), ()


def worker(platform: str, kernels: list[str], sample: bool) -> None:
    """Compiles what is for one platform and prints a row of JSON for each."""
    import jax

    from pallas_kernels.dispatch import KernelError

    for kernel in kernels:
        of, factors = KERNELS[kernel]
        for each in combinations(factors, sample) if of == platform else ():
            row = {"kernel": kernel, "chip": each["chip"], "jax": jax.__version__, "ok": True, "reason": None}
            row |= {"refused": False, "shape": {name: value for name, value in each.items() if name != "chip"}}
            begin = time.perf_counter()
            try:
                _compile(kernel, each)
            except KernelError as error:
                row |= {"ok": False, "refused": True, "reason": str(error)}
            except Exception as error:  # any other is a row that says so
                row |= {"ok": False, "reason": f"{type(error).__name__}: {error}"[:500]}
            print(json.dumps(row | {"seconds": round(time.perf_counter() - begin, 2)}), flush=True)


def rows_of(environment: Path, platform: str, kernels: list[str], sample: bool) -> Iterator[dict[str, Any]]:
    """Rows as an environment's worker gives them; one that dies is a row as well."""
    command = [
        environment / "bin" / "python",
        __file__,
        "--worker",
        platform,
        *(f"--kernel={name}" for name in kernels),
    ]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(
        [*command, *(["--sample"] if sample else [])],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=variables,
    ) as process:
        assert process.stdout is not None
        yield from map(json.loads, process.stdout)
    if process.returncode:
        reason = f"the worker ended with status {process.returncode}"
        yield {"kernel": ",".join(kernels), "chip": platform, "jax": environment.name, "ok": False, "refused": False,
               "reason": reason, "shape": {}}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles every kernel for chips that are not here.")
    parser.add_argument("--sample", action="store_true", help="every two values together once, not all combinations")
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only this one; may be repeated")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=("tpu", "gpu"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    kernels = args.kernel or list(KERNELS)
    if args.worker:
        worker(args.worker, kernels, args.sample)
        return
    environments = [Path(each) for each in os.environ.get("JAXINFER_COMPILERS", "").split(os.pathsep) if each]
    if not environments:
        parser.error("JAXINFER_COMPILERS names no environment with compilers; scripts/compilers.sh makes one")
    rows: list[dict[str, Any]] = []

    def collect(environment: Path, platform: str) -> None:
        for row in rows_of(environment, platform, [k for k in kernels if KERNELS[k][0] == platform], args.sample):
            rows.append(row)
            what = f"{row['kernel']} on {row['chip']}, jax {row['jax']}, {row['shape']}"
            if not args.json and not row["ok"]:
                print(f"{'refused' if row['refused'] else 'FAILED'}: {what}: {row['reason']}", flush=True)
            elif not args.json and len(rows) % 20 == 0:
                print(f"{len(rows)} compiled, last {what}", flush=True)

    platforms = {KERNELS[kernel][0] for kernel in kernels}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for future in [threads.submit(collect, *each) for each in itertools.product(environments, platforms)]:
            future.result()
    failed = sum(not row["ok"] and not row["refused"] for row in rows)
    if args.json:
        print(json.dumps({"rows": rows}, indent=1))
    else:
        refused = sum(row["refused"] for row in rows)
        print(f"{len(rows)} combinations: {len(rows) - refused - failed} compiled, {refused} refused, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
