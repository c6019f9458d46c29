"""Compiles small steps for described devices and prints what was found as JSON; run by the compilers' interpreter.

python tests/sharding/compiled_steps.py v6e:2
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.compile import CompiledStep, CompileError, compile_for
from sharding.hardware import described_devices

LARGE = 16 << 20


def facts(step: CompiledStep) -> dict:
    shown = {name: value for name, value in asdict(step).items() if name not in ("results", "text")}
    return shown | {"large": [asdict(result) for result in step.large_results(LARGE)], "total_bytes": step.total_bytes}


def mlp(pool, x_TD, up_DF, down_FD):
    """Twice the same layer, its result kept in the pool."""
    for layer in range(2):
        x_TD = x_TD + jax.nn.silu(x_TD @ up_DF) @ down_FD
        pool = lax.dynamic_update_slice(pool, x_TD[None], (layer, 0, 0))
    return pool, x_TD


def doubled_in_place(x):
    """A Mosaic kernel that aliases its operand."""

    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    return pl.pallas_call(
        kernel,
        grid=x.shape[0] // 256,
        in_specs=[pl.BlockSpec((256, x.shape[1]), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((256, x.shape[1]), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={0: 0},
    )(x)


def main(chips: str) -> None:
    devices = described_devices(chips)
    mesh = Mesh(np.array(devices), ("tensor",))
    seen = []

    def array(*shape: int, dtype=jnp.bfloat16, spec: P | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=None if spec is None else NamedSharding(mesh, spec))

    def watched(pool, *rest):
        seen.append(jax.sharding.get_abstract_mesh().abstract_device.device_kind)
        return mlp(pool, *rest)

    def gathered(x, w):
        x = lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P("tensor", None)))
        return lax.with_sharding_constraint(jnp.tanh(x) @ w, NamedSharding(mesh, P(None, "tensor")))

    pool, x = array(256, 64, 1024), array(64, 1024)  # the pool 32 MiB; replicated, for want of a sharding
    weights = array(1024, 2048, spec=P(None, "tensor")), array(2048, 1024, spec=P("tensor", None))
    # Gathered it has 128 MiB, more than a v6e has on the chip.
    rows = array(8192, 8192, spec=P("tensor", None))
    found = {
        "donated": facts(compile_for(mesh, watched, pool, x, *weights, donate_argnums=0)),
        "kept": facts(compile_for(mesh, mlp, pool, x, *weights)),
        "jitted": facts(compile_for(mesh, jax.jit(mlp, donate_argnums=0), pool, x, *weights)),
        "gathered": facts(compile_for(mesh, gathered, rows, rows)),
        "device_kind": seen[0],
    }
    if devices[0].platform == "tpu":
        found["kernel"] = facts(compile_for(devices[:1], doubled_in_place, array(65536, 512), donate_argnums=0))
        try:
            compile_for(mesh, lambda x: x + 1, array(200, 1 << 30, dtype=jnp.int8))
        except CompileError as error:
            found["error"], found["cause"] = str(error), type(error.__cause__).__name__
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
