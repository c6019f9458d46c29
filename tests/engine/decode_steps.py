"""Compiles whole decode steps of real models for chips that are not here; run by the compilers' interpreter.

python tests/engine/decode_steps.py forward llama-3-8b v6e:2 [float|int8|int4|fp8|w8a8 [auto|int8|fp8 [LAYERS]]]
python tests/engine/decode_steps.py sample llama-3-8b v6e:2
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.config import KV_CACHE_DTYPES, ModelConfig, SchedulerConfig
from jaxinfer.engine.programs import StepSpecs, make_forward, make_sample
from jaxinfer.engine.step_inputs import ForwardShape, RowShape
from jaxinfer.models.cards import CARDS
from jaxinfer.models.decoder import DecoderStructure, decoder_structure, matrices
from jaxinfer.models.partition import Partition
from jaxinfer.quantization.recipe import Recipe
from pallas_kernels.dispatch import device_of
from pallas_kernels.paged_attention import gpu, tpu
from pallas_kernels.paged_attention.layout import PageLayout
from sharding.compile import compile_for
from sharding.hardware import described_devices
from sharding.mesh import MeshConfig

SEQUENCES, CONTEXT, PAGE_SIZE = 64, 4096, 64


class StepParts(NamedTuple):
    """What a step is made of, with all the chips along `tensor`."""

    model: ModelConfig
    mesh: Mesh
    structure: DecoderStructure
    specs: StepSpecs

    @classmethod
    def of(
        cls, model_name: str, chips: str, weights: str | None = None, kv: str = "auto", layers: str = "999"
    ) -> StepParts:
        devices = described_devices(chips)
        config = MeshConfig(tensor=len(devices))
        mesh, card = config.build(devices)[0][0], CARDS[model_name]
        model = replace(card, layers=card.layers[: int(layers)])
        platform = device_of(devices[0]).platform
        schemes = Recipe.parse(weights).choose(matrices(model, jnp.bfloat16), {}, platform, 2).schemes
        partition = Partition.of(model, config.rules(), schemes)
        structure = decoder_structure(model, jnp.bfloat16, partition, schemes=schemes)
        scheduler = SchedulerConfig(
            max_num_seqs=SEQUENCES,
            max_num_batched_tokens=SEQUENCES,
            max_model_len=CONTEXT,
            page_size=PAGE_SIZE,
            num_pages=SEQUENCES * CONTEXT // PAGE_SIZE,
            kv_dtype=KV_CACHE_DTYPES[kv],
        )
        return cls(model, mesh, structure, StepSpecs.of(structure, model, scheduler, jnp.bfloat16, mesh))


def forward(model_name: str, chips: str, weights: str | None = None, kv: str = "auto", layers: str = "999") -> dict:
    """What the compiler made of a step of 64 sequences of 4,096 tokens, up to the last hidden states."""
    model, mesh, structure, specs = StepParts.of(model_name, chips, weights, kv, layers)
    shape = ForwardShape(SEQUENCES, SEQUENCES, SEQUENCES, CONTEXT // PAGE_SIZE)
    step = compile_for(
        mesh,
        make_forward(structure, model, shape, mesh),
        *(specs.leaves, specs.pool, specs.last_tokens, specs.on_all((shape.size,))),
        donate_argnums=1,
        out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, specs.pool), specs.everywhere),
    )
    heads, kv_heads = model.num_heads // mesh.size, model.num_kv_heads // mesh.size
    shard = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype), specs.pool
    )
    layout = PageLayout.of(shard, kv_heads, model.head_dim)
    kernel = tpu if device_of(mesh.devices.flat[0]).platform == "tpu" else gpu
    row = 2 * kv_heads * (model.head_dim * 2 if kv == "auto" else model.head_dim + 4)
    return {
        "num_chips": mesh.size,
        "seconds": round(step.seconds, 1),
        "pool_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(shard)),
        "alias_bytes": step.alias_bytes,
        "temp_bytes": step.temp_bytes,
        "weight_bytes": structure.bytes_per_device(),
        "smallest_matrix_bytes": min(
            w.shape[0] * w.shape[1] * 2 // mesh.size for name, w in structure.specs.items() if len(w.shape) == 2
        ),
        "large_results": [f"{r.name} {r.shape} {r.bytes}" for r in step.large_results(12 << 20)],
        "custom_calls": sorted({call.target for call in step.custom_calls}),
        "num_custom_calls": len(step.custom_calls),
        "live_kv_bytes": SEQUENCES * CONTEXT * row,
        "transferred_bytes": kernel.transferred_bytes(
            shard, layout, heads, [1] * SEQUENCES, [CONTEXT] * SEQUENCES, None
        ),
        "collectives": [asdict(each) for each in step.collectives],
    }


def sample(model_name: str, chips: str) -> dict:
    """What the compiler made of choosing the 64 next tokens."""
    model, mesh, structure, specs = StepParts.of(model_name, chips)
    rows = RowShape(SEQUENCES, SEQUENCES)
    step = compile_for(
        mesh,
        make_sample(structure.head, model, rows, mesh),
        *(structure.head_leaves(specs.leaves), specs.hidden_RD, specs.last_tokens, specs.rules),
        specs.on_all((rows.size,)),
        donate_argnums=3,
        out_shardings=(
            specs.everywhere,
            jax.tree.map(lambda rule: rule.sharding, specs.rules),
            specs.everywhere,
        ),
    )
    return {
        "num_chips": mesh.size,
        "seconds": round(step.seconds, 1),
        "collectives": [asdict(each) for each in step.collectives],
    }


if __name__ == "__main__":
    print(json.dumps({"forward": forward, "sample": sample}[sys.argv[1]](*sys.argv[2:])))
