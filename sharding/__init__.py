"""What device holds what. Knows no model."""

from sharding.mesh import MeshConfig, MeshError

__all__ = ["MeshConfig", "MeshError"]
