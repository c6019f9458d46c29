"""Where a pipeline's stages begin and end: by what a layer and the head take on the devices themselves."""

from __future__ import annotations

import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig, SchedulerConfig
from jaxinfer.engine.executables import ExecutableCache, expected_compiles
from jaxinfer.engine.programs import StepSpecs, compiled, make_forward, make_sample
from jaxinfer.engine.step_inputs import ForwardShape, RowShape
from jaxinfer.models.decoder import Stage, decoder_structure
from jaxinfer.models.partition import Partition
from jaxinfer.quantization.tensor import Scheme

logger = logging.getLogger(__name__)

RUNS = 7  # the median counts
PAGE_SIZE = 32


def head_layers(
    model: ModelConfig,
    dtype: Any,
    partition: Partition,
    schemes: Mapping[str, Scheme],
    mesh: Mesh,
    num_rows: int,
    executables: ExecutableCache,
) -> int:
    """What the head and sampling of a step of so many decodes take, in layers; measured on the devices of a stage.

    Weights are zeros and nothing is cached: what is measured is the reading of weights and the products.
    """
    scheduler = SchedulerConfig(
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows,
        max_model_len=PAGE_SIZE,
        page_size=PAGE_SIZE,
        num_pages=num_rows,
    )
    layer = Stage(1, 2, 3)
    short = replace(model, layers=model.layers[:1] * 3)
    structures = [decoder_structure(short, dtype, partition, stage, schemes=schemes) for stage in (layer, layer.head)]
    specs = [StepSpecs.of(structure, short, scheduler, dtype, mesh) for structure in structures]
    forward, rows = ForwardShape(num_rows, num_rows, num_rows, 1), RowShape(num_rows, num_rows)
    hidden_TD = specs[0].on_all((num_rows, model.hidden_size), dtype)
    programs: list[tuple[Callable[..., Any], tuple[Any, ...], np.ndarray]] = [
        (make_forward(structures[0], short, forward, mesh), (specs[0].leaves, specs[0].pool, hidden_TD),
         np.zeros(forward.size, np.int32)),
        (make_sample(structures[1], short, rows, mesh),
         (specs[1].leaves, specs[1].hidden_RD, specs[1].last_tokens, specs[1].rules), rows.pack(None)),
    ]  # fmt: skip
    seconds = []
    with expected_compiles():  # of the zeros
        for number, (function, arguments, packed) in enumerate(programs):
            all_arguments = (*arguments, specs[number].on_all(packed.shape))
            program = compiled(f"stage cost {structures[number]}", jax.jit(function), all_arguments, mesh, executables)
            zeros = jax.tree.map(lambda spec: jnp.zeros(spec.shape, spec.dtype, device=spec.sharding), arguments)
            seconds.append(_seconds(partial(program, *zeros, packed)))
    layers = round(seconds[1] / seconds[0])
    logger.info("the head takes %.2f ms, a layer %.2f ms: as %d layers", 1e3 * seconds[1], 1e3 * seconds[0], layers)
    return layers


def _seconds(run: Callable[[], Any]) -> float:
    times = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begun)
    return statistics.median(times[1:])
