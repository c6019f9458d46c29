"""The standard health service, `grpc.health.v1.Health`, said afresh from the server's state whenever it is asked.

The servicer that comes with grpcio-health-checking holds a lock while it writes to a watcher, so that one watcher that
does not read would keep health from ever changing again, and a drain from beginning.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

POLL_S = 0.1  # how late a watcher may hear of a change


_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthService(health_pb2_grpc.HealthServicer):
    """SERVING for each of `names` while `is_serving()`, else NOT_SERVING."""

    def __init__(self, names: Iterable[str], is_serving: Callable[[], bool]) -> None:
        self._names, self._is_serving = tuple(names), is_serving

    def _answer(self, name: str) -> health_pb2.HealthCheckResponse:
        status = _UNKNOWN if name not in self._names else _SERVING if self._is_serving() else _NOT_SERVING
        return health_pb2.HealthCheckResponse(status=status)

    async def Check(
        self, message: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        answer = self._answer(message.service)
        if answer.status == _UNKNOWN:  # as the protocol of health wants it; Watch goes on instead
            await context.abort(grpc.StatusCode.NOT_FOUND, f"health is known of {', '.join(map(repr, self._names))}")
        return answer

    async def List(
        self, message: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        return health_pb2.HealthListResponse(statuses={name: self._answer(name) for name in self._names})

    async def Watch(self, message: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        told = None
        while True:
            answer = self._answer(message.service)
            if answer != told:
                await context.write(answer)
                told = answer
            await asyncio.sleep(POLL_S)
