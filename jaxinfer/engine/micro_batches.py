"""A step's plan as several, so that a pipeline's stages each have one to work on; knows no JAX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace

import numpy as np

from jaxinfer.types import StepPlan, StepTokens


def split_plan(plan: StepPlan, ways: int) -> list[tuple[StepPlan, np.ndarray]]:
    """The plan in at most `ways` parts of about equal work, each with the numbers of its sequences in the plan.

    A part's sequences keep their order, decodes first. Page copies and entries stay with the whole: they come before
    every part.
    """
    ways = min(ways, plan.num_seqs)
    if ways <= 1:
        return [(plan, np.arange(plan.num_seqs))]
    # The longest first, each to the part that has least; of decodes, which are alike, each part gets its share.
    loads, chosen = np.zeros(ways, np.int64), [list[int]() for _ in range(ways)]
    for sequence in np.argsort(-plan.query_lens, kind="stable"):
        part = int(np.argmin(loads))
        loads[part] += plan.query_lens[sequence]
        chosen[part].append(int(sequence))
    return [(_part(plan, which), which) for which in (np.sort(np.array(part, np.int64)) for part in chosen)]


def _part(plan: StepPlan, which: np.ndarray) -> StepPlan:
    ends = np.cumsum(plan.query_lens)
    tokens = np.concatenate(
        [np.arange(end - n, end) for end, n in zip(ends[which], plan.query_lens[which], strict=True)]
    )
    number = np.full(plan.num_seqs, -1, np.int32)
    number[which] = np.arange(which.size)
    scored = plan.scored[number[plan.scored[:, 0]] >= 0].copy()
    scored[:, 0] = number[scored[:, 0]]
    return replace(
        plan,
        slots=plan.slots[which],
        starts=plan.starts[which],
        query_lens=plan.query_lens[which],
        token_ids=plan.token_ids[tokens],
        page_table=plan.page_table[which],
        sampled=plan.sampled[which],
        sampling=plan.sampling[which],
        page_copies=plan.page_copies[:0],
        scored=scored,
        entries=(),
    )


def merge_tokens(plan: StepPlan, parts: Sequence[tuple[np.ndarray, StepTokens]]) -> StepTokens:
    """What the parts of a plan gave, row for row as in the plan."""
    scored = [(np.flatnonzero(np.isin(plan.scored[:, 0], which)), tokens.scored) for which, tokens in parts]
    some = [(which, tokens) for which, tokens in scored if tokens is not None]
    merged = _merged(plan.num_seqs, parts)
    return replace(merged, scored=_merged(len(plan.scored), some)) if some else merged


def _merged(num_rows: int, parts: Sequence[tuple[np.ndarray, StepTokens]]) -> StepTokens:
    def rows(get: Callable[[StepTokens], np.ndarray | None]) -> np.ndarray | None:
        values = [(which, value) for which, tokens in parts if (value := get(tokens)) is not None]
        if not values:
            return None
        merged = np.zeros((num_rows, *values[0][1].shape[1:]), values[0][1].dtype)
        for which, value in values:
            merged[which] = value
        return merged

    names = [field.name for field in fields(StepTokens) if field.name != "scored"]
    return StepTokens(**{name: rows(lambda tokens, name=name: getattr(tokens, name)) for name in names})  # type: ignore[arg-type, misc]
