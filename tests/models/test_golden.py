"""Our decoder against Hugging Face transformers, in float32; the golden files' format is in their script."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny_checkpoints
from whole_model import Model

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
# Of the largest logit: float32 keeps 2**-24, and some thousand sums in another order add up to about 1e-6.
TOLERANCE = 1e-4


def check(model: Model, golden: dict[str, np.ndarray]) -> None:
    prompts = [name for name in golden if name.startswith("prompt_")]
    assert prompts
    for name in prompts:
        i = name.removeprefix("prompt_")
        prompt, greedy, margins = golden[name], golden[f"greedy_{i}"], golden[f"margins_{i}"]
        # The reference's own continuation is fed, so that one near-tie does not end the comparison.
        logits = model.logits(np.concatenate([prompt, greedy[:-1]]))
        got, want = logits[golden[f"positions_{i}"]], golden[f"logits_{i}"]
        if f"logit_ids_{i}" in golden:
            got = np.take_along_axis(got, golden[f"logit_ids_{i}"], axis=-1)
        scale = np.abs(want).max()
        assert np.abs(got - want).max() <= TOLERANCE * scale
        clear = margins > 2 * TOLERANCE * scale
        assert clear.mean() > 0.5
        assert (logits[len(prompt) - 1 :].argmax(-1)[clear] == greedy[clear]).all()


@pytest.mark.parametrize(("kind", "scan"), [("hf", False), ("gguf", True)])
@pytest.mark.parametrize("name", sorted(tiny_checkpoints.VARIANTS))
def test_tiny_models_agree_with_transformers(name: str, kind: str, scan: bool, tmp_path: Path):
    tiny = tiny_checkpoints.VARIANTS[name]
    path = tmp_path / (f"{name}.gguf" if kind == "gguf" else name)
    if kind == "gguf":
        tiny_checkpoints.write_gguf(path, tiny)
    else:
        tiny_checkpoints.write_hf_folder(path, tiny)
    check(Model(path, scan=scan, length=128), dict(np.load(GOLDEN / f"{name}.npz")))


@pytest.mark.slow
def test_smollm2_agrees_with_transformers(smollm2_path: Path):
    golden = dict(np.load(GOLDEN / "smollm2-135m-instruct.npz"))
    longest = max(len(golden[name]) for name in golden if name.startswith("prompt_")) + 32
    check(Model(smollm2_path, scan=True, length=longest), golden)
