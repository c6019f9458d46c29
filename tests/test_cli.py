"""The command line: help, output on the right stream, exit codes, errors without tracebacks, and a server's life."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_checkpoints
import typer

from jaxinfer import __version__, cli
from jaxinfer.types import Delta, Finished, SamplingParams
from server.client import Client

CONTEXT = 64
BENCH = ("bench", "throughput", "--num-prompts", "4", "--input-len", "6", "--output-len", "4", "--rounds", "1")
SMALL = ("--max-num-seqs", "4", "--max-num-batched-tokens", "8")
_STYLE = re.compile(r"\x1b\[[\d;]*m")  # some environments have typer color its output
PROCESS = (sys.executable, "-c", "from jaxinfer.cli import main; main()")


class Outcome(NamedTuple):
    """What a call left behind; all white space of `err` is single spaces."""

    code: int
    out: str
    err: str


type Run = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, cache_dir: Path) -> None:
    monkeypatch.setenv("JAXINFER_CACHE", str(cache_dir))
    for variable in ("JAXINFER_API_KEYS", "JAXINFER_API_KEY"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the entry point in this process."""

    def call(*arguments: str, stdin: str = "") -> Outcome:
        monkeypatch.setattr(sys, "argv", ["jaxinfer", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code: Any = 0
        try:
            cli.main()
        except SystemExit as end:
            code = end.code or 0
        out, err = (_STYLE.sub("", text) for text in capsys.readouterr())
        return Outcome(code, out, " ".join(err.split()))

    return call


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("cli") / "tiny"
    tiny_checkpoints.write_hf_folder(
        folder, tiny_checkpoints.Tiny(9, layers=1, config={"max_position_embeddings": CONTEXT})
    )
    return str(folder)


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command with the words that call it."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


COMMANDS = dict(commands(typer.main.get_command(cli.app)))


def test_the_commands():
    names = {" ".join(path) for path in COMMANDS}
    bench = {"bench", "bench throughput"}
    assert names == {"", "serve", "generate", "chat", "pull", "convert", "quantize", "plan"} | bench


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "jaxinfer")
def test_help_names_every_option(run: Run, monkeypatch: pytest.MonkeyPatch, path: tuple[str, ...]):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, err = run(*path, "--help")
    assert (code, err) == (0, "")
    command = COMMANDS[path]
    options = [name for param in command.params for name in (*param.opts, *param.secondary_opts) if name[0] == "-"]
    words = [word.strip(",") for word in out.replace("/", " ").split()]
    assert not {*options, *getattr(command, "commands", {})} - set(words)


def test_version(run: Run):
    code, out, _ = run("--version")
    assert code == 0
    assert f"jaxinfer {__version__}," in out


# What commands print.


def test_generate(run: Run, folder: str):
    wanted = ("-m", folder, "--max-tokens", "4")
    code, out, _ = run("generate", "hello world", *wanted, "--json")
    assert code == 0
    answer = json.loads(out)
    (sample,) = answer["outputs"]
    assert (answer["prompt"], sample["index"], sample["finish_reason"]) == ("hello world", 0, "length")
    assert len(sample["token_ids"]) == 4
    code, out, err = run("generate", "hello world", *wanted)
    assert (code, out) == (0, f"{sample['text']}\n")
    assert "2 tokens in, 4 out" in err
    assert run("generate", "-", *wanted, stdin="hello world").out == out


def test_generate_samples_of_a_chat(run: Run, folder: str):
    wanted = ("generate", "hello", "--chat", "-m", folder, "--max-tokens", "3", "-n", "2", "--temperature", "1")
    code, out, _ = run(*wanted, "--seed", "7", "--json")
    assert code == 0
    texts = [sample["text"] for sample in json.loads(out)["outputs"]]
    assert run(*wanted, "--seed", "7").out == f"--- sample 0\n{texts[0]}\n--- sample 1\n{texts[1]}\n"


def test_chat(run: Run, folder: str):
    wanted = ("-m", folder, "--max-tokens", "3", "--temperature", "0")
    code, out, err = run("chat", *wanted, stdin="hello\n")
    assert (code, out) == (0, run("generate", "hello", "--chat", *wanted).out)
    assert err.count("tokens in") == 1
    code, more, err = run("chat", *wanted, stdin="hello\nis\n\nnot read\n")
    assert code == 0
    assert more.startswith(out)
    assert err.count("tokens in") == 2


def test_pull_prints_where_a_model_is(run: Run, folder: str):
    assert run("pull", folder)[:2] == (0, f"{folder}\n")


def test_convert(run: Run, folder: str, tmp_path: Path):
    converted = tmp_path / "new" / "tiny"
    code, out, err = run("convert", "-m", folder, "--output", str(converted))
    assert (code, out) == (0, f"{converted}\n")
    assert err.startswith("convert ... convert done in")
    wanted = ("hello world", "--max-tokens", "4", "--json")
    assert run("generate", "-m", str(converted), *wanted)[:2] == run("generate", "-m", folder, *wanted)[:2]
    code, out, err = run("convert", "-m", folder, "--output", str(converted))
    assert (code, out) == (1, "")
    assert err.startswith("jaxinfer: invalid_argument: output = ")


def test_bench(run: Run, folder: str):
    code, out, _ = run(*BENCH, *SMALL, "-m", folder, "--json")
    assert code == 0
    assert out.count("\n") == 1
    figures = json.loads(out)
    assert figures["output_tokens_per_s"] > 0
    assert figures["engine_efficiency"] > 0
    assert figures["host_ms_per_step"] > 0
    assert figures["compiles_after_warmup"] == 0
    assert set(figures["ttft_ms"]) == set(figures["itl_ms"]) == {"p50", "p99"}
    code, out, _ = run(*BENCH, *SMALL, "-m", folder)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == list(figures)


def test_plan(run: Run, folder: str):
    code, out, err = run("plan", "-m", "llama-3-8b", "--chips", "h200:2", "--no-compile")
    assert (code, err) == (0, "")
    assert "yes: 8 sequences of 8192 tokens fit" in out
    code, out, err = run("plan", "-m", folder, "--chips", "v5e", "--mesh", "tensor=1", "--no-compile", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["fits"]
    code, out, err = run("plan", "-m", folder, "--chips", "v99", "--no-compile")
    assert (code, out) == (1, "")
    assert "invalid_argument: chips = 'v99'" in err


# What is refused.

ERRORS = {
    "model": (("-m", "no-such-model"), 1, "model_not_found: 'no-such-model'"),
    "dtype": (("--dtype", "int3"), 1, "invalid_argument: dtype = 'int3'"),
    "mesh": (("--mesh", "wide=1"), 1, "invalid_argument: mesh = 'wide=1'"),
    "large mesh": (("--mesh", "tensor=64"), 1, "mesh tensor=64 needs 64 devices; there are 8"),
    "quantize": (("--quantize", "int3"), 1, "invalid_argument: quantize = 'int3'"),
    "option": (("--bogus",), 2, "No such option: --bogus"),
}


@pytest.mark.parametrize("case", ERRORS)
@pytest.mark.parametrize("command", [("generate", "hello"), BENCH, ("serve", "--port", "0")], ids=lambda c: c[0])
def test_errors(run: Run, folder: str, command: tuple[str, ...], case: str):
    arguments, expected, message = ERRORS[case]
    code, out, err = run(*command, "-m", folder, *arguments)
    assert code == expected
    assert err.count(message) == 1
    assert "Traceback" not in err
    assert not out or (command[0] == "serve" and out.startswith("jaxinfer: listening on"))


def test_a_number_out_of_range_is_an_error_before_anything_is_loaded(run: Run):
    code, out, err = run(*BENCH, "-m", "no-such-model", "--max-num-seqs", "0")
    assert (code, out) == (2, "")
    assert "Invalid value for '--max-num-seqs'" in err
    code, out, err = run("generate", "hello", "-m", "no-such-model", "--top-p", "0")
    assert (code, out) == (1, "")
    assert "invalid_argument: top_p = 0.0" in err


def test_an_error_of_the_process():
    ended = subprocess.run([*PROCESS, "generate", "hello", "-m", "no-such-model"], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "model_not_found: 'no-such-model'" in " ".join(ended.stderr.split())
    assert "Traceback" not in ended.stderr


# What `serve` refuses before it loads anything: no such model is looked for.


SERVE = ("serve", "--port", "0", "-m", "no-such-model")
REFUSALS = {
    "key without certificate": (("--tls-key", "key.pem"), "tls_cert = None"),
    "certificate without key": (("--tls-cert", "cert.pem"), "tls_key = None"),
    "authorities alone": (("--tls-client-ca", "ca.pem"), "tls_cert = None"),
    "no such file": (
        ("--tls-cert", "cert.pem", "--tls-key", "key.pem"),
        "tls_cert = 'cert.pem' is not allowed: a file",
    ),
    "no such key file": (("--api-key-file", "keys"), "api_key_file = 'keys' is not allowed: a file that can be read"),
    "an empty key": (("--api-key", ""), "api_key = (not shown)"),
    "a strange key": (("--api-key", "tell nobody"), "api_key = (not shown)"),
    "no finite drain": (("--drain-seconds", "inf"), "drain_seconds = inf"),
    "no finite wait": (("--stuck-seconds", "inf"), "stuck_seconds = inf"),
    "no finite cache": (("--kv-cache-gib", "inf"), "kv_cache_gib = inf"),
    "no such cache": (("--kv-cache-dtype", "int4"), "kv_cache_dtype = 'int4' is not allowed: one of auto, int8, fp8"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_serve_refuses_before_it_loads(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, case: str):
    monkeypatch.chdir(tmp_path)
    arguments, message = REFUSALS[case]
    code, out, err = run(*SERVE, *arguments)
    assert (code, out) == (1, "")
    assert err.startswith(f"jaxinfer: invalid_argument: {message}")
    assert "nobody" not in err


@pytest.mark.parametrize("value", ["", ",", "one,,two", "one, two three"])
def test_serve_refuses_a_variable_of_keys_that_holds_none(run: Run, monkeypatch: pytest.MonkeyPatch, value: str):
    monkeypatch.setenv("JAXINFER_API_KEYS", value)
    code, out, err = run(*SERVE)
    assert (code, out) == (1, "")
    assert err.startswith("jaxinfer: invalid_argument: JAXINFER_API_KEYS = (not shown) is not allowed")


@pytest.mark.parametrize("arguments", [("--port", "65536"), ("--port", "http"), ("--max-waiting-tokens", "0")])
def test_serve_refuses_numbers_out_of_range(run: Run, arguments: tuple[str, str]):
    code, out, err = run(*SERVE, *arguments)
    assert (code, out) == (2, "")
    assert f"Invalid value for '{arguments[0]}'" in err


def test_serve_on_a_port_that_is_taken(run: Run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, out, err = run("serve", "--port", str(port), "-m", "no-such-model")
    assert (code, out) == (1, "")
    assert err == f"jaxinfer: cannot_listen: cannot listen on 127.0.0.1:{port}: Address already in use"


def test_what_serve_is_told_reaches_the_server(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    told: dict[str, Any] = {}

    async def serve(load: Any, **options: Any) -> bool:
        told.update(options)
        return True

    monkeypatch.setattr("server.grpc_service.serve", serve)
    assert run(*SERVE)[:2] == (0, "jaxinfer: stopped\n")
    assert (told["host"], told["port"], told["tls"], told["api_keys"]) == ("127.0.0.1", 0, None, None)
    file = tmp_path / "keys"
    file.write_text("# mine\nfrom-file\n")
    monkeypatch.setenv("JAXINFER_API_KEYS", "from-env, and-another")
    run(*SERVE, "--api-key", "from-flag", "--api-key", "again", "--api-key-file", str(file), "--drain-seconds", "7")
    keys = told["api_keys"]
    given = (b"from-flag", b"again", b"from-env", b"and-another", b"from-file")
    assert all(key in keys for key in given)
    assert not any(key in keys for key in (b"", b"from-env, and-another", b"# mine"))
    assert told["drain_timeout_s"] == 7.0


def test_keys_are_not_in_the_help(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JAXINFER_API_KEYS", "tell-nobody")
    monkeypatch.setenv("JAXINFER_API_KEY", "tell-nobody")
    for command in ("serve", "chat"):
        _, out, err = run(command, "--help")
        assert "nobody" not in out + err


def test_chat_wants_a_server_for_keys_and_tls(run: Run):
    for option, value in (("--api-key", "tell-nobody"), ("--tls-ca", "ca.pem")):
        code, _, err = run("chat", "-m", "no-such-model", option, value)
        assert code == 1
        assert "given only with --server" in err
        assert "nobody" not in err


@pytest.mark.timeout(300)
def test_serve_until_sigterm(folder: str, tmp_path: Path):
    command = [*PROCESS, "serve", "-m", folder, *SMALL, "--port", "0"]
    log = tmp_path / "stderr"
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as process,
    ):
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("jaxinfer: listening on 127.0.0.1:"), log.read_text()
            with Client(line.split()[-1]) as client:
                client.wait_ready(120)
                params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
                *deltas, finished = client.generate("hello world", params, timeout_s=60)
                assert isinstance(finished, Finished)
                assert sum(len(delta.token_ids) for delta in deltas if isinstance(delta, Delta)) == 5
            os.kill(process.pid, signal.SIGTERM)
            assert process.wait(30) == 0, log.read_text()
            assert process.stdout.read().splitlines()[-1] == "jaxinfer: stopped"
            assert "Traceback" not in log.read_text()
        finally:
            process.kill()
