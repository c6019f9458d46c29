"""Paged attention in XLA, for the CPU and for any device without a kernel: GPUs before Hopper, TPU v4.

Two loops with dynamic trip counts touch little more than the pages in use, whatever the page table's width, so
that one compiled program serves all lengths:

- `_decode`, for sequences with one query token: all their blocks of pages form one flat list, walked a few blocks a
  turn; a turn's partial softmaxes are merged into the sequences' running ones;
- `_prefill`, for sequences with more: each tile of query tokens walks its sequence's pages, all tiles in one loop.

The bodies are short, for each kernel in them is launched every turn, and compiled for every layer where these are
unrolled. All that follows from lengths and page tables alone is computed ahead of the loops: XLA moves it out of a
loop over layers, and finds it equal in unrolled ones, so that it is computed once a step.

Letters beside those of `api`: R rows of `_decode`, I blocks in its list, C blocks of a turn, W pages of a block,
B query tokens of a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.layout import KV, PageLayout, QuantizedKV, numbers_of, values_of
from pallas_kernels.paged_attention.reference import token_positions, write_pages

DECODE_BLOCK_TOKENS = 128  # cache positions of a block, all of one sequence
DECODE_CHUNK_TOKENS = 1024  # cache positions a turn of the decode loop reads, all sequences together
PREFILL_CHUNK_TOKENS = 128  # cache positions a turn of the prefill loop reads; short prompts waste the rest
PREFILL_TILE = 64  # query tokens of a tile
LOWEST = -1e30  # below any score, yet finite: the difference of two is never NaN


class Scores(NamedTuple):
    """What is fixed about the scores."""

    scale: float
    window: int | None
    soft_cap: float | None

    def of(self, products: jax.Array) -> jax.Array:
        scores = products * self.scale
        return scores if self.soft_cap is None else self.soft_cap * jnp.tanh(scores / self.soft_cap)


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
    """See `reference.paged_attention`."""
    # With the layer an array, unrolled layers share one trace.
    return _layer_attention(
        q_TNH,
        rows,
        pool,
        layout,
        jnp.asarray(layer, jnp.int32),
        page_table_SM,
        kv_lens_S,
        query_starts_S1,
        num_seqs,
        Scores(scale, window, soft_cap),
    )


@partial(jax.jit, static_argnames=("layout", "scores"))
def _layer_attention(
    q_TNH, rows, pool, layout: PageLayout, layer, page_table_SM, kv_lens_S, query_starts_S1, num_seqs, scores: Scores
):
    T, N, H = q_TNH.shape
    S = kv_lens_S.shape[0]
    K, page_size = layout.num_kv_heads, values_of(pool).shape[3]
    pool = write_pages(rows, pool, layer, page_table_SM, kv_lens_S, query_starts_S1, num_seqs)
    sequence_T, _, valid_T = token_positions(T, kv_lens_S, query_starts_S1, num_seqs)
    q_TKGH = q_TNH.reshape(T, K, N // K, H)
    read = partial(_read_pages, pool, layout, layer)
    query_lens_S = jnp.where(jnp.arange(S) < num_seqs, query_starts_S1[1:] - query_starts_S1[:-1], 0)
    decodes_S = query_lens_S == 1
    out_SKGH = _decode(q_TKGH, read, page_table_SM, kv_lens_S, decodes_S, query_starts_S1[:-1], page_size, scores)
    if T > 1:
        out_TKGH = _prefill(q_TKGH, read, page_table_SM, kv_lens_S, query_lens_S, query_starts_S1, page_size, scores)
    else:
        out_TKGH = jnp.zeros(q_TKGH.shape, jnp.float32)  # one token is no prefill
    decode_T = valid_T & decodes_S[sequence_T]
    out_TKGH = jnp.where(decode_T[:, None, None, None], out_SKGH[sequence_T], out_TKGH)
    return pool, out_TKGH.reshape(T, N, H).astype(q_TNH.dtype)


def _read_pages(pool: KV, layout: PageLayout, layer: jax.Array, page_XW: jax.Array, part: int) -> jax.Array:
    """Keys (part 0) or values (part 1) of W pages for each of X, end to end: [X, K, W * page_size, H]."""
    L, P, _, page_size, _ = values_of(pool).shape
    K, H, joined = layout
    X, W = page_XW.shape
    # Rows of a page and head are contiguous: as one long axis they are copied fastest. K stays an axis of its own,
    # or a pool sharded over heads would be gathered whole.
    pages = values_of(pool).reshape(L * P, K, page_size, 2, H) if joined else values_of(pool).reshape(L * P, K, 2, -1)
    pick = (layer * P + page_XW, slice(None), slice(None), part) if joined else (layer * P + page_XW, slice(None), part)
    read_XKCH = pages[pick].swapaxes(1, 2).reshape(X, K, W * page_size, H)
    if not isinstance(pool, QuantizedKV):
        return read_XKCH
    scales = pool.scales.reshape(L * P, K, 2, -1)[layer * P + page_XW, :, part, :page_size]
    return numbers_of(read_XKCH).astype(jnp.float32) * scales.swapaxes(1, 2).reshape(X, K, W * page_size, 1)


def flat_list(count_X: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Lists count[0] items of owner 0, then those of owner 1, ...: owner [size], number within the owner's, total."""
    ends_X = jnp.cumsum(count_X)
    item_I = jnp.arange(size)
    owner_I = jnp.minimum(jnp.sum(item_I[:, None] >= ends_X, axis=1), count_X.shape[0] - 1)
    return owner_I, item_I - (ends_X - count_X)[owner_I], ends_X[-1]


def _decode(
    q_TKGH: jax.Array,
    read: Callable[..., jax.Array],
    page_table_RM: jax.Array,
    kv_lens_R: jax.Array,
    in_use_R: jax.Array,
    token_R: jax.Array,
    page_size: int,
    scores: Scores,
) -> jax.Array:
    """Float32 outputs [R, K, G, H] of rows in use, each one query token at the end of its `kv_lens`."""
    T, K, G, H = q_TKGH.shape
    R, M = page_table_RM.shape
    W = min(max(DECODE_BLOCK_TOKENS // page_size, 1), M)
    C = max(min(DECODE_CHUNK_TOKENS // (W * page_size), R // 2), 1)  # few rows seldom fill a large turn
    first_R = 0 if scores.window is None else jnp.maximum(kv_lens_R - scores.window, 0) // page_size
    pages_R = jnp.where(in_use_R, -(-kv_lens_R // page_size) - first_R, 0)
    owner_I, number_I, total = flat_list(-(-pages_R // W), -(-R * -(-M // W) // C) * C)
    page_IW = jnp.broadcast_to(first_R, (R,))[owner_I][:, None] + number_I[:, None] * W + jnp.arange(W)
    length_I = jnp.where(jnp.arange(owner_I.size) < total, kv_lens_R[owner_I], 0)
    end_I = length_I - page_IW[:, 0] * page_size  # where in the block the sequence ends, perhaps past the block
    id_IW = page_table_RM[owner_I[:, None], jnp.minimum(page_IW, M - 1)]
    id_IW = jnp.where(page_IW * page_size < length_I[:, None], id_IW, 0)
    # Rows in use, counted without gaps: those of a turn are neighbours, so that C of them always hold all.
    rank_R = jnp.cumsum(in_use_R) - 1
    rank_I = jnp.where(length_I > 0, rank_R[owner_I], R + C)
    token_I = jnp.clip(token_R[owner_I], 0, T - 1)
    column = jnp.arange(W * page_size)

    def turn(carry):
        i, top_RKG, sum_RKG, acc_RKGH = carry
        share = lambda x: lax.dynamic_slice_in_dim(x, i * C, C)
        rank_C, id_CW, end_C1 = share(rank_I), share(id_IW), share(end_I)[:, None]
        seen = column < end_C1
        if scores.window is not None:
            seen &= column >= end_C1 - scores.window
        seen = seen[:, None, None]  # [C, 1, 1, W * page_size]
        # Gathers that convert to float32 are faster on the CPU than those that keep bfloat16.
        k = read(id_CW, 0).astype(jnp.float32)
        v = jnp.where(seen.swapaxes(2, 3), read(id_CW, 1).astype(jnp.float32), 0.0)
        q = q_TKGH[share(token_I)].astype(jnp.float32)
        high = lax.Precision.HIGHEST
        # On the CPU k as the left operand is twice as fast, for it is not packed; the barrier keeps the order.
        products = lax.optimization_barrier(jnp.einsum("ckwh,ckgh->ckwg", k, q, precision=high))
        s = jnp.where(seen, scores.of(products.swapaxes(2, 3)), LOWEST)
        top_CKG = s.max(-1)
        weights = jnp.where(seen, jnp.exp(s - top_CKG[..., None]), 0.0)
        out_CKGH = jnp.einsum("ckgw,ckwh->ckgh", weights, v, precision=high)

        # Merge into the C rows from the first on; D is that window of rows.
        base = rank_C[0]
        mine_CDKG = (rank_C[:, None] == base + jnp.arange(C))[..., None, None]
        old = lambda x: lax.dynamic_slice_in_dim(x, base, C)
        put = lambda x, part: lax.dynamic_update_slice_in_dim(x, part, base, 0)
        top_DKG = jnp.maximum(old(top_RKG), jnp.max(jnp.where(mine_CDKG, top_CKG[:, None], LOWEST), axis=0))
        fade_DKG = jnp.exp(old(top_RKG) - top_DKG)
        share_CDKG = jnp.where(mine_CDKG, jnp.exp(top_CKG[:, None] - top_DKG), 0.0)
        sum_DKG = old(sum_RKG) * fade_DKG + jnp.sum(share_CDKG * weights.sum(-1)[:, None], axis=0)
        acc_DKGH = old(acc_RKGH) * fade_DKG[..., None] + jnp.sum(share_CDKG[..., None] * out_CKGH[:, None], axis=0)
        return i + 1, put(top_RKG, top_DKG), put(sum_RKG, sum_DKG), put(acc_RKGH, acc_DKGH)

    start = (jnp.int32(0), *_empty((R + C, K, G), H))
    _, _, sum_RKG, acc_RKGH = lax.while_loop(lambda carry: carry[0] * C < total, turn, start)
    return _quotient(sum_RKG, acc_RKGH)[jnp.maximum(rank_R, 0)]


def _prefill(
    q_TKGH: jax.Array,
    read: Callable[..., jax.Array],
    page_table_SM: jax.Array,
    kv_lens_S: jax.Array,
    query_lens_S: jax.Array,
    query_starts_S1: jax.Array,
    page_size: int,
    scores: Scores,
) -> jax.Array:
    """Float32 outputs [T, K, G, H] of sequences with more than one query token; 0 for other tokens."""
    T, K, G, H = q_TKGH.shape
    S, M = page_table_SM.shape
    B = min(PREFILL_TILE, T)
    C = min(max(PREFILL_CHUNK_TOKENS // page_size, 1), M)  # pages of a turn
    columns = C * page_size
    tiles_S = jnp.where(query_lens_S > 1, -(-query_lens_S // B), 0)
    sequence_X, number_X, num_tiles = flat_list(tiles_S, min(T // 2, T // B + S))
    end_X = query_starts_S1[sequence_X + 1]
    begin_X = query_starts_S1[sequence_X] + number_X * B
    shift_X = kv_lens_S[sequence_X] - end_X  # from a token's index to its position
    last_X = shift_X + jnp.minimum(begin_X + B, end_X) - 1
    first_X = 0 if scores.window is None else jnp.maximum(shift_X + begin_X + 1 - scores.window, 0)
    turns_X = jnp.where(jnp.arange(end_X.size) < num_tiles, last_X // columns - first_X // columns + 1, 0)
    tile_I, number_I, total = flat_list(turns_X, end_X.size * -(-M // C))
    chunk_I = jnp.broadcast_to(first_X, end_X.shape)[tile_I] // columns + number_I
    turn_I5 = jnp.stack([sequence_X[tile_I], begin_X[tile_I], end_X[tile_I], shift_X[tile_I], chunk_I], axis=1)
    table_SM = jnp.pad(page_table_SM, ((0, 0), (0, -M % C)))
    q_KTGH = jnp.pad(q_TKGH, ((0, B), (0, 0), (0, 0), (0, 0))).swapaxes(0, 1)
    precision = lax.Precision.HIGHEST if q_TKGH.dtype == jnp.float32 else None
    multiply = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)

    def turn(i, carry):
        top_KTG, sum_KTG, acc_KTGH = carry
        sequence, begin, end, shift, chunk = turn_I5[i]
        # Tokens of the tile; those from `end` on belong to others: they see nothing here, which changes nothing.
        old = lambda x: lax.dynamic_slice_in_dim(x, begin, B, axis=1)
        put = lambda x, part: lax.dynamic_update_slice_in_dim(x, part, begin, axis=1)
        token_B1 = begin + jnp.arange(B)[:, None]
        column = chunk * columns + jnp.arange(columns)
        seen = (column <= token_B1 + shift) & (token_B1 < end)
        if scores.window is not None:
            seen &= column > token_B1 + shift - scores.window
        seen = seen[:, None]  # [B, 1, columns]
        ids_1C = lax.dynamic_slice(table_SM, (sequence, chunk * C), (1, C))
        k, v = read(ids_1C, 0)[0], read(ids_1C, 1)[0]
        v = jnp.where((column < end + shift)[:, None], v, 0)
        q = old(q_KTGH).reshape(K, B * G, H)
        products = multiply("krh,kch->krc", q, k.astype(q.dtype)).reshape(K, B, G, columns)
        s = jnp.where(seen, scores.of(products), LOWEST)
        top_KBG = jnp.maximum(old(top_KTG), s.max(-1))
        weights = jnp.where(seen, jnp.exp(s - top_KBG[..., None]), 0.0)
        fade_KBG = jnp.exp(old(top_KTG) - top_KBG)
        flat = weights.reshape(K, B * G, columns).astype(q.dtype)
        out_KBGH = multiply("krc,kch->krh", flat, v.astype(q.dtype)).reshape(K, B, G, H)
        sum_KBG = old(sum_KTG) * fade_KBG + weights.sum(-1)
        acc_KBGH = old(acc_KTGH) * fade_KBG[..., None] + out_KBGH
        return put(top_KTG, top_KBG), put(sum_KTG, sum_KBG), put(acc_KTGH, acc_KBGH)

    _, sum_KTG, acc_KTGH = lax.fori_loop(0, total, turn, _empty((K, T + B, G), H))
    return _quotient(sum_KTG, acc_KTGH)[:, :T].swapaxes(0, 1)


def _empty(shape: tuple[int, ...], H: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A running softmax that has seen nothing: largest score, sum of weights, weighted sum of values."""
    return jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, H), jnp.float32)


def _quotient(sum_X: jax.Array, acc_XH: jax.Array) -> jax.Array:
    return acc_XH / jnp.where(sum_X > 0, sum_X, 1.0)[..., None]
