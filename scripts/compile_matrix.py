"""Compiles every kernel for every chip of its kind, over the shapes of real models; needs neither chip nor weights.

    scripts/compilers.sh 0.12.0.1 DIR
    JAXINFER_COMPILERS=DIR python scripts/compile_matrix.py [--sample] [--kernel NAME] [--part 1/3] [--json]

Each environment of JAXINFER_COMPILERS (folders, joined by colons) is a version of jax, and one of the things that vary.
The whole is every combination of what a kernel's code depends on; of the rest, each combination takes one in turn
(`Kernel.in_turn`). The sample is the fewest combinations found in which every two values that can go together do so
once. Combinations that make the same program share one compilation, and their rows say so (`same_as`). What the
implementation refuses by name is listed with its reason, as refused; any other that does not compile is a failure, and
the exit status is 1. That a kernel compiles says nothing of its numbers.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TPUS = ("v5e", "v5p", "v6e", "7x")
HOPPERS = ("h100", "h200")
NO_KERNEL = ("a100-80g", "b200")
MODELS = ("llama-3-8b", "llama-3-70b", "mistral-7b", "qwen2-7b", "qwen2-72b", "smollm2-135m-instruct")
TENSOR = (1, 2, 4, 8)
ATTENTION: dict[str, tuple] = {
    "model": tuple(name for name in MODELS if name != "qwen2-72b"),  # its heads are llama-3-70b's
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
INT4 = {"weight": ("int4", "int4 zeros", "int4 minima"), "group": (16, 32, 64, 128)}
XLA_MATMUL = {
    **MATMUL,
    "model": tuple(name for name in MODELS if name != "mistral-7b"),  # its matrices are llama-3-8b's
    "weight": ("int8", "w8a8", "fp8", "fp8 groups", *INT4["weight"]),
}
# XLA's form is one program whatever the heads and pages.
PLAIN = {"model": ("llama-3-8b", "mistral-7b"), "tensor": (1,), "page_size": (32,), "tokens": (64,)}
SLOW = {"model": ("llama-3-8b",), "kv": ("bfloat16", "int8"), "soft_cap": (None,)}  # each takes ten seconds


class Kernel(NamedTuple):
    """What is compiled of an implementation.

    Attributes:
      factors: what varies.
      in_turn: factors that change a constant or an elementwise function, and not what a kernel needs of a chip: the
        whole takes one of their combinations in turn, so that each meets every value of the other factors.
      pairs: the whole is no more than the sample. So it is for XLA's forms: no code of ours meets the chip there.
    """

    platform: str
    factors: dict[str, tuple]
    in_turn: tuple[str, ...] = ()
    pairs: bool = False


# XLA's forms are compiled where they are what serves. Tokens of a step size a grid and arrays in main memory, and only
# a step shorter than a tile has smaller ones. H100 and H200 differ in memory alone: for a kernel they are one chip.
KERNELS: dict[str, Kernel] = {
    "paged_attention.tpu": Kernel(
        # 64 sequences of 4096 pages are more than scalar memory lists.
        "tpu",
        {"chip": TPUS, **ATTENTION, "pages_per_seq": (32, 4096)},
        in_turn=("tokens", "soft_cap", "pages_per_seq"),
    ),
    "paged_attention.gpu": Kernel("gpu", {"chip": HOPPERS, **ATTENTION}, in_turn=("chip", "tokens", "soft_cap")),
    "paged_attention.xla.gpu": Kernel("gpu", {"chip": NO_KERNEL, **ATTENTION, **PLAIN}, pairs=True),
    "paged_attention.xla.tpu": Kernel("tpu", {"chip": ("v4",), **ATTENTION, **PLAIN, **SLOW}, pairs=True),
    "quantized_matmul.mosaic_gpu": Kernel("gpu", {"chip": HOPPERS, **MATMUL, **INT4}, in_turn=("chip",)),
    # On Hopper XLA serves 4 bits as well, where outputs are no multiple of the kernel's.
    "quantized_matmul.xla.gpu": Kernel(
        "gpu",
        {"chip": ("a100-40g", *NO_KERNEL, "h200"), **XLA_MATMUL, "rows": (1, 16, 2048), "group": (32, 128)},
        pairs=True,
    ),
    "quantized_matmul.xla.tpu": Kernel(
        "tpu",
        {"chip": ("v4", *TPUS), **XLA_MATMUL, "rows": (1, 64), "group": (128,)},
        pairs=True,
    ),
}


def combinations(kernel: Kernel, versions: int, sample: bool) -> list[dict[str, Any]]:
    """What to compile; "jax" is the number of the version."""
    factors = {"jax": tuple(range(versions)), **kernel.factors}
    every = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    every = [each for each in every if _possible(each)]
    if sample or kernel.pairs:
        return _pairs(every)
    rest = list(itertools.product(*(factors[name] for name in kernel.in_turn)))

    def its_turn(each: dict[str, Any]) -> bool:
        turn = sum(factors[name].index(value) for name, value in each.items() if name not in kernel.in_turn)
        return tuple(each[name] for name in kernel.in_turn) == rest[turn % len(rest)]

    return [each for each in every if its_turn(each)]


def pairs_of(each: dict[str, Any]) -> set[frozenset]:
    return {frozenset(pair) for pair in itertools.combinations(each.items(), 2)}


def _pairs(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A sample in which every two values that can go together do."""
    left = set().union(*map(pairs_of, every))
    chosen = []
    # Greedy, over a part of the combinations at a time: quick, and within a few of the fewest.
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


class Program(NamedTuple):
    """What `compile_for` takes; `options` are all that `function` has in it."""

    function: Callable
    args: tuple
    donated: Any
    options: tuple

    def key(self, chip: str) -> tuple:
        """Equal for two programs that are the same."""
        import jax

        leaves, tree = jax.tree.flatten(self.args)
        return chip, self.options, tree, *((leaf.shape, leaf.dtype) for leaf in leaves)


def program_of(kernel: str, each: dict[str, Any]) -> Program:
    op, implementation, *_ = kernel.split(".")
    return (_attention if op == "paged_attention" else _matmul)(implementation, each)


def _attention(implementation: str, each: dict[str, Any]) -> Program:
    import jax
    import jax.numpy as jnp

    from jaxinfer.models.cards import CARDS
    from pallas_kernels.dispatch import device_of
    from pallas_kernels.paged_attention import paged_attention, pool_spec
    from sharding.hardware import described_devices

    model, S, M, T = CARDS[each["model"]], 64, each.get("pages_per_seq", 32), each["tokens"]
    N, K, H = model.num_heads // each["tensor"], max(model.num_kv_heads // each["tensor"], 1), model.head_dim
    device = device_of(described_devices(each["chip"])[0])
    pool = pool_spec(1, 257, each["page_size"], K, H, each["kv"], device)
    spec = jax.ShapeDtypeStruct
    q, kv = spec((T, N, H), jnp.bfloat16), spec((T, K, H), jnp.bfloat16)
    ints = [spec(shape, jnp.int32) for shape in ((S, M), (S,), (S + 1,), ())]

    options = {"scale": H**-0.5, "window": model.layers[0].window, "soft_cap": each["soft_cap"]}
    options |= {"implementation": implementation}
    # One layer: a second one is the same kernels again.
    function = lambda pool, q, k, v, *step: paged_attention(q, k, v, pool, 0, *step, **options)
    return Program(function, (pool, q, kv, kv, *ints), 0, tuple(options.items()))


def _matmul(implementation: str, each: dict[str, Any]) -> Program:
    import jax
    import jax.numpy as jnp

    from jaxinfer.models.cards import CARDS
    from pallas_kernels.quantized_matmul import ChannelWeight, GroupedWeight, quantized_matmul

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
    fp8 = jnp.float8_e4m3fn
    values = {"int8": jnp.int8, "w8a8": jnp.int8, "fp8": fp8, "fp8 groups": fp8, "int4 minima": jnp.uint4}.get(
        kind, jnp.int4
    )
    if kind in ("int8", "w8a8", "fp8"):
        w: Any = ChannelWeight(spec((inputs, outputs), values), spec((outputs,), jnp.float32))
    else:
        by_group = lambda dtype: spec((groups, outputs), dtype)
        w = GroupedWeight(
            spec((groups, each["group"], outputs), values),
            by_group(jnp.bfloat16),
            by_group(jnp.int8) if kind == "int4 zeros" else None,
            by_group(jnp.bfloat16) if kind == "int4 minima" else None,
        )
    options = {"activations": "int8" if kind == "w8a8" else None, "implementation": implementation}
    function = lambda x, w: quantized_matmul(x, w, **options)
    return Program(function, (spec((each["rows"], inputs), jnp.bfloat16), w), (), tuple(options.items()))


class Share(NamedTuple):
    """The share of a worker in the work, as text: "gpu 0 2 1 3" is the GPUs', version 0 of 2, part 1 of 3."""

    platform: str
    version: int
    versions: int
    part: int
    parts: int

    @classmethod
    def of(cls, text: str) -> Share:
        platform, *numbers = text.split()
        return cls(platform, *map(int, numbers))


def worker(share: Share, kernels: list[str], sample: bool) -> None:
    """Compiles its share and prints a row of JSON for each combination."""
    import jax

    for name in kernels:
        programs: dict[tuple, list[tuple[dict[str, Any], Program]]] = {}
        for each in combinations(KERNELS[name], share.versions, sample):
            if each["jax"] == share.version:
                program = program_of(name, each)
                programs.setdefault(program.key(each["chip"]), []).append((each, program))
        for equal in list(programs.values())[share.part - 1 :: share.parts]:
            begin, same_as = time.perf_counter(), None
            outcome = _outcome(equal[0][0]["chip"], equal[0][1])
            for each, _ in equal:
                shape = {factor: value for factor, value in each.items() if factor not in ("chip", "jax")}
                row = {"kernel": name, "chip": each["chip"], "jax": jax.__version__, "shape": shape, **outcome}
                seconds = round(time.perf_counter() - begin, 2) if same_as is None else 0
                print(json.dumps(row | {"seconds": seconds, "same_as": same_as}), flush=True)
                same_as = same_as or shape


def _outcome(chip: str, program: Program) -> dict[str, Any]:
    from pallas_kernels.dispatch import KernelError
    from sharding.compile import compile_for

    try:
        compile_for(chip, program.function, *program.args, donate_argnums=program.donated)
    except KernelError as error:
        return {"ok": False, "refused": True, "reason": str(error)}
    except Exception as error:  # any other is a row that says so
        return {"ok": False, "refused": False, "reason": f"{type(error).__name__}: {error}"[:500]}
    return {"ok": True, "refused": False, "reason": None}


def rows_of(environment: Path, share: Share, kernels: list[str], sample: bool) -> Iterator[dict[str, Any]]:
    """Rows as an environment's worker gives them; one that dies is a row as well."""
    command = [environment / "bin" / "python", __file__, "--worker", " ".join(map(str, share))]
    command += [f"--kernel={name}" for name in kernels]
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
        yield {"kernel": ",".join(kernels), "chip": share.platform, "jax": environment.name, "shape": {}, "ok": False,
               "refused": False, "reason": reason, "seconds": 0, "same_as": None}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles every kernel for chips that are not here.")
    parser.add_argument("--sample", action="store_true", help="every two values together once, not all combinations")
    parser.add_argument("--kernel", action="append", choices=KERNELS, help="only this one; may be repeated")
    parser.add_argument("--part", default="1/1", metavar="I/N", help="the I-th of N parts of the programs")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    kernels = args.kernel or list(KERNELS)
    if args.worker:
        worker(Share.of(args.worker), kernels, args.sample)
        return
    part, _, parts = args.part.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        parser.error(f"--part is {args.part}; as 2/3, from 1/3 to 3/3")
    environments = [Path(each) for each in os.environ.get("JAXINFER_COMPILERS", "").split(os.pathsep) if each]
    if not environments:
        parser.error("JAXINFER_COMPILERS names no environment with compilers; scripts/compilers.sh makes one")
    rows: list[dict[str, Any]] = []
    one_at_a_time = threading.Lock()

    def collect(version: int, platform: str) -> None:
        share = Share(platform, version, len(environments), int(part), int(parts))
        own = [name for name in kernels if KERNELS[name].platform == platform]
        for row in rows_of(environments[version], share, own, args.sample):
            with one_at_a_time:
                rows.append(row)
                report(row)

    def report(row: dict[str, Any]) -> None:
        what = f"{row['kernel']} on {row['chip']}, jax {row['jax']}, {row['shape']}"
        if args.json:  # as they come: a run of hours that is cut off lacks the closing bracket alone
            print(("" if len(rows) == 1 else ",\n") + json.dumps(row), end="", flush=True)
        elif not row["ok"]:
            print(f"{'refused' if row['refused'] else 'FAILED'}: {what}: {row['reason']}", flush=True)
        elif len(rows) % 20 == 0:
            print(f"{len(rows)} compiled, last {what}", flush=True)

    if args.json:
        print('{"rows": [')
    platforms = {KERNELS[name].platform for name in kernels}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for future in [
            threads.submit(collect, *each) for each in itertools.product(range(len(environments)), platforms)
        ]:
            future.result()
    failed = sum(not row["ok"] and not row["refused"] for row in rows)
    if args.json:
        print("\n]}")
    else:
        refused, shared = (sum(bool(row[name]) for row in rows) for name in ("refused", "same_as"))
        print(f"{len(rows)} combinations: {len(rows) - refused - failed} compiled, {refused} refused, {failed} failed; "
              f"{shared} of them are the same program as another")  # fmt: skip
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
