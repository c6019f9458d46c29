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

from jaxinfer.quantization.calibrate import Grid, Rounded, round_to_nearest
from jaxinfer.quantization.tensor import Scheme

DAMPINGS = (0.01, 0.1, 1.0)  # of H's mean diagonal, added to it: the next where the one before leaves H singular


def gptq(w_OI: jax.Array, hessian_II: jax.Array, scheme: Scheme) -> Rounded:
    """Rounds a matrix for inputs with these second moments.

    Inputs are taken by how much they matter: those that come first keep nearest values, and nothing of others' errors.
    A few inputs that are very large in a token that all attend to need just that.

    Args:
      scheme: where it says `reordered`, inputs are grouped in that order too (act-order), each group's grid chosen when
        its turn comes. Otherwise groups lie as in the model, and their grids are chosen ahead.

    Raises:
      ValueError: a Hessian that is not finite, or that no damping makes positive definite.
    """
    if not bool(jnp.isfinite(hessian_II).all()):
        raise ValueError("activations that are not finite, or too large for float32")
    order_I = jnp.argsort(-jnp.diag(hessian_II), stable=True).astype(jnp.int32)
    hessian_II = hessian_II[order_I][:, order_I]
    for damping in DAMPINGS:
        factor_II = _factor(hessian_II, damping)
        if bool(jnp.isfinite(factor_II).all()):
            break
    else:
        raise ValueError(f"second moments of activations that are not positive definite, even damped by {damping}")
    if scheme.reordered:
        values_IO, grid = _rounded(w_OI.T[order_I], factor_II, None, scheme)
        order = order_I
    else:
        ahead = round_to_nearest(w_OI, scheme)
        grid = Grid(ahead.scales_OG.T, None if ahead.zeros_OG is None else ahead.zeros_OG.T)
        of_inputs = jax.tree.map(lambda x_GO: jnp.repeat(x_GO, len(order_I) // len(x_GO), axis=0)[order_I], grid)
        values_IO, _ = _rounded(w_OI.T[order_I], factor_II, of_inputs, scheme)
        values_IO, order = values_IO[jnp.argsort(order_I)], None
    return Rounded(values_IO.T, grid.scales.T, None if grid.zeros is None else grid.zeros.T, order)


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
def _rounded(w_IO: jax.Array, factor_II: jax.Array, grid_IO: Grid | None, scheme: Scheme) -> tuple[jax.Array, Grid]:
    """(values [I, O], grid of each group [G, O] that they were rounded by where none was chosen ahead)."""
    (I, _), J = w_IO.shape, scheme.group  # noqa: E741
    assert J is not None

    def column(j: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        w_JO, values_JO, errors_JO, u_JJ, grid_JO = carry
        grid: Grid = jax.tree.map(lambda x_JO: x_JO[j], grid_JO)
        values_O = grid.round(w_JO[j], scheme)
        error_O = (w_JO[j] - grid.numbers(values_O)) / u_JJ[j, j]
        w_JO = w_JO - u_JJ[j][:, None] * error_O
        return w_JO, values_JO.at[j].set(values_O), errors_JO.at[j].set(error_O), u_JJ, grid_JO

    def group(w_IO: jax.Array, g: jax.Array) -> tuple[jax.Array, tuple[jax.Array, Grid]]:
        def of_group(array: jax.Array, axis: int = 0) -> jax.Array:
            return lax.dynamic_slice_in_dim(array, g * J, J, axis)

        w_JO = of_group(w_IO)
        grid = Grid.of(w_JO.min(0), w_JO.max(0), scheme)
        if grid_IO is None:
            grid_JO = jax.tree.map(lambda x_O: jnp.broadcast_to(x_O, w_JO.shape), grid)
        else:
            grid_JO = jax.tree.map(of_group, grid_IO)
        u_JI, none = of_group(factor_II), jnp.zeros_like(w_JO)
        _, values_JO, errors_JO, *_ = lax.fori_loop(0, J, column, (w_JO, none, none, of_group(u_JI, 1), grid_JO))
        # U is 0 left of the group: what is done already stays as it is.
        w_IO = w_IO - jnp.matmul(u_JI.T, errors_JO, precision=lax.Precision.HIGHEST)
        return w_IO, (values_JO.astype(jnp.int8), grid)

    _, (values_GJO, grid_GO) = lax.scan(group, w_IO, jnp.arange(I // J))
    return values_GJO.reshape(w_IO.shape), grid_GO
