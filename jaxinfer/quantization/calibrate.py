"""What the ways to round a matrix share: its grid, and rounding to the nearest, on devices.

Dimension letters as in `tensor`: O outputs, I inputs, G groups of inputs, J inputs of a group. Every function keeps
rows (outputs) apart, so that a mesh may split them.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.quantization.tensor import Packed, Scheme, np_dtype


def scheme_of(bits: int, group: int, symmetric: bool, scales: str, reordered: bool = False) -> Scheme:
    """The scheme of weights that are rounded here: 4 or 8 bits in groups."""
    values = "int8" if bits == 8 else "int4"
    return Scheme(values, group, scales, None if symmetric else "zeros", reordered)  # type: ignore[arg-type]


def levels(scheme: Scheme) -> tuple[int, int]:
    """The least and the largest value. Symmetric ones leave out the lowest, as `tensor.quantize` does."""
    if scheme.offset is None:
        return (-127, 127) if scheme.bits == 8 else (-7, 7)
    return (-128, 127) if scheme.bits == 8 else (-8, 7)


class Grid(NamedTuple):
    """How the numbers of a group are rounded; scales as their dtype has them, in float32."""

    scales: jax.Array
    zeros: jax.Array | None

    @classmethod
    def of(cls, low: jax.Array, high: jax.Array, scheme: Scheme) -> Grid:
        """The grid over numbers from `low` to `high`, of each group."""
        least, most = levels(scheme)
        high = jnp.maximum(high, 0)
        low = jnp.minimum(low, 0)
        if scheme.offset is None:
            spread, steps = jnp.maximum(high, -low), most
        else:
            # A zero point is one above the least value or more: GPTQ's format keeps it less one, and what a zero
            # point of 0 turns into there depends on who reads it.
            low = jnp.minimum(low, -high / (most - least - 1))
            spread, steps = high - low, most - least
        dtype = np_dtype(scheme.scales)
        scales = (jnp.where(spread > 0, spread, 1) / steps).astype(dtype)
        scales = jnp.where(scales > 0, scales, jnp.ones((), dtype)).astype(jnp.float32)
        if scheme.offset is None:
            return cls(scales, None)
        return cls(scales, jnp.clip(jnp.rint(least - low / scales), least + 1, most))

    def round(self, numbers: jax.Array, scheme: Scheme) -> jax.Array:
        """The nearest values, in float32."""
        steps = numbers / self.scales
        return jnp.clip(jnp.rint(steps if self.zeros is None else steps + self.zeros), *levels(scheme))

    def numbers(self, values: jax.Array) -> jax.Array:
        """What values mean."""
        return (values if self.zeros is None else values - self.zeros) * self.scales


class Rounded(NamedTuple):
    """A matrix that was rounded, on devices: int8 values [O, I], and of each group its scale and zero point [O, G]."""

    values_OI: jax.Array
    scales_OG: jax.Array
    zeros_OG: jax.Array | None
    order_I: jax.Array | None = None

    def packed(self, scheme: Scheme) -> Packed:
        dtype = np_dtype(scheme.scales)
        zeros = None if self.zeros_OG is None else np.asarray(self.zeros_OG).astype(np.int8)
        order = None if self.order_I is None else np.asarray(self.order_I)
        scales = np.asarray(self.scales_OG).astype(dtype)
        return Packed(scheme, np.asarray(self.values_OI), scales, zeros, order_I=order)


def round_to_nearest(w_OI: jax.Array, scheme: Scheme, shrink_OG: jax.Array | None = None) -> Rounded:
    """Every number to the nearest value of its group's grid.

    Args:
      shrink_OG: what to multiply a group's range by, up to 1: numbers beyond it are clipped.
    """
    w_OGJ = _groups(w_OI, scheme)
    low_OG, high_OG = w_OGJ.min(-1), w_OGJ.max(-1)
    if shrink_OG is not None:
        low_OG, high_OG = low_OG * shrink_OG, high_OG * shrink_OG
    grid = Grid.of(low_OG, high_OG, scheme)
    each = Grid(grid.scales[..., None], None if grid.zeros is None else grid.zeros[..., None])
    values_OI = each.round(w_OGJ, scheme).reshape(w_OI.shape)
    return Rounded(values_OI.astype(jnp.int8), grid.scales, grid.zeros)


def meant(rounded: Rounded, scheme: Scheme) -> jax.Array:
    """The numbers [O, I] that a matrix in its own order means."""
    values_OGJ = _groups(rounded.values_OI.astype(jnp.float32), scheme)
    zeros = None if rounded.zeros_OG is None else rounded.zeros_OG[..., None]
    return Grid(rounded.scales_OG[..., None], zeros).numbers(values_OGJ).reshape(rounded.values_OI.shape)


def _groups(x_OI: jax.Array, scheme: Scheme) -> jax.Array:
    assert scheme.group is not None
    return x_OI.reshape(x_OI.shape[0], -1, scheme.group)
