"""Runs kernels on this CPU as if it were an accelerator."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractMesh

from pallas_kernels.dispatch import Device, current_device
from pallas_kernels.paged_attention import gpu

TPUS = {"tpu": Device("tpu", "TPU v6 lite"), "tpu-2-cores": Device("tpu", "TPU v5", cores=2)}
HOPPER = Device("gpu", "NVIDIA H200")


class PlainDots:
    """`gpu.TensorCores` where there are none. Reads are fenced, as the interpreter wants of all but `wgmma`."""

    @staticmethod
    def scores(q_RH, k_CH):
        products = jnp.dot(q_RH[...].astype(jnp.float32), k_CH[...].astype(jnp.float32).T)
        plgpu.commit_smem()
        return products

    @staticmethod
    def weighted(acc_RH, weights_RC, v_CH):
        assert weights_RC.dtype == jnp.bfloat16
        products = jnp.dot(weights_RC.astype(jnp.float32), v_CH[...].astype(jnp.float32))
        plgpu.commit_smem()
        return acc_RH + products


def described(device: Device) -> contextlib.AbstractContextManager:
    """While it lasts, programs are traced for this device."""
    abstract = jax.sharding.AbstractDevice if hasattr(jax.sharding, "AbstractDevice") else jax._src.mesh.AbstractDevice
    kind = abstract(device_kind=device.kind, num_cores=device.cores, platform=device.platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=kind))


@contextlib.contextmanager
def chip(implementation: str) -> Iterator[tuple[Device, str]]:
    """The device to trace for, and the implementation's name; kernels are interpreted, and races are errors."""
    if implementation in TPUS:
        with tpu(TPUS[implementation]) as device:
            yield device, "tpu"
    elif implementation == "gpu":
        with hopper() as device:
            yield device, "gpu"
    else:
        yield current_device(), implementation


@contextlib.contextmanager
def tpu(device: Device) -> Iterator[Device]:
    # Memory that nothing wrote is NaN; a copy happens when it is waited for, as late as it may.
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=device.cores)
    try:
        with described(device), pltpu.force_tpu_interpret_mode(params):
            yield device
    except BaseException:
        pltpu.reset_tpu_interpret_mode_state()
        raise


@contextlib.contextmanager
def hopper() -> Iterator[Device]:
    """Of two multiprocessors, and plain dots in place of tensor cores. Memory that nothing wrote is NaN."""
    few = mock.patch.dict(gpu.MULTIPROCESSORS, {"H200": 2})
    interpreter = plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True))
    try:
        with mock.patch.object(gpu, "products", PlainDots), few, described(HOPPER), interpreter:
            yield HOPPER
    finally:
        reset_gpu_interpret_mode_state()
