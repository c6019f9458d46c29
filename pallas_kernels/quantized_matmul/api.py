"""The contract of the quantized matmul; see `reference.py` for its plainest form and `weights.py` for the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.dispatch import Device, Implementation, KernelError, choose, current_device
from pallas_kernels.quantized_matmul import reference, xla
from pallas_kernels.quantized_matmul.weights import GROUP_SIZES, ChannelWeight, GroupedWeight, Weight

_FLOATS = tuple(map(jnp.dtype, (jnp.float32, jnp.float16, jnp.bfloat16)))
_ACTIVATIONS = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float32)))
_CHANNEL = tuple(map(jnp.dtype, (jnp.int8, jnp.float8_e4m3fn)))
_GROUPED = tuple(map(jnp.dtype, (jnp.int4, jnp.uint4, jnp.int8, jnp.float8_e4m3fn)))


def quantized_matmul(
    x_TI: jax.Array,
    w: Weight,
    *,
    activations: str | None = None,
    out_dtype: jax.typing.DTypeLike | None = None,
    inputs_axis: str | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """x @ w, products summed in float32 (int32 with `activations="int8"`).

    Args:
      x_TI: bfloat16 or float32.
      w: `ChannelWeight`, or `GroupedWeight` with groups of 16, 32, 64 or 128 inputs.
      activations: "int8" rounds each row of x to int8, its largest magnitude to 127, and multiplies integers; for
        `ChannelWeight` alone.
      out_dtype: float32, bfloat16 or float16; x's by default.
      inputs_axis: under `shard_map`, the mesh axis that the inputs are split over: rows are then rounded to int8 alike
        on all devices, whose results are parts of a sum.
      implementation: force one by name ("mosaic_gpu", "xla", "reference"), instead of choosing by device.

    Returns:
      y_TO, of `out_dtype`.

    Raises:
      KernelError: shapes, dtypes, the group size or the axis do not fit, or the forced implementation cannot serve the
        call.
    """
    _check_activations(x_TI, w, activations)
    _check_channel(w) if isinstance(w, ChannelWeight) else _check_grouped(w)
    dtype = _checked_out_dtype(x_TI.dtype if out_dtype is None else out_dtype)
    if activations == "int8" and inputs_axis is not None:
        _check_axis(inputs_axis)

    def mosaic_gpu() -> Callable[..., jax.Array]:
        from pallas_kernels.quantized_matmul import gpu  # imported where it runs: Mosaic takes a while to import

        return gpu.quantized_matmul

    function = choose(
        "quantized_matmul",
        {
            "mosaic_gpu": Implementation(mosaic_gpu, lambda: _refused_by_mosaic_gpu(current_device(), x_TI.dtype, w)),
            "xla": Implementation(lambda: xla.quantized_matmul),
            "reference": Implementation(lambda: reference.quantized_matmul),
        },
        forced=implementation,
    )
    return function(x_TI, w, activations=activations, out_dtype=dtype, inputs_axis=inputs_axis)


def stores_floats(device: Device, rows: int, dtype: jax.typing.DTypeLike, w: Weight) -> str | None:
    """Why the kernel does not serve a product of so many rows, which then first writes the weight out in floats; None
    if it does not.

    Args:
      w: the weight, or anything with its shapes and dtypes.
    """
    if device.platform != "gpu" or not xla.stores_floats(device, rows, w):
        return None
    return _refused_by_mosaic_gpu(device, jnp.dtype(dtype), w)


def _refused_by_mosaic_gpu(device: Device, dtype: jnp.dtype, w: Weight) -> str | None:
    if (refusal := _no_hopper(device)) is not None:
        return refusal
    values = w.values_IO if isinstance(w, ChannelWeight) else w.values_GJO
    if isinstance(w, ChannelWeight) or jax.dtypes.itemsize_bits(values.dtype) != 4:
        return f"serves groups of 4 bits, not {type(w).__name__} of {values.dtype}"
    if dtype != jnp.bfloat16:
        return f"serves bfloat16 activations, not {dtype}"
    if w.shape[1] % 256:
        return f"serves multiples of 256 outputs, not {w.shape[1]}"
    return None


def _no_hopper(device: Device) -> str | None:
    if device.platform == "gpu":
        from pallas_kernels.paged_attention.gpu import HOPPER  # imported for GPUs alone: Mosaic takes a while to import

        if HOPPER.search(device.kind):
            return None
    return f"needs a GPU of compute capability 9.0 (H100, H200, GH200 or H20), not {device.kind}"


def _check_activations(x_TI: jax.Array, w: Weight, activations: str | None) -> None:
    _check_array("x", x_TI)
    if x_TI.ndim != 2 or 0 in x_TI.shape:
        raise KernelError(f"x is {x_TI.shape}; it has two dimensions, rows and inputs, each at least 1")
    if x_TI.dtype not in _ACTIVATIONS:
        raise KernelError(f"x is {x_TI.dtype}; it is one of {_names(_ACTIVATIONS)}")
    if not isinstance(w, ChannelWeight | GroupedWeight):
        raise KernelError(f"w is a {type(w).__name__}; it is a ChannelWeight or a GroupedWeight")
    if activations not in (None, "int8"):
        raise KernelError(f"activations is {activations!r}; it is None or 'int8'")
    values, ndim = (w.values_IO, 2) if isinstance(w, ChannelWeight) else (w.values_GJO, 3)
    _check_array("the weight's values", values)
    if values.ndim != ndim or 0 in values.shape:
        raise KernelError(f"the weight's values are {values.shape}; they have {ndim} dimensions, each at least 1")
    if w.shape[0] != x_TI.shape[1]:
        raise KernelError(f"x has {x_TI.shape[1]} inputs and the weight {w.shape[0]}")
    if activations == "int8" and not (isinstance(w, ChannelWeight) and values.dtype == jnp.int8):
        raise KernelError("activations='int8' needs a ChannelWeight of int8: sums over groups have their own scales")


def _check_channel(w: ChannelWeight) -> None:
    if w.values_IO.dtype not in _CHANNEL:
        raise KernelError(f"a ChannelWeight's values are {w.values_IO.dtype}; they are one of {_names(_CHANNEL)}")
    _check_floats("scale", w.scale_O, w.shape[1:])


def _check_grouped(w: GroupedWeight) -> None:
    G, J, O = w.values_GJO.shape  # noqa: E741
    if w.values_GJO.dtype not in _GROUPED:
        raise KernelError(f"a GroupedWeight's values are {w.values_GJO.dtype}; they are one of {_names(_GROUPED)}")
    if J not in GROUP_SIZES:
        raise KernelError(f"groups of {J} inputs; they are of {', '.join(map(str, GROUP_SIZES))}")
    _check_floats("scales", w.scales_GO, (G, O))
    if w.zeros_GO is not None and w.minima_GO is not None:
        raise KernelError("a weight has zero points or minima, not both")
    if w.minima_GO is not None:
        _check_floats("minima", w.minima_GO, (G, O))
    if w.zeros_GO is None:
        return
    _check_array("zeros", w.zeros_GO)
    if w.zeros_GO.shape != (G, O) or w.zeros_GO.dtype != jnp.int8:
        raise KernelError(f"zeros are {w.zeros_GO.dtype} {w.zeros_GO.shape}; they are int8 {(G, O)}")


def _check_array(name: str, value: Any) -> None:
    if not isinstance(value, jax.Array | np.ndarray):
        raise KernelError(f"{name}: {type(value).__name__}; an array is needed")


def _check_floats(name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    _check_array(name, array)
    if array.shape != shape or array.dtype not in _FLOATS:
        raise KernelError(f"{name}: {array.dtype} {array.shape}; needed: {shape}, one of {_names(_FLOATS)}")


def _checked_out_dtype(out_dtype: Any) -> jnp.dtype:
    try:
        dtype = jnp.dtype(out_dtype)
    except TypeError:
        dtype = None
    if dtype not in _FLOATS:
        raise KernelError(f"out_dtype is {dtype or repr(out_dtype)}; it is one of {_names(_FLOATS)}")
    return dtype


def _check_axis(inputs_axis: Any) -> None:
    message = f"inputs_axis is {inputs_axis!r}; it is None, or under shard_map the name of one of the mesh's axes"
    if not isinstance(inputs_axis, str):
        raise KernelError(message)
    try:
        lax.axis_size(inputs_axis)
    except NameError as error:
        raise KernelError(message) from error


def _names(dtypes: tuple[jnp.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))
