"""Blocks of GGUF files, against what the gguf package makes of them."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from jaxinfer.quantization.gguf_blocks import SCHEMES, unpack
from jaxinfer.quantization.tensor import BITS


def random_blocks(dtype: str, rows: int, blocks: int) -> np.ndarray:
    """Random bytes: scales of every size, zero, denormal, infinite and NaN among them."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]]
    return np.random.default_rng(size).integers(0, 256, (rows, blocks, size), np.uint8)


@pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered")
@pytest.mark.parametrize("dtype", SCHEMES)
@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (3, 5), (128, 16)])
def test_the_same_numbers_to_the_bit(dtype, rows, blocks):
    raw = random_blocks(dtype, rows, blocks)
    raw[0, 0] = 0
    expected = dequantize(raw.reshape(rows, -1), gguf.GGMLQuantizationType[dtype])
    packed = unpack(raw, dtype)
    numbers = packed.dequantize()
    assert numbers.shape == expected.shape
    same = (numbers.view(np.uint32) == expected.view(np.uint32)) | (np.isnan(numbers) & np.isnan(expected))
    assert same.all()
    scheme = packed.scheme
    assert packed.scales_OG.dtype == scheme.scales
    assert packed.scales_OG.shape == (rows, numbers.shape[1] // scheme.group)
    assert (packed.minima_OG is not None) == (scheme.offset == "minima")
    bits = BITS[scheme.values]
    low, high = (0, 1 << bits) if scheme.values.startswith("u") else (-(1 << bits - 1), 1 << bits - 1)
    assert packed.values_OI.min() >= low
    assert packed.values_OI.max() < high


def test_no_rows():
    assert unpack(random_blocks("Q4_K", 0, 2), "Q4_K").values_OI.shape == (0, 512)
