"""The gRPC server: the service over an engine, health, reflection, and a drain that loses nothing in silence."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
import platform
import signal
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from jaxinfer.engine.observer import Observer
from jaxinfer.engine.text_threads import SHORT_TEXT_BYTES
from jaxinfer.errors import (
    DeadlineExceededError,
    DrainingError,
    EngineDeadError,
    InvalidArgumentError,
    JaxinferError,
    ModelNotFoundError,
    UnsupportedError,
)
from jaxinfer.logs import describe, request_context
from jaxinfer.types import Failed, Request
from server import inference_pb2 as pb
from server import inference_pb2_grpc, info, wire
from server.credentials import ApiKeys, RequireApiKey, ServerTls, missing_protection
from server.health import POLL_S, HealthService
from server.info import ServerState
from server.message_sizes import MAX_TOKENS_OF_TEXT, Limits, MessageSizes
from server.outbox import Outbox
from server.tracing import Tracer

if TYPE_CHECKING:  # loading the engine means loading JAX; the server listens before that
    from jaxinfer.engine.engine import Engine

log = logging.getLogger(__name__)

DEFAULT_PORT = 50051
HEALTH_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["Inference"].full_name
MAX_TIMEOUT_S = 365 * 86400.0  # a deadline beyond this is none; some clients write "none" so
STALLED_S = 300.0  # a client that takes nothing for so long, while there is something for it, is given up
POSITIONS_ON_THE_LOOP = 64  # whose log-probabilities are written at once, in a few milliseconds
FLUSH_S = 5.0  # how long ended streams may take to hand their last messages to slow clients
DEATH_NOTICE_S = 2.0  # health says NOT_SERVING for so long before a server ends with its engine
STOP_GRACE_S = 0.5  # health watches never end by themselves; they are given this long

# 100,000 token ids are 0.5 MB, as much text 0.4 MB; this leaves room for images.
MAX_REQUEST_BYTES = 64 * 2**20
SERVER_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # What was asked for is sent: 20 log-probabilities at each of 100,000 positions of a prompt are 30 MB.
    ("grpc.max_send_message_length", -1),
    # Otherwise a second server binds a port that is taken, and the two share its connections.
    ("grpc.so_reuseport", 0),
    # A stream may be silent for minutes while its request waits. Pings keep proxies from closing it, and find a
    # client that vanished without a word.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),  # of the same pings; gRPC waits for the longer of the two, by default 60 s
    ("grpc.keepalive_permit_without_calls", 1),
    # Clients commonly ping every 10 s; by default gRPC takes more than one in 5 minutes for abuse and hangs up.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)


class CannotListenError(JaxinferError, OSError):
    """The address cannot be listened on; the message says why."""

    code = "cannot_listen"


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """The RPCs of `inference.proto` over one engine, which may come later.

    Attributes:
      engine: None until it is loaded; until then calls that need it end with UNAVAILABLE.
      draining: set once, to refuse new requests.
      live: how many Generate and UnaryGenerate calls are open.
    """

    def __init__(self, observer: Observer, tracer: Tracer, *, allow_reshard: bool = False) -> None:
        self._observer, self._tracer, self._allow_reshard = observer, tracer, allow_reshard
        self.engine: Engine | None = None
        self.draining = False
        self.live = 0
        self._outboxes: set[Outbox] = set()
        self._started = time.monotonic()

    @property
    def state(self) -> ServerState:
        if self.draining:
            return ServerState.DRAINING
        return ServerState.STARTING if self.engine is None else ServerState(self.engine.state)

    def refused(self, code: str) -> None:
        """A request was refused before it was read."""
        self._observer.on_refuse(code)

    def fail_live(self, error: JaxinferError) -> None:
        """Ends every open call with the error, where the engine was told to and may not come to it."""
        for outbox in self._outboxes:
            outbox.put([Failed(error)])

    async def Generate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> None:
        async with self._generation(message, context) as (request_id, outbox):
            async for event in outbox:
                if wire.num_positions(event) > POSITIONS_ON_THE_LOOP:
                    response = await asyncio.to_thread(wire.event_to_bytes, request_id, event)
                else:
                    response = wire.event_to_bytes(request_id, event)
                try:
                    async with asyncio.timeout(STALLED_S):
                        await context.write(response)
                except TimeoutError:
                    raise DeadlineExceededError(f"the client took nothing for {STALLED_S:g} s") from None

    async def UnaryGenerate(self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext) -> bytes:
        async with self._generation(message, context) as (request_id, outbox):
            events = await outbox.whole()
            if sum(map(wire.num_positions, events)) > POSITIONS_ON_THE_LOOP:
                return await asyncio.to_thread(wire.generation_to_bytes, request_id, events)
            return wire.generation_to_bytes(request_id, events)

    @asynccontextmanager
    async def _generation(
        self, message: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[tuple[str, Outbox]]:
        """A request's id and where its events come; it is aborted if this is left before its last event."""
        request_id = message.request_id if message.HasField("request_id") else f"request-{uuid.uuid4().hex}"
        outbox = Outbox()
        self.live += 1
        self._outboxes.add(outbox)
        try:
            shown = request_id[: wire.MAX_REQUEST_ID_LENGTH]  # a longer one is refused, but has to be named
            with request_context(shown):
                async with _errors_become_statuses(context, f"request {shown!r}"):
                    # Inside, so that the span sees errors before they become statuses.
                    with self._tracer.span(shown, context) as span:
                        engine, request = await self._admit(request_id, message, context)
                        span.on_request(engine.model_name, request.params)
                        await engine.submit_async(request, outbox.put)
                        # A client that goes away cancels this coroutine, here or inside.
                        try:
                            yield request_id, outbox
                        finally:
                            if not outbox.over:
                                engine.abort(request_id)
                            if outbox.finished is not None:
                                span.on_finished(outbox.finished)
                            # To tell a client that does not read how its call ended may take for ever.
                            outbox.close()
        finally:
            self._outboxes.discard(outbox)
            self.live -= 1

    async def _admit(
        self, request_id: str, message: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> tuple[Engine, Request]:
        try:
            if self.draining:
                raise DrainingError("the server is shutting down and takes no new requests")
            engine = self._engine_for(message)
            left = context.time_remaining()
            timeout_s = None if left is None or left > MAX_TIMEOUT_S else left
            read = partial(wire.request_from_proto, message, request_id=request_id, timeout_s=timeout_s)
            size = message.ByteSize()
            # To check a hundred thousand biases takes a while.
            return engine, read() if size <= SHORT_TEXT_BYTES else await engine.text_threads.run(0, read)
        except JaxinferError as error:  # what the engine refuses, it tells the observer itself
            self._observer.on_refuse(error.code)
            raise

    async def Tokenize(self, message: pb.TokenizeRequest, context: grpc.aio.ServicerContext) -> pb.TokenizeResponse:
        async with _errors_become_statuses(context, "Tokenize"):
            engine = self._engine_for(message)
            given = wire.tokenize_from_proto(message)
            if "messages" in given:
                work = partial(engine.tokenize_chat, given["messages"], max_tokens=MAX_TOKENS_OF_TEXT)
            else:
                work = partial(engine.tokenize, **given, max_tokens=MAX_TOKENS_OF_TEXT)
            token_ids = await engine.text_threads.run(message.ByteSize(), work)
            return pb.TokenizeResponse(token_ids=token_ids)

    async def Detokenize(
        self, message: pb.DetokenizeRequest, context: grpc.aio.ServicerContext
    ) -> pb.DetokenizeResponse:
        async with _errors_become_statuses(context, "Detokenize"):
            engine = self._engine_for(message)
            skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
            if (count := len(message.token_ids)) > MAX_TOKENS_OF_TEXT:
                raise InvalidArgumentError("token_ids", f"{count} ids", f"at most {MAX_TOKENS_OF_TEXT}")
            ids = list(message.token_ids)
            work = partial(engine.detokenize, ids, skip_special_tokens=skip)
            return pb.DetokenizeResponse(text=await engine.text_threads.run(message.ByteSize(), work))

    async def Abort(self, message: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        async with _errors_become_statuses(context, f"Abort of {message.request_id!r}"):
            if not message.request_id:
                raise InvalidArgumentError("request_id", "", "the id of a request")
            return pb.AbortResponse(aborted=self.engine is not None and self.engine.abort(message.request_id))

    async def GetModelInfo(
        self, message: pb.GetModelInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetModelInfoResponse:
        async with _errors_become_statuses(context, "GetModelInfo"):
            engine = self._engine_or_refuse()
            return info.model_info_to_proto(
                info.ModelInfo.of(engine.model_name, engine.model_config, engine.scheduler_config, engine.mesh)
            )

    async def GetServerInfo(
        self, message: pb.GetServerInfoRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetServerInfoResponse:
        async with _errors_become_statuses(context, "GetServerInfo"):
            return info.server_info_to_proto(
                info.ServerInfo(
                    state=self.state,
                    uptime_s=time.monotonic() - self._started,
                    versions=versions(),
                    stats=None if self.engine is None else self.engine.stats(),
                )
            )

    async def Reshard(self, message: pb.ReshardRequest, context: grpc.aio.ServicerContext) -> pb.ReshardResponse:
        async with _errors_become_statuses(context, f"Reshard to {message.mesh!r}"):
            if not self._allow_reshard:
                raise UnsupportedError("Reshard: this server was not started with --allow-reshard")
            if "=" not in message.mesh:  # a file is read on the server, where clients have no business
                raise InvalidArgumentError("mesh", message.mesh, "axes and sizes, such as data=2,tensor=4")
            engine, begun = self._engine_or_refuse(), time.monotonic()
            # It cannot be undone halfway: a caller that goes away does not end it.
            await asyncio.shield(asyncio.to_thread(engine.reshard, message.mesh))
            return pb.ReshardResponse(mesh=engine.mesh, seconds=time.monotonic() - begun)

    def _engine_for(self, message: pb.GenerateRequest | pb.TokenizeRequest | pb.DetokenizeRequest) -> Engine:
        engine = self._engine_or_refuse()
        if message.HasField("model") and message.model != engine.model_name:
            raise ModelNotFoundError(f"model {message.model!r} is not served here; {engine.model_name!r} is")
        return engine

    def _engine_or_refuse(self) -> Engine:
        if self.engine is None or self.state is ServerState.STARTING:
            raise wire.WarmingUpError("the server is warming up: its model is not ready yet")
        return self.engine


@asynccontextmanager
async def _errors_become_statuses(context: grpc.aio.ServicerContext, what: str) -> AsyncIterator[None]:
    """Ends the call with the status of what is raised inside; `what` names it in the log."""
    try:
        yield
    except JaxinferError as error:
        status = wire.status_of(error)
        log.info("%s: %s: %s", what, status.code.name, describe(error), extra={"error_code": error.code})
    except Exception:
        if context.cancelled():  # a write that came after the client went; the request is aborted all the same
            return
        log.exception("%s: unexpected error", what)
        status = wire.status_of(JaxinferError(f"internal error in {what}; the server's log has the details"))
    else:
        return
    await context.abort(*status)


def versions() -> dict[str, str]:
    """Versions of what the answers depend on; a package that is not installed as one is left out."""
    found = {"python": platform.python_version()}
    for name in ("jaxinfer", "jax", "jaxlib", "flax", "grpcio", "protobuf"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class GrpcServer:
    """A listening server. Starts with no engine, NOT_SERVING; `set_engine` gives it one.

    All methods belong to one event loop. `serve` below does the whole life; this class is for those who have a loop of
    their own, and for tests:

        server = GrpcServer(port=0)
        await server.start()
        server.set_engine(engine)
        ...
        await server.drain(timeout_s=30)
        await server.stop()
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = DEFAULT_PORT,
        tls: ServerTls | None = None,
        api_keys: ApiKeys | None = None,
        observer: Observer | None = None,
        tracer: Tracer | None = None,
        allow_reshard: bool = False,
    ) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise InvalidArgumentError("port", port, "0 (any free one) to 65535")
        self.host = host
        self.port = port  # the one bound, after `start`
        self.service = InferenceService(observer or Observer(), tracer or Tracer(), allow_reshard=allow_reshard)
        self._tls, self._api_keys = tls, api_keys
        self._server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return _join(self.host, self.port)

    async def start(self) -> int:
        """Binds and listens; the port is returned.

        Raises:
          CannotListenError: the port is taken, not permitted, or the host is not one of this machine's.
        """
        interceptors: list[grpc.aio.ServerInterceptor] = [MessageSizes(self._limits, self.service.refused)]
        if self._api_keys is not None:
            interceptors.insert(0, RequireApiKey(self._api_keys))
        server = grpc.aio.server(interceptors=interceptors, options=SERVER_OPTIONS)
        health = HealthService(("", SERVICE_NAME), lambda: self.service.state is ServerState.READY)
        inference_pb2_grpc.add_InferenceServicer_to_server(self.service, server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        names = (SERVICE_NAME, HEALTH_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        try:
            if self._tls is None:
                bound = server.add_insecure_port(self.address)
            else:
                bound = server.add_secure_port(self.address, self._tls.credentials())
        except RuntimeError:
            bound = 0
        if not bound:
            raise CannotListenError(f"cannot listen on {self.address}: {_why_not_bound(self.host, self.port)}")
        self.port = bound
        await server.start()
        self._server = server
        lacking = missing_protection(self.host, tls=self._tls, api_keys=self._api_keys)
        if lacking is not None:
            log.warning("listening on %s, beyond this machine, %s", self.address, lacking)
        return bound

    def _limits(self) -> Limits | None:
        """What bounds the size of requests, once there is a model."""
        engine = self.service.engine
        if engine is None:
            return None
        return Limits(engine.prompt_limits, engine.model_config.vocab_size)

    def set_engine(self, engine: Engine) -> None:
        """Hands over the engine; health turns to SERVING once its state is "ready"."""
        self.service.engine = engine

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and lets the live ones end.

        Health says NOT_SERVING from here on. Returns False if some requests did not end in `timeout_s`; their clients
        were then told UNAVAILABLE, also by an engine that does not go on.
        """
        self.service.draining = True
        drained = True
        if self.service.engine is not None:
            drained = await self.service.engine.drain(timeout_s)
        if not drained:
            self.service.fail_live(DrainingError(f"the server shut down before the request ended ({timeout_s:g} s)"))
        flushed_by = time.monotonic() + FLUSH_S
        while self.service.live and time.monotonic() < flushed_by:
            await asyncio.sleep(0.02)
        return drained and not self.service.live

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Stops listening; calls still open after `grace_s` are cancelled. Does nothing if it is not listening."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(grace_s)


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def _why_not_bound(host: str, port: int) -> str:
    """gRPC says only that it failed; a plain socket says why."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC could not bind it"


async def serve(
    load: Callable[[], Engine],
    *,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    tls: ServerTls | None = None,
    api_keys: ApiKeys | None = None,
    observer: Observer | None = None,
    tracer: Tracer | None = None,
    allow_reshard: bool = False,
    drain_timeout_s: float = 30.0,
    end_with_engine: bool = False,
    on_listening: Callable[[int], None] | None = None,
    on_ready: Callable[[Engine], None] | None = None,
) -> bool:
    """Listens, loads the engine, serves until SIGTERM or SIGINT, drains, stops and closes the engine.

    A second signal cuts the drain short. Signals are handled only where this runs in the main thread; elsewhere, cancel
    the task, which stops at once.

    Args:
      load: makes the engine, warm and ready; runs in a thread of its own, so that health answers meanwhile. A signal
        does not wait for it: the thread is a daemon, and what it loads is not used.
      tls, api_keys: None leaves the connection plain, and lets everybody in.
      observer: is told of requests that are refused here; give the engine the same one.
      tracer: makes a span for each request.
      allow_reshard: whether clients may move the model to another mesh.
      drain_timeout_s: how long live requests may take to end after the first signal.
      end_with_engine: whether to end too when the engine dies, for a supervisor to start both again.
      on_listening: is told the port, before loading begins.
      on_ready: is told the engine, once it serves.

    Returns:
      Whether all live requests ended in time.

    Raises:
      CannotListenError: the address cannot be listened on.
      EngineDeadError: what the engine died of, where this ends with it.
      Exception: what `load` raised; the server is stopped by then.
    """
    server = GrpcServer(
        host=host,
        port=port,
        tls=tls,
        api_keys=api_keys,
        observer=observer,
        tracer=tracer,
        allow_reshard=allow_reshard,
    )
    await server.start()
    stop, hurry = asyncio.Event(), asyncio.Event()
    undo_signals = _on_signals(lambda: (hurry if stop.is_set() else stop).set())
    try:
        if on_listening is not None:
            on_listening(server.port)
        loaded = _in_daemon_thread(load)
        engine = await _unless(stop, loaded)
        if engine is not None:
            server.set_engine(engine)
            if on_ready is not None:
                on_ready(engine)
            if end_with_engine:
                died = await _unless(stop, _death(engine))
                if died is not None:
                    await asyncio.sleep(DEATH_NOTICE_S)
                    await server.drain(0)
                    raise died
            await stop.wait()
        drained = await _unless(hurry, server.drain(drain_timeout_s))
        if drained is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(server.drain(0), STOP_GRACE_S)  # tells the clients why
        return bool(drained)
    finally:
        undo_signals()
        await server.stop()
        if server.service.engine is not None:
            await asyncio.to_thread(server.service.engine.close)


async def _death(engine: Engine) -> EngineDeadError:
    while engine.death is None:
        await asyncio.sleep(POLL_S)
    return engine.death


def _on_signals(handler: Callable[[], object]) -> Callable[[], None]:
    """Calls `handler` in the loop at SIGTERM and SIGINT; returns what undoes that."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    loop = asyncio.get_running_loop()
    watched = (signal.SIGTERM, signal.SIGINT)
    for each in watched:
        loop.add_signal_handler(each, handler)

    def undo() -> None:
        for each in watched:
            loop.remove_signal_handler(each)

    return undo


async def _in_daemon_thread[T](function: Callable[[], T]) -> T:
    """As asyncio.to_thread, but neither the loop's end nor the process's waits for a daemon."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(set_result: Callable[..., None], value: object) -> None:
        if not result.done():
            set_result(value)

    def work() -> None:
        set_result: Callable[..., None]
        value: object
        try:
            set_result, value = result.set_result, function()
        except BaseException as error:
            set_result, value = result.set_exception, error
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, set_result, value)

    threading.Thread(target=work, name="load-engine", daemon=True).start()
    return await result


async def _unless[T](event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if `event` comes first; `work` is then cancelled."""
    task = asyncio.create_task(work)
    interrupt = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, interrupt}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        interrupt.cancel()
        task.cancel()
