"""What the server tells of its requests: metrics of refusals, spans, and log lines with their request's id."""

from __future__ import annotations

import logging

import grpc
import pytest
from fake_engine import FakeEngine
from server_harness import run

from jaxinfer.errors import DrainingError, InvalidArgumentError, JaxinferError, StepFailedError
from jaxinfer.logs import JsonFormatter
from jaxinfer.types import SamplingParams
from server.client import AsyncClient
from server.grpc_service import GrpcServer
from server.metrics import Metrics
from server.tracing import OpenTelemetryTracer

sdk = pytest.importorskip("opentelemetry.sdk.trace")
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


class Monitored:
    """A server with a metrics observer and a tracer, and what they have."""

    def __init__(self) -> None:
        self.metrics, self.spans, self.engine = Metrics("echo"), InMemorySpanExporter(), FakeEngine()
        provider = sdk.TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.spans))
        self.server = GrpcServer(port=0, observer=self.metrics.observer, tracer=OpenTelemetryTracer(provider))

    async def __aenter__(self) -> AsyncClient:
        await self.server.start()
        self.server.set_engine(self.engine)  # type: ignore[arg-type]
        self._client = AsyncClient(self.server.address)
        await self._client.wait_ready(5)
        return self._client

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()
        await self.server.stop(0)

    def refused(self, code: str) -> float | None:
        labels = {"model_name": "echo", "code": code}
        return self.metrics.registry.get_sample_value("jaxinfer:requests_refused_total", labels)


async def collect(client: AsyncClient, prompt: str = "abc", **options) -> None:
    async for _ in client.generate(prompt, SamplingParams(max_tokens=None, n=2), **options):
        pass


def test_a_request_is_a_span():
    monitored = Monitored()

    async def main() -> None:
        async with monitored as client:
            await collect(client, request_id="r1")

    run(main())
    [span] = monitored.spans.get_finished_spans()
    assert span.attributes["gen_ai.request.id"] == "r1"
    assert span.attributes["gen_ai.request.model"] == "echo"
    assert span.attributes["gen_ai.request.n"] == 2
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 3
    assert span.attributes["gen_ai.usage.completion_tokens"] == 6
    assert span.attributes["gen_ai.latency.time_in_queue"] == 0.25
    assert span.attributes["rpc.grpc.status_code"] == 0


@pytest.mark.parametrize("method", ["Generate", "UnaryGenerate"])
def test_a_traceparent_is_taken_from_the_metadata(method):
    from server import inference_pb2 as pb
    from server import inference_pb2_grpc

    monitored = Monitored()

    async def main() -> None:
        async with monitored, grpc.aio.insecure_channel(monitored.server.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            message = pb.GenerateRequest(text="abc", request_id="r1")
            metadata = [("traceparent", f"00-{TRACE_ID}-b7ad6b7169203331-01")]
            if method == "Generate":
                async for _ in stub.Generate(message, metadata=metadata):
                    pass
            else:
                await stub.UnaryGenerate(message, metadata=metadata)

    run(main())
    [span] = monitored.spans.get_finished_spans()
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert span.attributes["gen_ai.usage.prompt_tokens"] == 3


def test_a_failed_request_is_a_span_with_its_status():
    monitored = Monitored()

    async def main() -> None:
        async with monitored as client:
            monitored.engine.fail_after = (1, StepFailedError("step 3 failed"))
            with pytest.raises(JaxinferError):
                await collect(client, request_id="r1")

    run(main())
    [span] = monitored.spans.get_finished_spans()
    assert span.attributes["error.type"] == "step_failed"
    assert span.attributes["rpc.grpc.status_code"] != 0
    assert monitored.refused("step_failed") is None  # it was taken in


def test_what_the_server_refuses_is_counted():
    monitored = Monitored()

    async def main() -> None:
        async with monitored as client:
            with pytest.raises(InvalidArgumentError):
                await collect(client, request_id="x" * 300)
            monitored.server.service.draining = True
            for _ in range(2):
                with pytest.raises(DrainingError):
                    await collect(client)

    run(main())
    assert monitored.refused("invalid_argument") == 1
    assert monitored.refused("draining") == 2
    assert [len(span.attributes["gen_ai.request.id"]) <= 256 for span in monitored.spans.get_finished_spans()] == [
        True
    ] * 3


def test_log_lines_have_the_requests_id_and_not_its_prompt(caplog):
    monitored, lines = Monitored(), []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Lines()
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("server.grpc_service")

    async def main() -> None:
        async with monitored as client:
            monitored.engine.refuse_with = InvalidArgumentError("messages[0]", "a secret", "something else")
            with pytest.raises(InvalidArgumentError, match="a secret"):  # the client is told
                await collect(client, request_id="r1")

    with caplog.at_level(logging.INFO):
        logger.addHandler(handler)
        try:
            run(main())
        finally:
            logger.removeHandler(handler)
    about = [line for line in lines if '"request_id": "r1"' in line]
    assert about
    assert '"error_code": "invalid_argument"' in about[0]
    assert "secret" not in "".join(lines)
