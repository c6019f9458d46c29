"""Paged attention in Mosaic GPU, for Hopper: warp-specialised, a TMA copy for each page, `wgmma` for both products.

Two launches of one kernel, and a merge:

- decode: sequences with one query token. All their blocks of cache positions form one flat list, cut into equal shares,
  one for each worker; a sequence that crosses a cut leaves several partial softmaxes, which `_merge` joins;
- prefill: sequences with more. A tile of query tokens is one worker's, and is never cut.

A worker is a producer warpgroup, which copies queries, pages and scales into rings in shared memory, and one or two
consumer warpgroups, which multiply. It walks segments: blocks of one KV head of one sequence, against one tile of
queries whose rows are (token, query head of the group). The grid is static; a worker without segments returns at once.
All that follows from lengths alone is computed by XLA ahead, once a step, since it is equal in every layer.

Bytes never written may be NaN, and 0 times NaN is NaN: in blocks at a segment's edges values are zeroed as well.

No chip has run this yet: it is compiled for H100 and H200 without one, and its logic runs in Pallas' GPU interpreter.

Letters beside those of `api`: R rows of queries in a tile, U (sequence, KV head) pairs, X segments, Y tiles, Z workers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.dispatch import Device, KernelError, current_device
from pallas_kernels.paged_attention.layout import KV, QUANTIZED, PageLayout, QuantizedKV, values_of
from pallas_kernels.paged_attention.reference import token_positions, write_pages
from pallas_kernels.tuning import tuned_block

TILE_ROWS = 64  # of a wgmma tile
PREFILL_ROWS = 2 * TILE_ROWS  # of a tile of query tokens, for two consumers
CHUNK = 32  # float32 columns of a partial output that go through shared memory at a time
MERGE_COLUMNS = 64  # of a thread block that joins partial outputs
LOWEST = -1e30  # below any score, yet finite: the difference of two is never NaN
LOG2_E = math.log2(math.e)  # softmax runs in powers of two, which the hardware has
HOPPER = re.compile(r"\b(H100|H200|GH200|H20)\b")
MULTIPROCESSORS = {"H20": 78, "PCIe": 114}  # by a word of the kind; all others have 132
SHARED_MEMORY = 220 * 1024  # bytes for tiles and rings; the rest of Hopper's 227 KiB is for barriers and reductions
# Registers of a thread after the warpgroups' exchange, by number of warpgroups: producer, consumer.
REGISTERS = {3: (24, 240), 4: (40, 216)}
BY_ROW, BY_COLUMN = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)


class Blocks(NamedTuple):
    """Sizes that change speed alone; `check_blocks` says which can be.

    Attributes:
      decode, prefill: cache positions of a block, for single query tokens and for tiles.
      workers: decoding ones of a thread block, of which a multiprocessor runs one at a time.
    """

    decode: int
    prefill: int
    workers: int


class TensorCores:
    """The two matrix products, on a warpgroup's tensor cores. The interpreter has none: a test puts plain dots here."""

    @staticmethod
    def scores(q_RH, k_CH) -> jax.Array:
        """Queries times keys, float32 [R, C]; both operands are in shared memory."""

        def product(acc_ref):
            plgpu.wgmma(acc_ref, q_RH, k_CH.transpose((1, 0)))
            return acc_ref[...]

        return pl.run_scoped(product, plgpu.ACC((q_RH.shape[0], k_CH.shape[0]), jnp.float32))

    @staticmethod
    def weighted(acc_RH: jax.Array, weights_RC: jax.Array, v_CH) -> jax.Array:
        """`acc` plus weights times values; the values are in shared memory."""

        def product(acc_ref):
            plgpu.wgmma(acc_ref, weights_RC, v_CH)

        return pl.run_state(product)(plgpu.ACC.init(acc_RH))


products = TensorCores


class _Config(NamedTuple):
    """What a launch is compiled for.

    Attributes:
      workers: Z; `groups` of them make a thread block.
      consumers: consumer warpgroups of a worker; each has its own rows of queries, and all share keys and values.
      rows: rows of queries that a consumer copies; the rest of its TILE_ROWS hold anything.
      rows_per_token: consecutive rows at one position.
      block: C, cache positions of a block.
      stages, q_slots: blocks and query tiles in flight.
      merged: the output goes to `_merge`: float32, in the order of segments, and with each row's log2 of its sum of
        weights. Otherwise it is bfloat16, in the order of tiles.
    """

    workers: int
    groups: int
    consumers: int
    rows: int
    rows_per_token: int
    block: int
    stages: int
    q_slots: int
    merged: bool


class _Scores(NamedTuple):
    """What is fixed about the scores."""

    scale: float
    window: int | None
    soft_cap: float | None

    def of(self, products_RC: jax.Array) -> jax.Array:
        """Scores in powers of two."""
        if self.soft_cap is None:
            return products_RC * (self.scale * LOG2_E)
        # tanh by the exponential: the hardware's own is off by 2**-11, some 0.02 at a cap of 50.
        e_RC = jnp.exp2(products_RC * (2 * LOG2_E * self.scale / self.soft_cap))
        return self.soft_cap * LOG2_E - (2 * self.soft_cap * LOG2_E) / (e_RC + 1)

    def first_seen(self, position: jax.Array) -> jax.Array:
        return jnp.zeros_like(position) if self.window is None else jnp.maximum(position + 1 - self.window, 0)


class Column(IntEnum):
    """What an int32 row of the list of segments says."""

    Q_OCTET = 0  # first row in the queries [K, rows, H], in eights: the compiler must see that it is a multiple
    HEAD = 1
    SEQUENCE = 2
    FIRST_BLOCK = 3
    END_BLOCK = 4
    POSITION = 5  # of row 0
    LOW = 6  # first position that a token of the tile sees
    END = 7  # after the last position that one sees
    TILE = 8  # where the output goes, unless it is merged


class _Segments(NamedTuple):
    """The work of a launch: worker z has rows `starts[z]` to `starts[z + 1] - 1` of the list."""

    rows_X9: jax.Array
    starts_Z1: jax.Array


def refusal(device: Device, layout: PageLayout, q_dtype: Any, pool: KV, num_groups: int) -> str | None:
    """Why these kernels cannot serve a call with `num_groups` query heads for each KV head, or None."""
    values = values_of(pool)
    page_size = values.shape[3]
    if device.platform != "gpu" or not HOPPER.search(device.kind):
        return f"device is {device.kind}; needs a GPU of compute capability 9.0: H100, H200, GH200 or H20"
    if jnp.dtype(q_dtype) != jnp.bfloat16:
        return f"queries are {jnp.dtype(q_dtype)}; needs bfloat16"
    if values.dtype != jnp.bfloat16 and values.dtype not in QUANTIZED:
        return f"the pool is {values.dtype}; needs bfloat16, int8 or float8_e4m3fn"
    if layout.joined:
        return "the pool joins keys and values in a row; needs them apart"
    if layout.head_dim not in (64, 128, 256):
        return f"the pool's head dim is {layout.head_dim}; needs 64, 128 or 256"
    if page_size not in (16, 32, 64, 128):
        return f"page size is {page_size}; needs 16, 32, 64 or 128"
    if num_groups > 16:
        return f"{num_groups} query heads share a KV head; needs at most 16"
    return None


def shape_key(pool: KV, group: int) -> dict[str, Any]:
    """What block sizes are tuned for. The number of KV heads is not: a step's work is shared out whatever they are."""
    (_, _, _, page_size, H), dtype = values_of(pool).shape, values_of(pool).dtype
    return {"head_dim": H, "page_size": page_size, "group": group, "kv": jnp.dtype(dtype).name}


def blocks_for(kind: str, pool: KV, group: int) -> Blocks:
    """The blocks tuned for this kind of chip and shape; else a guess: as much as shared memory and registers hold."""
    if (tuned := tuned_block("paged_attention", kind, shape_key(pool, group))) is not None:
        return Blocks(**tuned)
    # Two workers overlap one's softmax with the other's products.
    return Blocks(64, 64, 1) if values_of(pool).shape[4] == 256 else Blocks(64, 128, 2)


def check_blocks(blocks: Blocks, pool: KV, group: int) -> None:
    """Refuses blocks that cannot be.

    Raises:
      KernelError: says which, and why.
    """
    H = values_of(pool).shape[4]
    if blocks.workers not in (1, 2):
        raise KernelError(f"paged_attention: {blocks}; registers are enough for 1 or 2 workers")
    for name, config in (
        ("decode", _decode_config(blocks, pool, group, 1)),
        ("prefill", _prefill_config(blocks, pool, group)),
    ):
        if config.block not in (64, 128):  # tiles of wgmma, in which values are cleared and widened
            raise KernelError(f"paged_attention: {blocks}; a {name} block is of 64 or 128 positions")
        if config.block > 64 and H > 128:  # a thread holds C / 2 scores, as many weights and H / 2 sums
            raise KernelError(f"paged_attention: {blocks}; with heads of {H} registers hold {name} blocks of 64 only")
        if config.stages < 2:
            raise KernelError(f"paged_attention: {blocks}; shared memory holds less than 2 {name} blocks in flight")


def transferred_bytes(
    pool: KV, layout: PageLayout, num_heads: int, query_lens: Sequence[int], kv_lens: Sequence[int], window: int | None
) -> int:
    """Bytes of the pool that a call moves from and to main memory, by the kernels' own walk."""
    page_size = values_of(pool).shape[3]
    row = sum(math.prod(leaf.shape[2:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool)) // page_size
    group = num_heads // layout.num_kv_heads
    blocks, (step, tile) = blocks_for(current_device().kind, pool, group), _tile_tokens(group)
    total = start = 0
    for query_len, kv_len in zip(query_lens, kv_lens, strict=True):
        end = start + query_len
        decodes = query_len == 1
        copied = min(page_size, blocks.decode if decodes else blocks.prefill)
        for begin in range(start if decodes else start // step * step, end, tile):
            position, past = kv_len - end + max(begin, start), kv_len - end + min(begin + tile, end)
            low = 0 if window is None else max(position + 1 - window, 0)
            total += (-(-past // copied) - low // copied) * copied * row
        total += query_len * row
        start = end
    return total


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
    blocks: Blocks | None = None,
) -> tuple[KV, jax.Array]:
    """See `reference.paged_attention`; `refusal` says what it cannot serve. Blocks of one's own are for tuning.

    Raises:
      KernelError: the blocks do not fit the chip.
    """
    kind, group = current_device().kind, q_TNH.shape[1] // layout.num_kv_heads
    blocks = blocks or blocks_for(kind, pool, group)
    check_blocks(blocks, pool, group)
    multiprocessors = next((MULTIPROCESSORS[word] for word in kind.split() if word in MULTIPROCESSORS), 132)
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
        _Scores(scale, window, soft_cap),
        blocks,
        multiprocessors,
    )


@partial(jax.jit, static_argnames=("layout", "scores", "blocks", "multiprocessors"))
def _layer_attention(
    q_TNH,
    rows,
    pool,
    layout: PageLayout,
    layer,
    page_table_SM,
    kv_lens_S,
    query_starts_S1,
    num_seqs,
    scores: _Scores,
    blocks: Blocks,
    multiprocessors: int,
):
    T, N, H = q_TNH.shape
    S, K = kv_lens_S.shape[0], layout.num_kv_heads
    # In XLA the scatter is in place, since the pool is donated, and the kernels then only read the pool.
    pool = write_pages(rows, pool, layer, page_table_SM, kv_lens_S, query_starts_S1, num_seqs)
    sequence_T, _, valid_T = token_positions(T, kv_lens_S, query_starts_S1, num_seqs)
    q_TKGH = q_TNH.reshape(T, K, N // K, H)
    query_lens_S = jnp.where(jnp.arange(S) < num_seqs, query_starts_S1[1:] - query_starts_S1[:-1], 0)
    attend = partial(_attend, pool=pool, layer=layer, page_table_SM=page_table_SM, scores=scores)
    decode = _decode_config(blocks, pool, N // K, multiprocessors)
    out_SKGH = _decode(q_TKGH, attend, kv_lens_S, query_lens_S, query_starts_S1, decode, scores)
    out_TKGH = out_SKGH[sequence_T]
    if T > 1:  # one token is no prefill
        prefill = _prefill_config(blocks, pool, N // K)
        prefill_TKGH = _prefill(q_TKGH, attend, kv_lens_S, query_lens_S, query_starts_S1, sequence_T, prefill, scores)
        out_TKGH = jnp.where((query_lens_S[sequence_T] == 1)[:, None, None, None], out_TKGH, prefill_TKGH)
    # Other rows were never written, and may be NaN.
    return pool, jnp.where(valid_T[:, None, None, None], out_TKGH, 0).reshape(T, N, H)


def _decode_config(blocks: Blocks, pool: KV, G: int, multiprocessors: int) -> _Config:
    rows = 8 if G <= 8 else 16
    workers = multiprocessors * blocks.workers
    return _with_stages(_Config(workers, blocks.workers, 1, rows, TILE_ROWS, blocks.decode, 0, 2, merged=True), pool)


def _prefill_config(blocks: Blocks, pool: KV, G: int) -> _Config:
    """Less the number of workers, of which each tile of the step has one."""
    return _with_stages(_Config(0, 1, 2, TILE_ROWS, G, blocks.prefill, 0, 1, merged=False), pool)


def _decode(q_TKGH, attend, kv_lens_S, query_lens_S, query_starts_S1, config: _Config, scores: _Scores):
    """Outputs [S, K, G, H] of sequences with one query token; others' are anything."""
    T, K, G, H = q_TKGH.shape
    S = kv_lens_S.shape[0]
    segments, first_U1 = _decode_segments(kv_lens_S, query_lens_S, K, config, scores)
    q_SKRH = jnp.pad(q_TKGH[jnp.minimum(query_starts_S1[:-1], T - 1)], ((0, 0), (0, 0), (0, config.rows - G), (0, 0)))
    q_KRH = q_SKRH.swapaxes(0, 1).reshape(K, S * config.rows, H)
    size = (len(segments.rows_X9), config.rows)
    partial_XRH, sum_XR = attend(
        q_KRH,
        segments,
        config,
        (jax.ShapeDtypeStruct((*size, H), jnp.float32), jax.ShapeDtypeStruct(size, jnp.float32)),
    )
    return _merge(partial_XRH, sum_XR, first_U1).reshape(S, K, config.rows, H)[:, :, :G]


def _decode_segments(
    kv_lens_S: jax.Array, query_lens_S: jax.Array, K: int, config: _Config, scores: _Scores
) -> tuple[_Segments, jax.Array]:
    """The segments, and the first of each (sequence, KV head) [U + 1], which lists its own in order of position."""
    C, Z, U = config.block, config.workers, kv_lens_S.shape[0] * K
    low_S = scores.first_seen(kv_lens_S - 1)
    blocks_S = jnp.where(query_lens_S == 1, -(-kv_lens_S // C) - low_S // C, 0)
    ends_U = jnp.cumsum(jnp.repeat(blocks_S, K))
    total = ends_U[-1]
    cuts_Z = jnp.minimum(jnp.arange(Z + 1) * jnp.maximum(-(-total // Z), 1), total)
    # Segments end where a unit or a share does; those that the fixed size has too many are empty and come last.
    ends_X = jnp.concatenate([ends_U, cuts_Z])
    ends_X = jnp.unique(jnp.where(ends_X == 0, total, ends_X), size=U + Z, fill_value=total)
    begins_X = jnp.concatenate([jnp.zeros(1, ends_X.dtype), ends_X[:-1]])
    rank = partial(jnp.searchsorted, method="compare_all")  # others are loops on a GPU
    unit_X = jnp.minimum(rank(ends_U, begins_X, side="right"), U - 1)
    s_X, h_X = unit_X // K, unit_X % K
    shift_X = low_S[s_X] // C - (ends_U[unit_X] - blocks_S[s_X])
    len_X = kv_lens_S[s_X]
    rows_X9 = _rows(
        Q_OCTET=s_X * (config.rows // 8),
        HEAD=h_X,
        SEQUENCE=s_X,
        FIRST_BLOCK=begins_X + shift_X,
        END_BLOCK=ends_X + shift_X,
        POSITION=len_X - 1,
        LOW=low_S[s_X],
        END=len_X,
        TILE=unit_X,
    )
    first_U1 = rank(begins_X, jnp.concatenate([jnp.zeros(1, ends_U.dtype), ends_U]), side="left")
    return _Segments(rows_X9, rank(begins_X, cuts_Z, side="left").astype(jnp.int32)), first_U1.astype(jnp.int32)


def _tile_tokens(G: int) -> tuple[int, int]:
    """What a prefill tile's first token is a multiple of, since copies start at multiples of 8 rows, and its tokens."""
    step = 8 // math.gcd(8, G)
    return step, PREFILL_ROWS // G // step * step


def _prefill(q_TKGH, attend, kv_lens_S, query_lens_S, query_starts_S1, sequence_T, config: _Config, scores: _Scores):
    """Outputs [T, K, G, H] of sequences with more than one query token; others' are anything."""
    T, K, G, H = q_TKGH.shape
    S = kv_lens_S.shape[0]
    R = PREFILL_ROWS
    step, tokens = _tile_tokens(G)
    Y = (T + min(S, T // 2) * (step + tokens - 2)) // tokens  # the most tiles that T tokens can make
    config = config._replace(workers=Y * K)
    aligned_S = query_starts_S1[:-1] // step * step
    tiles_S = jnp.where(query_lens_S > 1, -(-(query_starts_S1[1:] - aligned_S) // tokens), 0)
    ends_S = jnp.cumsum(tiles_S)
    segments = _prefill_segments(
        kv_lens_S, query_starts_S1, aligned_S, tiles_S, ends_S, (Y, K, G, tokens), config, scores
    )
    # The last tile reads on; TMA wants rows in eights.
    q_KRH = jnp.pad(q_TKGH.swapaxes(0, 1).reshape(K, T * G, H), ((0, 0), (0, R + -T * G % 8), (0, 0)))
    (out,) = attend(q_KRH, segments, config, (jax.ShapeDtypeStruct((Y * K, R, H), q_TKGH.dtype),))
    within_T = jnp.arange(T) - aligned_S[sequence_T]
    tile_T = jnp.clip((ends_S - tiles_S)[sequence_T] + within_T // tokens, 0, Y - 1)
    tile_TK = tile_T[:, None] * K + jnp.arange(K)
    row_TG = (within_T % tokens * G)[:, None] + jnp.arange(G)
    return out[tile_TK[:, :, None], row_TG[:, None]]


def _prefill_segments(
    kv_lens_S, query_starts_S1, aligned_S, tiles_S, ends_S, sizes: tuple[int, int, int, int], config, scores: _Scores
) -> _Segments:
    """One segment for each tile and KV head, the longest first, for blocks are launched in order."""
    Y, K, G, tokens = sizes
    C = config.block
    s_Y = jnp.minimum(jnp.searchsorted(ends_S, jnp.arange(Y), side="right", method="compare_all"), len(tiles_S) - 1)
    first_Y = aligned_S[s_Y] + (jnp.arange(Y) - (ends_S - tiles_S)[s_Y]) * tokens
    end_token_Y = query_starts_S1[s_Y + 1]
    shift_Y = kv_lens_S[s_Y] - end_token_Y  # from a token's index to its position
    low_Y = scores.first_seen(shift_Y + jnp.maximum(first_Y, query_starts_S1[s_Y]))
    end_Y = shift_Y + jnp.minimum(first_Y + tokens, end_token_Y)
    in_use_Y = jnp.arange(Y) < ends_S[-1]
    order_Y = jnp.argsort(jnp.where(in_use_Y, low_Y // C - -(-end_Y // C), 1))
    spread = lambda x_Y: jnp.repeat(x_Y[order_Y], K)
    head_X = jnp.tile(jnp.arange(K), Y)
    rows_X9 = _rows(
        Q_OCTET=spread(first_Y * G // 8),
        HEAD=head_X,
        SEQUENCE=spread(s_Y),
        FIRST_BLOCK=spread(low_Y // C),
        END_BLOCK=spread(-(-end_Y // C)),
        POSITION=spread(shift_Y + first_Y),
        LOW=spread(low_Y),
        END=spread(end_Y),
        TILE=order_Y.repeat(K) * K + head_X,
    )
    return _Segments(rows_X9, jnp.minimum(jnp.arange(config.workers + 1), ends_S[-1] * K).astype(jnp.int32))


def _rows(**columns_X: jax.Array) -> jax.Array:
    return jnp.stack([columns_X[column.name] for column in Column], axis=1).astype(jnp.int32)


def _with_stages(config: _Config, pool: KV) -> _Config:
    """Fills shared memory with blocks in flight."""
    H, size = values_of(pool).shape[4], values_of(pool).dtype.itemsize
    queries = config.q_slots * config.consumers * TILE_ROWS * H * 2
    output = TILE_ROWS * (CHUNK + 1) * 4 if config.merged else 0
    widened = 2 * config.block * H * 2 if isinstance(pool, QuantizedKV) else 0
    stage = 2 * config.block * (H * size + (4 if isinstance(pool, QuantizedKV) else 0))
    return config._replace(stages=min((SHARED_MEMORY // config.groups - queries - output - widened) // stage, 4))


class _Gmem(NamedTuple):
    """What a launch reads and writes; `base` [1] is the layer's first row in the pool [rows, page_size, H]."""

    rows: Any
    starts: Any
    table: Any
    base: Any
    q: Any
    pool: Any  # values, and scales if quantized
    out: Any


class _Smem(NamedTuple):
    """A thread block's shared memory. Rings are [groups * slots, ...]."""

    q: Any
    k: Any
    v: Any
    scales: tuple[Any, ...]  # of k, of v, if quantized
    widened: tuple[Any, ...]  # a block of k, of v in bfloat16, if quantized
    out: tuple[Any, ...]  # a chunk of a partial output, and its sums, if it is merged


class _Barriers(NamedTuple):
    q_full: Any
    q_free: Any
    k_full: Any
    k_free: Any
    v_full: Any
    v_free: Any
    sync: Any  # between the consumers of a worker


def _tiled(dtype: Any, columns: int) -> tuple[Any, ...]:
    """Tiling and swizzle of an array with rows of so many columns, as TMA and wgmma want them."""
    swizzle = min(columns * jnp.dtype(dtype).itemsize, 128)
    tiling = plgpu.TilingTransform((8, swizzle // jnp.dtype(dtype).itemsize))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(swizzle)  # type: ignore[abstract]


def _array(*shape: int, dtype: Any) -> Any:
    return plgpu.SMEM(shape, dtype, transforms=_tiled(dtype, shape[-1]))


def _attend(
    q_KRH: jax.Array,
    segments: _Segments,
    config: _Config,
    out_type: tuple[jax.ShapeDtypeStruct, ...],
    *,
    pool: KV,
    layer: jax.Array,
    page_table_SM: jax.Array,
    scores: _Scores,
) -> tuple[jax.Array, ...]:
    """Outputs of all segments, see `_Config.merged`; `out_type` is theirs."""
    c, quantized = config, isinstance(pool, QuantizedKV)
    L, P, rows_of_page, page_size, H = values_of(pool).shape
    arrays = [each.reshape(L * P * rows_of_page, page_size, *each.shape[4:]) for each in jax.tree.leaves(pool)]
    ring = _array(c.groups * c.stages, c.block, H, dtype=arrays[0].dtype)
    smem = _Smem(
        q=_array(c.groups * c.q_slots * c.consumers, TILE_ROWS, H, dtype=q_KRH.dtype),
        k=ring,
        v=ring,
        scales=(plgpu.SMEM((c.groups * c.stages, c.block), jnp.float32),) * (2 * quantized),
        widened=(_array(c.groups, c.block, H, dtype=q_KRH.dtype),) * (2 * quantized),
        out=(_array(c.groups, TILE_ROWS, CHUNK, dtype=jnp.float32), plgpu.SMEM((c.groups, TILE_ROWS), jnp.float32))
        if c.merged
        else (),
    )
    barrier = lambda arrivals, slots: plgpu.Barrier(num_arrivals=arrivals, num_barriers=c.groups * slots)
    copies = _pages(c, page_size) * len(arrays)
    full, free, queries = barrier(copies, c.stages), barrier(c.consumers, c.stages), barrier(c.consumers, c.q_slots)
    barriers = _Barriers(queries, queries, full, free, full, free, sync=barrier(c.consumers, 1))

    def body(*refs):
        rows, starts, table, base, q, *arrays_and_out, smem, barriers = refs
        pool_refs, out_refs = arrays_and_out[: len(arrays)], arrays_and_out[len(arrays) :]
        gmem = _Gmem(rows, starts, table, base, q, pool_refs, out_refs)
        thread = lax.axis_index("thread")
        group, role = lax.div(thread, c.consumers + 1), lax.rem(thread, c.consumers + 1)
        worker = lax.axis_index("block") * c.groups + group
        own = gmem.starts[worker], gmem.starts[worker + 1]
        registers = REGISTERS.get(c.groups * (c.consumers + 1))

        @pl.when(role == c.consumers)
        def _producer():
            if registers:
                plgpu.set_max_registers(registers[0], action="decrease")
            _produce(c, own, group, gmem, smem, barriers)

        @pl.when(role < c.consumers)
        def _consumer():
            if registers:
                plgpu.set_max_registers(registers[1], action="increase")
            _consume(c, scores, own, group, role, gmem, smem, barriers)

    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=(smem, barriers),
        grid=(c.workers // c.groups,),
        grid_names=("block",),
        num_threads=c.groups * (c.consumers + 1),
        thread_name="thread",
        kernel_name="paged_attention_decode" if c.merged else "paged_attention_prefill",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*segments, page_table_SM, layer[None] * (P * rows_of_page), q_KRH, *arrays)


def _produce(c: _Config, own, group, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    """Copies the queries of a worker's `own` segments, and their pages with their scales, as slots become free."""
    page_size, last_column = gmem.pool[0].shape[1], gmem.table.shape[1] - 1

    def segment(x, n):
        of = lambda column: gmem.rows[x, column]
        number = x - own[0]
        slot = group * c.q_slots + lax.rem(number, c.q_slots)
        pl.when(number >= c.q_slots)(lambda: plgpu.barrier_wait(barriers.q_free.at[slot]))
        for consumer in range(c.consumers):
            plgpu.copy_gmem_to_smem(
                gmem.q.at[of(Column.HEAD), pl.ds(of(Column.Q_OCTET) * 8 + consumer * TILE_ROWS, c.rows)],
                smem.q.at[slot * c.consumers + consumer, pl.ds(0, c.rows)],
                barriers.q_full.at[slot],
            )
        sequence, low, past = of(Column.SEQUENCE), of(Column.LOW), of(Column.END)
        row = gmem.base[0] + 2 * of(Column.HEAD)

        def page_rows(j):
            # After the last block this asks for one more, which is not used and may be past the table.
            columns = [
                jnp.minimum(lax.div(j * c.block, page_size) + i, last_column) for i in range(_pages(c, page_size))
            ]
            return tuple(gmem.table[sequence, column] * (2 * gmem.q.shape[0]) + row for column in columns)

        def block(j, carry):
            n, rows = carry
            next_rows = page_rows(j + 1)  # memory answers while this block waits for its slots
            ring = group * c.stages + lax.rem(n, c.stages)
            pl.when(n >= c.stages)(lambda: plgpu.barrier_wait(barriers.k_free.at[ring]))
            copy = partial(_copy_pages, c, j, low=low, past=past, pool_refs=gmem.pool)
            copy(rows, targets=[ref.at[ring] for ref in (smem.k, *smem.scales[:1])], full=barriers.k_full.at[ring])
            pl.when(n >= c.stages)(lambda: plgpu.barrier_wait(barriers.v_free.at[ring]))
            rows = [row + 1 for row in rows]
            copy(rows, targets=[ref.at[ring] for ref in (smem.v, *smem.scales[1:])], full=barriers.v_full.at[ring])
            return n + 1, next_rows

        first = of(Column.FIRST_BLOCK)
        n, _ = lax.fori_loop(first, of(Column.END_BLOCK), block, (n, page_rows(first)))
        return n

    lax.fori_loop(own[0], own[1], segment, jnp.int32(0))


def _pages(c: _Config, page_size: int) -> int:
    """Pages of a block; a larger page is several blocks."""
    return max(c.block // page_size, 1)


def _copy_pages(c: _Config, j, rows, low, past, pool_refs, targets, full) -> None:
    """Copies `rows` of the pool, and of its scales, into a block. A page that no token sees is not read."""
    page_size = pool_refs[0].shape[1]
    for i, row in enumerate(rows):
        at = j * c.block + i * page_size
        source = pl.ds(lax.rem(j, page_size // c.block) * c.block, c.block) if page_size > c.block else slice(None)

        def copy(i=i, row=row, source=source):
            for pool_ref, target in zip(pool_refs, targets, strict=True):
                part = target.at[pl.ds(i * page_size, min(page_size, c.block))]
                plgpu.copy_gmem_to_smem(pool_ref.at[row, source], part, full)

        def skip():
            for _ in targets:
                plgpu.barrier_arrive(full)

        if len(rows) == 1:
            copy()  # its block would not be walked otherwise
        else:
            seen = (at < past) & (at + page_size > low)
            pl.when(seen)(copy)
            pl.when(jnp.logical_not(seen))(skip)


def _consume(c: _Config, scores: _Scores, own, group, role, gmem: _Gmem, smem: _Smem, barriers: _Barriers) -> None:
    """Attends: each consumer for its own rows."""
    H = smem.q.shape[2]
    constant = lambda shape, value, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    def segment(x, n):
        of = lambda column: gmem.rows[x, column]
        slot = group * c.q_slots + lax.rem(x - own[0], c.q_slots)
        q_RH = smem.q.at[slot * c.consumers + role]
        plgpu.barrier_wait(barriers.q_full.at[slot])
        low, past, position = of(Column.LOW), of(Column.END), of(Column.POSITION)
        block = partial(_attend_block, c, scores, group, role, q_RH, low, past, position, smem, barriers)
        start = (
            constant((TILE_ROWS, H), 0.0, plgpu.Layout.WGMMA),
            constant((TILE_ROWS,), LOWEST, BY_ROW),
            constant((TILE_ROWS,), 0.0, BY_ROW),
            n,
        )
        acc_RH, top_R, sum_R, n = lax.fori_loop(of(Column.FIRST_BLOCK), of(Column.END_BLOCK), block, start)
        out_RH = acc_RH * _across(1 / sum_R, H)
        if c.merged:
            plgpu.barrier_arrive(barriers.q_free.at[slot])
            _store_partial(c, x, group, out_RH, top_R + jnp.log2(sum_R), gmem.out, smem.out)
        else:
            q_RH[...] = out_RH.astype(smem.q.dtype)  # this consumer was the only reader
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_RH, gmem.out[0].at[of(Column.TILE), pl.ds(role * TILE_ROWS, TILE_ROWS)])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(barriers.q_free.at[slot])
        return n

    lax.fori_loop(own[0], own[1], segment, jnp.int32(0))
    plgpu.wait_smem_to_gmem(0)


def _across(x_R: jax.Array, columns: int) -> jax.Array:
    return lax.broadcast_in_dim(x_R, (TILE_ROWS, columns), [0])


def _down(x_C: jax.Array) -> jax.Array:
    return lax.broadcast_in_dim(x_C, (TILE_ROWS, *x_C.shape), [1])


def _attend_block(c: _Config, scores: _Scores, group, role, q_RH, low, past, position, smem, barriers, j, carry):
    """One turn of the running softmax: its weighted sum, largest score and sum of weights, and blocks so far."""
    acc_RH, top_R, sum_R, n = carry
    C, H = c.block, q_RH.shape[1]
    ring = group * c.stages + lax.rem(n, c.stages)
    edge = ((j + 1) * C > past) | (j * C < low)  # holds positions that no token sees: their bytes may be anything
    k_CH, v_CH = smem.k.at[ring], smem.v.at[ring]
    plgpu.barrier_wait(barriers.k_full.at[ring])
    if smem.widened:
        plgpu.barrier_wait(barriers.v_full.at[ring])
        k_CH, v_CH = (each.at[group] for each in smem.widened)
        _widen(
            c, group, role, (smem.k.at[ring], smem.v.at[ring]), (k_CH, v_CH), edge, low - j * C, past - j * C, barriers
        )
    s_RC = products.scores(q_RH, k_CH)
    if smem.scales:
        s_RC *= _down(plgpu.load(smem.scales[0].at[ring], layout=BY_COLUMN))
        plgpu.commit_smem()  # what was read may be copied over; products need no such fence
    plgpu.barrier_arrive(barriers.k_free.at[ring])
    s_RC = _mask(c, scores, role, position, j, scores.of(s_RC))
    new_top_R = jnp.maximum(top_R, s_RC.max(1))
    fade_R = jnp.exp2(top_R - new_top_R)
    weights_RC = jnp.exp2(s_RC - _across(new_top_R, C))
    sum_R = sum_R * fade_R + weights_RC.sum(1)
    acc_RH *= _across(fade_R, H)
    if smem.scales:
        column_C = plgpu.broadcasted_iota(jnp.int32, (C,), 0, layout=BY_COLUMN) + j * C
        scales_C = plgpu.load(smem.scales[1].at[ring], layout=BY_COLUMN)
        weights_RC *= _down(jnp.where((column_C >= low) & (column_C < past), scales_C, 0.0))
        plgpu.commit_smem()
    if not smem.widened:
        plgpu.barrier_wait(barriers.v_full.at[ring])

        @pl.when(edge)
        def _edge():
            _by(c, role, 0, lambda: _clear(v_CH, low - j * C, past - j * C))
            _sync(c, group, barriers)

    acc_RH = products.weighted(acc_RH, weights_RC.astype(q_RH.dtype), v_CH)
    plgpu.barrier_arrive(barriers.v_free.at[ring])
    return acc_RH, new_top_R, sum_R, n + 1


def _mask(c: _Config, scores: _Scores, role, position, j, s_RC: jax.Array) -> jax.Array:
    """Takes away what rows do not see, where a block has such columns."""
    C, window = c.block, scores.window
    first = position + lax.div(role * TILE_ROWS, c.rows_per_token)
    last = position + lax.div(role * TILE_ROWS + TILE_ROWS - 1, c.rows_per_token)
    needed = (j + 1) * C - 1 > first
    if window is not None:
        needed |= j * C <= last - window

    def masked(s_RC):
        iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, s_RC.shape, axis, layout=plgpu.Layout.WGMMA)
        # Columns less rows' positions: above 0 are later ones.
        ahead_RC = iota(1) + (j * C - position)
        if c.rows_per_token < TILE_ROWS:
            ahead_RC -= lax.div(iota(0) + role * TILE_ROWS, c.rows_per_token)
        seen_RC = ahead_RC <= 0
        if window is not None:
            seen_RC &= ahead_RC > -window
        return jnp.where(seen_RC, s_RC, LOWEST)

    return lax.cond(needed, masked, lambda s_RC: s_RC, s_RC)


def _widen(c: _Config, group, role, narrow, wide, edge, low, past, barriers) -> None:
    """Converts a block of keys and one of values for all consumers of the worker. The scales are applied elsewhere."""

    def convert(part: int) -> None:
        source, target = narrow[part], wide[part]
        for at in range(0, target.shape[0], TILE_ROWS):
            values = plgpu.load(source.at[pl.ds(at, TILE_ROWS)], layout=plgpu.Layout.WGMMA_UPCAST_4X)
            if values.dtype != jnp.int8:
                values = values.astype(jnp.float32)  # Hopper converts 8-bit floats to no other 16 bits than float16
            target[pl.ds(at, TILE_ROWS)] = values.astype(target.dtype)
        if part == 1 and source.dtype != jnp.int8:  # integers are never NaN
            pl.when(edge)(lambda: _clear(target, low, past))
        plgpu.commit_smem()

    _sync(c, group, barriers)  # all are done with the last block
    _by(c, role, 0, lambda: convert(0))
    _by(c, role, c.consumers - 1, lambda: convert(1))
    _sync(c, group, barriers)


def _clear(v_CH, low, past) -> None:
    """Zeroes the values of a block outside of positions `low` to `past` of it, for 0 times NaN is NaN."""
    C, H = v_CH.shape
    shape = (TILE_ROWS, TILE_ROWS)
    for at in range(0, C, TILE_ROWS):
        row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + at
        for column in range(0, H, TILE_ROWS):
            part = v_CH.at[pl.ds(at, TILE_ROWS), pl.ds(column, TILE_ROWS)]
            values = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where((row >= low) & (row < past), values, jnp.zeros_like(values))
    plgpu.commit_smem()


def _by(c: _Config, role, consumer: int, work: Callable[[], None]) -> None:
    """One consumer works."""
    if c.consumers == 1:
        work()
    else:
        pl.when(role == consumer)(work)


def _sync(c: _Config, group, barriers: _Barriers) -> None:
    """All consumers of a worker wait for each other."""
    if c.consumers > 1:
        plgpu.barrier_arrive(barriers.sync.at[group])
        plgpu.barrier_wait(barriers.sync.at[group])


def _store_partial(c: _Config, x, group, out_RH: jax.Array, sum_R: jax.Array, out_refs, smem_out) -> None:
    chunk, sums = (each.at[group] for each in smem_out)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the last segment
    sums[...] = sum_R
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(sums.at[pl.ds(0, c.rows)], out_refs[1].at[x])
    for column in range(0, out_RH.shape[1], CHUNK):
        if column:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        chunk[...] = out_RH[:, column : column + CHUNK]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(chunk.at[pl.ds(0, c.rows)], out_refs[0].at[x, :, pl.ds(column, CHUNK)])


def _merge(partial_XRH: jax.Array, sum_XR: jax.Array, first_U1: jax.Array) -> jax.Array:
    """Joins segments `first[u]` to `first[u + 1] - 1` into output u [U, R, H], in bfloat16; none leave it unwritten.

    Sums are log2 of each row's sum of weights. A block's share is MERGE_COLUMNS of the columns.
    """
    _, R, H = partial_XRH.shape
    U = len(first_U1) - 1
    columns = MERGE_COLUMNS

    def body(first_ref, partial_ref, sum_ref, out_ref, part, sums, out, full):
        u, column = lax.axis_index("unit"), lax.axis_index("chunk") * columns
        begin, end = first_ref[u], first_ref[u + 1]
        constant = lambda shape, value, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

        def fetch(x):
            slot = lax.rem(x - begin, 2)
            plgpu.copy_gmem_to_smem(
                partial_ref.at[x, :, pl.ds(column, columns)], part.at[slot, pl.ds(0, R)], full.at[slot]
            )
            plgpu.copy_gmem_to_smem(sum_ref.at[x], sums.at[slot, pl.ds(0, R)], full.at[slot])

        def join(x, carry):
            acc_RH, top_R, sum_R = carry
            pl.when(x + 1 < end)(lambda: fetch(x + 1))
            slot = lax.rem(x - begin, 2)
            plgpu.barrier_wait(full.at[slot])
            part_RH = plgpu.load(part.at[slot], layout=plgpu.Layout.WGMMA)
            part_R = plgpu.load(sums.at[slot], layout=BY_ROW)
            plgpu.commit_smem()  # it is read before the copy after next overwrites it
            new_top_R = jnp.maximum(top_R, part_R)
            fade_R, weight_R = jnp.exp2(top_R - new_top_R), jnp.exp2(part_R - new_top_R)
            acc_RH = acc_RH * _across(fade_R, columns) + part_RH * _across(weight_R, columns)
            return acc_RH, new_top_R, sum_R * fade_R + weight_R

        @pl.when(begin < end)
        def _unit():
            fetch(begin)
            start = (
                constant((TILE_ROWS, columns), 0.0, plgpu.Layout.WGMMA),
                constant((TILE_ROWS,), LOWEST, BY_ROW),
                constant((TILE_ROWS,), 0.0, BY_ROW),
            )
            acc_RH, _, sum_R = lax.fori_loop(begin, end, join, start)
            out[...] = (acc_RH * _across(1 / sum_R, columns)).astype(out.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out.at[pl.ds(0, R)], out_ref.at[u, :, pl.ds(column, columns)])
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((U, R, H), jnp.bfloat16),
        scratch_types=(
            _array(2, TILE_ROWS, columns, dtype=jnp.float32),
            plgpu.SMEM((2, TILE_ROWS), jnp.float32),
            _array(TILE_ROWS, columns, dtype=jnp.bfloat16),
            plgpu.Barrier(num_arrivals=2, num_barriers=2),
        ),
        grid=(U, H // columns),
        grid_names=("unit", "chunk"),
        kernel_name="paged_attention_merge",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(first_U1, partial_XRH, sum_XR)
