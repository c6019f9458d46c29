"""Reads the optimized HLO text of a compiled program: one device's instructions in the order in which they run.

How a result is told from a view of another. XLA's alias analysis has operations whose output *must* share a buffer with
an operand: tuples and their elements, bitcasts, loops, conditionals and calls (what their computations write is what
counts), dynamic-update-slice and scatter, fusions that end in one of these on one of their own parameters, and whatever
is printed with `output_to_operand_aliasing` (Pallas kernels with aliased operands, in-place collectives). Where sharing
would destroy a value that is still needed, XLA keeps the sharing and puts a `copy` before it; that copy is an
instruction, and counts. So exactly these are views, and all else is a buffer that is written. An elementwise result
that takes over a dead operand's memory counts too, for its bytes are written. What a fusion computes inside itself
stays in registers and does not count.

The text: https://openxla.org/xla/operation_semantics; layouts: https://openxla.org/xla/tiled_layout; the rules of
sharing: `GetInPlaceInputOutputPairs` and copy insertion in https://github.com/openxla/xla.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

Index = tuple[int, ...]  # a leaf of a tuple shape; () is an array itself
Place = tuple[str, str, Index]  # computation, instruction, leaf

COLLECTIVES = frozenset(
    {
        "all-gather",
        "all-reduce",
        "all-to-all",
        "collective-broadcast",
        "collective-permute",
        "ragged-all-to-all",
        "reduce-scatter",
    }
)
_SAME_BYTES = frozenset({"bitcast", "optimization-barrier", "add-dependency", "domain", "set-dimension-size"})
_RUNS_OTHERS = frozenset({"while", "conditional", "call"})
# These write nothing: what they stand for is written elsewhere.
_VIEWS = _SAME_BYTES | _RUNS_OTHERS | {"parameter", "tuple", "get-tuple-element", "after-all"}
_HOST_MEMORY = 5  # S(5), on TPU and GPU alike


@dataclass(frozen=True)
class Collective:
    """A communication between devices, of one kind and shape.

    Attributes:
      kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all`, `collective-permute`, ...
      shape: what comes out, per device: `bf16[128,4096]`.
      bytes: the larger of what goes in and what comes out, per device.
      count: such instructions in the program; one in a loop's body counts once.
      in_branch: it stands in a branch of a conditional, and runs only where that is taken.
    """

    kind: str
    shape: str
    bytes: int
    count: int
    in_branch: bool = False


@dataclass(frozen=True)
class CustomCall:
    """A call of code that is not XLA's own, such as a Pallas kernel; shapes are per device."""

    name: str
    target: str
    operands: tuple[str, ...]
    results: tuple[str, ...]


@dataclass(frozen=True)
class Result:
    """What one instruction writes.

    Attributes:
      name: the instruction, with the element's number if it writes several: `fusion.3{1}`; of an asynchronous pair,
        the `-done`.
      opcode: of the instruction; of an asynchronous pair, without `-start` and `-done`.
      computation: where it stands: the entry computation, a loop's body, a branch.
      shape: per device.
      bytes: as it lies in memory, a TPU's tiles padded.
      memory: "main", "on-chip" (TPUs only) or "host".
      output: the program returns it; it is no intermediate.
    """

    name: str
    opcode: str
    computation: str
    shape: str
    bytes: int
    memory: str
    output: bool


# A type, dimensions, and a layout: order of dimensions, tiles, element size, memory space: {1,0:T(8,128)(2,1)S(1)}.
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")


@dataclass(frozen=True)
class Array:
    """The shape of an array, with its layout."""

    dtype: str
    dims: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    tile: tuple[int, ...]
    bits: int
    space: int

    @classmethod
    def parse(cls, text: str) -> Array:
        match = _ARRAY.match(text)
        if match is None:
            raise ValueError(f"{text[:80]!r} is no array shape of HLO")
        dtype, layout = match[1], match[4] or ""
        dims = tuple(int(size.removeprefix("<=")) for size in match[2].split(",") if size)
        tile = re.search(r"T\(([\d,]+)\)", layout)  # only the first pads; more of them reorder what is inside
        packed = re.search(r"E\((\d+)\)", layout)  # else types of less than a byte take one
        space = re.search(r"S\((\d+)\)", layout)
        width = re.match(r"[a-z]+(\d+)", dtype)
        bits = int(packed[1]) if packed else max(8, int(width[1])) if width else 8
        return cls(
            dtype=dtype,
            dims=dims,
            minor_to_major=tuple(int(d) for d in (match[3] or "").split(",") if d) or tuple(range(len(dims)))[::-1],
            tile=tuple(int(size) for size in tile[1].split(",")) if tile else (),
            bits=0 if dtype in ("token", "opaque") else bits,
            space=int(space[1]) if space else 0,
        )

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"

    @property
    def num_bytes(self) -> int:
        """In memory, the last tile of each dimension whole."""
        sizes = [self.dims[d] for d in reversed(self.minor_to_major)]
        tile = self.tile[-len(sizes) :] if sizes else ()
        for at, size in enumerate(tile, start=len(sizes) - len(tile)):
            sizes[at] = -(-sizes[at] // size) * size
        return -(-math.prod(sizes) * self.bits // 8)


def parse_shape(text: str) -> dict[Index, Array]:
    """The arrays of a shape, a tuple or not, by their place in it."""
    if not text.startswith("("):
        return {(): Array.parse(text)}
    parts = enumerate(part for part in _split(text[1:-1]) if part)
    return {(at, *index): array for at, part in parts for index, array in parse_shape(part).items()}


def _split(text: str) -> Iterator[str]:
    """At the commas that stand in no bracket."""
    depth = start = 0
    for at, char in enumerate(text):
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and not depth:
            yield text[start:at].strip()
            start = at + 1
    yield text[start:].strip()


def _closing(text: str, start: int) -> int:
    """Where the bracket that opens at `start` closes."""
    opening, closing = text[start], {"(": ")", "{": "}"}[text[start]]
    depth = 0
    for match in re.compile(f"[{re.escape(opening + closing)}]").finditer(text, start):
        depth += 1 if match[0] == opening else -1
        if not depth:
            return match.start()
    raise ValueError(f"unclosed {opening!r} in HLO: {text[:80]!r}")


@dataclass(frozen=True)
class Instruction:
    """One line of a computation, or an asynchronous pair of them.

    Attributes:
      number: of a parameter, or of the element that get-tuple-element takes.
      called: computations that run as part of the program: of a loop, of branches, of a call, of a fusion.
      declared: of `output_to_operand_aliasing`: leaf of the result -> number of the operand, and leaf of it.
    """

    name: str
    opcode: str
    shape: dict[Index, Array]
    operands: tuple[str, ...]
    number: int
    called: tuple[str, ...]
    declared: dict[Index, tuple[int, Index]]
    attributes: str
    is_root: bool

    @classmethod
    def parse(cls, line: str) -> Instruction:
        head, _, rest = re.sub(r"/\*.*?\*/", "", line).strip().partition(" = ")
        end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
        opening = rest.index("(", end)
        closing = _closing(rest, opening)
        opcode, inside, attributes = rest[end:opening].strip(), rest[opening + 1 : closing], rest[closing + 1 :]
        element = re.match(r", index=(\d+)", attributes)
        return cls(
            name=head.removeprefix("ROOT ").removeprefix("%"),
            opcode=opcode,
            shape=parse_shape(rest[:end]),
            operands=() if opcode in ("parameter", "constant") else tuple(re.findall(r"%([^\s,()]+)", inside)),
            number=int(inside) if opcode == "parameter" else int(element[1]) if element else 0,
            called=_called(opcode, attributes),
            declared=_declared(attributes),
            attributes=attributes,
            is_root=head.startswith("ROOT "),
        )


def _called(opcode: str, attributes: str) -> tuple[str, ...]:
    keys = "calls|condition|body|true_computation|false_computation|branch_computations"
    if opcode in ("call", "call-start"):
        keys += "|to_apply"  # elsewhere the arithmetic of a reduction
    if opcode == "custom-call-start":
        keys += "|called_computations"  # a TPU's other cores run it at the same time
    found = re.findall(rf"\b(?:{keys})=(?:%([^\s,}}]+)|\{{([^}}]*)\}})", attributes)
    return tuple(name for one, several in found for name in ([one] if one else re.findall(r"%([^\s,}]+)", several)))


def _declared(attributes: str) -> dict[Index, tuple[int, Index]]:
    start = attributes.find("output_to_operand_aliasing={")
    if start < 0:
        return {}
    start = attributes.index("{", start)
    pairs = attributes[start : _closing(attributes, start)]
    found = re.findall(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}", pairs)
    return {_index(out): (int(operand), _index(leaf)) for out, operand, leaf in found}


def _index(text: str) -> Index:
    return tuple(int(number) for number in text.split(",") if number.strip())


@dataclass(frozen=True)
class Computation:
    """Instructions by name, in the order in which they run."""

    name: str
    instructions: dict[str, Instruction]

    @property
    def root(self) -> Instruction:
        return next(i for i in reversed(self.instructions.values()) if i.is_root)


def _joined(lines: dict[str, Instruction]) -> dict[str, Instruction]:
    """With each `X-start`, `X-update` and `X-done` as one X, in the place and with the name of the last."""
    joined, started = dict[str, Instruction](), set[str]()
    for instruction in lines.values():
        if instruction.opcode.endswith("-done") and instruction.operands:
            start, added = lines[instruction.operands[0]], tuple[str, ...]()
            while start.opcode.endswith("-update"):  # it may bring the operands
                started.add(start.name)
                start, added = lines[start.operands[0]], (*start.operands[1:], *added)
            started.add(start.name)
            inner = (1,) if any(index[:1] == (1,) for index in start.shape) else ()  # (operands, results, ...)
            declared = {out[len(inner) :]: at for out, at in start.declared.items() if out[: len(inner)] == inner}
            opcode = start.opcode.removesuffix("-start")
            instruction = replace(
                start,
                name=instruction.name,
                opcode="call" if start.called and opcode != "fusion" else opcode,
                shape=instruction.shape,
                operands=start.operands + added,
                declared=declared,
                is_root=instruction.is_root,
            )
        joined[instruction.name] = instruction
    return {name: instruction for name, instruction in joined.items() if name not in started}


class Module:
    """A program.

    Args:
      text: `jax.stages.Compiled.as_text()`.
      on_tpu: the memory space 1 is on the chip; on GPUs it is main memory that others can reach.
    """

    def __init__(self, text: str, *, on_tpu: bool):
        self._on_tpu = on_tpu
        self._computations: dict[str, Computation] = {}
        self._entry = ""
        for header, body in re.findall(r"^((?:ENTRY )?%\S+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL):
            name = header.removeprefix("ENTRY ").removeprefix("%")
            lines = [Instruction.parse(line) for line in body.splitlines() if line.strip()]
            self._computations[name] = Computation(name, _joined({line.name: line for line in lines}))
            if header.startswith("ENTRY "):
                self._entry = name
        if not self._entry:
            raise ValueError("this text is no HLO module: it has no ENTRY computation")

    def collectives(self) -> tuple[Collective, ...]:
        """By kind and shape, in order of their first appearance."""
        found: Counter[tuple[str, str, int, bool]] = Counter()
        always = {computation.name for computation in self._reached(into_fusions=True, into_branches=False)}
        for computation in self._reached(into_fusions=True):
            for instruction in computation.instructions.values():
                # Without its `-done` it stands in a fusion of its own; its shape is (operands, results, ...).
                kind = instruction.opcode.removesuffix("-start")
                if kind not in COLLECTIVES:
                    continue
                outcome = instruction.shape
                if kind != instruction.opcode:
                    outcome = {i: a for i, a in outcome.items() if i[:1] == (1,)} or outcome
                if computation.name.startswith("all-reduce-scatter"):  # of TPUs: it keeps a slice
                    kind, outcome = "reduce-scatter", computation.root.shape
                inputs = [a for name in instruction.operands for a in computation.instructions[name].shape.values()]
                size = max(sum(a.num_bytes for a in arrays) for arrays in (outcome.values(), inputs))
                found[kind, _shown(outcome), size, computation.name not in always] += 1
        return tuple(Collective(*what[:3], count, what[3]) for what, count in found.items())

    def custom_calls(self) -> tuple[CustomCall, ...]:
        """In order of appearance, those inside fusions too."""
        return tuple(
            CustomCall(
                name=instruction.name,
                target=re.search(r'custom_call_target="([^"]*)"', instruction.attributes)[1],  # type: ignore[index]
                operands=tuple(_shown(computation.instructions[name].shape) for name in instruction.operands),
                results=tuple(str(array) for array in instruction.shape.values()),
            )
            for computation in self._reached(into_fusions=True)
            for instruction in computation.instructions.values()
            if instruction.opcode == "custom-call"
        )

    def results(self) -> tuple[Result, ...]:
        """Everything that the program writes to memory, see the top of this file."""
        outputs = self._outputs()
        return tuple(
            Result(
                name=instruction.name + (f"{{{','.join(map(str, index))}}}" if index else ""),
                opcode=instruction.opcode,
                computation=computation.name,
                shape=str(array),
                bytes=array.num_bytes,
                memory=self._memory(array),
                output=(computation.name, instruction.name, index) in outputs,
            )
            for computation in self._reached(into_fusions=False)
            for instruction in computation.instructions.values()
            if instruction.opcode not in _VIEWS
            for index, array in instruction.shape.items()
            if index not in self._aliases(instruction)
        )

    def _memory(self, array: Array) -> str:
        if array.space == _HOST_MEMORY:
            return "host"
        return "on-chip" if self._on_tpu and array.space else "main"

    def _reached(self, *, into_fusions: bool, into_branches: bool = True) -> list[Computation]:
        """Computations that the entry runs, itself first."""
        order, waiting = dict[str, None](), [self._entry]
        while waiting:
            name = waiting.pop(0)
            if name not in order:
                order[name] = None
                for instruction in self._computations[name].instructions.values():
                    if instruction.opcode == "fusion" and not into_fusions:
                        continue
                    if instruction.opcode == "conditional" and not into_branches:
                        continue
                    waiting += instruction.called
        return [self._computations[name] for name in order]

    def _aliases(self, instruction: Instruction) -> dict[Index, tuple[str, Index]]:
        """Leaves of the result that lie in an operand: leaf -> operand and leaf of it."""
        opcode, operands = instruction.opcode, instruction.operands
        aliases = {out: (operands[at], leaf) for out, (at, leaf) in instruction.declared.items()}
        if opcode in ("dynamic-update-slice", "scatter"):
            aliases |= {index: (operands[index[0] if index else 0], ()) for index in instruction.shape}
        elif opcode == "ragged-all-to-all":
            aliases[()] = (operands[1], ())
        elif opcode == "fusion":
            found = ((index, self._updated(instruction, index)) for index in instruction.shape)
            aliases |= {index: (operands[place[0]], place[1]) for index, place in found if place}
        return aliases

    def _updated(self, fusion: Instruction, index: Index) -> tuple[int, Index] | None:
        """The parameter of a fusion, and leaf of it, that the leaf `index` of its result updates in place."""
        inside = self._computations[fusion.called[0]]
        instruction, updates = inside.root, False
        while instruction.opcode != "parameter":
            aliases = self._aliases(instruction)
            if index in aliases:
                updates = True
                name, index = aliases[index]
            elif instruction.opcode == "tuple":
                name, index = instruction.operands[index[0]], index[1:]
            elif instruction.opcode == "get-tuple-element":
                name, index = instruction.operands[0], (instruction.number, *index)
            elif instruction.opcode == "bitcast":
                name = instruction.operands[0]
            else:
                return None
            instruction = inside.instructions[name]
        return (instruction.number, index) if updates else None

    def _outputs(self) -> set[Place]:
        """Where the memory that the program returns is written."""
        root = self._computations[self._entry].root
        waiting: list[Place] = [(self._entry, root.name, index) for index in root.shape]
        seen: set[Place] = set()
        while waiting:
            place = waiting.pop()
            if place not in seen:
                seen.add(place)
                waiting += self._behind(*place)
        return seen

    def _behind(self, name: str, instruction_name: str, index: Index) -> list[Place]:
        """The places that this one shares its memory with, and takes its value from."""
        instruction = self._computations[name].instructions[instruction_name]
        opcode, operands = instruction.opcode, instruction.operands
        aliases = self._aliases(instruction)
        if index in aliases:
            return [(name, *aliases[index])]
        if opcode == "tuple":
            return [(name, operands[index[0]], index[1:])]
        if opcode == "get-tuple-element":
            return [(name, operands[0], (instruction.number, *index))]
        if opcode in _SAME_BYTES:
            return [(name, operands[0], index)]
        if opcode in _RUNS_OTHERS:
            roots = [(called, self._computations[called].root) for called in instruction.called]
            return [(called, root.name, index) for called, root in roots if index in root.shape]  # no loop's condition
        if opcode == "parameter":
            return [(caller, operand, index) for caller, operand in self._passed.get((name, instruction.number), [])]
        return []

    @cached_property
    def _passed(self) -> dict[tuple[str, int], list[tuple[str, str]]]:
        """What a parameter of a called computation is: the calling computations and their operands."""
        passed: dict[tuple[str, int], list[tuple[str, str]]] = {}
        for computation in self._reached(into_fusions=False):
            for instruction in computation.instructions.values():
                for at, called in enumerate(instruction.called):
                    operands = instruction.operands
                    if instruction.opcode == "conditional":  # operand 0 chooses; each branch has one operand
                        operands = operands[at + 1 : at + 2]
                    for number, operand in enumerate(operands):
                        passed.setdefault((called, number), []).append((computation.name, operand))
        return passed


def _shown(shape: dict[Index, Array]) -> str:
    text = ", ".join(map(str, shape.values()))
    return text if len(shape) == 1 else f"({text})"
