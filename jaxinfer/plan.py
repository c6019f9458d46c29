"""What serving a model on some chips would take and give, found out before there is a chip.

The model is declared, not loaded; prefill, decode and sampling are compiled for chips that are only described
(`sharding.compile`), and `sharding.planner` does the arithmetic. `jaxinfer.plan_report` shows the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig
from jaxinfer.engine.programs import StepSpecs, forward_shapes, make_forward, make_sample, row_shapes
from jaxinfer.errors import InvalidArgumentError, UnsupportedError
from jaxinfer.models.cards import CARDS
from jaxinfer.models.decoder import DecoderStructure
from jaxinfer.models.partition import Partition
from jaxinfer.plan_sizes import DTYPE, KV_DTYPES, WEIGHTS, PlanRequest, Sizes
from sharding.compile import CompiledStep, CompileError, compile_for
from sharding.hardware import HardwareError, described_devices, parse_devices
from sharding.mesh import MeshConfig
from sharding.planner import Assumptions, Deployment, best
from sharding.rules import MeshError


@dataclass(frozen=True)
class Program:
    """A program that was compiled, of the stages that share it; `name` is decode, prefill or sampling."""

    name: str
    stages: tuple[int, ...]
    num_tokens: int
    step: CompiledStep


@dataclass(frozen=True)
class Candidate:
    """A mesh that was thought of: what it would give, or why it cannot work."""

    mesh: MeshConfig
    deployment: Deployment | None
    refusal: str = ""


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
      context: as asked for, or the model's.
      programs: none where nothing was compiled; `notes` say why.
      refusal: what the chip's compiler refused, and why; empty where it refused nothing.
      candidates: of "auto", all that were compared; else the one.
      notes: what is padded, assumed, left out, and what to know before believing a figure.
    """

    request: PlanRequest
    model: ModelConfig
    mesh: MeshConfig
    num_devices: int
    deployment: Deployment
    programs: tuple[Program, ...]
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]
    refusal: str = ""

    @property
    def fits(self) -> bool:
        """All sequences that were asked for, and the compiler agrees or was not asked."""
        return self.deployment.fits and not self.refusal


def make_plan(
    request: PlanRequest, *, cache_dir: Path | None = None, progress: Callable[[str, int, int], None] | None = None
) -> Plan:
    """
    Args:
      cache_dir: where aliases of checkpoints are kept.
      progress: gets ("compile", programs done, in all).

    Raises:
      InvalidArgumentError: a setting that is unknown or cannot work, and what can.
      UnsupportedError: the chip's compiler is not installed; the message says how to get it.
      ModelNotFoundError, CheckpointError: no card and no checkpoint here has that name; its files are broken.
    """
    _check(request)
    model = find_model(request.model, cache_dir)
    context = model.max_position if request.context is None else request.context
    if context > model.max_position:
        raise InvalidArgumentError("context", context, f"at most the model's own, {model.max_position}")
    try:
        chip, num_devices = parse_devices(request.chips)
    except HardwareError as error:
        raise InvalidArgumentError("chips", request.chips, str(error)) from error
    sizes = Sizes(request, model, chip, context)
    candidates = tuple(_candidates(sizes, num_devices))
    possible = [each.deployment for each in candidates if each.deployment is not None]
    if not possible:
        raise InvalidArgumentError("mesh", request.mesh, "; ".join(each.refusal for each in candidates))
    deployment = best(possible)
    mesh = next(each.mesh for each in candidates if each.deployment is deployment)
    notes = _notes(sizes, mesh, num_devices)
    programs, refusal = tuple[Program, ...](), ""
    if request.compiles:
        try:
            deployment, programs, more = _compiled(sizes, mesh, deployment, num_devices, progress or (lambda *_: None))
            notes += more
        except CompileError as error:
            refusal = str(error)
            notes.append("a program was refused: temporaries and collectives are assumed")
    else:
        notes.append("nothing was compiled: temporaries and collectives are assumed")
    return Plan(request, model, mesh, num_devices, deployment, programs, candidates, tuple(notes), refusal)


def find_model(name: str, cache_dir: Path | None = None) -> ModelConfig:
    """A card's config, or that of a checkpoint on this machine, of which only headers are read.

    Raises: as `make_plan`.
    """
    if name in CARDS:
        return CARDS[name]
    # With what reads checkpoints, which the compilers' own environments do not have.
    from jaxinfer.checkpoints.checkpoint import open_checkpoint
    from jaxinfer.checkpoints.source import resolve
    from jaxinfer.errors import ModelNotFoundError

    try:
        return open_checkpoint(resolve(name, cache_dir=cache_dir or Path(), offline=True)).config
    except ModelNotFoundError as error:
        # A plan fetches no weights: it is made before there is a disk for them.
        raise ModelNotFoundError(f"{error}; models that need no files: {', '.join(CARDS)}") from error


def _check(request: PlanRequest) -> None:
    for name, allowed in (("weights", WEIGHTS), ("kv", tuple(KV_DTYPES))):
        if getattr(request, name) not in allowed:
            raise InvalidArgumentError(name, getattr(request, name), f"one of {', '.join(allowed)}")
    for name, least in (("context", 2), ("concurrency", 1), ("max_num_batched_tokens", 1), ("page_size", 1)):
        value = getattr(request, name)
        if value is not None and value < least:
            raise InvalidArgumentError(name, value, f"at least {least}")


# ---- Meshes


def _candidates(sizes: Sizes, num_devices: int) -> list[Candidate]:
    """What was asked for, or every split of all devices into replicas, stages and tensor shards."""
    try:
        if sizes.request.mesh != "auto":
            meshes = [MeshConfig.parse(sizes.request.mesh)]
            if meshes[0].num_devices > num_devices:
                raise MeshError(f"mesh {meshes[0]} needs {meshes[0].num_devices} devices; there are {num_devices}")
        else:
            divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
            meshes = [
                MeshConfig(data=num_devices // (stage * tensor), stage=stage, tensor=tensor)
                for tensor in reversed(divisors)
                for stage in divisors
                if num_devices % (stage * tensor) == 0
            ]
    except MeshError as error:
        raise InvalidArgumentError("mesh", sizes.request.mesh, str(error)) from error
    candidates = []
    for mesh in meshes:
        try:
            candidates.append(Candidate(mesh, sizes.deployment(mesh)))
        except MeshError as error:
            candidates.append(Candidate(mesh, None, str(error)))
    return candidates


# ---- Compiling


def _compiled(
    sizes: Sizes, mesh: MeshConfig, deployment: Deployment, num_devices: int, progress: Callable[[str, int, int], None]
) -> tuple[Deployment, tuple[Program, ...], list[str]]:
    """The deployment with the compiler's temporaries, its programs, and notes.

    Raises:
      CompileError: the compiler refused a program.
      UnsupportedError: there is no compiler.
    """
    try:
        submeshes = mesh.build(described_devices(sizes.chip.name, num_devices))[0]
    except HardwareError as error:
        hint = "; --no-compile plans by arithmetic alone"
        raise UnsupportedError(f"{error}{hint}") from error
    if sizes.chip.platform == "tpu" and not deployment.kv_tokens:
        why = "a TPU's compiler refuses what its memory cannot hold"
        return deployment, (), [f"not compiled: {why}; temporaries and collectives are assumed"]
    structures, num_pages = sizes.structures(mesh), _pages_to_compile(deployment)
    alike: dict[Any, list[int]] = {}
    for number, structure in enumerate(structures):
        stage = structure.stage
        alike.setdefault((stage.layers_of(sizes.model), stage.is_first, stage.is_last), []).append(number)
    jobs = [
        (tuple(numbers), *job)
        for numbers in alike.values()
        for job in _programs(sizes, mesh, structures[numbers[0]], submeshes[numbers[0]], num_pages)
    ]
    programs = list[Program]()
    for done, (numbers, name, num_tokens, compile_it) in enumerate(jobs):
        progress("compile", done, len(jobs))
        try:
            programs.append(Program(name, numbers, num_tokens, compile_it()))
        except CompileError as error:
            raise CompileError(f"{name}: {error}") from error
    progress("compile", len(jobs), len(jobs))
    temporaries = [max(p.step.temp_bytes for p in programs if number in p.stages) for number in range(len(structures))]
    stages = zip(deployment.stages, temporaries, strict=True)
    costs = [replace(costs, temp_bytes=temp) for costs, temp in stages]
    notes = [f"compiled with a pool of {num_pages} pages of {deployment.page_size} tokens"]
    if any(after.temp_bytes > before.temp_bytes for before, after in zip(deployment.stages, costs, strict=True)):
        notes.append(
            "temporaries are above what activations and logits take, so programs copy parts of the pool, and a larger "
            "pool needs more: before you count on more sequences than you asked for, plan with as many"
        )
    return replace(deployment, stages=tuple(costs)), tuple(programs), notes


def _pages_to_compile(deployment: Deployment) -> int:
    """Of a replica's pool: what was asked for, or what fits, since a TPU's compiler refuses more.

    Some programs copy parts of the pool (XLA's attention on v4), so its size matters.
    """
    if deployment.fits:
        return deployment.sequences_per_replica * deployment.pages_per_sequence
    return max(deployment.kv_tokens // deployment.page_size // deployment.replicas, 1)


def _programs(
    sizes: Sizes, mesh: MeshConfig, structure: DecoderStructure, submesh: Mesh, num_pages: int
) -> list[tuple[str, int, Callable[[], CompiledStep]]]:
    """Name, tokens (or rows) and compilation of a stage's programs: those that the engine would run."""
    model, stage, scheduler = sizes.model, structure.stage, sizes.scheduler(mesh, num_pages)
    specs = StepSpecs.of(structure, model, scheduler, DTYPE, submesh)
    shardings = partial(jax.tree.map, lambda leaf: leaf.sharding)
    shapes = forward_shapes(scheduler)
    decode, prefill = next(s for s in shapes if s.num_tokens >= scheduler.max_num_seqs), shapes[-1]
    jobs: list[tuple[str, int, Callable[[], CompiledStep]]] = []
    for name, shape in {"decode": decode, "prefill": prefill}.items():
        hidden_TD = specs.on_all((shape.num_tokens, model.hidden_size), DTYPE)
        compile_it = partial(
            compile_for,
            submesh,
            make_forward(structure, model, shape, submesh),
            *(
                specs.leaves,
                specs.pool,
                specs.last_tokens if stage.is_first else hidden_TD,
                specs.on_all((shape.size,)),
            ),
            donate_argnums=1,
            out_shardings=(shardings(specs.pool), specs.everywhere),
        )
        jobs.append((name, shape.num_tokens, compile_it))
    if structure.head is not None:
        rows = row_shapes(scheduler)[-1]
        compile_it = partial(
            compile_for,
            submesh,
            make_sample(structure.head, model, rows, submesh),
            *(structure.head_leaves(specs.leaves), specs.hidden_RD, specs.last_tokens, specs.rules),
            specs.on_all((rows.size,)),
            donate_argnums=3,
            out_shardings=(specs.everywhere, shardings(specs.rules), specs.everywhere),
        )
        jobs.append(("sampling", rows.num_rows, compile_it))
    return jobs


# ---- What to know


def _notes(sizes: Sizes, mesh: MeshConfig, num_devices: int) -> list[str]:
    request, chip = sizes.request, sizes.chip
    notes = Partition.of(sizes.model, mesh.rules(), sizes.schemes).notes(sizes.model)
    if mesh.num_devices < num_devices:
        notes.append(f"{num_devices - mesh.num_devices} of {num_devices} devices stay idle")
    if request.weights != "bf16":
        notes.append(f"{request.weights} weights: matrices of the layers; embedding, head and norms stay as they are")
    size, why = sizes.dequantized(sizes.structures(mesh)[0])
    if size:
        notes.append(
            f"long steps write a matrix out in 16 bits first, {size / 1e6:.0f} MB at most, which is counted in "
            f"temporaries, and take longer than the roofline: the kernel {why}"
        )
    if chip.platform == "gpu":
        if mesh.tensor > 8:
            notes.append(
                f"tensor={mesh.tensor} goes over several hosts of 8 GPUs; the estimate takes all for one NVLink"
            )
        share = 1 - (Assumptions.of(chip).runtime_bytes + Assumptions.of(chip).collective_bytes) / chip.usable_bytes
        notes.append(
            "JAX by default takes 75 % of a GPU's memory, and some versions never more; "
            f"XLA_CLIENT_MEM_FRACTION={math.floor(100 * share) / 100:g} gives it what this plan counts on"
        )
    return notes
