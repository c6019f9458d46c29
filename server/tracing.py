"""OpenTelemetry traces: a span for each request, in the trace that the client's `traceparent` names.

Off unless an endpoint is given; the `otel` extra is imported only then. Attributes are those of OpenTelemetry's
conventions for generative AI (https://opentelemetry.io/docs/specs/semconv/gen-ai/) and of vLLM, whose traces look the
same. Prompts and outputs are not among them.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import grpc

from jaxinfer import __version__
from jaxinfer.errors import DeadlineExceededError, InvalidArgumentError, JaxinferError
from jaxinfer.types import Finished, SamplingParams
from server import wire

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider

SPAN_NAME = "llm_request"  # vLLM's
SHUTDOWN_S = 5.0
TRACE_KEYS = ("traceparent", "tracestate")  # https://www.w3.org/TR/trace-context/

# Ends that are the server's fault; others leave the span's status unset, by OpenTelemetry's conventions for gRPC.
SERVER_FAULTS = frozenset(
    {
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)


class NotInstalledError(JaxinferError, ImportError):
    """Something was asked for that needs a package which is not installed; the message says how to install it."""

    code = "not_installed"


class RequestSpan:
    """Is told about a request while it lives. This one, for when tracing is off, forgets it all."""

    def on_request(self, model: str, params: SamplingParams) -> None:
        """The request is sound, and goes to the engine that serves `model`."""

    def on_finished(self, finished: Finished) -> None:
        """The request's last event."""


class Tracer:
    """Makes spans. This one, for when tracing is off, makes none."""

    def span(self, request_id: str, context: grpc.aio.ServicerContext) -> AbstractContextManager[RequestSpan]:
        """The span of a call's request, from entry to exit; what is raised inside becomes its status."""
        return nullcontext(_NO_SPAN)

    def shutdown(self) -> None:
        """Sends what has not been sent, for up to SHUTDOWN_S; blocks so long. No spans are made afterwards."""


_NO_SPAN = RequestSpan()


def make_tracer(endpoint: str | None) -> Tracer:
    """A tracer that sends spans to an OTLP endpoint over gRPC, or one that makes none if `endpoint` is None.

    The SDK's own environment variables (OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_TRACES_SAMPLER,
    OTEL_EXPORTER_OTLP_HEADERS, ...) hold as well.

    Args:
      endpoint: such as "http://localhost:4317"; with https the connection is encrypted.

    Raises:
      InvalidArgumentError: the endpoint is no such URL.
      NotInstalledError: OpenTelemetry is missing.
    """
    if endpoint is None:
        return Tracer()
    if not endpoint.startswith(("http://", "https://")):
        raise InvalidArgumentError("otlp_endpoint", endpoint, "a URL such as http://localhost:4317, or https://...")
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise NotInstalledError(
            f"traces to {endpoint} need OpenTelemetry ({error}): pip install 'jaxinfer[otel]', or give no endpoint"
        ) from error
    named = Resource.create({"service.name": "jaxinfer", "service.version": __version__})
    provider = TracerProvider(resource=named.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return OpenTelemetryTracer(provider)


class OpenTelemetryTracer(Tracer):
    """Makes the spans of an OpenTelemetry provider, which no other part of the process needs to share."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("jaxinfer", __version__)
        self._kind = trace.SpanKind.SERVER
        self._error = trace.StatusCode.ERROR
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, request_id: str, context: grpc.aio.ServicerContext) -> Iterator[RequestSpan]:
        sent = {key: value for key, value in context.invocation_metadata() or () if key in TRACE_KEYS}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(sent),  # one that is malformed counts as none
            kind=self._kind,
            attributes={"gen_ai.request.id": request_id, "rpc.system": "grpc"},
        )
        status = grpc.StatusCode.OK
        try:
            yield _OpenTelemetrySpan(span)
        except BaseException as error:
            status = _status_of(error, context)
            span.set_attribute("error.type", error.code if isinstance(error, JaxinferError) else type(error).__name__)
            if status in SERVER_FAULTS:
                span.set_status(self._error, status.name)
            raise
        finally:
            span.set_attribute("rpc.grpc.status_code", status.value[0])
            span.end()

    def shutdown(self) -> None:
        # The exporter retries for longer where the collector is away, and a server's end should not wait for that.
        thread = threading.Thread(target=self._provider.shutdown, name="tracer-shutdown", daemon=True)
        thread.start()
        thread.join(SHUTDOWN_S)


class _OpenTelemetrySpan(RequestSpan):
    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def on_request(self, model: str, params: SamplingParams) -> None:
        attributes: dict[str, Any] = {
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": params.top_k,
        }
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
        self._span.set_attributes(attributes)

    def on_finished(self, finished: Finished) -> None:
        usage, timings = finished.usage, finished.timings
        self._span.set_attributes(
            {
                "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
                "gen_ai.usage.completion_tokens": usage.output_tokens,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,  # the conventions' newer names for these two
                "gen_ai.usage.output_tokens": usage.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.response.finish_reasons": [str(end.finish_reason) for end in finished.ends],
                "gen_ai.latency.time_in_queue": timings.queue_s,
                "gen_ai.latency.time_to_first_token": timings.first_token_s,
                "gen_ai.latency.e2e": timings.total_s,
                "gen_ai.latency.time_in_model_prefill": timings.first_token_s - timings.queue_s,
                "gen_ai.latency.time_in_model_decode": timings.total_s - timings.first_token_s,
                "gen_ai.latency.time_in_model_inference": timings.total_s - timings.queue_s,
            }
        )


def _status_of(error: BaseException, context: grpc.aio.ServicerContext) -> grpc.StatusCode:
    """The status with which a call ends that meets `error`."""
    if isinstance(error, JaxinferError):
        return wire.status_of(error).code
    if isinstance(error, asyncio.CancelledError):  # by gRPC: the client went away, or its deadline passed
        left = context.time_remaining()
        passed = left is not None and left <= 0
        return wire.status_of(DeadlineExceededError()).code if passed else grpc.StatusCode.CANCELLED
    return wire.status_of(JaxinferError()).code
