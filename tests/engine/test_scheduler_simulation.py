"""The scheduler against a device that is simulated to the last token.

The fake pool holds token ids where a real one holds keys and values. A sampled token is a digest of the seed and
of all the tokens read back through the page table, so whatever goes wrong with pages, copies, preemption, prefix
hits or tokens still in flight changes the stream, and the stream is compared with an undisturbed one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxinfer.config import SchedulerConfig
from jaxinfer.engine.scheduler import Scheduler, ScoredPrompt
from jaxinfer.engine.sequence import Sequence, make_samples
from jaxinfer.types import FinishReason, SamplingParams, StepPlan, StepTokens

VOCAB, EOS = 23, 0


def next_token(seed: int, history: list[int]) -> int:
    digest = blake2b(np.array([seed, *history], np.uint64).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % VOCAB


class Undisturbed:
    """The tokens of a sequence that runs alone with all the memory it wants."""

    def __init__(self, sequence: Sequence) -> None:
        self.seed = sequence.seed
        self.tokens = sequence.prompt_token_ids.tolist()
        self.prompt_len = len(self.tokens)

    def first(self, count: int) -> list[int]:
        while len(self.tokens) < count:
            self.tokens.append(next_token(self.seed, self.tokens))
        return self.tokens[:count]

    def outputs(self, count: int) -> list[int]:
        return self.first(self.prompt_len + count)[self.prompt_len :]


@dataclass
class Step:
    plan: StepPlan
    tokens: StepTokens
    slot_owners: dict[int, Sequence]
    page_owners: dict[int, Sequence]  # of the pages the step reads or writes


@dataclass
class Simulation:
    """Drives a scheduler as the engine's loop does, and checks each plan against what it may and must be."""

    config: SchedulerConfig
    depth: int = 1  # plans in flight while the next is made
    scheduler: Scheduler = field(init=False)
    pool: dict[int, list[int | None]] = field(default_factory=dict)
    last_token: dict[int, int] = field(default_factory=dict)  # by slot
    steps: deque[Step] = field(default_factory=deque)
    sequences: list[Sequence] = field(default_factory=list)
    streams: dict[Sequence, Undisturbed] = field(default_factory=dict)
    emitted: dict[Sequence, list[int]] = field(default_factory=dict)
    ends: dict[Sequence, FinishReason] = field(default_factory=dict)
    stop_after: dict[str, int] = field(default_factory=dict)  # request -> outputs at which its stop string is seen
    cut: set[Sequence] = field(default_factory=set)  # ended by abort or failure
    scored: dict[Sequence, list[int]] = field(default_factory=dict)  # prompt positions
    entries: dict[int, list[int]] = field(default_factory=dict)  # by slot: tokens that its rules count

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, eos_token_ids=(EOS,))

    def add(self, request_id: str, prompt: list[int], *, stop_after: int = 0, priority: int = 0, **params) -> None:
        parameters = SamplingParams(**params)
        samples = make_samples(
            request_id, np.array(prompt, np.int32), parameters, seed=parameters.seed or 0, priority=priority
        )
        self.scheduler.add(samples)
        for sequence in samples:
            self.sequences.append(sequence)
            self.streams[sequence] = Undisturbed(sequence)
            self.emitted[sequence], self.scored[sequence] = [], []
        if stop_after:
            self.stop_after[request_id] = stop_after

    # The loop.

    def dispatch(self) -> bool:
        """Plan a step and run it on the device; False if there was none to run."""
        plan = self.scheduler.plan()
        if plan is None:
            return False
        owners = [row[0] for row in self.scheduler._in_flight[-1].rows]
        self._check_shape(plan)
        page_owners: dict[int, Sequence] = {}
        tokens = self._run(plan, owners, page_owners)
        self.steps.append(Step(plan, tokens, dict(zip(plan.slots.tolist(), owners, strict=True)), page_owners))
        return True

    def commit(self) -> None:
        step = self.steps.popleft()
        for result in self.scheduler.commit(step.plan, step.tokens):
            if isinstance(result, ScoredPrompt):
                rows = step.plan.scored[result.first : result.first + result.num_tokens]
                assert {step.slot_owners[slot] for slot in step.plan.slots[rows[:, 0]].tolist()} == {result.sequence}
                self.scored[result.sequence] += rows[:, 1].tolist()
                continue
            sequence, token_id, row, finish = result
            if sequence.params.prompt_logprobs is not None and sequence.index == 0:
                assert self.scored[sequence] == list(range(1, sequence.num_prompt_tokens)), "each once, before a token"
            assert sequence not in self.ends, "a token after the end"
            assert step.plan.sampled[row]
            assert token_id == step.tokens.token_ids[row]
            self.emitted[sequence].append(token_id)
            if finish is not None:
                self.end(sequence, finish)
            elif len(self.emitted[sequence]) == self.stop_after.get(sequence.request_id):
                self.scheduler.finish(sequence, FinishReason.STOP, "stop")
                self.end(sequence, FinishReason.STOP)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        assert sequence not in self.ends, "ended twice"
        assert sequence.finished
        assert sequence.finish_reason is reason
        self.ends[sequence] = reason

    def abort(self, request_id: str) -> None:
        for sequence in self.scheduler.abort(request_id):
            self.cut.add(sequence)
            self.end(sequence, FinishReason.ABORT)

    def fail(self, index: int) -> None:
        for sequence in self.scheduler.fail(self.steps[index].plan):
            self.cut.add(sequence)
            self.end(sequence, FinishReason.ABORT)
        self.steps.clear()
        self.pool.clear()
        self.last_token.clear()
        self.entries.clear()

    def turn(self) -> None:
        """One turn of the loop: read all steps but `depth`, then dispatch the next."""
        while len(self.steps) > self.depth:
            self.commit()
        if self.dispatch():
            return
        if self.steps:
            self.commit()
        else:
            assert not self.scheduler.has_unfinished, "hangs: nothing in flight and nothing to run"

    def drain(self, turns: int = 20_000) -> None:
        for _ in range(turns):
            if not self.scheduler.has_unfinished and not self.steps:
                break
            self.turn()
        self.check_idle()

    # The device.

    def _run(self, plan: StepPlan, owners: list[Sequence], used: dict[int, Sequence]) -> StepTokens:
        size = self.config.page_size
        sources, targets = set(plan.page_copies[:, 0].tolist()), plan.page_copies[:, 1].tolist()
        assert len(set(targets)) == len(targets)
        assert not sources & set(targets), "copies chain"
        for source, target in plan.page_copies.tolist():
            self.pool[target] = list(self.pool[source])
            [leader] = [owner.leader for owner in owners if target in owner.page_ids]
            assert leader is not None
            used[source] = leader
        for entry in plan.entries:
            self.entries[entry.slot] = [*entry.prompt_token_ids.tolist(), *entry.output_token_ids.tolist()]
        for i, position, token in plan.scored.tolist():
            assert plan.starts[i] < position <= plan.starts[i] + plan.query_lens[i], "the token before is computed"
            assert owners[i].prompt_token_ids[position] == token
        rows, offset = [], 0
        for i, owner in enumerate(owners):
            start, length = int(plan.starts[i]), int(plan.query_lens[i])
            table, slot = plan.page_table[i].tolist(), int(plan.slots[i])
            tokens = plan.token_ids[offset : offset + length].tolist()
            offset += length
            tokens = [self.last_token[slot] if token == -1 else token for token in tokens]
            expected = self.streams[owner].first(start + length)
            assert tokens == expected[start:], "the row's own tokens"
            # Before this step's writes: a kernel may read one row before it writes another.
            assert self._read(table, start) == expected[:start], "the row's history"
            width = len(table)
            assert table == (owner.page_ids + [0] * width)[:width], "its pages in order, then the null page"
            assert len(owner.page_ids) * size >= start + length
            for page in table[: -(-(start + length) // size)]:
                used[page] = owner
            for step in self.steps:
                assert step.slot_owners.get(slot, owner) is owner, "a slot of a plan in flight changed hands"
            rows.append((i, owner, start, tokens, table, expected))
        written: set[tuple[int, int]] = set()
        for _i, owner, start, tokens, table, _expected in rows:
            for position, token in enumerate(tokens, start):
                place = (table[position // size], position % size)
                assert place not in written, "two rows write one place"
                written.add(place)
                self._check_writable(place[0], owner)
                self.pool.setdefault(place[0], [None] * size)[place[1]] = token
        sampled = np.zeros(len(owners), np.int32)
        for i, owner, _start, _tokens, table, expected in rows:
            history = self._read(table, len(expected))
            assert history == expected, "the row's history after the step's writes"
            high, low = plan.sampling[i]["seed"].tolist()
            if plan.sampled[i]:
                assert high << 32 | low == owner.seed
                sampled[i] = next_token(high << 32 | low, history)
                slot = int(plan.slots[i])
                self.last_token[slot] = int(sampled[i])
                assert plan.sampling[i]["ruled"] == owner.ruled
                if owner.ruled:
                    assert self.entries[slot] == history, "what the rules count"
                    self.entries[slot].append(int(sampled[i]))
            else:
                sampled[i] = -7  # meaningless
        return StepTokens(sampled)

    def _read(self, table: list[int], count: int) -> list[int | None]:
        size = self.config.page_size
        read: list[int | None] = []
        for number in range(-(-count // size)):
            read += self.pool.get(table[number], [None] * size)  # what was never written equals nothing
        return read[:count]

    # The rules.

    def _check_shape(self, plan: StepPlan) -> None:
        S, config = plan.num_seqs, self.config
        assert 1 <= S <= config.max_num_seqs
        assert plan.num_tokens == plan.query_lens.sum() <= config.max_num_batched_tokens
        assert plan.num_rows == plan.sampled.sum() + len(plan.scored) <= config.max_rows
        for array in (plan.slots, plan.starts, plan.query_lens, plan.sampled, plan.sampling):
            assert array.shape == (S,)
        assert plan.slots.dtype == plan.starts.dtype == plan.query_lens.dtype == plan.token_ids.dtype == np.int32
        assert len(set(plan.slots.tolist())) == S
        is_chunk = plan.query_lens > 1
        assert (np.diff(is_chunk.astype(int)) >= 0).all(), "one-token rows come first"
        assert plan.page_table.shape[1] == -(-(plan.starts + plan.query_lens).max() // config.page_size)
        assert (plan.starts + plan.query_lens).max() < config.max_model_len
        assert plan.step == (self.steps[-1].plan.step + 1 if self.steps else plan.step)

    def _check_writable(self, page: int, owner: Sequence) -> None:
        books = self.scheduler.pages
        assert page != 0
        assert books.ref_counts[page] == 1, "a shared page is written"
        assert page not in books.index, "a page that others may find is written"
        for step in self.steps:
            assert step.page_owners.get(page, owner) is owner, "a page of a plan in flight changed hands"

    def check_idle(self) -> None:
        scheduler = self.scheduler
        assert not scheduler.has_unfinished
        assert not self.steps
        scheduler.audit()
        assert scheduler.pages.num_in_use == 0
        assert scheduler.pages.num_free + scheduler.pages.num_cached == self.config.num_pages
        assert not scheduler._requests
        for sequence in self.sequences:
            self.check_end(sequence)

    def check_end(self, sequence: Sequence) -> None:
        """The sequence ended once, where an undisturbed run with the same stops ends, with the same tokens."""
        assert sequence in self.ends
        emitted = self.emitted[sequence]
        assert emitted == self.streams[sequence].outputs(len(emitted))
        most = sequence.max_total_tokens - sequence.num_prompt_tokens
        ignore_eos, stop_after = sequence.params.ignore_eos, self.stop_after.get(sequence.request_id, most + 1)
        before_last = emitted[:-1]
        assert ignore_eos or EOS not in before_last
        assert len(emitted) <= min(most, stop_after)
        if sequence in self.cut:
            return
        if emitted[-1] == EOS and not ignore_eos:
            assert self.ends[sequence] is FinishReason.STOP
        elif len(emitted) == most:
            assert self.ends[sequence] is FinishReason.LENGTH
        else:
            assert len(emitted) == stop_after
            assert self.ends[sequence] is FinishReason.STOP


def config_of(**changes: int | bool) -> SchedulerConfig:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "page_size": 4, "num_pages": 64}
    return SchedulerConfig(**(values | changes))


def prompt_of(length: int, start: int = 1) -> list[int]:
    return [(start + i) % VOCAB for i in range(length)]


# The rows of behaviour that are the scheduler's own, on the simulated device.


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_tiny_pool_gives_the_tokens_of_a_large_one(depth: int, caching: bool) -> None:
    # 8 requests of up to 11 pages each, in a pool that holds two of them.
    simulation = Simulation(config_of(num_pages=22, max_num_seqs=8, prefix_caching=caching), depth)
    for i in range(8):
        simulation.add(f"r{i}", prompt_of(10, i), max_tokens=32, ignore_eos=True, seed=i)
    simulation.drain()
    assert simulation.scheduler.num_preemptions > 0
    assert all(len(tokens) == 32 for tokens in simulation.emitted.values())


@pytest.mark.parametrize("depth", [0, 1])
def test_lone_sequence_that_outgrows_the_pool_ends_with_length(depth: int) -> None:
    simulation = Simulation(config_of(num_pages=5), depth)
    simulation.add("r", prompt_of(6), max_tokens=None, ignore_eos=True)
    simulation.drain()
    [tokens] = simulation.emitted.values()
    assert len(tokens) == 5 * 4 + 1 - 6  # the last token needs no place in the pool
    assert list(simulation.ends.values()) == [FinishReason.LENGTH]
    assert simulation.scheduler.num_preemptions == 0


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("prompt_len", [1, 4, 5, 7, 8, 20])
def test_samples_share_the_prompt_and_differ(depth: int, prompt_len: int) -> None:
    simulation = Simulation(config_of(max_num_seqs=8), depth)
    simulation.add("r", prompt_of(prompt_len), n=4, max_tokens=12, ignore_eos=True, seed=7)
    simulation.drain()
    assert len({tuple(tokens) for tokens in simulation.emitted.values()}) == 4
    alone = Simulation(config_of(max_num_seqs=8), depth)
    alone.add("r", prompt_of(prompt_len), n=1, max_tokens=12, ignore_eos=True, seed=7)
    alone.drain()
    assert next(iter(alone.emitted.values())) == next(iter(simulation.emitted.values()))


def test_failed_step_ends_its_requests_and_the_rest_start_again() -> None:
    simulation = Simulation(config_of(max_num_seqs=2))
    for i in range(4):
        simulation.add(f"r{i}", prompt_of(9, i), max_tokens=12, ignore_eos=True, seed=i)
    for _ in range(5):
        simulation.turn()
    simulation.fail(0)
    assert {sequence.request_id for sequence in simulation.cut} == {"r0", "r1"}
    assert simulation.scheduler.pages.num_free == 64
    simulation.drain()
    assert [len(simulation.emitted[s]) for s in simulation.sequences[2:]] == [12, 12]


def test_same_calls_give_the_same_plans() -> None:
    runs = []
    for _ in range(2):
        simulation, plans = Simulation(config_of(num_pages=16)), []
        for i in range(6):
            simulation.add(f"r{i}", prompt_of(9, i // 2), n=1 + i % 2, max_tokens=20, seed=i)
        while simulation.scheduler.has_unfinished:
            simulation.turn()
            if simulation.steps:
                plan = simulation.steps[-1].plan
                plans.append([getattr(plan, name) for name in StepPlan.__slots__])
        runs.append([[np.asarray(value).tobytes() for value in values] for values in plans])
    assert runs[0] == runs[1]
    assert len(runs[0]) > 20


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("scoring_rows", [1, 5, 64])
def test_prompts_are_scored_once_through_chunks_and_preemption(
    depth: int, scoring_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxinfer.config.MIN_SCORING_ROWS", scoring_rows)
    simulation = Simulation(config_of(num_pages=16, max_num_seqs=3), depth)
    for i in range(6):
        scores = {"prompt_logprobs": 2} if i % 2 else {}
        simulation.add(f"r{i}", prompt_of(24, i), n=1 + i % 3, max_tokens=20, ignore_eos=True, seed=i, **scores)
    simulation.drain()
    assert simulation.scheduler.num_preemptions > 0
    scored = [positions for sequence, positions in simulation.scored.items() if sequence.index == 0]
    assert scored == [[], list(range(1, 24))] * 3


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, are aborted and fail at any moment; the loop reads with or without overlap."""

    @initialize(
        scoring_rows=st.sampled_from([1, 3, 64]),
        page_size=st.integers(1, 5),
        pool_tokens=st.integers(8, 70),  # few: up to six sequences of up to 48 tokens run in it
        max_num_seqs=st.integers(1, 6),
        budget=st.integers(0, 20),
        max_model_len=st.integers(12, 48),
        prefix_caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, scoring_rows, page_size, pool_tokens, max_num_seqs, budget, max_model_len, prefix_caching) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("jaxinfer.config.MIN_SCORING_ROWS", scoring_rows)
        config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + budget,
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=-(-pool_tokens // page_size),
            prefix_caching=prefix_caching,
        )
        self.simulation = Simulation(config)
        self.count = 0

    def submit(self, prompt: list[int], **options) -> None:
        config = self.simulation.config
        prompt = prompt[: min(config.max_model_len - 1, config.num_pages * config.page_size)]
        self.simulation.add(f"r{self.count}", prompt, **options)
        self.count += 1

    @rule(
        burst=st.integers(1, 5),
        family=st.integers(0, 1),
        length=st.integers(1, 30),
        own=st.lists(st.integers(0, VOCAB - 1), max_size=4),
        n=st.sampled_from([1, 1, 2, 4]),
        max_tokens=st.one_of(st.none(), st.integers(1, 40)),
        ignore_eos=st.sampled_from([True, True, False]),
        stop_after=st.sampled_from([0, 0, 1, 7]),
        priority=st.integers(0, 1),
        seed=st.integers(-5, 5),
        rules=st.sampled_from([{}, {}, {"prompt_logprobs": 0}, {"min_tokens": 1}, {"frequency_penalty": 1.0}]),
    )
    def add(self, burst, family, length, own, n, max_tokens, ignore_eos, stop_after, priority, seed, rules) -> None:
        """Requests that come together; all of a family begin alike."""
        for i in range(burst):
            self.submit(
                [*prompt_of(length, family), *own, i],
                stop_after=stop_after,
                priority=priority,
                n=n,
                max_tokens=max_tokens,
                ignore_eos=ignore_eos,
                seed=seed + i,
                **rules,
            )

    @rule(chat_turn=st.integers(0, 1000), more=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3))
    @precondition(lambda self: self.simulation.ends)
    def add_next_turn(self, chat_turn, more) -> None:
        """A finished conversation comes back with its answer in the prompt."""
        ended = list(self.simulation.ends)
        last = ended[chat_turn % len(ended)]
        prompt = last.prompt_token_ids.tolist() + last.output_token_ids + more
        self.submit(prompt, max_tokens=10, ignore_eos=True, seed=1)

    @rule(turns=st.integers(1, 12), depth=st.integers(0, 1))
    @precondition(lambda self: self.simulation.scheduler.has_unfinished)
    def run(self, turns, depth) -> None:
        self.simulation.depth = depth
        for _ in range(turns):
            self.simulation.turn()
            self.simulation.scheduler.audit()

    @rule()
    @precondition(lambda self: len(self.simulation.steps) < 2 and self.simulation.scheduler.has_unfinished)
    def dispatch(self) -> None:
        self.simulation.dispatch()

    @rule()
    @precondition(lambda self: self.simulation.steps)
    def commit(self) -> None:
        self.simulation.commit()

    @rule(which=st.integers(0, 1000))
    @precondition(lambda self: len(self.simulation.scheduler._requests) > 2)
    def abort(self, which) -> None:
        live = list(self.simulation.scheduler._requests)
        self.simulation.abort(live[which % len(live)])

    @rule(which=st.integers(0, 1))
    @precondition(lambda self: self.simulation.steps and len(self.simulation.scheduler._requests) > 3)
    def fail(self, which) -> None:
        self.simulation.fail(which % len(self.simulation.steps))

    @invariant()
    def books_are_right(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.scheduler.audit()

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            self.simulation.drain()
            self.patch.undo()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
