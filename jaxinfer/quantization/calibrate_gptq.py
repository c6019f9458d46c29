"""GPTQ (arXiv:2210.17323): a matrix is rounded input by input, and what each input's rounding does to the outputs is
made up for by the inputs that are still to come.

The error of the outputs over calibration tokens is `sum(d @ H * d)` for a change d of the weights, H being the mean of
x xᵀ over their inputs x (the Hessian, up to a factor). Letters as in `calibrate`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.quantization.calibrate import Grid, Rounded
from jaxinfer.quantization.tensor import Scheme

DAMPINGS = (0.01, 0.1, 1.0)  # of H's mean diagonal, added to it: the next where the one before leaves H singular


def gptq(w_OI: jax.Array, hessian_II: jax.Array, scheme: Scheme) -> Rounded:
    """Rounds a matrix for inputs with these second moments.

    Args:
      scheme: where it says `reordered`, inputs are taken, and grouped, by how much they matter (act-order).

    Raises:
      ValueError: a Hessian that is not finite, or that no damping makes positive definite.
    """
    if not bool(jnp.isfinite(hessian_II).all()):
        raise ValueError("activations that are not finite, or too large for float32")
    order_I = None
    if scheme.reordered:
        order_I = jnp.argsort(-jnp.diag(hessian_II), stable=True).astype(jnp.int32)
        w_OI, hessian_II = w_OI[:, order_I], hessian_II[order_I][:, order_I]
    for damping in DAMPINGS:
        factor_II = _factor(hessian_II, damping)
        if bool(jnp.isfinite(factor_II).all()):
            return _rounded(w_OI, factor_II, scheme)._replace(order_I=order_I)
    raise ValueError(f"second moments of activations that are not positive definite, even damped by {DAMPINGS[-1]}")


@jax.jit
def _factor(hessian_II: jax.Array, damping: float) -> jax.Array:
    """The upper triangular U with UᵀU the inverse of H: row i says how inputs after i make up for i's error."""
    diagonal_I = jnp.diag(hessian_II)
    # An input that is always 0 stays by itself.
    diagonal_I = jnp.where(diagonal_I > 0, diagonal_I, 1) + damping * jnp.mean(diagonal_I)
    hessian_II = jnp.fill_diagonal(hessian_II, diagonal_I, inplace=False)
    # H = R Rᵀ with R upper triangular is Cholesky's of H turned around; then U = R⁻¹, without H's inverse.
    r_II = jnp.linalg.cholesky(hessian_II[::-1, ::-1])[::-1, ::-1]
    return lax.linalg.triangular_solve(r_II, jnp.eye(len(r_II)), left_side=True, lower=False)


@partial(jax.jit, static_argnames="scheme")
def _rounded(w_OI: jax.Array, factor_II: jax.Array, scheme: Scheme) -> Rounded:
    (O, I), J = w_OI.shape, scheme.group  # noqa: E741
    assert J is not None

    def column(j: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        w_JO, values_JO, errors_JO, u_JJ, grid = carry
        values_O = grid.round(w_JO[j], scheme)
        error_O = (w_JO[j] - grid.numbers(values_O)) / u_JJ[j, j]
        w_JO = w_JO - u_JJ[j][:, None] * error_O
        return w_JO, values_JO.at[j].set(values_O), errors_JO.at[j].set(error_O), u_JJ, grid

    def group(w_IO: jax.Array, g: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Grid]]:
        w_JO = lax.dynamic_slice_in_dim(w_IO, g * J, J)
        grid = Grid.of(w_JO.min(0), w_JO.max(0), scheme)
        u_JI = lax.dynamic_slice_in_dim(factor_II, g * J, J)
        u_JJ = lax.dynamic_slice_in_dim(u_JI, g * J, J, axis=1)
        none = jnp.zeros_like(w_JO)
        _, values_JO, errors_JO, *_ = lax.fori_loop(0, J, column, (w_JO, none, none, u_JJ, grid))
        # U is 0 left of the group: what is done already stays as it is.
        w_IO = w_IO - jnp.matmul(u_JI.T, errors_JO, precision=lax.Precision.HIGHEST)
        return w_IO, (values_JO.astype(jnp.int8), grid)

    _, (values_GJO, grid) = lax.scan(group, w_OI.T, jnp.arange(I // J))
    zeros_OG = None if grid.zeros is None else grid.zeros.T
    return Rounded(values_GJO.reshape(I, O).T, grid.scales.T, zeros_OG)
