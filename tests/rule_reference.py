"""What rules do to logits, token by token in numpy, as vLLM documents the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np


def changed_logits(
    logits: np.ndarray,
    prompt: Sequence[int],
    output: Sequence[int],
    *,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    allowed_token_ids: Sequence[int] | None = None,
    min_tokens: int = 0,
    words: Sequence[Sequence[int]] = (),
    ends: Sequence[int] = (),
) -> np.ndarray:
    """Logits [V] float64 for the token that follows `output`; `words` are banned, `ends` end the output."""
    x, prompt, output = logits.astype(np.float64), list(prompt), list(output)
    for token in range(len(x)):
        banned = allowed_token_ids is not None and token not in allowed_token_ids
        for *before, last in words:
            banned |= last == token and (not before or output[-len(before) :] == before)
        banned |= token in ends and len(output) < min_tokens
        if banned:
            x[token] = -np.inf
            continue
        x[token] += (logit_bias or {}).get(token, 0.0)
        if token in prompt or token in output:
            x[token] = x[token] / repetition_penalty if x[token] > 0 else x[token] * repetition_penalty
        x[token] -= frequency_penalty * output.count(token) + presence_penalty * (token in output)
    return x
