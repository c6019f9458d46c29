"""Spans of requests: their trace, attributes and status, over real gRPC calls; and tracing that is off."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from server_harness import run

from jaxinfer.errors import InvalidArgumentError, JaxinferError, QueueFullError, StepFailedError
from jaxinfer.types import Finished, FinishReason, SampleEnd, SamplingParams, Timings, Usage
from server import tracing, wire
from server.tracing import RequestSpan, Tracer, make_tracer

trace = pytest.importorskip("opentelemetry.trace")
sdk = pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent.parent
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
FINISHED = Finished(
    (SampleEnd(0, FinishReason.STOP), SampleEnd(1, FinishReason.LENGTH)), Usage(7, 20, 4), Timings(0.25, 0.5, 1.5)
)

type Work = Callable[[RequestSpan], Awaitable[None]]


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter) -> Tracer:
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return tracing.OpenTelemetryTracer(provider)


async def call(tracer: Tracer, work: Work, metadata=(), *, timeout_s: float | None = None) -> grpc.StatusCode:
    """One call of a server that does `work` in a span; returns the status that the client sees."""

    async def handle(_message: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            with tracer.span("r1", context) as span:
                await work(span)
        except JaxinferError as error:
            await context.abort(*wire.status_of(error))
        return b""

    method = grpc.unary_unary_rpc_method_handler(handle)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test.Test", {"Call": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = channel.unary_unary("/test.Test/Call")
            try:
                await stub(b"", metadata=metadata, timeout=timeout_s)
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK
    finally:
        await server.stop(1)


async def nothing(span: RequestSpan) -> None:
    pass


def raising(error: Exception) -> Work:
    async def work(span: RequestSpan) -> None:
        raise error

    return work


def only_span(exporter: InMemorySpanExporter):
    [span] = exporter.get_finished_spans()
    return span


def test_a_span_has_vllms_attributes(tracer, exporter):
    params = SamplingParams(n=2, temperature=0.5, top_p=0.75, top_k=3, max_tokens=10)

    async def work(span: RequestSpan) -> None:
        span.on_request("echo", params)
        span.on_finished(FINISHED)

    assert run(call(tracer, work)) is grpc.StatusCode.OK
    span = only_span(exporter)
    assert span.name == "llm_request"
    assert span.kind is trace.SpanKind.SERVER
    assert span.status.status_code is trace.StatusCode.UNSET
    assert dict(span.attributes) == {
        "gen_ai.request.id": "r1",
        "gen_ai.request.model": "echo",
        "gen_ai.response.model": "echo",
        "gen_ai.request.n": 2,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.max_tokens": 10,
        "gen_ai.usage.prompt_tokens": 7,
        "gen_ai.usage.completion_tokens": 20,
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 20,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.response.finish_reasons": ("stop", "length"),
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.e2e": 1.5,
        "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": 1.0,
        "gen_ai.latency.time_in_model_inference": 1.25,
        "rpc.system": "grpc",
        "rpc.grpc.status_code": 0,
    }


def test_the_rest_of_the_context_is_no_max_tokens(tracer, exporter):
    async def work(span: RequestSpan) -> None:
        span.on_request("echo", SamplingParams(max_tokens=None))

    run(call(tracer, work))
    assert "gen_ai.request.max_tokens" not in only_span(exporter).attributes


def test_a_clients_trace_goes_on(tracer, exporter):
    run(call(tracer, nothing, [("traceparent", TRACEPARENT), ("tracestate", "vendor=1"), ("other-bin", b"\0")]))
    span = only_span(exporter)
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert f"{span.parent.span_id:016x}" == PARENT_ID
    assert span.parent.is_remote
    assert span.context.trace_state["vendor"] == "1"


@pytest.mark.parametrize(
    "traceparent",
    ["", "nonsense", f"00-{'0' * 32}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}", f"ff-{TRACE_ID}-{PARENT_ID}-01"],
)
def test_a_malformed_traceparent_is_ignored(tracer, exporter, traceparent):
    assert run(call(tracer, nothing, [("traceparent", traceparent)])) is grpc.StatusCode.OK
    span = only_span(exporter)
    assert span.parent is None
    assert span.context.trace_id != 0


def test_a_trace_that_is_not_sampled_makes_no_span(tracer, exporter):
    run(call(tracer, nothing, [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00")]))
    assert not exporter.get_finished_spans()


@pytest.mark.parametrize(
    ("error", "code", "error_type", "is_fault"),
    [
        (InvalidArgumentError("n", 0, "1 to 128"), grpc.StatusCode.INVALID_ARGUMENT, "invalid_argument", False),
        (QueueFullError("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, "queue_full", False),
        (StepFailedError("step 3 failed"), None, "step_failed", True),
    ],
)
def test_the_status_is_the_calls(tracer, exporter, error, code, error_type, is_fault):
    seen = run(call(tracer, raising(error)))
    assert code is None or seen is code
    span = only_span(exporter)
    assert span.attributes["rpc.grpc.status_code"] == seen.value[0]
    assert span.attributes["error.type"] == error_type
    assert (span.status.status_code is trace.StatusCode.ERROR) is is_fault


def test_an_error_that_is_not_ours_is_internal(tracer, exporter):
    run(call(tracer, raising(ZeroDivisionError("secret text"))))
    span = only_span(exporter)
    assert span.attributes["rpc.grpc.status_code"] == grpc.StatusCode.INTERNAL.value[0]
    assert span.attributes["error.type"] == "ZeroDivisionError"
    assert span.status.status_code is trace.StatusCode.ERROR
    assert "secret" not in span.to_json()  # it may be part of a prompt


def test_a_deadline_that_passes(tracer, exporter):
    async def work(span: RequestSpan) -> None:
        await asyncio.sleep(30)

    assert run(call(tracer, work, timeout_s=0.2)) is grpc.StatusCode.DEADLINE_EXCEEDED
    span = only_span(exporter)
    assert span.attributes["rpc.grpc.status_code"] == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]


def test_a_client_that_goes_away(tracer, exporter):
    async def main() -> None:
        begun = asyncio.Event()

        async def work(span: RequestSpan) -> None:
            begun.set()
            await asyncio.sleep(30)

        calling = asyncio.create_task(call(tracer, work, timeout_s=60))
        await begun.wait()
        calling.cancel()
        with suppress(asyncio.CancelledError):
            await calling

    run(main())
    assert only_span(exporter).attributes["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]


def test_spans_reach_a_collector():
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc")
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

    received = []

    class Collector(service.TraceServiceServicer):
        def Export(self, request, context):
            received.append(request)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    service.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        tracer = make_tracer(f"http://127.0.0.1:{port}")
        run(call(tracer, nothing, [("traceparent", TRACEPARENT)]))
        tracer.shutdown()
    finally:
        server.stop(0)
    [request] = received
    [group] = request.resource_spans
    resource = {each.key: each.value.string_value for each in group.resource.attributes}
    assert resource["service.name"] == "jaxinfer"
    [span] = group.scope_spans[0].spans
    assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE_ID, PARENT_ID)


def test_a_collector_that_is_away_holds_up_neither_calls_nor_the_end(monkeypatch):
    monkeypatch.setattr(tracing, "SHUTDOWN_S", 0.2)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        tracer = make_tracer(f"http://127.0.0.1:{nobody.getsockname()[1]}")
        begun = time.monotonic()
        assert run(call(tracer, nothing)) is grpc.StatusCode.OK
        tracer.shutdown()
        assert time.monotonic() - begun < 3.0


def test_a_service_name_from_the_environment_wins(monkeypatch):
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    tracer = make_tracer("http://127.0.0.1:1")
    try:
        assert tracer._provider.resource.attributes["service.name"] == "mine"
    finally:
        tracer.shutdown()


def test_an_endpoint_that_is_no_url():
    for endpoint in ("localhost:4317", ""):
        with pytest.raises(InvalidArgumentError, match="otlp_endpoint"):
            make_tracer(endpoint)


def test_tracing_that_is_off_does_nothing():
    tracer = make_tracer(None)
    context = SimpleNamespace()  # nothing is asked of it
    with tracer.span("r1", context) as one:
        one.on_request("echo", SamplingParams())
        one.on_finished(FINISHED)
    with tracer.span("r2", context) as two:
        pass
    assert one is two
    tracer.shutdown()


def test_without_opentelemetry_it_is_imported_only_when_asked_for():
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"  # as if it were not installed
        "from server.tracing import *\n"
        "make_tracer(None).shutdown()\n"
        "try: make_tracer('http://localhost:4317')\n"
        "except NotInstalledError as error: print(error.code, error)"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("not_installed traces to http://localhost:4317 need OpenTelemetry")
    assert "pip install 'jaxinfer[otel]'" in ran.stdout


def test_tracing_that_is_off_imports_nothing():
    script = "import sys, server.tracing; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
