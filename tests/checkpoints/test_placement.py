"""Weights to their places: faults found before a byte is read, and little memory on the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_checkpoints import Tiny, write_gguf, write_hf_folder

from jaxinfer.checkpoints.placement import Weights, load_weights
from jaxinfer.checkpoints.reader import TensorInfo
from jaxinfer.errors import CheckpointError, UnsupportedError
from jaxinfer.models.family import NameMap, Target
from jaxinfer.models.layers import Part, WeightSpec

SPECS = {
    "norm": WeightSpec((4,), jnp.float32, (None,)),
    "qkv": WeightSpec((16, 4), jnp.bfloat16, (None, None), (Part("q", 8), Part("k", 4), Part("v", 4))),
    "whole": WeightSpec((6, 4), jnp.bfloat16, (None, None), (Part("gate", 3), Part("up", 3))),
}
NAMES = NameMap(
    {
        "the.v": Target("qkv", "v"),
        "the.k": Target("qkv", "k", interleaved=4),
        "the.q": Target("qkv", "q", interleaved=4),
        "the.norm": Target("norm"),
        "the.whole": Target("whole"),
    },
    ignored=frozenset({"may.be"}),
)


class FakeReader:
    path = Path("fake")
    dtypes = frozenset({"F32"})
    chunked = None

    def __init__(self, **changes):
        rng = np.random.default_rng(0)
        shapes = {"the.v": (4, 4), "the.k": (4, 4), "the.q": (8, 4), "the.norm": (4,), "the.whole": (6, 4)}
        self.arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
        self.tensors = {name: TensorInfo(shape, "F32") for name, shape in shapes.items()}
        self.tensors |= {name.replace("__", "."): info for name, info in changes.items() if info}
        for name in [name.replace("__", ".") for name, info in changes.items() if not info]:
            del self.tensors[name]
        self.reads, self.released = [], []

    def read(self, name, index=()):
        self.reads.append(name)
        return self.arrays[name][index]

    def chunks(self, name):
        return self.chunked

    def release(self, name):
        self.released.append(name)


def load(reader, progress=None):
    """Onto one device."""
    with Weights(reader, NAMES, SPECS) as weights:
        default = jax.device_put(0).sharding
        loaded = load_weights(weights, {path: [default] for path in SPECS}, progress)
    return {path: array for path, (array,) in loaded.items()}


def test_parts_go_to_their_rows_in_the_dtype_asked_for():
    reader = FakeReader(may__be=TensorInfo((99,), "I64"))
    weights = load(reader)
    assert {path: (w.shape, w.dtype) for path, w in weights.items()} == {
        path: (spec.shape, spec.dtype) for path, spec in SPECS.items()
    }
    rotate_half = [0, 2, 1, 3]  # of a head of four: pairs (0, 1), (2, 3) become (0, 2), (1, 3)
    q, k, v = (reader.arrays[f"the.{part}"] for part in "qkv")
    q = q[[*rotate_half, *(4 + row for row in rotate_half)]]
    expected = np.concatenate([q, k[rotate_half], v]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(weights["qkv"], expected)
    np.testing.assert_array_equal(weights["whole"], reader.arrays["the.whole"].astype(jnp.bfloat16))
    np.testing.assert_array_equal(weights["norm"], reader.arrays["the.norm"])
    assert sorted(reader.released) == sorted(NAMES.targets)


def test_many_blocks_make_the_same_weight(monkeypatch):
    whole = load(FakeReader())
    monkeypatch.setattr("jaxinfer.checkpoints.placement._BLOCK_ELEMENTS", 1)
    in_blocks = load(FakeReader())
    for path in SPECS:
        np.testing.assert_array_equal(whole[path], in_blocks[path])


# As four shards have it: one KV head for two of them, and rows and columns that are padding.
SHARDED = {
    "qkv": WeightSpec(
        *((24, 4), jnp.float32, (None, None)), (Part("q", 8), Part("k", 4, 2), Part("v", 4, 2)), 4, (16, 4)
    ),
    "whole": WeightSpec((8, 6), jnp.float32, (None, None), (), 1, (6, 4)),
}


@pytest.mark.parametrize("chunked", [None, (3, 3), (2, 5), (100, 1)])
def test_any_slice_of_a_weight_is_read_by_itself(chunked):
    reader = FakeReader()
    names = NameMap({name: Target(to.path, to.part) for name, to in NAMES.targets.items() if name != "the.norm"})
    del reader.tensors["the.norm"]
    q, k, v, unpadded = (reader.arrays[f"the.{name}"] for name in ("q", "k", "v", "whole"))
    padded = np.zeros((8, 6), np.float32)
    padded[:6, :4] = unpadded
    pairs = [slice(2 * i, 2 * i + 2) for i in range(4)]
    wholes = {
        "qkv": np.concatenate([part for i in range(4) for part in (q[pairs[i]], k[pairs[i // 2]], v[pairs[i // 2]])]),
        "whole": padded,
    }
    reader.chunked = chunked
    rng = np.random.default_rng(1)
    with Weights(reader, names, SHARDED) as weights:
        for path, whole in wholes.items():
            for _ in range(50):
                starts = [int(rng.integers(0, size)) for size in whole.shape]
                ends = [int(rng.integers(start + 1, size + 1)) for start, size in zip(starts, whole.shape, strict=True)]
                index = tuple(map(slice, starts, ends))
                np.testing.assert_array_equal(weights.read(path, index), whole[index])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"the__k": None}, r"the\.k is missing \(expected shape \[4, 4\]\)"),
        ({"the__new": TensorInfo((2, 3), "F32")}, r"the\.new \(\[2, 3\]\) is not a tensor of this model"),
        ({"the__q": TensorInfo((4, 8), "F32")}, r"the\.q has shape \[4, 8\], expected \[8, 4\]"),
        ({"the__norm": TensorInfo((4, 1), "F32")}, r"the\.norm has shape \[4, 1\], expected \[4\]"),
        ({"the__k": None, "old__k": TensorInfo((4, 4), "F32")}, r"the\.k is missing.*; old\.k "),
        ({f"x__{i}": TensorInfo((1,), "F32") for i in range(20)}, r"x\.0 .*and 12 more"),
    ],
)
def test_a_misfit_names_tensor_and_shapes_before_any_byte_is_read(changes, said):
    reader = FakeReader(**changes)
    with pytest.raises(CheckpointError, match=said):
        load(reader)
    assert not reader.reads


def test_an_unreadable_dtype_is_named_before_any_byte_is_read():
    reader = FakeReader(the__q=TensorInfo((8, 4), "F8_E4M3"))
    with pytest.raises(UnsupportedError, match=r"the\.q is F8_E4M3; readable: F32"):
        load(reader)
    assert not reader.reads


def test_an_error_while_reading_comes_out():
    reader = FakeReader()
    del reader.arrays["the.k"]
    with pytest.raises(KeyError):
        load(reader)


def test_progress_ends_at_the_bytes_of_the_weights():
    seen = []
    weights = load(FakeReader(), lambda done, total: seen.append((done, total)))
    total = sum(weight.nbytes for weight in weights.values())
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


MEASURE = """
import sys, threading
from pathlib import Path
import jax, jax.numpy as jnp
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.source import resolve

def memory(kind):
    line = next(line for line in open("/proc/self/status") if line.startswith(kind))
    return int(line.split()[1]) * 1024

checkpoint = open_checkpoint(resolve(sys.argv[1], cache_dir=Path("unused")))
jax.device_put(jnp.ones(4)).block_until_ready()
import jaxinfer.models.decoder
kinds = ("RssAnon:", "RssFile:")
before = {kind: memory(kind) for kind in kinds}
peak = dict(before)
stop = threading.Event()

def sample():
    while not stop.wait(0.001):
        for kind in kinds:
            peak[kind] = max(peak[kind], memory(kind))

thread = threading.Thread(target=sample)
thread.start()
weights = checkpoint.load(dtype=sys.argv[2])
stop.set()
thread.join()
sizes = [weight.nbytes for weight in weights.values()]
print(sum(sizes), max(sizes), *(peak[kind] - before[kind] for kind in kinds))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Makes a model of many like tensors, 13 MB a layer in float32, once a kind of file."""
    made = {}

    def make(kind: str, layers: int) -> Path:
        if kind not in made:
            tiny = Tiny(0, hidden=512, heads=8, kv_heads=8, intermediate=1536, layers=layers)
            made[kind] = tmp_path_factory.mktemp(kind) / ("" if kind == "hf" else "large.gguf")
            if kind == "hf":
                write_hf_folder(made[kind], tiny)
            else:
                write_gguf(made[kind], tiny, kind)
        return made[kind]

    return make


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    ("kind", "layers", "dtype", "least"),
    [("hf", 22, "float32", 300e6), ("hf", 22, "bfloat16", 150e6), ("Q4_K", 8, "float32", 100e6)],
)
def test_peak_memory_is_the_model_and_little_more(large, kind, layers, dtype, least):
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(large(kind, layers)), dtype],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=120,
    )
    total, largest, anonymous, file = map(int, done.stdout.split())
    assert total > least
    megabyte = 1 << 20
    # The model, the weight being made and the one on its way, and blocks under conversion.
    assert anonymous < total + 2 * largest + 24 * megabyte
    # Pages of the file leave once used, and those of libraries come in.
    assert file < 2 * largest + 24 * megabyte
