"""Paged attention for TPUs (v5e, v5p, v6e, 7x), in Pallas: a kernel that writes, and one that attends.

Pages lie in main memory as `[X, page_size, E]` rows (see `layout.py`), whole: one copy moves a page of all heads.

- `_write_kernel` puts the step's rows into their pages. A chip moves tiles of rows, not single ones, so each touched
  block of rows is fetched, merged with the new rows and sent back, several blocks being under way at a time.
- `_attend_kernel` walks a list of items: tiles of query tokens of sequences with more than one, then single query
  tokens. An item walks its pages in blocks, with a running softmax (arXiv:2205.14135) for each row of
  (query token, query head of the group). Blocks are fetched ahead of their use, past the end of an item into the
  next ones, so that short sequences do not wait for memory one after the other.

All lengths are dynamic: one compiled program serves any mix. What follows from lengths alone (the lists) is computed
by XLA, once a step. Letters beside those of `api` and `layout`: I items of a list, B query tokens of a tile, C
positions of a block of W pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.dispatch import Device, KernelError, current_device
from pallas_kernels.paged_attention.layout import KV, PageLayout, QuantizedKV, values_of
from pallas_kernels.paged_attention.reference import token_positions
from pallas_kernels.paged_attention.xla import LOWEST, Scores, flat_list
from pallas_kernels.tuning import tuned_block

CHIPS = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p"} | {
    kind: name for name in ("v6e", "7x") for kind in (f"TPU {name}", f"TPU{name}", f"TPU {name[:-1]} lite")
}
LANES = 128
FETCHES = 4  # blocks of pages under way or in use at a time
WRITES = 8  # blocks of rows under way at a time in the write kernel, at most; half are being read, half written
VMEM_BYTES = 48 << 20  # of the 64 MiB to 128 MiB a core has
TABLE_ENTRIES = 3 << 16  # page ids that a launch takes: 768 KiB of the 1 MiB of scalar memory


class Blocks(NamedTuple):
    """Sizes that change speed alone.

    Attributes:
      decode, prefill: positions of a block of pages, for single query tokens and for tiles.
      tile: query tokens of a tile, a power of two.
    """

    decode: int
    prefill: int
    tile: int


def refusal(device: Device, layout: PageLayout, q_dtype: Any, pool: KV, group: int) -> str | None:
    """Why this call cannot be served, or None."""
    page_size, dtype = values_of(pool).shape[3], jnp.dtype(values_of(pool).dtype)
    elements = values_of(pool).shape[4]
    if device.platform != "tpu":
        return f"the device is no TPU but {device.kind}"
    if device.kind not in CHIPS:
        return f"{device.kind} is none of {', '.join(sorted(set(CHIPS.values())))}"
    if dtype == jnp.uint8:
        return "a pool of bytes, as a CPU keeps float8_e4m3fn"
    if elements % LANES:
        return f"rows of {elements} elements; the kernel takes multiples of {LANES}, as pool_spec pads them"
    rows = 16 if isinstance(pool, QuantizedKV) else _rows_of_write(dtype)  # quantized pages move whole
    if page_size % rows or page_size > LANES:
        return f"pages of {page_size} tokens; with {dtype} the kernel takes multiples of {rows} up to {LANES}"
    if group > 16:
        return f"{group} query heads for a KV head; the kernel takes at most 16"
    if q_dtype not in (jnp.bfloat16, jnp.float32):
        return f"queries of {q_dtype}; the kernel takes bfloat16 and float32"
    if dtype == jnp.float16 or (dtype == jnp.float32 and q_dtype != jnp.float32):
        return f"queries of {q_dtype} over a pool of {dtype}"
    return None


def shape_key(pool: KV, group: int) -> dict[str, Any]:
    """What block sizes are tuned for."""
    _, _, rows, page_size, elements = values_of(pool).shape
    dtype = jnp.dtype(values_of(pool).dtype).name
    return {"rows": rows, "page_size": page_size, "elements": elements, "group": group, "kv": dtype}


def blocks_for(kind: str, layout: PageLayout, pool: KV, group: int) -> Blocks:
    """The blocks tuned for this kind of chip and shape; else a guess.

    The guess: blocks of about 1 MiB, so that FETCHES of them keep memory busy, and tiles that fill the matrix unit.
    """
    if (tuned := tuned_block("paged_attention", kind, shape_key(pool, group))) is not None:
        return Blocks(**tuned)
    token_bytes = math.prod(values_of(pool).shape[2:]) // values_of(pool).shape[3] * values_of(pool).dtype.itemsize
    decode = min(max((1 << 20) // token_bytes // LANES * LANES, LANES), 1024)
    tile = 1 << max(min(512 // group, 4096 // (group * layout.num_kv_heads)), 8).bit_length() - 1
    return Blocks(decode, min(decode, 512), min(tile, LANES))


def check_blocks(blocks: Blocks, layout: PageLayout, pool: KV, group: int) -> None:
    """Refuses blocks that cannot be.

    Raises:
      KernelError: says which, and why.
    """
    _, _, X, page_size, E = values_of(pool).shape
    if blocks.tile < 1 or blocks.tile & (blocks.tile - 1):
        raise KernelError(f"paged_attention: {blocks}; a tile is a power of two of query tokens")
    if any(each < 1 or (each > page_size and each % page_size) for each in (blocks.decode, blocks.prefill)):
        raise KernelError(f"paged_attention: {blocks}; a block is whole pages of {page_size} tokens")
    positions = max(blocks.decode, blocks.prefill, page_size)
    scales = 4 * positions // page_size * math.prod(pool.scales.shape[2:]) if isinstance(pool, QuantizedKV) else 0
    rows = blocks.tile * group * layout.num_kv_heads
    block = positions * X * E * values_of(pool).dtype.itemsize + scales
    needed = FETCHES * block + 3 * rows * E * 2 + rows * (E + 2 * LANES) * 4
    if needed > VMEM_BYTES:
        raise KernelError(f"paged_attention: {blocks}; they take {needed} bytes on the chip, of {VMEM_BYTES}")


def _rows_of_write(dtype: Any) -> int:
    """Rows of a tile in main memory: 8 for 4 bytes, 16 for 2, 32 for 1."""
    return 32 // jnp.dtype(dtype).itemsize


def _pages_seen(position: Any, tokens: Any, page_size: int, window: int | None) -> tuple[Any, Any]:
    """The first page that query tokens from a position on see, and the one past their last: what an item reads."""
    low = 0 if window is None else position + 1 - window
    return (low > 0) * low // page_size, (position + tokens - 1) // page_size + 1


def _blocks_written(kv_len: Any, query_len: Any, R: int) -> tuple[Any, Any]:
    """The first block of R rows that a sequence's new tokens lie in, and how many there are."""
    first = (kv_len - query_len) // R
    return first, (query_len > 0) * ((kv_len - 1) // R - first + 1)


def _rows_written(pool: KV) -> int:
    # Scales of a page are one tile, which two blocks must not send back side by side.
    values = values_of(pool)
    return values.shape[3] if isinstance(pool, QuantizedKV) else _rows_of_write(values.dtype)


def transferred_bytes(
    pool: KV, layout: PageLayout, num_heads: int, query_lens: Sequence[int], kv_lens: Sequence[int], window: int | None
) -> int:
    """Bytes of the pool that a call moves from and to main memory, by the kernels' own walk."""
    page_size = values_of(pool).shape[3]
    page = sum(math.prod(leaf.shape[2:]) * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    blocks = blocks_for(current_device().kind, layout, pool, num_heads // layout.num_kv_heads)
    tile, R = blocks.tile, _rows_written(pool)
    total = 0
    for query_len, kv_len in zip(query_lens, kv_lens, strict=True):
        for begin in range(0, query_len, tile):
            position, tokens = kv_len - query_len + begin, min(tile, query_len - begin)
            first, end = _pages_seen(position, tokens, page_size, window)
            total += (end - first) * page
        total += 2 * _blocks_written(kv_len, query_len, R)[1] * page * R // page_size
    return total


class _Step(NamedTuple):
    """What the kernels know of the step; each goes to scalar memory."""

    layer_1: jax.Array
    page_table_SM: jax.Array  # flat
    kv_lens_S: jax.Array
    query_starts_S1: jax.Array


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
    """See `reference.paged_attention`. Blocks of one's own are for tuning.

    Raises:
      KernelError: those that cannot be, or more pages of a sequence than scalar memory lists.
    """
    device, group = current_device(), q_TNH.shape[1] // layout.num_kv_heads
    blocks = blocks or blocks_for(device.kind, layout, pool, group)
    check_blocks(blocks, layout, pool, group)
    if page_table_SM.shape[1] > TABLE_ENTRIES:
        raise KernelError(
            f"paged_attention: {page_table_SM.shape[1]} pages of a sequence; scalar memory lists {TABLE_ENTRIES}, "
            "so use larger pages"
        )
    return _layer_attention(
        q_TNH,
        rows,
        pool,
        jnp.asarray(layer, jnp.int32),
        page_table_SM,
        kv_lens_S,
        query_starts_S1,
        num_seqs,
        layout=layout,
        scores=Scores(scale, window, soft_cap),
        blocks=blocks,
        cores=device.cores,
    )


# With the layer an array, unrolled layers share one trace.
@partial(jax.jit, static_argnames=("layout", "scores", "blocks", "cores"))
def _layer_attention(
    q_TNH, rows, pool, layer, page_table_SM, kv_lens_S, query_starts_S1, num_seqs, *, layout, scores, blocks, cores
):
    S, M = page_table_SM.shape
    size = -(-S // -(-S // max(TABLE_ENTRIES // M, 1)))  # sequences of a launch
    launches = [
        (
            _Step(
                layer[None],
                page_table_SM[first : first + size].reshape(-1),
                kv_lens_S[first : first + size],
                query_starts_S1[first : first + size + 1],
            ),
            jnp.clip(num_seqs - first, 0, size),
        )
        for first in range(0, S, size)
    ]
    for step, count in launches:
        pool = _write(rows, pool, step, count)
    sequence_T, _, valid_T = token_positions(len(q_TNH), kv_lens_S, query_starts_S1, num_seqs)
    out_TNH = jnp.zeros_like(q_TNH)
    for number, (step, count) in enumerate(launches):
        own_T = valid_T if len(launches) == 1 else valid_T & (sequence_T // size == number)
        own_TNH = _attend(q_TNH, pool, step, count, layout, scores, blocks, cores)
        out_TNH = jnp.where(own_T[:, None, None], own_TNH, out_TNH)
    return pool, out_TNH


def _query_lens(step: _Step, num_seqs: jax.Array) -> jax.Array:
    starts = step.query_starts_S1
    return jnp.where(jnp.arange(len(starts) - 1) < num_seqs, starts[1:] - starts[:-1], 0)


def _write(rows: KV, pool: KV, step: _Step, num_seqs: jax.Array) -> KV:
    """The pool with the rows in their pages."""
    T = len(values_of(rows))
    S = len(step.kv_lens_S)
    _, _, X, page_size, E = values_of(pool).shape
    R = _rows_written(pool)
    first_S, count_S = _blocks_written(step.kv_lens_S, _query_lens(step, num_seqs), R)
    sequence_I, number_I, total = flat_list(count_S, min(T, T // R + 2 * S))
    block_I = first_S[sequence_I] + number_I
    # A block's rows may begin before the step's first token and end after its last.
    around = lambda rows: jnp.pad(rows, ((R, R), (0, 0), (0, 0)))
    new = [around(values_of(rows))]
    buffers: list[tuple[Any, Any, Any]] = [((R, X, E), (X, R, E), values_of(pool).dtype)]
    if isinstance(rows, QuantizedKV):
        # A column a token: the copy along lanes is done here, where it costs nothing.
        tile = pool.scales.shape[2:]  # type: ignore[union-attr]
        new.append(around(jnp.broadcast_to(rows.scales[..., None], (T, *tile))))
        buffers.append(((R, *tile), tile, jnp.float32))
    slot_bytes = sum(math.prod(each) * jnp.dtype(dtype).itemsize for *both, dtype in buffers for each in both)
    # Half of the memory: a block is merged in float32. Large pages of many heads in 8 bits are few at a time.
    slots = max(min(VMEM_BYTES // 2 // slot_bytes, WRITES) // 2 * 2, 2)
    scratch = [
        *(pltpu.VMEM((slots, *new_shape), dtype) for new_shape, _, dtype in buffers),
        *(pltpu.VMEM((slots, *old_shape), dtype) for _, old_shape, dtype in buffers),
        pltpu.SemaphoreType.DMA((slots,)),
        pltpu.SemaphoreType.DMA((slots,)),
    ]
    scalars = (*step, sequence_I, block_I, total[None])
    leaves = jax.tree.leaves(pool)
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        partial(_write_kernel, num_arrays=len(new), page_size=page_size, R=R, slots=slots),
        out_shape=[jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[in_memory] * 2 * len(new),
            out_specs=[in_memory] * len(new),
            scratch_shapes=scratch,
        ),
        input_output_aliases={len(scalars) + len(new) + i: i for i in range(len(new))},
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=VMEM_BYTES),
        name="paged_attention_write",
    )(*scalars, *new, *leaves)
    return QuantizedKV(*written) if isinstance(pool, QuantizedKV) else written[0]


def _write_kernel(
    layer, table, lens, starts, sequence, block, total, *refs, num_arrays: int, page_size: int, R: int, slots: int
):
    new_hbm, refs = refs[:num_arrays], refs[2 * num_arrays :]  # the aliased inputs are the outputs
    pool_hbm, new_buf, old_buf = (refs[i * num_arrays : (i + 1) * num_arrays] for i in range(3))
    read_sem, write_sem = refs[3 * num_arrays :]
    pages_per_seq = table.shape[0] // lens.shape[0]
    ahead = slots // 2

    def place(i):
        """Sequence, first position of the block, its page and its first row there."""
        s, position = sequence[i], block[i] * R
        return s, position, table[s * pages_per_seq + position // page_size], position % page_size

    def in_pool(i):
        _, _, page, row = place(i)
        values = pool_hbm[0].at[layer[0], page, :, pl.ds(pl.multiple_of(row, R), R)]
        return [values, *(scales.at[layer[0], page] for scales in pool_hbm[1:])]

    def reads(i):
        s, position, _, _ = place(i)
        token = position - (lens[s] - starts[s + 1])
        slot = i % slots
        for new, new_slots, old, old_slots in zip(new_hbm, new_buf, in_pool(i), old_buf, strict=True):
            yield pltpu.make_async_copy(new.at[pl.ds(token + R, R)], new_slots.at[slot], read_sem.at[slot])
            yield pltpu.make_async_copy(old, old_slots.at[slot], read_sem.at[slot])

    def writes(i):
        slot = i % slots
        for old_slots, old in zip(old_buf, in_pool(i), strict=True):
            yield pltpu.make_async_copy(old_slots.at[slot], old, write_sem.at[slot])

    def merge(i):
        s, position, _, row = place(i)
        slot = i % slots
        first = lens[s] - (starts[s + 1] - starts[s]) - position  # of the step's rows, counted in the block
        end = lens[s] - position
        new = jnp.swapaxes(new_buf[0][slot].astype(jnp.float32), 0, 1)
        old = old_buf[0][slot].astype(jnp.float32)
        at = lax.broadcasted_iota(jnp.int32, old.shape, 1)
        old_buf[0][slot] = jnp.where((at >= first) & (at < end), new, old).astype(old_buf[0].dtype)
        for new_scales, old_scales in zip(new_buf[1:], old_buf[1:], strict=True):
            column = lax.broadcasted_iota(jnp.int32, old_scales.shape[1:], 1) - row

            def put(r, scales, new_scales=new_scales, column=column):
                return jnp.where(column == r, new_scales[slot, r], scales)

            old_scales[slot] = lax.fori_loop(jnp.maximum(first, 0), jnp.minimum(end, R), put, old_scales[slot])

    def turn(i, _):
        @pl.when(i >= ahead)
        def free():
            for copy in writes(i - ahead):  # whose slots are those of the next reads
                copy.wait()

        @pl.when(i + ahead < total[0])
        def fetch():
            for copy in reads(i + ahead):
                copy.start()

        @pl.when((i >= 0) & (i < total[0]))
        def exchange():
            for copy in reads(i):
                copy.wait()
            merge(i)
            for copy in writes(i):
                copy.start()

    lax.fori_loop(-ahead, total[0] + ahead, turn, None)


class _Plan(NamedTuple):
    """What is static about `_attend_kernel`."""

    layout: PageLayout
    group: int
    page_size: int
    scores: Scores
    blocks: Blocks
    num_tiles: int  # room for tiles in the list of items; single query tokens come after them
    quantized: bool


def _attend(
    q_TNH: jax.Array,
    pool: KV,
    step: _Step,
    num_seqs: jax.Array,
    layout: PageLayout,
    scores: Scores,
    blocks: Blocks,
    cores: int,
) -> jax.Array:
    """Outputs [T, N, H]; those of padding hold anything."""
    T, N, H = q_TNH.shape
    S, K, E = len(step.kv_lens_S), layout.num_kv_heads, values_of(pool).shape[4]
    _, _, X, page_size, _ = values_of(pool).shape
    G = N // K
    tile = min(blocks.tile, 1 << T.bit_length() - 1)
    blocks = Blocks(max(blocks.decode, page_size), max(blocks.prefill, page_size), tile)
    query_lens_S = _query_lens(step, num_seqs)
    num_tiles = min(T // 2, T // tile + S)
    tiles_S = jnp.where(query_lens_S > 1, -(-query_lens_S // tile), 0)
    decodes_S = query_lens_S == 1
    sequence_D = jnp.argsort(~decodes_S, stable=True)
    sequence_I, number_I, total = flat_list(tiles_S, max(num_tiles, 1))
    begin_I = step.query_starts_S1[sequence_I] + number_I * tile
    num_tiles = len(sequence_I)
    items = (
        jnp.concatenate([sequence_I, sequence_D]),
        jnp.concatenate([begin_I, step.query_starts_S1[sequence_D]]),
        jnp.stack([total if T > 1 else jnp.zeros_like(total), jnp.sum(decodes_S)]),
    )
    # Rows of joined layouts hold a key and a value: zeros leave the value out of the scores.
    q_TKGE = jnp.pad(q_TNH.reshape(T, K, G, H), ((0, 0), (0, 0), (0, 0), (0, E - H)))
    plan = _Plan(layout, G, page_size, scores, blocks, num_tiles, isinstance(pool, QuantizedKV))
    W = max(blocks.decode, blocks.prefill) // page_size
    scalars = tuple(each.astype(jnp.int32) for each in (*step, *items))
    in_memory = pl.BlockSpec(memory_space=pl.ANY)
    leaves = jax.tree.leaves(pool)
    out_TKGE = pl.pallas_call(
        partial(_attend_kernel, plan=plan),
        out_shape=jax.ShapeDtypeStruct(q_TKGE.shape, q_TNH.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(cores,),
            in_specs=[in_memory] * (1 + len(leaves)),
            out_specs=in_memory,
            scratch_shapes=[
                pltpu.VMEM((2, tile, K, G, E), q_TNH.dtype),
                pltpu.VMEM((tile, K, G, E), q_TNH.dtype),
                pltpu.VMEM((FETCHES, W, X, page_size, E), values_of(pool).dtype),
                *(pltpu.VMEM((FETCHES, W, *scales.shape[2:]), jnp.float32) for scales in leaves[1:]),
                pltpu.VMEM((K, tile * G, LANES), jnp.float32),
                pltpu.VMEM((K, tile * G, LANES), jnp.float32),
                pltpu.VMEM((K, tile * G, E), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
                pltpu.SemaphoreType.DMA((FETCHES,)),
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_BYTES),
        name="paged_attention",
    )(*scalars, q_TKGE, *leaves)
    return out_TKGE[..., E - H :].reshape(T, N, H)


class _Item(NamedTuple):
    """A sequence's query tokens from `begin` on, and the pages they see, as scalars of the kernel."""

    sequence: jax.Array
    begin: jax.Array
    tokens: jax.Array
    position: jax.Array  # of the first
    first_page: jax.Array | int
    end_page: jax.Array
    kv_len: jax.Array


def _attend_kernel(layer, table, lens, starts, sequence, begin, totals, q_hbm, *refs, plan: _Plan):
    (pool_hbm, *scales_hbm), buffers = refs[: 1 + plan.quantized], refs[1 + plan.quantized :]
    out_hbm, q_buf, out_buf, kv_buf, *scales_buf, top_ref, sum_ref, acc_ref, q_sem, out_sem, kv_sem = buffers
    pages_per_seq = table.shape[0] // lens.shape[0]
    core, cores = pl.program_id(0), pl.num_programs(0)

    def phase(first: int, total, tile: int, columns: int):
        """Runs this core's share of the items of one kind."""
        W = columns // plan.page_size
        count = (total - core + cores - 1) // cores

        def item(j) -> _Item:
            at = first + core + j * cores
            s, start = sequence[at], begin[at]
            tokens = jnp.minimum(tile, starts[s + 1] - start)
            position = lens[s] - starts[s + 1] + start
            first_page, end_page = _pages_seen(position, tokens, plan.page_size, plan.scores.window)
            return _Item(s, start, tokens, position, first_page, end_page, lens[s])

        def num_blocks(it: _Item):
            return (it.end_page - it.first_page + W - 1) // W

        def for_tokens(it: _Item, hbm, buf, sem, act: Callable, *, out: bool):
            """Acts on copies of an item's tokens, in powers of two: the size of a copy is static."""
            size = tile
            while size:
                at = it.tokens // (2 * size) * (2 * size)

                @pl.when((it.tokens & size) != 0)
                def _(size=size, at=at):
                    pair = buf.at[pl.ds(at, size)], hbm.at[pl.ds(it.begin + at, size)]
                    act(pltpu.make_async_copy(*(pair if out else pair[::-1]), sem))

                size //= 2

        def for_pages(j, b, slot, act: Callable):
            it = item(j)
            page = it.first_page + b * W

            def one(w, _):
                page_id = table[it.sequence * pages_per_seq + page + w]
                act(pltpu.make_async_copy(pool_hbm.at[layer[0], page_id], kv_buf.at[slot, w], kv_sem.at[slot]))
                for hbm, buf in zip(scales_hbm, scales_buf, strict=True):
                    act(pltpu.make_async_copy(hbm.at[layer[0], page_id], buf.at[slot, w], kv_sem.at[slot]))

            lax.fori_loop(0, jnp.minimum(W, it.end_page - page), one, None)

        def fetch_q(j):
            for_tokens(item(j), q_hbm, q_buf.at[j % 2], q_sem.at[j % 2], lambda copy: copy.start(), out=False)

        def fetch(cursor, slot):
            """Starts the block at the cursor, if there is one; returns the next."""
            j, b = cursor

            @pl.when(j < count)
            def _():
                for_pages(j, b, slot, lambda copy: copy.start())

            more = b + 1 < num_blocks(item(jnp.minimum(j, jnp.maximum(count - 1, 0))))
            return jnp.where(more, j, j + 1), jnp.where(more, b + 1, 0)

        def run(j, carry):
            turn, cursor = carry
            it = item(j)
            for_tokens(it, q_hbm, q_buf.at[j % 2], q_sem.at[j % 2], lambda copy: copy.wait(), out=False)
            pl.when(j + 1 < count)(lambda: fetch_q(j + 1))
            rows = tile * plan.group
            top_ref[:, :rows] = jnp.full_like(top_ref[:, :rows], LOWEST)
            sum_ref[:, :rows] = jnp.zeros_like(sum_ref[:, :rows])
            acc_ref[:, :rows] = jnp.zeros_like(acc_ref[:, :rows])

            def block(b, cursor):
                slot = (turn + b) % FETCHES
                cursor = fetch(cursor, (turn + b + FETCHES - 1) % FETCHES)
                for_pages(j, b, slot, lambda copy: copy.wait())
                column = (it.first_page + b * W) * plan.page_size
                valid = jnp.minimum(it.kv_len, it.end_page * plan.page_size) - column
                clear_unwritten(slot, valid, W)
                attend(it, slot, column, valid, j % 2, tile, W)
                return cursor

            cursor = lax.fori_loop(0, num_blocks(it), block, cursor)
            pl.when(j > 0)(
                lambda: for_tokens(item(j - 1), out_hbm, out_buf, out_sem, lambda copy: copy.wait(), out=True)
            )
            for k in range(plan.layout.num_kv_heads):
                out = acc_ref[k, :rows] / jnp.maximum(sum_ref[k, :rows, :1], 1e-30)
                out_buf[:tile, k] = out.astype(out_buf.dtype).reshape(tile, plan.group, out.shape[-1])
            for_tokens(it, out_hbm, out_buf, out_sem, lambda copy: copy.start(), out=True)
            return turn + num_blocks(it), cursor

        @pl.when(count > 0)
        def _():
            fetch_q(0)
            cursor = (jnp.int32(0), jnp.int32(0))
            for slot in range(FETCHES - 1):
                cursor = fetch(cursor, slot)
            lax.fori_loop(0, count, run, (jnp.int32(0), cursor))
            for_tokens(item(count - 1), out_hbm, out_buf, out_sem, lambda copy: copy.wait(), out=True)

    def clear_unwritten(slot, valid, W: int):
        """Zeroes the block's rows past the sequence's end: a weight of 0 does not hide NaN."""

        @pl.when(valid < W * plan.page_size)
        def _():
            shape = (W, 1, plan.page_size, 1)
            at = lax.broadcasted_iota(jnp.int32, shape, 0) * plan.page_size + lax.broadcasted_iota(jnp.int32, shape, 2)

            def clear(x, _):
                part = kv_buf[slot, :W, pl.ds(x, 1)]
                kept = jnp.broadcast_to(at < valid, part.shape)
                kv_buf[slot, :W, pl.ds(x, 1)] = jnp.where(kept, part, jnp.zeros_like(part))

            lax.fori_loop(0, kv_buf.shape[2], clear, None)

    def attend(it: _Item, slot, column, valid, q_slot, tile: int, W: int):
        """Takes a block of pages into the running softmax of all heads."""
        rows, columns = tile * plan.group, W * plan.page_size
        E = q_buf.shape[-1]
        column_RC = column + lax.broadcasted_iota(jnp.int32, (rows, columns), 1)
        position_RC = it.position
        if tile > 1:
            row = lax.broadcasted_iota(jnp.int32, (rows, columns), 0).astype(jnp.float32)
            position_RC += ((row + 0.5) * (1 / plan.group)).astype(jnp.int32)  # vectors have no integer division
        seen_RC = column_RC <= position_RC
        if plan.scores.window is not None:
            seen_RC &= column_RC > position_RC - plan.scores.window
        precision = lax.Precision.HIGHEST if q_buf.dtype == jnp.float32 else None
        multiply = partial(lax.dot_general, precision=precision, preferred_element_type=jnp.float32)

        def scale_row(x):
            return jnp.concatenate([scales_buf[0][slot, w, pl.ds(x, 1), : plan.page_size] for w in range(W)], axis=-1)

        def head(k):
            q_RE = q_buf[q_slot, :tile, k].reshape(rows, E)
            k_at, v_at = (k, k) if plan.layout.joined else (2 * k, 2 * k + 1)
            k_CE = kv_buf[slot, :W, k_at].astype(q_RE.dtype).reshape(columns, E)
            v_CE = kv_buf[slot, :W, v_at].astype(q_RE.dtype).reshape(columns, E)
            products = multiply(q_RE, k_CE, (((1,), (1,)), ((), ())))
            if plan.quantized:
                products *= scale_row(2 * k)
            s = jnp.where(seen_RC, plan.scores.of(products), LOWEST)
            old_top = top_ref[k, :rows, :1]
            top = jnp.maximum(old_top, jnp.max(s, axis=-1, keepdims=True))
            # A row that has seen nothing has a top of LOWEST, and its weights must still be 0.
            weights = jnp.exp(s - jnp.maximum(top, LOWEST / 2))
            fade = jnp.exp(old_top - top)
            sum_ref[k, :rows] = sum_ref[k, :rows] * fade + jnp.sum(weights, axis=-1, keepdims=True)
            top_ref[k, :rows] = jnp.broadcast_to(top, (rows, LANES))
            if plan.quantized:
                seen = lax.broadcasted_iota(jnp.int32, (1, columns), 1) < valid
                weights *= jnp.where(seen, scale_row(2 * k + 1), 0.0)
            out = multiply(weights.astype(q_RE.dtype), v_CE, (((1,), (0,)), ((), ())))
            acc_ref[k, :rows] = acc_ref[k, :rows] * fade + out

        # Several heads at a time hide each other's latency where they have few rows.
        together = math.gcd(plan.layout.num_kv_heads, 4 if tile == 1 else 1)

        def heads(i, _):
            for number in range(together):
                head(i * together + number)

        lax.fori_loop(0, plan.layout.num_kv_heads // together, heads, None)

    phase(0, totals[0], plan.blocks.tile, plan.blocks.prefill)
    phase(plan.num_tiles, totals[1], 1, plan.blocks.decode)
