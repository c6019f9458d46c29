"""A user's own `server.py` or `sharding` folder is named, and nothing of it is run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer._shadowing import TOP_LEVEL_PACKAGES, ShadowedPackageError, check_top_level_packages

ROOT = Path(__file__).resolve().parents[2]


def run_in(folder: Path, *names: str, setup: str = "", flags: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Checks from a program whose own folder comes first on the import path."""
    program = folder / "program.py"
    program.write_text(
        f"{setup}\nfrom jaxinfer._shadowing import *\ncheck_top_level_packages(*{names!r})\nprint('ours')\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *flags, str(program)], env=environment, capture_output=True, text=True, timeout=60, cwd=folder
    )


def test_ours_are_found():
    check_top_level_packages()


@pytest.mark.parametrize("file", ["server.py", "server/__init__.py"])
def test_a_stranger_is_named_and_not_run(tmp_path, file):
    stranger = tmp_path / file
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("raise SystemExit('the stranger was run')\n")
    done = run_in(tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"`import server` finds {stranger.resolve()}" in last
    assert str(ROOT / "server") in last
    assert "rename server" in last
    assert "python -P" in last
    assert run_in(tmp_path, "sharding", "pallas_kernels").stdout == "ours\n"  # a program that needs no server
    assert run_in(tmp_path, flags=("-P",)).stdout == "ours\n"  # what the message advises


def test_a_stranger_imported_already_is_named_too(tmp_path):
    (tmp_path / "sharding.py").write_text("")
    done = run_in(tmp_path, setup="import sharding")
    assert f"`import sharding` finds {(tmp_path / 'sharding.py').resolve()}" in done.stderr
    done = run_in(tmp_path, setup="import sharding; sharding.__spec__ = None")
    assert f"`import sharding` finds {(tmp_path / 'sharding.py').resolve()}" in done.stderr


def test_a_folder_without_init_hides_nothing(tmp_path):
    (tmp_path / "server").mkdir()
    assert run_in(tmp_path).stdout == "ours\n"


def test_ours_are_found_through_a_link(tmp_path):
    for name in ("jaxinfer", *TOP_LEVEL_PACKAGES):
        (tmp_path / name).symlink_to(ROOT / name)
    assert run_in(tmp_path).stdout == "ours\n"


def test_a_missing_package():
    with pytest.raises(ShadowedPackageError, match="`no_such_package` is missing"):
        check_top_level_packages("no_such_package")
