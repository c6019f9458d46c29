"""Compiled programs on disk: found again, made again when broken, never taken for another's."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_harness import Answer

from jaxinfer.config import EngineConfig
from jaxinfer.engine import executables
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.executables import ExecutableCache, compile_count, expected_compiles, stray_compile_count
from jaxinfer.kv_cache.pool import page_bytes
from jaxinfer.types import Request, SamplingParams
from pallas_kernels.dispatch import Device

SPEC = jax.ShapeDtypeStruct((8,), jnp.float32)


def compiled(factor: float) -> jax.stages.Compiled:
    return jax.jit(lambda x: x * factor).lower(SPEC).compile()


def test_what_is_stored_is_loaded_without_compiling(tmp_path: Path):
    cache = ExecutableCache(tmp_path / "new" / "folder")
    assert cache.load("triple") is None
    cache.store("triple", compiled(3))
    before = compile_count()
    program = cache.load("triple")
    assert program is not None
    assert program(np.ones(8, np.float32)).tolist() == [3] * 8
    assert cache.load("other") is None
    assert compile_count() == before
    assert oct((tmp_path / "new" / "folder").stat().st_mode)[-3:] == "700"


def test_no_folder_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    cache = ExecutableCache(None)
    cache.store("triple", compiled(3))
    assert cache.load("triple") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("broken", [b"", b"not a program", "half"])
def test_a_broken_file_is_reported_and_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: bytes | str):
    cache = ExecutableCache(tmp_path)
    cache.store("triple", compiled(3))
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if broken == "half" else broken)
    with caplog.at_level(logging.WARNING):
        assert cache.load("triple") is None
    assert path.name in caplog.text
    cache.store("triple", compiled(3))
    assert cache.load("triple") is not None


@pytest.mark.parametrize("change", ["key", "source", "flags"])
def test_another_environment_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str):
    cache = ExecutableCache(tmp_path)
    cache.store("triple", compiled(3))
    executables._environment.cache_clear()
    key = "triple"
    if change == "key":
        key = "triples"
    elif change == "source":
        root = tmp_path / "root"
        for package in executables.PACKAGES:
            (root / package).mkdir(parents=True)
            (root / package / "step.py").write_text("another = 1\n")
        monkeypatch.setattr(executables, "_ROOT", root)
    else:
        monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", "") + " --xla_cpu_enable_fast_math=false")
    assert cache.load(key) is None
    monkeypatch.undo()
    executables._environment.cache_clear()
    assert cache.load("triple") is not None


def test_all_source_that_makes_programs_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A changed rule of sharding/ once found the programs of the rule before."""
    listing = "import sys, jaxinfer.engine.programs; print(*(getattr(m, '__file__', 0) for m in sys.modules.values()))"
    files = subprocess.run([sys.executable, "-c", listing], check=True, capture_output=True, text=True).stdout.split()
    ours = {
        Path(file).relative_to(executables._ROOT).parts[0] for file in files if file.startswith(f"{executables._ROOT}/")
    }
    assert {package for package in ours if (executables._ROOT / package / "__init__.py").exists()} == set(
        executables.PACKAGES
    )
    monkeypatch.setattr(executables, "_ROOT", tmp_path)
    environments = set()
    for package in ("", *executables.PACKAGES):
        (tmp_path / package).mkdir(exist_ok=True)
        (tmp_path / package / "step.py").write_text(f"in_{package} = 1\n")
        environments.add(executables._environment.__wrapped__())
    assert len(environments) == 4


def test_a_folder_that_cannot_be_written_costs_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").write_text("in the way")
    cache = ExecutableCache(tmp_path / "file")
    with caplog.at_level(logging.WARNING):
        cache.store("triple", compiled(3))
    assert "could not store" in caplog.text


@pytest.fixture(scope="module")
def small_config(tiny_config: EngineConfig) -> EngineConfig:
    """One forward pass and one sampling program are all there is to compile."""
    return replace(tiny_config, max_num_seqs=1, max_num_batched_tokens=1)


def programs_in(folder: Path) -> set[Path]:
    return set((folder / "programs").iterdir())


def test_settings_of_the_host_alone_compile_nothing(tiny_config: EngineConfig, base: Engine, cache_dir: Path):
    before = compile_count()
    config = replace(tiny_config, max_waiting=3, prefix_caching=False)
    Engine.start(config, cache_dir=cache_dir).close()
    assert compile_count() == before


def test_engines_of_other_sizes_share_a_folder(tiny_config: EngineConfig, tmp_path: Path):
    """Their pools are alike and their rows are not: neither may take the other's programs."""
    for max_num_seqs in (8, 5, 8):
        config = replace(
            tiny_config, max_num_seqs=max_num_seqs, max_num_batched_tokens=8, kv_cache_bytes=100_000, max_model_len=100
        )
        with Engine.start(config, cache_dir=tmp_path) as engine:
            answer = Answer("a")
            params = SamplingParams(max_tokens=3, n=max_num_seqs, ignore_eos=True)
            engine.submit(Request(request_id="a", params=params, token_ids=[5, 6, 7]), answer.sink)
            assert len(answer.finished.ends) == max_num_seqs
        model = engine.model_config
        shape = len(model.layers), model.num_kv_heads, model.head_dim
        assert engine.scheduler_config.num_pages == 100_000 // page_bytes(*shape, 4, "float32", Device("cpu", "cpu"))


def test_other_weights_of_layers_change_the_forward_passes_alone(small_config: EngineConfig, tmp_path: Path):
    """Sampling takes the head's weights, not all: it once was compiled again for each recipe."""
    stored = []
    for quantize in (None, "int8"):
        Engine.start(replace(small_config, quantize=quantize), cache_dir=tmp_path).close()
        stored.append(programs_in(tmp_path))
    assert len(stored[1] - stored[0]) == 1


def test_what_another_engine_compiles_at_its_start_is_no_stray():
    before = stray_compile_count(), compile_count()
    with expected_compiles():
        compiled(5)
    assert (stray_compile_count(), compile_count()) == (before[0], before[1] + 1)
    compiled(7)
    assert stray_compile_count() == before[0] + 1


SECOND_START = """
import sys
from pathlib import Path
from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.executables import compile_count
engine = Engine.start(eval(sys.argv[1]), cache_dir=Path(sys.argv[2]))
print(compile_count())
engine.close()
"""


def test_a_second_process_compiles_nothing(small_config: EngineConfig, tmp_path: Path):
    counts = [
        subprocess.run(
            [sys.executable, "-c", SECOND_START, repr(small_config), str(tmp_path)],
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout
        for _ in range(2)
    ]
    assert int(counts[0]) > 0
    assert int(counts[1]) == 0


def test_an_engine_starts_over_broken_files(
    small_config: EngineConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Every program of the folder is truncated: the engine says so, compiles, and answers as before."""
    Engine.start(small_config, cache_dir=tmp_path).close()
    files = programs_in(tmp_path)
    for path in files:
        path.write_bytes(path.read_bytes()[:100])
    with caplog.at_level(logging.WARNING):
        engine = Engine.start(small_config, cache_dir=tmp_path)
    assert sum("does not load" in record.message for record in caplog.records) == len(files)
    answer = Answer("a")
    engine.submit(Request(request_id="a", params=SamplingParams(max_tokens=3), token_ids=[5, 6, 7]), answer.sink)
    assert len(answer.wait().tokens) == 3
    engine.close()
    assert all(path.stat().st_size > 100 for path in files)
