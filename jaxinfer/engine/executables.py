"""Compiled programs kept on disk, and a count of what XLA compiles.

A stored program is found again only under the same jaxinfer source, JAX, device, processor, flags and shapes. Files
are written whole or not at all, and one that does not load is reported and made again. They are pickles, as JAX
serializes them: the folder must belong to the user, like any other cache of code.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import platform
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import jax
import jaxlib
from jax.experimental import serialize_executable

logger = logging.getLogger(__name__)

_ROOT = Path(__file__).parents[2]  # where our packages lie side by side
PACKAGES = ("jaxinfer", "pallas_kernels", "sharding")  # whose source decides what a program is
_compiles = _stray_compiles = 0
_compiles_lock = threading.Lock()
_expecting = threading.local()


def _count(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _compiles, _stray_compiles
    if event == "/jax/core/compile/backend_compile_duration":
        with _compiles_lock:
            _compiles += 1
            _stray_compiles += not getattr(_expecting, "compiles", False)


jax.monitoring.register_event_duration_secs_listener(_count)


def compile_count() -> int:
    """How often XLA has compiled in this process, stray eager operations included."""
    return _compiles


def stray_compile_count() -> int:
    """How often it has outside `expected_compiles`."""
    return _stray_compiles


@contextmanager
def expected_compiles() -> Iterator[None]:
    """What this thread compiles here is meant to be compiled, though another engine of the process may be serving."""
    before = getattr(_expecting, "compiles", False)
    _expecting.compiles = True
    try:
        yield
    finally:
        _expecting.compiles = before


@cache
def _environment() -> str:
    """What makes a stored program valid, besides its own shapes."""
    digest = hashlib.sha256()
    for package in PACKAGES:
        for path in sorted(path for kind in ("*.py", "*.json") for path in (_ROOT / package).rglob(kind)):
            digest.update(path.read_bytes())
    flags = ""
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    device = jax.devices()[0]
    return "\n".join(
        [
            digest.hexdigest(),
            jax.__version__,
            jaxlib.__version__,
            device.device_kind,
            device.client.platform_version,
            f"process {jax.process_index()} of {jax.process_count()}",
            platform.machine(),
            flags,
            os.environ.get("XLA_FLAGS", ""),  # changes what the compiler makes
        ]
    )


class ExecutableCache:
    """A folder of serialized executables; None keeps nothing."""

    def __init__(self, folder: Path | None):
        self.folder = folder

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{hashlib.sha256((_environment() + key).encode()).hexdigest()[:40]}.jaxexe"

    def load(self, key: str, devices: Sequence[jax.Device] | None = None) -> jax.stages.Compiled | None:
        """The program stored under `key`, or None.

        Args:
          devices: those it was compiled for; by default JAX's first.
        """
        if self.folder is None or not (path := self._path(key)).exists():
            return None
        try:
            devices = jax.devices()[:1] if devices is None else devices
            payload, in_tree, out_tree = pickle.loads(path.read_bytes())
            return serialize_executable.deserialize_and_load(payload, in_tree, out_tree, execution_devices=devices)
        except Exception as error:
            logger.warning("stored program %s does not load (%s); compiling it again", path.name, error)
            return None

    def store(self, key: str, compiled: jax.stages.Compiled) -> None:
        """Stores a program; a failure is logged, since it costs only time later."""
        if self.folder is None:
            return
        unfinished: Path | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            payload = pickle.dumps(serialize_executable.serialize(compiled))
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                unfinished = Path(file.name)
                file.write(payload)
            os.replace(unfinished, self._path(key))
        except Exception as error:
            logger.warning("could not store a compiled program in %s: %s", self.folder, error)
            if unfinished is not None:
                unfinished.unlink(missing_ok=True)
