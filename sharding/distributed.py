"""Several processes as one group of devices: their roles, how they meet under `jax.distributed`, what they agree on."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from sharding.mesh import MeshConfig
from sharding.rules import MeshError

_BROADCAST_BYTES = 1024
# Each process would autotune a part of every program and wait for the others' parts, and one that finds a program on
# disk makes no part.
_XLA_FLAGS = "--xla_gpu_shard_autotuning=false"


class RoleError(ValueError):
    """The settings of a process in its group do not go together; the message says which."""


@dataclass(frozen=True, slots=True)
class Role:
    """Which process of its group this one is; all None lets JAX find out from SLURM, Kubernetes, MPI or a TPU pod.

    Attributes:
      coordinator: host:port, the same for all: an address of process 0's machine that all can reach, and a free port.
    """

    coordinator: str | None = None
    num_processes: int | None = None
    process_id: int | None = None

    @classmethod
    def of(
        cls, coordinator: str | None, num_processes: int | None, process_id: int | None, *, detect: bool
    ) -> Role | None:
        """From what people say; None is one process alone.

        Raises:
          RoleError: one is missing, out of range, or given beside `detect`.
        """
        given = (coordinator, num_processes, process_id)
        if detect:
            if given != (None, None, None):
                raise RoleError("either the group is detected, or coordinator, num_processes and process_id are given")
            return cls()
        if given == (None, None, None):
            return None
        if coordinator is None or num_processes is None or process_id is None:
            raise RoleError("coordinator, num_processes and process_id go together: all three or none")
        host, colon, port = coordinator.rpartition(":")
        if not (host and colon and port.isascii() and port.isdecimal() and 0 < int(port) < 65536):
            raise RoleError(f"coordinator {coordinator!r} is not host:port")
        if num_processes < 1 or not 0 <= process_id < num_processes:
            raise RoleError(f"process_id {process_id} is not from 0 to num_processes - 1 = {num_processes - 1}")
        return cls(coordinator, num_processes, process_id)

    @property
    def coordinator_host(self) -> str | None:
        return None if self.coordinator is None else self.coordinator.rpartition(":")[0].strip("[]")


def join(role: Role) -> None:
    """Enters the group, and returns once all are there. Before anything touches a device.

    `jax.distributed` ends this process when another is lost and it notices; it has to be one that may be ended.
    """
    alone = role.num_processes == 1
    if not alone:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_XLA_FLAGS}".strip()
    # Of CPU devices only. Among those of one process gloo is several times slower than XLA's own.
    jax.config.update("jax_cpu_collectives_implementation", None if alone else "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM for itself
    jax.distributed.initialize(role.coordinator, role.num_processes, role.process_id)


def broadcast(fields: Mapping[str, Any] | None) -> dict[str, Any]:
    """What process 0 says, to all; JSON of at most about 1000 bytes. All processes must call it."""
    said = np.zeros(_BROADCAST_BYTES, np.uint8)
    if fields is not None:
        text = json.dumps(fields).encode()
        said[: len(text)] = np.frombuffer(text, np.uint8)
    return json.loads(np.asarray(multihost_utils.broadcast_one_to_all(said)).tobytes().rstrip(b"\0"))


def least(number: int) -> int:
    """The least of the processes' numbers, below 2^31. All must call it."""
    return int(np.min(multihost_utils.process_allgather(np.int32(number))))


def own_replicas(submeshes: Sequence[Sequence[Mesh]]) -> dict[int, bool]:
    """The replicas of which this process has devices, and whether it is the first that does.

    Args:
      submeshes: by replica and stage.
    """
    own = jax.process_index()
    processes = {number: _processes(stages) for number, stages in enumerate(submeshes)}
    return {number: own == min(some) for number, some in processes.items() if own in some}


def check_processes(mesh: MeshConfig, submeshes: Sequence[Sequence[Mesh]]) -> None:
    """Whether a mesh suits the processes that its devices belong to.

    Raises:
      MeshError: a process would have nothing to do, or the stages of a replica lie in several processes.
    """
    used = {process for stages in submeshes for process in _processes(stages)}
    if idle := sorted({device.process_index for device in jax.devices()} - used):
        raise MeshError(
            f"mesh {mesh} leaves process {idle[0]} without work: it takes {mesh.num_devices} of "
            f"{len(jax.devices())} devices of {jax.process_count()} processes; start fewer, or use more devices"
        )
    for number, stages in enumerate(submeshes):
        if len(stages) > 1 and len(processes := sorted(_processes(stages))) > 1:
            shown = ", ".join(map(str, processes))
            raise MeshError(
                f"stage={len(stages)}: the stages of replica {number} lie in processes {shown}; this version runs the "
                "stages of a replica in one process only (data and tensor may span several)"
            )


def _processes(stages: Sequence[Mesh]) -> set[int]:
    return {device.process_index for mesh in stages for device in mesh.devices.flat}


def own_address() -> str:
    """An address of this machine that others are likely to reach: the one it would call out from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent
            return probe.getsockname()[0]
        except OSError:  # no route out
            return socket.gethostbyname(socket.gethostname())
