"""The Mosaic GPU kernels in Pallas' interpreter, where the two matrix products are plain dots.

What it cannot check: `wgmma` and its layouts in registers, TMA's swizzles and boxes, registers and shared memory in
their limits, and the speed of anything.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import reset_gpu_interpret_mode_state
from pretended import described
from test_paged_attention import LAYER, TOLERANCE, Case, Shape, random_case

from pallas_kernels.dispatch import Device, KernelError
from pallas_kernels.paged_attention import gpu, pool_spec, reference
from pallas_kernels.paged_attention.layout import PageLayout, values_of

HOPPER = Device("gpu", "NVIDIA H200")
int8, fp8, bf16, f32 = jnp.int8, jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
T, S, M, P = 40, 4, 16, 65
FIRST = Shape(16, 2, 3, 64, bf16)


class PlainDots:
    """`gpu.TensorCores` where there are none. Reads are fenced, as the interpreter wants of all but `wgmma`."""

    @staticmethod
    def scores(q_RH, k_CH):
        products = jnp.dot(q_RH[...].astype(f32), k_CH[...].astype(f32).T)
        plgpu.commit_smem()
        return products

    @staticmethod
    def weighted(acc_RH, weights_RC, v_CH):
        assert weights_RC.dtype == bf16
        products = jnp.dot(weights_RC.astype(f32), v_CH[...].astype(f32))
        plgpu.commit_smem()
        return acc_RH + products


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Interprets for a Hopper of two multiprocessors; races are errors, and memory that nothing wrote is NaN."""
    monkeypatch.setattr(gpu, "products", PlainDots)
    monkeypatch.setitem(gpu.MULTIPROCESSORS, "H200", 2)
    try:
        with described(HOPPER), plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
            yield
    finally:
        reset_gpu_interpret_mode_state()


@partial(jax.jit, static_argnames=("function", "window", "soft_cap", "blocks"))
def attend(function, case: Case, layer=LAYER, window=None, soft_cap=None, blocks=None):
    layout = PageLayout.of(case.pool, case.k.shape[1], case.k.shape[2])
    rows = layout.rows(case.k, case.v, values_of(case.pool).dtype)
    options = {"scale": 0.3, "window": window, "soft_cap": soft_cap}
    options |= {} if blocks is None else {"blocks": blocks}
    return function(case.q, rows, case.pool, layout, layer, *case[4:], **options)


def assert_equals_reference(case: Case, window=None, soft_cap=None, blocks=None) -> None:
    pool, out = attend(gpu.paged_attention, case, window=window, soft_cap=soft_cap, blocks=blocks)
    want_pool, want = attend(reference.paged_attention, case, window=window, soft_cap=soft_cap)
    for leaf, want_leaf in zip(jax.tree.leaves(pool), jax.tree.leaves(want_pool), strict=True):
        np.testing.assert_array_equal(np.asarray(leaf, np.float32), np.asarray(want_leaf, np.float32))
    assert_near(out, want)


def assert_near(out, want) -> None:
    # Weights are rounded to bfloat16 before they meet the values, and so are outputs: each off by 2**-9 of values
    # that stay under 4. TOLERANCE, 0.03, is twice the sum.
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want, np.float32), atol=TOLERANCE[want.dtype])


make = partial(random_case, device=HOPPER, T=T, S=S, M=M, P=P)

lengths = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 200), st.just(1)),  # decodes
        st.tuples(st.integers(0, 150), st.integers(1, 24)),  # prefill chunks
    ),
    max_size=S,
).filter(lambda pairs: sum(now for _, now in pairs) <= T)


# Between them every feature, page size and head dim; each is compiled once, and every example reuses that.
@pytest.mark.parametrize(
    ("shape", "window", "soft_cap"),
    [
        (FIRST, 17, None),
        (Shape(32, 1, 4, 128, bf16), 70, 2.0),
        (Shape(128, 1, 16, 64, bf16), None, None),
        (Shape(64, 1, 1, 256, bf16), 100, None),
        (Shape(16, 1, 7, 128, bf16, int8), None, None),
        (Shape(64, 1, 2, 64, bf16, fp8), 50, 2.0),
    ],
)
def test_equals_reference(shape, window, soft_cap):
    @settings(max_examples=4, deadline=None)
    @given(seed=st.integers(0, 2**31), lens=lengths)
    def check(seed, lens):
        lens = [(min(before, M * shape.page_size - now), now) for before, now in lens]
        assert_equals_reference(make(seed, lens, shape), window, soft_cap)

    check()


def test_a_step_of_nothing_gives_zeros():
    assert_equals_reference(make(0, [], FIRST), window=17)


def test_pages_may_be_shared():
    case = make(1, [(37, 1), (36, 1), (33, 9)], FIRST)
    table = np.asarray(case.page_table).copy()
    table[1:3, :2] = table[0, :2]
    assert_equals_reference(case._replace(page_table=jnp.asarray(table)), window=17)


def test_pages_before_the_window_and_after_the_end_are_never_read():
    """Their ids are out of the pool, where the interpreter reads nothing."""
    window, page_size = 17, 16
    lens = [(150, 1), (100, 20), (63, 1)]
    case = make(2, lens, FIRST)
    table = np.asarray(case.page_table).copy()
    for s, (before, now) in enumerate(lens):
        table[s, : max(before + 1 - window, 0) // page_size] = P + 5
        table[s, -(-(before + now) // page_size) :] = P + 5
    _, out = attend(gpu.paged_attention, case._replace(page_table=jnp.asarray(table)), window=window, soft_cap=None)
    assert_near(out, attend(reference.paged_attention, case, window=window, soft_cap=None)[1])


@pytest.mark.parametrize("tokens", [1, 2])
def test_steps_of_few_tokens(tokens):
    """One token leaves no room for a prefill; its four blocks are cut among four workers, and joined."""
    assert_equals_reference(make(5, [(250, tokens)], Shape(16, 1, 3, 64, bf16), T=tokens, S=2))


decode_segments = jax.jit(gpu._decode_segments, static_argnums=(2, 3, 4))


@settings(max_examples=40, deadline=None)
@given(
    lens=st.lists(st.tuples(st.integers(0, 5000), st.sampled_from([1, 1, 1, 0, 9])), min_size=8, max_size=8),
    window=st.sampled_from([None, 300]),
    workers=st.sampled_from([4, 264]),
    K=st.sampled_from([1, 3]),
)
def test_workers_share_each_block_of_decodes_once(lens, window, workers, K):
    now = np.array([now for _, now in lens])
    kv_lens = np.array([before for before, _ in lens]) + now
    scores = gpu._Scores(1.0, window, None)
    config = gpu._Config(workers, 1, 1, 8, 64, 64, 2, 2, merged=True)
    segments, first_U1 = jax.tree.map(
        np.asarray, decode_segments(jnp.array(kv_lens), jnp.array(now), K, config, scores)
    )
    column = lambda name: segments.rows_X9[:, gpu.Column[name]]
    walks = [range(*pair) for pair in zip(column("FIRST_BLOCK"), column("END_BLOCK"), strict=True)]
    expected = {
        (s, h): list(range(max(kv_lens[s] - (window or kv_lens[s]), 0) // 64, -(-kv_lens[s] // 64)))
        if now[s] == 1
        else []
        for s in range(len(lens))
        for h in range(K)
    }
    for unit, blocks in expected.items():
        own = range(*first_U1[unit[0] * K + unit[1] :][:2])
        assert all((column("SEQUENCE")[x], column("HEAD")[x]) == unit for x in own)
        assert [block for x in own for block in walks[x]] == blocks
    loads = [sum(len(walks[x]) for x in range(*pair)) for pair in pairwise(segments.starts_Z1)]
    total = sum(map(len, expected.values()))
    assert sum(loads) == total
    assert max(loads) == -(-total // workers)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [bf16, int8, fp8])
def test_shared_memory_has_room_for_two_blocks_in_flight(head_dim, dtype):
    pool = pool_spec(1, 1, 16, 1, head_dim, dtype, HOPPER)
    gpu.check_blocks(gpu.blocks_for("no such chip", pool, 4), pool, 4)


@pytest.mark.parametrize(
    ("blocks", "head_dim", "message"),
    [
        (gpu.Blocks(64, 128, 3), 64, "registers are enough for 1 or 2 workers"),
        (gpu.Blocks(32, 128, 1), 64, "a decode block is of 64 or 128"),
        (gpu.Blocks(64, 192, 1), 64, "a prefill block is of 64 or 128"),
        (gpu.Blocks(64, 128, 1), 256, "with heads of 256 registers hold prefill blocks of 64"),
        (gpu.Blocks(128, 128, 2), 128, "shared memory holds less than 2 decode blocks"),
    ],
)
def test_blocks_that_cannot_be_are_refused_by_name(blocks, head_dim, message):
    case = make(0, [(3, 1)], Shape(16, 1, 1, head_dim, bf16))
    with pytest.raises(KernelError, match=message):
        attend(gpu.paged_attention, case, blocks=blocks)


def test_other_blocks_give_the_same():
    case = make(6, [(190, 1), (7, 1), (130, 20)], Shape(128, 1, 3, 64, bf16))
    assert_equals_reference(case, window=100, blocks=gpu.Blocks(128, 64, 1))


@pytest.mark.parametrize(
    ("query_lens", "kv_lens", "window", "positions"),
    [
        ([1], [100], None, 112 + 1),  # pages of 16, and the token written
        ([1], [100], 17, 32 + 1),
        ([1, 50], [16, 150], None, (16 + 1) + (144 + 160 + 50)),  # tiles of 40 tokens from token 0 on
    ],
)
def test_transferred_bytes_follow_the_walk(query_lens, kv_lens, window, positions):
    pool = pool_spec(1, 9, 16, 2, 64, int8, HOPPER)
    got = gpu.transferred_bytes(pool, PageLayout(2, 64, False), 6, query_lens, kv_lens, window)
    assert got == positions * 2 * 2 * (64 + 4)


def refusal(kind="NVIDIA H200", platform="gpu", shape=FIRST, joined=False):
    device = Device(platform, kind)
    pool = pool_spec(2, P, shape.page_size, shape.K, shape.H, shape.kv_dtype or shape.dtype, HOPPER)
    return gpu.refusal(device, PageLayout(shape.K, shape.H, joined), shape.dtype, pool, shape.G)


@pytest.mark.parametrize(
    "kind",
    ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H100", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H20"],
)
def test_hoppers_are_served(kind):
    assert refusal(kind) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "NVIDIA A100-SXM4-80GB"}, "device is NVIDIA A100-SXM4-80GB; needs a GPU of compute capability 9.0"),
        ({"kind": "NVIDIA B200"}, "device is NVIDIA B200"),
        ({"kind": "cpu", "platform": "cpu"}, "device is cpu"),
        ({"shape": FIRST._replace(dtype=f32)}, "queries are float32; needs bfloat16"),
        ({"shape": FIRST._replace(kv_dtype=jnp.float16)}, "the pool is float16"),
        ({"shape": FIRST._replace(page_size=8)}, "page size is 8; needs 16, 32, 64 or 128"),
        ({"shape": FIRST._replace(H=512)}, "head dim is 512; needs 64, 128 or 256"),
        ({"shape": FIRST._replace(G=17)}, "17 query heads share a KV head; needs at most 16"),
        ({"joined": True}, "joins keys and values"),
    ],
)
def test_what_is_not_served_is_refused_by_name(change, message):
    assert message in refusal(**change)
