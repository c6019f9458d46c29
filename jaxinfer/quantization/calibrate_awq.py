"""AWQ (arXiv:2306.00978): inputs that matter are scaled up before rounding, and what comes before a matrix is scaled
down by as much, so that the model stays what it was while the rounding of those inputs gets finer.

Errors are those of the matrices' outputs over calibration tokens, by H as `calibrate_gptq` has it. Letters as in
`calibrate`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quantization.calibrate import Rounded, meant, round_to_nearest
from jaxinfer.quantization.tensor import Scheme

STEPS = 20  # of the exponent, from 0 (no scaling) to 1
SHRINKS = 10  # ranges of a group that are tried, from all of it down to `LEAST_SHRINK` of it
LEAST_SHRINK = 0.6


@partial(jax.jit, static_argnames="scheme")
def choose_scales(
    w_OI: jax.Array, hessian_II: jax.Array, magnitude_I: jax.Array, scheme: Scheme
) -> tuple[jax.Array, jax.Array]:
    """Scales of the inputs, by a power of how large these are; returns (scales [I], error of each power tried).

    Args:
      magnitude_I: mean absolute value of each input. Inputs that must share a scale have the same.
    """
    magnitude_I = jnp.maximum(magnitude_I, 1e-4 * jnp.mean(magnitude_I) + 1e-30)

    def scales(power: jax.Array) -> jax.Array:
        s_I = magnitude_I**power
        return s_I / jnp.sqrt(s_I.max() * s_I.min())

    def error(power: jax.Array) -> jax.Array:
        s_I = scales(power)
        d_OI = meant(round_to_nearest(w_OI * s_I, scheme), scheme) / s_I - w_OI
        return jnp.sum(jnp.matmul(d_OI, hessian_II, precision=lax.Precision.HIGHEST) * d_OI)

    powers = jnp.arange(STEPS, dtype=jnp.float32) / STEPS
    errors = lax.map(error, powers)
    return scales(powers[jnp.argmin(errors)]), errors


@partial(jax.jit, static_argnames="scheme")
def round_clipped(w_OI: jax.Array, hessian_II: jax.Array, scheme: Scheme) -> Rounded:
    """Rounds to the nearest, in the range of each group that leaves the group's share of the outputs the least error.

    An output keeps whole ranges where those leave less error once all its groups are taken together.
    """
    (O, I), J = w_OI.shape, scheme.group  # noqa: E741
    assert J is not None
    blocks_GJJ = jnp.stack([lax.dynamic_slice(hessian_II, (at, at), (J, J)) for at in range(0, I, J)])

    def error(shrink: jax.Array) -> jax.Array:
        rounded = round_to_nearest(w_OI, scheme, jnp.full((O, I // J), shrink))
        d_OGJ = (meant(rounded, scheme) - w_OI).reshape(O, -1, J)
        through_OGJ = jnp.einsum("OGJ,GJK->OGK", d_OGJ, blocks_GJJ, precision=lax.Precision.HIGHEST)
        return jnp.sum(through_OGJ * d_OGJ, axis=-1)

    shrinks = jnp.linspace(1, LEAST_SHRINK, SHRINKS)
    best_OG = shrinks[jnp.argmin(lax.map(error, shrinks), axis=0)]

    def error_of_outputs(shrink_OG: jax.Array) -> jax.Array:
        d_OI = meant(round_to_nearest(w_OI, scheme, shrink_OG), scheme) - w_OI
        return jnp.sum(jnp.matmul(d_OI, hessian_II, precision=lax.Precision.HIGHEST) * d_OI, axis=-1, keepdims=True)

    whole_OG = jnp.ones_like(best_OG)
    best_OG = jnp.where(error_of_outputs(best_OG) < error_of_outputs(whole_OG), best_OG, whole_OG)
    return round_to_nearest(w_OI, scheme, best_OG)
