"""Makes tests/golden/models/*.npz: what Hugging Face transformers computes, in float32, for the tests to agree with.

    python3.11 -m venv hf && hf/bin/pip install torch==2.13.0 transformers accelerate gguf
    hf/bin/python scripts/make_model_goldens.py --smollm2 SmolLM2-135M-Instruct.Q4_1.gguf

Torch's CPU build does; neither jax nor jaxinfer is needed. One file a model: each variant of tests/tiny_checkpoints.py,
and smollm2-135m-instruct (the GGUF, dequantized). In a file, for prompts i = 0, 1, ...:

    prompt_{i}      [L] int32     token ids
    positions_{i}   [R] int32     positions of the prompt whose logits are kept, ascending; the last is L - 1
    logits_{i}      [R, C] float32   logits after each of those positions
    logit_ids_{i}   [R, C] int32     which tokens the logits are of; absent where they are of the whole vocabulary
                                     (tiny models). SmolLM2: the likeliest 64 in order, then 256 drawn at random
    greedy_{i}      [G] int32     the greedy continuation, past any end token
    margins_{i}     [G] float32   at each of its steps, the likeliest logit less the second

and `about`, a JSON string: the command, the versions, and the tokens per prompt.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))
import tiny_checkpoints  # noqa: E402

GREEDY_TOKENS = 32
TOP, SAMPLED = 64, 256


@torch.no_grad()
def run(model: Any, prompts: list[list[int]], whole_vocabulary: bool) -> dict[str, np.ndarray]:
    arrays = {}
    for i, prompt in enumerate(prompts):
        length = len(prompt)
        positions = sorted({0, length // 3, length // 2, length - 1})
        out = model(torch.tensor([prompt]), use_cache=True)
        logits = out.logits[0, positions].numpy()
        arrays[f"prompt_{i}"] = np.array(prompt, np.int32)
        arrays[f"positions_{i}"] = np.array(positions, np.int32)
        if not whole_vocabulary:
            rng = np.random.default_rng(i)
            top = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP]
            drawn = np.broadcast_to(rng.choice(logits.shape[1], SAMPLED, replace=False), (len(positions), SAMPLED))
            ids = np.concatenate([top, drawn], axis=-1).astype(np.int32)
            arrays[f"logit_ids_{i}"] = ids
            logits = np.take_along_axis(logits, ids, axis=-1)
        arrays[f"logits_{i}"] = logits
        greedy, margins = [], []
        for _ in range(GREEDY_TOKENS):
            best = torch.topk(out.logits[0, -1], 2)
            greedy.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            out = model(torch.tensor([[greedy[-1]]]), past_key_values=out.past_key_values, use_cache=True)
        arrays[f"greedy_{i}"] = np.array(greedy, np.int32)
        arrays[f"margins_{i}"] = np.array(margins, np.float32)
    return arrays


def tiny_prompts() -> list[list[int]]:
    """One token; a few; and more than the original context of the variant with Llama 3's rope."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, tiny_checkpoints.VOCAB_SIZE, length).tolist() for length in (1, 19, 90)]


def smollm2_prompts(tokenizer: Any) -> list[list[int]]:
    chats = ["What is the capital of France?", "Write one sentence about the sea."]
    texts = ["Once upon a time", "def fibonacci(n):\n    if n < 2:\n        return n\n" * 6]
    rendered = [
        tokenizer.apply_chat_template([{"role": "user", "content": chat}], add_generation_prompt=True, tokenize=False)
        for chat in chats
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in rendered + texts]


def save(path: Path, arrays: dict[str, np.ndarray], source: str) -> None:
    lengths = [len(value) for name, value in arrays.items() if name.startswith("prompt_")]
    about = {
        "command": shlex.join(["python", "scripts/make_model_goldens.py", *command_line()]),
        "source": source,
        "versions": {name: version(name) for name in ("torch", "transformers", "gguf", "numpy")},
        "dtype": "float32",
        "prompt_lengths": lengths,
    }
    np.savez_compressed(path, about=np.array(json.dumps(about)), **arrays)
    least = min(float(value.min()) for name, value in arrays.items() if name.startswith("margins_"))
    print(f"{path.name}: {path.stat().st_size:,} bytes, prompts of {lengths} tokens, least margin {least:.2g}")


def command_line() -> list[str]:
    """As typed, but for folders, which mean nothing on another machine."""
    return [Path(argument).name if "/" in argument else argument for argument in sys.argv[1:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smollm2", type=Path, help="SmolLM2-135M-Instruct.Q4_1.gguf; left out, its file stays")
    parser.add_argument("--out", type=Path, default=ROOT / "tests/golden/models")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    load = transformers.AutoModelForCausalLM.from_pretrained
    for name, tiny in tiny_checkpoints.VARIANTS.items():
        with tempfile.TemporaryDirectory() as folder:
            tiny_checkpoints.write_hf_folder(Path(folder), tiny)
            model = load(folder, dtype=torch.float32, attn_implementation="eager").eval()
            save(args.out / f"{name}.npz", run(model, tiny_prompts(), whole_vocabulary=True), f"tiny variant {name}")
    if args.smollm2:
        where = {"pretrained_model_name_or_path": str(args.smollm2.parent), "gguf_file": args.smollm2.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**where)
        options = {}
        if hasattr(transformers, "GgufConfig"):  # else it dequantizes anyway
            options["quantization_config"] = transformers.GgufConfig(dequantize=True)
        model = load(**where, dtype=torch.float32, attn_implementation="eager", **options).eval()
        arrays = run(model, smollm2_prompts(tokenizer), whole_vocabulary=False)
        print(repr(tokenizer.decode(arrays["greedy_0"])))
        save(args.out / "smollm2-135m-instruct.npz", arrays, args.smollm2.name)


if __name__ == "__main__":
    main()
