"""Pages of 8 bits: tokens against a float32 reference that rounds keys and values by itself, and what pages take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_harness import House, Reference, random_prompt
from test_runner import make_plan
from tiny_engines import closed_engine

from jaxinfer.config import KV_CACHE_DTYPES, EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.executables import ExecutableCache
from jaxinfer.engine.startup import lay_out
from jaxinfer.errors import InvalidArgumentError
from jaxinfer.models.decoder import decoder_structure

# Float32 noise may turn the rounding of an element: that moves it by a step, some 1/127 or 1/16 of it, and a logit by
# far less than rounding does at all, which is more than 0.05 here.
NOISE = {"int8": 0.01, "fp8": 0.02}
LENGTHS = (1, 5, 12, 31, 40, 70)


def rounded_to_int8(kv_TKH: jax.Array) -> jax.Array:
    step = jnp.abs(kv_TKH).max(-1, keepdims=True) / 127
    return jnp.round(kv_TKH / step) * step


def rounded_to_fp8(kv_TKH: jax.Array) -> jax.Array:
    """To 3 bits behind the first, of numbers down to 2**-6, and the same steps below; the largest is 448."""
    scale = jnp.abs(kv_TKH).max(-1, keepdims=True) / 448
    x = kv_TKH / scale
    _, exponent = jnp.frexp(x)
    step = jnp.exp2(jnp.maximum(exponent - 1, -6) - 3.0)
    return jnp.round(x / step) * step * scale


@pytest.fixture(scope="module", params=["int8", "fp8"])
def quantized(request: pytest.FixtureRequest, tiny_config: EngineConfig, cache_dir: Path) -> Engine:
    return closed_engine(replace(tiny_config, kv_cache_dtype=request.param), cache_dir)


@pytest.fixture(scope="module")
def kind(quantized: Engine) -> str:
    return next(name for name, dtype in KV_CACHE_DTYPES.items() if dtype == quantized.scheduler_config.kv_dtype)


def reference_of(engine: Engine, **options: object) -> Reference:
    structure = decoder_structure(engine.model_config, jnp.float32, scan=True)
    return Reference(structure, engine.runners[0].leaves[0], engine.model_config, **options)


@pytest.fixture(scope="module")
def truth(quantized: Engine, kind: str) -> Reference:
    rounded = {"int8": rounded_to_int8, "fp8": rounded_to_fp8}[kind]
    return reference_of(quantized, rounded=rounded, noise=NOISE[kind])


@pytest.fixture
def house(quantized: Engine) -> Iterator[House]:
    house = House(quantized)
    yield house
    house.check_idle()
    house.engine.close()


def test_greedy_tokens_are_those_of_a_reference_that_rounds_alike(house: House, truth: Reference, kind: str):
    """All at once, so that decodes and chunks of prompts mix; chunks are of up to 32 tokens."""
    prompts = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    answers = [house.send(prompt, max_tokens=30) for prompt in prompts]
    for answer, prompt in zip(answers, prompts, strict=True):
        truth.check(answer.tokens, prompt, 30)
    # And rounding does something: the noise allowed above is far below it.
    ids = [*prompts[-1], *answers[-1].tokens]
    moved = np.abs(truth.next_tokens(ids)[1] - reference_of(house.engine).next_tokens(ids)[1])
    assert moved.max() > 5 * NOISE[kind]


@pytest.mark.parametrize(
    ("changes", "n"),
    [
        ({}, 1),
        ({"max_num_batched_tokens": 32, "max_num_seqs": 2}, 3),  # the prompt's last page is copied for each sample
        ({"max_num_batched_tokens": 7, "max_num_seqs": 4}, 1),  # in small chunks
        ({"num_pages": 36}, 1),  # few pages: preempted, and computed again
    ],
)
def test_prefix_hits_chunks_copies_and_preemption_change_no_token(
    quantized: Engine, truth: Reference, changes: dict[str, int], n: int
):
    shared = random_prompt(9, 26)
    prompts = [shared + random_prompt(seed, 3 + seed) for seed in range(5)]
    house = House(quantized, **changes)
    try:
        for _ in range(2):
            answers = [house.send(prompt, max_tokens=24, n=n) for prompt in prompts]
            for answer, prompt in zip(answers, prompts, strict=True):
                for index in range(n):
                    truth.check(answer.tokens_of(index), prompt, 24)
        assert all(answer.finished.usage.cached_tokens >= 24 for answer in answers)
        assert (house.engine.stats().preemptions_total > 0) == ("num_pages" in changes)
        house.check_idle()
    finally:
        house.engine.close()


def test_what_was_never_written_is_never_read(house: House, truth: Reference):
    """int8 has no NaN, but its scales have; bytes of 127 are NaN in fp8."""
    runner = house.engine.runners[0]

    def poison() -> None:
        bad = lambda leaf: np.full(leaf.shape, np.nan if leaf.dtype == jnp.float32 else 127, leaf.dtype)
        runner.pools = jax.tree.map(lambda leaf: jax.device_put(bad(leaf)), runner.pools)

    house.on_loop(poison)
    prompts = [random_prompt(seed, length) for seed, length in enumerate(LENGTHS)]
    answers = [house.send(prompt, max_tokens=9) for prompt in prompts]
    for answer, prompt in zip(answers, prompts, strict=True):
        truth.check(answer.tokens, prompt, 9)


def test_values_and_scales_stay_where_they_are(quantized: Engine, base: Engine):
    """Donated and aliased through forward passes of every size, and through page copies; no part of them is copied."""
    runner = quantized.runners[0]
    runner.reset()
    addresses = [leaf.unsafe_buffer_pointer() for leaf in runner.pools[0]]
    for lens in ([3], [1], [2, 5], [20, 9], [1] * 32):
        runner.read(runner.dispatch(make_plan(lens, [True] * len(lens), copies=3)))
        assert [leaf.unsafe_buffer_pointer() for leaf in runner.pools[0]] == addresses
    pool_bytes, scale_bytes = sum(leaf.nbytes for leaf in runner.pools[0]), runner.pools[0].scales.nbytes
    programs = lambda engine: engine.runners[0]._programs.stages[0]
    for shape, program in programs(quantized).forward.items():
        memory, wide = program.memory_analysis(), programs(base).forward[shape].memory_analysis()
        assert memory.alias_size_in_bytes >= pool_bytes
        assert memory.temp_size_in_bytes < wide.temp_size_in_bytes + scale_bytes / 4


def test_pages_take_what_is_said(quantized: Engine, base: Engine):
    """Of 12 elements: 12 bytes and a scale of 4, in place of 48."""
    scheduler, pool = quantized.scheduler_config, quantized.runners[0].pools[0]
    on_device = sum(leaf.on_device_size_in_bytes() for leaf in pool)
    assert on_device == (scheduler.num_pages + 1) * scheduler.page_size * scheduler.kv_token_bytes
    assert scheduler.kv_token_bytes == 2 * 2 * 2 * (12 + 4)  # layers, K and V, heads
    assert base.scheduler_config.kv_token_bytes == 2 * 2 * 2 * 48
    assert base.scheduler_config.kv_dtype == "float32"
    stats = quantized.stats()
    assert (stats.kv_dtype, stats.kv_token_bytes) == (scheduler.kv_dtype, scheduler.kv_token_bytes)
    assert stats.kv_tokens == scheduler.num_pages * scheduler.page_size


@pytest.mark.parametrize(("kind", "element", "scale"), [("auto", 2, 0), ("int8", 1, 4), ("fp8", 1, 4)])
def test_as_many_pages_as_the_bytes_hold(tiny_config: EngineConfig, base: Engine, kind: str, element: int, scale: int):
    """Of heads of 64 in 8 bits 1.88 times as many as in bfloat16."""
    config = replace(tiny_config, kv_cache_dtype=kind, kv_cache_bytes=1 << 18)
    model = replace(base.model_config, head_dim=64)
    layout = lay_out(config, model, jnp.dtype(jnp.bfloat16), {}, ExecutableCache(None))
    assert layout.scheduler.num_pages == (1 << 18) // (2 * 2 * 2 * 4 * (64 * element + scale))


def test_prefixes_of_other_pages_are_others(house: House, base: Engine):
    prompt = random_prompt(1, 20)

    def keys(house: House) -> set[bytes]:
        house.ask(prompt, max_tokens=1)
        return house.on_loop(lambda: set(house.scheduler.pages.index._page_of))

    other = House(base)
    try:
        mine, theirs = keys(house), keys(other)
    finally:
        other.engine.close()
    assert len(mine) == len(theirs) == 5
    assert not mine & theirs


@pytest.mark.parametrize("value", ["int4", "fp8_e5m2", "bfloat16", "", None])
def test_other_kinds_are_refused_with_those_there_are(value: object):
    with pytest.raises(InvalidArgumentError, match=r"kv_cache_dtype = .*: one of auto, int8, fp8"):
        EngineConfig(kv_cache_dtype=value)  # type: ignore[arg-type]
