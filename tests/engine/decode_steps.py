"""Compiles a whole decode step of Llama-3-8B for chips that are not here; run by the compilers' interpreter.

python tests/engine/decode_steps.py v6e:2
"""

from __future__ import annotations

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxinfer.engine.programs import POOL_SPLIT, make_forward
from jaxinfer.engine.step_inputs import ForwardShape
from jaxinfer.kv_cache.pool import pool_spec
from jaxinfer.models.cards import CARDS
from jaxinfer.models.decoder import decoder_structure
from pallas_kernels.dispatch import device_of
from pallas_kernels.paged_attention import gpu, tpu
from pallas_kernels.paged_attention.layout import PageLayout
from sharding.compile import compile_for
from sharding.hardware import described_devices
from sharding.mesh import AXES
from sharding.rules import partition_spec

SEQUENCES, CONTEXT, PAGE_SIZE = 64, 4096, 64


def facts(chips: str) -> dict:
    """What the compiler made of a step of 64 sequences of 4,096 tokens, on a mesh of all the chips along `tensor`."""
    devices = described_devices(chips)
    tensor, device = len(devices), device_of(devices[0])
    mesh = Mesh(np.array(devices).reshape(1, 1, tensor, 1), AXES)
    model = CARDS["llama-3-8b"]
    structure = decoder_structure(model, jnp.bfloat16)
    shape = ForwardShape(SEQUENCES, SEQUENCES, SEQUENCES, CONTEXT // PAGE_SIZE)

    everywhere = P()

    def on(shape, dtype, split=everywhere):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, split))

    leaves = tuple(on(w.shape, w.dtype, partition_spec(w.axes)) for w in structure.specs.values())
    spec = pool_spec(model, SEQUENCES * CONTEXT // PAGE_SIZE, PAGE_SIZE, jnp.bfloat16, device)
    pool = on(spec.shape, spec.dtype, POOL_SPLIT)
    step = compile_for(
        mesh,
        make_forward(structure, model, shape, mesh),
        *(leaves, pool, on((SEQUENCES + 1,), jnp.int32), on((shape.size,), jnp.int32)),
        donate_argnums=1,
        out_shardings=(pool.sharding, NamedSharding(mesh, P())),
    )
    heads, kv_heads = model.num_heads // tensor, model.num_kv_heads // tensor
    shard = jax.ShapeDtypeStruct((*spec.shape[:2], spec.shape[2] // tensor, *spec.shape[3:]), spec.dtype)
    layout = PageLayout.of(shard, kv_heads, model.head_dim)
    kernel = tpu if device.platform == "tpu" else gpu
    row = 2 * kv_heads * model.head_dim * 2
    return {
        "chip": step.chip,
        "seconds": round(step.seconds, 1),
        "pool_bytes": shard.size * 2,
        "alias_bytes": step.alias_bytes,
        "temp_bytes": step.temp_bytes,
        "total_bytes": step.total_bytes,
        "smallest_matrix_bytes": min(
            w.shape[0] * w.shape[1] * 2 // tensor for name, w in structure.specs.items() if len(w.shape) == 2
        ),
        "large_results": [f"{r.name} {r.shape} {r.bytes}" for r in step.large_results(12 << 20)],
        "custom_calls": sorted({call.target for call in step.custom_calls}),
        "num_custom_calls": len(step.custom_calls),
        "live_kv_bytes": SEQUENCES * CONTEXT * row,
        "transferred_bytes": kernel.transferred_bytes(
            shard, layout, heads, [1] * SEQUENCES, [CONTEXT] * SEQUENCES, None
        ),
    }


if __name__ == "__main__":
    print(json.dumps(facts(sys.argv[1])))
