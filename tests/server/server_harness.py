"""A real server on loopback and a client of it, in one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from fake_engine import FakeEngine

from server.client import AsyncClient
from server.credentials import ApiKeys, ClientTls, ServerTls
from server.grpc_service import GrpcServer


def run[T](main: Coroutine[Any, Any, T], timeout_s: float = 20.0) -> T:
    return asyncio.run(asyncio.wait_for(main, timeout_s))


@asynccontextmanager
async def serving(
    engine: FakeEngine | None,
    *,
    api_keys: ApiKeys | None = None,
    api_key: str | None = None,
    tls: ServerTls | None = None,
    client_tls: ClientTls | None = None,
    allow_reshard: bool = False,
) -> AsyncIterator[tuple[GrpcServer, AsyncClient]]:
    """With an engine, waits until it is served."""
    server = GrpcServer(port=0, tls=tls, api_keys=api_keys, allow_reshard=allow_reshard)
    await server.start()
    async with AsyncClient(server.address, api_key=api_key, tls=client_tls) as client:
        if engine is not None:
            server.set_engine(engine)  # type: ignore[arg-type]
            await client.wait_ready(5)
        try:
            yield server, client
        finally:
            await server.stop(0)
            if engine is not None:
                engine.close()


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    end = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < end, "it did not come to pass"
        await asyncio.sleep(0.002)
