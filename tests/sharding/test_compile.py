"""What is read out of compiled programs: of texts that the compilers printed (jax 0.12, shortened), of programs
compiled for the CPU here, and, where their environments are at hand, of programs for chips that are not here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import compilers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from sharding.compile import CompileError, compile_for
from sharding.hlo import Array, Collective, Module, parse_shape

POOL = "bf16[16,128,4096]"


def module(text: str, *, on_tpu: bool) -> Module:
    return Module("HloModule jit_step, is_scheduled=true\n\n" + dedent(text), on_tpu=on_tpu)


def written(text: str, *, on_tpu: bool) -> dict[str, tuple[int, str, bool]]:
    """Name -> bytes, memory, whether it is an output."""
    return {r.name: (r.bytes, r.memory, r.output) for r in module(text, on_tpu=on_tpu).results()}


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("bf16[128,4096]{1,0}", 2**20),
        ("pred[]", 1),
        ("token[]", 0),
        ("f8e4m3fn[3,5]{1,0}", 15),
        ("s4[4,6]{1,0}", 24),  # a byte each, unless packed
        ("s4[4,6]{1,0:E(4)}", 12),
        # A TPU's tiles are whole: 64 lanes take 128, 3 rows take 8.
        ("bf16[5,3,64]{2,1,0:T(8,128)(2,1)}", 5 * 8 * 128 * 2),
        ("bf16[3,64,5]{1,0,2:T(8,128)(2,1)}", 5 * 8 * 128 * 2),
        ("s4[100,4096]{1,0:T(64,128)(8,1)E(4)S(1)}", 128 * 4096 // 2),
        ("f32[100]{0:T(256)}", 1024),
        ("s32[<=8]{0}", 32),
    ],
)
def test_bytes_of_an_array_as_it_lies_in_memory(text: str, num_bytes: int) -> None:
    assert Array.parse(text).num_bytes == num_bytes


def test_a_tuple_is_known_by_the_places_of_its_arrays() -> None:
    shape = parse_shape("((bf16[2,4]{1,0:T(8,128)(2,1)}), f32[3]{0:T(256)S(1)}, (), u32[])")
    assert {index: str(array) for index, array in shape.items()} == {(0, 0): "bf16[2,4]", (1,): "f32[3]", (3,): "u32[]"}
    assert shape[(1,)].space == 1


TPU_LOOP = """\
    %add.clone (x.3: bf16[], y.1: bf16[]) -> bf16[] {
      %x.3 = bf16[]{:T(256)} parameter(0)
      %y.1 = bf16[]{:T(256)} parameter(1)
      ROOT %add.8 = bf16[]{:T(256)} add(%x.3, %y.1)
    }

    %fused_computation.clone.1 (param_0.24: bf16[8192,4096], param_1.22: bf16[128,8192]) -> bf16[128,4096] {
      %param_1.22 = bf16[128,8192]{1,0:T(8,128)(2,1)S(1)} parameter(1)
      %param_0.24 = bf16[8192,4096]{1,0:T(8,128)(2,1)} parameter(0)
      ROOT %convolution.6 = bf16[128,4096]{1,0:T(8,128)(2,1)S(1)} convolution(%param_1.22, %param_0.24), dim_labels=bf_io->bf
    }

    %fused_computation.6 (param_0.25: bf16[16,128,4096], param_1.23: s32[], param_2.13: bf16[128,4096]) -> bf16[16,128,4096] {
      %param_0.25 = bf16[16,128,4096]{2,1,0:T(8,128)(2,1)} parameter(0)
      %param_2.13 = bf16[128,4096]{1,0:T(8,128)(2,1)S(1)} parameter(2)
      %bitcast.14 = bf16[1,128,4096]{2,1,0:T(8,128)(2,1)} bitcast(%param_2.13), metadata={op_name="jit(step)/while"}
      %param_1.23 = s32[]{:T(128)S(6)} parameter(1)
      %constant.24 = s32[]{:T(128)} constant(0)
      ROOT %dynamic_update_slice.5 = bf16[16,128,4096]{2,1,0:T(8,128)(2,1)} dynamic-update-slice(%param_0.25, %bitcast.14, %param_1.23, %constant.24, %constant.24)
    }

    %body (wide.param.2: (s32[], bf16[128,4096], bf16[16,128,4096], bf16[8192,4096])) -> (s32[], bf16[128,4096], bf16[16,128,4096], bf16[8192,4096]) {
      %wide.param.2 = (s32[]{:T(128)}, bf16[128,4096]{1,0:T(8,128)(2,1)S(1)}, bf16[16,128,4096]{2,1,0:T(8,128)(2,1)}, /*index=3*/bf16[8192,4096]{1,0:T(8,128)(2,1)}) parameter(0)
      %get-tuple-element.103 = s32[]{:T(128)} get-tuple-element(%wide.param.2), index=0
      %get-tuple-element.104 = bf16[128,4096]{1,0:T(8,128)(2,1)S(1)} get-tuple-element(%wide.param.2), index=1
      %get-tuple-element.117 = bf16[8192,4096]{1,0:T(8,128)(2,1)} get-tuple-element(%wide.param.2), index=3
      %fusion.21 = bf16[128,8192]{1,0:T(8,128)(2,1)} fusion(%get-tuple-element.104), kind=kLoop, calls=%fused_computation.9
      %fusion.25 = bf16[128,4096]{1,0:T(8,128)(2,1)S(1)} fusion(%get-tuple-element.117, %fusion.21), kind=kOutput, calls=%fused_computation.clone.1
      %all-reduce.2 = bf16[128,4096]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.25), channel_id=1, replica_groups=mesh['axis_0'=2] {'axis_0'}, use_global_device_ids=true, to_apply=%add.clone
      %get-tuple-element.105 = bf16[16,128,4096]{2,1,0:T(8,128)(2,1)} get-tuple-element(%wide.param.2), index=2
      %bitcast_dynamic-update-slice_fusion.2 = bf16[16,128,4096]{2,1,0:T(8,128)(2,1)} fusion(%get-tuple-element.105, %get-tuple-element.103, %all-reduce.2), kind=kLoop, calls=%fused_computation.6
      ROOT %tuple.25 = (s32[]{:T(128)}, bf16[128,4096]{1,0:T(8,128)(2,1)S(1)}, bf16[16,128,4096]{2,1,0:T(8,128)(2,1)}, bf16[8192,4096]{1,0:T(8,128)(2,1)}) tuple(%get-tuple-element.103, %all-reduce.2, %bitcast_dynamic-update-slice_fusion.2, %get-tuple-element.117)
    }

    %fused_computation.9 (param_0.14: bf16[128,4096]) -> bf16[128,8192] {
      %param_0.14 = bf16[128,4096]{1,0:T(8,128)(2,1)S(1)} parameter(0)
      %big = f32[128,8192]{1,0:T(8,128)} convert(%param_0.14)
      ROOT %convert.11 = bf16[128,8192]{1,0:T(8,128)(2,1)} convert(%big)
    }

    %condition (wide.param.1: (s32[], bf16[128,4096], bf16[16,128,4096], bf16[8192,4096])) -> pred[] {
      %wide.param.1 = (s32[]{:T(128)}, bf16[128,4096]{1,0:T(8,128)(2,1)S(1)}, bf16[16,128,4096]{2,1,0:T(8,128)(2,1)}, bf16[8192,4096]{1,0:T(8,128)(2,1)}) parameter(0)
      %get-tuple-element.62 = s32[]{:T(128)} get-tuple-element(%wide.param.1), index=0
      ROOT %lt.6 = pred[]{:T(512)} compare(%get-tuple-element.62, %get-tuple-element.62), direction=LT
    }

    ENTRY %main.7_spmd (param.5: bf16[16,128,4096], param.4: bf16[128,4096], param.8: bf16[8192,4096], param.6: s32[]) -> (bf16[16,128,4096], bf16[]) {
      %param.5 = bf16[16,128,4096]{2,1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="pool"}
      %param.4 = bf16[128,4096]{1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="x"}
      %param.8 = bf16[8192,4096]{1,0:T(8,128)(2,1)} parameter(2), metadata={op_name="down"}
      %param.6 = s32[]{:T(128)} parameter(3), metadata={op_name="n"}
      %copy.24 = bf16[128,4096]{1,0:T(8,128)(2,1)S(1)} copy(%param.4)
      %tuple.23 = (s32[]{:T(128)}, bf16[128,4096]{1,0:T(8,128)(2,1)S(1)}, bf16[16,128,4096]{2,1,0:T(8,128)(2,1)}, bf16[8192,4096]{1,0:T(8,128)(2,1)}) tuple(%param.6, %copy.24, COPIED_POOL, %param.8)
      %while.17 = (s32[]{:T(128)}, bf16[128,4096]{1,0:T(8,128)(2,1)S(1)}, bf16[16,128,4096]{2,1,0:T(8,128)(2,1)}, bf16[8192,4096]{1,0:T(8,128)(2,1)}) while(%tuple.23), condition=%condition, body=%body
      %get-tuple-element.121 = bf16[16,128,4096]{2,1,0:T(8,128)(2,1)} get-tuple-element(%while.17), index=2
      %bitcast.15 = s8[16777216]{0:T(1024)(128)(4,1)} bitcast(%get-tuple-element.121)
      %slice-start = ((s8[16777216]{0:T(1024)(128)(4,1)}), s8[4194304]{0:T(1024)(128)(4,1)S(1)}, s32[]{:S(2)}) slice-start(%bitcast.15), slice={[0:4194304]}
      %slice-done = s8[4194304]{0:T(1024)(128)(4,1)S(1)} slice-done(%slice-start)
      %reduce.4 = bf16[]{:T(256)} reduce(%slice-done, %param.6), dimensions={0}, to_apply=%add.clone
      ROOT %tuple.26 = (bf16[16,128,4096]{2,1,0:T(8,128)(2,1)}, bf16[]{:T(256)}) tuple(%get-tuple-element.121, %reduce.4)
    }
    """  # noqa: E501


def test_a_donated_pool_in_a_loop_is_not_written_anew() -> None:
    found = written(TPU_LOOP.replace("COPIED_POOL", "%param.5"), on_tpu=True)
    assert set(found) == {"fusion.21", "fusion.25", "all-reduce.2", "copy.24", "slice-done", "reduce.4", "lt.6"}
    assert found["fusion.21"] == (128 * 8192 * 2, "main", False)  # what its fusion computes inside does not count
    # Prefetches and results in S(1) are on the chip.
    assert {name for name, (_, memory, _) in found.items() if memory == "on-chip"} == {
        "fusion.25",
        "all-reduce.2",
        "copy.24",
        "slice-done",
    }
    assert found["reduce.4"][2]


def test_a_copy_that_saves_the_pool_from_a_loop_is_found_behind_the_output() -> None:
    copied = TPU_LOOP.replace("COPIED_POOL", "%copy.9").replace(
        "      %tuple.23", "      %copy.9 = bf16[16,128,4096]{2,1,0:T(8,128)(2,1)} copy(%param.5)\n      %tuple.23"
    )
    # The loop updates the copy in place and the program returns it: it is written, but is no intermediate.
    assert written(copied, on_tpu=True)["copy.9"] == (16 * 128 * 4096 * 2, "main", True)
    unreturned = copied.replace("tuple(%get-tuple-element.121, %reduce.4)", "tuple(%param.5, %reduce.4)")
    assert written(unreturned, on_tpu=True)["copy.9"] == (16 * 128 * 4096 * 2, "main", False)


def test_collectives_in_loops_are_found() -> None:
    found = module(TPU_LOOP.replace("COPIED_POOL", "%param.5"), on_tpu=True).collectives()
    assert found == (Collective("all-reduce", "bf16[128,4096]", 2**20, 1),)


GPU_ASYNCHRONOUS = """\
    %fused_dynamic_update_slice (param_0.5: bf16[16,128,4096], param_1.31: bf16[128,4096]) -> bf16[16,128,4096] {
      %param_0.5 = bf16[16,128,4096]{2,1,0} parameter(0)
      %param_1.31 = bf16[128,4096]{1,0} parameter(1)
      %bitcast.35 = bf16[1,128,4096]{2,1,0} bitcast(%param_1.31)
      %constant_3 = s32[] constant(0)
      ROOT %dynamic_update_slice.2 = bf16[16,128,4096]{2,1,0} dynamic-update-slice(%param_0.5, %bitcast.35, %constant_3, %constant_3, %constant_3)
    }

    ENTRY %main.1_spmd (param: bf16[16,128,4096], param.1: bf16[128,4096]) -> (bf16[16,128,4096], bf16[512,4096]) {
      %param = bf16[16,128,4096]{2,1,0} parameter(0), metadata={op_name="pool"}
      %param.1 = bf16[128,4096]{1,0} parameter(1)
      %loop_reduce_fusion = bf16[128,4096]{1,0:S(1)} copy(%param.1)
      %all-reduce-start = ((bf16[128,4096]{1,0}), bf16[128,4096]{1,0}) all-reduce-start(%loop_reduce_fusion), channel_id=1, replica_groups=mesh['axis_0'=2] {'axis_0'}, to_apply=%add.clone, output_to_operand_aliasing={{1}: (0, {})}, backend_config={"is_sync":false}
      %all-reduce-done = bf16[128,4096]{1,0} all-reduce-done(%all-reduce-start)
      %fusion-start = ((bf16[16,128,4096]{2,1,0}, bf16[128,4096]{1,0}), bf16[16,128,4096]{2,1,0}, u32[]) fusion-start(%param, %all-reduce-done), kind=kLoop, calls=%fused_dynamic_update_slice
      %all-gather-start = (bf16[128,4096]{1,0}, bf16[512,4096]{1,0}) all-gather-start(%all-reduce-done), channel_id=2, dimensions={0}
      %all-gather-done = bf16[512,4096]{1,0} all-gather-done(%all-gather-start)
      %fusion-done = bf16[16,128,4096]{2,1,0} fusion-done(%fusion-start)
      ROOT %tuple.27 = (bf16[16,128,4096]{2,1,0}, bf16[512,4096]{1,0}) tuple(%fusion-done, %all-gather-done)
    }
    """  # noqa: E501


def test_asynchronous_pairs_count_once_and_in_place_ones_not_at_all() -> None:
    found = written(GPU_ASYNCHRONOUS, on_tpu=False)
    # On GPUs S(1) is main memory that the other GPUs can reach.
    assert found == {"loop_reduce_fusion": (2**20, "main", False), "all-gather-done": (2**22, "main", True)}


def test_collectives_count_the_larger_of_what_goes_in_and_comes_out() -> None:
    assert module(GPU_ASYNCHRONOUS, on_tpu=False).collectives() == (
        Collective("all-reduce", "bf16[128,4096]", 2**20, 1),
        Collective("all-gather", "bf16[512,4096]", 2**22, 1),
    )


def test_a_fusion_that_changes_the_pool_before_the_update_is_no_update_in_place() -> None:
    text = GPU_ASYNCHRONOUS.replace("dynamic-update-slice(%param_0.5,", "dynamic-update-slice(%copied,").replace(
        "      %constant_3 =", "      %copied = bf16[16,128,4096]{2,1,0} negate(%param_0.5)\n      %constant_3 ="
    )
    assert written(text, on_tpu=False)["fusion-done"] == (16 * 128 * 4096 * 2, "main", True)


TPU_SPARSE_CORE = """\
    %called_computation.2 (param_0.11: bf16[4096,4096]) -> bf16[1024,4096] {
      %param_0.11 = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(0)
      %tuple.13 = (bf16[4096,4096]{1,0:T(8,128)(2,1)}) tuple(%param_0.11)
      %get-tuple-element.14 = bf16[4096,4096]{1,0:T(8,128)(2,1)} get-tuple-element(%tuple.13), index=0
      ROOT %reduce-scatter.5 = bf16[1024,4096]{1,0:T(8,128)(2,1)} reduce-scatter(%get-tuple-element.14), channel_id=2, replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%region_0.0
    }, execution_thread="sparsecore"

    %all-reduce-scatter (input: bf16[4096,4096]) -> bf16[1040,4096] {
      %input = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(0)
      %constant.2 = bf16[] constant(0)
      %pad = bf16[4160,4096]{1,0:T(8,128)(2,1)} pad(%input, %constant.2), padding=0_64x0_0
      %all-reduce.1 = bf16[4160,4096]{1,0:T(8,128)(2,1)} all-reduce(%pad), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%region_0.0
      %partition-id.3 = u32[] partition-id()
      ROOT %dynamic-slice.1 = bf16[1040,4096]{1,0:T(8,128)(2,1)} dynamic-slice(%all-reduce.1, %partition-id.3, %partition-id.3), dynamic_slice_sizes={1040,4096}
    }

    ENTRY %main.0_spmd (param.3: bf16[4096,4096]) -> (bf16[1024,4096], bf16[1040,4096]) {
      %param.3 = bf16[4096,4096]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="y"}
      %reduce-scatter.4.call-start = ((), (), (s32[4202496]{0:T(1024)}, s32[1]{0:S(2)})) custom-call-start(), async_execution_thread="sparsecore", custom_call_target="TODO", called_computations={%called_computation.2}
      %reduce-scatter.4.call-update = ((bf16[4096,4096]{1,0:T(8,128)(2,1)}), bf16[1024,4096]{1,0:T(8,128)(2,1)}, (s32[4202496]{0:T(1024)})) custom-call-update(%reduce-scatter.4.call-start, %param.3), output_to_operand_aliasing={{2,0}: (0, {2,0})}
      %reduce-scatter.4.call-done = bf16[1024,4096]{1,0:T(8,128)(2,1)} custom-call-done(%reduce-scatter.4.call-update)
      %fusion = bf16[1040,4096]{1,0:T(8,128)(2,1)} fusion(%param.3), kind=kCustom, calls=%all-reduce-scatter
      ROOT %tuple.8 = (bf16[1024,4096]{1,0:T(8,128)(2,1)}, bf16[1040,4096]{1,0:T(8,128)(2,1)}) tuple(%reduce-scatter.4.call-done, %fusion)
    }
    """  # noqa: E501


def test_collectives_on_another_core_and_inside_fusions_are_found() -> None:
    assert module(TPU_SPARSE_CORE, on_tpu=True).collectives() == (
        Collective("reduce-scatter", "bf16[1024,4096]", 2**25, 1),
        Collective("reduce-scatter", "bf16[1040,4096]", 4160 * 4096 * 2, 1),
    )
    assert set(written(TPU_SPARSE_CORE, on_tpu=True)) == {"reduce-scatter.5", "fusion"}
    assert not module(TPU_SPARSE_CORE, on_tpu=True).custom_calls()


BRANCHES_AND_KERNEL = """\
    %region_2.3 (param.2: bf16[128,4096]) -> (bf16[128,4096]) {
      %param.2 = bf16[128,4096]{1,0} parameter(0)
      %negate.1 = bf16[128,4096]{1,0} negate(%param.2)
      ROOT %tuple.2 = (bf16[128,4096]{1,0}) tuple(%negate.1)
    }

    %region_3.5 (param.3: (bf16[128,4096])) -> (bf16[128,4096]) {
      %param.3 = (bf16[128,4096]{1,0}) parameter(0)
      %get-tuple-element.43 = bf16[128,4096]{1,0} get-tuple-element(%param.3), index=0
      %iota.2 = s32[128,4096]{1,0} iota(), iota_dimension=0
      %sort.14 = (bf16[128,4096]{1,0}, s32[128,4096]{1,0}) sort(%get-tuple-element.43, %iota.2), dimensions={0}, to_apply=%region_4.4
      %get-tuple-element.41 = bf16[128,4096]{1,0} get-tuple-element(%sort.14), index=0
      ROOT %tuple.28 = (bf16[128,4096]{1,0}) tuple(%get-tuple-element.41)
    }

    ENTRY %main.7 (param.5: bf16[16,128,4096], param.4: bf16[128,4096], param.6: s32[]) -> (bf16[16,128,4096], bf16[128,4096]) {
      %param.5 = bf16[16,128,4096]{2,1,0} parameter(0)
      %param.4 = bf16[128,4096]{1,0} parameter(1)
      %param.6 = s32[] parameter(2)
      %tuple.14 = (bf16[128,4096]{1,0}) tuple(%param.4)
      %conditional = (bf16[128,4096]{1,0}) conditional(%param.6, %param.4, %tuple.14), branch_computations={%region_2.3, %region_3.5}
      %get-tuple-element.125 = bf16[128,4096]{1,0} get-tuple-element(%conditional), index=0
      %attend = (bf16[16,128,4096]{2,1,0}, f32[128]{0}) custom-call(%param.6, %param.5, %get-tuple-element.125), custom_call_target="tpu_custom_call", operand_layout_constraints={s32[], bf16[16,128,4096]{2,1,0}, bf16[128,4096]{1,0}}, output_to_operand_aliasing={{0}: (1, {})}, backend_config={"body":"TUzv(UgF{"}
      %get-tuple-element.1 = bf16[16,128,4096]{2,1,0} get-tuple-element(%attend), index=0
      ROOT %tuple.26 = (bf16[16,128,4096]{2,1,0}, bf16[128,4096]{1,0}) tuple(%get-tuple-element.1, %get-tuple-element.125)
    }
    """  # noqa: E501


def test_branches_are_read_and_an_aliased_kernel_writes_only_what_is_not_aliased() -> None:
    assert written(BRANCHES_AND_KERNEL, on_tpu=False) == {
        "negate.1": (2**20, "main", True),  # either branch may write what is returned
        "iota.2": (2**21, "main", False),
        "sort.14{0}": (2**20, "main", True),
        "sort.14{1}": (2**21, "main", False),
        "attend{1}": (512, "main", False),
    }
    (call,) = module(BRANCHES_AND_KERNEL, on_tpu=False).custom_calls()
    assert (call.name, call.target) == ("attend", "tpu_custom_call")
    assert (call.operands, call.results) == (("s32[]", POOL, "bf16[128,4096]"), (POOL, "f32[128]"))


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        Module("HloModule jit_step", on_tpu=False)
    with pytest.raises(ValueError, match="no array shape"):
        Array.parse("nonsense")


# The CPU's compiler is here too.


def update(pool, x, w):
    y = x @ w
    return lax.dynamic_update_slice(pool, y[None], (1, 0, 0)), jnp.sort(y, axis=1)[:, 0]


UPDATE_ARGS = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 32, 64), (32, 48), (48, 64)))
POOL_BYTES = 64 * 32 * 64 * 4


def test_a_program_for_devices_that_are_here() -> None:
    step = compile_for(jax.devices()[:1], update, *UPDATE_ARGS, donate_argnums=0)
    assert (step.chip, step.num_devices) == ("cpu", 1)
    assert step.alias_bytes == POOL_BYTES
    assert step.argument_bytes == POOL_BYTES + (32 * 48 + 48 * 64) * 4
    assert step.total_bytes == step.argument_bytes + step.output_bytes + step.temp_bytes - POOL_BYTES
    assert not step.large_results(POOL_BYTES)
    assert [r.shape for r in step.large_results(32 * 64 * 4)]  # the matrix product is one
    kept = compile_for(jax.devices()[:1], update, *UPDATE_ARGS)
    assert kept.alias_bytes == 0
    assert max(r.bytes for r in kept.results if r.output) == POOL_BYTES


def test_the_function_sees_the_mesh_while_it_is_traced() -> None:
    mesh, seen = Mesh(np.array(jax.devices()[:1]), ("tensor",)), []
    spec = NamedSharding(mesh, P("tensor"))

    def watch(tree):
        seen.append((jax.sharding.get_abstract_mesh().abstract_device.device_kind, tree["y"].shape))
        return tree["x"] + 1

    tree = {"x": jax.ShapeDtypeStruct((8,), jnp.int8, sharding=spec), "y": jnp.zeros(3)}
    assert compile_for(mesh, watch, tree, out_shardings=spec).num_devices == 1
    assert seen == [("cpu", (3,))]


def test_a_jitted_function_brings_its_own_donation() -> None:
    jitted = jax.jit(update, donate_argnums=0)
    assert compile_for(jax.devices()[:1], jitted, *UPDATE_ARGS).alias_bytes == POOL_BYTES
    with pytest.raises(CompileError, match="brings its own donate_argnums"):
        compile_for(jax.devices()[:1], jitted, *UPDATE_ARGS, donate_argnums=0)


def test_errors_say_whose_they_are() -> None:
    with pytest.raises(CompileError, match="cpu: a function without array arguments"):
        compile_for(jax.devices()[:1], lambda: jnp.zeros(3))
    with pytest.raises(TypeError, match="dot_general"):  # of tracing: the function's own
        compile_for(jax.devices()[:1], lambda pool, x, w: w @ x @ w, *UPDATE_ARGS)
    with pytest.raises(CompileError, match=r"cpu x 1: .*no_such_option") as caught:
        compile_for(jax.devices()[:1], update, *UPDATE_ARGS, compiler_options={"no_such_option": 1})
    assert caught.value.__cause__ is not None


# Chips that are not here: by the environments that scripts/compilers.sh makes, in processes of their own.


@pytest.mark.parametrize("chips", ["v6e:2", "h200:2"])
@compilers.each_environment
class TestDescribedChips:
    @pytest.fixture
    def found(self, environment: Path | None, chips: str) -> dict:
        return compilers.run(environment, Path(__file__).with_name("compiled_steps.py"), chips)

    def test_a_donated_pool_is_aliased_and_nothing_as_large_is_written(self, found: dict) -> None:
        pool_bytes = 256 * 64 * 1024 * 2
        assert found["donated"]["alias_bytes"] == found["jitted"]["alias_bytes"] == pool_bytes
        assert found["donated"]["large"] == found["jitted"]["large"] == []
        assert found["donated"]["temp_bytes"] < pool_bytes / 8
        assert found["kept"]["alias_bytes"] == 0
        # x and two halves of the weights, pads of a few words aside
        assert found["kept"]["argument_bytes"] == pytest.approx(pool_bytes + 2 * (64 * 1024 + 2 * 2**20), abs=4096)

    def test_each_layer_has_one_all_reduce(self, found: dict) -> None:
        reduced = {
            "kind": "all-reduce",
            "shape": "bf16[64,1024]",
            "bytes": 64 * 1024 * 2,
            "count": 2,
            "in_branch": False,
        }
        assert found["donated"]["collectives"] == [reduced]

    def test_a_gathered_matrix_is_found_in_main_memory(self, found: dict) -> None:
        gathered = {"kind": "all-gather", "shape": "bf16[8192,8192]", "bytes": 2**27, "count": 2, "in_branch": False}
        assert gathered in found["gathered"]["collectives"]
        largest = [r for r in found["gathered"]["large"] if r["bytes"] == 2**27]
        assert [r["opcode"] for r in largest] == ["all-gather", "all-gather"]
        assert found["gathered"]["temp_bytes"] >= 2**27

    def test_the_chip_is_seen_by_what_is_traced(self, found: dict, chips: str) -> None:
        assert found["device_kind"] == {"v6e:2": "TPU v6 lite", "h200:2": "NVIDIA H200"}[chips]
        assert (found["donated"]["chip"], found["donated"]["num_devices"]) == (chips.partition(":")[0], 2)

    def test_a_kernel_aliases_its_operand(self, found: dict, chips: str) -> None:
        if chips == "h200:2":
            pytest.skip("the kernel of this test is Mosaic TPU's")
        (call,) = found["kernel"]["custom_calls"]
        assert (call["target"], call["results"]) == ("tpu_custom_call", ["bf16[65536,512]"])
        assert found["kernel"]["alias_bytes"] == 65536 * 512 * 2
        assert found["kernel"]["large"] == []

    def test_what_does_not_fit_is_an_error_of_the_chip(self, found: dict, chips: str) -> None:
        if chips == "h200:2":
            pytest.skip("GPU compilers take programs that do not fit")
        assert found["error"].startswith("v6e x 2: RESOURCE_EXHAUSTED")
        assert found["cause"] == "JaxRuntimeError"


def test_the_script_of_these_tests_imports_here() -> None:
    """Else a renamed function would be noticed only where the compilers are."""
    code = "import compiled_steps; assert compiled_steps.main"
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(compilers.REPOSITORY), str(Path(__file__).parent)])}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=120)
