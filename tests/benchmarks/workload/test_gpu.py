"""Processing of GPU measurements: fits of efficiencies, output of ncu, traces of one step."""

from __future__ import annotations

from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic

import pytest
from benchmarks.harness.ncu import READ, TIME, WRITTEN, count, run_within, sum_by_kind
from benchmarks.workload.feature_records import to_record
from benchmarks.workload.fit import (
    BASE,
    compare_step,
    fit_links,
    fit_operators,
    preset_text,
    with_fits,
)

from nostall.workload import Resource, load_hardware
from nostall.workload.hardware.description import EfficiencyCurve, OperatorTimeModel
from nostall.workload.jobs.record import Operator, OperatorKind
from nostall.workload.modules import ModuleFeatures
from nostall.workload.traces.kineto.reader import read_kineto
from tests.unit.workload.trace_events import event, kernel, launch, trace

HARDWARE = load_hardware(BASE)
TRUTH = {
    OperatorKind.PRODUCT: OperatorTimeModel(4e-6, 1.3, 0.5),
    OperatorKind.ELEMENTWISE: OperatorTimeModel(2e-6, 0.0, 1.2),
}
PCIE, NVLINK = EfficiencyCurve(0.8, 1e-5), EfficiencyCurve(0.6, 3e-5)
SIZES = [2.0**n for n in range(12, 30, 3)]


def exact_seconds(kind: OperatorKind, calls: int, flops: float, size: float) -> float:
    peak = HARDWARE.rate(Resource.COMPUTE, "bf16")
    return TRUTH[kind].seconds(Operator(kind, "x", calls, flops, size), peak, HARDWARE.memory)


def exact_measurements() -> dict[str, object]:
    rows = [
        {"kind": kind.value, "case": "x", "calls": 1, "flops": flops, "bytes": size}
        | {"share_of_other_kinds": 0.0, "seconds": exact_seconds(kind, 1, flops, size)}
        for kind in TRUTH
        for size in SIZES
        for flops in ((size * 50, size * 300) if kind.is_compute_bound else (0.0,))
    ]
    rows.append({**rows[0], "share_of_other_kinds": 0.5, "seconds": 1.0})  # must be ignored
    copies = [{"bytes": s, "seconds": PCIE.seconds(s, HARDWARE.pcie)} for s in SIZES]
    all_reduces = [{"bytes": s, "seconds": NVLINK.seconds(s, HARDWARE.nvlink)} for s in SIZES]
    return {
        "operators": {"operators": rows, "copies_to_gpu": copies},
        "ranks": {"world": 2, "allreduce": all_reduces},
    }


def test_a_preset_with_fitted_efficiencies_predicts_a_step(tmp_path: Path) -> None:
    measured = exact_measurements()
    operators = fit_operators(measured["operators"]["operators"], HARDWARE)  # type: ignore[index]
    links = fit_links(measured, HARDWARE)
    assert operators[OperatorKind.PRODUCT].worst_error < 1e-6
    text = preset_text(
        (Path("src/nostall/workload/hardware/presets") / f"{BASE}.toml").read_text(),
        "mine",
        with_fits(HARDWARE, operators, links),
        tuple(links),
        "test data",
    )
    path = tmp_path / "mine.toml"
    path.write_text(text)
    fitted = load_hardware(str(path))
    assert fitted.sources["operators"] == "test data, in bf16"
    assert fitted.curve(Resource.NVLINK).share == pytest.approx(0.6, rel=1e-3)
    assert fitted.operators[OperatorKind.PRODUCT].compute == pytest.approx(1.3, rel=1e-3)
    step = {
        "model": "m",
        "samples": 1,
        "seconds": [9.0, 1.0, 2.0],
        "described": to_record(FEATURES),
        "measured": {"parts_seconds": part_seconds(), "torch_device_seconds": 0.0},
    }
    counters = {"kinds": {"compute": {"bytes": 2e9, "seconds": 1.0}}}
    result = compare_step(step, HARDWARE, fitted, counters)
    assert result["measured_ms"]["step"] == 2000
    assert result["fitted_error"]["compute"] == pytest.approx(0, abs=1e-3)
    assert result["fitted_error"]["memory"] == pytest.approx(0, abs=1e-3)
    assert result["fitted_error"]["data"] is None
    assert result["flat_error"]["compute"] > 0.05
    assert result["bytes_error"] == {"compute": -0.5, "memory": None}


OPERATORS = (
    Operator(OperatorKind.PRODUCT, "mm", 10, 5e12, 1e9),
    Operator(OperatorKind.ELEMENTWISE, "add", 100, 0.0, 4e9),
)


FEATURES = ModuleFeatures(5e12, 1e9, 4e9, 1e6, 1e8, 0.0, 0.0, "bf16", OPERATORS)


def part_seconds() -> dict[str, float]:
    product, add = (exact_seconds(o.kind, o.calls, o.flops, o.bytes_moved) for o in OPERATORS)
    return {"data": 0.0, "compute": product, "memory": add, "idle_launch": 0.5}


HEAD = f'"ID","Kernel Name","{READ}","{WRITTEN}","{TIME}"'
UNITS = '"","","byte","byte","ns"'


def test_counters_are_summed_by_kind_of_work() -> None:
    rows = [
        '"0","nvjet_hsh_128","1,000","24","2,000"',
        '"1","void at::native::vectorized_elementwise_kernel<4, ""x"">","500","500","1000"',
        '"2","nvjet_hsh_64","1000","0","500"',
    ]
    kinds = sum_by_kind(["==PROF== Connected to process 7", HEAD, UNITS, *rows], "")["kinds"]
    assert kinds["compute"] == {"kernels": 2, "bytes": 2024, "seconds": pytest.approx(2.5e-6)}
    assert kinds["memory"]["bytes"] == 1000


def test_ncu_gets_its_options_and_is_killed_at_the_limit(tmp_path: Path) -> None:
    """A script replaces ncu and writes its arguments to a file."""
    fake = tmp_path / "ncu"
    page = "\n".join([HEAD, UNITS, '"0","nvjet_hsh_128","1,000","24","2,000"'])
    fake.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/arguments\ncat <<'E'\n{page}\nE\n")
    fake.chmod(0o755)
    counted = count(str(fake), "bert", 20.0)
    assert (counted["model"], counted["exit_code"]) == ("bert", 0)
    assert counted["kinds"]["compute"]["bytes"] == 1024
    arguments = (tmp_path / "arguments").read_text()
    assert "--clock-control none" in arguments
    assert arguments.endswith("--model bert --counters\n")
    start = monotonic()
    with pytest.raises(TimeoutExpired):
        run_within(["sh", "-c", "sleep 30 & wait"], 0.2)
    assert monotonic() - start < 10


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["==ERROR== no permission"], "no permission"),
        ([HEAD, UNITS.replace("ns", "us")], "time_duration.sum in us"),
        (['"ID","Other"', '"0","1"'], "counted nothing"),
    ],
)
def test_output_of_ncu_without_counters_is_rejected(lines: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sum_by_kind(lines, "")


def test_one_step_of_a_trace_is_written_as_a_trace_of_its_own(tmp_path: Path) -> None:
    profile = pytest.importorskip("benchmarks.workload.gpu_profile")
    events = [
        step_event
        for step in range(3)
        for step_event in (
            event("user_annotation", f"ProfilerStep#{step}", 1000 * step, 900),
            event("cpu_op", "aten::mm", 1000 * step + 1, 5, **{"External id": step, "Ev Idx": 1}),
            launch(1000 * step + 2, step),
            kernel("gemm", 1000 * step + 100 + step, 50, launch=step, **{"blocks per SM": 1}),
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1000 * step},
        )
    ]
    path = tmp_path / "small.json.gz"
    profile.write_step_trace(trace(*events), path, {"rank": 1, "world_size": 2})
    recording = read_kineto(path)
    assert (recording.events, recording.rank, recording.world_size, recording.gpu) == (
        4,
        1,
        2,
        "Test GPU",
    )
    assert recording.activities.correlation.tolist() == [1]
    assert recording.steps.shape == (1, 2)
