"""Which tokens run in the next step. Plain Python and NumPy: no JAX, no threads, no clock.

Continuous batching over a paged KV cache with chunked prefill (Sarathi-Serve, arXiv:2403.02310; PagedAttention,
arXiv:2309.06180). A step has a budget of tokens: running sequences take theirs first, decodes before prefill
chunks, then waiting ones are admitted.

The step overlaps: the plan of step n+1 is made before the tokens of step n are read. The device runs steps in
order, so counts advance when a plan is made and ids are filled in when it is committed. Ends that the host can
foresee (max_tokens, the context, the pool) are never planned past; an end token lags, and what was computed
behind it is thrown away. Pages and slots that a plan in flight touches come back when that plan is committed.

A sequence has pages for all its known tokens from its admission on, so only a decode that crosses into a new page
can lack one. Then the last in order is preempted: it loses its pages, keeps its tokens, and later computes
prompt and output again, most of it from the prefix index.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from jaxinfer.config import SchedulerConfig
from jaxinfer.engine.sequence import Sequence, Status
from jaxinfer.errors import InvalidArgumentError, JaxinferError, RequestExistsError
from jaxinfer.kv_cache.blocks import PageAllocator
from jaxinfer.types import MAX_INT32, SAMPLING_ROW, FinishReason, SlotEntry, StepPlan, StepTokens

MAX_PLANS_IN_FLIGHT = 2


class NewToken(NamedTuple):
    """A token that came out of a step: whose it is, its row in the plan, and why it was the last, if it was.

    A token id of -1 says that none could be chosen; its request has then been ended, with all its samples.
    """

    sequence: Sequence
    token_id: int
    row: int
    finish: FinishReason | None


class ScoredPrompt(NamedTuple):
    """Prompt tokens whose log-probabilities came out of a step: those of its scored ones from row `first` on."""

    sequence: Sequence
    first: int
    num_tokens: int


# A row of a plan: its sequence computes positions `start` to `end`; whether that samples a token; and the page
# list it had then, since it may have lost its pages when the plan is committed. A bare tuple: 256 are made a step.
type _Row = tuple[Sequence, int, int, bool, list[int]]


class _InFlight(NamedTuple):
    """A plan given out and not yet committed, and the (pages, slot) that are handed back once it is."""

    plan: StepPlan
    rows: list[_Row]
    scored: list[ScoredPrompt]
    leaving: list[tuple[list[int], int]]


class Scheduler:
    """Owns the queue, the running sequences and the page books.

    Call `plan`, run the step, `commit` the plans in order; at most two may be in flight. Between these, `add`,
    `abort` and `finish` may be called at any time. The same calls give the same plans.

    Attributes:
      pages: the page books; counts of free and cached pages are read here.
      num_preemptions, num_cached_tokens: totals since the start.
    """

    def __init__(self, config: SchedulerConfig, eos_token_ids: Iterable[int] = ()) -> None:
        self.config = config
        self.pages = PageAllocator(config.num_pages)
        self.num_preemptions = 0
        self.num_cached_tokens = 0
        self._eos_token_ids = frozenset(eos_token_ids)
        self._step = 0
        self._arrivals = self._resumed = 0
        self._requests: dict[str, list[Sequence]] = {}  # live ones, with all their samples
        self._waiting: list[Sequence] = []  # both lists are sorted by `order`
        self._running: list[Sequence] = []
        self._in_flight: deque[_InFlight] = deque()
        self._spare_rows = 0  # of the plan being made
        self._scores = False  # the same, as the next
        self._entering: list[SlotEntry] = []
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))
        # What a plan needs of each slot, kept up to date so that a plan is a few NumPy gathers.
        self._page_table = np.zeros((config.max_num_seqs, self.max_pages_per_seq), np.int32)
        self._sampling = np.zeros(config.max_num_seqs, SAMPLING_ROW)

    @property
    def max_pages_per_seq(self) -> int:
        """The most columns a plan's page table can have."""
        return min(_cdiv(self.config.max_model_len, self.config.page_size), self.config.num_pages)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_in_flight(self) -> int:
        """Plans given out and not yet committed."""
        return len(self._in_flight)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    # What the loop asks for between steps.

    def add(self, samples: list[Sequence]) -> None:
        """Queue all samples of one request (see `make_samples`).

        Raises:
          InvalidArgumentError: the prompt leaves no room for a token in the context, or never fits the page pool.
          RequestExistsError: a live request has this id.
        """
        config, first = self.config, samples[0]
        prompt_len, pool_tokens = first.num_prompt_tokens, config.num_pages * config.page_size
        config.check_prompt(prompt_len)
        if first.request_id in self._requests:
            raise RequestExistsError(f"request {first.request_id!r} is live already")

        params = first.params
        # The last token is never written, so a sequence may be one longer than the pool.
        most = min(config.max_model_len, pool_tokens + 1)
        if params.max_tokens is not None:
            most = min(most, prompt_len + params.max_tokens)
        ends = frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos_token_ids)
        for sequence in samples:
            sequence.max_total_tokens = most
            sequence.end_token_ids = ends
            sequence.order = (sequence.priority, self._arrivals, sequence.index)
            insort(self._waiting, sequence, key=_order)
        self._arrivals += 1
        self._requests[first.request_id] = list(samples)

    def resume(self, samples: list[Sequence]) -> None:
        """Queue what still lives of a request that another scheduler began (see `reset_cache`), ahead of all others.

        Raises:
          InvalidArgumentError: it no longer fits the page pool.
        """
        config = self.config
        live = [sequence for sequence in samples if not sequence.finished]
        most = min(config.max_model_len, config.num_pages * config.page_size + 1)
        if (longest := max(sequence.num_known_tokens for sequence in live)) >= most:
            raise InvalidArgumentError("request", f"{longest} tokens so far", f"less than {most}, what the pages hold")
        self._resumed -= 1
        for sequence in live:
            sequence.max_total_tokens = min(sequence.max_total_tokens, most)
            sequence.order = (sequence.priority, self._resumed, sequence.index)
            insort(self._waiting, sequence, key=_order)
        self._requests[live[0].request_id] = live

    def abort(self, request_id: str) -> list[Sequence]:
        """End what still lives of a request; returns those samples. Unknown or finished requests give none."""
        ended = list(self._requests.get(request_id, ()))
        for sequence in ended:
            self.finish(sequence, FinishReason.ABORT)
        return ended

    def finish(self, sequence: Sequence, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """End a sequence (the loop calls this for stop strings). Does nothing if it has ended already."""
        if sequence.finished:
            return
        if sequence.status is Status.RUNNING:
            _remove(self._running, sequence)
            self._vacate(sequence)
        else:
            _remove(self._waiting, sequence)
        sequence.status = Status.FINISHED
        sequence.finish_reason, sequence.stop_reason = reason, stop_reason
        live = self._requests[sequence.request_id]
        live.remove(sequence)
        if not live:
            del self._requests[sequence.request_id]

    def fail(self, plan: StepPlan) -> list[Sequence]:
        """The device step of `plan` failed. Ends every live sample of the requests in it and returns them.

        The pool is lost with the step, so all plans in flight are dropped and all else starts again, as in
        `reset_cache`. A request is reported once and whole, so its samples outside the step end with it.

        Raises:
          ValueError: `plan` is not in flight.
        """
        rows = next((flight.rows for flight in self._in_flight if flight.plan is plan), None)
        if rows is None:
            raise ValueError(f"step {plan.step} is not in flight")
        request_ids = dict.fromkeys(sequence.request_id for sequence, *_ in rows if not sequence.finished)
        self.reset_cache()
        return [sequence for request_id in request_ids for sequence in self.abort(request_id)]

    def reset_cache(self) -> None:
        """Forget all that is in the pool. Plans in flight are dropped; running sequences wait and start again.

        They keep the tokens they have. Tokens still on the device are lost, and come out the same again.
        """
        while self._running:
            self._suspend(self._running[-1])
        while self._in_flight:
            self._retire(self._in_flight.popleft())
        for sequence in self._waiting:
            sequence.num_tokens = sequence.num_known_tokens
        self.pages.forget_all()

    def audit(self) -> None:
        """Check the page books and slots against all that holds them; raises JaxinferError (see PageAllocator)."""
        leaving = [held for flight in self._in_flight for held in flight.leaving]
        self.pages.audit([*(s.page_ids for s in self._running), *(pages for pages, _ in leaving)])
        slots = [*(s.slot for s in self._running), *(slot for _, slot in leaving), *self._free_slots]
        if sorted(slots) != list(range(self.config.max_num_seqs)):
            raise JaxinferError(f"slots are wrong: {sorted(slots)} are running, leaving or free")

    # A step: plan and commit.

    def plan(self) -> StepPlan | None:
        """Choose the tokens of the next step.

        Returns None if there is nothing to run: either nothing lives, or all that does waits for a plan in
        flight to be committed.

        Raises:
          RuntimeError: two plans are in flight already.
        """
        if len(self._in_flight) >= MAX_PLANS_IN_FLIGHT:
            raise RuntimeError("commit a plan first: two are in flight")
        rows: list[_Row] = []
        page_size, budget = self.config.page_size, self.config.max_num_batched_tokens
        # A row of logits is kept for each running sequence; the rest may score prompts.
        self._spare_rows = self.config.max_rows - len(self._running)
        self._entering, self._scores = [], False

        # Decodes. The budget covers them all. Preemption takes from the tail, which has no row yet.
        prefills = []
        for sequence in self._running:
            start, end = sequence.num_computed_tokens, sequence.num_tokens
            if end - start > 1:
                prefills.append(sequence)
            elif end < sequence.max_total_tokens:
                page_ids = sequence.page_ids
                if start < len(page_ids) * page_size or self._append_page(sequence):
                    rows.append((sequence, start, end, True, page_ids))
        budget -= len(rows)

        # Chunks of prompts (or of what a resumed sequence has to compute again).
        for sequence in prefills:
            if budget > 0:
                budget -= self._add_chunk(rows, sequence, budget)

        copies: list[tuple[int, int]] = []
        self._admit(rows, copies, budget)
        return self._give_out(rows, copies) if rows else None

    def commit(self, plan: StepPlan, tokens: StepTokens) -> list[ScoredPrompt | NewToken]:
        """Take in what the oldest plan in flight sampled and scored, and hand back the pages that waited for it.

        What is of sequences that ended meanwhile is dropped. A preempted sequence keeps its token.

        Raises:
          ValueError: `plan` is not the oldest in flight.
        """
        if not self._in_flight or self._in_flight[0].plan is not plan:
            raise ValueError(f"step {plan.step} is not the oldest in flight")
        flight = self._in_flight.popleft()
        page_size, caching = self.config.page_size, self.config.prefix_caching
        results: list[ScoredPrompt | NewToken] = []
        for scored in flight.scored:
            if not scored.sequence.finished:
                scored.sequence.next_scored += scored.num_tokens
                results.append(scored)
        ids = tokens.token_ids.tolist()
        for number, (sequence, start, end, sampled, page_ids) in enumerate(flight.rows):
            if sequence.status is Status.FINISHED:
                continue
            if caching and end // page_size > start // page_size:
                self._register(sequence, page_ids, start // page_size, end // page_size)
            if not sampled:
                continue
            token_id = ids[number]
            if token_id < 0:
                self.abort(sequence.request_id)
                results.append(NewToken(sequence, token_id, number, FinishReason.ABORT))
                continue
            sequence.output_token_ids.append(token_id)
            finish: FinishReason | None = None
            if token_id in sequence.end_token_ids:
                finish = FinishReason.STOP
                self.finish(sequence, finish, token_id)
            elif end + 1 >= sequence.max_total_tokens:
                finish = FinishReason.LENGTH
                self.finish(sequence, finish)
            results.append(NewToken(sequence, token_id, number, finish))
        self._retire(flight)
        return results

    # Inside a plan.

    def _add_chunk(self, rows: list[_Row], sequence: Sequence, budget: int) -> int:
        """Add a row with as many of the sequence's known tokens as the budget allows; returns their number."""
        start = sequence.num_computed_tokens
        end = min(sequence.num_tokens, start + budget)
        if sequence.scores_prompt:
            first = max(start + 1, sequence.next_scored)
            if first < sequence.num_prompt_tokens:
                # Each token predicts the next, and each prediction is a row; one row is this sequence's own.
                end = min(end, first + self._spare_rows)
                self._spare_rows -= max(end - first, 0)
                self._scores = True
        rows.append((sequence, start, end, end == sequence.num_tokens, sequence.page_ids))
        return end - start

    def _append_page(self, sequence: Sequence) -> bool:
        """Give a decode its next page, preempting from the tail if need be. False: no row for it in this plan."""
        while not self.pages.num_available:
            if self._pages_return():
                return False  # it sits out one step; to preempt more would be waste
            victim = self._running[-1]
            self._suspend(victim)
            self.num_preemptions += 1
            if victim is sequence:
                return False
        [page] = self.pages.allocate(1)
        self._page_table[sequence.slot, len(sequence.page_ids)] = page
        sequence.page_ids.append(page)
        return True

    def _pages_return(self) -> bool:
        """Whether committing the plans in flight gives pages back: of those who left, or who have their last token."""
        counts = self.pages.ref_counts
        if any(counts[page] == 1 for flight in self._in_flight for held, _ in flight.leaving for page in held[::-1]):
            return True
        return any(sequence.num_tokens == sequence.max_total_tokens for sequence in self._running)

    def _admit(self, rows: list[_Row], copies: list[tuple[int, int]], budget: int) -> None:
        """Give slots and pages to waiting sequences, in order, while there are slots, pages and budget."""
        pages, page_size, position = self.pages, self.config.page_size, 0
        while position < len(self._waiting) and self._free_slots and budget > 0 and self._spare_rows > 0:
            # So that nobody is admitted only to be preempted, each running sequence keeps a page to grow into.
            spare = pages.num_available - len(self._running)
            sequence = self._waiting[position]
            if spare < 1 or sequence.num_in_flight:
                break
            leader = sequence.leader
            fork = leader is not None and leader.status is Status.RUNNING and not sequence.output_token_ids
            if leader is not None and fork:
                # All of the prompt but its last token, which each sample computes with its own seed.
                prefix_len = sequence.num_prompt_tokens - 1
                if leader.num_computed_tokens < prefix_len:
                    position += 1  # those behind need not wait for the leader's prefill
                    continue
                shared = leader.page_ids[: prefix_len // page_size]
            else:
                shared = self._lookup(sequence)
                prefix_len = len(shared) * page_size
            needed = _cdiv(sequence.num_tokens, page_size) - len(shared)
            if needed > spare - sum(pages.ref_counts[page] == 0 for page in shared):
                break

            pages.share(shared)
            page_ids = shared + pages.allocate(needed)
            if leader is not None and fork:
                if prefix_len % page_size:  # copy on write: the page that the last prompt token goes to
                    copies.append((leader.page_ids[len(shared)], page_ids[len(shared)]))
                leader.last_step = self._step  # this plan reads its pages
                sequence.page_keys = leader.page_keys[: len(shared)]
            elif sequence.last_step < 0:
                sequence.num_cached_tokens = prefix_len
                self.num_cached_tokens += prefix_len
            del self._waiting[position]
            self._start(sequence, page_ids, prefix_len)
            budget -= self._add_chunk(rows, sequence, budget)

    def _lookup(self, sequence: Sequence) -> list[int]:
        """Pages of the longest known prefix that leaves the last token to compute. Takes no references."""
        if not (self.config.prefix_caching and sequence.use_prefix_cache):
            return []
        page_size = self.config.page_size
        most = (sequence.num_tokens - 1) // page_size
        return self.pages.lookup(sequence.keys_of_pages(most, page_size)[:most])

    def _start(self, sequence: Sequence, page_ids: list[int], num_computed_tokens: int) -> None:
        """A waiting sequence, taken from the queue, runs."""
        self._spare_rows -= 1
        sequence.status = Status.RUNNING
        sequence.page_ids = page_ids
        sequence.num_computed_tokens = num_computed_tokens
        sequence.slot = slot = self._free_slots.pop()
        insort(self._running, sequence, key=_order)
        self._page_table[slot] = 0
        self._page_table[slot, : len(page_ids)] = page_ids
        params, seed = sequence.params, sequence.seed
        num_logprobs = -1 if params.logprobs is None else params.logprobs
        words = (seed >> 32, seed & 0xFFFFFFFF)  # high, low: as JAX's own keys are laid out
        num_prompt_logprobs = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
        min_position = min(sequence.num_prompt_tokens + params.min_tokens, MAX_INT32)
        self._sampling[slot] = (
            *(params.temperature, params.top_p, max(params.top_k, 0), params.min_p, words),
            *(num_logprobs, num_prompt_logprobs, *penalties, min_position, sequence.ruled),
        )
        if sequence.ruled:
            self._entering.append(sequence.slot_entry())

    def _give_out(self, rows: list[_Row], copies: list[tuple[int, int]]) -> StepPlan:
        """Turn rows into a plan in flight, and advance the counts of their sequences."""
        step = self._step
        singles = [row for row in rows if row[2] - row[1] == 1]
        chunks = [row for row in rows if row[2] - row[1] > 1]
        single_ids = []
        for sequence, start, *_ in singles:
            behind = start - sequence.num_prompt_tokens  # how far into the output
            if behind < 0:
                single_ids.append(int(sequence.prompt_token_ids[start]))
            else:
                outputs = sequence.output_token_ids
                single_ids.append(outputs[behind] if behind < len(outputs) else -1)
        chunk_ids = [sequence.token_slice(start, end) for sequence, start, end, *_ in chunks]

        rows = singles + chunks
        scored, scored_ids = self._score(rows) if self._scores else ([], _NOTHING_SCORED)
        for sequence, _, end, sampled, _ in rows:
            sequence.num_computed_tokens = end
            sequence.num_tokens += sampled
            sequence.last_step = step
        slots = np.array([row[0].slot for row in rows], np.int32)
        starts = np.array([row[1] for row in rows], np.int32)
        ends = np.array([row[2] for row in rows], np.int32)
        plan = StepPlan(
            step=step,
            slots=slots,
            starts=starts,
            query_lens=ends - starts,
            token_ids=np.concatenate([np.array(single_ids, np.int32), *chunk_ids]),
            page_table=self._page_table[slots, : _cdiv(int(ends.max()), self.config.page_size)],  # gathers: copies
            sampled=np.array([row[3] for row in rows], np.bool_),
            sampling=self._sampling[slots],
            page_copies=np.array(copies, np.int32).reshape(-1, 2),
            scored=scored_ids,
            entries=tuple(self._entering),
        )
        self._step += 1
        self._in_flight.append(_InFlight(plan, rows, scored, []))
        return plan

    def _score(self, rows: list[_Row]) -> tuple[list[ScoredPrompt], np.ndarray]:
        """The prompt tokens that these rows score: whose, and as a plan has them."""
        prompts: list[ScoredPrompt] = []
        parts = [_NOTHING_SCORED]
        total = 0
        for number, (sequence, start, end, *_) in enumerate(rows):
            if not sequence.scores_prompt:
                continue
            first, last = max(start + 1, sequence.next_scored), min(end, sequence.num_prompt_tokens - 1)
            if first <= last:
                positions = np.arange(first, last + 1, dtype=np.int32)
                ids = sequence.prompt_token_ids[first : last + 1]
                parts.append(np.stack([np.full_like(positions, number), positions, ids], axis=1))
                prompts.append(ScoredPrompt(sequence, total, len(positions)))
                total += len(positions)
        return prompts, np.concatenate(parts)

    # Giving up pages and slots.

    def _suspend(self, sequence: Sequence) -> None:
        """A running sequence loses its pages and waits, by its order ahead of all that came after it."""
        _remove(self._running, sequence)
        self._vacate(sequence)
        sequence.status = Status.WAITING
        sequence.num_computed_tokens = 0
        insort(self._waiting, sequence, key=_order)

    def _vacate(self, sequence: Sequence) -> None:
        """Give back pages and slot: now, or when the plan in flight that touches them is committed."""
        held = (sequence.page_ids, sequence.slot)
        sequence.page_ids, sequence.slot = [], -1
        for flight in self._in_flight:
            if flight.plan.step == sequence.last_step:
                flight.leaving.append(held)
                return
        self._release(*held)

    def _retire(self, flight: _InFlight) -> None:
        for held in flight.leaving:
            self._release(*held)

    def _release(self, page_ids: list[int], slot: int) -> None:
        self.pages.release(page_ids)
        self._free_slots.append(slot)

    def _register(self, sequence: Sequence, page_ids: list[int], first: int, last: int) -> None:
        """Let others find the pages `first` to `last`, which a committed step has filled."""
        keys = sequence.keys_of_pages(last, self.config.page_size)
        for number in range(first, last):
            self.pages.register(page_ids[number], keys[number])


_NOTHING_SCORED = np.zeros((0, 3), np.int32)


def _order(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.order


def _remove(ordered: list[Sequence], sequence: Sequence) -> None:
    del ordered[bisect_left(ordered, sequence.order, key=_order)]


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)
