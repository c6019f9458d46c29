"""What each way to quantize costs in quality and gives in memory and speed, through the engine that serves.

    python scripts/quality_table.py [--json] [--models smollm2-135m-instruct FOLDER]

Perplexity is that of held-out text (`train_small_llama.texts`), from the prompt log-probabilities of sequences of
--length tokens; its change has the standard error that so many tokens leave. How far the log-probability of each of
those tokens moves, as the root of the mean square, says more: perplexity also falls by luck where a model was not at
its best for the text. Weights are counted packed, which a CPU keeps of int8 and w8a8 alone. The small Llama comes from
scripts/train_small_llama.py.
SmolLM2 comes as Q4_1, whose numbers in floats are the baseline: what is shown there is what a second rounding costs,
in groups of 64, since 128 does not divide its 576. AWQ and GPTQ have zero points here, as int4 has.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import train_small_llama

from jaxinfer import LLM, SamplingParams
from jaxinfer.bench import throughput
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.source import default_cache_dir, resolve
from jaxinfer.engine.startup import open_tokenizer
from jaxinfer.errors import UnsupportedError
from jaxinfer.models.decoder import decoder_structure, matrices
from jaxinfer.quantization.recipe import Recipe
from jaxinfer.quantize import Settings, quantize, read_text

CACHE = default_cache_dir(os.environ)
SMALL = CACHE / "models" / "small-llama"


@dataclass(frozen=True)
class Row:
    name: str
    options: dict[str, Any]
    method: str | None = None  # calibrated first


def rows_of(group: int) -> list[Row]:
    return [
        Row("bf16", {"quantize": "float"}),
        Row("int8", {"quantize": "int8"}),
        Row("w8a8", {"quantize": "w8a8"}),
        Row(f"int4 RTN, {group}", {"quantize": f"int4:{group}"}),
        Row(f"AWQ, {group}", {}, "awq"),
        Row(f"GPTQ, {group}", {}, "gptq"),
        Row("KV int8", {"quantize": "float", "kv_cache_dtype": "int8"}),
    ]


def calibrated(model: str, method: str, group: int, text: Path | None, fresh: bool) -> Path:
    name = re.sub(r"\W+", "-", f"{Path(model).name}-{text.stem}" if text else Path(model).name)
    output = CACHE / "quality" / f"{name}-{method}-{group}"
    if fresh and output.exists():
        for file in sorted(output.rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
    if not (output / "config.json").exists():
        checkpoint = open_checkpoint(resolve(model, cache_dir=CACHE))
        settings = Settings(method=method, group_size=group, symmetric=False)  # type: ignore[arg-type]
        quantize(checkpoint, open_tokenizer(checkpoint).encode, read_text(text), output, settings)
    return output


def packed_bytes(model: str, row: Row) -> int:
    """Of all weights, on a device that keeps what is quantized packed; a CPU expands most of it."""
    checkpoint, dtype = open_checkpoint(resolve(model, cache_dir=CACHE)), jnp.bfloat16
    recipe = Recipe.parse(row.options.get("quantize"), packed=True)
    choice = recipe.choose(matrices(checkpoint.config, dtype), checkpoint.schemes, "gpu", 2)
    return decoder_structure(checkpoint.config, dtype, schemes=choice.schemes).num_bytes


def measure(model: str, row: Row, options: argparse.Namespace, text: str) -> dict[str, Any]:
    limits = {"max_model_len": options.length + 1, "max_num_seqs": 8, "dtype": "bfloat16", "packed": options.packed}
    with LLM(model, **(limits | row.options)) as llm:
        ids = llm.engine.tokenizer.encode(text)[: options.tokens]
        prompts = [ids[at : at + options.length] for at in range(0, len(ids) - options.length + 1, options.length)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        scores = np.array([e.chosen.logprob for out in outputs for e in out.prompt_logprobs or () if e is not None])
        figures = throughput(llm.engine, num_prompts=8, input_len=64, output_len=32, rounds=options.rounds)
    return {
        "perplexity": math.exp(-scores.mean()),
        "scores": scores,
        "weight_bytes": packed_bytes(model, row),
        "output_tokens_per_s": figures["output_tokens_per_s"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct", str(SMALL)])
    parser.add_argument("--json", action="store_true", help="an object a row, instead of a table")
    parser.add_argument("--tokens", type=int, default=65_536, help="held-out tokens, at most")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=2, help="of throughput, after one to warm up")
    parser.add_argument("--packed", action="store_true", default=None, help="keep weights packed on a CPU too")
    parser.add_argument("--calibration", type=Path, help="text for AWQ and GPTQ [default: jaxinfer's own]")
    parser.add_argument("--fresh", action="store_true", help="calibrate anew")
    parser.add_argument("--only", default="", help="rows whose names match this pattern")
    options = parser.parse_args()
    _, text = train_small_llama.texts()
    for model in options.models:
        checkpoint = open_checkpoint(resolve(model, cache_dir=CACHE))
        group = 128 if checkpoint.config.hidden_size % 128 == 0 else 64
        base: np.ndarray | None = None
        if not options.json:
            kind = "dequantized Q4_1" if checkpoint.source.kind == "gguf" else checkpoint.source.name
            print(f"\n{model} (bf16 is {kind})\n\n| weights | perplexity | to bf16 | log-prob moves | MB | tokens/s |")
            print("|---|---:|---:|---:|---:|---:|")
        for row in rows_of(group):
            if not re.search(options.only, row.name):
                continue
            folder = calibrated(model, row.method, group, options.calibration, options.fresh) if row.method else model
            try:
                figures = measure(str(folder), row, options, text)
            except UnsupportedError as error:
                print(json.dumps({"model": model, "row": row.name, "unsupported": str(error)}) if options.json
                      else f"| {row.name} | not served: {error} | | | | |", flush=True)  # fmt: skip
                continue
            scores = figures.pop("scores")
            base = scores if base is None else base
            moved = figures["log_prob_moves"] = float(np.sqrt(np.square(scores - base).mean()))
            figures["change"] = math.exp((base - scores).mean()) - 1
            error = figures["change_standard_error"] = float((base - scores).std() / math.sqrt(scores.size))
            if options.json:
                print(json.dumps({"model": model, "row": row.name, **figures}), flush=True)
                continue
            print(
                f"| {row.name} | {figures['perplexity']:.3f} | {figures['change']:+.2%} ± {error:.2%} | {moved:.3f} "
                f"| {figures['weight_bytes'] / 1e6:.1f} | {figures['output_tokens_per_s']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
