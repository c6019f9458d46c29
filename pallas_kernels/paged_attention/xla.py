"""Paged attention in XLA, for the CPU and for any device without a kernel.

Two loops with dynamic trip counts touch little more than the pages in use, whatever the page table's width, so
that one compiled program serves all lengths:

- sequences with one query token share a flat list of all their pages, walked in chunks; a chunk's partial softmax
  is merged into its sequences' running ones;
- sequences with more walk their pages once for each tile of query tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.reference import write_pages

DECODE_CHUNK_TOKENS = 1024  # cache positions a turn of the decode loop reads, all sequences together
PREFILL_CHUNK_TOKENS = 256  # cache positions a turn of the prefill loop reads
PREFILL_TILE = 64  # query tokens of a tile
LOWEST = -1e30  # below any score, yet finite: the difference of two is never NaN


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
    """See `api.paged_attention`."""
    pool = write_pages(k_TKH, v_TKH, pool, layer, page_table_SM, kv_lens_S, query_starts_S1, num_seqs)
    live_S = jnp.arange(kv_lens_S.shape[0]) < num_seqs
    query_lens_S = jnp.where(live_S, query_starts_S1[1:] - query_starts_S1[:-1], 0)

    def capped(scores: jax.Array) -> jax.Array:
        return scores if soft_cap is None else soft_cap * jnp.tanh(scores / soft_cap)

    out_TNH = _decode(
        q_TNH, pool, layer, page_table_SM, kv_lens_S, query_starts_S1, query_lens_S == 1, scale, window, capped
    )
    out_TNH = _prefill(
        q_TNH, pool, layer, page_table_SM, kv_lens_S, query_starts_S1, query_lens_S, scale, window, capped, out_TNH
    )
    return pool, out_TNH


def _first_pages(kv_lens_S: jax.Array, query_lens_S: jax.Array, window: int | None, page_size: int) -> jax.Array:
    """The first page any of the sequence's query tokens sees."""
    if window is None:
        return jnp.zeros_like(kv_lens_S)
    return jnp.maximum(kv_lens_S - query_lens_S + 1 - window, 0) // page_size


def _decode(q_TNH, pool, layer, page_table_SM, kv_lens_S, query_starts_S1, decodes_S, scale, window, capped):
    """Outputs [T, N, H] of the sequences in `decodes_S`, 0 elsewhere."""
    T, N, H = q_TNH.shape
    S, M = page_table_SM.shape
    K, page_size = pool.shape[2] // 2, pool.shape[3]
    G = N // K
    C = max(DECODE_CHUNK_TOKENS // page_size, 1)
    first_S = _first_pages(kv_lens_S, jnp.ones_like(kv_lens_S), window, page_size)
    count_S = jnp.where(decodes_S, -(-kv_lens_S // page_size) - first_S, 0)
    ends_S = jnp.cumsum(count_S)
    total = ends_S[-1]
    token_S = jnp.where(decodes_S, query_starts_S1[:-1], T)
    q_SKGH = q_TNH[jnp.minimum(token_S, T - 1)].reshape(S, K, G, H).astype(jnp.float32) * scale

    def chunk(carry):
        i, top_SKG, sum_SKG, acc_SKGH = carry
        item_C = i * C + jnp.arange(C)
        valid_C = item_C < total
        owner_C = jnp.minimum(jnp.sum(item_C[:, None] >= ends_S, axis=1), S - 1)
        index_C = first_S[owner_C] + item_C - (ends_S[owner_C] - count_S[owner_C])
        page_C = jnp.where(valid_C, page_table_SM[owner_C, jnp.clip(index_C, 0, M - 1)], 0)
        column = index_C[:, None] * page_size + jnp.arange(page_size)
        seen = valid_C[:, None] & (column < kv_lens_S[owner_C][:, None])
        if window is not None:
            seen &= column >= kv_lens_S[owner_C][:, None] - window
        pages = pool[layer, page_C]  # [C, 2K, page_size, H]
        k, v = pages[:, 0::2].astype(jnp.float32), pages[:, 1::2].astype(jnp.float32)
        # A product and a sum, not a matmul: each is too small (G by page_size) to pay for a call.
        scores = capped(jnp.sum(q_SKGH[owner_C][:, :, :, None] * k[:, :, None], axis=-1))  # [C, K, G, page_size]
        scores = jnp.where(seen[:, None, None], scores, LOWEST)
        mine_CS = valid_C[:, None] & (owner_C[:, None] == jnp.arange(S))
        chunk_top = jnp.max(jnp.where(mine_CS[..., None, None], scores.max(-1)[:, None], LOWEST), axis=0)
        new_top = jnp.maximum(top_SKG, chunk_top)
        weights = jnp.where(seen[:, None, None], jnp.exp(scores - new_top[owner_C][..., None]), 0.0)
        v = jnp.where(seen[:, None, :, None], v, 0.0)
        out = jnp.sum(weights[..., None] * v[:, :, None], axis=3)  # [C, K, G, H]
        fade = jnp.exp(top_SKG - new_top)
        mine = mine_CS.astype(jnp.float32)
        high = lax.Precision.HIGHEST
        sum_SKG = sum_SKG * fade + jnp.einsum("cs,ckg->skg", mine, weights.sum(-1), precision=high)
        acc_SKGH = acc_SKGH * fade[..., None] + jnp.einsum("cs,ckgh->skgh", mine, out, precision=high)
        return i + 1, new_top, sum_SKG, acc_SKGH

    start = (
        jnp.int32(0),
        jnp.full((S, K, G), LOWEST, jnp.float32),
        jnp.zeros((S, K, G), jnp.float32),
        jnp.zeros((S, K, G, H), jnp.float32),
    )
    _, _, sum_SKG, acc_SKGH = lax.while_loop(lambda carry: carry[0] * C < total, chunk, start)
    out_SKGH = acc_SKGH / jnp.where(sum_SKG > 0, sum_SKG, 1.0)[..., None]
    out_SNH = out_SKGH.reshape(S, N, H).astype(q_TNH.dtype)
    return jnp.zeros_like(q_TNH).at[token_S].set(out_SNH, mode="drop")


def _prefill(
    q_TNH, pool, layer, page_table_SM, kv_lens_S, query_starts_S1, query_lens_S, scale, window, capped, out_TNH
):
    """Adds to `out_TNH` the outputs of sequences with more than one query token."""
    T, N, H = q_TNH.shape
    S, M = page_table_SM.shape
    K, page_size = pool.shape[2] // 2, pool.shape[3]
    G = N // K
    B = min(PREFILL_TILE, T)
    C = min(max(PREFILL_CHUNK_TOKENS // page_size, 1), M)
    tiles_S = jnp.where(query_lens_S > 1, -(-query_lens_S // B), 0)
    ends_S = jnp.cumsum(tiles_S)
    table_SM = jnp.pad(page_table_SM, ((0, 0), (0, -M % C)))

    def tile(i, out_TNH):
        s = jnp.minimum(jnp.sum(i >= ends_S), S - 1)
        begin = query_starts_S1[s] + (i - (ends_S[s] - tiles_S[s])) * B
        end = query_starts_S1[s + 1]
        # The slice may be moved back to fit; `token_B` says what it really holds.
        begin_fit = jnp.minimum(begin, T - B)
        token_B = begin_fit + jnp.arange(B)
        position_B = kv_lens_S[s] - end + token_B
        q = lax.dynamic_slice_in_dim(q_TNH, begin_fit, B).reshape(B, K, G, H)
        q_KRH = q.transpose(1, 2, 0, 3).reshape(K, G * B, H)
        last = kv_lens_S[s] - end + jnp.minimum(begin + B, end) - 1  # the tile's last position
        first = 0 if window is None else jnp.maximum(kv_lens_S[s] - end + begin + 1 - window, 0)

        def chunk(j, carry):
            top_KR, sum_KR, acc_KRH = carry
            pages = pool[layer, lax.dynamic_slice(table_SM, (s, j * C), (1, C))[0]]  # [C, 2K, page_size, H]
            kv = jnp.moveaxis(pages, 1, 0).reshape(2 * K, C * page_size, H)
            column = j * C * page_size + jnp.arange(C * page_size)
            seen = column <= position_B[:, None]
            if window is not None:
                seen &= column > position_B[:, None] - window
            seen_RC = jnp.tile(seen, (G, 1))
            precision = lax.Precision.HIGHEST if q_TNH.dtype == jnp.float32 else None
            scores = jnp.einsum(
                "krh,kch->krc",
                q_KRH,
                kv[0::2].astype(q_KRH.dtype),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            scores = jnp.where(seen_RC, capped(scores * scale), LOWEST)
            new_top = jnp.maximum(top_KR, scores.max(-1))
            weights = jnp.where(seen_RC, jnp.exp(scores - new_top[..., None]), 0.0)
            v = jnp.where((column <= last)[:, None], kv[1::2], 0)
            out = jnp.einsum(
                "krc,kch->krh",
                weights.astype(q_KRH.dtype),
                v.astype(q_KRH.dtype),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            fade = jnp.exp(top_KR - new_top)
            return new_top, sum_KR * fade + weights.sum(-1), acc_KRH * fade[..., None] + out

        start = (
            jnp.full((K, G * B), LOWEST, jnp.float32),
            jnp.zeros((K, G * B), jnp.float32),
            jnp.zeros((K, G * B, H), jnp.float32),
        )
        low, high = first // (C * page_size), last // (C * page_size) + 1
        _, sum_KR, acc_KRH = lax.fori_loop(low, high, chunk, start)
        out = (acc_KRH / jnp.where(sum_KR > 0, sum_KR, 1.0)[..., None]).reshape(K, G, B, H)
        out_BNH = out.transpose(2, 0, 1, 3).reshape(B, N, H).astype(out_TNH.dtype)
        mine_B = (token_B >= begin) & (token_B < end)
        old_BNH = lax.dynamic_slice_in_dim(out_TNH, begin_fit, B)
        return lax.dynamic_update_slice_in_dim(
            out_TNH, jnp.where(mine_B[:, None, None], out_BNH, old_BNH), begin_fit, axis=0
        )

    return lax.fori_loop(0, ends_S[-1], tile, out_TNH)
