"""Does it fit, how many KV tokens, and how fast at best: arithmetic over one device's bytes and FLOP.

It knows no model. `StageCosts` says what one device of a pipeline stage holds and what a step costs it; a `Deployment`
puts such stages on a chip and answers. Times are a roofline: the longer of moving bytes and multiplying, plus what goes
over the links. What no arithmetic can know stands in `Assumptions`, none of which was measured on these chips.

Letters: a step runs some tokens through the stages and samples from some rows; a decode step has a token and a row of
each sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, takewhile

from sharding.hardware import GIB, Chip


class PlanError(ValueError):
    """Sizes that no deployment can have; the message names the value."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What only running would tell, as fractions of the vendor's figures and as fixed costs.

    Attributes:
      bandwidth_reached, compute_reached, links_reached: of the stated peaks.
      collective_seconds: what a collective takes beside its bytes, however few they are.
      runtime_bytes: the driver's context, loaded programs and libraries, of a device.
      collective_bytes: buffers of the collectives' library, of a device that has others to talk to.
      allocator_fraction: of the memory, lost between allocations.
    """

    bandwidth_reached: float = 0.8
    compute_reached: float = 0.6
    links_reached: float = 0.7
    collective_seconds: float = 10e-6
    runtime_bytes: int = GIB
    collective_bytes: int = GIB
    allocator_fraction: float = 0.01

    @classmethod
    def of(cls, chip: Chip) -> Assumptions:
        """A TPU's `usable_bytes` leave out what its runtime takes, and its links need no buffers in main memory."""
        if chip.platform == "tpu":
            return cls(collective_seconds=3e-6, runtime_bytes=GIB // 4, collective_bytes=0)
        return cls()


@dataclass(frozen=True, kw_only=True)
class Work:
    """Bytes of weights that a step reads, however few its tokens, and FLOP of each token (or row)."""

    read_bytes: int = 0
    flops: int = 0


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Layers that see equally far.

    Attributes:
      kv_bytes: of one token in all of these layers.
      flops: of one token and one position that it sees, in all of them.
      window: positions that a token sees, itself included; None sees all.
    """

    kv_bytes: float
    flops: int
    window: int | None = None

    def seen(self, length: int) -> int:
        """Positions that the last of `length` tokens sees."""
        return length if self.window is None else min(length, self.window)

    def pairs(self, length: int) -> int:
        """Of a token and a position it sees, over a sequence of so many tokens."""
        full = self.seen(length)
        return full * (full + 1) // 2 + (length - full) * full


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """`count` collectives of a step, over `devices` each, with so many bytes a token."""

    kind: str
    count: int
    bytes_per_token: int
    devices: int

    def seconds(self, tokens: int, bandwidth: float, each: float) -> float:
        """A ring's: an all-reduce moves each byte about twice, others once."""
        share = (self.devices - 1) / self.devices
        moved = tokens * self.bytes_per_token * share * (2 if self.kind == "all-reduce" else 1)
        return self.count * (moved / bandwidth + each)


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """One device of one stage.

    Attributes:
      weight_bytes: held.
      slot_bytes: the sampler's state of one sequence.
      temp_bytes: the most that a program needs beside its arguments.
      page_bytes: one page of the KV pool, in this stage's layers.
      layers: of every step; `head` of a step that samples, nothing where the stage has no head.
      exchanges: between the stage's devices.
      sent_bytes: of a token, to the stage after it.
    """

    weight_bytes: int
    slot_bytes: int = 0
    temp_bytes: int
    page_bytes: int
    layers: Work
    head: Work = Work()
    attention: tuple[Attention, ...]
    exchanges: tuple[Exchange, ...] = ()
    sent_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Where a device's memory goes, in bytes; the parts and `left` add up to `capacity`.

    Attributes:
      kv_pool: of the sequences that were asked for, all at their full length.
      left: negative where they do not fit: by how much.
    """

    capacity: int
    weights: int
    kv_pool: int
    sampling_state: int
    temporaries: int
    runtime: int
    collectives: int
    allocator: int

    @property
    def reserve(self) -> int:
        return self.runtime + self.collectives + self.allocator

    @property
    def left(self) -> int:
        return self.capacity - self.weights - self.kv_pool - self.sampling_state - self.temporaries - self.reserve


@dataclass(frozen=True, kw_only=True)
class Point:
    """Decoding, with so many sequences at their full length and no prompt being read.

    Attributes:
      seconds_per_token: from one output token of a sequence to the next.
      tokens_per_second: of all sequences together.
      bound: what takes most of the time: "memory", "compute" or "links".
    """

    concurrency: int
    seconds_per_token: float
    tokens_per_second: float
    bound: str


@dataclass(frozen=True, kw_only=True)
class _Time:
    """Of one pass through one stage, in seconds."""

    memory: float
    compute: float
    links: float

    @property
    def total(self) -> float:
        return max(self.memory, self.compute) + self.links

    @property
    def bound(self) -> str:
        parts = {"memory": self.memory, "compute": self.compute, "links": self.links}
        return max(parts, key=parts.__getitem__)


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """Replicas of a model in stages, on devices of one kind.

    Attributes:
      stages: what one device of each stage holds and does.
      stage_devices: devices of one stage.
      context: tokens of a sequence, prompt and output.
      concurrency: sequences at once, over all replicas.
      page_size: tokens a page; a sequence takes whole pages, and one page of a pool is nobody's.
      chunk: most tokens of a step: a longer prompt goes in several.
    """

    chip: Chip
    stages: tuple[StageCosts, ...]
    stage_devices: int = 1
    replicas: int = 1
    context: int
    concurrency: int
    page_size: int
    chunk: int
    assumptions: Assumptions

    def __post_init__(self) -> None:
        for name in ("stage_devices", "replicas", "context", "concurrency", "page_size", "chunk"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} = {getattr(self, name)} must be at least 1")
        if not self.stages:
            raise PlanError("a deployment needs one stage at least")

    # ---- Memory

    @property
    def pages_per_sequence(self) -> int:
        return -(-self.context // self.page_size)

    @property
    def sequences_per_replica(self) -> int:
        return -(-self.concurrency // self.replicas)

    @cached_property
    def memory(self) -> tuple[Memory, ...]:
        """Of one device of each stage."""
        return tuple(map(self._memory, self.stages))

    def _memory(self, stage: StageCosts) -> Memory:
        assumed, several = self.assumptions, self.stage_devices * len(self.stages) > 1
        sequences = self.sequences_per_replica
        return Memory(
            capacity=self.chip.usable_bytes,
            weights=stage.weight_bytes,
            kv_pool=(sequences * self.pages_per_sequence + 1) * stage.page_bytes,
            sampling_state=(sequences + 1) * stage.slot_bytes,
            temporaries=stage.temp_bytes,
            runtime=assumed.runtime_bytes,
            collectives=assumed.collective_bytes if several else 0,
            allocator=int(self.chip.usable_bytes * assumed.allocator_fraction),
        )

    @property
    def tightest(self) -> Memory:
        """Of the stage whose devices have least left."""
        return min(self.memory, key=lambda memory: memory.left)

    @property
    def fits(self) -> bool:
        """All sequences, at their full length, beside everything else."""
        return self.tightest.left >= 0

    @property
    def kv_tokens(self) -> int:
        """That the pools of all replicas can hold."""
        rooms = (memory.kv_pool + memory.left for memory in self.memory)
        pages = min(room // stage.page_bytes - 1 for room, stage in zip(rooms, self.stages, strict=True))
        return max(pages, 0) * self.page_size * self.replicas

    @property
    def max_sequences(self) -> int:
        """Sequences at their full length that fit, over all replicas; each has sampler state beside its pages."""
        return self.replicas * min(map(self._most, self.stages, self.memory))

    def _most(self, stage: StageCosts, memory: Memory) -> int:
        room = memory.kv_pool + memory.sampling_state + memory.left - stage.page_bytes - stage.slot_bytes
        return max(room // (self.pages_per_sequence * stage.page_bytes + stage.slot_bytes), 0)

    # ---- Time

    def decode(self, concurrency: int) -> Point:
        """One step after another, with so many sequences over all replicas.

        Stages work on parts of a replica's sequences at the same time, as many parts as there are stages.
        """
        rows = -(-concurrency // self.replicas)
        parts = min(len(self.stages), rows)
        part = -(-rows // parts)
        times = [self._pass(stage, part, part, part, self.context) for stage in self.stages]
        slowest = max(times, key=lambda time: time.total)
        seconds = max(sum(time.total for time in times), parts * slowest.total)
        return Point(
            concurrency=concurrency,
            seconds_per_token=seconds,
            tokens_per_second=concurrency / seconds,
            bound=slowest.bound,
        )

    def curve(self) -> tuple[Point, ...]:
        """At 1, 2, 4, ... sequences, at those asked for if they fit, and at as many as fit."""
        most = self.max_sequences
        points = {*takewhile(lambda c: c < most, (1 << i for i in count())), most, self.concurrency}
        return tuple(self.decode(c) for c in sorted(points) if 0 < c <= most)

    def first_token_seconds(self, prompt: int) -> float:
        """To read a prompt and give its first token, with nothing else running and nothing of it cached."""
        ends = [*range(self.chunk, prompt, self.chunk), prompt]
        total = 0.0
        for start, end in zip([0, *ends], ends, strict=False):
            rows = 1 if end == prompt else 0
            total += sum(self._pass(stage, end - start, 1, rows, end).total for stage in self.stages)
        return total

    def _pass(self, stage: StageCosts, tokens: int, sequences: int, rows: int, length: int) -> _Time:
        """Tokens that are the last of as many `sequences` of so many tokens each."""
        chip, assumed = self.chip, self.assumptions
        head = stage.head if rows else Work()
        each = tokens // sequences
        read, flops = stage.layers.read_bytes + head.read_bytes, tokens * stage.layers.flops + rows * head.flops
        for attention in stage.attention:
            pairs = attention.pairs(length) - attention.pairs(length - each)
            flops += sequences * pairs * attention.flops
            seen = min(length, attention.seen(length) + each - 1)
            read += int(sequences * seen * attention.kv_bytes)
        bandwidth = chip.ring_bandwidth * assumed.links_reached
        links = sum(e.seconds(tokens, bandwidth, assumed.collective_seconds) for e in stage.exchanges)
        if stage.sent_bytes:
            links += tokens * stage.sent_bytes / bandwidth + assumed.collective_seconds
        return _Time(
            memory=read / (chip.memory_bandwidth * assumed.bandwidth_reached),
            compute=flops / (chip.bf16_flops * assumed.compute_reached),
            links=links,
        )


def best(deployments: Sequence[Deployment]) -> Deployment:
    """The one that gives most tokens/s at the concurrency asked for; where none fits, the one that lacks least."""

    def rank(deployment: Deployment) -> tuple[float, ...]:
        if not deployment.fits:
            return 0, deployment.tightest.left
        return 1, deployment.decode(deployment.concurrency).tokens_per_second, deployment.kv_tokens

    return max(deployments, key=rank)
