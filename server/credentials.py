"""Who may call: API keys, TLS and mutual TLS, for the server and for its clients. All of it is off by default.

Keys and private keys appear in no log, no error and no repr.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import grpc

from jaxinfer.errors import InvalidArgumentError
from server import wire

METADATA_KEY = "authorization"
OPEN_TO_ALL = "/grpc.health.v1.Health/"  # what watches over servers has no keys

type FilePath = str | Path


class ApiKeys:
    """The keys a server takes. Of each only its hash is kept.

    Raises:
      InvalidArgumentError: there is none, or one that no client could send; it is named by its place in the list.
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._hashes = [_hash(checked_api_key(key, f"api_keys[{at}]").encode()) for at, key in enumerate(keys)]
        if not self._hashes:
            raise InvalidArgumentError("api_keys", [], "at least one key; leave them out to let everybody in")

    def __contains__(self, key: bytes) -> bool:
        """In a time that tells nothing: all keys are compared, and equally long hashes of them."""
        given = _hash(key)
        return sum(hmac.compare_digest(given, known) for known in self._hashes) > 0


def _hash(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def checked_api_key(key: str, name: str = "api_key") -> str:
    """The key; an error names it as `name`, and says nothing of what it is.

    Raises:
      InvalidArgumentError: it is empty or holds what a header cannot.
    """
    if not isinstance(key, str) or not key or not all("!" <= each <= "~" for each in key):
        raise InvalidArgumentError(name, _Hidden(), "one or more printable ASCII characters, none of them a space")
    return key


class _Hidden:
    def __repr__(self) -> str:
        return "(not shown)"


def read_api_keys(path: FilePath) -> list[str]:
    """The keys of a file: one a line; empty lines and those that begin with # are passed over.

    Raises:
      InvalidArgumentError: it cannot be read, has no key, or a line that is none.
    """
    try:
        lines = Path(path).read_text("ascii").splitlines()
    except OSError as error:
        raise InvalidArgumentError("api_key_file", str(path), f"a file that can be read ({error.strerror})") from None
    except UnicodeError:
        raise InvalidArgumentError("api_key_file", str(path), "a text file of ASCII characters") from None
    numbered = [(number, line.strip()) for number, line in enumerate(lines, 1)]
    keys = [
        checked_api_key(line, f"api_key_file line {number}")
        for number, line in numbered
        if line and not line.startswith("#")
    ]
    if not keys:
        raise InvalidArgumentError("api_key_file", str(path), "a file with at least one key, one a line")
    return keys


def bearer(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """The metadata that carries a key with a call."""
    return () if api_key is None else ((METADATA_KEY, f"Bearer {checked_api_key(api_key)}"),)


class RequireApiKey(grpc.aio.ServerInterceptor):
    """Refuses every call without a known key, unknown methods and reflection too, before its messages are read."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys
        self._refusal = grpc.stream_stream_rpc_method_handler(self._refuse)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> grpc.RpcMethodHandler:
        if handler_call_details.method.startswith(OPEN_TO_ALL) or self._knows(handler_call_details.invocation_metadata):
            return await continuation(handler_call_details)
        return self._refusal

    def _knows(self, metadata: Iterable[tuple[str, str | bytes]]) -> bool:
        for name, value in metadata:
            if name == METADATA_KEY:
                scheme, _, key = (value.encode() if isinstance(value, str) else value).partition(b" ")
                if scheme.lower() == b"bearer" and key.strip() in self._keys:
                    return True
        return False

    async def _refuse(self, _: Any, context: grpc.aio.ServicerContext) -> None:
        error = wire.UnauthenticatedError(f"a known API key is wanted, in the metadata `{METADATA_KEY}: Bearer KEY`")
        await context.abort(*wire.status_of(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """A server's certificate (with the chain to its root, if there is one) and private key, in PEM.

    With `client_ca` only clients whose certificate these authorities signed may connect (mutual TLS).
    """

    cert: bytes
    key: bytes = field(repr=False)
    client_ca: bytes | None = None

    @classmethod
    def read(cls, cert: FilePath | None, key: FilePath | None, client_ca: FilePath | None = None) -> Self | None:
        """From files; None if none is named.

        Raises:
          InvalidArgumentError: one that is needed is not named, cannot be read, or is not what it should be.
        """
        if cert is None and key is None and client_ca is None:
            return None
        cert_pem, key_pem = _read_pair(cert, key)
        authorities = None if client_ca is None else _read_certificates("tls_client_ca", client_ca)
        return cls(cert=cert_pem, key=key_pem, client_ca=authorities)

    def credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.client_ca, self.client_ca is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientTls:
    """How a client trusts a server, and proves itself to one that asks for it. PEM.

    `ca` is the authorities that the server's certificate must come from (None: the public ones that gRPC brings);
    `cert` and `key` are the client's own, for mutual TLS.
    """

    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = field(default=None, repr=False)

    @classmethod
    def read(cls, *, ca: FilePath | None = None, cert: FilePath | None = None, key: FilePath | None = None) -> Self:
        """From files. Raises as `ServerTls.read`."""
        authorities = None if ca is None else _read_certificates("tls_ca", ca)
        cert_pem, key_pem = (None, None) if cert is None and key is None else _read_pair(cert, key)
        return cls(ca=authorities, cert=cert_pem, key=key_pem)

    def credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)


def _read_pair(cert: FilePath | None, key: FilePath | None) -> tuple[bytes, bytes]:
    if cert is None:
        raise InvalidArgumentError("tls_cert", None, "a PEM file with the certificate that the other TLS files go with")
    if key is None:
        raise InvalidArgumentError("tls_key", None, "a PEM file with the private key of tls_cert")
    cert_pem, key_pem = _read_certificates("tls_cert", cert), _read("tls_key", key)

    def password() -> str:  # else it would be asked for on the terminal
        raise InvalidArgumentError("tls_key", str(key), "a private key without a password")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password)
    except ssl.SSLError as error:
        allowed = f"a PEM file with the private key of tls_cert, {str(cert)!r} ({error.reason or 'it is not PEM'})"
        raise InvalidArgumentError("tls_key", str(key), allowed) from None
    return cert_pem, key_pem


def _read_certificates(name: str, path: FilePath) -> bytes:
    pem = _read(name, path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        allowed = f"a PEM file with one or more certificates ({error.reason or 'it is not PEM'})"
        raise InvalidArgumentError(name, str(path), allowed) from None
    return pem


def _read(name: str, path: FilePath) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidArgumentError(name, str(path), f"a file that can be read ({error.strerror})") from None


def missing_protection(host: str, *, tls: ServerTls | None, api_keys: ApiKeys | None) -> str | None:
    """What an address that others can reach lacks, and what that means; None where nothing does."""
    if is_loopback(host):
        return None
    known = api_keys is not None or (tls is not None and tls.client_ca is not None)
    if tls is None and not known:
        return "without TLS and without API keys: whoever reaches it may use it, and whoever is on the way may read it"
    if tls is None:
        return "without TLS: whoever is on the way may read keys, prompts and outputs, and then use the keys"
    return None if known else "without API keys: whoever reaches it may use it"


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:  # a name: who knows where it leads
        return False
