"""Compile a step for chips that need not be here, and read what the compiler made of it.

    mesh = Mesh(np.array(described_devices("v6e:2")), ("tensor",))
    step = compile_for(mesh, decode, weights, pool, inputs, donate_argnums=1)
    assert step.alias_bytes >= pool_bytes_per_device and not step.large_results(64 << 20)

Nothing runs and no array is allocated: arguments are `jax.ShapeDtypeStruct`s. Sizes come from the compiler's memory
analysis; collectives, custom calls and intermediate results from the optimized HLO text, which is one device's program
in the order in which it runs. `sharding.hlo` says how a result is told from a view of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.hardware import chip_of, described_devices
from sharding.hlo import Collective, CustomCall, Module, Result


class CompileError(ValueError):
    """A chip's compiler refused a program; the message says which chip and why, the cause is chained."""


@dataclass(frozen=True)
class CompiledStep:
    """What a chip's compiler made of a function; every size is of one device.

    Attributes:
      chip: the chip's name, or JAX's name of a device that `sharding.hardware` does not know.
      num_devices: of the mesh.
      argument_bytes, output_bytes, temp_bytes: of the program; outputs include aliased ones. Temporaries that the
        compiler puts into an output's memory before the output is written are not in `temp_bytes`.
      alias_bytes: outputs that lie in a donated argument's memory.
      seconds: to lower and compile.
      collectives, custom_calls: see `sharding.hlo`.
      results: everything that is written, of any size, in any memory.
      text: the optimized HLO.
    """

    chip: str
    num_devices: int
    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    seconds: float
    collectives: tuple[Collective, ...]
    custom_calls: tuple[CustomCall, ...]
    results: tuple[Result, ...] = field(repr=False)
    text: str = field(repr=False)

    @property
    def total_bytes(self) -> int:
        """Main memory that the program needs. TPU compilers refuse what does not fit, GPU compilers do not."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    def large_results(self, min_bytes: int) -> tuple[Result, ...]:
        """Intermediate results in main memory of at least `min_bytes`, the largest first.

        What the program returns is none, even where it is a copy of an argument: that shows in `alias_bytes`.
        """
        large = [r for r in self.results if r.bytes >= min_bytes and r.memory == "main" and not r.output]
        return tuple(sorted(large, key=lambda r: -r.bytes))


def compile_for(
    chips: str | Sequence[jax.Device] | Mesh,
    function: Callable[..., Any],
    *abstract_args: Any,
    donate_argnums: int | Sequence[int] = (),
    out_shardings: Any = None,
    compiler_options: dict[str, Any] | None = None,
) -> CompiledStep:
    """Compiles `function(*abstract_args)` for described or real devices, without running it.

    It is lowered under the mesh's abstract mesh, where Pallas and our dispatch find the chip.

    Args:
      chips: a mesh; or devices, or text such as `h200:1` (see `described_devices`), over which all is replicated.
      function: a plain function, or a jitted one with its own donation and shardings.
      abstract_args: pytrees of `jax.ShapeDtypeStruct`; those without a sharding are replicated over the mesh.
      donate_argnums: arguments whose memory outputs may take; for a plain function.
      out_shardings: as for `jax.jit`; for a plain function. The compiler chooses where it is None.
      compiler_options: as for `jax.stages.Lowered.compile`.

    Raises:
      CompileError: the compiler refused the program, or compiled a kernel for another chip; or no argument is an array.
      HardwareError: `chips` cannot be described.
      Whatever tracing `function` raises.
    """
    mesh = _mesh_over(chips)
    device = mesh.devices.flat[0]
    known = chip_of(device.device_kind)
    chip = known.name if known else device.device_kind
    args = _on(mesh, abstract_args)
    if not jax.tree.leaves(args):
        raise CompileError(f"{chip}: a function without array arguments belongs to no device; give it one")
    if not hasattr(function, "trace"):
        options = {} if out_shardings is None else {"out_shardings": out_shardings}
        function = jax.jit(function, donate_argnums=donate_argnums, **options)
    elif out_shardings is not None or donate_argnums != ():
        raise CompileError(f"{chip}: a jitted function brings its own donate_argnums and out_shardings")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = function.trace(*args)
        started = time.perf_counter()
        try:
            compiled = traced.lower().compile(compiler_options)
        except Exception as error:  # kernels refuse while lowered, XLA while compiling, each with errors of its own
            raise CompileError(f"{chip} x {mesh.size}: {_reason(error)}") from error
        seconds = time.perf_counter() - started
    memory, text = compiled.memory_analysis(), compiled.as_text()
    module = Module(text, on_tpu=device.platform == "tpu")
    custom_calls = module.custom_calls()
    _refuse_other_architecture(device, custom_calls)
    return CompiledStep(
        chip=chip,
        num_devices=mesh.size,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        seconds=seconds,
        collectives=module.collectives(),
        custom_calls=custom_calls,
        results=module.results(),
        text=text,
    )


def _mesh_over(chips: str | Sequence[jax.Device] | Mesh) -> Mesh:
    if isinstance(chips, Mesh):
        return chips
    devices = described_devices(chips) if isinstance(chips, str) else list(chips)
    return Mesh(np.array(devices), ("devices",))


def _on(mesh: Mesh, args: tuple[Any, ...]) -> tuple[Any, ...]:
    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(sharding, NamedSharding):
            sharding = NamedSharding(mesh, PartitionSpec())
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    return jax.tree.map(placed, args)


def _refuse_other_architecture(device: jax.Device, custom_calls: Sequence[CustomCall]) -> None:
    """Mosaic GPU takes any GPU that is not here for a Hopper, and can then compile for it what it cannot run."""
    known = chip_of(device.device_kind)
    kernels = [call.name for call in custom_calls if call.target.startswith("mosaic_gpu")]
    if not kernels or known is None or known.gpu is None or known.gpu.compute_capability == (9, 0):
        return
    if device.device_kind != jax.devices()[0].device_kind:
        raise CompileError(
            f"{known.name}: JAX compiles Mosaic GPU kernels ({', '.join(kernels)}) for sm_90a where the GPU is not"
            " here, so nothing is known of them on this chip; compile on the chip itself"
        )


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 400 else text[:400] + " ..."
