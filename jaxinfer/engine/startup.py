"""From settings to what an engine runs on: the model found, split over its mesh, loaded, compiled and warmed up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxinfer.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoints.source import resolve
from jaxinfer.config import EngineConfig, ModelConfig, SchedulerConfig
from jaxinfer.engine.executables import ExecutableCache
from jaxinfer.engine.programs import load_or_compile
from jaxinfer.engine.runner import Runner
from jaxinfer.errors import InvalidArgumentError, UnsupportedError
from jaxinfer.kv_cache.pool import page_bytes
from jaxinfer.models.decoder import DecoderStructure, Stage, decoder_structure
from jaxinfer.models.partition import Partition
from jaxinfer.sampling.logit_rules import rules_bytes
from jaxinfer.text.tokenizer import Tokenizer
from pallas_kernels.dispatch import device_of
from sharding.mesh import MeshConfig
from sharding.rules import MeshError

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
CPU_KV_CACHE_BYTES = 1 << 30
START_THREADS = 2  # a compilation is part serial, part parallel: two at once keep a few cores busy
DEVICE_MEMORY_FRACTION = 0.9  # of an accelerator's memory, weights and pages together; the rest is temporaries

# (stage, done, total): stages are "download", "load" (bytes) and "warm-up" (programs).
type Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Started:
    """What an engine runs on.

    Attributes:
      runners: of each replica, warmed up.
      seconds: what each part of the start took.
    """

    model: ModelConfig
    scheduler: SchedulerConfig
    tokenizer: Tokenizer
    runners: tuple[Runner, ...]
    seconds: dict[str, float]


def start_up(config: EngineConfig, *, cache_dir: Path, offline: bool, progress: Progress | None) -> Started:
    """See `Engine.start`."""
    report: Progress = progress or (lambda stage, done, total: None)
    clock = _Clock()
    mesh, submeshes = _mesh(config)
    if config.quantize is not None:
        raise UnsupportedError(f"quantize={config.quantize!r}: this version serves weights in float only")
    if config.dtype not in DTYPES:
        raise InvalidArgumentError("dtype", config.dtype, f"one of {', '.join(DTYPES)}")
    source = resolve(
        config.model, cache_dir=cache_dir, offline=offline, progress=lambda done, all_: report("download", done, all_)
    )
    clock.lap("find")
    checkpoint = open_checkpoint(source)
    model = checkpoint.config
    dtype = checkpoint.dtype if config.dtype == "auto" else np.dtype(getattr(jax.numpy, config.dtype))
    structures = _structures(config, model, dtype, mesh, submeshes[0][0])
    scheduler = _scheduler_config(config, model, structures, dtype, mesh, submeshes[0][0].devices.flat[0])
    threads = ThreadPoolExecutor(START_THREADS, "start")
    try:
        tokenizer = threads.submit(_tokenizer, checkpoint)
        # Programs are made from declarations, so they need not wait for the weights.
        executables = ExecutableCache(cache_dir / "programs" if config.compile_cache else None)
        done = [(0, 1)] * len(submeshes)

        def on_programs(replica: int, ready: int, total: int) -> None:
            done[replica] = (ready, total)
            report("warm-up", sum(ready for ready, _ in done), total * len(done))

        programs = [
            load_or_compile(
                *(structures, model, scheduler),
                dtype=dtype,
                meshes=meshes,
                executables=executables,
                threads=threads,
                progress=partial(on_programs, replica),
            )
            for replica, meshes in enumerate(submeshes)
        ]
        leaves = _load(checkpoint, structures, submeshes, lambda done, all_: report("load", done, all_))
        clock.lap("load")
        runners = tuple(Runner(made(), each) for made, each in zip(programs, leaves, strict=True))
        for runner in runners:
            runner.warm_up()
        clock.lap("warm-up")
        started = Started(model, scheduler, tokenizer.result(), runners, clock.laps)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
    logger.info(
        "%s: %s, %d layers, %s, mesh %s%s; %d sequences at once, context %d, %d pages of %d tokens%s; started in %s",
        config.model,
        model.family,
        len(model.layers),
        dtype,
        mesh,
        "".join(f" ({note})" for note in structures[0].partition.notes(model)),
        scheduler.max_num_seqs,
        scheduler.max_model_len,
        scheduler.num_pages,
        scheduler.page_size,
        " a replica" if mesh.data > 1 else "",
        ", ".join(f"{name} {seconds:.1f} s" for name, seconds in clock.laps.items()),
    )
    return started


def _mesh(config: EngineConfig) -> tuple[MeshConfig, list[list[Mesh]]]:
    try:
        mesh = MeshConfig.parse(config.mesh)
        if mesh.expert > 1:
            raise MeshError(f"expert={mesh.expert}: no model here has experts; use expert=1")
        return mesh, mesh.build()
    except MeshError as error:
        raise InvalidArgumentError("mesh", config.mesh, str(error)) from error


def _structures(
    config: EngineConfig, model: ModelConfig, dtype: Any, mesh: MeshConfig, submesh: Mesh
) -> list[DecoderStructure]:
    """Of each stage, without any bytes."""
    L = len(model.layers)
    try:
        partition = Partition.of(model, mesh.rules())
        if mesh.stage > L:
            raise MeshError(f"stage={mesh.stage}: the model has {L} layers, and a stage needs one at least")
    except MeshError as error:
        raise InvalidArgumentError("mesh", config.mesh, str(error)) from error
    ends = [L * (number + 1) // mesh.stage for number in range(mesh.stage)]
    return [
        decoder_structure(model, dtype, partition, stage, scan=_scans_layers(config, stage.layers_of(model), submesh))
        for stage in (Stage(first, end, L) for first, end in zip([0, *ends], ends, strict=False))
    ]


def _scans_layers(config: EngineConfig, layers: Sequence[Any], mesh: Mesh) -> bool:
    alike = len(set(layers)) == 1
    if config.scan_layers is None:
        # Over several devices unrolled layers show the compiler every collective.
        return alike and mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    if config.scan_layers and not alike:
        raise UnsupportedError("scan_layers: this model's layers differ from each other")
    return config.scan_layers


def _load(
    checkpoint: Checkpoint,
    structures: Sequence[DecoderStructure],
    submeshes: Sequence[Sequence[Mesh]],
    progress: Callable[[int, int], None],
) -> list[list[tuple[jax.Array, ...]]]:
    """Weights by replica and stage. Each device is sent its own part of every weight, and never more."""
    specs = {path: spec for structure in structures for path, spec in structure.specs.items()}
    shardings: dict[str, list[NamedSharding]] = {path: [] for path in specs}
    for meshes in submeshes:
        for structure, mesh in zip(structures, meshes, strict=True):
            for path, spec in structure.specs.items():
                shardings[path].append(NamedSharding(mesh, structure.partition.rules.spec(spec.axes)))
    loaded = checkpoint.load_sharded(specs, shardings, progress)
    next_of = {path: iter(arrays) for path, arrays in loaded.items()}
    return [[tuple(next(next_of[path]) for path in structure.specs) for structure in structures] for _ in submeshes]


def _scheduler_config(
    config: EngineConfig,
    model: ModelConfig,
    structures: Sequence[DecoderStructure],
    dtype: Any,
    mesh: MeshConfig,
    device: jax.Device,
) -> SchedulerConfig:
    """Of each replica."""
    max_model_len = model.max_position if config.max_model_len is None else config.max_model_len
    if max_model_len > model.max_position:
        raise InvalidArgumentError("max_model_len", max_model_len, f"at most the model's context, {model.max_position}")
    partition = structures[0].partition
    heads, vocab = partition.rules.ways("kv_heads"), partition.rules.ways("vocab")
    rules = rules_bytes(config.max_num_seqs + 1, partition.vocab_size) // vocab
    budget, num_pages = config.kv_cache_bytes, 1 << 40
    for structure in structures:
        per_page = page_bytes(
            *(len(structure.stage.layers_of(model)), partition.num_kv_heads, model.head_dim),
            *(config.page_size, dtype, device_of(device)),
        )
        per_page //= heads
        budget = config.kv_cache_bytes or _pool_memory(device, structure.bytes_per_device() + rules, mesh.num_devices)
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
    )


def _pool_memory(device: jax.Device, other_bytes: int, num_devices: int) -> int:
    """Bytes the pool may take on a device that is to hold the weights and the rest of the state too."""
    stats = device.memory_stats()
    if device.platform == "cpu" or not stats:
        return CPU_KV_CACHE_BYTES // num_devices  # which share one memory
    return int(stats["bytes_limit"] * DEVICE_MEMORY_FRACTION) - stats["bytes_in_use"] - other_bytes


def _tokenizer(checkpoint: Checkpoint) -> Tokenizer:
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
