"""The vocabulary as one device has it: all of it, or its share of one that is split over a mesh axis.

With a share, every method is collective: all devices of the axis call it, and get the same. What they exchange is of
the size of a few numbers a row. R rows, V vocabulary, X candidates.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Vocabulary:
    """
    Attributes:
      size: tokens that there are.
      local: columns of the arrays that this device has, those of padding included.
      axis: the mesh axis that they are split over, inside `shard_map`; None has them all.
    """

    size: int
    local: int
    axis: str | None = None

    @property
    def first(self) -> jax.Array | int:
        """The token id of this device's first column."""
        return 0 if self.axis is None else lax.axis_index(self.axis) * self.local

    def mask_padding(self, logits_RV: jax.Array) -> jax.Array:
        """Nothing but a token can be chosen."""
        if self.axis is None:
            return logits_RV
        return jnp.where(self.first + jnp.arange(self.local) < self.size, logits_RV, -jnp.inf)

    def columns(self, ids: jax.Array) -> jax.Array:
        """This device's column of each token id; `local`, which scatters drop, where another device has it."""
        column = ids - self.first
        return jnp.where((column >= 0) & (column < self.local), column, self.local)

    def at(self, x_RV: jax.Array, ids_R: jax.Array) -> jax.Array:
        """Each row's value at a token; 0 at an id that is none."""
        column_R = self.columns(ids_R)
        here_R = jnp.take_along_axis(x_RV, jnp.minimum(column_R, self.local - 1)[:, None], axis=1)[:, 0]
        return self.total(jnp.where(column_R < self.local, here_R, 0))

    def total(self, x_R: jax.Array) -> jax.Array:
        return x_R if self.axis is None else lax.psum(x_R, self.axis)

    def largest(self, x_RV: jax.Array) -> jax.Array:
        """Of each row, [R, 1]."""
        most_R1 = jnp.max(x_RV, axis=-1, keepdims=True)
        return most_R1 if self.axis is None else lax.pmax(most_R1, self.axis)

    def gathered(self, x_RX: jax.Array) -> jax.Array:
        """Columns of all devices side by side, in order of token id."""
        return x_RX if self.axis is None else lax.all_gather(x_RX, self.axis, axis=1, tiled=True)

    def likeliest(self, x_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The largest value of each row and its token id [R]: the lowest of equal ones, or a NaN's if there is one."""
        column_R1 = jnp.argmax(x_RV, axis=-1, keepdims=True)
        values_RX = self.gathered(jnp.take_along_axis(x_RV, column_R1, axis=1))
        ids_RX = self.gathered((self.first + column_R1).astype(jnp.int32))
        best_R1 = jnp.argmax(values_RX, axis=-1, keepdims=True)
        return jnp.take_along_axis(values_RX, best_R1, axis=1)[:, 0], jnp.take_along_axis(ids_RX, best_R1, axis=1)[:, 0]

    def top_k(self, x_RV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The `k` largest values of each row in descending order, and their token ids."""
        values_RX, columns_RX = lax.top_k(x_RV, min(k, self.local))
        ids_RX = (self.first + columns_RX).astype(jnp.int32)
        if self.axis is None:
            return values_RX, ids_RX
        values_RX, chosen_RX = lax.top_k(self.gathered(values_RX), k)
        return values_RX, jnp.take_along_axis(self.gathered(ids_RX), chosen_RX, axis=1)

    def locate(self, mass_R: jax.Array, u_R: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Where the running sum of all devices' masses passes u times their total: here or not, and how far in."""
        if self.axis is None:
            return jnp.ones_like(mass_R, bool), u_R * mass_R
        all_RX = lax.all_gather(mass_R, self.axis, axis=1)
        ends_RX = jnp.cumsum(all_RX, axis=1)
        target_R = u_R * ends_RX[:, -1]
        owner_R = jnp.minimum(jnp.sum(ends_RX <= target_R[:, None], axis=1), last_positive(all_RX))
        before_R = jnp.take_along_axis(ends_RX - all_RX, owner_R[:, None], axis=1)[:, 0]
        return owner_R == lax.axis_index(self.axis), target_R - before_R


def last_positive(x_RC: jax.Array) -> jax.Array:
    """The last column of each row that is above 0."""
    return x_RC.shape[1] - 1 - jnp.argmax(x_RC[:, ::-1] > 0, axis=-1)
