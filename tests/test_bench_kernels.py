"""The scripts that compare and time kernels on a device, tried on this CPU; what they find wrong must be wrong."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "scripts"))
import bench_kernels
import check_kernels
from check_kernels import ATTENTION, MATMULS, AttentionShape

import pallas_kernels.paged_attention.xla as attention_by_xla
import pallas_kernels.quantized_matmul.xla as matmul_by_xla
from pallas_kernels.paged_attention.layout import QuantizedKV
from pallas_kernels.quantized_matmul import ChannelWeight

SMALL = ((90, 1), (0, 0), (20, 9), (0, 3), (5, 0))
KINDS = (jnp.bfloat16, jnp.int8, jnp.float8_e4m3fn)


def shape_of(kv):
    return AttentionShape(1, 2, 64, 16, kv)


def check(kv):
    return check_kernels.check_attention(shape_of(kv), SMALL)


def of_values(change):
    """A fault in the values, those of int8 and of bytes too."""
    return lambda pool: pool._replace(values=change(pool.values)) if isinstance(pool, QuantizedKV) else change(pool)


FAULTS = {
    "values of tokens are 0": (of_values(lambda x: x.at[:, :, 1::2].set(jnp.zeros((), x.dtype))), KINDS),
    "keys of tokens are 0": (of_values(lambda x: x.at[:, :, ::2].set(jnp.zeros((), x.dtype))), KINDS),
    "scales are halved": (lambda pool: pool._replace(scales=pool.scales / 2), KINDS[1:]),
    "scales of keys are 0": (lambda pool: pool._replace(scales=pool.scales.at[:, :, ::2].set(0)), KINDS[1:]),
}


@pytest.mark.parametrize("kv", KINDS)
def test_what_is_right_passes_and_faults_do_not(kv):
    row = check(kv)
    assert row["implementation"] == "xla"
    assert 0 < row["difference"] <= row["allowed"]
    step = check_kernels.attention_step(shape_of(kv), SMALL)
    _, want = check_kernels.attention_truth(shape_of(kv), step)
    for name, (fault, kinds) in FAULTS.items():
        if kv in kinds:
            _, out = check_kernels.attention_truth(shape_of(kv), step._replace(pool=fault(step.pool)))
            assert not check_kernels.difference(out, want) <= row["allowed"], name


@pytest.mark.parametrize("fault", ["output", "pool"])
def test_faults_of_the_kernel_that_serves_are_seen(monkeypatch, fault):
    attend = attention_by_xla.paged_attention

    def faulty(*args, **options):
        pool, out = attend(*args, **options)
        return (jnp.roll(pool, 1, axis=1), out) if fault == "pool" else (pool, out.at[3].multiply(1.1))

    monkeypatch.setattr(attention_by_xla, "paged_attention", faulty)
    if fault == "pool":
        with pytest.raises(ValueError, match="values of the pool are wrong"):
            check(jnp.bfloat16)
    else:
        row = check(jnp.bfloat16)
        assert not row["difference"] <= row["allowed"]


@pytest.mark.parametrize(("kind", "group"), sorted({(kind, group) for kind, group, _ in MATMULS}, key=str))
def test_faults_of_matmuls_are_seen(monkeypatch, kind, group):
    multiply = matmul_by_xla.quantized_matmul
    row = check_kernels.check_matmul(kind, group, 2, 256, 256)
    assert row["difference"] <= row["allowed"]

    def faulty(x, w, **options):
        scales = "scale_O" if isinstance(w, ChannelWeight) else "scales_GO"
        return multiply(x, w._replace(**{scales: jnp.roll(getattr(w, scales), 1, -1)}), **options)

    monkeypatch.setattr(matmul_by_xla, "quantized_matmul", faulty)
    row = check_kernels.check_matmul(kind, group, 2, 256, 256)
    assert not row["difference"] <= row["allowed"]


def test_no_number_is_never_near():
    wanted = np.ones(8)
    for out in (np.full(8, np.nan), np.where(np.arange(8) == 3, np.nan, 1.0), np.full(8, np.inf)):
        assert not check_kernels.difference(jnp.asarray(out), wanted) <= 0.03
    assert not check_kernels.difference(wanted, np.full(8, np.nan)) <= 0.03


def test_checks_have_every_value():
    assert {shape.H for shape in ATTENTION} >= {64, 128, 256}
    assert {shape.page_size for shape in ATTENTION} == {16, 32, 64, 128}
    assert {shape.G for shape in ATTENTION} >= {1, 16}
    for kv in KINDS:
        own = [shape for shape in ATTENTION if shape.kv == kv]
        assert any(shape.window for shape in own)
        assert {shape.H for shape in own} >= ({64, 128} if kv == jnp.int8 else {64, 128, 256})
    for kind in ("int4", "int4 zeros", "uint4 minima"):
        own = [(group, rows) for name, group, rows in MATMULS if name == kind]
        assert {group for group, _ in own} == {16, 32, 64, 128}
        assert {rows for _, rows in own} == {1, 64, 2048}
    covered = {what for what, _ in check_kernels.checks(tiny=False).values()}
    assert covered >= {case.checked for case in bench_kernels.cases(tiny=False) if case.checked}


@pytest.mark.parametrize(("call_bytes", "most", "calls"), [(1, 32, 32), (1, 4, 4), (1 << 30, 4, 2), (100 << 20, 4, 3)])
def test_the_time_is_of_one_of_the_calls_made(call_bytes, most, calls):
    made = []

    def build(calls):
        made.append(calls)
        return lambda: time.sleep(0.002 * calls) or jnp.zeros(1), ()

    seconds = bench_kernels.seconds_of(bench_kernels.Case("sleep", build, 0, 0, call_bytes, most))
    assert made == [calls]
    assert 0.002 <= seconds < 0.02


@pytest.mark.parametrize("name", ["decode attention, 4 x 256", "decode attention, 4 x 256: jax.nn, dense",
                                  "matmul qkv rows 1 bfloat16", "matmul qkv rows 1 int4"])  # fmt: skip
def test_programs_make_as_many_calls_as_they_are_asked_for(name):
    (case,) = (case for case in bench_kernels.cases(tiny=True) if case.name == name)
    _, args = case.build(3)  # a call for each layer of the pool, or weight
    assert len(args[0] if case.donates else args[1]) == 3


@pytest.fixture
def bench(monkeypatch, capsys):
    """Runs the script; gives its exit status and JSON."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--tiny", "--json", *arguments])
        with pytest.raises(SystemExit) as exited:
            bench_kernels.main()
        return int(exited.value.code), json.loads(capsys.readouterr().out)

    return run


def test_the_script_checks_then_times(bench, monkeypatch):
    order = []
    run_checks, seconds_of = bench_kernels.run_checks, bench_kernels.seconds_of
    monkeypatch.setattr(
        bench_kernels, "run_checks", lambda *args: (order.append(row["of"]) or row for row in run_checks(*args))
    )
    monkeypatch.setattr(bench_kernels, "seconds_of", lambda case: order.append(case.name) or seconds_of(case))
    status, found = bench("--only", "rows 1 int")
    assert status == 0
    checks = [row["of"] for row in found["checks"]]
    assert set(checks) == {"matmul int8", "matmul int4", "matmul int4 zeros"}
    names = [f"matmul qkv rows 1 {kind}" for kind in ("bfloat16", "int8", "int4", "int4 zeros")]
    assert order == [*checks, "copy", "matmul", *names]
    assert [row["case"] for row in found["rows"]] == names
    assert all(row["us"] > 0 and row["floor_us"] > 0 for row in found["rows"])
    assert [row.get("implementation") for row in found["rows"]] == [None, "xla", "xla", "xla"]


def test_what_is_wrong_is_not_timed_and_fails(bench, monkeypatch):
    def broken(*args, **options):
        raise RuntimeError("no launch")

    monkeypatch.setattr(matmul_by_xla, "quantized_matmul", broken)
    status, found = bench("--only", "rows 1 int8")
    assert status == 1
    assert found["checks"][0]["error"] == "RuntimeError: no launch"
    timed = {row["case"]: row for row in found["rows"]}
    assert "us" in timed["matmul qkv rows 1 bfloat16"]
    assert timed["matmul qkv rows 1 int8"]["error"] == "not timed: matmul int8, 1 rows is wrong"


def test_a_case_that_fails_while_it_is_timed_fails_the_script(bench, monkeypatch):
    seconds_of = bench_kernels.seconds_of
    fail = lambda case: seconds_of(case) if "int8" not in case.name else 1 / 0
    monkeypatch.setattr(bench_kernels, "seconds_of", fail)
    status, found = bench("--only", "rows 1 int8")
    assert (status, found["rows"][-1]["error"]) == (1, "ZeroDivisionError: division by zero")


def test_what_there_is_no_time_for_is_named(bench):
    status, found = bench("--only", "rows 1 int8", "--minutes", "0")
    assert status == 0
    assert [row.get("skipped") for row in found["rows"]] == ["no time left"] * 2
