"""From settings to what an engine runs on: the model found, split over its mesh, loaded, compiled and warmed up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxinfer.checkpoints.checkpoint import Checkpoint, open_checkpoint, parse_dtype
from jaxinfer.checkpoints.source import resolve
from jaxinfer.config import KV_CACHE_DTYPES, EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.executables import ExecutableCache
from jaxinfer.engine.programs import Programs, load_or_compile
from jaxinfer.engine.runner import Runner
from jaxinfer.engine.stages import head_layers
from jaxinfer.errors import InvalidArgumentError, UnsupportedError
from jaxinfer.kv_cache.pool import page_bytes
from jaxinfer.models.decoder import DecoderStructure, Stage, decoder_structure, matrices
from jaxinfer.models.layers import WeightSpec
from jaxinfer.models.partition import Partition, check_experts
from jaxinfer.quantization.recipe import Choice, Recipe
from jaxinfer.quantization.tensor import Scheme
from jaxinfer.sampling.logit_rules import rules_bytes
from jaxinfer.text.tokenizer import Tokenizer
from pallas_kernels.dispatch import device_of
from sharding.distributed import check_processes
from sharding.mesh import MeshConfig
from sharding.rules import MeshError

logger = logging.getLogger(__name__)

CPU_KV_CACHE_BYTES = 1 << 30
START_THREADS = 2  # a compilation is part serial, part parallel: two at once keep a few cores busy
DEVICE_MEMORY_FRACTION = 0.9  # of an accelerator's memory, weights and pages together; the rest is temporaries

# (stage, done, total): stages are "download", "load" (bytes) and "warm-up" (programs).
type Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Layout:
    """A model on the devices of a mesh, before any byte is moved.

    Attributes:
      submeshes: by replica and stage.
      structures: of the stages.
      scheduler: of each replica.
    """

    mesh: MeshConfig
    submeshes: list[list[Mesh]]
    structures: list[DecoderStructure]
    scheduler: SchedulerConfig

    @property
    def specs(self) -> dict[str, WeightSpec]:
        """Of every weight, by path."""
        return {path: spec for structure in self.structures for path, spec in structure.specs.items()}

    def homes(self, path: str) -> list[Any]:
        """Where a weight lies: for each replica, and for each stage that has it, the sharding of each of its arrays."""
        return [
            jax.tree.map(
                lambda array, mesh=mesh, rules=structure.partition.rules: NamedSharding(mesh, rules.spec(array.axes)),
                structure.specs[path].arrays,
            )
            for meshes in self.submeshes
            for structure, mesh in zip(self.structures, meshes, strict=True)
            if path in structure.specs
        ]

    def leaves(self, weights: Mapping[str, Sequence[Any]]) -> list[list[tuple[jax.Array, ...]]]:
        """Each weight, in order of `homes` -> leaves by replica and stage."""
        next_of = {path: iter(copies) for path, copies in weights.items()}
        return [
            [
                structure.flatten({path: next(next_of[path]) for path in structure.specs})
                for structure in self.structures
            ]
            for _ in self.submeshes
        ]


@dataclass(frozen=True)
class Started:
    """What an engine runs on.

    Attributes:
      dtype: of weights and activations.
      choice: which weights are quantized.
      runners: of each replica, warmed up.
      seconds: what each part of the start took.
    """

    config: EngineConfig
    model: ModelConfig
    dtype: Any
    choice: Choice
    layout: Layout
    tokenizer: Tokenizer
    runners: tuple[Runner, ...]
    executables: ExecutableCache
    seconds: dict[str, float]


def start_up(
    config: EngineConfig,
    *,
    cache_dir: Path,
    offline: bool,
    progress: Progress | None,
    share: Callable[[Layout], Layout] = lambda layout: layout,
) -> Started:
    """See `Engine.start`; `share` gives what of a layout this process is to run."""
    report: Progress = progress or (lambda stage, done, total: None)
    clock = _Clock()
    _mesh(config)
    recipe = Recipe.parse(config.quantize, config.quantize_rules, config.packed)
    asked_dtype = parse_dtype(config.dtype)
    source = resolve(
        config.model, cache_dir=cache_dir, offline=offline, progress=lambda done, all_: report("download", done, all_)
    )
    clock.lap("find")
    checkpoint = open_checkpoint(source)
    model = checkpoint.config
    dtype = checkpoint.dtype if asked_dtype is None else asked_dtype
    executables = ExecutableCache(cache_dir / "programs" if config.compile_cache else None)
    choice = choose_quantization(recipe, model, dtype, checkpoint.schemes)
    layout = share(lay_out(config, model, dtype, choice.schemes, executables))
    _log_dequantized(layout, dtype)
    with start_threads() as threads:
        tokenizer = threads.submit(open_tokenizer, checkpoint)
        # Programs are made from declarations, so they need not wait for the weights.
        programs = compile_programs(layout, model, dtype, executables, threads, report)
        load = lambda done, all_: report("load", done, all_)
        homes = {path: layout.homes(path) for path in layout.specs}
        leaves = layout.leaves(checkpoint.load_sharded(layout.specs, homes, load, choice.rounded))
        clock.lap("load")
        runners = tuple(Runner(made, each, config.micro_batches) for made, each in zip(programs(), leaves, strict=True))
        for runner in runners:
            runner.warm_up()
        clock.lap("warm-up")
        started = Started(config, model, dtype, choice, layout, tokenizer.result(), runners, executables, clock.laps)
    logger.info(
        "%s: %s, %d layers, %s, %s; started in %s",
        *(config.model, model.family, len(model.layers), dtype, described(layout, model)),
        ", ".join(f"{name} {seconds:.1f} s" for name, seconds in clock.laps.items()),
    )
    return started


def choose_quantization(recipe: Recipe, model: ModelConfig, dtype: Any, theirs: Mapping[str, Scheme]) -> Choice:
    """How each matrix is kept on this process's devices; logged."""
    platform = device_of(jax.local_devices()[0]).platform
    choice = recipe.choose(matrices(model, dtype), theirs, platform, np.dtype(dtype).itemsize)
    for note in choice.notes:
        logger.info("%s", note)
    return choice


def _log_dequantized(layout: Layout, dtype: Any) -> None:
    device, scheduler = device_of(jax.local_devices()[0]), layout.scheduler
    for name, rows in (("longest", scheduler.max_num_batched_tokens), ("decoding", scheduler.max_num_seqs)):
        size, why = max(structure.dequantized(device, rows, dtype) for structure in layout.structures)
        if size:
            logger.warning(
                "a %s step (%d tokens) writes quantized matrices out in floats, up to %.0f MB at a time: the kernel %s",
                *(name, rows, size / 1e6, why),
            )


def described(layout: Layout, model: ModelConfig) -> str:
    """A layout, for the log."""
    scheduler, notes = layout.scheduler, layout.structures[0].partition.notes(model)
    each = " a replica" if layout.mesh.data > 1 else ""
    return (
        f"mesh {layout.mesh}{''.join(f' ({note})' for note in notes)}; {scheduler.max_num_seqs} sequences at once"
        f"{each}, context {scheduler.max_model_len}; KV cache of {scheduler.num_pages * scheduler.page_size} tokens in "
        f"{scheduler.num_pages} pages{each}, {scheduler.kv_dtype}, {scheduler.kv_token_bytes} bytes a token"
    )


@contextmanager
def start_threads() -> Iterator[ThreadPoolExecutor]:
    """Threads to compile on; at the end what has not begun is dropped, and nothing is waited for."""
    threads = ThreadPoolExecutor(START_THREADS, "start")
    try:
        yield threads
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


def compile_programs(
    layout: Layout,
    model: ModelConfig,
    dtype: Any,
    executables: ExecutableCache,
    threads: ThreadPoolExecutor,
    report: Progress,
) -> Callable[[], list[Programs]]:
    """Starts to make the programs of every replica on `threads`; returns what waits for them."""
    done = [(0, 1)] * len(layout.submeshes)

    def on_programs(replica: int, ready: int, total: int) -> None:
        done[replica] = (ready, total)
        report("warm-up", sum(ready for ready, _ in done), total * len(done))

    waiting = [
        load_or_compile(
            *(layout.structures, model, layout.scheduler),
            dtype=dtype,
            meshes=meshes,
            executables=executables,
            threads=threads,
            progress=partial(on_programs, replica),
        )
        for replica, meshes in enumerate(layout.submeshes)
    ]
    return lambda: [programs() for programs in waiting]


def lay_out(
    config: EngineConfig,
    model: ModelConfig,
    dtype: Any,
    schemes: Mapping[str, Scheme],
    executables: ExecutableCache,
    our_bytes: int = 0,
) -> Layout:
    """How the model lies on the mesh of `config`. Where that has stages, a layer and the head are timed on it.

    Args:
      our_bytes: what an engine that is to make room holds on each device.

    Raises:
      InvalidArgumentError: the mesh cannot work, or leaves no room for pages; nothing is allocated.
    """
    mesh, submeshes = _mesh(config)
    own = next((stage for stages in submeshes for stage in stages if not stage.is_multi_process), submeshes[0][0])
    structures = _structures(config, model, dtype, schemes, mesh, own, executables)
    device = jax.local_devices()[0]  # the first of the mesh, or like it where that is another process's
    return Layout(
        mesh, submeshes, structures, _scheduler_config(config, model, structures, dtype, mesh, device, our_bytes)
    )


def _mesh(config: EngineConfig) -> tuple[MeshConfig, list[list[Mesh]]]:
    try:
        mesh = MeshConfig.parse(config.mesh)
        check_experts(mesh)
        submeshes = mesh.build()
        check_processes(mesh, submeshes)
        return mesh, submeshes
    except MeshError as error:
        raise InvalidArgumentError("mesh", config.mesh, str(error)) from error


def _structures(
    config: EngineConfig,
    model: ModelConfig,
    dtype: Any,
    schemes: Mapping[str, Scheme],
    mesh: MeshConfig,
    submesh: Mesh,
    executables: ExecutableCache,
) -> list[DecoderStructure]:
    """Of each stage, without any bytes."""
    try:
        partition = Partition.of(model, mesh.rules(), schemes)
        stages = Stage.split(len(model.layers), mesh.stage)
        if mesh.stage > 1:
            head = head_layers(model, dtype, partition, schemes, submesh, config.max_num_seqs, executables)
            stages = Stage.split(len(model.layers), mesh.stage, head)
        scans = [_scans_layers(config, stage.layers_of(model), submesh) for stage in stages]
        return [
            decoder_structure(model, dtype, partition, stage, schemes=schemes, scan=scan)
            for stage, scan in zip(stages, scans, strict=True)
        ]
    except MeshError as error:
        raise InvalidArgumentError("mesh", config.mesh, str(error)) from error


def _scans_layers(config: EngineConfig, layers: Sequence[Any], mesh: Mesh) -> bool:
    alike = len(set(layers)) == 1
    if config.scan_layers is None:
        # Over several devices unrolled layers show the compiler every collective.
        return alike and mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    if config.scan_layers and not alike:
        raise UnsupportedError("scan_layers: this model's layers differ from each other")
    return config.scan_layers


def _scheduler_config(
    config: EngineConfig,
    model: ModelConfig,
    structures: Sequence[DecoderStructure],
    dtype: Any,
    mesh: MeshConfig,
    device: jax.Device,
    our_bytes: int,
) -> SchedulerConfig:
    """Of each replica."""
    max_model_len = model.max_position if config.max_model_len is None else config.max_model_len
    if max_model_len > model.max_position:
        raise InvalidArgumentError("max_model_len", max_model_len, f"at most the model's context, {model.max_position}")
    partition = structures[0].partition
    heads, vocab = partition.rules.ways("kv_heads"), partition.rules.ways("vocab")
    rules = rules_bytes(config.max_num_seqs + 1, partition.vocab_size) // vocab
    kv_dtype = KV_CACHE_DTYPES[config.kv_cache_dtype] or np.dtype(dtype).name
    budget, num_pages, all_pages = config.kv_cache_bytes, 1 << 40, 0
    for structure in structures:
        per_page = page_bytes(
            *(len(structure.stage.layers_of(model)), partition.num_kv_heads // heads, model.head_dim),
            *(config.page_size, kv_dtype, device_of(device)),
        )
        all_pages += per_page * heads
        other = structure.bytes_per_device() + rules - our_bytes
        budget = config.kv_cache_bytes or _pool_memory(device, other, mesh.num_devices)
        num_pages = min(num_pages, budget // per_page)
    if num_pages < 1:
        raise InvalidArgumentError("kv_cache_bytes", budget, f"at least one page, {per_page} bytes")
    # More pages than all sequences can use would never be touched.
    most = config.max_num_seqs * -(-max_model_len // config.page_size)
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        max_model_len=max_model_len,
        page_size=config.page_size,
        num_pages=min(num_pages, most),
        prefix_caching=config.prefix_caching,
        max_waiting=config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        kv_dtype=kv_dtype,
        kv_token_bytes=all_pages // config.page_size,
    )


def _pool_memory(device: jax.Device, other_bytes: int, num_devices: int) -> int:
    """Bytes the pool may take on a device that is to hold the weights and the rest of the state too."""
    stats = device.memory_stats()
    if device.platform == "cpu" or not stats:
        return CPU_KV_CACHE_BYTES // num_devices  # which share one memory
    return int(stats["bytes_limit"] * DEVICE_MEMORY_FRACTION) - stats["bytes_in_use"] - other_bytes


def open_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that lies with a checkpoint."""
    if checkpoint.tokenizer_metadata is not None:
        return Tokenizer.from_gguf(checkpoint.tokenizer_metadata)
    assert checkpoint.folder is not None
    return Tokenizer.from_folder(checkpoint.folder)


class _Clock:
    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[name] = round(now - self._last, 2)
        self._last = now
