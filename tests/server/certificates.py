"""Certificates for a test, made by the openssl program."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")


class Pair(NamedTuple):
    cert: Path
    key: Path


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)


def _new_key(folder: Path, name: str) -> Path:
    key = folder / f"{name}.key"
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", key)
    return key


def authority(folder: Path, name: str) -> Pair:
    pair = Pair(folder / f"{name}.pem", _new_key(folder, name))
    _openssl("req", "-x509", "-new", "-key", pair.key, "-subj", f"/CN={name}", "-days", "2", "-out", pair.cert)
    return pair


def signed(folder: Path, name: str, by: Pair) -> Pair:
    """A certificate of this machine's loopback addresses."""
    pair, request, extensions = Pair(folder / f"{name}.pem", _new_key(folder, name)), folder / "csr", folder / "ext"
    extensions.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
    _openssl("req", "-new", "-key", pair.key, "-subj", f"/CN={name}", "-out", request)
    ca = ("-CA", by.cert, "-CAkey", by.key, "-CAcreateserial")
    _openssl("x509", "-req", "-in", request, *ca, "-days", "2", "-extfile", extensions, "-out", pair.cert)
    return pair


def with_password(folder: Path, key: Path) -> Path:
    locked = folder / "locked.key"
    _openssl("pkcs8", "-topk8", "-in", key, "-passout", "pass:secret", "-out", locked)
    return locked
