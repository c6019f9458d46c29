"""Says so clearly where a stranger's module hides one of our top-level packages.

`server` and `sharding` are names that people give to files of their own. Python then imports theirs, since the
script's folder comes first on the import path, and ours fails with a puzzling "'server' is not a package".
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path

from jaxinfer.errors import JaxinferError

TOP_LEVEL_PACKAGES = ("server", "sharding", "pallas_kernels")
# Our packages lie side by side wherever they are installed: in site-packages, or in a source tree that an editable
# install points to.
_ROOT = Path(__file__).resolve().parent.parent


class ShadowedPackageError(JaxinferError, ImportError):
    """Another module has the name of one of our top-level packages and comes before it on the import path."""

    code = "shadowed_package"


def check_top_level_packages(*names: str) -> None:
    """Checks that `import <name>` finds our package, for each of `names` (all of them if none is given).

    Nothing is imported. Name only the packages that are needed: a user's `server.py` is no trouble to a program that
    runs the engine in its own process.

    Raises:
      ShadowedPackageError: another module is found instead, or none at all; the message says which and what to do.
    """
    for name in names or TOP_LEVEL_PACKAGES:
        try:
            spec = importlib.util.find_spec(name)
        except ValueError:  # imported already, by means that left no spec
            spec = None
        found = _location(spec) or _imported_from(name)
        ours = _ROOT / name / "__init__.py"
        if found is None:
            raise ShadowedPackageError(
                f"jaxinfer's package `{name}` is missing (looked for {ours}): install jaxinfer again."
            )
        if found != ours:
            raise ShadowedPackageError(
                f"`import {name}` finds {found}, which hides jaxinfer's own package of that name ({ours.parent}). "
                f"Run from another folder, or rename {found.name if found.name != '__init__.py' else found.parent.name}"
                ", or start Python with `python -P`, which leaves the script's folder out of the import path."
            )


def _location(spec: importlib.machinery.ModuleSpec | None) -> Path | None:
    """The file a spec would load; for a folder without `__init__.py`, the folder."""
    if spec is None:
        return None
    if spec.has_location and spec.origin:
        return Path(spec.origin).resolve()
    folders = list(spec.submodule_search_locations or ())
    return Path(folders[0]).resolve() if folders else None


def _imported_from(name: str) -> Path | None:
    file = getattr(sys.modules.get(name), "__file__", None)
    return Path(file).resolve() if file else None
