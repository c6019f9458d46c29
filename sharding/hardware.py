"""Chips by name, and devices of chips that are not here.

`chip("h200")` gives a chip's memory, bandwidths and peaks; `described_devices("h200:8")` gives eight JAX devices of it
that can be compiled for (`sharding.compile`), though not run on. For that no chip is needed, only its compiler:

    TPU   pip install libtpu
    GPU   pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12   (plug-in versions: jax's own)

`scripts/compilers.sh` makes an environment with both. A process is best for one platform: each brings a compiler of
some hundred megabytes, with its own flags and log, that cannot be unloaded.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
from jax.experimental import topologies

GB, GIB, TERA = 10**9, 2**30, 10**12

_TPU_DOCS = "https://docs.cloud.google.com/tpu/docs/"
_SCALING_BOOK = "https://jax-ml.github.io/scaling-book/"
# The digest lists the dense figures of NVIDIA's datasheets, which state most of them with sparsity, twice as high.
_A100_DATASHEET = "https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf"
_DATASHEET_DIGEST = "https://glennklockwood.com/garden/processors/"
_H200_SYSTEM = (
    "https://github.com/mlcommons/inference_results_v4.1/blob/main/closed/NVIDIA/systems/H200-SXM-141GBx8_TRT_MaxQ.json"
)
_H200_PROPERTIES = "https://github.com/ai-bot-pro/achatbot/blob/859e21612de769164d8d1802d794ef8f87ace3c8/deploy/modal/src/llm/vllm/vlm/skywork_r1v.py"
_XLA_GPUS = "https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs"


class HardwareError(ValueError):
    """A chip, or a number of its devices, that cannot be described; the message says what can."""


@dataclass(frozen=True, kw_only=True)
class GpuTarget:
    """What XLA's GPU compiler asks of a GPU beyond its memory. Figures: OpenXLA's target configs, see `source`."""

    compute_capability: tuple[int, int]
    num_sms: int
    fp32_lanes_per_sm: int
    shared_memory_per_sm: int  # bytes
    shared_memory_per_block: int  # bytes, the most a block can opt in to
    l2_bytes: int
    clock_ghz: float  # boost


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One accelerator, as JAX shows it: every figure is of one JAX device.

    A v4 or v5p chip is one device (its two cores run as one, "megacore"); a 7x chip is two devices, so that each has
    half of the chip's memory, bandwidth, peaks and links. GPU figures are of the SXM modules alone: PCIe
    cards can have less bandwidth (A100 of 80 GB: 1935 GB/s for 2039), and have NVLink only over a bridge of two.

    Attributes:
      device_kinds: what JAX calls its devices; the first is what a described device says.
      memory_bytes: main memory, as the vendor states it.
      usable_bytes: what a program can have: the limit that the TPU compiler enforces, or what CUDA reports. It can be
        above `memory_bytes`, which vendors round.
      memory_bandwidth: bytes/s.
      bf16_flops, int8_ops, fp8_flops: dense peaks per second, a multiply-add counted as two; None where the chip has
        no such arithmetic or the vendor states no figure. An fp8 peak equal to the bf16 one means no gain.
      link_bandwidth: bytes/s in one direction, all links of a device together. A TPU has two a torus axis (four in
        all on v5e and v6e, six on the others), so a ring along one axis has a half or a third of it; behind an NVLink
        switch every peer is reached at the whole figure.
      devices_per_chip: how many JAX devices a physical chip is.
      source: pages that state these figures.
      topologies: number of chips -> topology name, TPUs only.
      gpu: GPUs only.
    """

    name: str
    platform: str  # "tpu" or "gpu"
    device_kinds: tuple[str, ...]
    memory_bytes: int
    usable_bytes: int
    memory_bandwidth: float
    bf16_flops: float
    int8_ops: float | None
    fp8_flops: float | None
    link_bandwidth: float
    devices_per_chip: int = 1
    source: tuple[str, ...]
    topologies: dict[int, str] | None = None
    gpu: GpuTarget | None = None

    @property
    def interconnect(self) -> str:
        """What the links are called."""
        return "ICI" if self.platform == "tpu" else "NVLink"

    @property
    def ring_bandwidth(self) -> float:
        """Bytes/s that a device sends around a ring: both links of one torus axis, or all links behind a switch."""
        axes = 1 if self.topologies is None else next(iter(self.topologies.values())).count("x") + 1
        return self.link_bandwidth / axes


# Shapes that Google offers, and below a host's worth those that the compiler knows.
_PLANE = {1: "1x1", 2: "1x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBE = {
    **{1: "1x1x1", 2: "1x2x1", 4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"},
    **{128: "4x4x8", 256: "4x8x8", 512: "8x8x8"},
}


def _topologies(prefix: str, shapes: dict[int, str]) -> dict[int, str]:
    return {chips: f"{prefix}:{shape}" for chips, shape in shapes.items()}


_AMPERE = GpuTarget(
    compute_capability=(8, 0),
    num_sms=108,
    fp32_lanes_per_sm=64,
    shared_memory_per_sm=167936,
    shared_memory_per_block=166912,
    l2_bytes=41943040,
    clock_ghz=1.41,
)
_H100 = GpuTarget(
    compute_capability=(9, 0),
    num_sms=132,
    fp32_lanes_per_sm=128,
    shared_memory_per_sm=233472,
    shared_memory_per_block=232448,
    l2_bytes=52428800,
    clock_ghz=1.98,
)
_B200 = GpuTarget(
    compute_capability=(10, 0),
    num_sms=148,
    fp32_lanes_per_sm=128,
    shared_memory_per_sm=233472,
    shared_memory_per_block=232448,
    l2_bytes=132644864,
    clock_ghz=1.965,
)

_CHIPS = (
    Chip(
        name="v4",
        platform="tpu",
        device_kinds=("TPU v4",),
        memory_bytes=32 * GIB,
        usable_bytes=int(30.75 * GIB),
        memory_bandwidth=1200 * GB,
        bf16_flops=275 * TERA,
        int8_ops=275 * TERA,
        fp8_flops=None,
        link_bandwidth=6 * 45 * GB,  # stated per link
        source=(_TPU_DOCS + "v4", _SCALING_BOOK + "tpus/"),
        topologies=_topologies("v4", _CUBE),
    ),
    Chip(
        name="v5e",
        platform="tpu",
        device_kinds=("TPU v5 lite", "TPU v5e"),
        memory_bytes=16 * GIB,
        usable_bytes=int(15.75 * GIB),
        memory_bandwidth=819 * GB,
        bf16_flops=197 * TERA,
        int8_ops=393 * TERA,
        fp8_flops=None,
        link_bandwidth=200 * GB,  # 400 both ways
        source=(_TPU_DOCS + "v5e",),
        topologies=_topologies("v5e", _PLANE),
    ),
    Chip(
        name="v5p",
        platform="tpu",
        device_kinds=("TPU v5", "TPU v5p"),
        memory_bytes=95 * GIB,
        usable_bytes=int(95.73 * GIB),
        memory_bandwidth=2765 * GB,
        bf16_flops=459 * TERA,
        int8_ops=918 * TERA,
        fp8_flops=459 * TERA,
        link_bandwidth=600 * GB,  # 1200 both ways
        source=(_TPU_DOCS + "v5p", _SCALING_BOOK + "tpus/"),
        topologies=_topologies("v5p", _CUBE),
    ),
    Chip(
        name="v6e",
        platform="tpu",
        device_kinds=("TPU v6 lite", "TPU v6e"),
        memory_bytes=32 * GIB,
        usable_bytes=int(31.24 * GIB),
        memory_bandwidth=1638 * GB,
        bf16_flops=918 * TERA,
        int8_ops=1836 * TERA,
        fp8_flops=918 * TERA,
        link_bandwidth=400 * GB,  # 800 both ways
        source=(_TPU_DOCS + "v6e", _TPU_DOCS + "tpu7x"),
        topologies=_topologies("v6e", _PLANE),
    ),
    Chip(  # half a chip, see above
        name="7x",
        platform="tpu",
        device_kinds=("TPU7x",),
        memory_bytes=192 * GIB // 2,
        usable_bytes=int(94.74 * GIB),
        memory_bandwidth=7380 * GB / 2,
        bf16_flops=2307 * TERA / 2,
        int8_ops=None,
        fp8_flops=4614 * TERA / 2,
        link_bandwidth=600 * GB / 2,  # 1200 both ways for the chip
        devices_per_chip=2,
        source=(_TPU_DOCS + "tpu7x",),
        topologies=_topologies("tpu7x", _CUBE),
    ),
    Chip(
        name="a100-40g",
        platform="gpu",
        device_kinds=("NVIDIA A100-SXM4-40GB",),
        memory_bytes=40 * GB,
        usable_bytes=42331013120,
        memory_bandwidth=1555 * GB,
        bf16_flops=312 * TERA,
        int8_ops=624 * TERA,
        fp8_flops=None,
        link_bandwidth=300 * GB,  # 600 both ways
        source=(_A100_DATASHEET, _DATASHEET_DIGEST + "A100", _XLA_GPUS),
        gpu=_AMPERE,
    ),
    Chip(
        name="a100-80g",
        platform="gpu",
        device_kinds=("NVIDIA A100-SXM4-80GB",),
        memory_bytes=80 * GB,
        usable_bytes=85100068864,
        memory_bandwidth=2039 * GB,
        bf16_flops=312 * TERA,
        int8_ops=624 * TERA,
        fp8_flops=None,
        link_bandwidth=300 * GB,
        source=(_A100_DATASHEET, _DATASHEET_DIGEST + "A100", _XLA_GPUS),
        gpu=_AMPERE,
    ),
    Chip(
        name="h100",
        platform="gpu",
        device_kinds=("NVIDIA H100 80GB HBM3",),
        memory_bytes=80 * GB,
        usable_bytes=84942979072,
        memory_bandwidth=3350 * GB,
        bf16_flops=989.4 * TERA,
        int8_ops=1978.9 * TERA,
        fp8_flops=1978.9 * TERA,
        link_bandwidth=450 * GB,  # 900 both ways
        source=("https://www.nvidia.com/en-us/data-center/h100/", _DATASHEET_DIGEST + "h100", _XLA_GPUS),
        gpu=_H100,
    ),
    Chip(
        name="h200",
        platform="gpu",
        device_kinds=("NVIDIA H200",),
        memory_bytes=141 * GB,
        usable_bytes=143156 * 2**20,
        memory_bandwidth=4800 * GB,
        bf16_flops=989.4 * TERA,
        int8_ops=1978.9 * TERA,
        fp8_flops=1978.9 * TERA,
        link_bandwidth=450 * GB,
        source=(_H200_SYSTEM, _SCALING_BOOK + "gpus/", _DATASHEET_DIGEST + "h100", _H200_PROPERTIES),
        gpu=replace(_H100, l2_bytes=62914560),
    ),
    Chip(
        name="b200",
        platform="gpu",
        device_kinds=("NVIDIA B200",),
        memory_bytes=180 * GB,
        usable_bytes=191514411008,
        memory_bandwidth=8000 * GB,
        bf16_flops=2250 * TERA,
        int8_ops=4500 * TERA,
        fp8_flops=4500 * TERA,
        link_bandwidth=900 * GB,  # 1800 both ways
        source=(
            "https://docs.nvidia.com/dgx/dgxb200-user-guide/introduction-to-dgxb200.html",
            _DATASHEET_DIGEST + "B200",
            _XLA_GPUS,
        ),
        gpu=_B200,
    ),
)

CHIPS: dict[str, Chip] = {entry.name: entry for entry in _CHIPS}


def chip(name: str) -> Chip:
    """The chip of that name.

    Raises:
      HardwareError: there is none.
    """
    if name not in CHIPS:
        raise HardwareError(f"unknown chip {name!r}; known are {', '.join(CHIPS)}")
    return CHIPS[name]


def chip_of(device_kind: str) -> Chip | None:
    """The chip that JAX calls so (`jax.Device.device_kind`), or None."""
    return next((entry for entry in _CHIPS if device_kind in entry.device_kinds), None)


def parse_devices(text: str) -> tuple[Chip, int]:
    """Reads `h200:8`: eight devices of an H200; the count may be left out and is then 1.

    Raises:
      HardwareError: an unknown chip, or a count that is no positive integer.
    """
    name, colon, count = text.partition(":")
    if colon and not (count.isascii() and count.isdecimal() and int(count) > 0):
        raise HardwareError(f"{text!r}: the number of devices must be a positive integer, not {count!r}")
    return chip(name), int(count) if colon else 1


def described_devices(name: str, count: int | None = None) -> list[jax.Device]:
    """JAX devices of a chip that need not be here, to build a `Mesh` over.

    A number that no topology has exactly is the first devices of the next larger one.

    Args:
      name: a chip's name with `count`, or both in one: `h200:8`.
      count: devices as JAX counts them; on 7x that is two a chip.

    Raises:
      HardwareError: an unknown chip or count, more devices than the largest topology has, or no compiler installed.
    """
    entry, count = parse_devices(name if count is None else f"{name}:{count}")
    devices = _tpu_devices(entry, count) if entry.platform == "tpu" else _gpu_devices(entry, count)
    return list(devices[:count])


def _tpu_devices(entry: Chip, count: int) -> Sequence[jax.Device]:
    assert entry.topologies is not None
    chips = next((chips for chips in entry.topologies if chips * entry.devices_per_chip >= count), None)
    if chips is None:
        sizes = ", ".join(str(chips * entry.devices_per_chip) for chips in entry.topologies)
        raise HardwareError(f"{entry.name}:{count}: no topology has so many devices; there are topologies of {sizes}")
    # Where one device is both cores of a chip, that has a name; v5p is so by default.
    options = {"chip_config_name": "megacore"} if entry.name == "v4" else {}
    return _described(entry, topology_name=entry.topologies[chips], **options)


_GPUS_PER_HOST = 8


def _gpu_devices(entry: Chip, count: int) -> Sequence[jax.Device]:
    hosts = -(-count // _GPUS_PER_HOST)
    per_host = count if hosts == 1 else _GPUS_PER_HOST
    topology = f"1x{hosts}x{per_host}"  # NVLink domains x hosts x GPUs
    return _described(entry, topology_name=entry.name, topology=topology, target_config=gpu_target_config(entry))


def _described(entry: Chip, **description: str) -> Sequence[jax.Device]:
    gpu = f"--no-deps jax-cuda12-plugin=={jax.__version__} jax-cuda12-pjrt=={jax.__version__} nvidia-cuda-nvcc-cu12"
    packages = {"tpu": "libtpu", "gpu": gpu}[entry.platform]
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")  # the CUDA plug-in loads where there is no GPU
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no metadata server to ask
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no TPU is held, so other processes may load it too
    try:
        platform = "tpu" if entry.platform == "tpu" else "cuda"
        return topologies.get_topology_desc(platform=platform, **description).devices
    except Exception as error:  # JAX raises a different kind for each way in which a plug-in can be missing
        raise HardwareError(
            f"cannot describe {entry.name} here: {str(error)[:300]}. Its compiler comes with: pip install {packages}"
            " (scripts/compilers.sh makes an environment with it)"
        ) from error


def gpu_target_config(entry: Chip) -> str:
    """The description that XLA's GPU compiler takes: a `GpuTargetConfigProto` in text form."""
    target = entry.gpu
    assert target is not None
    major, minor = target.compute_capability
    # Hopper and Blackwell compile for sm_90a and sm_100a, as XLA does on the device itself; Ampere has no such form.
    extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
  core_count: {target.num_sms}
  fpus_per_core: {target.fp32_lanes_per_sm}
  clock_rate_ghz: {target.clock_ghz}
  device_memory_size: {entry.usable_bytes}
  memory_bandwidth: {int(entry.memory_bandwidth)}
  l2_cache_size: {target.l2_bytes}
  shared_memory_per_core: {target.shared_memory_per_sm}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {target.shared_memory_per_block}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}}
platform_name: "CUDA"
runtime_version {{ major: 12 minor: 9 }}
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{entry.device_kinds[0]}"
"""
