"""One differential suite over every implementation of the quantized matmul, and the errors of its contract.

Tolerances follow from the roundings an implementation makes, for one number y = sum(x w), in terms of
m = sum(|x| |w|), |w| counted part by part (value, zero point, minimum):

- sums in float32 of up to a few hundred terms, in any order: 2^-16 m;
- a weight rounded to bfloat16 before the product (XLA's dequantizing forms on bfloat16 rows): 2^-8 m more;
- a result rounded to bfloat16: 2^-8 |y| more.

All values of 4 and 8 bits, float8 included (4 significant bits), are exact in bfloat16: they add nothing.
"""

from __future__ import annotations

import functools
import itertools
import json
from types import SimpleNamespace

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental import mosaic
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from pallas_kernels import tuning
from pallas_kernels.dispatch import Device, KernelError
from pallas_kernels.quantized_matmul import ChannelWeight, GroupedWeight, api, gpu, quantized_matmul, reference, xla

SUM_ERROR, BF16 = 2.0**-16, 2.0**-8
DEVICES = {"cpu": Device("cpu", "cpu"), "gpu": Device("gpu", "NVIDIA A100-SXM4-80GB"), "tpu": Device("tpu", "TPU v5e")}
OUTPUTS = st.sampled_from([1, 33, 90])
# Few shapes, each compiled once: (rows, inputs, outputs).
CHANNEL_SHAPES = st.sampled_from([(1, 1, 1), (1, 300, 90), (7, 65, 33), (8, 16, 64), (33, 129, 2), (70, 256, 90)])
FLOAT8 = "float8_e4m3fn"
LEAST = {"int4": -8, "uint4": 0, "int8": -128, FLOAT8: -8}  # of float8, the zero points' alone
MANY = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
FEW = settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def random_values(rng: np.random.Generator, shape: tuple[int, ...], values: str) -> jax.Array:
    """Any that there are, but no NaN."""
    if values == FLOAT8:
        bits = rng.integers(0, 256, shape, np.uint8)
        return jnp.asarray(np.where(bits & 127 == 127, bits - 1, bits).view(ml_dtypes.float8_e4m3fn))
    least, steps = LEAST[values], 256 if values == "int8" else 16
    return jnp.asarray(rng.integers(least, least + steps, shape), jnp.dtype(values))


def channel_weight(rng: np.random.Generator, I: int, O: int, values="int8", spread: float = 1.0) -> ChannelWeight:  # noqa: E741
    return ChannelWeight(random_values(rng, (I, O), values), scales(rng, (O,), jnp.float32, spread))


def grouped_weight(
    rng: np.random.Generator,
    G: int,
    J: int,
    O: int,  # noqa: E741
    values="int4",
    kind="",
    dtype=jnp.float32,
    spread=1.0,
) -> GroupedWeight:
    """Any values; zero points over all they can be, or minima of the size of the weights."""
    least, steps = LEAST[values], 256 if values == "int8" else 16
    zeros = rng.integers(least, min(least + steps + 1, 128), (G, O)) if kind == "zeros" else None
    scale = scales(rng, (G, O), dtype, spread)
    return GroupedWeight(
        random_values(rng, (G, J, O), values),
        scale,
        None if zeros is None else jnp.asarray(zeros, jnp.int8),
        (scale.astype(jnp.float32) * rng.uniform(-8, 8, (G, O))).astype(dtype) if kind == "minima" else None,
    )


def scales(rng: np.random.Generator, shape: tuple[int, ...], dtype, spread: float) -> jax.Array:
    """Of both signs, 10^-spread to 10^spread."""
    return jnp.asarray(10.0 ** rng.uniform(-spread, spread, shape) * rng.choice([-1, 1], shape), dtype)


def magnitude(w) -> np.ndarray:
    """Sizes of a weight's parts, added: what errors are relative to, [I, O]."""
    if isinstance(w, ChannelWeight):
        return np.abs(np.asarray(reference.dequantize(w)))
    wide = lambda array: np.abs(np.asarray(array, np.float32))
    sizes = wide(w.values_GJO) + (0 if w.zeros_GO is None else wide(w.zeros_GO)[:, None])
    sizes = sizes * wide(w.scales_GO)[:, None] + (0 if w.minima_GO is None else wide(w.minima_GO)[:, None])
    return sizes.reshape(w.shape)


def assert_close(got: jax.Array, x: jax.Array, w, *, weights_rounded: bool) -> None:
    want = np.asarray(reference.quantized_matmul(x, w, activations=None, out_dtype=jnp.float32))
    allowed = (SUM_ERROR + BF16 * weights_rounded) * (np.abs(np.asarray(x, np.float32)) @ magnitude(w))
    if got.dtype == jnp.bfloat16:
        allowed = allowed + BF16 * (np.abs(want) + allowed)
    error = np.abs(np.asarray(got, np.float32) - want)
    assert np.isfinite(error).all()
    assert (error <= allowed).all(), f"off by up to {np.max(error / allowed):.2f} of what is allowed"


@st.composite
def grouped_cases(draw, outputs=OUTPUTS, values=("int4", "uint4", "int8"), dtypes=("bfloat16", "float32")):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    J, G = draw(st.sampled_from(api.GROUP_SIZES)), draw(st.integers(1, 5))
    w = grouped_weight(
        rng,
        G,
        J,
        draw(outputs),
        draw(st.sampled_from(values)),
        draw(st.sampled_from(["", "zeros", "minima"])),
        draw(st.sampled_from([jnp.float32, jnp.float16, jnp.bfloat16])),
        draw(st.sampled_from([0.0, 3.0])),
    )
    rows = draw(st.sampled_from([1, 7, 8, 33, 70]))
    x = jnp.asarray(rng.standard_normal((rows, G * J)), draw(st.sampled_from(dtypes)))
    return x, w, draw(st.sampled_from([jnp.bfloat16, jnp.float32]))


@pytest.mark.parametrize("platform", DEVICES)
@given(case=grouped_cases())
@MANY
def test_xla_multiplies_grouped_weights(platform, case, monkeypatch):
    check_grouped(platform, case, monkeypatch)


@pytest.mark.parametrize("platform", DEVICES)
@given(case=grouped_cases(values=(FLOAT8,)))
@MANY
def test_xla_multiplies_grouped_weights_of_float8(platform, case, monkeypatch):
    check_grouped(platform, case, monkeypatch)


def check_grouped(platform, case, monkeypatch):
    x, w, out_dtype = case
    monkeypatch.setattr(xla, "current_device", lambda: DEVICES[platform])
    got = quantized_matmul(x, w, out_dtype=out_dtype, implementation="xla")
    assert got.dtype == out_dtype
    rounds = x.dtype == jnp.bfloat16
    rounds &= x.shape[0] >= {"cpu": xla.CPU_ROWS, "gpu": w.values_GJO.shape[1] / 2, "tpu": 1}[platform]
    assert_close(got, x, w, weights_rounded=rounds)


@pytest.mark.parametrize("values", ["int8", FLOAT8])
@pytest.mark.parametrize("platform", DEVICES)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=CHANNEL_SHAPES,
    dtype=st.sampled_from([jnp.bfloat16, jnp.float32]),
    spread=st.sampled_from([0.0, 15.0]),
)
@MANY
def test_xla_multiplies_weights_with_a_scale_for_each_output(platform, values, seed, shape, dtype, spread, monkeypatch):
    rng = np.random.default_rng(seed)
    T, I, O = shape  # noqa: E741
    x, w = jnp.asarray(rng.standard_normal((T, I)), dtype), channel_weight(rng, I, O, values, spread)
    monkeypatch.setattr(xla, "current_device", lambda: DEVICES[platform])
    # Values are exact in bfloat16, and the scale multiplies float32.
    got = quantized_matmul(x, w, out_dtype=jnp.float32, implementation="xla")
    assert_close(got, x, w, weights_rounded=False)


def test_the_cpu_multiplies_in_chunks(monkeypatch):
    monkeypatch.setattr(xla, "CPU_CHUNK_BYTES", 1)
    rng = np.random.default_rng(0)
    w, int8 = grouped_weight(rng, 2, 64, 320, "uint4", "zeros"), channel_weight(rng, 128, 320)
    for T, weight in itertools.product((3, 8), (w, int8)):
        x = jnp.asarray(rng.standard_normal((T, 128)), jnp.bfloat16)
        assert "scan" in str(jax.make_jaxpr(xla._by_chunks)(x, weight))
        got = quantized_matmul(x, weight, out_dtype=jnp.float32, implementation="xla")
        assert_close(got, x, weight, weights_rounded=weight is w and T >= xla.CPU_ROWS)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_integers_make_the_floats_of_float8_on_ampere(dtype, monkeypatch):
    every = jnp.asarray(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn))
    monkeypatch.setattr(xla, "current_device", lambda: DEVICES["gpu"])
    assert "s16" in jax.jit(xla._floats, static_argnums=1).lower(every, dtype).as_text("hlo")
    got, want = (np.asarray(floats, np.float32) for floats in (xla._floats(every, dtype), every))
    # NaN is infinite here, which a result shows as well.
    assert list(np.isnan(want).nonzero()[0]) == [127, 255]
    np.testing.assert_array_equal(got, np.where(np.isnan(want), np.copysign(np.inf, want), want))


@pytest.mark.parametrize(
    ("kind", "by_integers"),
    [
        *((f"NVIDIA {name}", True) for name in ("A100 80GB PCIe", "A10G", "A40", "RTX A6000", "GeForce RTX 3090 Ti")),
        *((f"NVIDIA {name}", False) for name in ("L4", "L40S", "RTX 6000 Ada Generation", "GeForce RTX 4090", "GB200")),
    ],
)
def test_ampere_is_known_by_its_names(kind, by_integers):
    assert xla._float8_by_integers(Device("gpu", kind), jnp.dtype(FLOAT8)) == by_integers


@pytest.mark.parametrize("platform", DEVICES)
@given(seed=st.integers(0, 2**32 - 1), shape=CHANNEL_SHAPES)
@MANY
def test_int8_activations(platform, seed, shape, monkeypatch):
    rng = np.random.default_rng(seed)
    T, I, O = shape  # noqa: E741
    x, w = jnp.asarray(rng.standard_normal((T, I)), jnp.bfloat16).at[0].set(0), channel_weight(rng, I, O)
    monkeypatch.setattr(xla, "current_device", lambda: DEVICES[platform])
    got = quantized_matmul(x, w, activations="int8", out_dtype=jnp.float32, implementation="xla")
    # A row's numbers move by at most half a step of 1/127 of its largest; 1 % covers the roundings of the step itself.
    wide = np.asarray(x, np.float32)
    moved = 1.01 * np.abs(wide).max(1, keepdims=True) / 254 * magnitude(w).sum(0)
    want = np.asarray(reference.quantized_matmul(x, w, activations=None, out_dtype=jnp.float32))
    assert (np.abs(np.asarray(got) - want) <= moved).all()
    assert not np.asarray(got)[0].any()
    # And the integers are those of plain integer arithmetic: float32 multiplies two scales, 2^-22 at most.
    q, scale = map(np.asarray, reference.quantize_rows(x))
    integers = q.astype(np.int64) @ np.asarray(w.values_IO, np.int64)
    np.testing.assert_allclose(got, integers * scale.astype(float) * np.asarray(w.scale_O, float), rtol=2.0**-21)


@pytest.mark.parametrize("implementation", ["reference", *DEVICES])
@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_int8_activations_show_what_is_not_finite(implementation, bad, monkeypatch):
    """In its own row, all outputs of it, and no other."""
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.standard_normal((9, 40)), jnp.bfloat16).at[3, 7].set(bad), channel_weight(rng, 40, 6)
    name = "reference" if implementation == "reference" else "xla"
    monkeypatch.setattr(xla, "current_device", lambda: DEVICES[implementation])
    got = np.asarray(jax.jit(lambda x: quantized_matmul(x, w, activations="int8", implementation=name))(x))
    assert (~np.isfinite(got)).all(1).tolist() == [row == 3 for row in range(9)]
    assert np.isfinite(got[np.arange(9) != 3]).all()
    assert not jnp.isnan(bad) or np.isnan(got[3]).all()


@pytest.mark.parametrize("device", [0, 1])
def test_int8_activations_show_a_nan_of_any_device(device):
    """Inputs split over two; maxima between devices may pass over a NaN."""
    rng = np.random.default_rng(0)
    x, w = jnp.asarray(rng.standard_normal((3, 32))).at[1, 16 * device].set(jnp.nan), channel_weight(rng, 32, 4)
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",))

    def part(x_TI, values_IO):
        w_part = w._replace(values_IO=values_IO)
        return jax.lax.psum(quantized_matmul(x_TI, w_part, activations="int8", inputs_axis="tensor"), "tensor")

    split = jax.shard_map(part, mesh=mesh, in_specs=(P(None, "tensor"), P("tensor", None)), out_specs=P())
    got = np.asarray(jax.jit(split)(x, w.values_IO))
    assert np.isnan(got).all(1).tolist() == [False, True, False]
    assert np.isfinite(got[[0, 2]]).all()


def plain_multiply_add(sums, words, x, scales, zeros, *, signed):
    """`gpu.multiply_add`, without registers and `wgmma`, which the interpreter does not have."""
    values = (words[:, :, None] >> (4 * jnp.arange(8))) & 15
    values = ((values ^ 8) - 8 if signed else values).reshape(words.shape[0], -1)
    values = values if zeros is None else values - zeros
    return sums + scales * jnp.dot(x[...].astype(jnp.float32), values.astype(jnp.float32), precision="highest")


@pytest.fixture
def interpreted(monkeypatch):
    """Mosaic GPU kernels run on the CPU, watched for races."""
    monkeypatch.setattr(gpu, "multiply_add", plain_multiply_add)
    monkeypatch.setattr(gpu, "store_rows", lambda ref, values: ref.__setitem__(..., values))
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        yield


@given(
    case=grouped_cases(outputs=st.sampled_from([256, 768]), values=("int4", "uint4"), dtypes=("bfloat16",)),
    rows=st.sampled_from([8, 24, 64]),
    warpgroups=st.sampled_from([1, 2]),
    splits=st.integers(1, 3),
    stages=st.integers(1, 3),
)
@FEW
def test_mosaic_gpu_walks_its_tiles(interpreted, case, rows, warpgroups, splits, stages):
    x, w, out_dtype = case
    splits = min(splits, -(-w.shape[0] // gpu.BLOCK_IN))
    got = gpu.quantized_matmul(x, w, out_dtype=jnp.dtype(out_dtype), block=gpu.Block(rows, warpgroups, splits, stages))
    assert_close(got, x, w, weights_rounded=False)


def test_mosaic_gpu_gives_a_block_of_threads_several_tiles(interpreted, monkeypatch):
    monkeypatch.setitem(gpu.MULTIPROCESSORS, "cpu", 2)
    rng = np.random.default_rng(1)
    w, x = grouped_weight(rng, 3, 128, 768, "uint4", "zeros"), jnp.asarray(rng.standard_normal((20, 384)), jnp.bfloat16)
    got = gpu.quantized_matmul(x, w, out_dtype=jnp.dtype(jnp.float32), block=gpu.Block(16, 1, 2, 2))
    assert_close(got, x, w, weights_rounded=False)


def tiled(indices: np.ndarray, layout) -> np.ndarray:
    """Indices of an array after a layout's tilings: axes (number of tiles ..., tile ...) in place of the last ones."""
    for tile in layout.tiling.tiles:
        lead, cut = indices.shape[: -len(tile)], indices.shape[-len(tile) :]
        indices = indices.reshape(*lead, *itertools.chain(*((n // t, t) for n, t in zip(cut, tile, strict=True))))
        first = [len(lead) + 2 * i for i in range(len(tile))]
        indices = indices.transpose(*range(len(lead)), *first, *(i + 1 for i in first))
    return indices


def places(shape: tuple[int, ...], layout) -> np.ndarray:
    """Which number of an array is where: [4 warps, 32 lanes, *registers, values of a register]."""
    layout = layout.to_mgpu() if hasattr(layout, "to_mgpu") else layout
    indices = tiled(np.arange(np.prod(shape)).reshape(shape), layout)
    size = lambda d: indices.shape[d] if isinstance(d, int) else d.times
    per_lane = []
    for warp, lane in itertools.product(range(4), range(32)):
        at = [slice(None)] * indices.ndim
        for number, dims in ((warp, layout.warp_dims), (lane, layout.lane_dims)):
            for d, i in zip(dims, np.unravel_index(number, tuple(map(size, dims))), strict=True):
                if isinstance(d, int):
                    at[d] = slice(int(i), int(i) + 1)
        values_last = np.moveaxis(indices[tuple(at)], layout.vector_dim, -1)
        per_lane.append(np.expand_dims(values_last, layout.vector_dim - 1))
    return np.stack(per_lane).reshape(4, 32, *per_lane[0].shape)


def in_registers(array: np.ndarray, layout) -> SimpleNamespace:
    """The array as `_multiply_add_registers` sees it: each register holds [4, 32, n] numbers, those of all lanes."""
    all_places = places(array.shape, layout)
    registers = np.empty(all_places.shape[2:-1], object)
    for at in np.ndindex(registers.shape):
        registers[at] = array.reshape(-1)[all_places[(slice(None), slice(None), *at)]]
    return SimpleNamespace(registers=registers, shape=array.shape, layout=layout)


def out_of_registers(registers: np.ndarray, shape: tuple[int, ...], layout) -> np.ndarray:
    all_places, array = places(shape, layout), np.full(int(np.prod(shape)), np.nan)
    for at in np.ndindex(registers.shape):
        array[all_places[(slice(None), slice(None), *at)]] = registers[at]
    return array.reshape(shape)


@pytest.fixture
def register_machine(monkeypatch):
    """NumPy in place of the instructions that `_multiply_add_registers` emits; lanes and layouts as in the GPU's."""
    wgmma_layout = mosaic.gpu.WGMMA_LAYOUT

    def prmt(_, operands, code, constraints):
        selector, (low, high) = int(code.split(",")[-1].strip(" ;"), 16), operands
        bytes_of = [np.uint32(word >> np.uint32(8 * i)) & np.uint32(255) for word in (low, high) for i in range(4)]
        return sum(bytes_of[(selector >> 4 * i) & 7] << np.uint32(8 * i) for i in range(4))

    def wgmma(acc, left, right, swizzle):
        inputs = left.registers.size * 4  # two registers of two values for 8 columns
        weights = out_of_registers(left.registers, (64, inputs), wgmma_layout)
        return SimpleNamespace(value=in_registers((weights @ right.T).astype(np.float32), wgmma_layout))

    def bf16_pair(_, word):
        word = np.asarray(word, np.uint32)
        halves = np.stack(np.broadcast_arrays(word & np.uint32(0xFFFF), word >> np.uint32(16)), -1)
        return halves.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32)

    def subf(a, b):
        exact = a - b
        assert (exact == exact.astype(ml_dtypes.bfloat16)).all()
        return exact

    types = SimpleNamespace(get=lambda *_: None, get_signless=lambda _: None)
    fakes = {
        "ir": SimpleNamespace(IntegerType=types, VectorType=types, F32Type=types, BF16Type=types),
        "arith": SimpleNamespace(
            addi=np.add, muli=np.multiply, andi=np.bitwise_and, xori=np.bitwise_xor, shrui=np.right_shift, subf=subf
        ),
        "llvm": SimpleNamespace(inline_asm=prmt),
        "nvvm": SimpleNamespace(wgmma_commit_group_sync_aligned=int, wgmma_wait_group_sync_aligned=int),
        "math_dialect": SimpleNamespace(fma=lambda a, b, c: a * b + c),
        "vector": SimpleNamespace(
            extract=lambda register, _, i: register[..., i[0]],
            from_elements=lambda _, elements: np.stack(elements, -1),
            broadcast=lambda _, word: word,
            bitcast=bf16_pair,
        ),
        "mgpu": SimpleNamespace(
            c=lambda value, _: np.uint32(value),
            FragmentedArray=lambda _registers, _layout, _is_signed: SimpleNamespace(registers=_registers),
            WGMMA_LAYOUT=wgmma_layout,
            WGMMAAccumulator=SimpleNamespace(zero=lambda *_: None),
            memref_transpose=lambda x, _: x,
            wgmma=wgmma,
            optimization_barrier=lambda array: array,
        ),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(gpu, name, fake)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("rows", "J"), [(8, 16), (16, 32), (24, 128)])
def test_every_lane_multiplies_its_own_bits(register_machine, rows, J, signed, zeros):
    """The shifts, byte permutations and register numbers, lane by lane: compilers accept any, and no GPU is here."""
    rng = np.random.default_rng(0)
    least = -8 if signed else 0
    values = rng.integers(least, least + 16, (J, 256))
    nibbles = (values & 15).astype(np.uint32).reshape(J, 32, 8)
    words = functools.reduce(np.bitwise_or, (nibbles[..., e] << np.uint32(4 * e) for e in range(8)))
    x = rng.integers(-9, 10, (rows, J)).astype(np.float32)
    scale, sums = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((256,), (rows, 256)))
    zero = rng.integers(least, least + 17, 256) if zeros else np.zeros(256, int)
    optional = (in_registers(zero.astype(np.int32).view(np.uint32), gpu.OUTPUTS),) if zeros else ()
    got = gpu._multiply_add_registers(
        None,
        in_registers(sums, gpu.RESULT),
        in_registers(words, gpu.WORDS),
        x,
        in_registers(scale, gpu.OUTPUTS),
        *optional,
        signed=signed,
    )
    got = out_of_registers(got.registers, (rows, 256), gpu.RESULT)
    np.testing.assert_array_equal(got, sums + scale * (x @ (values - zero)))  # small integers: exact


def test_int4_words_hold_the_first_output_in_the_lowest_bits():
    """What the GPU kernel and its stand-in take for granted of `bitcast_convert_type`."""
    word = jax.lax.bitcast_convert_type(jnp.arange(-8, 0, dtype=jnp.int4), jnp.int32)
    assert int(word) & 0xFFFFFFFF == 0xFEDCBA98


@pytest.mark.parametrize("kind", ["NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA H20", "NVIDIA GH200 480GB"])
def test_hopper_takes_the_kernel(kind, monkeypatch):
    rng = np.random.default_rng(0)
    called = []
    monkeypatch.setattr(api, "current_device", lambda: Device("gpu", kind))
    monkeypatch.setattr(gpu, "quantized_matmul", lambda x, w, **options: called.append(options))
    quantized_matmul(jnp.ones((1, 32), jnp.bfloat16), grouped_weight(rng, 1, 32, 256))
    assert called == [{"activations": None, "out_dtype": jnp.dtype(jnp.bfloat16), "inputs_axis": None}]


@pytest.mark.parametrize(
    ("kind", "x", "weight", "reason"),
    [
        ("NVIDIA B200", jnp.ones((1, 32), jnp.bfloat16), {}, "compute capability 9.0 .*not NVIDIA B200"),
        ("NVIDIA H200", jnp.ones((1, 32)), {}, "bfloat16 activations, not float32"),
        ("NVIDIA H200", jnp.ones((1, 32), jnp.bfloat16), {"O": 320}, "multiples of 256 outputs, not 320"),
        ("NVIDIA H200", jnp.ones((1, 32), jnp.bfloat16), {"values": "int8"}, "4 bits, not GroupedWeight of int8"),
    ],
)
def test_the_kernel_says_why_it_refuses(kind, x, weight, reason, monkeypatch):
    w = grouped_weight(np.random.default_rng(0), **{"G": 1, "J": 32, "O": 256, **weight})
    monkeypatch.setattr(api, "current_device", lambda: Device("gpu", kind))
    with pytest.raises(KernelError, match=reason):
        quantized_matmul(x, w, implementation="mosaic_gpu")
    quantized_matmul(x, w)  # falls to XLA


X, W, W8 = (
    jnp.ones((2, 64)),
    grouped_weight(np.random.default_rng(0), 2, 32, 8),
    channel_weight(np.random.default_rng(0), 64, 8),
)


@pytest.mark.parametrize(
    ("x", "w", "options", "message"),
    [
        (jnp.ones((0, 64)), W, {}, r"x is \(0, 64\)"),
        (jnp.ones((2, 2, 64)), W, {}, "two dimensions"),
        (jnp.ones((2, 64), jnp.float16), W, {}, "x is float16; it is one of bfloat16, float32"),
        (jnp.ones((2, 65)), W, {}, "x has 65 inputs and the weight 64"),
        (X, (W.values_GJO, W.scales_GO), {}, "w is a tuple"),
        (X, W._replace(values_GJO=W.values_GJO.reshape(64, 8)), {}, r"values are \(64, 8\)"),
        (X, W._replace(values_GJO=W.values_GJO.astype(jnp.int16)), {}, "values are int16"),
        (X, W._replace(values_GJO=W.values_GJO.reshape(1, 64, 8)[:, :24].repeat(1, 0)), {}, "x has 64 .* weight 24"),
        (jnp.ones((2, 48)), W._replace(values_GJO=jnp.zeros((2, 24, 8), jnp.int4)), {}, "groups of 24 inputs"),
        (X, W._replace(scales_GO=W.scales_GO[:1]), {}, r"scales: float32 \(1, 8\); needed: \(2, 8\)"),
        (X, W._replace(scales_GO=W.scales_GO.astype(jnp.int32)), {}, "scales: int32"),
        (X, W._replace(zeros_GO=jnp.zeros((2, 8))), {}, "zeros are float32"),
        (X, W._replace(minima_GO=jnp.zeros((2, 7))), {}, r"minima: float32 \(2, 7\)"),
        (X, W._replace(zeros_GO=jnp.zeros((2, 8), jnp.int8), minima_GO=W.scales_GO), {}, "not both"),
        (X, W8._replace(values_IO=W8.values_IO.astype(jnp.int4)), {}, "are int4; they are one of int8, float8_e4m3fn"),
        (X, W8._replace(scale_O=W8.scale_O[:7]), {}, r"scale: float32 \(7,\)"),
        (X.tolist(), W8, {}, "x: list; an array is needed"),
        (X, W8._replace(values_IO=None), {}, "the weight's values: NoneType; an array"),
        (X, W8._replace(scale_O=None), {}, "scale: NoneType; an array"),
        (X, W8._replace(scale_O=[1.0] * 8), {}, "scale: list; an array"),
        (X, W._replace(scales_GO=None), {}, "scales: NoneType; an array"),
        (X, W._replace(zeros_GO=0), {}, "zeros: int; an array"),
        (X, W._replace(minima_GO=0.0), {}, "minima: float; an array"),
        (X, W, {"activations": "int8"}, "needs a ChannelWeight"),
        (X, W8, {"activations": "fp8"}, "activations is 'fp8'"),
        (X, W, {"out_dtype": jnp.int8}, "out_dtype is int8"),
        (X, W, {"out_dtype": "bogus"}, "out_dtype is 'bogus'; it is one of float32"),
        (X, W, {"out_dtype": 16}, "out_dtype is 16"),
        (X, W8, {"activations": "int8", "inputs_axis": "tensor"}, "'tensor'; it is None, or under shard_map"),
        (X, W8, {"activations": "int8", "inputs_axis": 3}, "inputs_axis is 3; it is None"),
        (X, W, {"implementation": "cuda"}, "no implementation 'cuda'"),
        (X, W, {"implementation": "mosaic_gpu"}, "compute capability 9.0 .*, not cpu"),
    ],
)
def test_bad_input_is_named(x, w, options, message):
    with pytest.raises(KernelError, match=message):
        quantized_matmul(x, w, **options)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (gpu.Block(12, 2, 1, 2), "12 rows"),
        (gpu.Block(72, 2, 1, 2), "72 rows"),
        (gpu.Block(8, 3, 1, 2), "warpgroups are 1 or 2"),
        (gpu.Block(8, 2, 2, 2), "splits 1 to 1"),
        (gpu.Block(64, 2, 1, 9), "shared memory; limit"),
    ],
)
def test_bad_blocks_are_named(block, message):
    w = grouped_weight(np.random.default_rng(0), 1, 128, 256)
    with pytest.raises(KernelError, match=message):
        gpu.quantized_matmul(jnp.ones((8, 128), jnp.bfloat16), w, out_dtype=jnp.dtype(jnp.bfloat16), block=block)


def test_blocks_come_from_the_chips_file_else_from_a_guess(tmp_path, monkeypatch):
    entry = lambda rows, splits: {
        "shape": {"rows": rows, "in": 4096, "out": 6144, "group": 128},
        "block": {"rows": 8, "warpgroups": 1, "splits": splits, "stages": 4},
    }  # fmt: skip
    file = {"device": "NVIDIA H200", "jax": "0.12.0", "date": "2026-01-01", "entries": [entry(16, 2), entry(8, 3)]}
    monkeypatch.setattr(tuning, "_ROOT", tmp_path)
    tuning.tuned_entries.cache_clear()
    path = tuning.tuned_file("quantized_matmul", "NVIDIA H200")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(file))
    block = functools.partial(gpu.block_for, "NVIDIA H200", inputs=4096, outputs=6144, group=128, bytes_of_scales=4)
    assert block(1) == gpu.Block(8, 1, 3, 4)
    assert block(9) == gpu.Block(8, 1, 2, 4)
    assert block(17).rows == 24  # no entry: a guess
    tuning.tuned_entries.cache_clear()


@given(
    rows=st.integers(1, 5000),
    inputs=st.integers(1, 1000).map(lambda n: 16 * n),
    outputs=st.integers(1, 120).map(lambda n: 256 * n),
    group=st.sampled_from(api.GROUP_SIZES),
    bytes_of_scales=st.sampled_from([2, 3, 4, 5]),
)
def test_every_guess_fits(rows, inputs, outputs, group, bytes_of_scales):
    block = gpu.block_for("no such chip", rows, inputs, outputs, group, bytes_of_scales)
    assert block.stages >= 2
    assert block.splits <= -(-inputs // gpu.BLOCK_IN)
    assert gpu.shared_bytes(block, group, bytes_of_scales) <= gpu.SHARED_BYTES


@pytest.mark.parametrize(("kind", "count"), [("NVIDIA H200", 132), ("NVIDIA H100 PCIe", 114), ("NVIDIA H20", 78)])
def test_a_guess_fills_the_multiprocessors_of_the_card(kind, count):
    block = gpu.block_for(kind, 1, 8192, 8192, 128, 2)
    tiles = 8192 // gpu.TILE_OUT // block.warpgroups * block.splits
    assert tiles <= count < 1.5 * tiles
    assert gpu.multiprocessors(kind) == count
