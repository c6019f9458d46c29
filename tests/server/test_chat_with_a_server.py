"""`jaxinfer chat --server`, to servers that want keys and certificates."""

from __future__ import annotations

import asyncio
import io
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import certificates
import pytest
from certificates import needs_openssl
from fake_engine import FakeEngine

from jaxinfer import cli
from server.credentials import ApiKeys, ServerTls
from server.grpc_service import GrpcServer


@contextmanager
def server_in_a_thread(**options: Any) -> Iterator[str]:
    """The address of one; its life is that of the block."""
    addresses: list[str] = []
    started, over = threading.Event(), threading.Event()

    async def main() -> None:
        engine = FakeEngine()
        server = GrpcServer(port=0, **options)
        await server.start()
        server.set_engine(engine)  # type: ignore[arg-type]
        addresses.append(server.address)
        started.set()
        await asyncio.to_thread(over.wait)
        await server.stop(0)
        engine.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert started.wait(10)
        yield addresses[0]
    finally:
        over.set()
        thread.join(10)


@pytest.fixture
def chat(monkeypatch, capsys):
    """Says "hi" to a server; the code it exits with, what it prints, and what it prints of errors."""
    monkeypatch.delenv("JAXINFER_API_KEY", raising=False)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["jaxinfer", "chat", "--max-tokens", "100", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
        code = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return call


def test_with_a_key(chat, monkeypatch):
    with server_in_a_thread(api_keys=ApiKeys(["open-sesame"])) as address:
        assert chat("--server", address, "--api-key", "open-sesame")[:2] == (0, "user:hi;\n")
        code, out, err = chat("--server", address)
        assert (code, out) == (1, "")
        assert "unauthenticated: a known API key is wanted" in err
        monkeypatch.setenv("JAXINFER_API_KEY", "open-sesame")
        assert chat("--server", address)[:2] == (0, "user:hi;\n")
        code, _, err = chat("--server", address, "--api-key", "open-barley")
        assert code == 1
        assert "sesame" not in err
        assert "barley" not in err


@needs_openssl
def test_with_certificates(chat, tmp_path):
    ca = certificates.authority(tmp_path, "ca")
    own, client = certificates.signed(tmp_path, "server", ca), certificates.signed(tmp_path, "client", ca)
    with server_in_a_thread(tls=ServerTls.read(own.cert, own.key, ca.cert)) as address:
        mutual = ("--tls-ca", str(ca.cert), "--tls-cert", str(client.cert), "--tls-key", str(client.key))
        assert chat("--server", address, *mutual)[:2] == (0, "user:hi;\n")
        for options in ((), ("--tls",), ("--tls-ca", str(ca.cert))):
            code, out, err = chat("--server", address, *options)
            assert (code, out) == (1, "")
            assert "Traceback" not in err
    code, _, err = chat("--server", "127.0.0.1:1", "--tls-cert", str(client.cert))
    assert code == 1
    assert "tls_key = None" in err
