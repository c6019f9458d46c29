"""Paged attention in plain float32: the truth that every implementation is tested against. Slow, for tests only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.layout import KV, PageLayout, values_of


def token_positions(
    num_tokens: int, kv_lens_S: jax.Array, query_starts_S1: jax.Array, num_seqs: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each packed token: its sequence [T], its position in it [T], and whether it is one (not padding) [T]."""
    S = kv_lens_S.shape[0]
    t = jnp.arange(num_tokens)
    sequence_T = jnp.clip(jnp.sum(t[:, None] >= query_starts_S1[None, 1:], axis=1), 0, S - 1)
    ends_S = query_starts_S1[1:]
    position_T = kv_lens_S[sequence_T] - ends_S[sequence_T] + t
    return sequence_T, position_T, t < query_starts_S1[num_seqs]


def write_pages(
    rows: KV,
    pool: KV,
    layer: int | jax.Array,
    page_table_SM: jax.Array,
    kv_lens_S: jax.Array,
    query_starts_S1: jax.Array,
    num_seqs: jax.Array,
) -> KV:
    """Scatters the step's rows, and their scales, to their pages; padding goes out of bounds, where it is dropped."""
    T = values_of(rows).shape[0]
    _, P, _, page_size, _ = values_of(pool).shape
    sequence_T, position_T, valid_T = token_positions(T, kv_lens_S, query_starts_S1, num_seqs)
    page_T = jnp.where(valid_T, page_table_SM[sequence_T, position_T // page_size], P)
    put = lambda pool, rows: pool.at[layer, page_T, :, position_T % page_size].set(rows, mode="drop")
    return jax.tree.map(put, pool, rows)


def paged_attention(
    q_TNH: jax.Array,
    rows: KV,
    pool: KV,
    layout: PageLayout,
    layer: int | jax.Array,
    page_table_SM: jax.Array,
    kv_lens_S: jax.Array,
    query_starts_S1: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[KV, jax.Array]:
    """See `api.paged_attention`; `rows` are the new tokens' as the pool holds them, H is the layout's.

    Gathers every token's whole page table: memory grows with T times M.
    """
    T, N, H = q_TNH.shape
    K = layout.num_kv_heads
    pool = write_pages(rows, pool, layer, page_table_SM, kv_lens_S, query_starts_S1, num_seqs)
    sequence_T, position_T, valid_T = token_positions(T, kv_lens_S, query_starts_S1, num_seqs)
    pages = jax.tree.map(lambda each: each[layer][page_table_SM[sequence_T]], pool)  # [T, M, X, page_size, E]

    def positions(part: int) -> jax.Array:
        return jnp.moveaxis(layout.part(pages, part).astype(jnp.float32), 2, 1).reshape(T, K, -1, H)

    k_TKCH, v_TKCH = positions(0), positions(1)
    column = jnp.arange(k_TKCH.shape[2])
    seen_TC = (column <= position_T[:, None]) & valid_T[:, None]
    if window is not None:
        seen_TC &= column > position_T[:, None] - window
    q = q_TNH.astype(jnp.float32).reshape(T, K, N // K, H)
    scores = jnp.einsum("tkgh,tkch->tkgc", q, k_TKCH, precision=lax.Precision.HIGHEST) * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    weights = jax.nn.softmax(jnp.where(seen_TC[:, None, None], scores, -jnp.inf), axis=-1)
    # 0 times NaN is NaN: bytes never written must not reach the sum, nor rows that see nothing.
    weights = jnp.where(seen_TC[:, None, None], weights, 0.0)
    v_TKCH = jnp.where(seen_TC[:, None, :, None], v_TKCH, 0.0)
    out = jnp.einsum("tkgc,tkch->tkgh", weights, v_TKCH, precision=lax.Precision.HIGHEST)
    return pool, out.reshape(T, N, H).astype(q_TNH.dtype)
