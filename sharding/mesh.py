"""Meshes as data: `data=2,tensor=4` -> a JAX mesh."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

AXES = ("data", "stage", "tensor", "expert")


class MeshError(ValueError):
    """A mesh cannot work; the message says which axis, which size, and what would fit."""


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """Sizes of the mesh axes."""

    data: int = 1
    stage: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def parse(cls, text: str | None) -> MeshConfig:
        """Reads `axis=size,...`; None is one device.

        Raises:
          MeshError: an unknown or repeated axis, or a size that is no positive integer.
        """
        sizes: dict[str, int] = {}
        for part in filter(None, (text or "").split(",")):
            axis, _, size = part.partition("=")
            axis = axis.strip()
            if axis not in AXES:
                raise MeshError(f"mesh {text!r}: unknown axis {axis!r}; the axes are {', '.join(AXES)}")
            if axis in sizes:
                raise MeshError(f"mesh {text!r}: axis {axis!r} is given twice")
            if not (size.strip().isascii() and size.strip().isdecimal()) or int(size) < 1:
                raise MeshError(f"mesh {text!r}: the size of {axis!r} must be a positive integer, not {size!r}")
            sizes[axis] = int(size)
        return cls(**sizes)

    @property
    def num_devices(self) -> int:
        return self.data * self.stage * self.tensor * self.expert

    def build(self) -> Mesh:
        """The mesh over JAX's first devices. Its axes have type Auto.

        Raises:
          MeshError: it needs more devices than there are.
        """
        devices = jax.devices()
        if self.num_devices > len(devices):
            raise MeshError(f"{self} needs {self.num_devices} devices; there are {len(devices)}")
        sizes = tuple(getattr(self, axis) for axis in AXES)
        return Mesh(np.array(devices[: self.num_devices]).reshape(sizes), AXES)
