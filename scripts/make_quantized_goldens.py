"""Makes tests/golden/quantized/*.safetensors: matrices as public tools pack them, and the floats they make of them.

    python3.11 -m venv tools
    tools/bin/pip install torch==2.13.0 transformers compressed-tensors==0.20.1 accelerate logbar threadpoolctl ...
    tools/bin/pip install --no-deps --target old compressed-tensors==0.12.2
    tools/bin/python scripts/make_quantized_goldens.py --autoawq AutoAWQ --autogptq AutoGPTQ --gptqmodel GPTQModel
    PYTHONPATH=old tools/bin/python scripts/make_quantized_goldens.py ct_int4_act_order

AutoAWQ 0.2.9, AutoGPTQ (commit 9f7d370) and GPTQModel 7.3.4 (commit f4c327a) are folders with their sources: of each
only the module of one linear layer is imported, as it is; whatever it lacks is installed by name. Torch's CPU build
does.

A file is a folder's `model.safetensors` with one module "m"; beside its tensors is `expected` [O, I] float32, which
the tool makes of them with their scales in float32, and in the metadata `quantization_config` and tools' versions.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

OUT = Path(__file__).resolve().parent.parent / "tests" / "golden" / "quantized"
O, I = 32, 64  # noqa: E741

Case = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]  # config, tensors, expected


def packages(folder: Path, *names: str) -> None:
    """Lets modules of a source folder be imported without what its packages import first."""
    sys.path.insert(0, str(folder))
    for name in names:
        package = types.ModuleType(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package


def numbers(bits: int, group: int, zeros: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Random values [O, I], zero points and scales [O, G], every value and zero point among them; and their floats."""
    torch.manual_seed(bits * 1000 + group)
    groups = I // group
    values = torch.randint(0, 1 << bits, (O, I))
    zero_points = torch.randint(zeros[0], zeros[1] + 1, (O, groups))
    scales = (torch.rand(O, groups) * 0.02 + 0.001).to(dtype)

    def spread(array: torch.Tensor) -> torch.Tensor:
        return array.repeat_interleave(group, dim=1)

    floats = (values - spread(zero_points)) * spread(scales.float())
    return values, zero_points, scales, floats


def linear(floats: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.nn.Linear:
    layer = torch.nn.Linear(I, O, bias=False, dtype=dtype)
    layer.weight.data = floats.to(dtype)
    return layer


# ---- AutoAWQ


def awq(group: int) -> Case:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    _, zeros, scales, floats = numbers(4, group, (0, 15), torch.float16)
    layer = WQLinear_GEMM.from_linear(
        linear(floats), 4, group, scales=scales.t().contiguous(), zeros=zeros.t().contiguous()
    )
    expected = dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    return config, dict(layer.state_dict()), expected


# ---- AutoGPTQ and GPTQModel


def autogptq(bits: int, group: int, *, sym: bool, act_order: bool = False) -> Case:
    name = "qlinear_cuda" if act_order else "qlinear_cuda_old"
    module = import_module(f"auto_gptq.nn_modules.qlinear.{name}")
    size = I if group == -1 else group
    middle = 1 << bits - 1
    _, zeros, scales, floats = numbers(bits, size, (middle, middle) if sym else (1, 2 * middle - 1), torch.float16)
    g_idx = torch.arange(I, dtype=torch.int32) // size
    if act_order:
        order = torch.randperm(I)
        floats, g_idx = floats[:, order], g_idx[order]
    layer = module.QuantLinear(bits, group, I, O, False)
    layer.pack(linear(floats, torch.float16), scales.float(), zeros.float(), g_idx)
    tensors = {name: value.clone() for name, value in layer.state_dict().items()}
    layer.scales = layer.scales.float()
    expected = layer(torch.eye(I)).t()
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": sym, "desc_act": act_order}
    return config, tensors, expected


def gptqmodel(bits: int, group: int, *, v1: bool) -> Case:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear

    _, zeros, scales, floats = numbers(bits, group, (0, (1 << bits) - 1), torch.float16)
    layer = TorchLinear(bits, group, False, False, I, O)
    layer.pack_original(linear(floats), scales.float(), zeros.float(), torch.arange(I, dtype=torch.int32) // group)
    tensors = {name: value.clone() for name, value in layer.state_dict().items() if not name.startswith("wf_")}
    layer.scales = layer.scales.float()
    layer.eval()
    expected = layer.dequantize_weight().t()
    form = "gptq" if v1 else "gptq_v2"
    if v1:
        from gptqmodel.utils.model import convert_gptq_v2_to_v1_format_module

        convert_gptq_v2_to_v1_format_module(layer, SimpleNamespace(bits=bits, pack_dtype=torch.int32))
        tensors["qzeros"] = layer.qzeros.clone()
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "desc_act": False}
    return config | {"checkpoint_format": form}, tensors, expected


# ---- compressed-tensors


def compressed(form: str, dtype: torch.dtype = torch.bfloat16, inputs: dict | None = None, **weights: Any) -> Case:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=inputs and QuantizationArgs(**inputs), format=form
    )
    torch.manual_seed(len(form) + args.num_bits)
    floats = torch.randn(O, I) * 0.02
    rows, columns = {
        "group": (O, I // (args.group_size or I)),
        "channel": (O, 1),
        "tensor": (1, 1),
        "block": (O // (args.block_structure or [O])[0], I // (args.block_structure or [O, I])[1]),
    }[args.strategy]
    tiles = floats.reshape(rows, O // rows, columns, I // columns)
    low, high = tiles.amin((1, 3)).clamp(max=0), tiles.amax((1, 3)).clamp(min=0)
    steps = 448.0 if args.type == "float" else float((1 << args.num_bits - 1) - 1)
    scale = (torch.maximum(-low, high) / steps).to(dtype)
    state = {"weight": floats, "weight_scale": scale}
    if not args.symmetric:
        state["weight_scale"] = scale = ((high - low) / (2 * steps + 1)).to(dtype)
        least = -(1 << args.num_bits - 1)
        state["weight_zero_point"] = (least - low / scale.float()).round().to(torch.int8)
    if args.strategy == "tensor":
        state = {name: value.reshape(1) if value.numel() == 1 else value for name, value in state.items()}
    compressor = BaseCompressor.get_value_from_registry(form)
    packed = {name: value for name, value in compressor.compress(state, scheme).items() if value is not None}
    expected = compressor.decompress(packed | {"weight_scale": packed["weight_scale"].float()}, scheme)["weight"]
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=form, quantization_status="compressed", ignore=["lm_head"]
    )
    return json.loads(config.model_dump_json()), packed, expected


def compressed_act_order() -> Case:
    """By an older release: newer ones cannot make this any more, but such checkpoints are there."""
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    group = 16
    args = QuantizationArgs(num_bits=4, group_size=group, strategy="group", actorder="group")
    _, _, scales, floats = numbers(4, group, (8, 8), torch.float32)
    order = torch.randperm(I)
    floats, g_idx = floats[:, order], (torch.arange(I, dtype=torch.int32) // group)[order]
    compressor = PackedQuantizationCompressor()
    packed = compressor.compress_weight(floats, scales, args, g_idx=g_idx)
    tensors = packed | {"weight_scale": scales, "weight_g_idx": g_idx}
    scheme = QuantizationScheme(targets=["re:m$"], weights=args)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format="pack-quantized", quantization_status="compressed"
    )
    return json.loads(config.model_dump_json()), tensors, compressor.decompress_weight(tensors, args)


# ---- transformers' fine-grained FP8


def fine_grained_fp8(block: list[int] | None, scales: str) -> Case:
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    settings = SimpleNamespace(weight_block_size=block, scale_fmt=scales)
    operation = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    torch.manual_seed(8)
    tensors = operation.convert({"weight": torch.randn(O, I) * 0.02})
    tensors = {name.removeprefix("."): value for name, value in tensors.items()}
    scale = next(name for name in tensors if name != "weight")
    expected = operation.reverse_op._dequantize_one(tensors["weight"], tensors[scale], torch.float32)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}
    return config, {"weight": tensors["weight"], "weight_scale_inv": tensors[scale]}, expected


TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FLOAT = {"num_bits": 8, "type": "float"}
CASES: dict[str, Callable[[], Case]] = {
    "awq_gemm_g32": lambda: awq(32),
    "gptq_int4_sym": lambda: autogptq(4, 16, sym=True),
    "gptq_int4_asym": lambda: autogptq(4, 32, sym=False),
    "gptq_int8_sym": lambda: autogptq(8, 32, sym=True),
    "gptq_int4_channel": lambda: autogptq(4, -1, sym=True),
    "gptq_int4_act_order": lambda: autogptq(4, 16, sym=False, act_order=True),
    "gptqmodel_int4_v2": lambda: gptqmodel(4, 32, v1=False),
    "gptqmodel_int4_v1": lambda: gptqmodel(4, 16, v1=True),
    "gptqmodel_int8_v1": lambda: gptqmodel(8, 16, v1=True),
    "ct_int4_group": lambda: compressed("pack-quantized", num_bits=4, strategy="group", group_size=32),
    "ct_int4_asym": lambda: compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=16, symmetric=False, dtype=torch.float16
    ),
    "ct_int4_channel": lambda: compressed("pack-quantized", num_bits=4, strategy="channel"),
    "ct_int8_packed": lambda: compressed("pack-quantized", num_bits=8, strategy="channel"),
    "ct_int8_packed_asym": lambda: compressed(
        "pack-quantized", num_bits=8, strategy="group", group_size=32, symmetric=False
    ),
    "ct_w8a8": lambda: compressed("int-quantized", num_bits=8, strategy="channel", inputs=TOKEN),
    "ct_w8_tensor": lambda: compressed("int-quantized", num_bits=8, strategy="tensor"),
    "ct_w8_asym": lambda: compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    "ct_fp8_channel": lambda: compressed("float-quantized", **FLOAT, strategy="channel"),
    "ct_fp8_tensor": lambda: compressed("float-quantized", **FLOAT, strategy="tensor", dtype=torch.float32),
    "ct_fp8_block": lambda: compressed("float-quantized", **FLOAT, strategy="block", block_structure=[8, 32]),
    "ct_int4_act_order": compressed_act_order,
    "fp8_block": lambda: fine_grained_fp8([16, 32], "float"),
    "fp8_block_ue8m0": lambda: fine_grained_fp8([16, 32], "ue8m0"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files to make; by default all but those of older releases")
    for tool in ("autoawq", "autogptq", "gptqmodel"):
        parser.add_argument(f"--{tool}", type=Path, default=Path())
    args = parser.parse_args()
    packages(args.autoawq, "awq", "awq.modules", "awq.modules.linear", "awq.utils")
    packages(args.autogptq, "auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear", "auto_gptq.utils")
    packages(args.gptqmodel, "gptqmodel", "gptqmodel.models", "gptqmodel.nn_modules")
    sys.modules["gptqmodel"].DEBUG_ON = False  # type: ignore[attr-defined]
    OUT.mkdir(parents=True, exist_ok=True)
    installed = {name: version(name) for name in ("torch", "transformers", "compressed-tensors")}
    for name in args.names or [name for name in CASES if name != "ct_int4_act_order"]:
        config, tensors, expected = CASES[name]()
        held = {f"m.{part}": value.contiguous() for part, value in tensors.items() if value is not None}
        held["expected"] = expected.detach().float().contiguous()
        about = {"quantization_config": json.dumps(config), "versions": json.dumps(installed)}
        save_file(held, OUT / f"{name}.safetensors", metadata=about)
        print(name, {part: (str(value.dtype), tuple(value.shape)) for part, value in held.items()})


if __name__ == "__main__":
    with torch.no_grad():
        main()
