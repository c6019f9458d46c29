"""Chooses an implementation of an op. A refusal always has a reason that can be printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax


class KernelError(ValueError):
    """An op was called with something it cannot serve, or a forced implementation refused."""


class Device(NamedTuple):
    """What a program is compiled for, in JAX's words.

    Attributes:
      platform: `tpu`, `gpu` or `cpu`.
      kind: as `NVIDIA H200`.
      cores: of the device; more than one only on TPUs that show two cores as one device.
    """

    platform: str
    kind: str
    cores: int = 1


def current_device() -> Device:
    """The device that is traced for: that of the abstract mesh in use, which need not exist here, else JAX's first."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None:
        return _device_of(described.platform, described.device_kind, described.num_cores)
    return device_of(jax.devices()[0])


def device_of(device: jax.Device) -> Device:
    """A device of JAX in our words."""
    return _device_of(device.platform, device.device_kind, getattr(device, "num_cores", None))


def _device_of(platform: str, kind: str, cores: int | None) -> Device:
    # A GPU tells its multiprocessors as cores.
    return Device("gpu" if platform in ("cuda", "rocm") else platform, kind, (cores or 1) if platform == "tpu" else 1)


def choose[F: Callable](
    op: str, implementations: Mapping[str, tuple[Callable[[], F], Callable[[], str | None]]], forced: str | None
) -> F:
    """The first implementation that does not refuse, or the forced one.

    Args:
      op: the op's name, for messages.
      implementations: by preference; name -> (gives the function, gives why it cannot serve this call, or None).
      forced: a name that must be used.

    Raises:
      KernelError: the forced implementation is unknown or refuses, or all refuse.
    """
    if forced is not None and forced not in implementations:
        raise KernelError(f"{op}: no implementation {forced!r}; there are {', '.join(sorted(implementations))}")
    reasons = []
    for name in (forced,) if forced is not None else implementations:
        function, refusal = implementations[name]
        reason = refusal()
        if reason is None:
            return function()
        reasons.append(f"{name}: {reason}")
    raise KernelError(f"{op}: no implementation serves this call ({'; '.join(reasons)})")
