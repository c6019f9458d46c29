"""Many engines over one compiled runner: other limits are a matter of the host, so no test has to compile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import tiny_checkpoints

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine


def write_tiny_model(folder: Path) -> Path:
    tiny_checkpoints.write_hf_folder(folder, tiny_checkpoints.VARIANTS["llama3"])
    return folder


def config_of(folder: Path) -> EngineConfig:
    """Programs for 1, 8 and 32 tokens."""
    return EngineConfig(
        model=str(folder),
        dtype="float32",
        max_num_seqs=32,
        max_num_batched_tokens=32,
        page_size=4,
        max_model_len=128,
    )


def closed_engine(config: EngineConfig, cache_dir: Path) -> Engine:
    engine = Engine.start(config, cache_dir=cache_dir)
    engine.close()
    return engine


def engine_on(base: Engine, *, eos: tuple[int, ...] = (), stuck_after_s: float = 60.0, **changes: Any) -> Engine:
    """A new, running engine on the runner of a closed one, with changes to its scheduler's limits; one at a time."""
    base.runners[0].reset()
    model = replace(base.model_config, eos_token_ids=eos)
    scheduler = replace(base.scheduler_config, **changes)
    engine = Engine(base.model_name, model, scheduler, base.tokenizer, base.runners, stuck_after_s=stuck_after_s)
    engine._begin()
    return engine
