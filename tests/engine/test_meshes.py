"""Meshes of CPU devices give the tokens of one device: tensor, data and pipeline parallelism, and their mixtures."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_checkpoints
from engine_harness import Answer

from jaxinfer.config import EngineConfig
from jaxinfer.engine.engine import Engine
from jaxinfer.errors import EngineDeadError, InvalidArgumentError
from jaxinfer.types import Request, SamplingParams
from sharding.mesh import MeshConfig

PAGE_SIZE, PAGES = 4, 20
# Eight query heads of four KV heads: with tensor=8 each KV head is there twice. 84 features are padded to 88, and 384
# tokens to 512. Three layers make two stages of unequal length.
TINY = replace(
    tiny_checkpoints.VARIANTS["llama3"], hidden=64, heads=8, kv_heads=4, head_dim=16, intermediate=84, layers=3
)
MESHES = (
    "tensor=2",
    "tensor=4",
    "tensor=8",
    "data=2,tensor=2",
    "stage=2",
    "stage=2,tensor=2",
    "data=2,stage=2,tensor=2",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mesh") / "model"
    tiny_checkpoints.write_hf_folder(folder, TINY)
    return folder


def start(folder: Path, cache_dir: Path, mesh: str | None, pages: int = PAGES, **options: Any) -> Engine:
    """Steps of 8 tokens, so that most prompts come in chunks, and few pages, so that sequences are preempted."""
    sizes = MeshConfig.parse(mesh)
    heads = max(TINY.kv_heads, sizes.tensor) // sizes.tensor
    page_bytes = math.ceil(TINY.layers / sizes.stage) * 2 * heads * TINY.H * PAGE_SIZE * 4
    config = EngineConfig(
        model=str(folder), dtype="float32", mesh=mesh, max_num_seqs=6, max_num_batched_tokens=8, page_size=PAGE_SIZE,
        max_model_len=64, kv_cache_bytes=pages * page_bytes, **options,
    )  # fmt: skip
    return Engine.start(config, cache_dir=cache_dir)


def requests(names: str = "r", count: int = 14) -> Iterator[Request]:
    """Greedy and random, with and without rules and log-probabilities; half of the prompts begin alike."""
    rng = np.random.default_rng(0)
    shared = rng.integers(5, 380, 17).tolist()
    asks = [{}, {"top_p": 0.9}, {"top_k": 5}, {"logprobs": 3}, {"repetition_penalty": 1.3}, {"prompt_logprobs": 2}]
    for number in range(count):
        own = rng.integers(5, 380, int(rng.integers(1, 22))).tolist()
        choice = {"temperature": 0.8, "seed": number} if number % 3 == 2 else {"temperature": 0.0}
        params = SamplingParams(
            max_tokens=20, ignore_eos=True, skip_special_tokens=False, **choice | asks[number % len(asks)]
        )
        yield Request(request_id=f"{names}{number}", params=params, token_ids=shared + own if number % 2 else own)


def ask(engine: Engine, names: str = "r") -> list[Answer]:
    answers = []
    for request in requests(names):
        answers.append(Answer(request.request_id))
        engine.submit(request, answers[-1].sink)
    return answers


def check_same(answers: list[Answer], expected: list[Answer], tolerance: float = 1e-4) -> None:
    for answer, truth in zip(answers, expected, strict=True):
        answer.check()
        assert answer.tokens == truth.tokens, answer.request_id
        for ours, theirs in zip(logprobs(answer), logprobs(truth), strict=True):
            # Sums of a few hundred float32 products in another order; logits are up to about 6.
            assert abs(ours - theirs) < tolerance


def check_through(engine: Engine, meshes: Iterable[str], expected: list[Answer], **options: float) -> int:
    """Swaps one mesh after another while requests run; new ones come on each. Returns how often all were asked."""
    answers = [ask(engine, "first")]
    for mesh in meshes:
        answers[-1][0].wait_first()
        engine.reshard(mesh)
        answers.append(ask(engine, mesh))
    for some in answers:
        check_same(some, expected, **options)
    return len(answers)


def logprobs(answer: Answer) -> list[float]:
    return [position.chosen.logprob for delta in answer.deltas for position in delta.logprobs or ()]


@pytest.fixture(scope="module")
def expected(folder: Path, cache_dir: Path) -> list[Answer]:
    with start(folder, cache_dir, None) as engine:
        answers = [answer.wait() for answer in ask(engine)]
        stats = engine.stats()
        assert stats.preemptions_total > 0
        assert stats.cached_tokens_total > 0
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_tokens_equal_those_of_one_device(folder: Path, cache_dir: Path, expected: list[Answer], mesh: str):
    with start(folder, cache_dir, mesh) as engine:
        check_same(ask(engine), expected)
        stats = engine.stats()
        assert stats.compiles_after_warmup == 0
        assert stats.cached_tokens_total > 0
        if "data" not in mesh:
            assert stats.preemptions_total > 0
        else:
            assert all(replica.output_tokens_total > 20 for replica in engine.replica_stats())
        for runner in engine.runners:
            whole = sum(math.prod(spec.shape) * 4 for spec in engine._started.layout.specs.values())
            for leaves in runner.leaves:
                held = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
                assert held < 0.75 * whole  # norms and biases are whole everywhere


@pytest.mark.slow
def test_a_replica_whose_pages_are_full_blocks_no_other(folder: Path, cache_dir: Path):
    """Five long requests with one prefix go to one replica, whose pages hold one and a half of them."""
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, skip_special_tokens=False)
    with start(folder, cache_dir, "data=2,tensor=2") as engine:
        long = [Answer(f"long{number}") for number in range(5)]
        for number, answer in enumerate(long):
            token_ids = [*range(100, 120), *range(200 + number, 210 + number)]
            engine.submit(Request(request_id=answer.request_id, params=params, token_ids=token_ids), answer.sink)
        for number in range(3):
            answer = Answer(f"short{number}")
            request = Request(
                request_id=answer.request_id, params=replace(params, max_tokens=2), token_ids=[7 + number]
            )
            engine.submit(request, answer.sink)
            assert len(answer.tokens) == 2
        assert sum(not answer.over for answer in long) >= 3
        for answer in long:
            answer.check()
        full, other = engine.replica_stats()
        assert (full.output_tokens_total, other.output_tokens_total) == (5 * 30, 3 * 2)
        assert full.preemptions_total > 0


@pytest.mark.slow
def test_a_mesh_is_swapped_while_requests_run(folder: Path, cache_dir: Path, expected: list[Answer]):
    """Through KV copies and padding, more and fewer replicas and stages, and back; new requests come meanwhile."""
    # On one device a page takes twice the bytes that it takes on each of two.
    with start(folder, cache_dir, "tensor=2", pages=2 * PAGES) as engine:
        asked = check_through(engine, ("tensor=8", "data=2,stage=2,tensor=2", "tensor=1"), expected)
        stats = engine.stats()
        assert stats.output_tokens_total == 20 * 14 * asked
        assert len(engine.runners) == 1
        assert {device.id for leaf in engine.runners[0].leaves[0] for device in leaf.devices()} == {0}


@pytest.mark.slow
def test_a_mesh_that_cannot_be_swapped_to_changes_nothing(folder: Path, cache_dir: Path, expected: list[Answer]):
    with start(folder, cache_dir, "tensor=2") as engine:
        answers = ask(engine)
        for mesh, said in (("tensor=3", "tensor=3 cannot split 8 query heads of 4 KV heads evenly; 1, 2, 4, 8 can"),
                           ("tensor=16", "needs 16 devices; there are 8"), ("wide=2", "unknown axis")):  # fmt: skip
            with pytest.raises(InvalidArgumentError, match=said):
                engine.reshard(mesh)
        check_same(answers, expected)


@pytest.mark.slow
def test_an_engine_lost_while_it_moves_tells_everybody(folder: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch):
    with start(folder, cache_dir, "tensor=2") as engine:
        answers = ask(engine)
        answers[0].wait_first()

        def fails(*_: object) -> None:
            answers.extend(ask(engine, "meanwhile"))
            raise RuntimeError("out of memory")

        monkeypatch.setattr("jaxinfer.engine.engine.move_weights", fails)
        with pytest.raises(EngineDeadError, match="out of memory"):
            engine.reshard("tensor=4")
        for answer in answers:
            answer.check()
        assert isinstance(answers[-1].error, EngineDeadError)
        with pytest.raises(EngineDeadError, match="out of memory"):
            ask(engine, "later")


@pytest.mark.slow
@pytest.mark.parametrize("rules", ['vocab = "replicated"', 'heads = "replicated"\nkv_heads = "replicated"',
                                   'activation_tokens = "tensor"', 'feed_forward = "replicated"'])  # fmt: skip
def test_a_rules_table_changes_no_token(folder, cache_dir, expected, tmp_path, rules):
    file = tmp_path / "mesh.toml"
    file.write_text(f"[mesh]\ntensor = 2\n[rules]\n{rules}\n")
    with start(folder, cache_dir, str(file), pages=2 * PAGES) as engine:  # whole heads take twice the bytes
        check_same(ask(engine), expected)


# Groups of 16 that no shard of 84 features has whole, and q kept otherwise than k and v.
PACKED = {"quantize": "int4:16", "quantize_rules": ("*.qkv.q=int8", "head=fp8"), "packed": True}


@pytest.fixture(scope="module")
def expected_packed(folder: Path, cache_dir: Path) -> list[Answer]:
    with start(folder, cache_dir, None, **PACKED) as engine:
        return [answer.wait() for answer in ask(engine)]


@pytest.mark.slow
def test_packed_weights_give_the_tokens_of_one_device_and_move_between_meshes(folder, cache_dir, expected_packed):
    # On one device a page takes four times the bytes that it takes on each of four.
    with start(folder, cache_dir, "tensor=4", pages=4 * PAGES, **PACKED) as engine:
        for leaves in engine.runners[0].leaves:
            assert not any(leaf.dtype == np.float32 and leaf.ndim > 1 and leaf.size > 384 * 64 for leaf in leaves)
        check_through(engine, ("tensor=8", "data=2,stage=2,tensor=2", "tensor=1"), expected_packed)


INT8_PAGES = {"kv_cache_dtype": "int8", "pages": PAGES // 3}  # that take a third of the bytes and less


@pytest.fixture(scope="module")
def expected_of_int8_pages(folder: Path, cache_dir: Path) -> list[Answer]:
    with start(folder, cache_dir, None, **INT8_PAGES) as engine:
        answers = [answer.wait() for answer in ask(engine)]
        stats = engine.stats()
        assert stats.preemptions_total > 0
        assert stats.cached_tokens_total > 0
    return answers


@pytest.mark.slow
def test_int8_pages_on_a_mesh_give_the_tokens_of_one_device(folder, cache_dir, expected_of_int8_pages):
    """Through replicas, stages, split and copied heads. Float32 noise may turn the rounding of an element."""
    # On one device a page takes twice the bytes that it takes on each of two.
    with start(folder, cache_dir, "tensor=2", **INT8_PAGES | {"pages": 2 * INT8_PAGES["pages"]}) as engine:
        check_through(engine, ("tensor=8", "data=2,stage=2,tensor=2"), expected_of_int8_pages, tolerance=0.01)
        stats = engine.stats()
        assert (stats.compiles_after_warmup, stats.audit_breaches_total) == (0, 0)
        assert (stats.kv_dtype, stats.kv_token_bytes) == ("int8", 3 * 2 * 4 * (16 + 4))
        for runner in engine.runners:
            for pool in runner.pools:
                assert pool.values.sharding.spec == pool.scales.sharding.spec
                shards = [leaf.addressable_shards[0].data.shape[2] for leaf in pool]
                assert shards == [4, 4]  # K and V of two heads


def smollm2_tokens(cache_dir: Path, mesh: str | None) -> list[list[int]]:
    config = EngineConfig(
        dtype="float32", mesh=mesh, max_num_seqs=4, max_num_batched_tokens=8, page_size=16, max_model_len=128
    )
    answers = []
    with Engine.start(config, cache_dir=cache_dir) as engine:
        for text in (
            "The capital of France is",
            "Once upon a time, there was a",
            "def fibonacci(n):",
            "Water boils at",
        ):
            answers.append(Answer(text))
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            engine.submit(Request(request_id=text, params=params, text=text), answers[-1].sink)
        return [answer.tokens for answer in answers]


@pytest.mark.slow
def test_smollm2_by_three(cache_dir: Path):
    """Nine heads of three KV heads, and thirty layers."""
    expected = smollm2_tokens(cache_dir, None)
    for mesh in ("tensor=3", "stage=3", "data=2"):
        assert smollm2_tokens(cache_dir, mesh) == expected, mesh


def test_there_are_eight_devices():
    assert len(jax.devices()) == 8
