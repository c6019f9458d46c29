"""4-bit group-wise weights times bfloat16 rows on Hopper GPUs, in Mosaic GPU. The weight is only ever 4 bits in memory.

A block of threads owns tiles of the result, one after another: `rows` rows by 256 outputs for each of its computing
warpgroups, over one of `splits` ranges of the inputs. One more warpgroup copies (TMA) `BLOCK_IN` inputs at a time, of
x, of the packed values and of the scales, through a ring of `stages` buffers in shared memory, and runs on into the
next tile's inputs while the last ones of this tile are multiplied. The product is taken transposed, weights as the
left operand of `wgmma`: that one may come from registers, where four bits become bfloat16, and then rows need only
be a multiple of 8. Groups' sums are float32 and are scaled and added in float32; values less zero points are
integers, exact in bfloat16. So the result has the error of a float32 sum, whatever the scales.

Where splits share a tile each writes its float32 part, and XLA adds the parts: the same sum in every run. Minima are
a small product of their own (sums of x over groups, times minima), in XLA too.

How bits reach `wgmma`. Eight neighbouring outputs of an input are a 32-bit word. `wgmma` wants lane 4 r + c of warp w
to hold, of a 64-row left operand, rows 16 w + r and 16 w + 8 + r at columns 2 c, 2 c + 1, 2 c + 8, 2 c + 9. So that
lane reads the words of outputs 64 w + 8 r to 64 w + 8 r + 7 at those columns; outputs 2 m and 2 m + 1 of the eight are
its two rows in the m-th of four products. No lane needs another's bits, reads hit each bank of shared memory once,
and the eight outputs lie side by side again in the result.

`Layout.TILED` names such a split of an array: the tilings in turn cut the last axes, and of the axes that this makes
some number warps, lanes and the values of a register. What is written for registers lies behind two functions,
`multiply_add` and `store_rows`, since the interpreter of Pallas has no such thing; all else runs in it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector
from jaxlib.mlir.dialects import math as math_dialect

from pallas_kernels.dispatch import KernelError, current_device
from pallas_kernels.paged_attention.gpu import MULTIPROCESSORS
from pallas_kernels.quantized_matmul.weights import GroupedWeight, Weight
from pallas_kernels.quantized_matmul.xla import minima_product
from pallas_kernels.tuning import tuned_entries

TILE_OUT = 256  # outputs of a computing warpgroup: 32 words, a row of shared memory as TMA swizzles it
BLOCK_IN = 128  # inputs of a pipeline stage
MAX_ROWS = 64  # rows of a tile: its float32 sums take 2 registers a row, of 232
SHARED_BYTES = 232448 - 2048  # a block's limit, less what barriers take

# Words [inputs, 32] and results [rows, 256], as lanes hold them (see above).
WORDS = plgpu.Layout.TILED(plgpu.Tiling(((8, 32), (8, 8), (2, 1))), warp_dims=(-5,), lane_dims=(-3, -4), vector_dim=-1)
RESULT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 256), (8, 64), (2, 8), (2,))), warp_dims=(-6,), lane_dims=(-4, -5), vector_dim=-1
)
OUTPUTS = RESULT.reduce((0,))  # a number for each output: [256]


class Block(NamedTuple):
    """How a product is cut into tiles."""

    rows: int  # of a tile: a multiple of 8, to MAX_ROWS
    warpgroups: int  # computing ones, each with TILE_OUT outputs
    splits: int  # of the inputs
    stages: int  # of the pipeline


def quantized_matmul(
    x_TI: jax.Array,
    w: Weight,
    *,
    activations: str | None = None,
    out_dtype: jnp.dtype,
    inputs_axis: str | None = None,
    block: Block | None = None,
) -> jax.Array:
    """See `api.quantized_matmul`. A block of one's own is for tuning.

    Raises:
      KernelError: the block does not fit the shape or the shared memory.
    """
    assert isinstance(w, GroupedWeight)
    assert activations is None
    T, (I, O) = x_TI.shape[0], w.shape  # noqa: E741
    kind = current_device().kind
    if block is None:
        block = block_for(kind, T, I, O, w.values_GJO.shape[1], _bytes_of_scales(w))
    _check_block(block, I, w)
    words_IW = lax.bitcast_convert_type(w.values_GJO.reshape(I, O // 8, 8), jnp.int32)  # the same bytes: no copy
    direct = block.splits == 1 and w.minima_GO is None
    # More rows than a swizzled tile has must be whole such tiles; what is beyond an array's end is copied as 0.
    padded_TI = jnp.pad(x_TI, ((0, -T % 8 if T > 8 else 0), (0, 0)))
    parts_dtype = out_dtype if direct else jnp.dtype(jnp.float32)
    parts_STO = _kernel(padded_TI, words_IW, w, T, block, parts_dtype, multiprocessors(kind))
    if direct:
        return parts_STO[0]
    y_TO = parts_STO.sum(0)
    return (y_TO if w.minima_GO is None else y_TO + minima_product(x_TI, w)).astype(out_dtype)


# A program's equal layers share one, lowered once.
@functools.partial(jax.jit, static_argnames=("T", "block", "out_dtype", "num_sms"))
def _kernel(
    x_TI: jax.Array, words_IW: jax.Array, w: GroupedWeight, T: int, block: Block, out_dtype: jnp.dtype, num_sms: int
) -> jax.Array:
    """The splits' parts of the product [splits, T, O], of the first T rows of x."""
    I = x_TI.shape[1]  # noqa: E741
    _, J, O = w.values_GJO.shape  # noqa: E741
    rows, warpgroups, splits, stages = block
    steps, groups = pl.cdiv(I, BLOCK_IN), BLOCK_IN // J
    row_tiles, out_tiles = pl.cdiv(T, rows), pl.cdiv(O, TILE_OUT * warpgroups)
    num_tiles = row_tiles * out_tiles * splits
    num_blocks = min(num_tiles, num_sms)
    by_group = (w.scales_GO,) if w.zeros_GO is None else (w.scales_GO, w.zeros_GO)
    num_inputs = 2 + len(by_group)

    def tile(i):
        """The i-th tile of this block of threads: (split, outputs, rows, first step, end).

        Tiles of the same weights are neighbours: they run at one time, and memory is read for one of them.
        """
        number = lax.axis_index("block") + i * num_blocks
        split, out = number // (row_tiles * out_tiles), lax.rem(number // row_tiles, out_tiles)
        return split, out, lax.rem(number, row_tiles), split * steps // splits, (split + 1) * steps // splits

    def body(*refs):
        x_in, words_in, *by_group_in = refs[:num_inputs]
        out, x, words, *by_group_buffers = refs[num_inputs : 2 * num_inputs + 1]
        result, full, empty = refs[2 * num_inputs + 1 :]
        warpgroup = lax.axis_index("warpgroup")
        my_tiles = pl.cdiv(num_tiles - lax.axis_index("block"), num_blocks)

        def copy_tile(i, count):
            _, out_tile, row_tile, first, end = tile(i)

            def copy_step(step, count):
                slot = lax.rem(count, stages)
                pl.when(count >= stages)(lambda: plgpu.barrier_wait(empty.at[slot]))
                copy = functools.partial(plgpu.copy_gmem_to_smem, barrier=full.at[slot])
                inputs = pl.ds(step * BLOCK_IN, BLOCK_IN)
                copy(x_in.at[pl.ds(row_tile * rows, rows), inputs], x.at[slot])
                for g in range(warpgroups):
                    outs = out_tile * warpgroups + g
                    copy(words_in.at[inputs, pl.ds(outs * (TILE_OUT // 8), TILE_OUT // 8)], words.at[slot, g])
                    for source, buffer in zip(by_group_in, by_group_buffers, strict=True):
                        here = pl.ds(step * groups, groups), pl.ds(outs * TILE_OUT, TILE_OUT)
                        copy(source.at[here], buffer.at[slot, g])
                return count + 1

            return lax.fori_loop(first, end, copy_step, count)

        def multiply_tile(i, count):
            split, out_tile, row_tile, first, end = tile(i)

            def multiply_step(_, carry):
                count, sums = carry
                slot = lax.rem(count, stages)
                plgpu.barrier_wait(full.at[slot])
                for g in range(groups):
                    inputs = pl.ds(g * J, J)
                    scales, *zeros = (
                        plgpu.load(buffer.at[slot, warpgroup, g], layout=OUTPUTS) for buffer in by_group_buffers
                    )
                    sums = multiply_add(
                        sums,
                        plgpu.load(words.at[slot, warpgroup, inputs], layout=WORDS),
                        x.at[slot, :, inputs],
                        scales.astype(jnp.float32),
                        zeros[0].astype(jnp.int32) if zeros else None,
                        signed=w.values_GJO.dtype == jnp.int4,
                    )
                plgpu.commit_smem()  # loads of the words come before the copy that overwrites them
                plgpu.barrier_arrive(empty.at[slot])
                return count + 1, sums

            sums = plgpu.layout_cast(jnp.zeros((rows, TILE_OUT), jnp.float32), RESULT)
            count, sums = lax.fori_loop(first, end, multiply_step, (count, sums))
            outs = pl.ds((out_tile * warpgroups + warpgroup) * TILE_OUT, TILE_OUT)
            for row in range(0, rows, 8):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                store_rows(result.at[warpgroup], sums[row : row + 8].astype(out_dtype))
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(result.at[warpgroup], out.at[split, pl.ds(row_tile * rows + row, 8), outs])
            return count

        @pl.when(warpgroup == warpgroups)
        def _copy():
            plgpu.set_max_registers(40, action="decrease")
            count = lax.fori_loop(0, my_tiles, copy_tile, jnp.int32(0))

            # Pallas wants a thread that waits at a barrier to see all its completions.
            @pl.loop(lax.max(count - stages, 0), count)
            def _drain(step):
                plgpu.barrier_wait(empty.at[lax.rem(step, stages)])

        @pl.when(warpgroup < warpgroups)
        def _multiply():
            plgpu.set_max_registers(232, action="increase")
            lax.fori_loop(0, my_tiles, multiply_tile, jnp.int32(0))
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((splits, T, O), out_dtype),
        scratch_types=(
            plgpu.SMEM((stages, rows, BLOCK_IN), x_TI.dtype, transforms=_swizzled(x_TI.dtype, J)),
            plgpu.SMEM((stages, warpgroups, BLOCK_IN, TILE_OUT // 8), jnp.int32, transforms=_swizzled(jnp.int32, 32)),
            *(plgpu.SMEM((stages, warpgroups, groups, TILE_OUT), each.dtype) for each in by_group),
            plgpu.SMEM((warpgroups, 8, TILE_OUT), out_dtype),
            plgpu.Barrier(num_arrivals=1 + warpgroups * (1 + len(by_group)), num_barriers=stages),
            plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(x_TI, words_IW, *by_group)


def _swizzled(dtype: jax.typing.DTypeLike, columns: int) -> tuple[Any, ...]:
    """How a buffer of such rows lies in shared memory: in tiles of 8 rows and at most 128 bytes."""
    columns = min(columns, 128 // jnp.dtype(dtype).itemsize)
    tiling = plgpu.TilingTransform((8, columns))  # type: ignore[abstract]
    return tiling, plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)  # type: ignore[abstract]


def multiply_add(sums, words, x, scales, zeros, *, signed: bool):
    """sums + scales * (x @ (values - zeros)), over one group.

    Args:
      sums: float32 [rows, 256].
      words: int32 [J, 32]; bits 4 e to 4 e + 3 of word c are the value of output 8 c + e.
      x: reference to bfloat16 [rows, J].
      scales: float32 [256].
      zeros: int32 [256], or None.
      signed: whether values are int4, and not uint4.
    """
    rows, J = x.shape
    optional = () if zeros is None else (zeros,)
    return plgpu.inline_mgpu(
        arg_types=(RESULT, WORDS, plgpu.RefType(_swizzled(jnp.bfloat16, J)), OUTPUTS, *(OUTPUTS for _ in optional)),
        return_type=plgpu.ShapeDtypeStruct((rows, TILE_OUT), jnp.dtype(jnp.float32), layout=RESULT),
    )(functools.partial(_multiply_add_registers, signed=signed))(sums, words, x, scales, *optional)


def store_rows(ref, values) -> None:
    """Writes values [8, 256] to shared memory. Lanes meet in its banks, but this is once a tile."""
    plgpu.inline_mgpu(arg_types=(plgpu.RefType(), RESULT))(
        lambda _, ref, values: values.store_untiled(ref, optimized=False)
    )(ref, values)


def _multiply_add_registers(_, sums, words, x, scales, zeros=None, *, signed: bool):
    """`multiply_add` as one lane does it. Arrays are NumPy arrays of registers here."""
    rows, J = sums.shape[0], words.shape[0]
    words_KP = words.registers.reshape(J // 8, 2)  # of columns 8 k + 2 c + p
    scales_M = scales.registers.reshape(4)
    zeros_M = None if zeros is None else zeros.registers.reshape(4)
    results = sums.registers.copy()
    results_NPM = results.reshape(rows // 8, 2, 4)  # of rows 8 n + 2 c + p and outputs 2 m, 2 m + 1
    for m in range(4):
        left_KH = np.empty((J // 8, 2), object)
        for h in range(2):
            # 0x43 as a bfloat16's high byte and a value below 128 as its low one make 128 + value. Signed values
            # have 8 added first, by flipping their highest bit.
            bias = _constant(0x43084308 if signed else 0x43004300)
            less = bias
            if zeros_M is not None:
                zero = arith.addi(_element(zeros_M[m], h), _constant(0x4308 if signed else 0x4300))
                less = arith.muli(zero, _constant(0x10001))
            for k, (even, odd) in enumerate(words_KP):
                byte = _pair_of_bytes(even, odd, m)
                nibble = byte if h == 0 else arith.shrui(byte, _constant(4))
                nibble = arith.xori(arith.andi(nibble, _constant(0x000F000F)), bias)
                left_KH[k, h] = _difference(nibble, less)
        products_NH = _wgmma(left_KH, x, rows)
        for n in range(rows // 8):
            for p in range(2):
                pair = _pair(_element(products_NH[n, 0], p), _element(products_NH[n, 1], p))
                results_NPM[n, p, m] = math_dialect.fma(pair, scales_M[m], results_NPM[n, p, m])
    return mgpu.FragmentedArray(_registers=results, _layout=sums.layout, _is_signed=None)


def _wgmma(left_KH: np.ndarray, x: ir.Value, rows: int) -> np.ndarray:
    """[64, J] times x transposed [J, rows]: pairs of float32, of rows 8 n + 2 c and 8 n + 2 c + 1, [rows / 8, 2]."""
    J = 8 * len(left_KH)
    registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, J)), object)
    registers.reshape(J // 8, 2)[:] = left_KH
    left = mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)
    right = mgpu.memref_transpose(x, (1, 0, 3, 2))
    products = mgpu.wgmma(mgpu.WGMMAAccumulator.zero(64, rows), left, right, swizzle=2 * min(J, 64))
    nvvm.wgmma_commit_group_sync_aligned()
    nvvm.wgmma_wait_group_sync_aligned(0)
    # Registers come out of a barrier, so that no reader of theirs moves ahead of the wait.
    return mgpu.optimization_barrier(products.value).registers.reshape(rows // 8, 2)


def _constant(value: int) -> ir.Value:
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def _element(register: ir.Value, i: int) -> ir.Value:
    return vector.extract(register, [], [i])


def _pair(low: ir.Value, high: ir.Value) -> ir.Value:
    """Of float32."""
    return vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), [low, high])


def _pair_of_bytes(low: ir.Value, high: ir.Value, byte: int) -> ir.Value:
    """That byte of two words as the low bytes of a word's halves; the high ones hold anything."""
    selector = f"0x{byte}{4 + byte}{byte}{byte}"
    word = ir.IntegerType.get_signless(32)
    return llvm.inline_asm(word, [_element(low, 0), _element(high, 0)], f"prmt.b32 $0, $1, $2, {selector};", "=r,r,r")


def _difference(bits: ir.Value, less: ir.Value) -> ir.Value:
    """Of two words that each hold two bfloat16."""
    word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    pair = ir.VectorType.get((2,), ir.BF16Type.get())
    as_pair = lambda bits: vector.bitcast(pair, vector.broadcast(word, bits))
    return arith.subf(as_pair(bits), as_pair(less))


def multiprocessors(kind: str) -> int:
    """Of that kind of Hopper."""
    return next((MULTIPROCESSORS[word] for word in kind.split() if word in MULTIPROCESSORS), 132)


def block_for(kind: str, rows: int, inputs: int, outputs: int, group: int, bytes_of_scales: int) -> Block:
    """The block tuned for the chip and shape, of the least rows that are no fewer; else a guess.

    The guess: tiles of all rows to 64 or 32, two warpgroups, and as many splits as make the longest time of a block of
    threads shortest. Times are counted in pipeline steps; a tile's start and end take as long as 1.5, and parts are
    written and read at the rate of the weights.
    """
    matrix = {"in": inputs, "out": outputs, "group": group}
    for entry in sorted(tuned_entries("quantized_matmul", kind), key=lambda entry: entry["shape"]["rows"]):
        if entry["shape"]["rows"] >= rows and entry["shape"] == {"rows": entry["shape"]["rows"], **matrix}:
            return Block(**entry["block"])
    # Small groups keep more scales and addresses in registers: with 64 rows hundreds of bytes a lane go to memory.
    num_sms = multiprocessors(kind)
    tile_rows, warpgroups = min(pl.cdiv(rows, 8) * 8, MAX_ROWS if group >= 64 else 32), 2
    steps = pl.cdiv(inputs, BLOCK_IN)
    tiles = pl.cdiv(rows, tile_rows) * pl.cdiv(outputs, TILE_OUT * warpgroups)
    step_bytes = num_sms * warpgroups * BLOCK_IN * TILE_OUT / 2  # of weights, all blocks of threads together

    def time(splits: int) -> float:
        parts = 8 * splits * rows * outputs / step_bytes if splits > 1 else 0
        return pl.cdiv(tiles * splits, num_sms) * (pl.cdiv(steps, splits) + 1.5) + parts

    splits = min(range(1, steps + 1), key=time)
    block = Block(tile_rows, warpgroups, splits, stages=1)
    fixed = shared_bytes(block._replace(stages=0), group, bytes_of_scales)
    stage = shared_bytes(block, group, bytes_of_scales) - fixed
    return block._replace(stages=min((SHARED_BYTES - fixed) // stage, 6))


def shared_bytes(block: Block, group: int, bytes_of_scales: int) -> int:
    """Shared memory of a block of threads; `bytes_of_scales` are those of a group and output, zero point included."""
    by_group = BLOCK_IN // group * TILE_OUT * bytes_of_scales
    stage = 2 * block.rows * BLOCK_IN + block.warpgroups * (BLOCK_IN * TILE_OUT // 2 + by_group)
    return block.stages * stage + 4 * block.warpgroups * 8 * TILE_OUT


def _bytes_of_scales(w: GroupedWeight) -> int:
    return w.scales_GO.dtype.itemsize + (0 if w.zeros_GO is None else 1)


def _check_block(block: Block, inputs: int, w: GroupedWeight) -> None:
    steps = pl.cdiv(inputs, BLOCK_IN)
    if block.rows % 8 or not 8 <= block.rows <= MAX_ROWS:
        raise KernelError(f"quantized_matmul: {block.rows} rows of a tile; a multiple of 8 to {MAX_ROWS} is needed")
    if block.warpgroups not in (1, 2) or not 1 <= block.splits <= steps or block.stages < 1:
        raise KernelError(f"quantized_matmul: {block}; warpgroups are 1 or 2, splits 1 to {steps}, stages at least 1")
    if (needed := shared_bytes(block, w.values_GJO.shape[1], _bytes_of_scales(w))) > SHARED_BYTES:
        raise KernelError(f"quantized_matmul: {block} takes {needed} bytes of shared memory; limit: {SHARED_BYTES}")
