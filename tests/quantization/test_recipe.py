"""Which matrices are quantized, and how: by settings, by the checkpoint, by the device."""

from __future__ import annotations

import pytest

from jaxinfer.errors import InvalidArgumentError
from jaxinfer.quantization.recipe import KINDS, Recipe, parse_kind
from jaxinfer.quantization.tensor import Scheme

MATRICES = {"embed": (99, 64), "layers.0.qkv.q": (64, 64), "layers.0.down": (64, 128), "layers.1.down": (64, 128),
            "head": (99, 64)}  # fmt: skip
LAYERS = [name for name in MATRICES if name.startswith("layers.")]
Q4_1 = Scheme("uint4", 32, "float16", "minima")


def choose(kind=None, rules=(), packed=None, theirs=None, platform="gpu"):
    return Recipe.parse(kind, rules, packed).choose(MATRICES, theirs or {}, platform, 2)


def test_floats_stay_floats():
    choice = choose()
    assert (choice.schemes, choice.rounded, choice.notes) == ({}, {}, ())


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_of_layers_are_quantized_and_the_vocabularys_are_not(kind):
    choice = choose(kind)
    assert choice.schemes == dict.fromkeys(LAYERS, KINDS[kind])
    assert choice.notes[0].startswith("3 matrices are int") or kind == "fp8"


def test_groups_are_of_the_size_that_is_named():
    assert choose("int4:32").schemes["layers.0.down"].group == 32
    assert parse_kind("quantize", "float") is None


def test_the_first_rule_that_fits_counts():
    choice = choose("int4", ("layers.0.*=int8", "layers.*=fp8", "*.down=float", "head=w8a8"))
    assert {name: scheme.values for name, scheme in choice.schemes.items()} == {
        "layers.0.qkv.q": "int8", "layers.0.down": "int8", "layers.1.down": "float8_e4m3fn", "head": "int8",
    }  # fmt: skip
    assert set(choose("int4", ("*.down=float",)).schemes) == {"layers.0.qkv.q"}


def test_what_a_checkpoint_has_is_kept_but_for_the_vocabulary():
    theirs = dict.fromkeys(MATRICES, Q4_1)
    choice = choose(theirs=theirs)
    assert choice.schemes == dict.fromkeys(LAYERS, Q4_1)
    assert choice.notes[-1] == "embed, head: quantized in the checkpoint, kept in floats"
    assert choose("float", theirs=theirs).schemes == {}
    assert choose("int8", theirs=theirs).schemes == dict.fromkeys(LAYERS, KINDS["int8"])


def test_a_cpu_takes_what_it_multiplies_fastest_and_says_so():
    for kind, stays in (("int8", True), ("w8a8", True), ("int4", False), ("fp8", False)):
        choice, of_layers = choose(kind, platform="cpu"), dict.fromkeys(LAYERS, KINDS[kind])
        assert (choice.schemes, choice.rounded) == ((of_layers, {}) if stays else ({}, of_layers))
        assert ("which the CPU multiplies faster" in choice.notes[0]) == (not stays)
        assert choose(kind, packed=True, platform="cpu").schemes == of_layers
        assert choose(kind, packed=False, platform="cpu").rounded == of_layers
    theirs = choose(theirs={"layers.0.down": Q4_1}, platform="cpu")
    assert (theirs.schemes, theirs.rounded) == ({}, {})
    assert "1 matrices that the checkpoint has quantized are kept in floats, which the CPU" in theirs.notes[0]


@pytest.mark.parametrize(
    ("kind", "rules", "said"),
    [
        ("int3", (), "quantize = 'int3'.*int8, w8a8, int4, fp8, float, or int4:GROUP"),
        ("int4:48", (), "groups of 16, 32, 64, 128"),
        ("int8:64", (), "int8:64"),
        (None, ("layers.*",), "PATTERN=KIND"),
        (None, ("layers.*=int5",), "quantize_rules = 'int5'"),
        (None, ("blk.*=int8",), r"a pattern of a matrix: embed, layers\.\*\.qkv\.q, layers\.\*\.down, head"),
    ],
)
def test_what_is_unknown_is_refused(kind, rules, said):
    with pytest.raises(InvalidArgumentError, match=said):
        choose(kind, rules)
