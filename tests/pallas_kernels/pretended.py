"""Runs kernels on this CPU as if it were an accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh

from pallas_kernels.dispatch import Device, current_device

CHIPS = {"tpu": Device("tpu", "TPU v6 lite"), "tpu-2-cores": Device("tpu", "TPU v5", cores=2)}


def described(device: Device) -> contextlib.AbstractContextManager:
    """While it lasts, programs are traced for this device."""
    abstract = jax.sharding.AbstractDevice if hasattr(jax.sharding, "AbstractDevice") else jax._src.mesh.AbstractDevice
    kind = abstract(device_kind=device.kind, num_cores=device.cores, platform=device.platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))


@contextlib.contextmanager
def chip(implementation: str) -> Iterator[tuple[Device, str]]:
    """The device to trace for, and the implementation's name; TPU kernels are interpreted, and races are errors."""
    if implementation not in CHIPS:
        yield current_device(), implementation
        return
    device = CHIPS[implementation]
    # Memory that nothing wrote is NaN; a copy happens when it is waited for, as late as it may.
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=device.cores)
    try:
        with described(device), pltpu.force_tpu_interpret_mode(params):
            yield device, "tpu"
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise
