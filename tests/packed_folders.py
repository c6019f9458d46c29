"""What folders of public formats mean, unpacked number by number: slow, plain, and from the formats' descriptions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def bits_of(words: np.ndarray, bits: int) -> np.ndarray:
    """int32 [rows, words] -> [rows, numbers], the lowest bits first."""
    unsigned = words.view(np.uint32).astype(np.int64)
    return np.stack([(unsigned >> at) & (2**bits - 1) for at in range(0, 32, bits)], axis=-1).reshape(len(words), -1)


def awq(tensors: dict[str, np.ndarray], group: int) -> np.ndarray:
    def columns(words: np.ndarray) -> np.ndarray:
        numbers = bits_of(words, 4)
        ordered = np.empty_like(numbers)
        for place, column in enumerate(AWQ_ORDER):
            ordered[:, column::8] = numbers[:, place::8]
        return ordered

    values_IO, zeros_GO = columns(tensors["qweight"]), columns(tensors["qzeros"])
    scales_GO = tensors["scales"].astype(np.float32)
    groups = np.arange(len(values_IO)) // group
    return ((values_IO - zeros_GO[groups]) * scales_GO[groups]).T.astype(np.float32)


def gptq(tensors: dict[str, np.ndarray], bits: int) -> np.ndarray:
    values_IO = bits_of(np.ascontiguousarray(tensors["qweight"].T), bits).T
    zeros_GO = bits_of(tensors["qzeros"], bits) + 1
    scales_GO = tensors["scales"].astype(np.float32)
    groups = tensors["g_idx"]
    return ((values_IO - zeros_GO[groups]) * scales_GO[groups]).T.astype(np.float32)


def compressed_tensors(tensors: dict[str, np.ndarray], bits: int) -> np.ndarray:
    half = 1 << (bits - 1)
    rows, columns = tensors["weight_shape"]
    values_OI = bits_of(tensors["weight_packed"], bits)[:, :columns] - half
    assert len(values_OI) == rows
    scales_OG = tensors["weight_scale"].astype(np.float32)
    group = columns // scales_OG.shape[1]
    if "weight_zero_point" in tensors:
        packed_GO = np.ascontiguousarray(tensors["weight_zero_point"].T)
        zeros_OG = bits_of(packed_GO, bits).T[:rows] - half
        values_OI = values_OI - np.repeat(zeros_OG, group, axis=1)
    return (values_OI * np.repeat(scales_OG, group, axis=1)).astype(np.float32)


def folder(path: Path) -> dict[str, np.ndarray]:
    """All weights of a folder in float32, by the names that they have without quantization."""
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    raw: dict[str, np.ndarray] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "np") as opened:
            raw |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    weights, modules = {}, {}
    for name, value in raw.items():
        module, _, last = name.rpartition(".")
        if last in ("weight", "bias"):
            weights[name] = value.astype(np.float32)
        else:
            modules.setdefault(module, {})[last] = value
    for module, tensors in modules.items():
        match config["quant_method"]:
            case "awq":
                weights[f"{module}.weight"] = awq(tensors, config["group_size"])
            case "gptq":
                weights[f"{module}.weight"] = gptq(tensors, config["bits"])
            case "compressed-tensors":
                bits = config["config_groups"]["group_0"]["weights"]["num_bits"]
                weights[f"{module}.weight"] = compressed_tensors(tensors, bits)
    return weights
