"""Meshes as data: `data=2,tensor=4`, or a TOML file that also has a rules table -> JAX meshes.

    # mesh.toml
    [mesh]
    data = 2
    tensor = 4
    [rules]               # what differs from sharding.rules.RULES
    vocab = "replicated"

`data` means replicas and `stage` parts of the layers: each runs programs of its own on its submesh.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from sharding.rules import ARRAY_AXES, MeshError, ShardingRules

AXES = ("data", "stage", *ARRAY_AXES)


@dataclass(frozen=True, slots=True)
class MeshConfig:
    """Sizes of the mesh axes, and what the rules table changes of the default one."""

    data: int = 1
    stage: int = 1
    tensor: int = 1
    expert: int = 1
    rule_changes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str | None) -> MeshConfig:
        """Reads `axis=size,...` or the name of a TOML file; None is one device.

        Raises:
          MeshError: an unknown or repeated axis, a size that is no positive integer, or a file that cannot be read.
        """
        if text is not None and text.strip().endswith(".toml"):
            return cls._from_toml(Path(text.strip()))
        sizes: dict[str, Any] = {}
        for part in filter(None, (text or "").split(",")):
            axis, _, size = (piece.strip() for piece in part.partition("="))
            if axis in sizes:
                raise MeshError(f"mesh {text!r}: axis {axis!r} is given twice")
            sizes[axis] = int(size) if size.isascii() and size.isdecimal() else size
        return cls._checked(f"mesh {text!r}", sizes, {})

    @classmethod
    def _from_toml(cls, path: Path) -> MeshConfig:
        try:
            tables = tomllib.loads(path.read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise MeshError(f"mesh file {path}: cannot be read: {error}") from error
        for name, table in tables.items():
            if name not in ("mesh", "rules") or not isinstance(table, dict):
                raise MeshError(f"mesh file {path}: {name!r} is not one of its tables, [mesh] and [rules]")
        return cls._checked(f"mesh file {path}", tables.get("mesh", {}), tables.get("rules", {}))

    @classmethod
    def _checked(cls, what: str, sizes: Mapping[str, Any], rule_changes: Mapping[str, Any]) -> MeshConfig:
        for axis, size in sizes.items():
            if axis not in AXES:
                raise MeshError(f"{what}: unknown axis {axis!r}; the axes are {', '.join(AXES)}")
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise MeshError(f"{what}: the size of {axis!r} must be a positive integer, not {size!r}")
        mesh = cls(**sizes, rule_changes=dict(rule_changes))
        try:
            mesh.rules()
        except MeshError as error:
            raise MeshError(f"{what}: {error}") from error
        return mesh

    def __str__(self) -> str:
        sizes = ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1) or "tensor=1"
        rules = ", ".join(f"{logical} = {axis}" for logical, axis in self.rule_changes.items())
        return f"{sizes} ({rules})" if rules else sizes

    @property
    def num_devices(self) -> int:
        return self.data * self.stage * self.tensor * self.expert

    def rules(self) -> ShardingRules:
        """The rules of one submesh: a stage of a replica."""
        return ShardingRules.of({axis: getattr(self, axis) for axis in ARRAY_AXES}, self.rule_changes)

    def build(self, devices: Sequence[jax.Device] | None = None) -> list[list[Mesh]]:
        """Submeshes by replica and stage, over the first of `devices` (JAX's, by default).

        Each has all of `AXES`, of type Auto; neighbours along `tensor` are neighbours in the order of devices, since
        they exchange most.

        Raises:
          MeshError: it needs more devices than there are.
        """
        devices = jax.devices() if devices is None else devices
        if self.num_devices > len(devices):
            platform = devices[0].platform
            more = "; JAX_NUM_CPU_DEVICES=N makes N of a CPU" if platform == "cpu" else ""
            raise MeshError(
                f"mesh {self} needs {self.num_devices} devices; there are {len(devices)} ({platform}){more}"
            )
        grid = np.array(devices[: self.num_devices]).reshape(self.data, self.stage, 1, 1, self.tensor, self.expert)
        return [[Mesh(stage, AXES) for stage in replica] for replica in grid]
