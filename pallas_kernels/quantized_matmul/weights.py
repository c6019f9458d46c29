"""Quantized weights of a matmul, as pytrees.

Dimension letters of this folder: T rows (tokens), I inputs, O outputs, G groups of inputs, J inputs of a group
(I = G * J). Scales and minima are float32, float16 or bfloat16: what the checkpoint holds, for all of it is exact in
float32.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

GROUP_SIZES = (16, 32, 64, 128)


class ChannelWeight(NamedTuple):
    """w[i, o] = values[i, o] * scale[o], values int8 or float8_e4m3fn."""

    values_IO: jax.Array
    scale_O: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """(I, O)."""
        I, O = self.values_IO.shape  # noqa: E741
        return I, O


class GroupedWeight(NamedTuple):
    """w[g, j, o] = (values[g, j, o] - zeros[g, o]) * scales[g, o] + minima[g, o], values int4, uint4, int8 or
    float8_e4m3fn.

    At most one of zeros and minima is there. Zero points (AWQ, GPTQ) stay integers, int8, from the least value a
    4-bit weight can have to one above its largest; minima are GGUF's. With the axes in this order XLA on TPU multiplies
    without storing the weight in floats, and eight int4 outputs are one 32-bit word.
    """

    values_GJO: jax.Array
    scales_GO: jax.Array
    zeros_GO: jax.Array | None = None
    minima_GO: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(I, O)."""
        G, J, O = self.values_GJO.shape  # noqa: E741
        return G * J, O


Weight = ChannelWeight | GroupedWeight
