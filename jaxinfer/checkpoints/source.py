"""From what people type after `--model` to files on this machine."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxinfer.checkpoints.pull import ALIASES, PullProgress, cached, pull
from jaxinfer.errors import CheckpointError, ModelNotFoundError

# Of a folder that `jaxinfer convert` wrote: see `manifest`.
MANIFEST = "jaxinfer.json"
PARTIAL = "jaxinfer.json.partial"

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_GGUF = re.compile(r"([\w.-]+/[\w.-]+)/(.+\.gguf)")

# Of a hub repository, the files used here: not the same weights again in other formats.
_HUB_FILES = ["*.json", "*.jinja", "tokenizer.model", "model*.safetensors"]


@dataclass(frozen=True, slots=True)
class Source:
    """A model's files on this machine: a Hugging Face folder, a GGUF file or a converted folder, and its name."""

    kind: Literal["hf", "gguf", "orbax"]
    path: Path
    name: str


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """`JAXINFER_CACHE`, else `jaxinfer` in `XDG_CACHE_HOME`, else ~/.cache/jaxinfer."""
    if own := environ.get("JAXINFER_CACHE"):
        return Path(own).expanduser()
    if xdg := environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "jaxinfer"
    return Path.home() / ".cache" / "jaxinfer"


def resolve(model: str, *, cache_dir: Path, offline: bool = False, progress: PullProgress | None = None) -> Source:
    """Finds a model's files, fetching them if need be.

    Args:
      model: a Hugging Face folder, a .gguf file or a folder with one, a folder that `jaxinfer convert` wrote, an
        alias, a hub id (`org/name`), or a GGUF file in a hub repository (`org/name/file.gguf`). What exists on this
        machine goes first.
      cache_dir: where aliases are kept. Hub models lie in the hub's own cache, shared with other programs.
      offline: use only what is on this machine already.
      progress: of an alias's download; the hub library shows its own.

    Raises:
      ModelNotFoundError: nothing found; the message lists where it was looked for.
      CheckpointError: what an interrupted convert left.
    """
    try:
        path = Path(model).expanduser()
        if path.is_dir():
            return _in_folder(path)
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # a folder that may not be read, a name too long, no such user's home
        raise ModelNotFoundError(f"{model[:1000]} cannot be read: {error}") from error
    if is_file:
        if path.suffix != ".gguf":
            raise ModelNotFoundError(f"{path} is not a model: expected a .gguf file or a folder")
        return Source("gguf", path, path.stem)
    if alias := ALIASES.get(model.lower()):
        found = cached(alias, cache_dir)
        if found is None and offline:
            raise ModelNotFoundError(f"{model} is not whole in {cache_dir / 'models'}, and fetching it is turned off")
        return Source("gguf", found or pull(alias, cache_dir, progress), model.lower())
    if in_hub := _HUB_GGUF.fullmatch(model):
        path = _from_hub(in_hub[1], in_hub[2], offline) / in_hub[2]
        if not path.exists():
            raise ModelNotFoundError(f"{in_hub[1]} on the hub has no file {in_hub[2]}")
        return Source("gguf", path, path.stem)
    if _HUB_ID.fullmatch(model) and path.suffix != ".gguf":
        folder = _from_hub(model, _HUB_FILES, offline)
        if not (folder / "config.json").exists():
            raise ModelNotFoundError(
                f"{model} on the hub has no config.json; if it has GGUF files, name one: {model}/FILE.gguf"
            )
        return Source("hf", folder, model)
    close = difflib.get_close_matches(model.lower(), ALIASES, n=1)
    raise ModelNotFoundError(
        f"{model!r} is no folder or file ({path.absolute()}), no alias (known: {', '.join(ALIASES)}), "
        f"and no hub id (org/name)" + (f"; did you mean {close[0]}?" if close else "")
    )


def _in_folder(folder: Path) -> Source:
    name = folder.resolve().name
    if (folder / MANIFEST).exists():
        return Source("orbax", folder, name)
    if (folder / PARTIAL).exists():
        raise CheckpointError(
            f"{folder} is incomplete: jaxinfer convert was interrupted, or is still writing it; convert into it again"
        )
    if (folder / "config.json").exists():
        return Source("hf", folder, name)
    ggufs = sorted(folder.glob("*.gguf"))
    if len(ggufs) == 1:
        return Source("gguf", ggufs[0], ggufs[0].stem)
    found = f"{len(ggufs)} GGUF files, name one: {', '.join(file.name for file in ggufs)}" if ggufs else "no GGUF file"
    if (folder / "_CHECKPOINT_METADATA").exists():
        raise ModelNotFoundError(
            f"{folder} is an Orbax checkpoint, but not a folder that jaxinfer convert wrote: it has no {MANIFEST}"
            + (f"; name the folder above, {folder.parent}" if (folder.parent / MANIFEST).exists() else "")
        )
    raise ModelNotFoundError(f"{folder} is not a model: it has no config.json, and {found}")


def _from_hub(repo: str, patterns: str | list[str], offline: bool) -> Path:
    """Returns a folder with those of a hub repository's files that match."""
    import huggingface_hub
    from huggingface_hub import constants, errors

    try:
        # For a single file too: `hf_hub_download` retries for half a minute where there is no network.
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=patterns, local_files_only=offline))
    except errors.GatedRepoError:
        answer = "asks for a token of someone who accepted its terms (HF_TOKEN)"
    except errors.RepositoryNotFoundError:
        answer = "has no such repository, or it is private (HF_TOKEN)"
    except errors.LocalEntryNotFoundError:
        answer = "was not asked" if offline else "cannot be reached"
    # Its network library's own errors, of which there are many; whatever it is, the model was not found.
    except Exception as error:
        answer = f"answered: {str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__}"
    raise ModelNotFoundError(
        f"{repo} is no folder or file here, is not in the hub's cache ({constants.HF_HUB_CACHE}), and the hub {answer}"
    )
