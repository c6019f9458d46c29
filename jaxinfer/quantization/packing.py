"""What the formats of Hugging Face folders share: small numbers in 32-bit words, and groups of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.quantization.tensor import Packed, Scheme
from pallas_kernels.quantized_matmul import GROUP_SIZES

type Parts = Mapping[str, np.ndarray]  # a module's tensors by the last word of their names; read when they are sliced

INT32 = ("int32",)
FLOATS = ("float16", "bfloat16", "float32")


class Matrix(NamedTuple):
    """A quantized matrix of a checkpoint.

    Attributes:
      shape: [out, in].
      parts: the tensors it is made of, and those beside it that are of no use here.
      read: gives some of its rows; raises CheckpointError for numbers that mean none.
    """

    shape: tuple[int, int]
    scheme: Scheme
    parts: frozenset[str]
    read: Callable[[slice], Packed]


class Method(Protocol):
    """What a `quantization_config` says. Made from one; raises UnsupportedError, with a name, for what is not read."""

    def matrix(self, module: str, parts: Parts) -> Matrix | None:
        """A module's matrix, None if it is not quantized.

        Raises:
          CheckpointError: tensors are missing, or do not go together.
        """


def taken(parts: Parts, name: str, dtypes: Sequence[str], shape: Sequence[int | None]) -> np.ndarray:
    """A tensor, checked; None in a shape is any size. Raises CheckpointError."""
    if name not in parts:
        raise CheckpointError(f"has no {name}")
    array = parts[name]
    fits = len(array.shape) == len(shape) and all(want in (None, size) for size, want in zip(array.shape, shape))  # noqa: B905
    if array.dtype.name not in dtypes or not fits or not array.size:
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise CheckpointError(
            f"{name} is {array.dtype.name} {list(array.shape)}, expected {' or '.join(dtypes)} [{expected}]"
        )
    return array


def positive(value: Any, name: str) -> int:
    """A size that a config says; raises CheckpointError."""
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{name} is {value!r}, expected a size")
    return value


def group_size(config: Mapping[str, Any]) -> int | None:
    """Of AWQ and GPTQ; None for -1, which is a row. Raises CheckpointError."""
    size = config.get("group_size", config.get("q_group_size", 128))
    return None if size == -1 else positive(size, "group_size")


def integer_scheme(
    bits: int, group: int | None, scales: np.dtype, *, symmetric: bool, reordered: bool = False
) -> Scheme:
    """The scheme of integers with scales, and with zero points unless they are symmetric.

    Groups of a size that is none of `GROUP_SIZES`, and rows without groups where a scheme has none such, are kept as
    smaller groups that repeat their scale.

    Args:
      group: of the file; None if a row has none.
    """
    name: Literal["float32", "bfloat16", "float16"] = scales.name  # type: ignore[assignment]
    if group is None and bits == 8 and symmetric:
        return Scheme("int8", None, name)
    offset: Literal["zeros"] | None = None if symmetric else "zeros"
    return Scheme("int8" if bits == 8 else "int4", kept_group(group), name, offset, reordered)


def kept_group(group: int | None) -> int:
    """The largest size of `GROUP_SIZES` that divides a group; raises UnsupportedError if none does."""
    most = max(GROUP_SIZES)
    kept = most if group is None else math.gcd(group, most)
    if kept not in GROUP_SIZES:
        raise UnsupportedError(f"groups of {group} are not supported: only multiples of {min(GROUP_SIZES)}")
    return kept


def regrouped(by_group_OG: np.ndarray, inputs: int, group: int | None, scheme: Scheme) -> np.ndarray:
    """Scales or zero points of a file's groups -> of the scheme's, which are as large or divide them."""
    if scheme.group is None or scheme.group == group:
        return np.ascontiguousarray(by_group_OG)
    groups = -(-inputs // scheme.group)
    times = groups if group is None else group // scheme.group
    return np.repeat(by_group_OG, times, axis=1)[:, :groups]


def unpacked(words: np.ndarray, bits: int) -> np.ndarray:
    """Numbers of 4 or 8 bits in int32 words [..., n], the lowest first -> uint8 [..., n * 32 / bits]."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    numbers = np.empty((*octets.shape, 2), np.uint8)
    np.bitwise_and(octets, 15, out=numbers[..., 0])
    np.right_shift(octets, 4, out=numbers[..., 1])
    return numbers.reshape(*octets.shape[:-1], 2 * octets.shape[-1])


def paired(values_OI: np.ndarray) -> np.ndarray:
    """Values of 4 bits, signed or not, two to a byte, the first in its low half: uint8 [O, I / 2]."""
    low, high = values_OI[:, ::2].view(np.uint8), values_OI[:, 1::2].view(np.uint8)
    return low & 15 | high << 4


def unpaired(octets: np.ndarray, *, signed: bool) -> np.ndarray:
    """What `paired` was given: int8 [O, I]."""
    numbers = unpacked(octets, 4)
    return ((numbers ^ 8) - np.uint8(8) if signed else numbers).view(np.int8)


def integers(
    scheme: Scheme,
    values_OI: np.ndarray,
    scales_OG: np.ndarray,
    zeros_OG: np.ndarray | None,
    group: int | None,
    order_I: np.ndarray | None = None,
) -> Packed:
    """Rows of unsigned values and zero points, as files have them, in a scheme of `integer_scheme`.

    Args:
      values_OI, zeros_OG: uint8; of a symmetric scheme all zero points lie in the middle, and need not be there.
      group: of the file.

    Raises:
      CheckpointError: zero points that a symmetric matrix has not.
    """
    middle = np.uint8(1 << scheme.bits - 1)
    inputs = values_OI.shape[1]
    if scheme.offset is None:
        if zeros_OG is not None and (zeros_OG != middle).any():
            raise CheckpointError(f"has zero points other than {middle}, though it is said to be symmetric")
        zeros_OG = None
    else:
        assert zeros_OG is not None
        zeros_OG = regrouped((zeros_OG - middle).view(np.int8), inputs, group, scheme)
    values = (values_OI - middle).view(np.int8)
    return Packed(scheme, values, regrouped(scales_OG, inputs, group, scheme), zeros_OG, order_I=order_I)
