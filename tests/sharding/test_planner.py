"""The planner's arithmetic: small deployments computed by hand, and what must hold for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharding.hardware import CHIPS, GB, chip
from sharding.planner import (
    Assumptions,
    Attention,
    Deployment,
    Exchange,
    PlanError,
    StageCosts,
    Work,
    best,
)

EXACT = Assumptions(
    bandwidth_reached=1,
    compute_reached=1,
    links_reached=1,
    collective_seconds=0,
    runtime_bytes=0,
    collective_bytes=0,
    allocator_fraction=0,
)
H200 = chip("h200")


def stage(**changes) -> StageCosts:
    """Of 16 GB of weights, and KV of 1 MB a token."""
    return StageCosts(
        **{
            "weight_bytes": 16 * GB,
            "temp_bytes": 0,
            "page_bytes": 16_000_000,
            "layers": Work(read_bytes=15 * GB, flops=15 * GB),
            "head": Work(read_bytes=GB, flops=GB),
            "attention": (Attention(kv_bytes=1e6, flops=1_000_000),),
            **changes,
        }
    )


def deployment(*stages: StageCosts, **changes) -> Deployment:
    return Deployment(
        **{
            **{"chip": H200, "stages": stages or (stage(),), "context": 1024, "concurrency": 4, "page_size": 16},
            **{"chunk": 256, "assumptions": EXACT, **changes},
        }
    )


# ---- Memory


def test_memory_by_hand():
    asked = deployment(stage(slot_bytes=1000, temp_bytes=GB), assumptions=Assumptions(allocator_fraction=0.01))
    memory = asked.tightest
    assert memory.capacity == H200.usable_bytes
    assert memory.kv_pool == (4 * 64 + 1) * 16_000_000  # and the page that is nobody's
    assert memory.sampling_state == 5000
    assert (memory.runtime, memory.collectives) == (2**30, 0)  # it has nobody to talk to
    assert memory.allocator == H200.usable_bytes // 100
    pages = (H200.usable_bytes - 17 * GB - 5000 - memory.reserve) // 16_000_000 - 1
    assert asked.fits
    assert asked.kv_tokens == pages * 16
    assert asked.max_sequences == pages // 64


def test_several_devices_need_buffers_for_what_they_exchange():
    several = {"assumptions": Assumptions.of(H200)}
    assert deployment(stage(), **several).tightest.collectives == 0
    assert deployment(stage(), stage_devices=2, **several).tightest.collectives == 2**30
    assert deployment(stage(), stage(), **several).tightest.collectives == 2**30
    assert deployment(stage(), replicas=2, **several).tightest.collectives == 0


def test_what_does_not_fit_lacks_so_many_bytes():
    large = deployment(stage(weight_bytes=H200.usable_bytes))
    assert not large.fits
    assert large.tightest.left == -(4 * 64 + 1) * 16_000_000
    assert (large.kv_tokens, large.max_sequences, large.curve()) == (0, 0, ())


def test_the_fullest_stage_decides():
    both = deployment(stage(), stage(weight_bytes=100 * GB))
    assert both.tightest is both.memory[1]
    assert both.kv_tokens == deployment(stage(weight_bytes=100 * GB)).kv_tokens


def test_replicas_share_the_sequences_and_add_their_pools():
    one, two = deployment(concurrency=5), deployment(concurrency=10, replicas=2)
    assert two.memory == one.memory
    assert (two.kv_tokens, two.max_sequences) == (2 * one.kv_tokens, 2 * one.max_sequences)
    assert deployment(concurrency=9, replicas=2).sequences_per_replica == 5


def test_each_sequence_brings_state_of_the_sampler():
    n = deployment(stage(slot_bytes=GB)).max_sequences
    assert 4 < n < deployment(concurrency=4).max_sequences
    assert deployment(stage(slot_bytes=GB), concurrency=n).fits
    assert not deployment(stage(slot_bytes=GB), concurrency=n + 1).fits


@pytest.mark.parametrize("name", ["stage_devices", "replicas", "context", "concurrency", "page_size", "chunk"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(PlanError, match=f"{name} = 0"):
        deployment(**{name: 0})


# ---- Time


def test_decoding_reads_all_weights_and_the_sequences_keys_and_values():
    point = deployment().decode(4)
    assert point.seconds_per_token == pytest.approx((16e9 + 4 * 1024 * 1e6) / H200.memory_bandwidth)
    assert point.tokens_per_second == pytest.approx(4 / point.seconds_per_token)
    assert point.bound == "memory"


def test_many_tokens_are_bound_by_arithmetic():
    small = stage(attention=(Attention(kv_bytes=0, flops=0),))
    point = deployment(small).decode(4096)
    assert point.bound == "compute"
    assert point.seconds_per_token == pytest.approx(4096 * 16e9 / H200.bf16_flops)


def test_links_add_to_the_time():
    exchange = Exchange(kind="all-reduce", count=3, bytes_per_token=1000, devices=4)
    assumed = replace(EXACT, collective_seconds=1e-3)
    linked = deployment(stage(exchanges=(exchange,)), stage_devices=4, assumptions=assumed)
    expected = 3 * (1e-3 + 2 * 3 / 4 * 1000 * 2 / H200.link_bandwidth)
    assert linked.decode(2).seconds_per_token - deployment().decode(2).seconds_per_token == pytest.approx(expected)
    assert exchange.seconds(2, H200.link_bandwidth, 1e-3) == pytest.approx(expected)
    assert deployment(stage(exchanges=(replace(exchange, count=99),)), assumptions=assumed).decode(2).bound == "links"


def test_a_window_bounds_what_is_read_and_multiplied():
    windowed = Attention(kv_bytes=1, flops=1, window=4)
    assert [windowed.seen(n) for n in (1, 4, 9)] == [1, 4, 4]
    assert [windowed.pairs(n) for n in (1, 4, 6)] == [1, 10, 18]
    assert Attention(kv_bytes=1, flops=1).pairs(6) == 21
    wide, narrow = (deployment(stage(attention=(Attention(kv_bytes=1e6, flops=1, window=w),))) for w in (None, 512))
    saved = 512 * 1e6 / H200.memory_bandwidth
    assert wide.decode(1).seconds_per_token - narrow.decode(1).seconds_per_token == pytest.approx(saved)


def test_a_prompt_goes_in_chunks_and_ends_in_the_head():
    flops = stage(layers=Work(flops=10**12), head=Work(flops=10**15), attention=(Attention(kv_bytes=0, flops=10**9),))
    expected = (600 * 10**12 + 600 * 601 / 2 * 10**9 + 10**15) / H200.bf16_flops
    assert deployment(flops).first_token_seconds(600) == pytest.approx(expected)
    # Each of three chunks reads the weights.
    read = stage(layers=Work(read_bytes=GB), head=Work(), attention=())
    assert deployment(read).first_token_seconds(600) == pytest.approx(3e9 / H200.memory_bandwidth)


def test_stages_work_at_the_same_time_on_parts_of_the_sequences():
    half = stage(layers=Work(read_bytes=8 * GB), head=Work(), attention=())
    seconds = 8e9 / H200.memory_bandwidth
    # One sequence passes both stages; of two, each stage has one.
    for sequences in (1, 2):
        assert deployment(half, half).decode(sequences).seconds_per_token == pytest.approx(2 * seconds)
    slow = replace(half, layers=Work(read_bytes=24 * GB))
    assert deployment(half, slow).decode(1).seconds_per_token == pytest.approx(4 * seconds)
    assert deployment(half, slow).decode(2).seconds_per_token == pytest.approx(6 * seconds)  # the other waits


def test_what_a_stage_sends_takes_time():
    sends = deployment(stage(sent_bytes=10**6), stage(), assumptions=replace(EXACT, collective_seconds=1e-3))
    extra = sends.decode(1).seconds_per_token - deployment(stage(), stage()).decode(1).seconds_per_token
    assert extra == pytest.approx(1e-3 + 1e6 / H200.link_bandwidth)


def test_a_ring_on_a_torus_has_the_links_of_one_axis():
    assert H200.ring_bandwidth == H200.link_bandwidth
    assert chip("v6e").ring_bandwidth == chip("v6e").link_bandwidth / 2
    assert chip("v5p").ring_bandwidth == chip("v5p").link_bandwidth / 3


def test_the_curve_doubles_up_to_what_fits():
    points = [point.concurrency for point in deployment(concurrency=6).curve()]
    most = deployment(concurrency=6).max_sequences
    assert points == [1, 2, 4, 6, 8, 16, 32, 64, 128, most]


# ---- Choosing


def test_the_fastest_that_fits_is_best_and_else_the_one_that_lacks_least():
    slow, fast = deployment(), deployment(stage(layers=Work(read_bytes=GB)))
    over, far_over = (deployment(stage(weight_bytes=H200.usable_bytes + n * GB)) for n in (1, 20))
    assert best([slow, over, fast]) is fast
    assert best([far_over, over]) is over


# ---- What holds for all

sizes = st.integers(1, 200 * GB)
stages = st.builds(
    stage,
    weight_bytes=sizes,
    slot_bytes=st.integers(0, GB),
    temp_bytes=st.integers(0, GB),
    page_bytes=st.integers(1, GB),
    layers=st.builds(Work, read_bytes=sizes, flops=sizes),
    attention=st.tuples(
        st.builds(
            Attention,
            kv_bytes=st.floats(0, 1e7),
            flops=st.integers(0, 10**8),
            window=st.none() | st.integers(1, 10_000),
        )
    ),
)
deployments = st.builds(
    Deployment,
    chip=st.sampled_from(list(CHIPS.values())),
    stages=st.lists(stages, min_size=1, max_size=3).map(tuple),
    stage_devices=st.integers(1, 8),
    replicas=st.integers(1, 4),
    context=st.integers(1, 100_000),
    concurrency=st.integers(1, 500),
    page_size=st.sampled_from([1, 16, 32]),
    chunk=st.integers(1, 4096),
    assumptions=st.sampled_from([EXACT, Assumptions(), Assumptions.of(chip("v6e"))]),
)


@given(deployments)
def test_the_parts_add_up_to_the_memory(each):
    for memory in each.memory:
        parts = memory.weights + memory.kv_pool + memory.sampling_state + memory.temporaries
        parts += memory.runtime + memory.collectives + memory.allocator + memory.left
        assert parts == memory.capacity == each.chip.usable_bytes


@given(deployments)
def test_what_fits_is_what_was_asked_for(each):
    assert each.fits == (each.max_sequences >= each.sequences_per_replica * each.replicas)
    if each.fits:
        assert each.kv_tokens >= each.concurrency * each.context


@given(deployments)
def test_as_many_sequences_fit_as_are_said_to(each):
    n = each.max_sequences
    assert not replace(each, concurrency=n + each.replicas).fits
    if n:
        assert replace(each, concurrency=n).fits


@given(deployments, st.integers(0, 100 * GB))
def test_more_memory_never_holds_less(each, more):
    chip = replace(each.chip, usable_bytes=each.chip.usable_bytes + more)
    larger = replace(each, chip=chip, assumptions=replace(each.assumptions, allocator_fraction=0))
    assert larger.kv_tokens >= each.kv_tokens
    assert larger.max_sequences >= each.max_sequences
    assert larger.tightest.left >= each.tightest.left


@given(deployments, st.integers(1, 100), st.integers(1, 100))
def test_more_sequences_never_decode_faster_each_nor_longer_prompts_start_sooner(each, n, more):
    assert each.decode(n).seconds_per_token <= each.decode(n + more).seconds_per_token * (1 + 1e-9)
    assert each.first_token_seconds(n) <= each.first_token_seconds(n + more) * (1 + 1e-9)
