"""Paged attention in plain float32: the truth that every implementation is tested against. Slow, for tests only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


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
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pool: jax.Array,
    layer: int,
    page_table_SM: jax.Array,
    kv_lens_S: jax.Array,
    query_starts_S1: jax.Array,
    num_seqs: jax.Array,
) -> jax.Array:
    """Scatters the step's keys and values to their pages; padding goes out of bounds, where it is dropped."""
    T, K, H = k_TKH.shape
    P, page_size = pool.shape[1], pool.shape[3]
    sequence_T, position_T, valid_T = token_positions(T, kv_lens_S, query_starts_S1, num_seqs)
    page_T = jnp.where(valid_T, page_table_SM[sequence_T, position_T // page_size], P)
    kv_T2KH = jnp.stack([k_TKH, v_TKH], axis=2).reshape(T, 2 * K, H).astype(pool.dtype)
    return pool.at[layer, page_T, :, position_T % page_size].set(kv_T2KH, mode="drop")


def paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pool: jax.Array,
    layer: int,
    page_table_SM: jax.Array,
    kv_lens_S: jax.Array,
    query_starts_S1: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.paged_attention`. Gathers every token's whole page table: memory grows with T times M."""
    T, N, H = q_TNH.shape
    K = k_TKH.shape[1]
    pool = write_pages(k_TKH, v_TKH, pool, layer, page_table_SM, kv_lens_S, query_starts_S1, num_seqs)
    sequence_T, position_T, valid_T = token_positions(T, kv_lens_S, query_starts_S1, num_seqs)
    pages = pool[layer][page_table_SM[sequence_T]].astype(jnp.float32)  # [T, M, 2K, page_size, H]
    kv = jnp.moveaxis(pages, 2, 1).reshape(T, 2 * K, -1, H)
    k_TKCH, v_TKCH = kv[:, 0::2], kv[:, 1::2]
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
