"""Matmul by weights of 8 and 4 bits, in bfloat16 or float32 or, for int8 weights, in int8 arithmetic."""

from pallas_kernels.quantized_matmul.api import quantized_matmul, stores_floats
from pallas_kernels.quantized_matmul.weights import GROUP_SIZES, ChannelWeight, GroupedWeight, Weight

__all__ = ["GROUP_SIZES", "ChannelWeight", "GroupedWeight", "Weight", "quantized_matmul", "stores_floats"]
