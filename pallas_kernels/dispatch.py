"""Chooses an implementation of an op. A refusal always has a reason that can be printed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import jax

logger = logging.getLogger(__name__)


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


class Implementation[F: Callable](NamedTuple):
    """
    Attributes:
      function: gives what does it.
      refusal: gives why it cannot serve this call, or None.
      platform: the only one it is for; None is for all.
    """

    function: Callable[[], F]
    refusal: Callable[[], str | None] = lambda: None
    platform: str | None = None


def choose[F: Callable](op: str, implementations: Mapping[str, Implementation[F]], forced: str | None) -> F:
    """The first implementation that does not refuse, or the forced one.

    That a kernel of the device's own platform does not serve a call is logged, once for each reason.

    Args:
      op: the op's name, for messages.
      implementations: by preference.
      forced: a name that must be used.

    Raises:
      KernelError: the forced implementation is unknown or refuses, or all refuse.
    """
    if forced is not None and forced not in implementations:
        raise KernelError(f"{op}: no implementation {forced!r}; there are {', '.join(sorted(implementations))}")
    device = current_device()
    reasons: list[str] = []
    of_platform: list[str] = []  # of a kernel that is made for it
    for name in (forced,) if forced is not None else implementations:
        function, refusal, platform = implementations[name]
        elsewhere = platform not in (None, device.platform)
        reason = f"the device is no {platform.upper()} but {device.kind}" if platform and elsewhere else refusal()
        if reason is None:
            if of_platform:
                _tell(f"{op} on {device.kind} is by {name} ({'; '.join(of_platform)})")
            return function()
        reasons.append(f"{name}: {reason}")
        if platform == device.platform:
            of_platform.append(reasons[-1])
    raise KernelError(f"{op}: no implementation serves this call ({'; '.join(reasons)})")


@cache
def _tell(message: str) -> None:
    logger.warning(message)
