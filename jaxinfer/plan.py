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
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.programs import POOL_AXES, StepSpecs, forward_shapes, make_forward, make_sample, row_shapes
from jaxinfer.errors import InvalidArgumentError, UnsupportedError
from jaxinfer.kv_cache.pool import page_bytes, pool_spec
from jaxinfer.models.cards import CARDS
from jaxinfer.models.decoder import DecoderStructure, Stage, decoder_structure
from jaxinfer.models.layers import WeightSpec
from jaxinfer.models.partition import Partition
from jaxinfer.sampling.logit_rules import rules_bytes
from pallas_kernels.dispatch import Device, device_of
from sharding.compile import CompiledStep, CompileError, compile_for
from sharding.hardware import Chip, HardwareError, described_devices, parse_devices
from sharding.mesh import MeshConfig
from sharding.planner import Assumptions, Attention, Deployment, Exchange, StageCosts, Work, best
from sharding.rules import MeshError, ShardingRules

DTYPE = jnp.bfloat16  # of activations, and of weights and pages that are not quantized
WEIGHTS = ("bf16", "int8", "int4")
KV_DTYPES = {"bf16": jnp.bfloat16, "int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
GROUP = 128  # inputs that share an int4 weight's scale

_DEFAULTS = EngineConfig()


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan for.

    Attributes:
      model: a name in `CARDS`, or a checkpoint on this machine, as `--model` takes it.
      chips: kind and number of devices, as `h200:8`; one may be left out.
      mesh: as `MeshConfig.parse` takes it, or "auto": the fastest that fits of all that use every device.
      weights, kv: "bf16", "int8", "int4"; "bf16", "int8", "fp8".
      context: tokens of a sequence, prompt and output together; None is the model's own limit.
      concurrency: sequences at once, all at their full length.
      compiles: False takes arithmetic alone, and assumes what only a compiler knows.
    """

    model: str
    chips: str
    mesh: str = "auto"
    weights: str = "bf16"
    kv: str = "bf16"
    context: int | None = None
    concurrency: int = 8
    max_num_batched_tokens: int = _DEFAULTS.max_num_batched_tokens
    page_size: int = _DEFAULTS.page_size
    compiles: bool = True


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
    sizes = _Sizes(request, model, chip, context)
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


# ---- Sizes


@dataclass(frozen=True)
class _Sizes:
    """A model's sizes on meshes of one kind of chip."""

    request: PlanRequest
    model: ModelConfig
    chip: Chip
    context: int

    @property
    def kv_dtype(self) -> Any:
        return KV_DTYPES[self.request.kv]

    @property
    def device(self) -> Device:
        return Device(self.chip.platform, self.chip.device_kinds[0])

    def structures(self, mesh: MeshConfig) -> list[DecoderStructure]:
        """Of each stage, in 16 bits.

        The one place that makes them: with `quantize` here, steps over quantized weights would be compiled, and
        `weight_bytes` and `_dequantized_bytes` below be what the structure says.

        Raises:
          MeshError: the model cannot be split so.
        """
        if mesh.expert > 1:
            raise MeshError(f"expert={mesh.expert}: no model here has experts; use expert=1")
        partition = Partition.of(self.model, mesh.rules())
        stages = Stage.split(len(self.model.layers), mesh.stage)
        return [decoder_structure(self.model, DTYPE, partition, stage) for stage in stages]

    def scheduler(self, mesh: MeshConfig, num_pages: int = 1) -> SchedulerConfig:
        """Of one replica."""
        sequences = -(-self.request.concurrency // mesh.data)
        return SchedulerConfig(
            max_num_seqs=sequences,
            max_num_batched_tokens=max(self.request.max_num_batched_tokens, sequences),
            max_model_len=self.context,
            page_size=self.request.page_size,
            num_pages=num_pages,
        )

    def deployment(self, mesh: MeshConfig) -> Deployment:
        """With temporaries assumed.

        Raises: as `structures`.
        """
        scheduler = self.scheduler(mesh)
        return Deployment(
            chip=self.chip,
            stages=tuple(self._costs(structure, scheduler) for structure in self.structures(mesh)),
            stage_devices=mesh.tensor * mesh.expert,
            replicas=mesh.data,
            context=self.context,
            concurrency=self.request.concurrency,
            page_size=self.request.page_size,
            chunk=scheduler.max_num_batched_tokens,
            assumptions=Assumptions.of(self.chip),
        )

    def _costs(self, structure: DecoderStructure, scheduler: SchedulerConfig) -> StageCosts:
        model, partition, stage, rules = self.model, structure.partition, structure.stage, structure.partition.rules
        held = {path: weight_bytes(path, spec, rules, self.request.weights) for path, spec in structure.specs.items()}
        layers, head = Work(), Work()
        for path, spec in structure.specs.items():
            flops = 2 * math.prod(spec.shape) // _ways(spec, rules) if len(spec.shape) == 2 else 0
            if path == "head" or (path == "embed" and stage.is_last and model.tie_embeddings):
                head = Work(read_bytes=held[path], flops=flops)
            elif path != "embed":  # of which a step reads its tokens' rows
                layers = Work(read_bytes=layers.read_bytes + held[path], flops=layers.flops + flops)
        kv_heads, vocab = rules.ways("kv_heads"), rules.ways("vocab")

        def a_page(num_layers: int) -> int:
            heads = partition.num_kv_heads, model.head_dim
            return page_bytes(num_layers, *heads, scheduler.page_size, self.kv_dtype, self.device) // kv_heads

        windows = [layer.window for layer in stage.layers_of(model)]
        return StageCosts(
            weight_bytes=sum(held.values()),
            slot_bytes=rules_bytes(1, partition.vocab_size) // vocab if stage.is_last else 0,
            temp_bytes=_assumed_temporaries(model, partition, scheduler) + self._dequantized_bytes(structure),
            page_bytes=a_page(len(windows)),
            layers=layers,
            head=head,
            attention=tuple(
                Attention(
                    kv_bytes=a_page(windows.count(window)) / scheduler.page_size,
                    flops=4 * windows.count(window) * model.num_heads * model.head_dim // rules.ways("heads"),
                    window=window,
                )
                for window in dict.fromkeys(windows)
            ),
            exchanges=_exchanges(structure),
            sent_bytes=0 if stage.is_last else model.hidden_size * DTYPE.dtype.itemsize,
        )

    def _dequantized_bytes(self, structure: DecoderStructure) -> int:
        """Where no kernel reads int4 in groups, XLA writes a prompt's weights out in 16 bits (docs/kernels.md)."""
        gpu, rules = self.chip.gpu, structure.partition.rules
        if self.request.weights != "int4" or gpu is None or gpu.compute_capability == (9, 0):
            return 0
        return max(
            weight_bytes(path, spec, rules, "bf16") for path, spec in structure.specs.items() if _quantizes(path, spec)
        )


def _ways(spec: WeightSpec, rules: ShardingRules) -> int:
    return math.prod(rules.ways(axis) for axis in spec.axes)


def _quantizes(path: str, spec: WeightSpec) -> bool:
    """Matrices of the layers; embedding and head stay wide, as do norms and biases."""
    return path.startswith("layers.") and len(spec.shape) == 2


def weight_bytes(path: str, spec: WeightSpec, rules: ShardingRules, weights: str) -> int:
    """What one device holds of a weight.

    int8 has a float32 scale for each output; int4 a bfloat16 one for each group of 128 inputs, with inputs padded so
    that every device has whole groups (`pallas_kernels.quantized_matmul.weights`).
    """
    if weights == "bf16" or not _quantizes(path, spec):
        return math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize // _ways(spec, rules)
    outputs, inputs = (size // rules.ways(axis) for size, axis in zip(spec.shape, spec.axes, strict=True))
    if weights == "int8":
        return outputs * inputs + 4 * outputs
    groups = -(-inputs // GROUP)
    return outputs * groups * (GROUP // 2 + 2)


def _exchanges(structure: DecoderStructure) -> tuple[Exchange, ...]:
    """An all-reduce after each product over a split axis, and after a lookup in a split vocabulary."""
    rules, all_reduces = structure.partition.rules, list[int]()
    for path, spec in structure.specs.items():
        if len(spec.shape) != 2 or path == "head" or (path == "embed" and not structure.stage.is_first):
            continue
        over, rest = (0, 1) if path == "embed" else (1, 0)
        if rules.ways(spec.axes[over]) > 1:
            all_reduces.append(spec.shape[rest] // rules.ways(spec.axes[rest]) * DTYPE.dtype.itemsize)
    devices = math.prod(size for _, size in rules.sizes)
    return tuple(
        Exchange(kind="all-reduce", count=all_reduces.count(size), bytes_per_token=size, devices=devices)
        for size in dict.fromkeys(all_reduces)
    )


def _assumed_temporaries(model: ModelConfig, partition: Partition, scheduler: SchedulerConfig) -> int:
    """Activations of the largest step, or logits of the most rows with their sorts, a few times each.

    Compilers need less: 0.2 GB where this says 0.26, for Llama-3-8B on an H200.
    """
    rules, T, R = partition.rules, scheduler.max_num_batched_tokens, scheduler.max_rows
    heads = (model.num_heads + 2 * partition.num_kv_heads) * model.head_dim // rules.ways("heads")
    wide = 3 * partition.intermediate_size // rules.ways("feed_forward")
    activations = T * (4 * model.hidden_size + heads + wide) * DTYPE.dtype.itemsize
    logits = R * partition.vocab_size // rules.ways("vocab") * 4
    return max(2 * activations, 8 * logits)


def _candidates(sizes: _Sizes, num_devices: int) -> list[Candidate]:
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
    sizes: _Sizes, mesh: MeshConfig, deployment: Deployment, num_devices: int, progress: Callable[[str, int, int], None]
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
    fullest = max(m.weights + m.sampling_state + m.temporaries for m in deployment.memory)
    if sizes.chip.platform == "tpu" and fullest > sizes.chip.usable_bytes:
        return deployment, (), ["not compiled: a TPU's compiler refuses what its memory cannot hold; temporaries and "
                                "collectives are assumed"]  # fmt: skip
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
    stages = zip(deployment.stages, structures, temporaries, strict=True)
    costs = [replace(costs, temp_bytes=temp + sizes._dequantized_bytes(s)) for costs, s, temp in stages]
    notes = [f"compiled with a pool of {num_pages} pages of {deployment.page_size} tokens"]
    if any(after.temp_bytes > before.temp_bytes for before, after in zip(deployment.stages, costs, strict=True)):
        notes.append(
            "temporaries are above what activations and logits take, so programs copy parts of the pool, and a larger "
            "pool needs more: before you count on more sequences than you asked for, plan with as many"
        )
    if sizes.request.weights != "bf16":
        notes.append(
            f"a step with {sizes.request.weights} weights was not compiled: temporaries and collectives are those of "
            "the 16-bit step"
        )
    return replace(deployment, stages=tuple(costs)), tuple(programs), notes


def _pages_to_compile(deployment: Deployment) -> int:
    """Of a replica's pool: what was asked for, or what fits, since a TPU's compiler refuses more.

    Some programs copy parts of the pool (XLA's attention on v4, scales of 8-bit pages), so its size matters.
    """
    if deployment.fits:
        return deployment.sequences_per_replica * deployment.pages_per_sequence
    return max(deployment.kv_tokens // deployment.page_size // deployment.replicas, 1)


def _programs(
    sizes: _Sizes, mesh: MeshConfig, structure: DecoderStructure, submesh: Mesh, num_pages: int
) -> list[tuple[str, int, Callable[[], CompiledStep]]]:
    """Name, tokens (or rows) and compilation of a stage's programs: those that the engine would run."""
    model, rules, stage = sizes.model, structure.partition.rules, structure.stage
    scheduler = sizes.scheduler(mesh, num_pages)
    specs = StepSpecs.of(structure, model, scheduler, DTYPE, submesh)
    heads = structure.partition.num_kv_heads, model.head_dim
    pages = pool_spec(len(stage.layers_of(model)), *heads, num_pages, scheduler.page_size, sizes.kv_dtype,
                      device_of(submesh.devices.flat[0]))  # fmt: skip
    lies = NamedSharding(submesh, rules.spec(POOL_AXES))
    pool = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies), pages)
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
            *(specs.leaves, pool, specs.last_tokens if stage.is_first else hidden_TD, specs.on_all((shape.size,))),
            donate_argnums=1,
            out_shardings=(shardings(pool), specs.everywhere),
        )
        jobs.append((name, shape.num_tokens, compile_it))
    if stage.is_last:
        rows = row_shapes(scheduler)[-1]
        compile_it = partial(
            compile_for,
            submesh,
            make_sample(structure, model, rows, submesh),
            *(specs.leaves, specs.hidden_RD, specs.last_tokens, specs.rules, specs.on_all((rows.size,))),
            donate_argnums=3,
            out_shardings=(specs.everywhere, shardings(specs.rules), specs.everywhere),
        )
        jobs.append(("sampling", rows.num_rows, compile_it))
    return jobs


# ---- What to know


def _notes(sizes: _Sizes, mesh: MeshConfig, num_devices: int) -> list[str]:
    request, chip = sizes.request, sizes.chip
    notes = Partition.of(sizes.model, mesh.rules()).notes(sizes.model)
    if mesh.num_devices < num_devices:
        notes.append(f"{num_devices - mesh.num_devices} of {num_devices} devices stay idle")
    if request.weights != "bf16":
        notes.append(
            f"{request.weights} weights, which the engine does not serve yet, as its kernels take them: matrices of "
            "the layers; embedding, head and norms stay as they are"
        )
    if sizes._dequantized_bytes(sizes.structures(mesh)[0]):
        notes.append(
            f"no kernel reads int4 in groups on {chip.name}: long steps write a matrix out in 16 bits, which is "
            "counted in temporaries, and take longer than the roofline"
        )
    if request.kv != "bf16":
        notes.append(
            f"{request.kv} KV, which the engine does not serve yet, as its kernels take it: with a float32 scale for "
            "each token and head"
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
