"""API keys, TLS and mutual TLS: who is let in, who is not, and what is said about it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import certificates
import grpc
import pytest
from certificates import Pair, needs_openssl
from fake_engine import FakeEngine
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from server_harness import run, serving

from jaxinfer.errors import InvalidArgumentError
from server import inference_pb2 as pb
from server import inference_pb2_grpc, wire
from server.client import AsyncClient, Client
from server.credentials import (
    ApiKeys,
    ClientTls,
    ServerTls,
    checked_api_key,
    is_loopback,
    missing_protection,
    read_api_keys,
)
from server.grpc_service import GrpcServer

KEYS = ("correct-horse", "battery+staple/9==")


def header(value: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", value),)


# API keys.


def test_each_key_lets_in_and_nothing_else_does():
    async def main():
        async with (
            serving(FakeEngine(), api_keys=ApiKeys(KEYS), api_key=KEYS[0]) as (server, client),
            AsyncClient(server.address, api_key=KEYS[1]) as other,
        ):
            for each in (client, other):
                assert (await each.unary_generate("abc")).samples[0].output.text == "abc"
                assert [event async for event in each.generate("abc")]
                assert (await each.model_info()).model == "echo"
            for key in (None, "wrong", KEYS[0][:-1], KEYS[0] + "x", KEYS[0].upper(), ",".join(KEYS)):
                async with AsyncClient(server.address, api_key=key) as stranger:
                    with pytest.raises(wire.UnauthenticatedError, match="authorization: Bearer KEY") as raised:
                        await stranger.unary_generate("abc")
                    assert not any(known in str(raised.value) for known in KEYS)
                    with pytest.raises(wire.UnauthenticatedError):
                        await anext(stranger.generate("abc"))
            assert len(server.service._outboxes) == 0

    run(main())


def test_the_forms_of_the_header():
    async def main():
        async with (
            serving(None, api_keys=ApiKeys(KEYS)) as (server, _),
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            info = inference_pb2_grpc.InferenceStub(channel).GetServerInfo
            for good in (f"Bearer {KEYS[0]}", f"bearer  {KEYS[0]} ", f"BEARER {KEYS[1]}"):
                await info(pb.GetServerInfoRequest(), metadata=header(good))
            for bad in (KEYS[0], f"Basic {KEYS[0]}", "Bearer", "Bearer ", f"Bearer{KEYS[0]}", f"Bearer x{KEYS[0]}"):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await info(pb.GetServerInfoRequest(), metadata=header(bad))
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
                assert ("jaxinfer-error-code", "unauthenticated") in list(raised.value.trailing_metadata())
            await info(pb.GetServerInfoRequest(), metadata=(*header("Bearer no"), *header(f"Bearer {KEYS[0]}")))

    run(main())


def test_every_rpc_but_health_wants_a_key():
    async def main():
        async with (
            serving(None, api_keys=ApiKeys(KEYS)) as (server, _),
            grpc.aio.insecure_channel(server.address) as channel,
        ):
            methods = [each.name for each in pb.DESCRIPTOR.services_by_name["Inference"].methods]
            for path in (*(f"/jaxinfer.v1.Inference/{name}" for name in methods), "/no.such/Method"):
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await channel.unary_unary(path)(b"")
                assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED, path

            async def silence() -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
                await asyncio.sleep(60)  # it is refused before it says anything
                yield reflection_pb2.ServerReflectionRequest()

            reflection = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await asyncio.wait_for(anext(aiter(reflection(silence()))), 2)
            assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
            ask = iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            assert [each async for each in reflection(ask, metadata=header(f"Bearer {KEYS[0]}"))]

            health = health_pb2_grpc.HealthStub(channel)
            assert (await health.Check(health_pb2.HealthCheckRequest())).status
            assert (await health.List(health_pb2.HealthListRequest())).statuses
            assert (await health.Watch(health_pb2.HealthCheckRequest()).read()).status

    run(main())


def test_the_sync_client_sends_its_key():
    async def main():
        async with serving(FakeEngine(), api_keys=ApiKeys(KEYS), api_key=KEYS[0]) as (server, _):

            def work() -> None:
                with Client(server.address, api_key=KEYS[1]) as client:
                    client.wait_ready(5)
                    assert list(client.generate("abc"))
                    assert client.unary_generate("abc").samples[0].output.text == "abc"
                    assert client.tokenize("a")
                with Client(server.address) as client, pytest.raises(PermissionError):
                    client.tokenize("a")

            await asyncio.to_thread(work)

    run(main())


def test_keys_appear_nowhere(caplog):
    async def main():
        keys = ApiKeys(KEYS)
        async with serving(FakeEngine(), api_keys=keys, api_key=KEYS[0]) as (server, client):
            await client.unary_generate("abc")
            async with AsyncClient(server.address, api_key="stranger's-secret") as stranger:
                with pytest.raises(wire.UnauthenticatedError) as raised:
                    await stranger.unary_generate("abc")
            assert "secret" not in str(raised.value)
            assert not any(key in repr(vars(keys)) for key in KEYS)

    with caplog.at_level(logging.DEBUG):
        run(main())
    assert not any(secret in caplog.text for secret in (*KEYS, "secret"))


@pytest.mark.parametrize("bad", ["", "two words", "tab\t", "new\nline", "schlüssel", "\x7f", None])
def test_a_key_that_cannot_be_is_refused_and_not_shown(bad):
    for make in (
        lambda: ApiKeys([KEYS[0], bad]),
        lambda: checked_api_key(bad),
        lambda: Client("x:1", api_key=bad or ""),
    ):
        with pytest.raises(InvalidArgumentError, match=r"= \(not shown\) is not allowed: one or more") as raised:
            make()
        assert not bad or bad not in str(raised.value)
    with pytest.raises(InvalidArgumentError, match=r"^api_keys\[1\] = "):
        ApiKeys([KEYS[0], bad])


def test_no_keys_are_not_all_keys():
    with pytest.raises(InvalidArgumentError, match="at least one key"):
        ApiKeys([])


def test_a_file_of_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# the first\n{KEYS[0]}\n\n  {KEYS[1]}  \r\n")
    assert read_api_keys(file) == list(KEYS)
    file.write_text("# none\n\n")
    with pytest.raises(InvalidArgumentError, match="at least one key, one a line"):
        read_api_keys(file)
    file.write_text(f"{KEYS[0]}\nnot a key\n")
    with pytest.raises(InvalidArgumentError, match=r"^api_key_file line 2 = \(not shown\)"):
        read_api_keys(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgumentError, match="ASCII"):
        read_api_keys(file)
    with pytest.raises(InvalidArgumentError, match="No such file"):
        read_api_keys(tmp_path / "missing")
    with pytest.raises(InvalidArgumentError, match="Is a directory"):
        read_api_keys(tmp_path)


# TLS.


@dataclass(frozen=True)
class Certificates:
    ca: Pair
    server: Pair
    client: Pair
    other_ca: Pair
    stranger: Pair  # signed by the other authority
    folder: Path


@pytest.fixture(scope="module")
def certs(tmp_path_factory) -> Certificates:
    folder = tmp_path_factory.mktemp("certificates")
    ca, other_ca = certificates.authority(folder, "ca"), certificates.authority(folder, "other-ca")
    return Certificates(
        ca=ca,
        server=certificates.signed(folder, "server", ca),
        client=certificates.signed(folder, "client", ca),
        other_ca=other_ca,
        stranger=certificates.signed(folder, "stranger", other_ca),
        folder=folder,
    )


def unreachable(address: str, tls: ClientTls | None) -> None:
    with Client(address, tls=tls) as client, pytest.raises((wire.ServerUnreachableError, wire.CallFailedError)):
        client.server_info(timeout_s=5)


@needs_openssl
def test_tls(certs: Certificates):
    trust = ClientTls.read(ca=certs.ca.cert)

    async def main():
        tls = ServerTls.read(certs.server.cert, certs.server.key)
        async with serving(FakeEngine(), tls=tls, client_tls=trust) as (server, client):
            assert (await client.unary_generate("abc")).samples[0].output.text == "abc"

            def others() -> None:
                with Client(server.address.replace("127.0.0.1", "localhost"), tls=trust) as sync_client:
                    assert list(sync_client.generate("abc"))
                unreachable(server.address, None)  # plain
                unreachable(server.address, ClientTls())  # trusts the public authorities alone
                unreachable(server.address, ClientTls.read(ca=certs.other_ca.cert))

            await asyncio.to_thread(others)

    run(main())


@needs_openssl
def test_mutual_tls_with_a_key(certs: Certificates):
    def as_client(pair: Pair) -> ClientTls:
        return ClientTls.read(ca=certs.ca.cert, cert=pair.cert, key=pair.key)

    async def main():
        tls = ServerTls.read(certs.server.cert, certs.server.key, certs.ca.cert)
        async with serving(
            FakeEngine(), tls=tls, client_tls=as_client(certs.client), api_keys=ApiKeys(KEYS), api_key=KEYS[0]
        ) as (server, client):
            assert (await client.unary_generate("abc")).samples[0].output.text == "abc"

            def others() -> None:
                unreachable(server.address, ClientTls.read(ca=certs.ca.cert))  # no certificate
                unreachable(server.address, as_client(certs.stranger))
                with (
                    Client(server.address, tls=as_client(certs.client)) as keyless,
                    pytest.raises(wire.UnauthenticatedError),
                ):
                    keyless.server_info(timeout_s=5)

            await asyncio.to_thread(others)

    run(main())


@needs_openssl
def test_files_that_will_not_do_are_named(certs: Certificates):
    folder, pair = certs.folder, certs.server
    garbage, armour, missing = folder / "garbage", folder / "armour", folder / "missing"
    garbage.write_bytes(os.urandom(200))
    armour.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    locked = certificates.with_password(folder, pair.key)
    for arguments, message in [
        ((pair.cert, None), r"^tls_key = None is not allowed: a PEM file with the private key"),
        ((None, pair.key), r"^tls_cert = None"),
        ((None, None, certs.ca.cert), r"^tls_cert = None"),
        ((pair.cert, None, certs.ca.cert), r"^tls_key = None"),
        ((missing, pair.key), r"^tls_cert = '.*missing' is not allowed: a file that can be read \(No such file"),
        ((folder, pair.key), r"^tls_cert = .*Is a directory"),
        ((garbage, pair.key), r"^tls_cert = '.*garbage' is not allowed: a PEM file with one or more certificates"),
        ((armour, pair.key), r"^tls_cert = .*one or more certificates"),
        ((pair.key, pair.key), r"^tls_cert = .*one or more certificates"),
        ((pair.cert, missing), r"^tls_key = .*No such file"),
        ((pair.cert, garbage), r"^tls_key = '.*garbage' is not allowed: a PEM file with the private key"),
        ((pair.cert, pair.cert), r"^tls_key = .*private key"),
        ((pair.cert, certs.client.key), r"^tls_key = .*private key of tls_cert.*KEY_VALUES_MISMATCH"),
        ((pair.cert, locked), r"^tls_key = .*without a password"),
        ((pair.cert, pair.key, missing), r"^tls_client_ca = .*No such file"),
        ((pair.cert, pair.key, garbage), r"^tls_client_ca = .*one or more certificates"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            ServerTls.read(*arguments)
    for options, message in [
        ({"ca": garbage}, "^tls_ca = "),
        ({"cert": pair.cert}, "^tls_key = None"),
        ({"key": pair.key}, "^tls_cert = None"),
        ({"cert": pair.cert, "key": certs.client.key}, "KEY_VALUES_MISMATCH"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            ClientTls.read(**options)
    assert ServerTls.read(None, None) is None


@needs_openssl
def test_private_keys_are_not_shown(certs: Certificates):
    for tls in (
        ServerTls.read(certs.server.cert, certs.server.key),
        ClientTls.read(cert=certs.client.cert, key=certs.client.key),
    ):
        assert "PRIVATE" in (tls.key or b"").decode()
        assert "PRIVATE" not in repr(tls)


# What is said of a port that others can reach.


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *[(host, True) for host in ("127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]")],
        *[(host, False) for host in ("0.0.0.0", "::", "[::]", "10.1.2.3", "example.org", "")],
    ],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected
    assert (missing_protection(host, tls=None, api_keys=None) is None) is expected


def test_what_is_missing_is_said():
    keys, tls, mutual = ApiKeys(KEYS), ServerTls(cert=b"", key=b""), ServerTls(cert=b"", key=b"", client_ca=b"")
    for given, words in [
        ({"tls": None, "api_keys": None}, ["without TLS", "without API keys"]),
        ({"tls": None, "api_keys": keys}, ["without TLS"]),
        ({"tls": tls, "api_keys": None}, ["without API keys"]),
        ({"tls": tls, "api_keys": keys}, []),
        ({"tls": mutual, "api_keys": None}, []),
    ]:
        said = missing_protection("0.0.0.0", **given) or ""
        assert [each for each in ("without TLS", "without API keys") if each in said] == words


def test_an_open_port_is_warned_of(caplog, monkeypatch):
    async def main():
        server = GrpcServer(port=0)
        await server.start()
        await server.stop(0)
        assert "without" not in caplog.text
        monkeypatch.setattr("server.credentials.is_loopback", lambda host: False)  # and yet it is
        server = GrpcServer(port=0)
        await server.start()
        await server.stop(0)

    with caplog.at_level(logging.WARNING):
        run(main())
    (record,) = [each for each in caplog.records if each.name == "server.grpc_service"]
    assert record.levelno == logging.WARNING
    assert "beyond this machine, without TLS and without API keys" in record.getMessage()
