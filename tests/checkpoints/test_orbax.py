"""Converted checkpoints: the same model on any mesh, whole or refused, and little memory on the way."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import filelock
import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from tiny_checkpoints import VARIANTS, Tiny, write_gguf, write_hf_folder

from jaxinfer.checkpoints import convert as converting
from jaxinfer.checkpoints.checkpoint import Checkpoint, open_checkpoint
from jaxinfer.checkpoints.convert import convert
from jaxinfer.checkpoints.source import resolve
from jaxinfer.errors import CheckpointError, InvalidArgumentError, ModelNotFoundError, UnsupportedError
from jaxinfer.llm import LLM
from jaxinfer.models.decoder import Stage, decoder_structure
from jaxinfer.models.partition import Partition
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.types import SamplingParams
from sharding.mesh import MeshConfig

ROOT = Path(__file__).parents[2]


def opened(path: Path) -> Checkpoint:
    return open_checkpoint(resolve(str(path), cache_dir=Path("unused"), offline=True))


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer:
    if checkpoint.tokenizer_metadata is not None:
        return Tokenizer.from_gguf(checkpoint.tokenizer_metadata)
    assert checkpoint.folder is not None
    return Tokenizer.from_folder(checkpoint.folder)


def check_same(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert (ours.config, ours.dtype) == (theirs.config, theirs.dtype)
    expected = theirs.load()
    loaded = ours.load()
    assert loaded.keys() == expected.keys()
    for path, weight in loaded.items():
        assert weight.dtype == expected[path].dtype
        np.testing.assert_array_equal(weight, expected[path], err_msg=path)
    one, other = tokenizer_of(ours), tokenizer_of(theirs)
    for name in ("vocab_size", "bos_token_id", "eos_token_ids", "special_tokens", "chat_template"):
        assert getattr(one, name) == getattr(other, name)
    assert one.encode("the quick brown fox") == other.encode("the quick brown fox")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "tiny"
    write_hf_folder(folder, VARIANTS["llama3"])
    return folder


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    """Not to be changed: see `copied`."""
    folder = tmp_path_factory.mktemp("converted") / "tiny"
    convert(opened(source), folder)
    return folder


@pytest.fixture
def copied(converted, tmp_path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "tiny"))


# ---- The same model


@pytest.mark.parametrize("variant", ["llama3", "smollm2", "biases", "sharded", "linear_rope"])
def test_a_folder_comes_back(tmp_path, variant):
    write_hf_folder(tmp_path / "hf", VARIANTS[variant])
    seen: list[tuple[int, int]] = []
    convert(
        opened(tmp_path / "hf"), tmp_path / "new" / "orbax", progress=lambda done, total: seen.append((done, total))
    )
    shutil.move(tmp_path / "hf", tmp_path / "elsewhere")  # the new folder is enough
    ours = opened(tmp_path / "new" / "orbax")
    assert (ours.source.kind, ours.source.name) == ("orbax", "orbax")
    check_same(ours, opened(tmp_path / "elsewhere"))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (sum(weight.nbytes for weight in ours.load().values()),) * 2
    assert sorted(os.listdir(tmp_path / "new" / "orbax")) == ["jaxinfer.json", "tokenizer", "weights"]


@pytest.mark.parametrize("dtype", ["F32", "Q4_K"])
def test_a_gguf_comes_back(tmp_path, dtype):
    write_gguf(tmp_path / "tiny.gguf", VARIANTS["blocks"], dtype)
    convert(opened(tmp_path / "tiny.gguf"), tmp_path / "orbax")
    check_same(opened(tmp_path / "orbax"), opened(tmp_path / "tiny.gguf"))


def test_a_converted_folder_is_converted_again_in_another_dtype(source, converted, tmp_path):
    convert(opened(converted), tmp_path / "f16", dtype=np.dtype(np.float16))
    ours = opened(tmp_path / "f16")
    assert ours.dtype == np.float16
    expected = opened(source).load()
    for path, weight in ours.load().items():
        kind = np.float32 if "norm" in path else np.float16
        assert weight.dtype == kind
        np.testing.assert_array_equal(weight, np.asarray(expected[path]).astype(kind), err_msg=path)
    assert ours.load(dtype=np.float32)["embed"].dtype == np.float32


def test_orbax_itself_restores_the_arrays(source, converted):
    restored = ocp.StandardCheckpointer().restore(converted / "weights")
    qkv = np.concatenate([restored["layers"]["1"]["qkv"][part] for part in "qkv"])
    np.testing.assert_array_equal(qkv, opened(source).load()["layers.1.qkv"])


def test_large_arrays_lie_in_chunks_and_are_written_in_slabs(tmp_path, monkeypatch):
    """Of rows that no halving divides, too."""
    monkeypatch.setattr(converting, "_CHUNK_ROWS", 16)
    monkeypatch.setattr(converting, "_CHUNK_COLUMNS", 20)
    monkeypatch.setattr(converting, "_SLAB_BYTES", 6000)
    write_hf_folder(tmp_path / "hf", Tiny(0, intermediate=75))
    steps = []
    convert(opened(tmp_path / "hf"), tmp_path / "orbax", progress=lambda done, total: steps.append(done))
    reader = opened(tmp_path / "orbax")._reader
    assert reader.chunks("layers.0.gate_up.up") == (16, 12)
    assert reader.chunks("embed") == (12, 12)
    assert np.diff(steps).max() <= 6000 + 16 * 48 * 4
    check_same(opened(tmp_path / "orbax"), opened(tmp_path / "hf"))


MESHES = ("tensor=1", "tensor=2", "tensor=4", "stage=2", "data=2,tensor=2", "stage=2,tensor=4")


@pytest.fixture(scope="module")
def uneven(tmp_path_factory) -> tuple[Path, Path]:
    """Two KV heads, which four shards hold twice, and 82 features, which they pad; as a folder, and converted."""
    folder = tmp_path_factory.mktemp("uneven")
    write_hf_folder(folder / "hf", Tiny(11, intermediate=82, config={"max_position_embeddings": 64}))
    convert(opened(folder / "hf"), folder / "orbax")
    return folder / "hf", folder / "orbax"


def load_on(checkpoint: Checkpoint, mesh: MeshConfig) -> dict[str, list[jax.Array]]:
    """Onto every replica and stage of a mesh; stages have as many layers each."""
    layers = len(checkpoint.config.layers)
    partition = Partition.of(checkpoint.config, mesh.rules())
    specs, homes = {}, {}
    for stages in mesh.build():
        for number, submesh in enumerate(stages):
            stage = Stage(layers * number // mesh.stage, layers * (number + 1) // mesh.stage, layers)
            for path, spec in decoder_structure(checkpoint.config, checkpoint.dtype, partition, stage).specs.items():
                specs[path] = spec
                homes.setdefault(path, []).append(NamedSharding(submesh, mesh.rules().spec(spec.axes)))
    return checkpoint.load_sharded(specs, homes)


@pytest.mark.parametrize("mesh", MESHES)
def test_the_same_shards_on_any_mesh(uneven, mesh):
    loaded = [load_on(opened(folder), MeshConfig.parse(mesh)) for folder in uneven]
    for path, arrays in loaded[0].items():
        for ours, theirs in zip(loaded[1][path], arrays, strict=True):
            assert ours.sharding == theirs.sharding
            for one, other in zip(ours.addressable_shards, theirs.addressable_shards, strict=True):
                assert one.device == other.device
                np.testing.assert_array_equal(one.data, other.data)


@pytest.mark.slow
def test_the_same_tokens_on_meshes(uneven, cache_dir):
    def tokens(folder: Path, mesh: str) -> list[list[int]]:
        limits = {"max_num_seqs": 4, "max_num_batched_tokens": 8, "page_size": 4, "max_model_len": 64}
        llm = LLM(str(folder), cache_dir=cache_dir, mesh=mesh, dtype="float32", **limits)
        outputs = llm.generate(["the quick brown fox", "what is"], SamplingParams(max_tokens=12, temperature=0))
        llm.close()
        return [list(output.outputs[0].token_ids) for output in outputs]

    hf, orbax = uneven
    expected = tokens(hf, "tensor=1")
    assert len(expected) == 2
    for mesh in ("tensor=1", "tensor=4", "stage=2"):  # the others have the same shards, which is tested above
        assert tokens(orbax, mesh) == expected, mesh


def run(script: str, *arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with eight devices."""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        text=True,
        check=check,
        timeout=500,
    )


# ---- Memory

MEASURE = """
import math, sys, threading
from pathlib import Path
import jax, numpy as np
from jax.sharding import NamedSharding
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.convert import convert
from jaxinfer.checkpoints.source import resolve
from jaxinfer.models.decoder import decoder_structure
from jaxinfer.models.partition import Partition
from sharding.mesh import MeshConfig

def memory():
    line = next(line for line in open("/proc/self/status") if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024

checkpoint = open_checkpoint(resolve(sys.argv[1], cache_dir=Path("unused")))
config = MeshConfig.parse("tensor=4")
((mesh,),) = config.build()
structure = decoder_structure(checkpoint.config, checkpoint.dtype, Partition.of(checkpoint.config, config.rules()))
rules = structure.partition.rules
shardings = {path: [NamedSharding(mesh, rules.spec(spec.axes))] for path, spec in structure.specs.items()}
jax.device_put(np.ones(4), mesh.devices.flat[3]).block_until_ready()
put, sent = jax.device_put, []
jax.device_put = lambda value, device: sent.append(value.nbytes) or put(value, device)
before = peak = memory()
held = 0
stop = threading.Event()

def sample():
    global peak
    while not stop.wait(0.001):
        peak = max(peak, memory())

def look(done, total):
    global held
    shards = (shard for array in jax.live_arrays() for shard in array.addressable_shards)
    held = max(held, *(shard.data.nbytes for shard in shards))

thread = threading.Thread(target=sample)
thread.start()
if len(sys.argv) > 2:
    convert(checkpoint, Path(sys.argv[2]))
    sizes = [math.prod(spec.shape) * np.dtype(spec.dtype).itemsize for spec in structure.specs.values()]
else:
    weights = checkpoint.load_sharded(structure.specs, shardings, look)
    sizes = [array.nbytes for (array,) in weights.values()]
stop.set()
thread.join()
print(sum(sizes), max(sizes), max(sent, default=0), held, peak - before)
"""
MEGABYTE = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> dict[str, Path]:
    """A model of 13 MB a layer, of each kind, and what converting it took."""
    folder = tmp_path_factory.mktemp("large")
    write_hf_folder(folder / "hf", Tiny(0, hidden=512, heads=8, kv_heads=8, intermediate=3072, layers=12))
    return {kind: folder / kind for kind in ("hf", "orbax")}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_little_memory_on_the_way(large):
    total, largest, _, _, peak = map(int, run(MEASURE, large["hf"], large["orbax"]).stdout.split())
    assert total > 250e6
    # Slabs here are whole parts; one is being read, one written, and Orbax comes in.
    assert peak < 2 * largest + 60 * MEGABYTE
    for kind in ("hf", "orbax"):
        total, largest, sent, held, peak = map(int, run(MEASURE, large[kind]).stdout.split())
        assert total > 250e6
        # No device is sent, or holds, more than its quarter of any weight.
        assert max(sent, held) == largest // 4
        # On a CPU the devices' memory is the host's: the model, the shard on its way, and blocks under conversion.
        assert peak < total + 2 * largest // 4 + 24 * MEGABYTE


# ---- Interrupted writes

KILLED = """
import os, signal, sys
from pathlib import Path
from jaxinfer.checkpoints import convert as converting
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.source import resolve

def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

match sys.argv[3]:
    case "empty":
        converting.filelock.FileLock = die
    case "tokenizer":
        converting._write_tokenizer = die
    case "Orbax commits":
        converting.ocp.PyTreeCheckpointHandler.finalize = die
    case "last":
        os.replace = die
count = int(sys.argv[3]) if sys.argv[3].isdigit() else 1 << 30
calls = iter(range(1 << 30))
converting.convert(
    open_checkpoint(resolve(sys.argv[1], cache_dir=Path("unused"))),
    Path(sys.argv[2]),
    progress=lambda done, total: next(calls) == count and die(),
)
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["empty", "tokenizer", "0", "9", "Orbax commits", "last"])
def test_a_killed_convert_leaves_what_is_refused_and_done_again(source, tmp_path, moment):
    folder = tmp_path / "orbax"
    assert run(KILLED, source, folder, moment, check=False).returncode == -signal.SIGKILL
    with pytest.raises(CheckpointError, match=r"orbax is incomplete: jaxinfer convert was interrupted"):
        opened(folder)
    convert(opened(source), folder)
    check_same(opened(folder), opened(source))
    assert sorted(os.listdir(folder)) == ["jaxinfer.json", "tokenizer", "weights"]


def test_a_failing_convert_leaves_what_is_refused(source, tmp_path, monkeypatch):
    def full(path, text):
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(converting, "_write", full)
    with pytest.raises(CheckpointError, match=r"could not be written: .*No space left.*convert into it again"):
        convert(opened(source), tmp_path / "orbax")
    with pytest.raises(CheckpointError, match="incomplete"):
        opened(tmp_path / "orbax")
    monkeypatch.undo()
    convert(opened(source), tmp_path / "orbax")
    assert opened(tmp_path / "orbax").load()


def test_a_broken_source_is_found_before_anything_is_written(tmp_path):
    weights = write_hf_folder(tmp_path / "hf", VARIANTS["llama2"])
    assert "lm_head.weight" in weights
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config | {"intermediate_size": 81}))
    with pytest.raises(CheckpointError, match=r"gate_proj\.weight has shape"):
        convert(opened(tmp_path / "hf"), tmp_path / "orbax")
    assert not (tmp_path / "orbax").exists()


# ---- Folders that are not converted into


def test_a_folder_with_files_is_left_alone(source, converted, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidArgumentError, match="this one has files"):
        convert(opened(source), tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]
    with pytest.raises(InvalidArgumentError, match="this one has a whole one"):
        convert(opened(source), converted)
    with pytest.raises(InvalidArgumentError, match="a folder"):
        convert(opened(source), tmp_path / "notes.txt")
    check_same(opened(converted), opened(source))


def test_two_converts_into_one_folder(source, tmp_path):
    (tmp_path / "jaxinfer.json.partial").touch()
    with (
        filelock.FileLock(tmp_path / ".convert.lock"),
        pytest.raises(InvalidArgumentError, match="no other convert is writing to"),
    ):
        convert(opened(source), tmp_path)
    convert(opened(source), tmp_path)
    check_same(opened(tmp_path), opened(source))


# ---- Damaged folders, and folders of others


def change(folder: Path, **changes: object) -> None:
    manifest = json.loads((folder / "jaxinfer.json").read_text())
    (folder / "jaxinfer.json").write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"format": 2}, UnsupportedError, r"format 2 is newer than this version reads \(1\); update jaxinfer"),
        ({"format": None}, CheckpointError, "is not of jaxinfer convert: format = None"),
        ({"dtype": "int3"}, CheckpointError, "dtype: int3 is not of type"),
        ({"config": {}}, CheckpointError, "config: has no "),
        ({"config": []}, CheckpointError, r"config: \[\] is not of type ModelConfig"),
        ({"weights": {}}, CheckpointError, "2 layers, but only 0 arrays"),
        ({"weights": {"embed": [{}]}}, CheckpointError, "weights: embed: 0: has no array"),
        (
            {"weights": {"embed": [{"array": "embed.codes", "holds": "int8 codes"}]}},
            UnsupportedError,
            r"array embed\.codes of embed holds int8 codes, which this version does not read",
        ),
        ({"weights": {"embed": [{"array": "embed", "layout": "x"}]}}, UnsupportedError, "has layout, which this"),
        ({"weights": {"embed": [{"array": "embed"}] * 2}}, CheckpointError, "two arrays hold the same"),
        ({"schemes": {"layers.0.o": {"values": "int8"}}}, CheckpointError, "has arrays for values, expected scales, v"),
        ({"schemes": {"layers.0.o": {"values": "int3"}}}, CheckpointError, "o: values: int3 is not of type"),
        ({"schemes": {"layers.0.o": {"values": "int8", "group": 7}}}, CheckpointError, "groups of 7 is no way"),
        ({"schemes": {"layers.9.o": {"values": "int8"}}}, CheckpointError, r"layers\.9\.o has a scheme, but no arrays"),
    ],
)
def test_a_manifest_that_does_not_fit(copied, changes, kind, said):
    change(copied, **changes)
    with pytest.raises(kind, match=said) as caught:
        opened(copied).load()
    assert str(copied / "jaxinfer.json") in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("num_heads", 4.5, "config: num_heads: 4.5 is not of type int"),
        ("num_heads", True, "num_heads: True is not of type int"),
        ("num_heads", -1, "num_heads = -1 is not allowed"),
        ("layers", 3, "layers: 3 is not of type"),
        ("layers", [{"rope": {"factors": ["x"]}}], "layers: 0: rope: factors: 0: x is not of type float"),
        ("new", 1, "has new, which this version does not know"),
        ("vocab_size", 385, r"embed has shape \[384, 48\], expected \[385, 48\]"),
        ("intermediate_size", 1 << 40, r"gate has shape \[80, 48\], expected "),
        ("tie_embeddings", True, "head is of head, which is no weight of this model"),
    ],
)
def test_a_config_that_does_not_fit(copied, field, value, said):
    config = json.loads((copied / "jaxinfer.json").read_text())["config"]
    change(copied, config=config | {field: value})
    with pytest.raises((CheckpointError, UnsupportedError), match=said) as caught:
        opened(copied).load()
    assert str(copied) in str(caught.value)


def test_weights_that_do_not_fit(copied):
    weights = json.loads((copied / "jaxinfer.json").read_text())["weights"]
    change(copied, weights=weights | {"layers.0.o": [{"array": "layers.0.oo"}]})
    with pytest.raises(CheckpointError, match=r"weights: array layers\.0\.oo: NOT_FOUND"):
        opened(copied)
    change(copied, weights={path: arrays for path, arrays in weights.items() if path != "layers.1.o"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.o \[48, 48\] has tensors for 0 rows"):
        opened(copied).load()
    change(copied, weights=weights | {"layers.0.o": [{"array": "layers.0.down"}]})
    with pytest.raises(CheckpointError, match=r"layers\.0\.o has shape \[48, 80\], expected \[48, 48\]"):
        opened(copied).load()


@pytest.mark.slow
def test_missing_and_truncated_files(converted, tmp_path):
    """Each taken away, and cut in half: an error that names the folder, or what was needed of it is still there."""
    whole = opened(converted).load()
    files = [converted / "jaxinfer.json", *sorted((converted / "weights").rglob("*"))]
    refused = []
    for file in [file.relative_to(converted) for file in files if file.is_file()]:
        for cut in (False, True):
            copied = Path(shutil.copytree(converted, tmp_path / "tiny"))
            if cut:
                os.truncate(copied / file, (copied / file).stat().st_size // 2)
            else:
                (copied / file).unlink()
            try:
                loaded = opened(copied).load()
            except (CheckpointError, ModelNotFoundError) as error:
                assert str(copied) in str(error)  # noqa: PT017
                refused.append(str(file))
            else:
                assert all(np.array_equal(weight, whole[path]) for path, weight in loaded.items())
            shutil.rmtree(copied)
    sizes = {str(file.relative_to(converted)): file.stat().st_size for file in files if file.is_file()}
    for file in ("jaxinfer.json", "weights/manifest.ocdbt", max(sizes, key=sizes.__getitem__)):
        assert refused.count(file) == 2
    assert sum(sizes[file] for file in set(refused)) > 0.9 * sum(weight.nbytes for weight in whole.values())


def test_orbax_checkpoints_of_others(converted, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "theirs", {"a": np.ones(3, ml_dtypes.bfloat16)})
    shutil.copytree(converted / "weights", tmp_path / "alone")
    for folder in ("theirs", "alone"):
        with pytest.raises(ModelNotFoundError, match=r"is an Orbax checkpoint, but not .* no jaxinfer\.json$"):
            opened(tmp_path / folder)
    with pytest.raises(ModelNotFoundError, match=r"name the folder above, .*tiny$"):
        opened(converted / "weights")
