"""Block sizes that `scripts/tune_kernels.py` measured, one JSON file for each op and kind of device.

A file is {"device", "jax", "date", "entries": [{"shape": {...}, "block": {...}, "us"}]}. Where
a device or a shape is missing the kernels have a heuristic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parent


def tuned_file(op: str, kind: str) -> Path:
    """Where the block sizes of an op lie for a kind of device, as JAX names it."""
    return _ROOT / op / "tuned" / f"{kind.lower().replace(' ', '-')}.json"


@cache
def tuned_entries(op: str, kind: str) -> tuple[dict[str, Any], ...]:
    """The file's entries; none where there is no file."""
    path = tuned_file(op, kind)
    return tuple(json.loads(path.read_text())["entries"]) if path.exists() else ()


def tuned_block(op: str, kind: str, shape: Mapping[str, Any]) -> dict[str, int] | None:
    """The block measured for exactly this shape, or None."""
    return next((entry["block"] for entry in tuned_entries(op, kind) if entry["shape"] == shape), None)
