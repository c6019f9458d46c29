"""What one device of a mesh holds of a model, and what a step costs it: from declarations to `StageCosts`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import jax.numpy as jnp

from jaxinfer.config import KV_CACHE_DTYPES, EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.kv_cache.pool import page_bytes
from jaxinfer.models.decoder import DecoderStructure, Stage, decoder_structure, matrices
from jaxinfer.models.layers import WeightSpec
from jaxinfer.models.partition import Partition, check_experts
from jaxinfer.quantization.recipe import KINDS, Recipe
from jaxinfer.quantization.tensor import Scheme
from jaxinfer.sampling.logit_rules import rules_bytes
from pallas_kernels.dispatch import Device
from sharding.hardware import Chip
from sharding.mesh import MeshConfig
from sharding.planner import Assumptions, Attention, Deployment, Exchange, StageCosts, Work
from sharding.rules import ShardingRules

DTYPE = jnp.bfloat16  # of activations, and of weights and pages that are not quantized
WEIGHTS = ("bf16", *KINDS)
KV_DTYPES = {"bf16": "bfloat16"} | {name: dtype for name, dtype in KV_CACHE_DTYPES.items() if dtype is not None}

_DEFAULTS = EngineConfig()


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan for.

    Attributes:
      model: a name in `CARDS`, or a checkpoint on this machine, as `--model` takes it.
      chips: kind and number of devices, as `h200:8`; one may be left out.
      mesh: as `MeshConfig.parse` takes it, or "auto": the fastest that fits of all that use every device.
      weights: "bf16", or as `EngineConfig.quantize` has it, int4 in groups of 128.
      kv: "bf16", "int8", "fp8".
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
class Sizes:
    """A model's sizes on meshes of one kind of chip."""

    request: PlanRequest
    model: ModelConfig
    chip: Chip
    context: int

    @property
    def device(self) -> Device:
        return Device(self.chip.platform, self.chip.device_kinds[0])

    def structures(self, mesh: MeshConfig) -> list[DecoderStructure]:
        """Of each stage, as the engine would serve it.

        Raises:
          MeshError: the model cannot be split so.
        """
        check_experts(mesh)
        partition = Partition.of(self.model, mesh.rules(), self.schemes)
        stages = Stage.split(len(self.model.layers), mesh.stage)
        return [decoder_structure(self.model, DTYPE, partition, stage, schemes=self.schemes) for stage in stages]

    @cached_property
    def schemes(self) -> Mapping[str, Scheme]:
        """Of the matrices that are quantized."""
        recipe = Recipe.parse(None if self.request.weights == "bf16" else self.request.weights)
        return recipe.choose(matrices(self.model, DTYPE), {}, self.chip.platform, DTYPE.dtype.itemsize).schemes

    def scheduler(self, mesh: MeshConfig, num_pages: int = 1) -> SchedulerConfig:
        """Of one replica."""
        sequences = -(-self.request.concurrency // mesh.data)
        return SchedulerConfig(
            max_num_seqs=sequences,
            max_num_batched_tokens=max(self.request.max_num_batched_tokens, sequences),
            max_model_len=self.context,
            page_size=self.request.page_size,
            num_pages=num_pages,
            kv_dtype=KV_DTYPES[self.request.kv],
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
        held = {path: structure.weight_bytes_per_device(path) for path in structure.specs}
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
            return page_bytes(num_layers, *heads, scheduler.page_size, scheduler.kv_dtype, self.device) // kv_heads

        windows = [layer.window for layer in stage.layers_of(model)]
        return StageCosts(
            weight_bytes=sum(held.values()),
            slot_bytes=rules_bytes(1, partition.vocab_size) // vocab if stage.is_last else 0,
            temp_bytes=_assumed_temporaries(model, partition, scheduler) + self.dequantized(structure)[0],
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

    def dequantized(self, structure: DecoderStructure) -> tuple[int, str]:
        """What the longest step writes out in 16 bits: see `DecoderStructure.dequantized`."""
        return structure.dequantized(self.device, self.request.max_num_batched_tokens, DTYPE)


def _ways(spec: WeightSpec, rules: ShardingRules) -> int:
    return math.prod(rules.ways(axis) for axis in spec.axes)


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

    Compilers need less: 0.20 GB where this says 0.33, for Llama-3-8B on an H200.
    """
    rules, T, R = partition.rules, scheduler.max_num_batched_tokens, scheduler.max_rows
    heads = (model.num_heads + 2 * partition.num_kv_heads) * model.head_dim // rules.ways("heads")
    wide = 3 * partition.intermediate_size // rules.ways("feed_forward")
    activations = T * (4 * model.hidden_size + heads + wide) * DTYPE.dtype.itemsize
    logits = R * partition.vocab_size // rules.ways("vocab") * 4
    return max(2 * activations, 10 * logits)
