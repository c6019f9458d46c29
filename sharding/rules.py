"""Which mesh axis a logical axis is split over, as data: a researcher swaps this table, not code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jax.sharding import PartitionSpec

REPLICATED = "replicated"
# Mesh axes that split arrays. `data` and `stage` are not among them: each of their submeshes has programs of its own.
ARRAY_AXES = ("tensor", "expert")


class MeshError(ValueError):
    """A mesh cannot work; the message says which axis, which size, and what would fit."""


# Logical axis -> mesh axis, or `REPLICATED`: of weights, of the KV pages, and of the residual stream [tokens, model].
RULES: Mapping[str, str] = {
    "vocab": "tensor",
    "heads": "tensor",
    "feed_forward": "tensor",
    "model": REPLICATED,
    "kv_heads": "tensor",
    "activation_tokens": REPLICATED,
    "activation_model": REPLICATED,
}


@dataclass(frozen=True, slots=True)
class ShardingRules:
    """A rules table on a mesh of a given size.

    Attributes:
      sizes: (mesh axis, size), of `ARRAY_AXES`.
      table: (logical axis, mesh axis or `REPLICATED`), for every logical axis.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    table: tuple[tuple[str, str], ...] = tuple(RULES.items())

    @classmethod
    def of(cls, sizes: Mapping[str, int], changes: Mapping[str, str] | None = None) -> ShardingRules:
        """The default table with some changes, checked.

        Raises:
          MeshError: an unknown axis, or a table that no attention can work by.
        """
        table = dict(RULES)
        for logical, axis in (changes or {}).items():
            if logical not in RULES:
                raise MeshError(f"rules: unknown logical axis {logical!r}; they are {', '.join(RULES)}")
            if axis not in (*ARRAY_AXES, REPLICATED):
                why = " (its submeshes run programs of their own)" if axis in ("data", "stage") else ""
                choice = ", ".join((*ARRAY_AXES, REPLICATED))
                raise MeshError(f"rules: {logical} = {axis!r} splits no array{why}; use one of {choice}")
            table[logical] = axis
        if table["heads"] != table["kv_heads"]:
            raise MeshError(
                f"rules: heads = {table['heads']!r} but kv_heads = {table['kv_heads']!r}; query heads attend to their "
                "own KV heads, so both must lie on the same mesh axis"
            )
        return cls(tuple((axis, sizes.get(axis, 1)) for axis in ARRAY_AXES), tuple(table.items()))

    def axis(self, logical: str | None) -> str | None:
        """The mesh axis that a logical axis is split over; None if it is whole on every device."""
        axis = dict(self.table)[logical] if logical is not None else REPLICATED
        return axis if axis != REPLICATED and dict(self.sizes).get(axis, 1) > 1 else None

    def ways(self, logical: str | None) -> int:
        """How many parts it is split into."""
        axis = self.axis(logical)
        return 1 if axis is None else dict(self.sizes)[axis]

    def spec(self, axes: Sequence[str | None]) -> PartitionSpec:
        """The split of an array whose dimensions have these logical axes.

        Raises:
          MeshError: two of them lie on one mesh axis.
        """
        split = [self.axis(logical) for logical in axes]
        for axis in filter(None, split):
            if split.count(axis) > 1:
                both = " and ".join(f"{logical!r}" for logical in axes if self.axis(logical) == axis)
                raise MeshError(
                    f"rules: {both} are axes of one array, and both lie on {axis!r}; make one of them {REPLICATED}"
                )
        return PartitionSpec(*split)
