"""Compiles products for described chips, and prints as JSON which weights are written to memory in floats and which
`stores_floats` says are; run by the compilers' interpreter.

python tests/pallas_kernels/stored_weights.py a100-80g h200
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import device_of
from pallas_kernels.quantized_matmul import ChannelWeight, GroupedWeight, Weight, quantized_matmul, stores_floats
from sharding.compile import CompiledStep, compile_for
from sharding.hardware import described_devices

I, O = 4096, 14336  # noqa: E741
# (values, group; None is a scale for each output, rows)
PRODUCTS = [
    *((values, None, rows) for values in ("int8", "float8_e4m3fn") for rows in (1, 64, 2048)),
    *((values, 128, rows) for values in ("int4", "uint4", "int8", "float8_e4m3fn") for rows in (1, 16, 256)),
    ("int4", 32, 7),
    ("int4", 32, 24),
    ("float8_e4m3fn", 16, 7),
]


def weight_of(values: str, group: int | None) -> Weight:
    spec: Any = jax.ShapeDtypeStruct
    if group is None:
        return ChannelWeight(spec((I, O), jnp.dtype(values)), spec((O,), jnp.float32))
    G = I // group
    minima = spec((G, O), jnp.bfloat16) if values == "uint4" else None
    return GroupedWeight(spec((G, group, O), jnp.dtype(values)), spec((G, O), jnp.bfloat16), None, minima)


def stored(step: CompiledStep) -> list[str]:
    """What is written that has as many numbers as the weight, of 16 bits or more."""
    shapes = [str(result.shape) for result in step.large_results(2 * I * O)]
    return [shape for shape in shapes if math.prod(map(int, shape[shape.index("[") + 1 : -1].split(","))) == I * O]


def main(chips: list[str]) -> None:
    found = []
    for chip in chips:
        device = device_of(described_devices(chip)[0])
        for values, group, rows in PRODUCTS:
            w = weight_of(values, group)
            step = compile_for(chip, quantized_matmul, jax.ShapeDtypeStruct((rows, I), jnp.bfloat16), w)
            found.append([chip, values, group, rows, stored(step), stores_floats(device, rows, jnp.bfloat16, w)])
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
