"""Log-probabilities as the device gave them, made into Python objects only as somebody looks at them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np

from jaxinfer.types import PositionLogprobs, StepTokens, TokenLogprob


def position_logprobs(tokens: StepTokens, row: int, count: int) -> PositionLogprobs:
    """Returns a row's log-probabilities: of its token, and of the `count` likeliest ones."""
    assert tokens.logprobs is not None
    assert tokens.ranks is not None
    assert tokens.top_ids is not None
    assert tokens.top_logprobs is not None
    chosen = TokenLogprob(int(tokens.token_ids[row]), float(tokens.logprobs[row]), int(tokens.ranks[row]))
    pairs = zip(tokens.top_ids[row, :count].tolist(), tokens.top_logprobs[row, :count].tolist(), strict=True)
    top = [TokenLogprob(i, value, rank) for rank, (i, value) in enumerate(pairs, 1)]
    if all(each.token_id != chosen.token_id for each in top):
        top.append(chosen)
    return PositionLogprobs(chosen, tuple(top))


class LogprobRows(Sequence[PositionLogprobs]):
    """Log-probabilities at the positions of a prompt; those of 100,000 positions would be two million objects.

    Args:
      count: how many of the likeliest tokens were asked for at each position.
    """

    def __init__(self, count: int):
        self._count = count
        self._steps: list[StepTokens] = []
        self._ends = [0]  # positions in the first steps, by number of steps

    def append(self, scored: StepTokens, rows: slice) -> None:
        """Adds rows of a step's tokens, in order of position."""
        assert scored.logprobs is not None
        assert scored.ranks is not None
        assert scored.top_ids is not None
        assert scored.top_logprobs is not None
        # Copies, for the step's own arrays hold the rows of all its requests.
        part = StepTokens(
            scored.token_ids[rows].copy(),
            scored.logprobs[rows].copy(),
            scored.ranks[rows].copy(),
            scored.top_ids[rows, : self._count].copy(),
            scored.top_logprobs[rows, : self._count].copy(),
        )
        self._steps.append(part)
        self._ends.append(self._ends[-1] + len(part.token_ids))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, at: int) -> PositionLogprobs: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[PositionLogprobs, ...]: ...
    def __getitem__(self, at: int | slice) -> PositionLogprobs | tuple[PositionLogprobs, ...]:
        if isinstance(at, slice):
            return tuple(self[i] for i in range(*at.indices(len(self))))
        if not -len(self) <= at < len(self):
            raise IndexError(f"position {at} of {len(self)}")
        at %= len(self)
        step = int(np.searchsorted(self._ends, at, side="right")) - 1
        return position_logprobs(self._steps[step], at - self._ends[step], self._count)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as of any list
