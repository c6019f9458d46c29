"""`jaxinfer serve` as two processes of two CPU devices each, on loopback: what clients get, also when one is lost."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest
import tiny_checkpoints
from grpc_health.v1 import health_pb2, health_pb2_grpc

from jaxinfer.errors import EngineDeadError, UnsupportedError
from jaxinfer.llm import LLM
from jaxinfer.types import Delta, Finished, SamplingParams
from server.client import Client

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = replace(
    tiny_checkpoints.VARIANTS["llama3"], hidden=64, heads=8, kv_heads=4, head_dim=16, intermediate=84, layers=1
)
LIMITS = {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 8, "page_size": 4, "max_model_len": 64}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5, 6, 7], [8] * 11, [300, 20, 1, 40, 7], list(range(30, 59)), [9], [77, 78, 79, 80] * 3]
START_S, END_S, LOST_S = 60.0, 20.0, 15.0
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING

pytestmark = pytest.mark.slow


def free_port(among: Iterable[int] = (0,)) -> int:
    """One of these, by default any that the system chooses."""
    for port in among:
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return probe.getsockname()[1]
    raise AssertionError("no port is free")


def until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


class Start(NamedTuple):
    """How a process learns its role."""

    arguments: list[str]
    variables: dict[str, str]


def told(port: int, rank: int) -> Start:
    return Start([f"--coordinator=127.0.0.1:{port}", "--num-processes=2", f"--process-id={rank}"], {})


def by_slurm(port: int, rank: int) -> Start:
    """As `srun` starts a task; JAX derives the coordinator's port, from 61440 on, from the number of the job."""
    variables = {"JOB_ID": str(port - 61440), "STEP_NODELIST": "127.0.0.1", "NTASKS": "2"}
    variables |= {"PROCID": str(rank), "LOCALID": str(rank)}
    arguments = ["--distributed", "--control-host=127.0.0.1"]
    return Start(arguments, {f"SLURM_{name}": value for name, value in variables.items()})


class Processes:
    """Two of them, and the worker of each; `extra` are further arguments of the second, `both` of both. `role` says how
    they learn theirs, from the coordinator's port and their number."""

    def __init__(
        self,
        folder: Path,
        outputs: Path,
        cache_dir: Path,
        mesh: str,
        extra: Sequence[str] = (),
        both: Sequence[str] = (),
        role: Callable[[int, int], Start] = told,
    ):
        # At random: nobody holds it until the workers have started, and other tests run beside this one.
        coordinator_port = free_port(random.sample(range(61440, 65536), 100))
        self.address = f"127.0.0.1:{free_port()}"
        arguments = [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
        arguments += [f"--model={folder}", f"--mesh={mesh}", "--kv-cache-gib=0.001", "--allow-reshard", *both]
        arguments += [f"--port={self.address.partition(':')[2]}"]
        starts = [role(coordinator_port, rank) for rank in range(2)]
        self.outputs = [outputs / f"process{rank}.log" for rank in range(2)]
        # Of the tests' own settings only these count.
        own = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "JAXINFER_CACHE": str(cache_dir)}
        own["PYTHONPATH"] = str(ROOT)
        command = [sys.executable, "-c", "from jaxinfer.cli import main; main()", "-v", "serve", *arguments]
        self.processes = [
            subprocess.Popen(
                [*command, *starts[rank].arguments, *(extra if rank else ())],
                env=os.environ | own | starts[rank].variables,
                stdout=self.outputs[rank].open("w"),
                stderr=subprocess.STDOUT,
            )
            for rank in range(2)
        ]
        self.workers: dict[int, int] = {}
        self.find_workers()

    def find_workers(self) -> None:
        def found() -> bool:
            for rank, process in enumerate(self.processes):
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
                with suppress(OSError):
                    for pid in children.read_text().split():
                        self.workers[rank] = int(pid)
            return len(self.workers) == 2 or all(process.poll() is not None for process in self.processes)

        until(found, START_S, "no workers")

    def said(self, rank: int = 0) -> str:
        return self.outputs[rank].read_text()

    def wait_ready(self) -> None:
        ready = lambda: "first token" in self.said() or self.processes[0].poll() is not None
        until(ready, START_S, f"not ready: {self.said()}")
        assert self.processes[0].poll() is None, self.said()

    def wait_ended(self) -> list[int]:
        """Exit statuses; workers must be gone too."""
        end = time.monotonic() + END_S
        statuses = [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in self.workers.values()), 5, "workers are left")
        return statuses

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for pid in self.workers.values():
            if b"jaxinfer.worker" in _command(pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> bytes:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes") / "model"
    tiny_checkpoints.write_hf_folder(folder, TINY)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[tuple[int, ...]]:
    """The tokens of one process with one device."""
    with LLM(str(folder), **LIMITS, kv_cache_bytes=1 << 20) as llm:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]


@pytest.fixture
def start(folder: Path, tmp_path: Path, cache_dir: Path) -> Iterator[Callable[..., Processes]]:
    started: list[Processes] = []

    def make(mesh: str, *extra: str, **options: Any) -> Processes:
        started.append(Processes(folder, tmp_path, cache_dir, mesh, extra, **options))
        return started[-1]

    yield make
    for processes in started:
        processes.close()


def tokens_of(events: Sequence[object]) -> tuple[int, ...]:
    return tuple(token for event in events if isinstance(event, Delta) for token in event.token_ids)


@pytest.mark.parametrize(("mesh", "role"), [("tensor=4", by_slurm), ("data=2,tensor=2", told)])
def test_they_give_the_tokens_of_one_process_and_drain(
    start, expected: list[tuple[int, ...]], mesh: str, role: Callable[[int, int], Start]
):
    processes = start(mesh, role=role)
    processes.wait_ready()
    with Client(processes.address) as client, ThreadPoolExecutor(len(PROMPTS)) as threads:
        answers = list(threads.map(lambda prompt: client.unary_generate(prompt, GREEDY), PROMPTS))
        assert [answer.samples[0].output.token_ids for answer in answers] == expected
        # Rules and log-probabilities travel too.
        banned = replace(GREEDY, logit_bias={expected[0][0]: -100.0}, logprobs=2, prompt_logprobs=1, max_tokens=4)
        answer = client.unary_generate(PROMPTS[0], banned)
        assert answer.samples[0].output.token_ids[0] != expected[0][0]
        assert answer.samples[0].output.logprobs[0].top[0].token_id == expected[0][0]
        assert answer.prompt_logprobs is not None
        assert len(answer.prompt_logprobs.positions) == len(PROMPTS[0]) - 1
        assert client.model_info().mesh == mesh
        stats = client.server_info().stats
        assert stats is not None
        assert stats.compiles_after_warmup == 0
        with pytest.raises(UnsupportedError, match="several processes"):
            client.reshard("tensor=2")
        stream = client.generate(PROMPTS[1], GREEDY)
        events = [next(stream)]
        # As supervisors do: to all at once, workers too.
        for pid in (*(process.pid for process in processes.processes), *processes.workers.values()):
            os.kill(pid, signal.SIGTERM)
        events += stream
        assert isinstance(events[-1], Finished)
        assert tokens_of(events) == expected[1]
    assert processes.wait_ended() == [0, 0]
    assert "jaxinfer: stopped\n" in processes.said()


def test_int8_pages_give_the_tokens_of_one_process(start, folder: Path):
    with LLM(str(folder), **LIMITS, kv_cache_bytes=1 << 20, kv_cache_dtype="int8") as llm:
        expected = [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, GREEDY)]
    processes = start("tensor=4", both=["--kv-cache-dtype=int8"])
    processes.wait_ready()
    with Client(processes.address) as client:
        answers = [client.unary_generate(prompt, GREEDY) for prompt in PROMPTS]
        assert [answer.samples[0].output.token_ids for answer in answers] == expected
        stats = client.server_info().stats
        assert stats is not None
        assert (stats.kv_dtype, stats.kv_token_bytes) == ("int8", 2 * 4 * (16 + 4))
        assert stats.kv_tokens == stats.total_pages * 4


class HealthWatch:
    """What a watcher of health was told, and when."""

    def __init__(self, address: str):
        self.told: list[tuple[int, float]] = []
        self._thread = threading.Thread(target=self._watch, args=(address,), daemon=True)
        self._thread.start()

    def _watch(self, address: str) -> None:
        with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
            for answer in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                self.told.append((answer.status, time.monotonic()))


@pytest.mark.parametrize(("rank", "how"), [(1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_one_is_lost_in_mid_stream(start, rank: int, how: signal.Signals):
    processes = start("tensor=4")
    processes.wait_ready()
    health = HealthWatch(processes.address)
    with Client(processes.address) as client:
        streams = [client.generate(prompt, replace(GREEDY, max_tokens=40)) for prompt in PROMPTS[:3]]
        for stream in streams:
            next(stream)
        lost = time.monotonic()
        os.kill(processes.workers[rank], how)
        for stream in streams:
            with pytest.raises(EngineDeadError, match=f"process {rank} of 2 is lost"):
                list(stream)
        seconds = time.monotonic() - lost
        until(lambda: health.told and health.told[-1][0] == NOT_SERVING, 2, "health never said NOT_SERVING")
    print(f"{how.name} of {rank}: UNAVAILABLE after {seconds:.2f} s")
    assert seconds < LOST_S
    assert health.told[-1][1] - lost < LOST_S
    # The stopped worker's parent ends it, so nothing has to be done by hand.
    assert processes.wait_ended() == [1, 1]
    assert f"process {rank} of 2 is lost" in processes.said()


def test_an_idle_group_notices_a_loss(start):
    processes = start("data=2,tensor=2")
    processes.wait_ready()
    os.kill(processes.workers[0], signal.SIGKILL)
    assert processes.wait_ended() == [1, 1]
    assert "engine_dead: process 0 of 2 is lost" in processes.said()


@pytest.mark.parametrize(
    ("mesh", "extra", "message"),
    [
        ("stage=2,tensor=2", (), "mesh = 'stage=2,tensor=2' is not allowed: stage=2: the stages of replica 0 lie in "
                                 "processes 0, 1"),
        ("tensor=2", (), "mesh = 'tensor=2' is not allowed: mesh tensor=2 leaves process 1 without work"),
        ("tensor=4", ("--max-num-seqs=3",), "max_num_seqs = 4 is not allowed: process 1 was started with 3"),
    ],
    ids=["stages", "idle", "other settings"],
)  # fmt: skip
def test_one_that_cannot_start_ends_all(start, mesh: str, extra: tuple[str, ...], message: str):
    processes = start(mesh, *extra)
    assert processes.wait_ended() == [1, 1]
    assert message in processes.said().replace("\n", " ")
    assert "invalid_argument" in processes.said()
    assert "Traceback" not in processes.said()


FRONT_END = """
import sys
from pathlib import Path
from jax._src import xla_bridge
from jaxinfer.config import EngineConfig
from jaxinfer.engine.group import start_group
from jaxinfer.engine.worker_process import WorkerProcess
from jaxinfer.types import Failed, Finished, Request, SamplingParams
from sharding.distributed import Role
import queue

folder, cache_dir, coordinator = sys.argv[1:]
config, events = EngineConfig(model=folder, kv_cache_bytes=1 << 20, **{limits}), queue.SimpleQueue()
options = {{"cache_dir": Path(cache_dir), "offline": True}}
worker = WorkerProcess(Role(coordinator, 1, 0), config, **options, logs={{"format": "text", "level": 30}})
with start_group(worker, config, host="127.0.0.1", **options) as engine:
    engine.submit(Request(request_id="a", params=SamplingParams(max_tokens=4), text="hello"), events.put)
    while not isinstance(last := events.get(timeout=60)[-1], (Finished, Failed)):
        pass
print(type(last).__name__, xla_bridge.backends_are_initialized())
"""


def test_the_front_end_touches_no_device(folder: Path, cache_dir: Path, expected: object):
    """Else it would take the accelerator from its own worker. A group of one process will do, with the programs of
    `expected`."""
    ran = subprocess.run(
        [sys.executable, "-c", FRONT_END.format(limits=LIMITS), folder, cache_dir, f"127.0.0.1:{free_port()}"],
        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=START_S,
    )
    assert ran.stdout == "Finished False\n", ran.stderr
