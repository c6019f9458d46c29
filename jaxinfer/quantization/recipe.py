"""Which matrices are kept at fewer bits, and how: from settings, from what a checkpoint has, and from the device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from jaxinfer.errors import InvalidArgumentError
from jaxinfer.quantization.tensor import Scheme
from pallas_kernels.quantized_matmul import GROUP_SIZES

FLOAT = "float"
# What `quantize` makes of a matrix in floats; "int4:64" is int4 in groups of 64.
KINDS: Mapping[str, Scheme] = {
    "int8": Scheme("int8"),
    "w8a8": Scheme("int8", activations="int8"),
    "int4": Scheme("int4", 128, "bfloat16", "zeros"),
    "fp8": Scheme("float8_e4m3fn"),
}
# By pattern: what stays wide unless a rule of the user's says otherwise. Vectors always do.
WIDE = ("embed", "head")


def parse_kind(name: str, kind: str) -> Scheme | None:
    """A key of `KINDS`, perhaps with a group size, as "int4:64"; None for "float".

    Raises:
      InvalidArgumentError: unknown; the message calls it `name`.
    """
    base, colon, size = kind.partition(":")
    if not colon and (kind in KINDS or kind == FLOAT):
        return KINDS.get(kind)
    if base == "int4" and size in map(str, GROUP_SIZES):
        return replace(KINDS[base], group=int(size))
    sizes = ", ".join(map(str, GROUP_SIZES))
    raise InvalidArgumentError(name, kind, f"one of {', '.join(KINDS)}, {FLOAT}, or int4:GROUP with groups of {sizes}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to do with a model's matrices.

    Attributes:
      kind: as `parse_kind` has it; None keeps what the checkpoint has.
      rules: (pattern, kind), the first that fits; patterns are of `fnmatch`, over names such as "layers.0.qkv.q".
      packed: whether quantized matrices stay so in memory. None: unless the device is a CPU, which multiplies by all
        but int8 by channel more slowly than by floats. Nothing is multiplied in integers that was not asked to be:
        rounded activations cost a model more than int8 weights do (docs/quantization.md).
    """

    kind: str | None = None
    rules: tuple[tuple[str, str], ...] = ()
    packed: bool | None = None

    @classmethod
    def parse(cls, kind: str | None, rules: Sequence[str] = (), packed: bool | None = None) -> Recipe:
        """
        Args:
          rules: each "PATTERN=KIND".

        Raises:
          InvalidArgumentError: something unknown, and what there is.
        """
        if kind is not None:
            parse_kind("quantize", kind)
        parsed = []
        for rule in rules:
            pattern, _, what = rule.rpartition("=")
            if not pattern:
                raise InvalidArgumentError("quantize_rules", rule, "PATTERN=KIND, as layers.0.*=int8")
            parse_kind("quantize_rules", what)
            parsed.append((pattern, what))
        return cls(kind, tuple(parsed), packed)

    def choose(
        self, matrices: Mapping[str, tuple[int, int]], theirs: Mapping[str, Scheme], platform: str, value_bytes: int
    ) -> Choice:
        """
        Args:
          matrices: shape [out, in] of every matrix, by name.
          theirs: schemes of those that the checkpoint has quantized.
          platform: that of the devices, as `dispatch.Device` has it.
          value_bytes: of a float.

        Raises:
          InvalidArgumentError: a rule fits no matrix.
        """
        for pattern, _ in self.rules:
            if not any(fnmatchcase(name, pattern) for name in matrices):
                raise InvalidArgumentError(
                    "quantize_rules", pattern, f"a pattern of a matrix: {', '.join(_ends(matrices))}"
                )
        schemes, rounded = dict[str, Scheme](), dict[str, Scheme]()
        expanded = list[str]()
        for name in matrices:
            scheme = self._scheme(name, theirs.get(name))
            if scheme is None:
                if name in theirs:
                    expanded.append(name)
            elif self._packs(scheme, platform):
                schemes[name] = scheme
            elif scheme != theirs.get(name):
                rounded[name] = scheme
            else:
                expanded.append(name)
        return Choice(schemes, rounded, _notes(matrices, schemes, rounded, expanded, platform, value_bytes))

    def _scheme(self, name: str, theirs: Scheme | None) -> Scheme | None:
        kind = next((what for pattern, what in self.rules if fnmatchcase(name, pattern)), None)
        if kind is None:
            if any(fnmatchcase(name, pattern) for pattern in WIDE):
                return None
            kind = self.kind
        if kind is None:
            return theirs
        return parse_kind("quantize", kind)

    def _packs(self, scheme: Scheme, platform: str) -> bool:
        if self.packed is not None:
            return self.packed
        return platform != "cpu" or (scheme.values, scheme.group) == ("int8", None)


@dataclass(frozen=True, slots=True)
class Choice:
    """What comes of a recipe.

    Attributes:
      schemes: of the matrices that are quantized in memory, by name.
      rounded: of those that are not, but have the numbers of quantized ones.
      notes: for people.
    """

    schemes: Mapping[str, Scheme]
    rounded: Mapping[str, Scheme]
    notes: tuple[str, ...]


def _notes(
    matrices: Mapping[str, tuple[int, int]],
    schemes: Mapping[str, Scheme],
    rounded: Mapping[str, Scheme],
    expanded: Sequence[str],
    platform: str,
    value_bytes: int,
) -> tuple[str, ...]:
    notes, why = [], ", which the CPU multiplies faster" if platform == "cpu" else ""
    for scheme, count in Counter(schemes.values()).most_common():
        names = [name for name in matrices if schemes.get(name) == scheme]
        size = sum(matrices[name][0] * matrices[name][1] for name in names)
        packed = sum(scheme.nbytes(*matrices[name]) for name in names)
        notes.append(f"{count} matrices are {scheme}, {_mb(packed)} instead of {_mb(size * value_bytes)}")
    for scheme, count in Counter(rounded.values()).most_common():
        notes.append(f"{count} matrices are rounded to {scheme} and kept in floats{why}")
    if kept := [name for name in expanded if name not in WIDE]:
        notes.append(f"{len(kept)} matrices that the checkpoint has quantized are kept in floats{why}")
    if wide := [name for name in expanded if name in WIDE]:
        notes.append(f"{', '.join(wide)}: quantized in the checkpoint, kept in floats")
    return tuple(notes)


def _ends(matrices: Mapping[str, tuple[int, int]]) -> list[str]:
    """Their names, layers alike as one."""
    return list(
        dict.fromkeys("layers.*." + name.split(".", 2)[2] if name.startswith("layers.") else name for name in matrices)
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:.0f} MB"
