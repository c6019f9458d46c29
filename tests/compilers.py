"""Runs scripts with the compilers of chips that are not here, from the environments that scripts/compilers.sh makes."""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ENVIRONMENTS = [Path(folder) for folder in os.environ.get("JAXINFER_COMPILERS", "").split(os.pathsep) if folder]
REPOSITORY = Path(__file__).parents[1]

each_environment = pytest.mark.parametrize(
    "environment", ENVIRONMENTS or [None], ids=lambda path: path.name if path else "none"
)
newest_environment = pytest.mark.parametrize(
    "environment", ENVIRONMENTS[:1] or [None], ids=lambda path: path.name if path else "none"
)


@cache
def run(environment: Path | None, script: Path, *args: str, timeout: float = 300) -> Any:
    """What a script prints as JSON on its last line; skips the test where there is no environment."""
    if environment is None:
        pytest.skip("JAXINFER_COMPILERS names no environment with compilers; scripts/compilers.sh makes one")
    done = subprocess.run(
        [environment / "bin" / "python", script, *args],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
