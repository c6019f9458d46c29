"""Prometheus metrics of one engine, and the HTTP endpoint that shows them.

    metrics = Metrics(config.model)
    with MetricsServer(metrics.registry, port=9400):
        with Engine.start(config, cache_dir=cache_dir) as engine:
            metrics.watch(engine)
            ...

A name that begins with `vllm:` is vLLM's own and means the same there, so that dashboards made for vLLM work here. As
in vLLM, each sample of a request with n > 1 counts as one. `docs/monitoring.md` describes every metric.
"""

from __future__ import annotations

import logging
import socket
import socketserver
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from jaxinfer.engine.observer import Observer, RequestRecord, SampleRecord
from jaxinfer.errors import InvalidArgumentError
from jaxinfer.types import EngineStats, FinishReason
from server.grpc_service import CannotListenError
from server.info import ServerState

if TYPE_CHECKING:  # loading the engine means loading JAX
    from jaxinfer.engine.engine import Engine

logger = logging.getLogger(__name__)

MAX_SCRAPES = 8  # at once; one more is hung up on
SCRAPE_TIMEOUT_S = 10.0  # how long a scraper may send or take nothing

# Upper bounds. vLLM's, so that its dashboards find theirs, and some below its lowest, where a small model would else
# put everything into the first bucket.
LATENCY_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.2),
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
NEXT_TOKEN_S = (
    *(0.001, 0.0025, 0.005),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
STEP_TOKENS = tuple(float(2**i) for i in (0, *range(3, 15)))
REQUEST_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
REQUEST_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0)

ERROR = "error"  # vLLM's finished_reason of a request that failed


class Metrics:
    """All metrics of one engine, in a registry of their own.

    Attributes:
      registry: what to show, for example by a MetricsServer.
      observer: what counts; the engine calls it, and whoever refuses requests on the engine's behalf.
    """

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry(auto_describe=True)
        self.observer = MetricsObserver(self.registry, model_name)
        self._stats = _StatsCollector(model_name)
        self.registry.register(self._stats)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)

    def watch(self, engine: Engine) -> None:
        """Listens to this engine, and asks it for its stats at each scrape. Until then its state is "starting"."""
        engine.observe(self.observer)
        self._stats.engine = engine


class Histogram:
    """Counts of values by upper bound; one thread observes, others may collect.

    The library's own takes a lock and walks its bounds: 2.5 microseconds an observation where this takes 0.3, and a
    step of 256 decodes makes 256 of them.
    """

    def __init__(self, name: str, documentation: str, bounds: tuple[float, ...]) -> None:
        self._name, self._documentation, self._bounds = name, documentation, bounds
        self._labels = [*(str(bound) for bound in bounds), "+Inf"]
        self._counts = [0] * len(self._labels)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self, model_name: str) -> Metric:
        family = HistogramMetricFamily(self._name, self._documentation, labels=["model_name"])
        total, counts = self._sum, self._counts.copy()
        family.add_metric([model_name], list(zip(self._labels, accumulate(counts), strict=True)), total)
        return family


class MetricsObserver(Observer, Collector):
    """Histograms of steps, tokens and requests, and counters of how requests ended."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._finished = dict.fromkeys([*map(str, FinishReason), ERROR], 0)
        self._histograms: list[Histogram] = []

        def histogram(name: str, documentation: str, bounds: tuple[float, ...]) -> Histogram:
            self._histograms.append(Histogram(name, documentation, bounds))
            return self._histograms[-1]

        self._first_token = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to a sample's first token, in seconds.", FIRST_TOKEN_S
        )
        self._next_token = histogram(
            "vllm:inter_token_latency_seconds", "From a sample's token to its next, in seconds.", NEXT_TOKEN_S
        )
        self._token_mean = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between a finished sample's tokens, in seconds.",
            NEXT_TOKEN_S,
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to a sample's last token, in seconds.", LATENCY_S
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From arrival to a request's first step, in seconds.", LATENCY_S
        )
        self._inference = histogram(
            "vllm:request_inference_time_seconds", "From first step to a sample's last token, in seconds.", LATENCY_S
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From first step to a sample's first token, in seconds.", LATENCY_S
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From a sample's first token to its last, in seconds.", LATENCY_S
        )
        self._prompt_tokens = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a finished sample.", REQUEST_TOKENS
        )
        self._output_tokens = histogram(
            "vllm:request_generation_tokens", "Output tokens of a finished sample.", REQUEST_TOKENS
        )
        self._max_tokens = histogram(
            "vllm:request_params_max_tokens", "max_tokens of a finished sample, where it was given.", REQUEST_TOKENS
        )
        self._n = histogram("vllm:request_params_n", "Samples asked for, once a request that ended.", REQUEST_SAMPLES)
        self._step_tokens = histogram("vllm:iteration_tokens_total", "Tokens computed by a step.", STEP_TOKENS)
        self._step_seqs = histogram("jaxinfer:step_sequences", "Sequences in a step.", STEP_TOKENS)
        self._step_seconds = histogram("jaxinfer:step_seconds", "From one step to the next, in seconds.", NEXT_TOKEN_S)
        # These are rare, and refusals come from any thread: the library's counters, which lock.
        labels = ["model_name", "code"]
        self._failed = Counter(
            "jaxinfer:requests_failed", "Requests that failed after they were taken in.", labels, registry=registry
        )
        self._refused = Counter(
            "jaxinfer:requests_refused", "Requests that were refused, so that nothing ran.", labels, registry=registry
        )
        registry.register(self)

    def collect(self) -> Iterable[Metric]:
        yield from (histogram.family(self._model_name) for histogram in self._histograms)
        family = CounterMetricFamily(
            "vllm:request_success", "Samples that ended, by how.", labels=["model_name", "finished_reason"]
        )
        for reason, count in self._finished.items():
            family.add_metric([self._model_name, reason], count)
        yield family

    def on_refuse(self, code: str) -> None:
        self._refused.labels(self._model_name, code).inc()

    def on_start(self, seconds: float) -> None:
        self._queue.observe(seconds)

    def on_step(self, num_tokens: int, num_seqs: int, seconds: float) -> None:
        self._step_tokens.observe(num_tokens)
        self._step_seqs.observe(num_seqs)
        self._step_seconds.observe(seconds)

    def on_first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def on_next_token(self, seconds: float) -> None:
        self._next_token.observe(seconds)

    def on_end(self, record: RequestRecord) -> None:
        if record.error_code is not None:
            self._failed.labels(self._model_name, record.error_code).inc()
            self._finished[ERROR] += record.n
            return
        self._n.observe(record.n)
        for sample in record.samples:
            self._finished[sample.finish_reason] += 1
            if sample.finish_reason is not FinishReason.ABORT:  # cut short, it would only blur the others
                self._on_sample(record, sample)

    def _on_sample(self, record: RequestRecord, sample: SampleRecord) -> None:
        self._prompt_tokens.observe(record.usage.prompt_tokens)
        self._output_tokens.observe(sample.output_tokens)
        if record.max_tokens is not None:
            self._max_tokens.observe(record.max_tokens)
        first, last, started = sample.first_token_s, sample.last_token_s, record.timings.queue_s
        if first is None or last is None:
            return
        self._e2e.observe(last)
        self._inference.observe(last - started)
        self._prefill.observe(first - started)
        self._decode.observe(last - first)
        if sample.output_tokens > 1:
            self._token_mean.observe((last - first) / (sample.output_tokens - 1))


class _Stat(NamedTuple):
    """A metric with one value, taken from the engine's stats."""

    family: type[GaugeMetricFamily] | type[CounterMetricFamily]
    name: str
    documentation: str
    value: Callable[[EngineStats], float]


STATS = (
    _Stat(GaugeMetricFamily, "vllm:num_requests_running", "Samples that run.", lambda stats: stats.running),
    _Stat(GaugeMetricFamily, "vllm:num_requests_waiting", "Samples that wait to run.", lambda stats: stats.waiting),
    _Stat(
        GaugeMetricFamily,
        "jaxinfer:kv_cache_tokens",
        "Tokens that the KV cache's pages hold.",
        lambda stats: stats.kv_tokens,
    ),
    _Stat(
        GaugeMetricFamily,
        "vllm:kv_cache_usage_perc",
        "Part of the KV cache's pages that is in use; 1 is all of them.",
        lambda stats: _pages_in_use(stats) / stats.total_pages,
    ),
    _Stat(
        CounterMetricFamily,
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda stats: stats.prompt_tokens_total,
    ),
    _Stat(
        CounterMetricFamily,
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda stats: stats.cached_tokens_total,
    ),
    _Stat(
        CounterMetricFamily,
        "vllm:num_preemptions",
        "Times a sample lost its pages to others and had to wait again.",
        lambda stats: stats.preemptions_total,
    ),
    _Stat(
        CounterMetricFamily,
        "vllm:prompt_tokens",
        "Prompt tokens of the requests that started, cached ones included.",
        lambda stats: stats.prompt_tokens_total,
    ),
    _Stat(CounterMetricFamily, "vllm:generation_tokens", "Output tokens.", lambda stats: stats.output_tokens_total),
    _Stat(
        GaugeMetricFamily,
        "jaxinfer:waiting_tokens",
        "Prompt tokens of the requests that have not started.",
        lambda stats: stats.waiting_tokens,
    ),
    _Stat(CounterMetricFamily, "jaxinfer:steps", "Steps given to the device.", lambda stats: stats.steps_total),
    _Stat(
        CounterMetricFamily,
        "jaxinfer:host_seconds",
        "Seconds the loop spent on steps, without waiting for the device.",
        lambda stats: 1e-3 * stats.host_ms_per_step * stats.steps_total,
    ),
    _Stat(
        CounterMetricFamily,
        "jaxinfer:compiles_after_warmup",
        "Programs compiled after the start; should be 0.",
        lambda stats: stats.compiles_after_warmup,
    ),
    _Stat(
        CounterMetricFamily,
        "jaxinfer:audit_breaches",
        "Idle moments at which the page books did not add up; should be 0.",
        lambda stats: stats.audit_breaches_total,
    ),
)


def _pages_in_use(stats: EngineStats) -> int:
    return stats.total_pages - stats.free_pages - stats.cached_pages


class _StatsCollector(Collector):
    """What the engine knows by itself, read when somebody asks; without an engine, names with no values."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.engine: Engine | None = None

    def collect(self) -> Iterable[Metric]:
        engine = self.engine
        stats = None if engine is None else engine.stats()
        for stat in STATS:
            family = stat.family(stat.name, stat.documentation, labels=["model_name"])
            if stats is not None:
                family.add_metric([self._model_name], stat.value(stats))
            yield family

        pages = {}
        if stats is not None:
            pages = {"free": stats.free_pages, "cached": stats.cached_pages, "in_use": _pages_in_use(stats)}
        yield self._gauge("jaxinfer:kv_cache_pages", "Pages of the KV cache by state.", "state", pages)
        size = {} if stats is None else {stats.kv_dtype: stats.kv_token_bytes}
        yield self._gauge("jaxinfer:kv_cache_token_bytes", "Bytes of a token in the KV cache.", "dtype", size)
        parts = {} if engine is None else engine.startup_seconds
        yield self._gauge("jaxinfer:startup_seconds", "Seconds that each part of the start took.", "part", parts)
        state = ServerState.STARTING if engine is None else str(engine.state)
        states = {str(each): each == state for each in ServerState}
        yield self._gauge("jaxinfer:engine_state", "1 for the state the engine is in, else 0.", "state", states)

    def _gauge(self, name: str, documentation: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(name, documentation, labels=["model_name", label])
        for key, value in values.items():
            family.add_metric([self._model_name, key], value)
        return family


class MetricsServer:
    """Answers GET /metrics over HTTP, in the format that the scraper asks for, from threads of its own.

    Binds when it is made, answers from `start` to `stop`; as a context manager it does both.

    Attributes:
      host: as given.
      port: the one bound.

    Raises:
      InvalidArgumentError: the port is no port.
      CannotListenError: the port is taken, not permitted, or the host is not one of this machine's.
    """

    def __init__(self, registry: CollectorRegistry, *, host: str = "127.0.0.1", port: int) -> None:
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
            raise InvalidArgumentError("metrics port", port, "0 (any free one) to 65535")
        self.host = host
        try:
            self._server = _HttpServer(host.strip("[]"), port, registry)
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotListenError(f"cannot listen on {host} port {port} for metrics: {reason}") from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="metrics", daemon=True)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host and not self.host.startswith("[") else self.host
        return f"http://{host}:{self.port}/metrics"

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops listening; answers under way go on."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def __enter__(self) -> MetricsServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class _HttpServer(socketserver.ThreadingTCPServer):
    """A thread for each scrape, but not for any number of them: they wait for scrapers, never the engine for them."""

    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True  # a port whose last connections are still closing may be taken again

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._free = threading.BoundedSemaphore(MAX_SCRAPES)
        self.registry = registry
        super().__init__(address, _Handler)  # type: ignore[arg-type]

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("a scrape ended early", exc_info=True)  # the scraper went away, or took too long


class _Handler(BaseHTTPRequestHandler):
    server: _HttpServer
    timeout = SCRAPE_TIMEOUT_S

    def do_GET(self) -> None:
        if urlsplit(self.path).path != "/metrics":
            self.send_error(404, explain="The metrics are at /metrics.")
            return
        encoder, content_type = choose_encoder(self.headers.get("Accept", ""))
        try:
            # Our names need no escaping, but the library's OpenMetrics encoder turns their colons into underscores
            # unless it is told that the scraper takes UTF-8 (github.com/prometheus/client_python/issues/1177).
            body = encoder(self.server.registry, escaping=ALLOWUTF8)  # type: ignore[call-arg]
        except Exception:
            logger.exception("the metrics could not be collected")
            self.send_error(500)
            return
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """A scrape is nothing to write about."""
