"""A weight at 8 or 4 bits: how it is declared (`Scheme`), how it comes from a file (`Packed`, NumPy) and how it lies
on devices (`QuantizedWeight`, a pytree).

Dimension letters: O outputs, I inputs, G groups of inputs, J inputs of a group. A file's side is [O, ...], as Hugging
Face has matrices; the devices' is [I, O] or [G, J, O], as `pallas_kernels.quantized_matmul` multiplies them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxinfer.errors import CheckpointError
from pallas_kernels.quantized_matmul import GROUP_SIZES, ChannelWeight, GroupedWeight

BITS = {"int8": 8, "int4": 4, "uint4": 4, "float8_e4m3fn": 8}


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the numbers of a matrix are kept: `(value - zero) * scale + minimum`.

    Attributes:
      values: dtype of the values: "int8", "int4", "uint4" or "float8_e4m3fn".
      group: how many inputs of an output share a scale; None: all of them.
      scales: dtype of the scales, and of minima.
      offset: what a group has beside its scale: integer zero points (AWQ, GPTQ) or minima (GGUF). Where a file counts
        values and zero points from 0, with zero points both are 8 less here: XLA on GPUs reads int4, but not uint4.
      reordered: whether inputs are kept in an order of their own (GPTQ's act-order).
      activations: "int8" rounds each token's activations to int8 and multiplies integers; for int8 without groups.
    """

    values: Literal["int8", "int4", "uint4", "float8_e4m3fn"]
    group: int | None = None
    scales: Literal["float32", "bfloat16", "float16"] = "float32"
    offset: Literal["zeros", "minima"] | None = None
    reordered: bool = False
    activations: Literal["int8"] | None = None

    def __post_init__(self) -> None:
        if (
            self.group not in (None, *GROUP_SIZES)
            or (self.offset is not None and self.group is None)
            or (self.activations is not None and (self.values != "int8" or self.group is not None))
        ):
            raise ValueError(f"{self} is no way to keep numbers")

    @property
    def bits(self) -> int:
        """Of a value."""
        return BITS[self.values]

    def within(self, inputs: int, ways: int) -> Scheme:
        """The same with groups that lie whole in each of `ways` equal shards of the inputs: smaller, if need be.

        Raises:
          ValueError: none do.
        """
        if self.group is None or ways == 1:
            return self
        group = math.gcd(inputs // ways, self.group)
        if group not in GROUP_SIZES:
            raise ValueError(f"groups of {self.group} do not lie whole in {ways} shards of {inputs} inputs")
        return replace(self, group=group)

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Of a whole weight, on devices."""
        return sum(array.nbytes for array in jax.tree.leaves(self.arrays(outputs, inputs, (None, None))))

    def is_from(self, other: Scheme) -> bool:
        """Whether a weight of another scheme has it with the same values: in smaller groups, multiplied otherwise."""
        smaller = self.group == other.group or (bool(self.group and other.group) and other.group % self.group == 0)  # type: ignore[operator]
        return smaller and replace(self, group=other.group, activations=other.activations) == other

    def __str__(self) -> str:
        words = [self.values, "" if self.group is None else f"in groups of {self.group}"]
        words += ["" if self.offset is None else f"with {'zero points' if self.offset == 'zeros' else 'minima'}"]
        words += ["in its own order" if self.reordered else "", "times int8" if self.activations else ""]
        return " ".join(filter(None, words))

    def arrays(self, outputs: int, inputs: int, axes: tuple[str | None, str | None]) -> QuantizedWeight:
        """The `ArraySpec` of each array of a weight [outputs, inputs]; inputs are filled up to whole groups.

        Args:
          axes: logical axes of outputs and inputs.
        """
        out, into = axes
        numbers = np_dtype(self.scales)
        order: Any = ArraySpec((inputs,), np.dtype(np.int32), (None,)) if self.reordered else None
        values = np_dtype(self.values)
        if self.group is None:
            scale = ArraySpec((outputs,), numbers, (out,))
            channel = ChannelWeight(ArraySpec((inputs, outputs), values, (into, out)), scale)  # type: ignore[arg-type]
            return QuantizedWeight(channel, order, self)
        groups = -(-inputs // self.group)

        def of_groups(dtype: np.dtype) -> Any:
            return ArraySpec((groups, outputs), dtype, (into, out))

        grouped = GroupedWeight(
            ArraySpec((groups, self.group, outputs), values, (into, None, out)),  # type: ignore[arg-type]
            of_groups(numbers),
            of_groups(np.dtype(np.int8)) if self.offset == "zeros" else None,
            of_groups(numbers) if self.offset == "minima" else None,
        )
        return QuantizedWeight(grouped, order, self)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array that a weight is kept as: its shape, dtype and the logical axis of each dimension."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]

    @property
    def nbytes(self) -> int:
        """On a device, where 4-bit values lie two to a byte."""
        return nbytes(self.shape, self.dtype)


def np_dtype(name: str) -> np.dtype:
    """A dtype by its name, those of ml_dtypes among them."""
    return np.dtype(getattr(ml_dtypes, name, name))


def nbytes(shape: Sequence[int], dtype: Any) -> int:
    """What an array takes on a device, where 4-bit values lie two to a byte."""
    return math.prod(shape) * BITS.get(np.dtype(dtype).name, 8 * np.dtype(dtype).itemsize) // 8


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "order_I"], meta_fields=["scheme"])
@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A matrix on its devices. Its arrays may be `ArraySpec`s, or anything else there is one of for each array.

    Attributes:
      weight: as the kernels take it.
      order_I: int32: which input of the model each input of `weight` is; None if all are in order.
    """

    weight: ChannelWeight | GroupedWeight
    order_I: jax.Array | None
    scheme: Scheme


class Packed(NamedTuple):
    """Rows (outputs) of a matrix in host memory, packed no more: one value a byte.

    Attributes:
      values_OI: int8 whatever the number of bits, or float8_e4m3fn.
      scales_OG: of the scheme's dtype; G is 1 where there are no groups.
      zeros_OG: int8; minima_OG: as scales.
      order_I: int32, as in `QuantizedWeight`.
    """

    scheme: Scheme
    values_OI: np.ndarray
    scales_OG: np.ndarray
    zeros_OG: np.ndarray | None = None
    minima_OG: np.ndarray | None = None
    order_I: np.ndarray | None = None

    def dequantize(self) -> np.ndarray:
        """The numbers that are meant: float32 [O, I], inputs in the model's order."""
        I = self.values_OI.shape[1]  # noqa: E741
        group = self.scheme.group or I

        def spread(array: np.ndarray) -> np.ndarray:
            return np.repeat(array.astype(np.float32), group, axis=1)[:, :I]

        numbers = self.values_OI.astype(np.float32)
        if self.zeros_OG is not None:
            numbers -= spread(self.zeros_OG)
        numbers *= spread(self.scales_OG)
        if self.minima_OG is not None:
            numbers += spread(self.minima_OG)
        if self.order_I is not None:
            numbers[:, self.order_I] = numbers.copy()
        return numbers

    def check(self, name: str) -> Packed:
        """Itself; raises CheckpointError, with the tensor's name, for what cannot be meant."""
        for what, array in (("scales", self.scales_OG), ("minima", self.minima_OG)):
            if array is not None and not np.isfinite(array.astype(np.float32)).all():
                raise CheckpointError(f"{name}: {what} that are not finite")
        if self.scheme.values == "float8_e4m3fn" and ((self.values_OI.view(np.uint8) & 0x7F) == 0x7F).any():  # NaN
            raise CheckpointError(f"{name}: values that are not finite")
        if self.order_I is not None and not np.array_equal(np.sort(self.order_I), np.arange(self.order_I.size)):
            raise CheckpointError(f"{name}: its order of inputs is no permutation")
        return self

    def regrouped(self, group: int) -> Packed:
        """The same numbers in smaller groups, of which `group` inputs each make up the old ones."""
        assert self.scheme.group is not None
        times = self.scheme.group // group
        groups = -(-self.values_OI.shape[1] // group)

        def repeated(array: np.ndarray) -> np.ndarray:
            return np.repeat(array, times, axis=1)[:, :groups]

        return self._replace(
            scheme=replace(self.scheme, group=group),
            scales_OG=repeated(self.scales_OG),
            zeros_OG=None if self.zeros_OG is None else repeated(self.zeros_OG),
            minima_OG=None if self.minima_OG is None else repeated(self.minima_OG),
        )


def quantize(weights_OI: np.ndarray, scheme: Scheme) -> Packed:
    """Rounds to the nearest value, groups and rows each by themselves. Inputs keep their order.

    Scales are rounded to their dtype before values are chosen by them.

    Raises:
      ValueError: a weight that is not finite.
    """
    assert not scheme.reordered
    assert scheme.values != "uint4"
    assert scheme.offset is None or scheme.values == "int4"
    numbers = np.asarray(weights_OI, np.float32)
    O, I = numbers.shape  # noqa: E741
    group = scheme.group or I
    padded = np.pad(numbers, ((0, 0), (0, -I % group))).reshape(O, -1, group)
    if not np.isfinite(padded).all():
        raise ValueError("weights that are not finite")
    low, high = np.minimum(padded.min(-1), 0), np.maximum(padded.max(-1), 0)
    most = {"int8": 127, "int4": 7 if scheme.offset is None else 15, "float8_e4m3fn": 448}[scheme.values]
    spread = high - low if scheme.offset == "zeros" else np.maximum(high, -low)
    dtype = np_dtype(scheme.scales)
    scales = (np.where(spread > 0, spread, 1) / most).astype(dtype)
    scales = np.where(scales.astype(np.float32) > 0, scales, np.ones((), dtype))  # what is below the least scale
    steps = padded / scales.astype(np.float32)[..., None]
    if scheme.values == "float8_e4m3fn":
        values = np.clip(steps, -448, 448).astype(ml_dtypes.float8_e4m3fn)
        return Packed(scheme, values.reshape(O, -1)[:, :I], scales)
    if scheme.offset is None:
        values = np.clip(np.rint(steps), -most, most).astype(np.int8)
        return Packed(scheme, values.reshape(O, -1)[:, :I], scales)
    zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, most) - 8
    values = np.clip(np.rint(steps + zeros[..., None]), -8, 7).astype(np.int8)
    return Packed(scheme, values.reshape(O, -1)[:, :I], scales, zeros.astype(np.int8))


def laid_out(packed: Packed, inputs: int) -> QuantizedWeight:
    """As devices have it, still in host memory; filled up to `inputs`, then to whole groups, where x has zeros."""
    scheme = packed.scheme
    group = scheme.group or inputs
    whole = -(-inputs // group) * group
    values = packed.values_OI.T
    values = np.pad(values, ((0, whole - values.shape[0]), (0, 0)))
    values = np.ascontiguousarray(values).astype(np_dtype(scheme.values))
    order = packed.order_I
    if order is not None:
        order = np.concatenate([order, np.arange(len(order), inputs, dtype=np.int32)])
    weight: Any
    if scheme.group is None:
        weight = ChannelWeight(values, packed.scales_OG[:, 0])  # type: ignore[arg-type]
    else:

        def groups(array: np.ndarray | None) -> Any:
            missing = whole // group
            return None if array is None else np.pad(array.T, ((0, missing - array.shape[1]), (0, 0)))

        weight = GroupedWeight(
            values.reshape(-1, group, values.shape[1]),  # type: ignore[arg-type]
            groups(packed.scales_OG),
            groups(packed.zeros_OG),
            groups(packed.minima_OG),
        )
    return QuantizedWeight(weight, order, scheme)  # type: ignore[arg-type]


def as_rows(w: QuantizedWeight, scheme: Scheme) -> list[jax.Array]:
    """A weight's arrays, each with a row for each output: values [O, I], then scales and what else groups have.

    Args:
      scheme: the weight's own, or one that differs in the size of its groups: these are then split, or put together
        again.
    """
    if isinstance(w.weight, ChannelWeight):
        return [w.weight.values_IO.T, w.weight.scale_O[:, None]]
    values_GJO, *by_group = w.weight
    old, new = w.scheme.group, scheme.group
    assert old is not None
    assert new is not None
    rows = [values_GJO.reshape(-1, values_GJO.shape[-1]).T]
    for array_GO in by_group:
        if array_GO is not None:
            rows.append(jnp.repeat(array_GO.T, old // new, axis=1) if old > new else array_GO.T[:, :: new // old])
    return rows


def from_rows(rows: Sequence[jax.Array], order_I: jax.Array | None, scheme: Scheme) -> QuantizedWeight:
    """What `as_rows` was given."""
    values_OI, *by_group = rows
    if scheme.group is None:
        return QuantizedWeight(ChannelWeight(values_OI.T, by_group[0][:, 0]), order_I, scheme)
    values_GJO = values_OI.T.reshape(-1, scheme.group, values_OI.shape[0])
    scales_GO, *offset = (array.T for array in by_group)
    zeros_GO, minima_GO = (offset[0] if scheme.offset == name else None for name in ("zeros", "minima"))
    return QuantizedWeight(GroupedWeight(values_GJO, scales_GO, zeros_GO, minima_GO), order_I, scheme)
