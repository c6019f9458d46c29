"""One suite over every implementation, against the float32 reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import KernelError
from pallas_kernels.paged_attention import paged_attention, pool_shape

IMPLEMENTATIONS = ["xla"]
T, S, M, P = 48, 6, 8, 64


def random_case(seed: int, lens: list[tuple[int, int]], page_size: int, K: int, G: int, H: int, dtype, T: int = T):
    """A step of sequences (tokens before, tokens now); bytes never written are NaN."""
    rng = np.random.default_rng(seed)
    pool = np.full(pool_shape(2, P, page_size, K, H), np.nan, np.float32)
    ids = rng.permutation(np.arange(1, P))
    table, kv_lens, starts = np.zeros((S, M), np.int32), np.zeros(S, np.int32), np.zeros(S + 1, np.int32)
    used = 0
    for s, (before, now) in enumerate(lens):
        pages = -(-(before + now) // page_size)
        table[s, :pages] = ids[used : used + pages]
        table[s, pages:] = rng.integers(0, P, M - pages)  # entries past the end are ignored
        used += pages
        kv_lens[s] = before + now
        starts[s + 1 :] = starts[s] + now
        for position in range(before):
            page, at = table[s, position // page_size], position % page_size
            pool[1, page, :, at] = rng.standard_normal((2 * K, H))
    q = rng.standard_normal((T, K * G, H)).astype(np.float32)
    k, v = (rng.standard_normal((T, K, H)).astype(np.float32) for _ in range(2))
    cast = lambda x: jnp.asarray(x, dtype)
    return (cast(q), cast(k), cast(v), cast(pool), 1, *map(jnp.asarray, (table, kv_lens, starts))), len(lens)


lengths = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 63), st.just(1)),  # decodes
        st.tuples(st.integers(0, 40), st.integers(1, 20)),  # prefill chunks
    ),
    max_size=S,
).filter(lambda pairs: sum(now for _, now in pairs) <= T)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    lens=lengths,
    shape=st.sampled_from([(8, 2, 3, 16), (16, 1, 4, 8), (8, 3, 1, 32)]),
    window=st.sampled_from([None, 5, 17]),
    soft_cap=st.sampled_from([None, 2.0]),
)
def test_equals_reference(implementation, seed, lens, shape, window, soft_cap):
    page_size, K, G, H = shape
    args, num_seqs = random_case(seed, lens, page_size, K, G, H, jnp.float32)
    run = lambda name: _jitted(*args[:4], *args[5:], jnp.int32(num_seqs), name, window, soft_cap)
    want_pool, want = run("reference")
    pool, out = run(implementation)
    np.testing.assert_array_equal(np.asarray(pool), np.asarray(want_pool))
    assert np.isfinite(np.asarray(want)).all()
    # Same arithmetic in another order: float32 rounding over at most 64 positions.
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9])
def test_steps_of_few_tokens_equal_reference(implementation, tokens, window):
    """One token leaves no room for a prefill, and a small step may have a program of its own."""
    lens = {1: [(30, 1)], 2: [(11, 2)], 8: [(0, 3), (20, 1), (13, 3)], 9: [(63, 1), (5, 6), (0, 1)]}[tokens]
    args, num_seqs = random_case(2, lens, 8, 2, 3, 16, jnp.float32, T=tokens)
    run = lambda name: _jitted(*args[:4], *args[5:], jnp.int32(num_seqs), name, window, None)
    np.testing.assert_allclose(np.asarray(run(implementation)[1]), np.asarray(run("reference")[1]), atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [None, 100])
def test_long_sequences_equal_reference(implementation, window):
    """Lengths of several turns of every loop, one long sequence among short ones."""
    rng = np.random.default_rng(3)
    lens = [(7, 1), (1500, 1), (0, 1), (700, 70), (130, 1), (0, 66)]
    page_size, K, G, H = 32, 2, 2, 16
    seqs, pages, tokens = len(lens), 64, sum(now for _, now in lens) + 3
    pool = np.full(pool_shape(2, seqs * pages, page_size, K, H), np.nan, np.float32)
    table = rng.permutation(seqs * pages).reshape(seqs, pages).astype(np.int32)
    for s, (before, _) in enumerate(lens):
        for index in range(-(-before // page_size)):
            filled = min(before - index * page_size, page_size)
            pool[1, table[s, index], :, :filled] = rng.standard_normal((2 * K, filled, H))
    kv_lens = jnp.asarray([before + now for before, now in lens])
    starts = jnp.asarray(np.cumsum([0, *(now for _, now in lens)]))
    q, k, v = (jnp.asarray(rng.standard_normal((tokens, n, H)), jnp.float32) for n in (K * G, K, K))
    run = lambda name: _jitted(
        q, k, v, jnp.asarray(pool), jnp.asarray(table), kv_lens, starts, jnp.int32(seqs), name, window, None
    )
    np.testing.assert_allclose(np.asarray(run(implementation)[1]), np.asarray(run("reference")[1]), atol=2e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_layer_may_be_a_loop_variable(implementation):
    args, num_seqs = random_case(4, [(20, 1), (5, 9)], 8, 2, 2, 16, jnp.float32)
    q, k, v, pool, _, *rest = args
    attend = lambda pool, layer: paged_attention(
        q, k, v, pool, layer, *rest, jnp.int32(num_seqs), scale=0.3, implementation=implementation
    )
    pool = pool.at[0].set(pool[1])  # the two layers hold the same
    _, out = jax.jit(lambda pool: jax.lax.scan(attend, pool, jnp.arange(2)))(pool)
    want = _jitted(q, k, v, pool, *rest, jnp.int32(num_seqs), "reference", None, None)[1]
    np.testing.assert_allclose(np.asarray(out), np.stack([want, want]), atol=2e-5)


def _call(q, k, v, pool, table, lens, starts, num, implementation, window, soft_cap):
    return paged_attention(
        q, k, v, pool, 1, table, lens, starts, num,
        scale=0.3, window=window, soft_cap=soft_cap, implementation=implementation,
    )  # fmt: skip


_jitted = jax.jit(_call, static_argnums=(8, 9, 10))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_stays_near_the_reference(implementation):
    args, num_seqs = random_case(0, [(40, 1), (3, 1), (10, 20), (0, 9)], 16, 2, 3, 64, jnp.bfloat16)
    run = lambda name: _jitted(*args[:4], *args[5:], jnp.int32(num_seqs), name, None, None)
    _, want = run("reference")
    _, out = run(implementation)
    # bfloat16 keeps 8 bits: products of values near 1 differ by some 2**-7.
    np.testing.assert_allclose(np.asarray(out, np.float32), np.asarray(want, np.float32), atol=0.03)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_may_be_shared(implementation):
    args, _ = random_case(1, [(20, 1), (20, 1)], 8, 2, 2, 16, jnp.float32)
    q, k, v, pool, _, table, lens, starts = args
    table = table.at[1, :2].set(table[0, :2])
    for name in ("reference", implementation):
        _, out = _jitted(q, k, v, pool, table, lens, starts, jnp.int32(2), name, None, None)
        if name == "reference":
            want = out
    np.testing.assert_allclose(np.asarray(out), np.asarray(want), atol=2e-5)


def test_forced_implementation_that_does_not_exist_is_an_error():
    args, num_seqs = random_case(0, [(3, 1)], 8, 2, 1, 16, jnp.float32)
    with pytest.raises(KernelError, match="no implementation 'cuda'"):
        paged_attention(*args, jnp.int32(num_seqs), scale=1.0, implementation="cuda")


def test_quantized_pool_is_refused_by_name():
    args, num_seqs = random_case(0, [(3, 1)], 8, 2, 1, 16, jnp.float32)
    with pytest.raises(KernelError, match="k_scale"):
        paged_attention(*args, jnp.int32(num_seqs), scale=1.0, k_scale=0.5)


def test_pool_is_aliased_not_copied():
    (q, k, v, pool, _, *rest), num_seqs = random_case(0, [(3, 1)], 8, 2, 1, 16, jnp.float32)
    large = jax.ShapeDtypeStruct((2, 16 * P, *pool.shape[2:]), pool.dtype)
    jitted = jax.jit(_call, static_argnums=(8, 9, 10), donate_argnums=3)
    memory = jitted.lower(q, k, v, large, *rest, jnp.int32(num_seqs), "xla", None, None).compile().memory_analysis()
    assert memory.alias_size_in_bytes == large.size * 4
    assert memory.temp_size_in_bytes < large.size * 4 / 4
