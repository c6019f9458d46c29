"""Metrics: what each counts, what a scrape looks like, and an endpoint that harms nobody."""

from __future__ import annotations

import http.client
import logging
import socket
import threading
import time
import urllib.request
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from jaxinfer.engine.observer import Observer, RequestRecord, SampleRecord
from jaxinfer.errors import InvalidArgumentError
from jaxinfer.types import EngineStats, FinishReason, Timings, Usage
from server import metrics as metrics_module
from server.grpc_service import CannotListenError
from server.metrics import Metrics, MetricsServer

MODEL = 'a "model"\n\\name'
OPENMETRICS = "application/openmetrics-text"

# The names and bounds that vLLM 0.30 shows, for the metrics that ours are named after.
VLLM_LATENCY = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680]
VLLM_FIRST_TOKEN = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
]
VLLM_NEXT_TOKEN = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80),
]
VLLM_TOKENS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000]
VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": VLLM_FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": VLLM_NEXT_TOKEN,
    "vllm:request_time_per_output_token_seconds": VLLM_NEXT_TOKEN,
    "vllm:e2e_request_latency_seconds": VLLM_LATENCY,
    "vllm:request_queue_time_seconds": VLLM_LATENCY,
    "vllm:request_inference_time_seconds": VLLM_LATENCY,
    "vllm:request_prefill_time_seconds": VLLM_LATENCY,
    "vllm:request_decode_time_seconds": VLLM_LATENCY,
    "vllm:request_prompt_tokens": VLLM_TOKENS,
    "vllm:request_generation_tokens": VLLM_TOKENS,
    "vllm:request_params_max_tokens": VLLM_TOKENS,
    "vllm:request_params_n": [1, 2, 5, 10, 20],
    "vllm:iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384],
}

STATS = EngineStats(
    running=3,
    waiting=2,
    total_pages=100,
    free_pages=60,
    cached_pages=15,
    page_size=16,
    output_tokens_per_s=12.5,
    prompt_tokens_total=1000,
    output_tokens_total=2000,
    cached_tokens_total=160,
    preemptions_total=4,
    steps_total=500,
    compiles_after_warmup=1,
    host_ms_per_step=0.75,
    waiting_tokens=77,
    audit_breaches_total=5,
    kv_dtype="int8",
    kv_token_bytes=136,
)


@dataclass
class Engine:
    """As much of an engine as is asked for its metrics."""

    state: str = "ready"
    startup_seconds: dict[str, float] = field(default_factory=lambda: {"load": 1.5, "warm-up": 2.25})
    observer: Observer | None = None

    def observe(self, observer: Observer) -> None:
        self.observer = observer

    def stats(self) -> EngineStats:
        return STATS


def record(
    *samples: tuple[FinishReason, int, float | None, float | None],
    prompt_tokens: int = 7,
    queue_s: float = 0.5,
    max_tokens: int | None = 50,
    error_code: str | None = None,
    n: int | None = None,
) -> RequestRecord:
    return RequestRecord(
        request_id="r1",
        samples=tuple(
            SampleRecord(finish_reason=reason, output_tokens=tokens, first_token_s=first, last_token_s=last)
            for reason, tokens, first, last in samples
        ),
        error_code=error_code,
        usage=Usage(prompt_tokens, sum(tokens for _, tokens, _, _ in samples), 0),
        timings=Timings(queue_s, 0.75, 3.0),
        n=len(samples) if n is None else n,
        max_tokens=max_tokens,
    )


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(MODEL)


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, {"model_name": MODEL, **labels})


def count_and_sum(metrics: Metrics, name: str) -> tuple[float | None, float | None]:
    return value(metrics, f"{name}_count"), value(metrics, f"{name}_sum")


# What is counted.


def test_names_and_bounds_are_vllms(metrics):
    found = {family.name: family for family in metrics.registry.collect()}
    for name, bounds in VLLM_HISTOGRAMS.items():
        assert found[name].type == "histogram"
        ours = {float(s.labels["le"]) for s in found[name].samples if s.name == f"{name}_bucket"}
        assert set(map(float, bounds)) <= ours, name


def test_a_value_on_a_bound_falls_under_it(metrics):
    for seconds in (0.001, 0.025, 0.0250001, 1000.0):
        metrics.observer.on_next_token(seconds)
    name = "vllm:inter_token_latency_seconds_bucket"
    got = [value(metrics, name, le=bound) for bound in ("0.001", "0.01", "0.025", "0.05", "80.0", "+Inf")]
    assert got == [1, 1, 2, 3, 3, 4]
    assert value(metrics, "vllm:inter_token_latency_seconds_sum") == pytest.approx(1000.0510001)


def test_every_sample_counts_as_a_request_and_n_once(metrics):
    metrics.observer.on_end(
        record(
            (FinishReason.STOP, 11, 1.0, 2.0),
            (FinishReason.LENGTH, 50, 1.25, 3.0),
            (FinishReason.STOP, 1, 1.5, 1.5),
        )
    )
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 2
    assert value(metrics, "vllm:request_success_total", finished_reason="length") == 1
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 0
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 0
    assert count_and_sum(metrics, "vllm:request_params_n") == (1, 3)
    assert count_and_sum(metrics, "vllm:request_params_max_tokens") == (3, 150)
    assert count_and_sum(metrics, "vllm:request_prompt_tokens") == (3, 21)
    assert count_and_sum(metrics, "vllm:request_generation_tokens") == (3, 62)
    assert count_and_sum(metrics, "vllm:e2e_request_latency_seconds") == (3, 6.5)
    assert count_and_sum(metrics, "vllm:request_inference_time_seconds") == (3, 5.0)
    assert count_and_sum(metrics, "vllm:request_prefill_time_seconds") == (3, 2.25)
    assert count_and_sum(metrics, "vllm:request_decode_time_seconds") == (3, 2.75)
    # A sample of one token has no time between tokens.
    tokens = count_and_sum(metrics, "vllm:request_time_per_output_token_seconds")
    assert tokens == (2, pytest.approx(1.0 / 10 + 1.75 / 49))


def test_an_aborted_sample_is_counted_and_not_timed(metrics):
    metrics.observer.on_end(record((FinishReason.ABORT, 5, 1.0, 2.0), (FinishReason.STOP, 3, 1.0, 1.5)))
    metrics.observer.on_end(record((FinishReason.ABORT, 0, None, None)))
    assert value(metrics, "vllm:request_success_total", finished_reason="abort") == 2
    assert count_and_sum(metrics, "vllm:e2e_request_latency_seconds") == (1, 1.5)
    assert count_and_sum(metrics, "vllm:request_generation_tokens") == (1, 3)
    assert count_and_sum(metrics, "vllm:request_params_n") == (2, 3)


def test_max_tokens_that_was_not_given_is_not_counted(metrics):
    metrics.observer.on_end(record((FinishReason.STOP, 1, 1.0, 1.0), max_tokens=None))
    assert count_and_sum(metrics, "vllm:request_params_max_tokens") == (0, 0)
    assert count_and_sum(metrics, "vllm:request_params_n") == (1, 1)


def test_failures_and_refusals_by_code(metrics):
    metrics.observer.on_end(record(error_code="step_failed", n=3))
    metrics.observer.on_refuse("queue_full")
    metrics.observer.on_refuse("queue_full")
    assert value(metrics, "jaxinfer:requests_failed_total", code="step_failed") == 1
    assert value(metrics, "jaxinfer:requests_refused_total", code="queue_full") == 2
    assert value(metrics, "vllm:request_success_total", finished_reason="error") == 3
    assert count_and_sum(metrics, "vllm:request_params_n") == (0, 0)
    assert count_and_sum(metrics, "vllm:e2e_request_latency_seconds") == (0, 0)


def test_steps_tokens_and_starts(metrics):
    metrics.observer.on_start(0.5)
    metrics.observer.on_first_token(0.75)
    metrics.observer.on_step(300, 5, 0.02)
    assert count_and_sum(metrics, "vllm:request_queue_time_seconds") == (1, 0.5)
    assert count_and_sum(metrics, "vllm:time_to_first_token_seconds") == (1, 0.75)
    assert count_and_sum(metrics, "vllm:iteration_tokens_total") == (1, 300)
    assert count_and_sum(metrics, "jaxinfer:step_sequences") == (1, 5)
    assert count_and_sum(metrics, "jaxinfer:step_seconds") == (1, 0.02)


def test_the_engines_stats(metrics):
    metrics.watch(Engine())
    got = {
        name: value(metrics, name)
        for name in (
            *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"),
            *("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"),
            *("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "jaxinfer:waiting_tokens"),
            *("jaxinfer:steps_total", "jaxinfer:host_seconds_total", "jaxinfer:compiles_after_warmup_total"),
            *("jaxinfer:audit_breaches_total", "jaxinfer:kv_cache_tokens"),
        )
    }
    assert list(got.values()) == [3, 2, 0.25, 1000, 160, 4, 1000, 2000, 77, 500, 0.375, 1, 5, 1600]
    assert value(metrics, "jaxinfer:kv_cache_token_bytes", dtype="int8") == 136
    pages = {state: value(metrics, "jaxinfer:kv_cache_pages", state=state) for state in ("free", "cached", "in_use")}
    assert pages == {"free": 60, "cached": 15, "in_use": 25}
    assert value(metrics, "jaxinfer:startup_seconds", part="warm-up") == 2.25


@pytest.mark.parametrize("state", ["starting", "ready", "stuck", "draining", "dead"])
def test_the_state_is_one_of_all(metrics, state):
    metrics.watch(Engine(state))
    states = [s for f in metrics.registry.collect() if f.name == "jaxinfer:engine_state" for s in f.samples]
    assert len(states) == 5
    assert [s.labels["state"] for s in states if s.value == 1] == [state]
    assert sum(s.value for s in states) == 1


def test_before_there_is_an_engine(metrics):
    assert value(metrics, "jaxinfer:engine_state", state="starting") == 1
    assert value(metrics, "vllm:num_requests_running") is None
    assert value(metrics, "vllm:request_success_total", finished_reason="stop") == 0
    assert value(metrics, "vllm:time_to_first_token_seconds_count") == 0


def test_engines_of_one_process_do_not_meet():
    one, two = Metrics("one"), Metrics("two")
    one.observer.on_first_token(1.0)
    name = "vllm:time_to_first_token_seconds_count"
    assert one.registry.get_sample_value(name, {"model_name": "one"}) == 1
    assert two.registry.get_sample_value(name, {"model_name": "two"}) == 0


def test_the_engine_that_is_watched_tells_the_observer(metrics):
    engine = Engine()
    metrics.watch(engine)
    assert engine.observer is metrics.observer


def test_a_token_costs_the_loop_little(metrics):
    """The library's own histogram takes several times this long."""
    observe, rounds = metrics.observer.on_next_token, 20_000
    best = min(_seconds(observe, rounds) for _ in range(5))
    assert best / rounds < 2e-6


def _seconds(observe, rounds: int) -> float:
    begun = time.perf_counter()
    for _ in range(rounds):
        observe(0.3)
    return time.perf_counter() - begun


# The endpoint.


def get(server: MetricsServer, path: str = "/metrics", method: str = "GET", **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


@pytest.fixture
def server(metrics):
    with MetricsServer(metrics.registry, port=0) as server:
        yield server


@pytest.mark.parametrize(
    ("accept", "content_type", "parse"),
    [
        ("text/plain", "text/plain", parse_text),
        ("*/*", "text/plain", parse_text),
        ("application/openmetrics-text;version=1.0.0;q=0.6,text/plain;q=0.3", OPENMETRICS, parse_openmetrics),
        ("application/openmetrics-text;version=1.0.0;escaping=allow-utf-8,*/*;q=0.1", OPENMETRICS, parse_openmetrics),
        ("application/openmetrics-text;version=1.0.0;escaping=underscores", OPENMETRICS, parse_openmetrics),
    ],
)
def test_a_scrape_in_every_format(metrics, server, accept, content_type, parse):
    metrics.watch(Engine())
    metrics.observer.on_end(record((FinishReason.STOP, 3, 1.0, 1.5)))
    status, headers, body = get(server, Accept=accept)
    assert status == 200
    assert headers["Content-Type"].startswith(content_type)
    families = list(parse(body.decode()))
    names = {sample.name for family in families for sample in family.samples}
    assert {"vllm:num_requests_running", "vllm:time_to_first_token_seconds_bucket"} <= names  # with their colons
    assert {"vllm:request_success_total", "process_resident_memory_bytes", "python_info"} <= names
    assert not [name for name in names if name.startswith(("vllm_", "jaxinfer_"))]
    assert all(family.documentation for family in families if family.samples)
    [running] = [s for f in families for s in f.samples if s.name == "vllm:num_requests_running"]
    assert (running.labels, running.value) == ({"model_name": MODEL}, 3)


def test_other_paths_and_methods(server):
    assert get(server, "/")[0] == 404
    assert get(server, "/metricsx")[0] == 404
    assert get(server, "/metrics", method="POST")[0] == 501


def test_a_port_in_use_is_named(metrics):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListenError, match=rf"127\.0\.0\.1 port {port} .*in use"):
            MetricsServer(metrics.registry, port=port)


def test_addresses_that_cannot_be_had(metrics):
    with pytest.raises(CannotListenError, match=r"no-such-host\.invalid"):
        MetricsServer(metrics.registry, host="no-such-host.invalid", port=0)
    for port in (-1, 65536, True):
        with pytest.raises(InvalidArgumentError, match="metrics port"):
            MetricsServer(metrics.registry, port=port)


def test_the_port_is_free_again_after_stop(metrics):
    with MetricsServer(metrics.registry, port=0) as first:
        assert get(first)[0] == 200
    with pytest.raises(ConnectionRefusedError):
        get(first)
    with MetricsServer(metrics.registry, port=first.port) as second:
        assert get(second)[0] == 200


def test_a_server_that_never_started_stops(metrics):
    MetricsServer(metrics.registry, port=0).stop()


def test_ipv6(metrics):
    try:
        server = MetricsServer(metrics.registry, host="::1", port=0)
    except CannotListenError as error:
        pytest.skip(str(error))
    assert server.url == f"http://[::1]:{server.port}/metrics"
    with server, urllib.request.urlopen(server.url, timeout=10) as response:
        assert response.status == 200


def test_scrapers_that_dawdle_hold_up_nobody_and_are_hung_up_on(metrics, monkeypatch):
    monkeypatch.setattr(metrics_module._Handler, "timeout", 0.3)
    monkeypatch.setattr(metrics_module, "MAX_SCRAPES", 3)
    with MetricsServer(metrics.registry, port=0) as server:
        slow = [socket.create_connection(("127.0.0.1", server.port), timeout=10) for _ in range(2)]
        slow[0].sendall(b"GET /met")  # and no more
        assert get(server)[0] == 200  # the third at once
        slow.append(socket.create_connection(("127.0.0.1", server.port), timeout=10))
        threads = lambda: sum("process_request_thread" in thread.name for thread in threading.enumerate())
        _until(lambda: threads() == 3)
        with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
            get(server)  # a fourth at once
        assert [connection.recv(1) for connection in slow] == [b"", b"", b""]  # hung up on, after their time
        _until(lambda: threads() == 0)
        assert get(server)[0] == 200
        for connection in slow:
            connection.close()


def _until(condition) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.005)


def test_a_broken_collector_spoils_its_scrape_alone(caplog):
    class Broken(Collector):
        broken = False

        def collect(self):
            if self.broken:
                raise RuntimeError("no such statistic")
            return []

    registry, collector = CollectorRegistry(), Broken()
    registry.register(collector)
    with MetricsServer(registry, port=0) as server:
        collector.broken = True
        with caplog.at_level(logging.ERROR):
            assert get(server)[0] == 500
        assert "no such statistic" in caplog.text
        collector.broken = False
        assert get(server)[0] == 200
