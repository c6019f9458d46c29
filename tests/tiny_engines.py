"""Many engines over one compiled runner: other limits are a matter of the host, so no test has to compile."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jaxinfer.engine.engine import Engine


def engine_on(base: Engine, *, eos: tuple[int, ...] = (), stuck_after_s: float = 60.0, **changes: Any) -> Engine:
    """A new, running engine on the runner of a closed one, with changes to its scheduler's limits; one at a time."""
    base.runner.reset()
    model = replace(base.model_config, eos_token_ids=eos)
    scheduler = replace(base.scheduler_config, **changes)
    engine = Engine(base.model_name, model, scheduler, base.tokenizer, base.runner, stuck_after_s=stuck_after_s)
    engine._begin()
    return engine
