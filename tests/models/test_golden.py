"""Our decoder against Hugging Face transformers, in float32; the golden files' format is in their script."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_checkpoints

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.source import resolve
from jaxinfer.models.decoder import decoder_structure
from pallas_kernels.paged_attention import paged_attention, pool_shape

GOLDEN = Path(__file__).parents[1] / "golden" / "models"
# Of the largest logit: float32 keeps 2**-24, and some thousand sums in another order add up to about 1e-6.
TOLERANCE = 1e-4
PAGE_SIZE = 16


class Model:
    """A checkpoint in float32, run a whole sequence at a time through a fresh pool."""

    def __init__(self, path: Path, *, scan: bool, length: int):
        checkpoint = open_checkpoint(resolve(str(path), cache_dir=path.parent, offline=True))
        config = checkpoint.config
        structure = decoder_structure(config, jnp.float32, scan=scan)
        self._leaves = structure.flatten(checkpoint.load(dtype=jnp.float32))
        self._length = length
        pages = -(-length // PAGE_SIZE)
        shape = pool_shape(len(config.layers), pages + 1, PAGE_SIZE, config.num_kv_heads, config.head_dim)
        table_SM = jnp.arange(1, pages + 1)[None]

        @jax.jit
        def run(leaves, token_ids_T, count):
            lens_S, starts_S1 = count[None], jnp.stack([jnp.int32(0), count])

            def attend(q, k, v, pool, layer, window):
                return paged_attention(
                    q, k, v, pool, layer, table_SM, lens_S, starts_S1, jnp.int32(1),
                    scale=config.head_dim**-0.5, window=window,
                )  # fmt: skip

            decoder = structure.merge(leaves)
            hidden_TD, _ = decoder(token_ids_T, jnp.arange(length), jnp.full(shape, jnp.nan, jnp.float32), attend)
            return decoder.logits(hidden_TD)

        self._run = run

    def logits(self, token_ids: np.ndarray) -> np.ndarray:
        """Logits after every token: [L, V]."""
        padded = np.zeros(self._length, np.int32)
        padded[: len(token_ids)] = token_ids
        return np.asarray(self._run(self._leaves, padded, np.int32(len(token_ids))))[: len(token_ids)]


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
