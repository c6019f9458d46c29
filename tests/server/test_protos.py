"""The committed stubs are what the .proto says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_the_committed_stubs_fit_the_proto():
    pytest.importorskip("grpc_tools")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "generate_protos.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "fit" in done.stdout


def test_a_difference_is_found(tmp_path, monkeypatch):
    pytest.importorskip("grpc_tools")
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import generate_protos

    assert generate_protos.differences(ROOT, ROOT) == []
    (tmp_path / "server").mkdir()
    for name in generate_protos.STUBS:
        changed = (ROOT / name).read_text().replace("top_p", "top_q").replace("/Abort", "/Abart")
        (tmp_path / name).write_text(changed)
    assert generate_protos.differences(ROOT, tmp_path) == list(generate_protos.STUBS)
    (tmp_path / generate_protos.STUBS[0]).unlink()
    assert generate_protos.differences(tmp_path, ROOT) == list(generate_protos.STUBS)


def test_neither_client_nor_server_loads_jax():
    code = "import sys, server.client, server.grpc_service; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
