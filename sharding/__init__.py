"""What device holds what. Knows no model."""

from sharding.mesh import MeshConfig
from sharding.rules import MeshError, ShardingRules

__all__ = ["MeshConfig", "MeshError", "ShardingRules"]
