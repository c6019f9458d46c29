"""The table of chips, and which topology and description a chip that is not here gets. Needs no compiler."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

from sharding.hardware import (
    CHIPS,
    Chip,
    HardwareError,
    chip,
    chip_of,
    described_devices,
    gpu_target_config,
    parse_devices,
)


@pytest.fixture
def descriptions(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What JAX is asked for; it answers with as many devices as the topology has, and a few to spare for GPUs."""
    asked: list[dict] = []

    def describe(**description):
        asked.append(description)
        shape = description.get("topology") or description["topology_name"].partition(":")[2]
        cores = 2 if description["topology_name"].startswith("tpu7x") else 1
        return SimpleNamespace(devices=list(range(math.prod(map(int, shape.split("x"))) * cores)))

    monkeypatch.setattr("sharding.hardware.topologies.get_topology_desc", describe)
    return asked


@pytest.mark.parametrize("entry", CHIPS.values(), ids=list(CHIPS))
def test_every_chip_is_complete_and_plausible(entry: Chip) -> None:
    assert entry.platform in ("tpu", "gpu")
    assert entry.source
    assert all(page.startswith("https://") for page in entry.source)
    # Vendors round, and count in GB or GiB; neither makes 10 %.
    assert entry.usable_bytes == pytest.approx(entry.memory_bytes, rel=0.1)
    # A chip computes far more than it moves, and moves more in itself than to others: 100 FLOP a byte at least.
    assert entry.bf16_flops > 100 * entry.memory_bandwidth > 100 * entry.link_bandwidth > 0
    for peak in (entry.int8_ops, entry.fp8_flops):
        assert peak is None or entry.bf16_flops <= peak < 2.1 * entry.bf16_flops
    assert (entry.topologies is None) == (entry.platform == "gpu")
    assert (entry.gpu is None) == (entry.platform == "tpu")


def test_names_of_devices_belong_to_one_chip_each() -> None:
    kinds = [kind for entry in CHIPS.values() for kind in entry.device_kinds]
    assert len(set(kinds)) == len(kinds)
    assert set(CHIPS) == {"v4", "v5e", "v5p", "v6e", "7x", "a100-40g", "a100-80g", "h100", "h200", "b200"}


def test_topologies_have_as_many_chips_as_they_say() -> None:
    for entry in CHIPS.values():
        shapes = {chips: name.partition(":")[2] for chips, name in (entry.topologies or {}).items()}
        assert list(shapes) == sorted(shapes)
        for chips, shape in shapes.items():
            assert math.prod(map(int, shape.split("x"))) == chips


def test_a_device_of_7x_is_half_a_chip() -> None:
    half = chip("7x")
    assert half.devices_per_chip == 2
    assert (half.memory_bytes, half.memory_bandwidth) == (96 * 2**30, 3690e9)
    assert (half.bf16_flops, half.fp8_flops, half.link_bandwidth) == (1153.5e12, 2307e12, 300e9)


@pytest.mark.parametrize(
    ("device_kind", "name"),
    [
        ("TPU v4", "v4"),
        ("TPU v5 lite", "v5e"),
        ("TPU v5", "v5p"),
        ("TPU v6 lite", "v6e"),
        ("TPU7x", "7x"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_chips_are_found_by_what_jax_calls_them(device_kind: str, name: str) -> None:
    assert chip_of(device_kind) is chip(name)


@pytest.mark.parametrize(
    "device_kind",
    [
        "cpu",
        "TPU v3",
        "NVIDIA A100-PCIE-40GB",  # PCIe cards have no NVLink between all, and some less bandwidth
        "NVIDIA A100 80GB PCIe",
        "NVIDIA H100 PCIe",
        "NVIDIA GeForce RTX 4090",
        "",
    ],
)
def test_other_devices_are_no_chip_of_the_table(device_kind: str) -> None:
    assert chip_of(device_kind) is None


def test_an_unknown_chip_is_told_which_there_are() -> None:
    with pytest.raises(HardwareError, match=r"unknown chip 'v9'.*v5e.*b200"):
        chip("v9")


def test_devices_are_parsed() -> None:
    assert parse_devices("h200:8") == (chip("h200"), 8)
    assert parse_devices("v5e") == (chip("v5e"), 1)


@pytest.mark.parametrize("text", ["h200:", "h200:0", "h200:-1", "h200:two", "h200:1.5", "h200:²", ":8", ""])
def test_text_that_names_no_devices_is_refused(text: str) -> None:
    with pytest.raises(HardwareError):
        parse_devices(text)


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        ("v5e:1", "v5e:1x1"),
        ("v5e:3", "v5e:2x2"),
        ("v5e:4", "v5e:2x2"),
        ("v6e:8", "v6e:2x4"),
        ("v5p:4", "v5p:2x2x1"),
        ("v5p:5", "v5p:2x2x2"),
        ("7x:1", "tpu7x:1x1x1"),
        ("7x:2", "tpu7x:1x1x1"),
        ("7x:8", "tpu7x:2x2x1"),
        ("7x:9", "tpu7x:2x2x2"),
    ],
)
def test_the_smallest_topology_with_enough_devices_is_taken(descriptions: list[dict], text: str, topology: str) -> None:
    devices = described_devices(text)
    assert devices == list(range(parse_devices(text)[1]))
    assert descriptions == [{"platform": "tpu", "topology_name": topology}]


def test_a_v4_chip_is_one_device(descriptions: list[dict]) -> None:
    described_devices("v4", 4)
    assert descriptions == [{"platform": "tpu", "topology_name": "v4:2x2x1", "chip_config_name": "megacore"}]


@pytest.mark.parametrize(
    ("count", "topology"), [(1, "1x1x1"), (3, "1x1x3"), (8, "1x1x8"), (16, "1x2x8"), (12, "1x2x8")]
)
def test_gpus_fill_hosts_of_eight(descriptions: list[dict], count: int, topology: str) -> None:
    assert len(described_devices("h100", count)) == count
    assert (descriptions[0]["platform"], descriptions[0]["topology"]) == ("cuda", topology)


def test_more_devices_than_a_pod_has_are_refused_with_the_sizes_there_are() -> None:
    with pytest.raises(HardwareError, match=r"v5e:257.*1, 2, 4, 8.*256"):
        described_devices("v5e:257")
    with pytest.raises(HardwareError, match=r"7x:1025.*2, 4, 8.*1024"):
        described_devices("7x:1025")


@pytest.mark.parametrize(("name", "packages"), [("v6e", "libtpu"), ("h200", "jax-cuda12-plugin==.*jax-cuda12-pjrt==")])
def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch, name: str, packages: str) -> None:
    def missing(**_):
        raise NotImplementedError("no plug-in")

    monkeypatch.setattr("sharding.hardware.topologies.get_topology_desc", missing)
    with pytest.raises(HardwareError, match=f"no plug-in.*pip install.*{packages}"):
        described_devices(name)


def test_the_description_of_a_gpu_has_the_figures_of_the_table() -> None:
    text = gpu_target_config(chip("h200"))
    assert "device_memory_size: 150109945856" in text
    assert "memory_bandwidth: 4800000000000" in text
    assert "major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES" in text
    assert 'device_description_str: "NVIDIA H200"' in text
    # sm_80a does not exist: LLVM ends the process when asked for it.
    assert "feature_extension" not in gpu_target_config(chip("a100-80g"))
