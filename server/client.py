"""Typed clients of the gRPC server, sync and async, with the same methods.

    with Client("127.0.0.1:50051") as client:
        client.wait_ready(60)
        for event in client.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=8)):
            ...  # Delta, Delta, ..., Finished

Everywhere: `timeout_s` is the deadline of the call, in seconds (None: none), after which the server aborts it. Errors
are those of `jaxinfer.errors`, as the server met them, or of `server.wire`: `WarmingUpError`, `UnauthenticatedError`,
`ServerUnreachableError`, and `CallFailedError` for any other status of gRPC's own. Of a server with TLS and API keys:

    with Client("models.example.org:443", api_key=key, tls=ClientTls.read(ca="ca.pem")) as client: ...
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxinfer.types import Event, Finished, SamplingParams
from server import inference_pb2 as pb
from server import inference_pb2_grpc, info, wire
from server.credentials import ClientTls, bearer
from server.info import ModelInfo, ServerInfo
from server.wire import Generation, Prompt

type Messages = Sequence[Mapping[str, Any]]

_POLL_S = 0.05
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),  # what was asked for may be large: the server's limit is on requests
    ("grpc.max_send_message_length", -1),
    # Finds a server that vanished while a stream is silent; jaxinfer's server permits a ping every 5 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A server that starts up is found soon after it listens; gRPC's own backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)
_LOOPBACK = ("localhost", "127.", "[::1]", "ipv4:127.", "ipv6:[::1]")


def _options(address: str) -> list[tuple[str, int]]:
    # What listens on this machine is not to be reached through the machine's HTTP proxy.
    return [*_OPTIONS, *([("grpc.enable_http_proxy", 0)] if address.startswith(_LOOPBACK) else [])]


def _this_task_is_cancelled() -> bool:
    """gRPC raises CancelledError also where the call was cancelled and not the task that waits for it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _cancelled() -> wire.CallFailedError:
    return wire.CallFailedError("CANCELLED: the call was cancelled, by its client being closed or by its server")


def _ended_early() -> wire.CallFailedError:
    return wire.CallFailedError("the server ended the stream without a last event")


class GenerateStream(Iterator[Event]):
    """The events of one request: Delta, ..., then one Finished. The request runs from the start, read or not.

    `close`, and leaving a `with`, cancels the call, and with it the request; so does letting go of the last reference.
    """

    def __init__(self, call: Any, request_id: str) -> None:
        self.request_id = request_id
        self._call = call
        self._finished = self._closed = False

    def __next__(self) -> Event:
        """Raises the error that the request met, once, in place of an event."""
        if self._closed:
            raise StopIteration
        try:
            event = wire.event_from_proto(next(self._call))
        except StopIteration:
            if not self._finished:
                raise _ended_early() from None
            raise
        except grpc.RpcError as failed:
            # Closed by another thread, meanwhile; or all is here, and the deadline came before the call's status.
            if self._closed or self._finished:
                raise StopIteration from None
            self._closed = True
            raise wire.error_of(failed) from None
        self._finished = isinstance(event, Finished)
        return event

    def close(self) -> None:
        self._closed = True
        self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncGenerateStream(AsyncIterator[Event]):
    """As `GenerateStream`, for `async for`. Cancelling the task that waits for an event cancels the request too."""

    def __init__(self, call: Any, request_id: str) -> None:
        self.request_id = request_id
        self._call = call
        self._messages = aiter(call)
        self._finished = self._closed = False

    async def __anext__(self) -> Event:
        """Raises the error that the request met, once, in place of an event."""
        if self._closed:
            raise StopAsyncIteration
        try:
            event = wire.event_from_proto(await anext(self._messages))
        except StopAsyncIteration:
            if not self._finished and not self._closed:
                raise _ended_early() from None
            raise
        except grpc.RpcError as failed:
            if self._closed or self._finished:
                raise StopAsyncIteration from None
            self._closed = True
            raise wire.error_of(failed) from None
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                self._call.cancel()
                raise
            if self._closed:
                raise StopAsyncIteration from None
            self._closed = True
            raise _cancelled() from None
        self._finished = isinstance(event, Finished)
        return event

    async def aclose(self) -> None:
        self._closed = True
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _generate_request(
    prompt: Prompt,
    params: SamplingParams | None,
    request_id: str | None,
    model: str | None,
    parse_special: bool | None,
    priority: int | None,
) -> pb.GenerateRequest:
    return wire.request_to_proto(
        prompt,
        params,
        request_id=f"client-{uuid.uuid4().hex}" if request_id is None else request_id,
        model=model,
        parse_special=parse_special,
        priority=priority,
    )


_IS_SERVING = health_pb2.HealthCheckResponse.SERVING
_HEALTH_REQUEST = health_pb2.HealthCheckRequest(service=pb.DESCRIPTOR.services_by_name["Inference"].full_name)


class Client:
    """A client for threads. Safe to share between them. Connects at the first call."""

    def __init__(self, address: str, *, api_key: str | None = None, tls: ClientTls | None = None) -> None:
        """`tls` None is a plain connection; `ClientTls()` trusts the public authorities.

        Raises:
          InvalidArgumentError: the API key is none that can be sent.
        """
        self._metadata = bearer(api_key)
        if tls is None:
            self._channel = grpc.insecure_channel(address, options=_options(address))
        else:
            self._channel = grpc.secure_channel(address, tls.credentials(), options=_options(address))
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self.address = address

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        model: str | None = None,
        parse_special: bool | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> GenerateStream:
        """Starts a request; the stream yields its events.

        Args:
          prompt: text, token ids, or chat messages (mappings with `role` and `content`).
          params: None leaves every parameter to the server: its max_tokens is the rest of the context.
          request_id: unique among live requests; made here if None. `abort` takes it.
          parse_special: whether strings in a text prompt that look like control tokens become those tokens.
          priority: smaller runs earlier.

        Raises:
          InvalidArgumentError: the prompt is of no kind that can be sent. All else is raised by the stream.
        """
        message = _generate_request(prompt, params, request_id, model, parse_special, priority)
        return GenerateStream(
            self._stub.Generate(message, timeout=timeout_s, metadata=self._metadata), message.request_id
        )

    def unary_generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        model: str | None = None,
        parse_special: bool | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        """As `generate`, but waits for the whole, which comes at once."""
        message = _generate_request(prompt, params, request_id, model, parse_special, priority)
        return wire.generation_from_proto(self._unary(self._stub.UnaryGenerate, message, timeout_s))

    def tokenize(
        self,
        prompt: str | Messages,
        *,
        parse_special: bool | None = None,
        add_bos: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Token ids of a text, or of chat messages as the model's template renders them."""
        request = wire.tokenize_to_proto(prompt, model=model, parse_special=parse_special, add_bos=add_bos)
        return list(self._unary(self._stub.Tokenize, request, timeout_s).token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        request = wire.detokenize_to_proto(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        return self._unary(self._stub.Detokenize, request, timeout_s).text

    def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        """Ends a live request, anyone's; False if no live request has this id."""
        return self._unary(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout_s).aborted

    def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        return info.model_info_from_proto(self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s))

    def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        return info.server_info_from_proto(self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s))

    def reshard(self, mesh: str, *, timeout_s: float | None = None) -> float:
        """Moves the model to another mesh, such as "data=2,tensor=4"; returns the seconds that took."""
        return self._unary(self._stub.Reshard, pb.ReshardRequest(mesh=mesh), timeout_s).seconds

    def wait_ready(self, timeout_s: float = 60.0) -> None:
        """Waits until the server's health is SERVING, also for one that does not listen yet.

        Raises:
          DeadlineExceededError: it is not after `timeout_s`; the message says what it is instead.
        """
        deadline, last = time.monotonic() + timeout_s, "no answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                status = self._health.Check(_HEALTH_REQUEST, timeout=left).status
                last = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
                if status == _IS_SERVING:
                    return
            except grpc.RpcError as failed:
                last = wire.may_come_up(failed)
            time.sleep(_POLL_S)
        raise wire.not_ready_error(self.address, timeout_s, last)

    def close(self) -> None:
        """Cancels the calls that are open, and disconnects."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unary(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as failed:
            raise wire.error_of(failed) from None


class AsyncClient:
    """As `Client`, for one event loop: make it inside a running one. Arguments and errors are the same."""

    def __init__(self, address: str, *, api_key: str | None = None, tls: ClientTls | None = None) -> None:
        self._metadata = bearer(api_key)
        if tls is None:
            self._channel = grpc.aio.insecure_channel(address, options=_options(address))
        else:
            self._channel = grpc.aio.secure_channel(address, tls.credentials(), options=_options(address))
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self.address = address

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        model: str | None = None,
        parse_special: bool | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> AsyncGenerateStream:
        """As `Client.generate`; not a coroutine: `async for event in client.generate(...)`."""
        message = _generate_request(prompt, params, request_id, model, parse_special, priority)
        return AsyncGenerateStream(
            self._stub.Generate(message, timeout=timeout_s, metadata=self._metadata), message.request_id
        )

    async def unary_generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        model: str | None = None,
        parse_special: bool | None = None,
        priority: int | None = None,
        timeout_s: float | None = None,
    ) -> Generation:
        message = _generate_request(prompt, params, request_id, model, parse_special, priority)
        return wire.generation_from_proto(await self._unary(self._stub.UnaryGenerate, message, timeout_s))

    async def tokenize(
        self,
        prompt: str | Messages,
        *,
        parse_special: bool | None = None,
        add_bos: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        request = wire.tokenize_to_proto(prompt, model=model, parse_special=parse_special, add_bos=add_bos)
        return list((await self._unary(self._stub.Tokenize, request, timeout_s)).token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        skip_special_tokens: bool | None = None,
        model: str | None = None,
        timeout_s: float | None = None,
    ) -> str:
        request = wire.detokenize_to_proto(token_ids, model=model, skip_special_tokens=skip_special_tokens)
        return (await self._unary(self._stub.Detokenize, request, timeout_s)).text

    async def abort(self, request_id: str, *, timeout_s: float | None = None) -> bool:
        return (await self._unary(self._stub.Abort, pb.AbortRequest(request_id=request_id), timeout_s)).aborted

    async def model_info(self, *, timeout_s: float | None = None) -> ModelInfo:
        answer = await self._unary(self._stub.GetModelInfo, pb.GetModelInfoRequest(), timeout_s)
        return info.model_info_from_proto(answer)

    async def server_info(self, *, timeout_s: float | None = None) -> ServerInfo:
        answer = await self._unary(self._stub.GetServerInfo, pb.GetServerInfoRequest(), timeout_s)
        return info.server_info_from_proto(answer)

    async def reshard(self, mesh: str, *, timeout_s: float | None = None) -> float:
        return (await self._unary(self._stub.Reshard, pb.ReshardRequest(mesh=mesh), timeout_s)).seconds

    async def wait_ready(self, timeout_s: float = 60.0) -> None:
        deadline, last = time.monotonic() + timeout_s, "no answer"
        while (left := deadline - time.monotonic()) > 0:
            try:
                status = (await self._health.Check(_HEALTH_REQUEST, timeout=left)).status
                last = health_pb2.HealthCheckResponse.ServingStatus.Name(status)
                if status == _IS_SERVING:
                    return
            except grpc.RpcError as failed:
                last = wire.may_come_up(failed)
            await asyncio.sleep(_POLL_S)
        raise wire.not_ready_error(self.address, timeout_s, last)

    async def close(self) -> None:
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _unary(self, method: Callable[..., Any], request: Any, timeout_s: float | None) -> Any:
        try:
            return await method(request, timeout=timeout_s, metadata=self._metadata)
        except grpc.RpcError as failed:
            raise wire.error_of(failed) from None
        except asyncio.CancelledError:
            if _this_task_is_cancelled():
                raise
            raise _cancelled() from None
