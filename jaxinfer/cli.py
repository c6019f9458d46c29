"""The command line: the one place that reads arguments and the environment."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxinfer import __version__
from jaxinfer._shadowing import check_top_level_packages
from jaxinfer.config import EngineConfig
from jaxinfer.errors import InvalidArgumentError, JaxinferError
from jaxinfer.logs import LogFormat, configure

STARTED = time.perf_counter()

app = typer.Typer(
    name="jaxinfer",
    help="Serve language models on TPU, GPU and CPU with JAX.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(help="Measure the engine on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

stderr = Console(stderr=True)
_DEFAULTS = EngineConfig()
_API_KEYS_VARIABLE = "JAXINFER_API_KEYS"  # of a server: comma separated
_API_KEY_VARIABLE = "JAXINFER_API_KEY"  # of a client

# Options that every command with a model takes.
ModelOption = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help="Hugging Face folder, .gguf file, folder of jaxinfer convert, hub id or alias.",
        show_default=True,
    ),
]
DtypeOption = Annotated[str, typer.Option(help="auto (the checkpoint's own), float32, bfloat16 or float16.")]
MeshOption = Annotated[
    str | None, typer.Option(help="Mesh axes and sizes, as data=2,stage=2,tensor=4, or a TOML file with a rules table.")
]
QuantizeOption = Annotated[
    str | None,
    typer.Option(
        metavar="KIND",
        help="Weights as int8, w8a8 (activations too), int4, int4:64 (groups of 64), fp8 or float. "
        "\\[default: what the checkpoint has]",
    ),
]
QuantizeRulesOption = Annotated[
    list[str] | None,
    typer.Option("--quantize-rule", metavar="PATTERN=KIND", help="For matrices of such names, as 'layers.0.*=int8'."),
]
PackedOption = Annotated[
    bool | None,
    typer.Option(help="Keep quantized weights packed in memory. \\[default: yes, but on a CPU only int8 and w8a8]"),
]
MaxModelLenOption = Annotated[
    int | None, typer.Option(min=2, help="Longest sequence, prompt and output. \\[default: the model's own]")
]
MaxNumSeqsOption = Annotated[int, typer.Option(min=1, help="Most sequences that run at once.")]
MaxBatchedOption = Annotated[int, typer.Option(min=1, help="Token budget of a step.")]
PageSizeOption = Annotated[int, typer.Option(min=1, help="Tokens a page of the KV cache.")]
KvDtypeOption = Annotated[
    str, typer.Option("--kv-cache-dtype", help="Of the KV cache: auto (that of activations), int8 or fp8.")
]
KvCacheOption = Annotated[
    float | None, typer.Option(min=0.001, help="GiB of the KV cache. \\[default: 1 on a CPU, else what is free]")
]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Use only files that are on this machine.")]
MaxTokensOption = Annotated[
    int | None, typer.Option(min=1, help="Most tokens to generate. \\[default: the rest of the context]")
]
TemperatureOption = Annotated[float, typer.Option(min=0.0, help="0 is greedy.")]
TopPOption = Annotated[float, typer.Option(help="Sample from the likeliest tokens that hold this much probability.")]
TopKOption = Annotated[int, typer.Option(min=-1, help="Sample from this many likeliest tokens; 0 is all.")]
SeedOption = Annotated[int | None, typer.Option(help="Same seed, same tokens.")]

_MONITORING = "Monitoring"
_PROCESSES = "Several processes"

# Who may call a server, for the server and for its client.
_SECURITY = "Security"
TlsCertOption = Annotated[
    Path | None, typer.Option(help="Own certificate and its chain, PEM.", rich_help_panel=_SECURITY)
]
TlsKeyOption = Annotated[Path | None, typer.Option(help="Private key of --tls-cert, PEM.", rich_help_panel=_SECURITY)]


@app.callback()
def _common(
    context: typer.Context,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does.")] = False,
    log_format: Annotated[
        LogFormat, typer.Option(help="Log lines as text, or as one JSON object each.")
    ] = LogFormat.TEXT,
) -> None:
    configure(log_format)
    context.obj = {"format": log_format.value, "level": logging.INFO if verbose else logging.WARNING}
    if verbose:
        for name in ("jaxinfer", "server"):
            logging.getLogger(name).setLevel(logging.INFO)


@app.command()
def serve(
    context: typer.Context,
    model: ModelOption = _DEFAULTS.model,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="gRPC port; 0 takes a free one.")] = 50051,
    dtype: DtypeOption = _DEFAULTS.dtype,
    mesh: MeshOption = None,
    quantize: QuantizeOption = None,
    quantize_rule: QuantizeRulesOption = None,
    packed: PackedOption = None,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxBatchedOption = _DEFAULTS.max_num_batched_tokens,
    page_size: PageSizeOption = _DEFAULTS.page_size,
    kv_cache_dtype: KvDtypeOption = _DEFAULTS.kv_cache_dtype,
    kv_cache_gib: KvCacheOption = None,
    prefix_caching: Annotated[bool, typer.Option(help="Share pages between equal prefixes.")] = True,
    max_waiting: Annotated[int, typer.Option(min=1, help="Most requests that may wait.")] = _DEFAULTS.max_waiting,
    max_waiting_tokens: Annotated[
        int, typer.Option(min=1, help="Most prompt tokens that may wait, of all requests together.")
    ] = _DEFAULTS.max_waiting_tokens,
    stuck_seconds: Annotated[
        float, typer.Option(min=0.001, help="Health fails while the device is at one step for longer than this.")
    ] = _DEFAULTS.stuck_after_s,
    drain_seconds: Annotated[float, typer.Option(min=0, help="How long live requests may take after SIGTERM.")] = 30.0,
    allow_reshard: Annotated[
        bool, typer.Option("--allow-reshard", help="Let clients move the model to another mesh, by the RPC Reshard.")
    ] = False,
    offline: OfflineOption = False,
    coordinator: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve with several processes: where they meet, an address of process 0 that all reach.",
            rich_help_panel=_PROCESSES,
        ),
    ] = None,
    num_processes: Annotated[
        int | None, typer.Option(min=1, help="How many there are.", rich_help_panel=_PROCESSES)
    ] = None,
    process_id: Annotated[
        int | None, typer.Option(min=0, help="Which this one is; 0 serves the clients.", rich_help_panel=_PROCESSES)
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option(
            "--distributed",
            help="The same, found out by JAX: under SLURM, Kubernetes, MPI, or on a TPU pod.",
            rich_help_panel=_PROCESSES,
        ),
    ] = False,
    control_host: Annotated[
        str | None,
        typer.Option(
            help="Address of process 0 to which workers connect. \\[default: the coordinator's, or this machine's]",
            rich_help_panel=_PROCESSES,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY",
            help="A key that lets callers in; may be repeated. Others on this machine can read it in the list of "
            f"processes: {_API_KEYS_VARIABLE} (comma separated) and --api-key-file hide it.",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(help="File of keys that let callers in, one a line.", rich_help_panel=_SECURITY),
    ] = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="Authorities, PEM; only clients with a certificate of theirs.", rich_help_panel=_SECURITY),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Show Prometheus metrics over HTTP on this port, at /metrics; 0 takes a free one. \\[default: none]",
            rich_help_panel=_MONITORING,
        ),
    ] = None,
    metrics_host: Annotated[
        str, typer.Option(help="Address to show the metrics on.", rich_help_panel=_MONITORING)
    ] = "127.0.0.1",
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            envvar=["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"],
            help="Send traces there, over OTLP/gRPC, such as http://localhost:4317. Needs jaxinfer\\[otel].",
            rich_help_panel=_MONITORING,
        ),
    ] = None,
) -> None:
    """Serve a model over gRPC, until SIGTERM or Ctrl-C."""
    check_top_level_packages()
    from jaxinfer.engine.observer import Observer
    from server.credentials import ServerTls
    from server.grpc_service import serve as serve_grpc
    from server.metrics import Metrics, MetricsServer
    from server.tracing import make_tracer

    _check_finite("stuck_seconds", stuck_seconds)
    _check_finite("drain_seconds", drain_seconds)
    config = _engine_config(
        model=model,
        dtype=dtype,
        mesh=mesh,
        quantize=quantize,
        quantize_rules=quantize_rule,
        packed=packed,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        page_size=page_size,
        kv_cache_dtype=kv_cache_dtype,
        kv_cache_gib=kv_cache_gib,
        prefix_caching=prefix_caching,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
        stuck_after_s=stuck_seconds,
    )
    tls = ServerTls.read(tls_cert, tls_key, tls_client_ca)
    api_keys = _api_keys(api_key, api_key_file)
    metrics = Metrics(model)
    observer = Observer() if metrics_port is None else metrics.observer
    tracer = make_tracer(otlp_endpoint or None)

    role = _role(coordinator, num_processes, process_id, detect=distributed)
    worker: Any = None
    if role is not None:
        from jaxinfer.engine.worker_process import WorkerProcess, follow

        worker = WorkerProcess(role, config, cache_dir=_cache_dir(), offline=offline, logs=context.obj)
        if worker.rank:
            raise typer.Exit(follow(worker))

    def load() -> Any:
        with _progress_bars() as progress:
            if role is not None:
                from jaxinfer.engine.group import start_group
                from sharding.distributed import own_address

                address = control_host or role.coordinator_host or own_address()
                options: Any = {"cache_dir": _cache_dir(), "offline": offline, "progress": progress}
                return start_group(worker, config, host=address, **options)
            from jaxinfer.engine.engine import Engine  # and JAX with it: the server listens before that

            return Engine.start(config, cache_dir=_cache_dir(), offline=offline, progress=progress)

    def on_ready(engine: Any) -> None:
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in engine.startup_seconds.items())
        if metrics_port is not None:
            metrics.watch(engine)
        _say(f"ready {time.perf_counter() - STARTED:.1f} s after the start ({parts})")
        _first_token(engine)

    with ExitStack() as stack:
        stack.callback(tracer.shutdown)
        if worker is not None:
            stack.callback(worker.kill)
        if metrics_port is not None:
            shown = stack.enter_context(MetricsServer(metrics.registry, host=metrics_host, port=metrics_port))
            _say(f"metrics on {shown.url}")
        drained = asyncio.run(
            serve_grpc(
                load,
                host=host,
                port=port,
                tls=tls,
                api_keys=api_keys,
                observer=observer,
                tracer=tracer,
                allow_reshard=allow_reshard,
                drain_timeout_s=drain_seconds,
                end_with_engine=role is not None,
                on_listening=lambda bound: _say(f"listening on {host}:{bound}"),
                on_ready=on_ready,
            )
        )
    _say("stopped" if drained else "stopped; some requests had not ended")


def _api_keys(given: list[str] | None, file: Path | None) -> Any:
    """The keys of the arguments, of the environment and of a file together; None if none of these is there."""
    from server.credentials import ApiKeys, checked_api_key, read_api_keys

    keys = [checked_api_key(key, "api_key") for key in given or ()]
    # A variable that is set and empty is more likely a secret that got lost than a wish to let everybody in.
    variable = os.environ.get(_API_KEYS_VARIABLE)
    if variable is not None:
        keys += [checked_api_key(key.strip(), _API_KEYS_VARIABLE) for key in variable.split(",")]
    if file is not None:
        keys += read_api_keys(file)
    return ApiKeys(keys) if keys else None


def _role(coordinator: str | None, num_processes: int | None, process_id: int | None, *, detect: bool) -> Any:
    """Which process of several this is; None if it is alone."""
    if not detect and (coordinator, num_processes, process_id) == (None, None, None):
        return None
    from sharding.distributed import Role, RoleError

    try:
        return Role.of(coordinator, num_processes, process_id, detect=detect)
    except RoleError as error:
        raise InvalidArgumentError("coordinator", coordinator, str(error)) from error


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise InvalidArgumentError(name, value, "a finite number")


def _first_token(engine: Any) -> None:
    """One greedy token through the engine, to say how long the start really took."""
    from jaxinfer.types import Delta, Request, SamplingParams

    def sink(events: list[Any]) -> None:
        if any(isinstance(event, Delta) for event in events):
            _say(f"first token {time.perf_counter() - STARTED:.1f} s after the start")

    params = SamplingParams(temperature=0.0, max_tokens=1, skip_special_tokens=False, ignore_eos=True)
    engine.submit(Request(request_id="first-token", params=params, token_ids=[0]), sink)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    model: ModelOption = _DEFAULTS.model,
    chat: Annotated[bool, typer.Option("--chat", help="Send it as a chat message instead of plain text.")] = False,
    max_tokens: MaxTokensOption = 64,
    temperature: TemperatureOption = 0.0,
    top_p: TopPOption = 1.0,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Samples to draw.")] = 1,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the output; may be repeated.")] = None,
    dtype: DtypeOption = _DEFAULTS.dtype,
    mesh: MeshOption = None,
    quantize: QuantizeOption = None,
    quantize_rule: QuantizeRulesOption = None,
    packed: PackedOption = None,
    kv_cache_dtype: KvDtypeOption = _DEFAULTS.kv_cache_dtype,
    max_model_len: MaxModelLenOption = None,
    offline: OfflineOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outputs as JSON.")] = False,
) -> None:
    """Generate text once, in this process."""
    from jaxinfer.types import Delta, Finished, SamplingParams

    if prompt == "-":
        prompt = sys.stdin.read()
    params = SamplingParams(
        n=n, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=stop, max_tokens=max_tokens
    )
    config = _engine_config(
        model=model,
        dtype=dtype,
        mesh=mesh,
        quantize=quantize,
        quantize_rules=quantize_rule,
        packed=packed,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max(n, 8),
    )
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"text": prompt}
    with _engine(config, offline) as engine:
        samples: dict[int, dict[str, Any]] = {i: {"index": i, "text": "", "token_ids": []} for i in range(n)}
        for event in _events(engine, fields, params):
            if isinstance(event, Delta):
                samples[event.index]["text"] += event.text
                samples[event.index]["token_ids"] += event.token_ids
                if n == 1 and not as_json:
                    print(event.text, end="", flush=True)
            elif isinstance(event, Finished):
                for end in event.ends:
                    samples[end.index]["finish_reason"] = end.finish_reason.value
                timings, usage = event.timings, event.usage
    if as_json:
        print(json.dumps({"prompt": prompt, "outputs": list(samples.values())}, ensure_ascii=False))
    elif n > 1:
        for sample in samples.values():
            print(f"--- sample {sample['index']}\n{sample['text']}")
    else:
        print()
    _say_speed(timings, usage)


@app.command()
def chat(
    model: ModelOption = _DEFAULTS.model,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: MaxTokensOption = 512,
    temperature: TemperatureOption = 0.7,
    top_p: TopPOption = 0.95,
    top_k: TopKOption = 0,
    seed: SeedOption = None,
    dtype: DtypeOption = _DEFAULTS.dtype,
    mesh: MeshOption = None,
    quantize: QuantizeOption = None,
    quantize_rule: QuantizeRulesOption = None,
    packed: PackedOption = None,
    kv_cache_dtype: KvDtypeOption = _DEFAULTS.kv_cache_dtype,
    max_model_len: MaxModelLenOption = None,
    server: Annotated[str | None, typer.Option(help="Talk to a running server (host:port) instead.")] = None,
    offline: OfflineOption = False,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help=f"Key of --server; better in {_API_KEY_VARIABLE}.", rich_help_panel=_SECURITY),
    ] = None,
    tls: Annotated[
        bool,
        typer.Option("--tls", help="Reach --server over TLS; the options below imply it.", rich_help_panel=_SECURITY),
    ] = False,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="Authorities that the certificate of --server must come from, PEM. \\[default: the public ones]",
            rich_help_panel=_SECURITY,
        ),
    ] = None,
    tls_cert: TlsCertOption = None,
    tls_key: TlsKeyOption = None,
) -> None:
    """Chat with a model. An empty line or Ctrl-D ends it."""
    from jaxinfer.types import Delta, Finished, SamplingParams

    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_tokens=max_tokens)
    messages: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]

    def converse(events_of: Callable[[list[dict[str, str]]], Iterator[Any]]) -> None:
        while line := _read_line():
            messages.append({"role": "user", "content": line})
            reply = ""
            for event in events_of(messages):
                if isinstance(event, Delta):
                    reply += event.text
                    print(event.text, end="", flush=True)
                elif isinstance(event, Finished):
                    print()
                    _say_speed(event.timings, event.usage)
            messages.append({"role": "assistant", "content": reply})

    if server is not None:
        check_top_level_packages("server")
        from server.client import Client
        from server.credentials import ClientTls

        if api_key is None:
            api_key = os.environ.get(_API_KEY_VARIABLE)
        secure = tls or tls_ca or tls_cert or tls_key
        client_tls = ClientTls.read(ca=tls_ca, cert=tls_cert, key=tls_key) if secure else None
        with Client(server, api_key=api_key, tls=client_tls) as client:
            converse(lambda said: client.generate(said, params))
        return
    if api_key is not None:
        raise InvalidArgumentError("api_key", "(not shown)", "given only with --server")
    if tls or tls_ca or tls_cert or tls_key:
        raise InvalidArgumentError("tls", True, "given only with --server, as are its files")
    config = _engine_config(
        model=model,
        dtype=dtype,
        mesh=mesh,
        quantize=quantize,
        quantize_rules=quantize_rule,
        packed=packed,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=8,
    )
    with _engine(config, offline) as engine:
        converse(lambda said: _events(engine, {"messages": list(said)}, params))


@app.command()
def pull(
    model: Annotated[str, typer.Argument(help="Alias or hub id.")] = _DEFAULTS.model,
) -> None:
    """Fetch a model's files and print where they are."""
    from jaxinfer.checkpoints.source import resolve

    with _progress_bars() as progress:
        source = resolve(model, cache_dir=_cache_dir(), progress=lambda done, total: progress("download", done, total))
    print(source.path)


@app.command()
def convert(
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder to write.", show_default=False)],
    model: ModelOption = _DEFAULTS.model,
    dtype: DtypeOption = _DEFAULTS.dtype,
    offline: OfflineOption = False,
) -> None:
    """Write a model as an Orbax checkpoint, which any mesh loads straight to its devices."""
    check_top_level_packages("sharding")
    import jax

    jax.config.update("jax_platforms", "cpu")  # a server may have the accelerators
    from jaxinfer.checkpoints.checkpoint import open_checkpoint, parse_dtype
    from jaxinfer.checkpoints.convert import convert as write
    from jaxinfer.checkpoints.source import resolve

    chosen = parse_dtype(dtype)
    with _progress_bars() as progress:
        source = resolve(
            model,
            cache_dir=_cache_dir(),
            offline=offline,
            progress=lambda done, total: progress("download", done, total),
        )
        write(
            open_checkpoint(source),
            output,
            dtype=chosen,
            progress=lambda done, total: progress("convert", done, total),
        )
    print(output)


@app.command("quantize")
def quantize_(
    method: Annotated[str, typer.Option(help="awq, gptq, or rtn: to the nearest, without a calibration text.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="New folder to write.", show_default=False)],
    model: ModelOption = _DEFAULTS.model,
    bits: Annotated[int, typer.Option(help="8 or 4; awq has 4 alone.")] = 4,
    group_size: Annotated[int, typer.Option(help="Inputs that share a scale: 16, 32, 64 or 128.")] = 128,
    symmetric: Annotated[
        bool | None,
        typer.Option("--symmetric/--asymmetric", help="Without zero points, or with. \\[default: with them for awq]"),
    ] = None,
    act_order: Annotated[bool, typer.Option("--act-order", help="gptq: group inputs by how much they matter.")] = False,
    calibration: Annotated[
        Path | None, typer.Option(help="Text to calibrate by. \\[default: one that comes with jaxinfer]")
    ] = None,
    mesh: Annotated[str | None, typer.Option(help="Devices that share the work, as tensor=4.")] = None,
    offline: OfflineOption = False,
) -> None:
    """Write a model at 4 or 8 bits, as a folder that vLLM and transformers read too. Interrupted, it can go on."""
    check_top_level_packages("sharding", "pallas_kernels")
    from jaxinfer.checkpoints.checkpoint import open_checkpoint
    from jaxinfer.checkpoints.source import resolve
    from jaxinfer.engine.startup import open_tokenizer
    from jaxinfer.quantize import Settings, quantize, read_text
    from sharding.mesh import MeshConfig, MeshError

    settings = Settings(
        method=method,  # type: ignore[arg-type]
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        act_order=act_order,
    )
    try:
        meshes = MeshConfig.parse(mesh).build()
    except MeshError as error:
        raise InvalidArgumentError("mesh", mesh, str(error)) from error
    text = read_text(calibration)
    with _progress_bars() as progress:
        source = resolve(
            model,
            cache_dir=_cache_dir(),
            offline=offline,
            progress=lambda done, total: progress("download", done, total),
        )
        checkpoint = open_checkpoint(source)
        quantize(
            checkpoint,
            open_tokenizer(checkpoint).encode,
            text,
            output,
            settings,
            devices=[device for replica in meshes for stage in replica for device in stage.devices.flat],
            progress=lambda done, total: progress("quantize", done, total),
        )
    print(output)


@app.command()
def plan(
    model: Annotated[
        str, typer.Option("--model", "-m", help="A checkpoint on this machine, or a card: llama-3-8b, ...")
    ],
    chips: Annotated[str, typer.Option(metavar="KIND:N", help="Chips to plan for, such as h200:1 or v6e:8.")],
    mesh: Annotated[
        str, typer.Option(help="Mesh axes and sizes, as tensor=8; auto takes the fastest that fits of all.")
    ] = "auto",
    weights: Annotated[str, typer.Option(help="bf16, int8, w8a8, int4 (groups of 128) or fp8.")] = "bf16",
    kv: Annotated[str, typer.Option(help="Of the KV cache: bf16, int8 or fp8.")] = "bf16",
    context: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens of a sequence, prompt and output. \\[default: the model's own limit]"),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Sequences at once, each at its full length.")] = 8,
    max_num_batched_tokens: MaxBatchedOption = _DEFAULTS.max_num_batched_tokens,
    page_size: PageSizeOption = _DEFAULTS.page_size,
    no_compile: Annotated[
        bool, typer.Option("--no-compile", help="Arithmetic alone: needs no compilers, and assumes temporaries.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(help="Draw memory and throughput into this file. Needs jaxinfer\\[plot].")
    ] = None,
) -> None:
    """Say whether a model fits on chips, and how fast it may be, before there are any."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # chips are described: those that are here stay free
    check_top_level_packages("sharding", "pallas_kernels")
    from jaxinfer import plan_report
    from jaxinfer.plan import make_plan
    from jaxinfer.plan_sizes import PlanRequest

    if plot is not None:
        plan_report.check_plotting(plot)
    request = PlanRequest(
        model=model,
        chips=chips,
        mesh=mesh,
        weights=weights,
        kv=kv,
        context=context,
        concurrency=concurrency,
        max_num_batched_tokens=max_num_batched_tokens,
        page_size=page_size,
        compiles=not no_compile,
    )
    with _progress_bars() as progress:
        made = make_plan(request, cache_dir=_cache_dir(), progress=progress)
    if as_json:
        print(json.dumps(plan_report.to_json(made)))
    else:
        plan_report.show(made, Console())
    if plot is not None:
        plan_report.draw(made, plot)


@bench_app.command()
def throughput(
    model: ModelOption = _DEFAULTS.model,
    num_prompts: Annotated[int, typer.Option(min=1, help="Prompts of a round.")] = 32,
    input_len: Annotated[int, typer.Option(min=1, help="Random tokens a prompt.")] = 64,
    output_len: Annotated[int, typer.Option(min=1, help="Tokens to generate for each.")] = 64,
    max_num_seqs: MaxNumSeqsOption = _DEFAULTS.max_num_seqs,
    max_num_batched_tokens: MaxBatchedOption = _DEFAULTS.max_num_batched_tokens,
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds, after one warm-up; medians are reported.")] = 3,
    dtype: DtypeOption = _DEFAULTS.dtype,
    mesh: MeshOption = None,
    quantize: QuantizeOption = None,
    quantize_rule: QuantizeRulesOption = None,
    packed: PackedOption = None,
    page_size: PageSizeOption = _DEFAULTS.page_size,
    kv_cache_dtype: KvDtypeOption = _DEFAULTS.kv_cache_dtype,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    offline: OfflineOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Tokens per second, latencies, and how near the engine comes to its bare programs."""
    from jaxinfer.bench import throughput as measure

    config = _engine_config(
        model=model,
        dtype=dtype,
        mesh=mesh,
        quantize=quantize,
        quantize_rules=quantize_rule,
        packed=packed,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        page_size=page_size,
        kv_cache_dtype=kv_cache_dtype,
    )
    with _engine(config, offline) as engine:
        with _progress_bars() as progress:
            figures = measure(
                engine,
                num_prompts=num_prompts,
                input_len=input_len,
                output_len=output_len,
                rounds=rounds,
                seed=seed,
                on_progress=lambda done, total: progress("rounds", done, total),
            )
        figures["startup_s"] = engine.startup_seconds
    if as_json:
        print(json.dumps(figures))
        return
    width = max(map(len, figures))
    for name, value in figures.items():
        shown = ", ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, dict) else value
        print(f"{name:<{width}}  {shown}")


# Pieces the commands share.


def _engine_config(
    *, kv_cache_gib: float | None = None, quantize_rules: list[str] | None = None, **fields: Any
) -> EngineConfig:
    fields["quantize_rules"] = tuple(quantize_rules or ())
    if kv_cache_gib is None:
        return EngineConfig(**fields)
    _check_finite("kv_cache_gib", kv_cache_gib)
    return EngineConfig(kv_cache_bytes=int(kv_cache_gib * 2**30), **fields)


def _cache_dir() -> Path:
    from jaxinfer.checkpoints.source import default_cache_dir

    return default_cache_dir(os.environ)


@contextmanager
def _engine(config: EngineConfig, offline: bool) -> Iterator[Any]:
    check_top_level_packages("sharding", "pallas_kernels")
    from jaxinfer.engine.engine import Engine

    with _progress_bars() as progress:
        engine = Engine.start(config, cache_dir=_cache_dir(), offline=offline, progress=progress)
    with engine:
        yield engine


def _events(engine: Any, fields: dict[str, Any], params: Any) -> Iterator[Any]:
    """A request's events, as they come, on this thread."""
    import queue
    import uuid

    from jaxinfer.types import Failed, Finished, Request

    batches: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
    engine.submit(Request(request_id=uuid.uuid4().hex, params=params, **fields), batches.put)
    while True:
        for event in batches.get():
            if isinstance(event, Failed):
                raise event.error
            yield event
            if isinstance(event, Finished):
                return


@contextmanager
def _progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Bars on standard error, one a stage; where that is no terminal, a line when a stage begins and ends."""
    if not stderr.is_terminal:
        begun: dict[str, float] = {}

        def lines(stage: str, done: int, total: int) -> None:
            now = time.perf_counter()
            if stage not in begun:
                begun[stage] = now
                stderr.print(f"{stage} ...", highlight=False)
            if total and done >= total and begun[stage] >= 0:
                stderr.print(f"{stage} done in {now - begun[stage]:.1f} s", highlight=False)
                begun[stage] = -1.0

        yield lines
        return
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=stderr) as bars:
        tasks: dict[str, TaskID] = {}

        def update(stage: str, done: int, total: int) -> None:
            in_bytes = stage in ("download", "load", "convert")
            amount = f"{done / 1e6:.0f} of {total / 1e6:.0f} MB" if in_bytes else f"{done} of {total}"
            if stage not in tasks:
                tasks[stage] = bars.add_task(stage, total=total, amount=amount)
            bars.update(tasks[stage], completed=done, total=total, amount=amount)

        yield update


def _read_line() -> str:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return ""


def _say(text: str) -> None:
    print(f"jaxinfer: {text}", flush=True)


def _say_speed(timings: Any, usage: Any) -> None:
    after_first = max(timings.total_s - timings.first_token_s, 1e-9)
    rate = (usage.output_tokens - 1) / after_first if usage.output_tokens > 1 else 0.0
    stderr.print(
        f"{usage.prompt_tokens} tokens in, {usage.output_tokens} out; "
        f"first after {1e3 * timings.first_token_s:.0f} ms, then {rate:.1f} tokens/s",
        style="dim",
        highlight=False,
    )


def main() -> None:
    """Entry point: our own errors are one line, without a traceback."""
    if "--version" in sys.argv[1:2]:
        import jax

        print(f"jaxinfer {__version__}, jax {jax.__version__}, Python {sys.version.split()[0]}")
        return
    try:
        app()
    except JaxinferError as error:
        stderr.print(f"[red]jaxinfer: {error.code}:[/] ", end="")
        stderr.print(str(error), markup=False, highlight=False, soft_wrap=True)
        sys.exit(1)
