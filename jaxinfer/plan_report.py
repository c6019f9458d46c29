"""A plan for people (tables, a picture) and for programs (JSON). GB are 10^9 bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxinfer.errors import InvalidArgumentError, UnsupportedError
from jaxinfer.plan import Plan
from sharding.planner import Memory, Point

_PARTS = {
    "weights": "weights",
    "kv_pool": "KV pool",
    "sampling_state": "sampling state",
    "temporaries": "temporaries",
    "reserve": "reserve",
    "left": "left",
}
_NOT_SEEN = (
    "work on the host, dispatch, and gaps between programs",
    "prompts that are read beside decodes, queues, prefix hits, preemption",
    "clocks under load, other processes' memory, networks between hosts",
)
_NOT_SEEN_OF_GPUS = "cuBLAS and autotuning, with their workspaces: only a GPU that is there has them"


@dataclass(frozen=True)
class Exchanged:
    """Collectives of one program of one stage, and where that is known from: compiled, or assumed."""

    program: str
    stages: tuple[int, ...]
    kind: str
    shape: str
    bytes: int
    count: int
    in_branch: bool
    source: str


def exchanged(plan: Plan) -> list[Exchanged]:
    """What the compiled programs exchange, else what the arithmetic takes for it; and what stages send on."""
    d = plan.deployment
    found = [
        Exchanged(program.name, program.stages, *(c.kind, c.shape, c.bytes, c.count, c.in_branch), "compiled")
        for program in plan.programs
        for c in program.step.collectives
    ]
    for program, tokens in (("decode", d.sequences_per_replica), ("prefill", d.chunk)):
        for number, stage in enumerate(d.stages):
            for e in stage.exchanges if not plan.programs else ():
                size = tokens * e.bytes_per_token
                found.append(Exchanged(program, (number,), e.kind, "", size, e.count, False, "assumed"))
            if size := tokens * stage.sent_bytes:
                found.append(Exchanged(program, (number,), "send", "", size, 1, False, "assumed"))
    return found


def to_json(plan: Plan) -> dict[str, Any]:
    """The first six keys stay; `per_device_bytes` is of the fullest device."""
    d, request = plan.deployment, plan.request
    return {
        "fits": plan.fits,
        "per_device_bytes": _bytes(d.tightest),
        "kv_tokens": d.kv_tokens,
        "max_sequences": d.max_sequences,
        "collectives": [asdict(each) for each in exchanged(plan)],
        "estimate": _estimate(plan),
        "model": request.model,
        "chips": f"{d.chip.name}:{plan.num_devices}",
        "mesh": str(plan.mesh),
        "weights": request.weights,
        "kv": request.kv,
        "context": d.context,
        "concurrency": d.concurrency,
        "stages": [_bytes(memory) for memory in d.memory],
        "programs": [
            {
                "name": p.name,
                "stages": p.stages,
                "tokens": p.num_tokens,
                "temp_bytes": p.step.temp_bytes,
                "kernels": sorted({call.target for call in p.step.custom_calls}),
                "seconds": round(p.step.seconds, 1),
            }
            for p in plan.programs
        ],
        "candidates": list(_candidates(plan)),
        "refusal": plan.refusal,
        "notes": plan.notes,
    }


def _bytes(memory: Memory) -> dict[str, int]:
    return asdict(memory) | {"reserve": memory.reserve, "left": memory.left}


def _estimate(plan: Plan) -> dict[str, Any]:
    d = plan.deployment
    prompt = d.context - 1
    return {
        "method": "roofline: an estimate, nothing was run",
        "prompt_tokens": prompt,
        "ttft_s": d.first_token_seconds(prompt) if d.max_sequences else None,
        "points": [
            {
                "concurrency": point.concurrency,
                "time_per_output_token_s": point.seconds_per_token,
                "tokens_per_s": point.tokens_per_second,
                "bound": point.bound,
            }
            for point in d.curve()
        ],
        "assumptions": asdict(d.assumptions),
        "not_seen": _not_seen(plan),
    }


def _not_seen(plan: Plan) -> list[str]:
    return [*_NOT_SEEN, *([_NOT_SEEN_OF_GPUS] if plan.deployment.chip.platform == "gpu" else [])]


def _candidates(plan: Plan) -> Iterator[dict[str, Any]]:
    """By arithmetic, as they were compared: with temporaries assumed."""
    for each in plan.candidates:
        d = each.deployment
        if d is None:
            yield {"mesh": str(each.mesh), "chosen": False, "refusal": each.refusal}
            continue
        point = d.decode(d.concurrency)
        yield {
            "mesh": str(each.mesh),
            "chosen": each.mesh == plan.mesh,
            "fits": d.fits,
            "left_bytes": d.tightest.left,
            "kv_tokens": d.kv_tokens,
            "max_sequences": d.max_sequences,
            "tokens_per_s": point.tokens_per_second if d.fits else None,
            "time_per_output_token_s": point.seconds_per_token if d.fits else None,
        }


# ---- For people


def answer(plan: Plan) -> str:
    """Whether it fits, and by how much not, in a sentence."""
    d = plan.deployment
    memory, asked = d.tightest, f"{d.concurrency} sequences of {d.context} tokens"
    if plan.refusal:
        return f"no: {d.chip.name}'s compiler refuses {plan.refusal}"
    if d.fits:
        return f"yes: {asked} fit, with {_gb(memory.left)} left on the fullest device"
    over = memory.weights + memory.sampling_state + memory.temporaries + memory.reserve - memory.capacity
    if over > 0:
        return f"no: {_gb(over)} too much on a device before any KV, which for {asked} takes {_gb(memory.kv_pool)} more"
    return f"no: {asked} need {_gb(-memory.left)} more on a device; {d.max_sequences} fit"


def show(plan: Plan, console: Console) -> None:
    """Prints all of it."""
    d, request = plan.deployment, plan.request

    def say(text: str = "", **options: Any) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True, **options)

    say(
        f"{request.model}, {request.weights} weights, {request.kv} KV, on {plan.num_devices} x {d.chip.name} "
        f"({_gb(d.chip.usable_bytes)} each), mesh {plan.mesh}"
    )
    say(answer(plan), style="bold green" if plan.fits else "bold red")
    say()
    console.print(_memory_table(plan))
    say(f"KV pool: {d.kv_tokens} tokens fit, which is {d.max_sequences} sequences of {d.context}")
    if plan.fits and (request.weights, request.kv) == ("bf16", "bf16"):
        say(f"to serve so many: {_serving(plan)}")
    say()
    if found := exchanged(plan):
        console.print(_collectives_table(found))
        say()
    if points := d.curve():
        say(
            f"Estimate (roofline; nothing was run): first token of a {d.context - 1} token prompt after "
            f"{d.first_token_seconds(d.context - 1):.3g} s, alone"
        )
        console.print(_curve_table(points))
        say()
    if len(plan.candidates) > 1:
        console.print(_candidates_table(plan))
        say("Compared by arithmetic: most tokens/s at the concurrency asked for, of those that fit.")
        say()
    for text in (*plan.notes, _assumptions(plan), "not seen by any compiler: " + "; ".join(_not_seen(plan))):
        say(f"- {text}")


def _serving(plan: Plan) -> str:
    """The options of `jaxinfer serve` that give this pool; each is of a replica, and the memory of a device."""
    d = plan.deployment
    sequences = d.max_sequences // d.replicas
    gib = (sequences * d.pages_per_sequence + 1) * max(stage.page_bytes for stage in d.stages) / 2**30
    return (
        f"--mesh {plan.mesh} --max-model-len {d.context} --max-num-seqs {sequences} "
        f"--kv-cache-gib {math.ceil(100 * gib) / 100}"
    )


def _assumptions(plan: Plan) -> str:
    a = plan.deployment.assumptions
    return (
        f"assumed, not measured: {a.bandwidth_reached:.0%} of the memory's bandwidth, {a.compute_reached:.0%} of "
        f"bf16 FLOP/s, {a.links_reached:.0%} of a ring's links and {a.collective_seconds * 1e6:.0f} us a collective; "
        f"reserve: runtime {_gb(a.runtime_bytes)}, collectives {_gb(plan.deployment.tightest.collectives)}, allocator "
        f"{a.allocator_fraction:.0%}; every sequence at its full length, prompts in chunks of {plan.deployment.chunk}"
    )


def _table(title: str, *columns: str) -> Table:
    """The first column is text, the others numbers."""
    table = Table(title=title, title_justify="left", title_style="", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def stage_names(plan: Plan) -> list[tuple[str, Memory]]:
    """Stages whose devices hold the same share a line."""
    seen: dict[Memory, list[str]] = {}
    for number, memory in enumerate(plan.deployment.memory):
        seen.setdefault(memory, []).append(str(number))
    if len(plan.deployment.stages) == 1:
        return [("each device", plan.deployment.memory[0])]
    return [(f"stage {', '.join(numbers)}", memory) for memory, numbers in seen.items()]


def _memory_table(plan: Plan) -> Table:
    named = stage_names(plan)
    table = _table("Memory of a device", "", *(name for name, _ in named))
    for part, label in _PARTS.items():
        table.add_row(label, *(_gb(getattr(memory, part)) for _, memory in named))
    return table


def _collectives_table(found: list[Exchanged]) -> Table:
    table = _table("Collectives of a step, on each device", "program", "kind", "count", "bytes, all", "")
    groups: dict[tuple[Any, ...], list[Exchanged]] = {}
    for each in found:
        groups.setdefault((each.stages, each.program, each.kind, each.in_branch, each.source), []).append(each)
    several = len({each.stages for each in found}) > 1
    for (stages, program, kind, in_branch, source), members in groups.items():
        where = f" (stage {', '.join(map(str, stages))})" if several else ""
        count, size = sum(e.count for e in members), sum(e.count * e.bytes for e in members)
        remark = ", ".join([source, *(["only where taken"] if in_branch else [])])
        table.add_row(program + where, kind, str(count), f"{size:,}", remark)
    return table


def _curve_table(points: tuple[Point, ...]) -> Table:
    table = _table("", "sequences", "ms a token", "tokens/s", "bound by")
    for p in points:
        table.add_row(f"{p.concurrency}", f"{1e3 * p.seconds_per_token:.2f}", f"{p.tokens_per_second:.0f}", p.bound)
    return table


def _candidates_table(plan: Plan) -> Table:
    table = _table("Meshes", "mesh", "fits", "left", "KV tokens", "tokens/s", "ms a token")
    for each in _candidates(plan):
        name = each["mesh"] + (" *" if each["chosen"] else "")
        if "refusal" in each:
            table.add_row(name, "cannot")
            continue
        speed = ["", ""]
        if each["fits"]:
            speed = [f"{each['tokens_per_s']:.0f}", f"{1e3 * each['time_per_output_token_s']:.2f}"]
        fits = "yes" if each["fits"] else "no"
        table.add_row(name, fits, _gb(each["left_bytes"]), f"{each['kv_tokens']}", *speed)
    return table


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if abs(size) < 1e11 else f"{size / 1e9:.1f} GB"


# ---- The picture

_COLOURS = {
    "weights": "#3b6ea8",
    "kv_pool": "#e39b3b",
    "sampling_state": "#8a6bb1",
    "temporaries": "#5aa469",
    "reserve": "#9a9a9a",
    "left": "#eeeeee",
}


def check_plotting(path: Path) -> None:
    """Raises what `draw` would, before any time is spent."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UnsupportedError("--plot needs matplotlib: pip install 'jaxinfer[plot]'") from error
    known = plt.figure().canvas.get_supported_filetypes()
    plt.close("all")
    if path.suffix[1:] not in known:
        raise InvalidArgumentError("plot", str(path), f"a file name that ends in one of .{', .'.join(sorted(known))}")
    if not path.parent.is_dir():
        raise InvalidArgumentError("plot", str(path), "a file in a folder that exists")


def draw(plan: Plan, path: Path) -> None:
    """Draws the memory of devices, and tokens/s over sequences."""
    import matplotlib as mpl

    mpl.use("agg")  # a picture needs no screen
    import matplotlib.pyplot as plt

    d, request = plan.deployment, plan.request
    named = stage_names(plan)
    figure, (memory_axes, curve_axes) = plt.subplots(
        1, 2, figsize=(12, 4.2 + 0.3 * len(named)), width_ratios=(1.15, 1), layout="constrained"
    )
    figure.suptitle(
        f"{request.model}, {request.weights} weights, {request.kv} KV, on {plan.num_devices} x {d.chip.name}, "
        f"mesh {plan.mesh}\n{answer(plan)}",
        fontsize=11,
    )
    _draw_memory(memory_axes, named)
    _draw_curve(curve_axes, plan)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_memory(axes: Any, named: list[tuple[str, Memory]]) -> None:
    for row, (_, memory) in enumerate(named):
        start = 0.0
        for part, label in _PARTS.items():
            width = max(getattr(memory, part), 0) / 1e9
            axes.barh(
                row, width, 0.55, left=start, color=_COLOURS[part], edgecolor="white", label=label if not row else None
            )
            if width > 0.06 * memory.capacity / 1e9:
                dark = part not in ("left", "kv_pool")
                axes.text(
                    start + width / 2, row, f"{width:.1f}", ha="center", va="center", color="white" if dark else "black"
                )
            start += width
    capacity = named[0][1].capacity / 1e9
    axes.axvline(capacity, color="#b22222", linewidth=1.5)
    axes.annotate(
        f"memory of a device, {capacity:.1f} GB",
        (capacity, 1.0),
        (-4, -4),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        **{"ha": "right", "va": "top", "color": "#b22222"},
    )
    axes.set_yticks(range(len(named)), [name for name, _ in named])
    axes.set_ylim(len(named) - 0.5, -0.8)
    axes.set_xlabel("GB")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=6, frameon=False, fontsize=8, columnspacing=1)


def _draw_curve(axes: Any, plan: Plan) -> None:
    d, points = plan.deployment, plan.deployment.curve()
    axes.set_xlabel("sequences at once, each at its full length")
    axes.set_ylabel("tokens/s, roofline estimate")
    axes.spines[["top", "right"]].set_visible(False)
    if not points:
        axes.text(0.5, 0.5, f"not one sequence of {d.context} tokens fits", ha="center", transform=axes.transAxes)
        axes.set(xticks=[], yticks=[])
        return
    xs, ys, full = [p.concurrency for p in points], [p.tokens_per_second for p in points], points[-1]
    axes.plot(xs, ys, "o-", color=_COLOURS["weights"], markersize=4)
    axes.plot([xs[-1], 2 * xs[-1]], [ys[-1]] * 2, "--", color=_COLOURS["reserve"])
    axes.plot(xs[-1], ys[-1], "o", color="#b22222")
    texts = [
        f"pool full: {full.concurrency} sequences, {full.tokens_per_second:.0f} tokens/s, "
        f"{1e3 * full.seconds_per_token:.1f} ms a token"
    ]
    if d.concurrency < full.concurrency:
        asked = points[xs.index(d.concurrency)]
        axes.plot(asked.concurrency, asked.tokens_per_second, "o", color=_COLOURS["kv_pool"])
        texts.append(
            f"asked for: {asked.concurrency}, {asked.tokens_per_second:.0f} tokens/s, "
            f"{1e3 * asked.seconds_per_token:.1f} ms a token"
        )
    for row, (text, colour) in enumerate(zip(texts, ("#b22222", "#a86a12"), strict=False)):
        axes.text(0.02, 0.99 - 0.065 * row, text, transform=axes.transAxes, va="top", color=colour)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.set_ylim(0, 1.2 * max(ys))
    axes.grid(alpha=0.3)
