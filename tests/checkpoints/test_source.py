"""What people type after --model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
import safetensors.numpy
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError
from tiny_checkpoints import VARIANTS, write_gguf, write_hf_folder

from jaxinfer.checkpoints import source as sources
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.pull import ALIASES
from jaxinfer.checkpoints.source import Source, default_cache_dir, resolve
from jaxinfer.errors import CheckpointError, ModelNotFoundError, UnsupportedError


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub that answers with what the test puts here: a folder, or an error."""
    answers = {}

    def snapshot_download(repo, *, allow_patterns, local_files_only):
        answers["asked"] = (repo, allow_patterns, local_files_only)
        if isinstance(answers["answer"], Exception):
            raise answers["answer"]
        return str(answers["answer"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return answers


def find(model, **options):
    return resolve(str(model), cache_dir=Path("unused"), **options)


def test_folders_and_files(tmp_path):
    write_hf_folder(tmp_path / "tiny-llama", VARIANTS["llama2"])
    (tmp_path / "ggufs").mkdir()
    write_gguf(tmp_path / "ggufs" / "tiny.Q8.gguf", VARIANTS["llama2"])
    assert find(tmp_path / "tiny-llama") == Source("hf", tmp_path / "tiny-llama", "tiny-llama")
    gguf = Source("gguf", tmp_path / "ggufs" / "tiny.Q8.gguf", "tiny.Q8")
    assert find(gguf.path) == gguf
    assert find(tmp_path / "ggufs") == gguf
    (tmp_path / "ggufs" / "other.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"2 GGUF files, name one: other\.gguf, tiny\.Q8\.gguf"):
        find(tmp_path / "ggufs")


def test_what_exists_here_goes_before_the_hub(tmp_path, monkeypatch, hub):
    write_hf_folder(tmp_path / "org" / "name", VARIANTS["llama2"])
    monkeypatch.chdir(tmp_path)
    assert find("org/name").path == Path("org/name")
    assert not hub


def test_what_is_no_model(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ModelNotFoundError, match=r"expected a \.gguf file or a folder"):
        find(tmp_path / "notes.txt")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json, and no GGUF file"):
        find(tmp_path)


def test_an_unknown_name_lists_where_it_was_looked_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        find("smollm2-135m-instrct")
    for part in (str(tmp_path), "known: smollm2-135m-instruct", "org/name", "did you mean smollm2-135m-instruct?"):
        assert part in str(caught.value)
    with pytest.raises(ModelNotFoundError) as caught:
        find("quite-another-thing")
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("model", ["/no/such/folder", "./no/such", "no.gguf", "no/such.gguf", ""])
def test_paths_that_do_not_exist_never_reach_the_hub(tmp_path, monkeypatch, hub, model):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError):
        find(model)
    assert not hub


def test_a_hub_id(tmp_path, hub):
    write_hf_folder(tmp_path, VARIANTS["llama2"])
    hub["answer"] = tmp_path
    assert find("org/name") == Source("hf", tmp_path, "org/name")
    assert hub["asked"] == ("org/name", sources._HUB_FILES, False)
    find("org/name", offline=True)
    assert hub["asked"] == ("org/name", sources._HUB_FILES, True)


def test_a_gguf_file_on_the_hub(tmp_path, hub):
    (tmp_path / "sub").mkdir()
    write_gguf(tmp_path / "sub" / "tiny.gguf", VARIANTS["llama2"])
    hub["answer"] = tmp_path
    assert find("org/name/sub/tiny.gguf") == Source("gguf", tmp_path / "sub" / "tiny.gguf", "tiny")
    assert hub["asked"] == ("org/name", "sub/tiny.gguf", False)
    with pytest.raises(ModelNotFoundError, match=r"org/name on the hub has no file other\.gguf"):
        find("org/name/other.gguf")


def test_a_hub_repository_of_gguf_files_says_how_to_name_one(tmp_path, hub):
    hub["answer"] = tmp_path
    with pytest.raises(ModelNotFoundError, match=r"name one: org/name/FILE\.gguf"):
        find("org/name")


RESPONSE = SimpleNamespace(headers={}, request=None)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RepositoryNotFoundError("x", response=RESPONSE), "no such repository"),
        (GatedRepoError("x", response=RESPONSE), "asks for a token"),
        (LocalEntryNotFoundError("x"), "cannot be reached"),
        (OSError("disk full\nmore"), "the hub answered: disk full$"),
        (OSError(""), "the hub answered: OSError"),
    ],
)
def test_what_the_hub_answers_is_passed_on(hub, error, said):
    hub["answer"] = error
    with pytest.raises(ModelNotFoundError, match=said):
        find("org/name")


def test_offline_an_alias_comes_from_the_cache_or_not_at_all(tmp_path, smollm2_path):
    with pytest.raises(ModelNotFoundError, match="fetching it is turned off"):
        resolve("smollm2-135m-instruct", cache_dir=tmp_path, offline=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / ALIASES["smollm2-135m-instruct"].file).symlink_to(smollm2_path)
    found = resolve("SmolLM2-135M-Instruct", cache_dir=tmp_path, offline=True)
    assert (found.kind, found.name, found.path.parent) == ("gguf", "smollm2-135m-instruct", tmp_path / "models")


def test_the_cache_folder_follows_the_environment():
    assert default_cache_dir({"JAXINFER_CACHE": "/a", "XDG_CACHE_HOME": "/b"}) == Path("/a")
    assert default_cache_dir({"XDG_CACHE_HOME": "/b"}) == Path("/b/jaxinfer")
    assert default_cache_dir({}) == Path.home() / ".cache" / "jaxinfer"


def test_end_tokens_of_generation_config_are_added(tmp_path):
    write_hf_folder(tmp_path, VARIANTS["llama2"])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert open_checkpoint(find(tmp_path)).config.eos_token_ids == (2, 5)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eos_token_id"]  # transformers' default counts where no file names one
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert open_checkpoint(find(tmp_path)).config.eos_token_ids == (5, 2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert open_checkpoint(find(tmp_path)).config.eos_token_ids == (5,)
    (tmp_path / "generation_config.json").unlink()
    assert open_checkpoint(find(tmp_path)).config.eos_token_ids == (2,)


def test_an_opened_folder(tmp_path):
    write_hf_folder(tmp_path, VARIANTS["llama3"])
    checkpoint = open_checkpoint(find(tmp_path))
    assert (checkpoint.folder, checkpoint.tokenizer_metadata, checkpoint.dtype.name) == (tmp_path, None, "bfloat16")
    assert checkpoint.load()["embed"].dtype == checkpoint.dtype


@pytest.mark.parametrize("variant", ["smollm2", "biases"])
def test_known_leftovers_are_ignored_and_others_refused(tmp_path, variant):
    write_hf_folder(tmp_path, VARIANTS[variant])
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = tensors["model.norm.weight"]
    if variant == "smollm2":  # tied
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert "head" in open_checkpoint(find(tmp_path)).load() or variant == "smollm2"
    tensors["model.layers.9.mlp.up_proj.weight"] = tensors["model.norm.weight"]
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.9\.mlp\.up_proj\.weight"):
        open_checkpoint(find(tmp_path)).load()


def test_a_config_that_is_broken_or_of_another_family(tmp_path):
    write_hf_folder(tmp_path, VARIANTS["llama2"])
    for text, error, said in (
        ("{", CheckpointError, r"config\.json"),
        ("[]", CheckpointError, r"config\.json"),
        ('{"architectures": ["GPT2LMHeadModel"]}', UnsupportedError, "GPT2LMHeadModel"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(error, match=said):
            open_checkpoint(find(tmp_path))


def test_heads_that_do_not_fit_are_the_checkpoint_s_fault(tmp_path):
    write_hf_folder(tmp_path, VARIANTS["llama2"])
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace('"num_key_value_heads": 4', '"num_key_value_heads": 3'))
    with pytest.raises(CheckpointError, match="num_kv_heads"):
        open_checkpoint(find(tmp_path))


def test_finding_a_model_takes_no_jax():
    """`jaxinfer pull` would wait most of a second for it."""
    code = "import sys, jaxinfer.checkpoints.source; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
