"""Candidates of scripts/tune_kernels.py over shapes of a tiny model; compiles some, run by the compilers' interpreter.

python tests/pallas_kernels/tiny_candidates.py h200 paged_attention
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import tune_kernels
from pretended import described

from jaxinfer.models.cards import CARDS
from pallas_kernels.dispatch import Device, KernelError, device_of
from sharding.compile import compile_for
from sharding.hardware import described_devices

TINY = replace(
    CARDS["smollm2-135m-instruct"], hidden_size=256, intermediate_size=512, num_heads=6, num_kv_heads=2, head_dim=64
)
LENS = ((70, 1), (0, 40))


def tiny_candidates(op: str, device: Device) -> dict[str, list[tune_kernels.Candidate]]:
    """The candidates of each shape, by the shape's text; call it where programs are traced for the device."""
    found: dict[str, list[tune_kernels.Candidate]] = {}
    for candidate in tune_kernels.candidates(op, device, [TINY], LENS):
        found.setdefault(json.dumps(candidate.shape), []).append(candidate)
    return found


def abstract_call(candidate: tune_kernels.Candidate) -> tuple[Any, Any]:
    """What would be timed, and the shapes of its arguments."""
    program = None

    def arguments():
        nonlocal program
        program, args = candidate.case.build(2)
        return args

    args = jax.eval_shape(arguments)
    return program, args


def compiles(chip: str, group: list[tune_kernels.Candidate]) -> None:
    """Compiles the first candidate that is not refused by name."""
    for candidate in group:
        program, args = abstract_call(candidate)
        with contextlib.suppress(KernelError):
            compile_for(chip, program, *args)
            return
    raise AssertionError(f"all blocks of {group[0].shape} are refused")


def main() -> None:
    chip, op = sys.argv[1:]
    device = device_of(described_devices(chip)[0])
    with described(device):
        first, *_, last = tiny_candidates(op, device).values()
        for group in (first, last[::-1]):
            compiles(chip, group)
    print(json.dumps("compiled"))


if __name__ == "__main__":
    main()
