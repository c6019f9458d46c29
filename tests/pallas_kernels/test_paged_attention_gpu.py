"""What is about the Hopper kernel alone; `test_paged_attention` compares it with the reference.

No interpreter checks `wgmma` and its layouts in registers, TMA's swizzles and boxes, registers and shared memory in
their limits, or the speed of anything.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pretended import HOPPER, chip, described
from test_paged_attention import LAYER, TOLERANCE, Case, Shape, random_case
from test_paged_attention import attend as reference_of

from pallas_kernels.dispatch import Device, KernelError
from pallas_kernels.paged_attention import gpu, pool_spec
from pallas_kernels.paged_attention.layout import PageLayout, values_of

int8, fp8, bf16, f32 = jnp.int8, jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
T, S, M, P = 40, 4, 16, 65
FIRST = Shape(16, 2, 3, 64, bf16)
make = partial(random_case, device=HOPPER, T=T, S=S, M=M, P=P)


def attend(case: Case, window=None, blocks=None):
    """Of the kernel, on a Hopper of two multiprocessors."""
    layout = PageLayout.of(case.pool, case.k.shape[1], case.k.shape[2])
    rows = layout.rows(case.k, case.v, values_of(case.pool).dtype)
    options = {"scale": 0.3, "window": window, "soft_cap": None, "blocks": blocks}
    with chip("gpu"):
        return np.asarray(gpu.paged_attention(case.q, rows, case.pool, layout, LAYER, *case[4:], **options)[1])


def assert_near_reference(out, case: Case, window) -> None:
    want = np.asarray(reference_of(case, "reference", window)[1], np.float32)
    np.testing.assert_allclose(out.astype(np.float32), want, atol=TOLERANCE[case.q.dtype])


def test_pages_before_the_window_and_after_the_end_are_never_read():
    """Their ids are out of the pool, where the interpreter reads nothing."""
    window, page_size = 17, 16
    lens = [(150, 1), (100, 20), (63, 1)]
    case = make(2, lens, FIRST)
    table = np.asarray(case.page_table).copy()
    for s, (before, now) in enumerate(lens):
        table[s, : max(before + 1 - window, 0) // page_size] = P + 5
        table[s, -(-(before + now) // page_size) :] = P + 5
    assert_near_reference(attend(case._replace(page_table=jnp.asarray(table)), window), case, window)


def test_the_blocks_of_a_sequence_are_cut_among_workers_and_joined():
    """Four of them, for four workers."""
    case = make(5, [(250, 1)], Shape(16, 1, 3, 64, bf16), T=1, S=2)
    assert_near_reference(attend(case), case, None)


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
        attend(case, blocks=blocks)


def test_other_blocks_give_the_same():
    case = make(6, [(190, 1), (7, 1), (130, 20)], Shape(128, 1, 3, 64, bf16))
    assert_near_reference(attend(case, window=100, blocks=gpu.Blocks(128, 64, 1)), case, window=100)


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
    with described(HOPPER):
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
