"""One suite over every implementation, against the float32 reference."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pretended import TPUS, chip, described

from pallas_kernels.dispatch import Device, KernelError
from pallas_kernels.paged_attention import QuantizedKV, paged_attention, pool_spec, tpu
from pallas_kernels.paged_attention.api import check_step
from pallas_kernels.paged_attention.layout import PageLayout, values_of

IMPLEMENTATIONS = ["xla", "tpu", "gpu"]
T, S, M, P = 48, 6, 8, 64
LAYER = 1
CPU = Device("cpu", "cpu")
int8, fp8, bf16, f32 = jnp.int8, jnp.float8_e4m3fn, jnp.bfloat16, jnp.float32
# Same arithmetic in another order: float32 rounding over at most some thousand positions. Quantized pools are equal
# byte for byte, so that they add nothing. bfloat16 keeps 8 bits: products of values near 1 differ by some 2**-7.
TOLERANCE = {jnp.dtype(f32): 2e-5, jnp.dtype(bf16): 0.03}


class Shape(NamedTuple):
    """Static facts of a case; `kv_dtype` None is that of the queries."""

    page_size: int
    K: int
    G: int
    H: int
    dtype: object = f32
    kv_dtype: object = None


class Case(NamedTuple):
    """Arguments of `paged_attention` up to `num_seqs`, less the layer."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    pool: jax.Array | QuantizedKV
    page_table: jax.Array
    kv_lens: jax.Array
    query_starts: jax.Array
    num_seqs: jax.Array


def random_case(
    seed: int,
    lens: list[tuple[int, int]],
    shape: Shape,
    device: Device,
    *,
    T: int = T,
    S: int = S,
    M: int = M,
    P: int = P,
    shared: int = 0,
) -> Case:
    """A step of sequences (tokens before, tokens now), pages in any order; bytes never written are NaN.

    Sequences that fill as many pages before the step share their first `shared`.
    """
    rng = np.random.default_rng(seed)
    page_size, K, G, H, dtype, kv_dtype = shape
    spec = pool_spec(2, P, page_size, K, H, kv_dtype or dtype, device)
    layout = PageLayout.of(spec, K, H)
    # int8 has no NaN, but its scales have; a byte of 127 is NaN in fp8.
    bad = lambda dtype: 127 if dtype in (int8, jnp.uint8) else np.nan
    poisoned = lambda leaf: np.full(leaf.shape, bad(leaf.dtype), np.float32).astype(leaf.dtype)
    pool = jax.tree.map(poisoned, spec)
    ids = rng.permutation(np.arange(1, P))
    table, kv_lens, starts = np.zeros((S, M), np.int32), np.zeros(S, np.int32), np.zeros(S + 1, np.int32)
    random = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    used = 0
    for s, (before, now) in enumerate(lens):
        pages = -(-(before + now) // page_size)
        table[s, :pages] = ids[used : used + pages]
        table[s, pages:] = rng.integers(0, P, M - pages)  # entries past the end are ignored
        if before >= shared * page_size:
            table[s, :shared] = ids[-shared:] if shared else []
        used += pages
        kv_lens[s] = before + now
        starts[s + 1 :] = starts[s] + now
        if before:
            at = np.arange(before)
            k, v = (np.pad(random(before, K, H), ((0, 0), (0, 0), (0, layout.head_dim - H))) for _ in range(2))
            rows = layout.rows(jnp.asarray(k, dtype), jnp.asarray(v, dtype), values_of(spec).dtype)
            for leaf, new in zip(jax.tree.leaves(pool), jax.tree.leaves(rows), strict=True):
                leaf[LAYER, table[s, at // page_size], :, at % page_size] = np.asarray(new)
    cast = lambda x: jnp.asarray(x, dtype)
    q, k, v = cast(random(T, K * G, H)), cast(random(T, K, H)), cast(random(T, K, H))
    step = map(jnp.asarray, (table, kv_lens, starts, np.int32(len(lens))))
    return Case(q, k, v, jax.tree.map(jnp.asarray, pool), *step)


@partial(jax.jit, static_argnames=("implementation", "window", "soft_cap"))
def attend(case: Case, implementation: str, window=None, soft_cap=None, layer=LAYER):
    return paged_attention(
        *case[:4], layer, *case[4:], scale=0.3, window=window, soft_cap=soft_cap, implementation=implementation
    )


def assert_equals_reference(implementation: str, make_case, window=None, soft_cap=None) -> None:
    """`make_case(device)` gives the step; pools must be equal byte for byte, outputs near."""
    with chip(implementation) as (device, name):
        case = make_case(device)
        pool, out = attend(case, name, window, soft_cap)
        pool, out = jax.tree.map(lambda each: np.asarray(each, np.float32), (pool, out))
    want_pool, want = attend(case, "reference", window, soft_cap)
    for leaf, want_leaf in zip(jax.tree.leaves(pool), jax.tree.leaves(want_pool), strict=True):
        np.testing.assert_array_equal(leaf, np.asarray(want_leaf, np.float32))
    want = np.asarray(want, np.float32)
    assert np.isfinite(want).all()
    tolerance = TOLERANCE[case.q.dtype]
    np.testing.assert_allclose(out, want, atol=tolerance, rtol=tolerance)


def lengths(longest: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Sequences that a step has room for, of up to `longest` tokens."""
    return st.lists(
        st.one_of(
            st.tuples(st.integers(0, longest - 1), st.just(1)),  # decodes
            st.tuples(st.integers(0, longest * 2 // 3 - 2), st.integers(1, 20)),  # prefill chunks
            st.tuples(st.integers(0, longest), st.just(0)),  # nothing to do in this step, or empty
        ),
        max_size=S,
    ).filter(lambda pairs: sum(now for _, now in pairs) <= T)


def served_by(implementation: str, shape: Shape) -> Shape:
    """The shape in what numbers an implementation takes."""
    return shape._replace(dtype=bf16) if implementation == "gpu" else shape


# Kernels are compiled for a few combinations that between them have every feature; XLA takes smaller ones as well.
COMBINATIONS = {
    "xla": [
        (shape, window, soft_cap)
        for shape in (Shape(8, 2, 3, 16), Shape(16, 1, 4, 8, bf16), Shape(8, 3, 1, 32), Shape(8, 2, 2, 16, f32, int8))
        for window, soft_cap in ((None, None), (5, 2.0), (17, None))
    ]
    + [(Shape(8, 1, 3, 32, f32, fp8), 17, None)],
    "tpu": [
        (Shape(8, 2, 3, 128), None, None),
        (Shape(64, 1, 4, 64), 17, 2.0),  # joined rows
        (Shape(16, 3, 1, 80, bf16), 5, None),  # padded heads
        (Shape(32, 2, 2, 128, f32, int8), None, 2.0),
        (Shape(128, 1, 16, 64, bf16, fp8), 17, None),
    ],
    "tpu-2-cores": [(Shape(16, 2, 1, 256, bf16), 17, None)],
    # Every page size, head dim and kind of pool; its blocks are of 64 positions, so that sequences are longer.
    "gpu": [
        (Shape(16, 2, 3, 64, bf16), 17, None),
        (Shape(32, 1, 4, 128, bf16), 70, 2.0),
        (Shape(128, 1, 16, 64, bf16), None, None),
        (Shape(64, 1, 1, 256, bf16), 100, None),
        (Shape(32, 1, 7, 128, bf16, int8), 70, None),
        (Shape(128, 1, 2, 256, bf16, fp8), None, 2.0),
    ],
}
EXAMPLES = {"xla": 20, "tpu": 6, "tpu-2-cores": 6, "gpu": 3}


def longest(implementation: str) -> int:
    return 200 if implementation == "gpu" else 64


def case_of(implementation: str, shape: Shape):
    """`random_case` with room for the longest sequences: one program for each combination."""
    room = max(M, -(-longest(implementation) // shape.page_size))
    return partial(random_case, shape=shape, M=room, P=1 + S * room)


@pytest.mark.parametrize(
    ("implementation", "shape", "window", "soft_cap"),
    [(name, *combination) for name, combinations in COMBINATIONS.items() for combination in combinations],
)
def test_equals_reference(implementation, shape, window, soft_cap):
    @settings(max_examples=EXAMPLES[implementation], deadline=None)
    @given(seed=st.integers(0, 2**31), lens=lengths(longest(implementation)), shared=st.integers(0, 2))
    @example(seed=0, lens=[], shared=0)
    @example(seed=1, lens=[(0, 0), (37, 1), (40, 0), (36, 9), (0, 0)], shared=1)
    def check(seed, lens, shared):
        case = partial(case_of(implementation, shape), seed, lens, shared=shared)
        assert_equals_reference(implementation, lambda device: case(device=device), window, soft_cap)

    check()


@pytest.mark.parametrize(
    ("implementation", "tokens", "window"),
    [
        *((name, *step) for name in ("xla", "tpu") for step in ((1, None), (2, 5), (8, 5), (9, None))),
        *(("gpu", *step) for step in ((1, None), (2, 5))),
    ],
)
def test_steps_of_few_tokens_equal_reference(implementation, tokens, window):
    """One token leaves no room for a prefill, and a small step may have a program of its own."""
    lens = {1: [(30, 1)], 2: [(11, 2)], 8: [(0, 3), (20, 1), (13, 3)], 9: [(63, 1), (5, 6), (0, 1)]}[tokens]
    shape = served_by(implementation, Shape(16, 2, 3, 64))
    assert_equals_reference(implementation, partial(random_case, 2, lens, shape, T=tokens), window)


@pytest.mark.parametrize(
    ("implementation", "window"), [("xla", None), ("xla", 100), ("tpu", None), ("tpu", 100), ("gpu", 100)]
)
def test_long_sequences_equal_reference(implementation, window):
    """Lengths of several turns of every loop, one long sequence among short ones."""
    lens = [(7, 1), (1500, 1), (0, 1), (700, 70), (130, 1), (0, 66)]
    case = partial(random_case, 3, lens, served_by(implementation, Shape(32, 2, 2, 64)), T=143, M=64, P=128)
    assert_equals_reference(implementation, case, window)


def test_page_tables_beyond_scalar_memory_take_several_launches(monkeypatch):
    """Of at most 2 sequences each; the last launch has one. Tiles, decodes and pages shared over launches."""
    monkeypatch.setattr(tpu, "TABLE_ENTRIES", 2 * M)
    shape = Shape(16, 2, 2, 128)
    for lens in ([(37, 1), (0, 9), (40, 0), (36, 1), (33, 20)], [(5, 1)], []):
        case = partial(random_case, 7, lens, shape, T=33, S=5, P=50, shared=2)  # no other test has these sizes
        assert_equals_reference("tpu", case, 30)
    with described(TPUS["tpu"]):
        program = jax.make_jaxpr(lambda case: call(case, implementation="tpu"))(case(device=TPUS["tpu"]))
    assert str(program).count("name=paged_attention_write") == 3


@pytest.mark.parametrize(("writes", "tokens"), [(2, 45), (6, 46)])  # no other test has as many tokens
def test_fewer_blocks_under_way_write_the_same(monkeypatch, writes, tokens):
    monkeypatch.setattr(tpu, "WRITES", writes)
    case = partial(random_case, 8, [(20, 1), (3, 37), (60, 1), (15, 2)], Shape(16, 1, 2, 128, f32, int8), T=tokens)
    assert_equals_reference("tpu", case)


def test_a_page_table_row_beyond_scalar_memory_is_refused():
    device = Device("tpu", "TPU v6 lite")
    case = random_case(0, [(3, 1)], Shape(16, 2, 2, 128), device, M=tpu.TABLE_ENTRIES + 1)
    with described(device), pytest.raises(KernelError, match=r"196609 pages of a sequence; .* lists 196608"):
        call(case, implementation="tpu")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layer_may_be_a_loop_variable(implementation):
    with chip(implementation) as (device, name):
        case = random_case(4, [(20, 1), (5, 9)], served_by(implementation, Shape(16, 2, 2, 64)), device, T=16)
        case = case._replace(pool=case.pool.at[0].set(case.pool[1]))  # the two layers hold the same
        layers = lambda pool, layer: attend(case._replace(pool=pool), name, layer=layer)
        scan = jax.jit(lambda pool: jax.lax.scan(layers, pool, jnp.arange(2)))
        pool, out = jax.block_until_ready(scan(case.pool))
    wide = lambda array: np.asarray(array, np.float32)
    want = wide(attend(case, "reference")[1])
    np.testing.assert_allclose(wide(out), np.stack([want, want]), atol=TOLERANCE[case.q.dtype])
    np.testing.assert_array_equal(wide(pool[0]), wide(pool[1]))


@pytest.mark.parametrize("H", [64, 128])
def test_xla_reads_pages_as_a_tpu_keeps_them(H):
    """For TPUs without a kernel: joined rows, and scales in rows longer than a page."""
    case = random_case(6, [(37, 1), (20, 9)], Shape(16, 2, 2, H, f32, int8), Device("tpu", "TPU v4"))
    assert case.pool.scales.shape[-1] == 128
    (_, out), (_, want) = attend(case, "xla"), attend(case, "reference")
    np.testing.assert_allclose(out, want, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_may_be_shared(implementation):
    shape, window, soft_cap = COMBINATIONS[implementation][0]

    def shared(device):
        case = case_of(implementation, shape)(1, [(37, 1), (36, 1), (33, 9)], device=device)
        table = case.page_table.at[1:3, :2].set(case.page_table[0, :2])
        return case._replace(page_table=table)

    assert_equals_reference(implementation, shared, window, soft_cap)


@pytest.mark.parametrize(("kv_dtype", "tolerance"), [(int8, 5 * 0.015), (fp8, 5 * 0.06)])
def test_rounding_of_a_quantized_pool_is_small(kv_dtype, tolerance):
    """The suite compares like with like, this the reference with what was never rounded."""
    lens = [(40, 1), (10, 20)]
    # A key is off by up to half a step: 1/254 of the head's largest, some 3, or 2**-4 of itself. Over 64 elements at a
    # scale of 0.3 a score, and so a weight, is off by 1.5% or 6% (one sigma); outputs are near 1, and there are 12,288.
    exact, rounded = (
        np.asarray(attend(random_case(5, lens, Shape(32, 2, 2, 64, f32, dtype), CPU), "reference")[1])
        for dtype in (None, kv_dtype)
    )
    np.testing.assert_allclose(rounded, exact, atol=tolerance)
    assert np.abs(rounded - exact).max() > 1e-4


small = partial(random_case, 0, [(3, 1), (17, 2)], Shape(16, 2, 2, 64), CPU)


def test_pool_is_aliased_not_copied():
    case = small()
    large = jax.ShapeDtypeStruct((2, 16 * P, *case.pool.shape[2:]), case.pool.dtype)
    call = lambda pool, rest: attend(Case(*rest[:3], pool, *rest[3:]), "xla")
    jitted = jax.jit(call, donate_argnums=0)
    memory = jitted.lower(large, case[:3] + case[4:]).compile().memory_analysis()
    assert memory.alias_size_in_bytes == large.size * 4
    assert memory.temp_size_in_bytes < large.size * 4 / 4


def call(case: Case, *, layer=LAYER, scale=1.0, **options):
    return paged_attention(*case[:4], layer, *case[4:], scale=scale, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c._replace(k=c.k[:, :, :8]), r"k \(48, 2, 8\) and v \(48, 2, 64\) do not fit"),
        (lambda c: c._replace(q=c.q[:, :3]), "3 query heads are no multiple of 2 KV heads"),
        (lambda c: c._replace(q=c.q.astype(bf16)), "dtypes bfloat16, float32 and float32"),
        (lambda c: c._replace(pool=c.pool[:, :, :3]), r"is neither \[L, P, 4, page_size, 64 or more\] nor"),
        (lambda c: c._replace(pool=c.pool[..., :32]), "is neither"),
        (lambda c: c._replace(pool=c.pool.astype(int8)), "int8 without scales"),
        (lambda c: c._replace(pool=QuantizedKV(c.pool, c.pool[..., 0])), "float32 with scales"),
        (
            lambda c: c._replace(pool=QuantizedKV(c.pool.astype(int8), c.pool[:, :, 0, :, 0])),
            r"scales are \(2, 64, 16\), not \(2, 64, 4, 16\), or longer",
        ),
        (lambda c: c._replace(kv_lens=c.kv_lens[:3]), r"for 6 sequences, kv_lens is \(3,\)"),
        (lambda c: c._replace(page_table=c.page_table.at[1, 1].set(64)), r"page_table\[1, 1\] is 64; .* 0 to 63"),
        (lambda c: c._replace(page_table=c.page_table.at[0, 0].set(-1)), r"page_table\[0, 0\] is -1"),
        (lambda c: c._replace(kv_lens=c.kv_lens.at[1].set(129)), r"kv_lens\[1\] is 129.*8 pages of 16"),
        (lambda c: c._replace(kv_lens=c.kv_lens.at[1].set(1)), r"kv_lens\[1\] is 1, with 2 tokens"),
        (lambda c: c._replace(query_starts=c.query_starts.at[2].set(99)), "do not rise from 0 to at most 48"),
        (lambda c: c._replace(num_seqs=jnp.int32(7)), "num_seqs is 7; the page table has 6 rows"),
        (lambda c: c._replace(q=c.q[0]), r"q has shape \(4, 64\); it has 3 axes"),
        (lambda c: c._replace(k=c.k[:, :0], v=c.v[:, :0]), r"k has shape \(48, 0, 64\); .* none of them empty"),
        (lambda c: c._replace(page_table=c.page_table[0]), r"page_table has shape \(8,\); it has 2 axes"),
        (lambda c: c._replace(page_table=c.page_table[:, :0]), r"page_table has shape \(6, 0\)"),
        (lambda c: c._replace(num_seqs=c.num_seqs[None]), r"num_seqs has shape \(1,\); it has 0 axes"),
        (lambda c: c._replace(kv_lens=c.kv_lens.astype(f32)), "kv_lens is of float32; it is of int32"),
        (lambda c: c._replace(**{name: getattr(c, name).astype(int8) for name in "qkv"}), "q, k and v are of int8"),
        (lambda c: c._replace(pool=c.pool.astype(jnp.float8_e5m2)), "a pool of float8_e5m2 without scales"),
        (lambda c: c._replace(pool=c.pool[0]), "the pool has shape .*; it has 5 axes"),
        (lambda c: c._replace(pool=[c.pool]), "the pool is a list"),
        (
            lambda c: c._replace(pool=QuantizedKV(c.pool.astype(int8), c.pool[..., 0].astype(bf16))),
            "scales are of bfloat16; they are of float32",
        ),
    ],
)
def test_bad_input_is_named_before_any_launch(change, message):
    with pytest.raises(KernelError, match=message):
        call(change(small()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"window": window}, "integer above 0, or None") for window in (0, -3, 2.5)),
        *(({"soft_cap": cap}, "finite number above 0, or None") for cap in (0.0, float("nan"), float("inf"))),
        *(({"scale": scale}, f"scale is {scale}; it is a finite number") for scale in (float("nan"), float("inf"))),
        *(({"layer": layer}, f"layer is {layer}; the pool's layers go from 0 to 1") for layer in (-1, 2, jnp.int32(7))),
        *(({"layer": layer}, "it is an integer") for layer in (1.5, jnp.zeros(1, jnp.int32))),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(KernelError, match=message):
        call(small(), **options)


def test_entries_past_a_sequence_may_be_anything():
    case = small()
    table, lens, starts = np.asarray(case.page_table).copy(), np.asarray(case.kv_lens), np.asarray(case.query_starts)
    table[0, 5] = -7
    check_step(table, lens, starts, 2, pool_shape=case.pool.shape, num_tokens=T)


def test_forced_implementation_that_does_not_exist_is_an_error():
    with pytest.raises(KernelError, match="no implementation 'cuda'; there are "):
        call(small(), implementation="cuda")


def test_forced_implementation_of_another_device_is_an_error():
    with pytest.raises(KernelError, match="tpu: the device is no TPU but cpu"):
        call(small(), implementation="tpu")


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        ("TPU v4", Shape(16, 2, 2, 128), "TPU v4 is none of 7x, v5e, v5p, v6e"),
        (
            "TPU v6 lite",
            Shape(24, 2, 2, 128, bf16),
            "pages of 24 tokens; with bfloat16 the kernel takes multiples of 16",
        ),
        ("TPU v6 lite", Shape(256, 2, 2, 128), "pages of 256 tokens"),
        ("TPU v6 lite", Shape(16, 1, 17, 128), "17 query heads for a KV head"),
        ("TPU v6 lite", Shape(16, 1, 2, 128, bf16, f32), "queries of bfloat16 over a pool of float32"),
        ("TPU v6 lite", Shape(16, 1, 2, 128, bf16, jnp.float16), "queries of bfloat16 over a pool of float16"),
    ],
)
def test_what_a_kernel_does_not_serve_is_refused_by_name(kind, shape, message):
    device = Device("tpu", kind)
    case = random_case(0, [(3, 1)], shape, device)
    with described(device), pytest.raises(KernelError, match=message):
        call(case, implementation="tpu")


def test_rows_that_no_pool_of_a_tpu_has_are_refused():
    with described(Device("tpu", "TPU v6 lite")), pytest.raises(KernelError, match="rows of 64 elements"):
        call(small(), implementation="tpu")


@pytest.mark.parametrize("kv_dtype", [f32, bf16, int8, fp8])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize(("K", "G", "H"), [(1, 1, 64), (1, 16, 256), (8, 4, 128), (32, 1, 128), (64, 1, 128)])
def test_blocks_that_are_guessed_can_be(K, G, H, page_size, kv_dtype):
    device = Device("tpu", "TPU v6 lite")
    pool = pool_spec(1, 8, page_size, K, H, kv_dtype, device)
    layout = PageLayout.of(pool, K, H)
    tpu.check_blocks(tpu.blocks_for("no such chip", layout, pool, G), layout, pool, G)


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (tpu.Blocks(128, 128, 6), "a tile is a power of two"),
        (tpu.Blocks(100, 128, 8), "a block is whole pages of 32 tokens"),
        (tpu.Blocks(128, 0, 8), "a block is whole pages"),
        (tpu.Blocks(1 << 15, 128, 8), r"they take \d+ bytes on the chip, of 50331648"),
    ],
)
def test_blocks_that_cannot_be_are_named(blocks, message):
    device = Device("tpu", "TPU v6 lite")
    pool = pool_spec(1, 8, 32, 8, 128, bf16, device)
    with pytest.raises(KernelError, match=message):
        tpu.check_blocks(blocks, PageLayout.of(pool, 8, 128), pool, 4)


def test_a_call_that_its_platforms_kernel_does_not_serve_is_logged_once(caplog):
    device = Device("tpu", "TPU v6 lite")
    case = random_case(0, [(3, 1)], Shape(256, 2, 2, 128), device)
    with described(device):
        for _ in range(2):
            jax.eval_shape(lambda *case: call(Case(*case)), *case)
    assert [record.getMessage() for record in caplog.records] == [
        "paged_attention on TPU v6 lite is by xla "
        "(tpu: pages of 256 tokens; with float32 the kernel takes multiples of 8 up to 128)"
    ]
    jax.eval_shape(lambda *case: call(Case(*case)), *small())
    assert len(caplog.records) == 1  # a CPU has no kernel to miss
