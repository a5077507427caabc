"""What is made of measurements on a GPU: fits that find the truth, ncu's pages, small traces."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from subprocess import TimeoutExpired
from time import monotonic

import pytest
from benchmarks.harness.ncu import READ, TIME, WRITTEN, count, run_within, summed
from benchmarks.workload.fit import BASE, fitted_links, fitted_operators, judged, preset

from nostall.workload import Resource, load_hardware
from nostall.workload.hardware import Curve, OperatorCurve
from nostall.workload.jobs.operators import Operator, OperatorKind
from nostall.workload.modules import ModuleFeatures
from nostall.workload.traces.kineto import read_kineto
from tests.unit.workload.trace_events import event, kernel, launch, trace

HARDWARE = load_hardware(BASE)
TRUTH = {
    OperatorKind.PRODUCT: OperatorCurve(4e-6, 1.3, 0.5),
    OperatorKind.ELEMENTWISE: OperatorCurve(2e-6, 0.0, 1.2),
}
PCIE, NVLINK = Curve(0.8, 1e-5), Curve(0.6, 3e-5)
SIZES = [2.0**n for n in range(12, 30, 3)]


def seconds(kind: OperatorKind, calls: int, flops: float, size: float) -> float:
    peak = HARDWARE.rate(Resource.COMPUTE, "bf16")
    return TRUTH[kind].seconds(Operator(kind, "x", calls, flops, size), peak, HARDWARE.memory)


def measured() -> dict[str, object]:
    rows = [
        {"kind": kind.value, "case": "x", "calls": 1, "flops": flops, "bytes": size}
        | {"share_of_other_kinds": 0.0, "seconds": seconds(kind, 1, flops, size)}
        for kind in TRUTH
        for size in SIZES
        for flops in ((size * 50, size * 300) if kind.computes else (0.0,))
    ]
    rows.append({**rows[0], "share_of_other_kinds": 0.5, "seconds": 1.0})  # must not count
    copies = [{"bytes": s, "seconds": PCIE.seconds(s, HARDWARE.pcie)} for s in SIZES]
    reduced = [{"bytes": s, "seconds": NVLINK.seconds(s, HARDWARE.nvlink)} for s in SIZES]
    return {
        "operators": {"operators": rows, "copies_to_gpu": copies},
        "ranks": {"world": 2, "allreduce": reduced},
    }


def test_fits_become_a_preset_that_predicts_a_step(tmp_path: Path) -> None:
    found = measured()
    operators = fitted_operators(found["operators"]["operators"], HARDWARE)  # type: ignore[index]
    links = fitted_links(found, HARDWARE)
    assert operators[OperatorKind.PRODUCT].worst_error < 1e-6
    fitted = preset(
        (Path("src/nostall/workload/hardware/presets") / f"{BASE}.toml").read_text(),
        "mine",
        _with(operators, links),
        tuple(links),
        "made up",
    )
    path = tmp_path / "mine.toml"
    path.write_text(fitted)
    mine = load_hardware(str(path))
    assert mine.sources["operators"] == "made up, in bf16"
    assert mine.curve(Resource.NVLINK).share == pytest.approx(0.6, rel=1e-3)
    assert mine.operators[OperatorKind.PRODUCT].compute == pytest.approx(1.3, rel=1e-3)
    one = {
        "model": "m",
        "samples": 1,
        "seconds": [9.0, 1.0, 2.0],
        "described": asdict(described()),
        "measured": {"parts_seconds": parts(), "torch_device_seconds": 0.0},
    }
    counters = {"kinds": {"compute": {"bytes": 2e9, "seconds": 1.0}}}
    result = judged(one, HARDWARE, mine, counters)
    assert result["measured_ms"]["step"] == 2000
    assert result["fitted_error"]["compute"] == pytest.approx(0, abs=1e-3)
    assert result["fitted_error"]["memory"] == pytest.approx(0, abs=1e-3)
    assert result["fitted_error"]["data"] is None
    assert result["flat_error"]["compute"] > 0.05
    assert result["bytes_error"] == {"compute": -0.5, "memory": None}


def _with(operators, links):  # type: ignore[no-untyped-def]
    from dataclasses import replace

    return replace(
        HARDWARE,
        operators={k: f.curve for k, f in operators.items()},
        efficiency={r: f.curve for r, f in links.items()},
    )


OPERATORS = (
    Operator(OperatorKind.PRODUCT, "mm", 10, 5e12, 1e9),
    Operator(OperatorKind.ELEMENTWISE, "add", 100, 0.0, 4e9),
)


def described() -> ModuleFeatures:
    return ModuleFeatures(5e12, 1e9, 4e9, 1e6, 1e8, 0.0, 0.0, "bf16", OPERATORS)


def parts() -> dict[str, float]:
    product, add = (seconds(o.kind, o.calls, o.flops, o.size) for o in OPERATORS)
    return {"data": 0.0, "compute": product, "memory": add, "idle_launch": 0.5}


HEAD = f'"ID","Kernel Name","{READ}","{WRITTEN}","{TIME}"'
UNITS = '"","","byte","byte","ns"'


def test_counters_are_summed_by_kind() -> None:
    rows = [
        '"0","nvjet_hsh_128","1,000","24","2,000"',
        '"1","void at::native::vectorized_elementwise_kernel<4, ""x"">","500","500","1000"',
        '"2","nvjet_hsh_64","1000","0","500"',
    ]
    found = summed(["==PROF== Connected to process 7", HEAD, UNITS, *rows], "")["kinds"]
    assert found["compute"] == {"kernels": 2, "bytes": 2024, "seconds": pytest.approx(2.5e-6)}
    assert found["memory"]["bytes"] == 1000


def test_ncu_is_asked_and_ended_in_time(tmp_path: Path) -> None:
    """A program in ncu's place: what it was told, and that a limit ends it and its children."""
    fake = tmp_path / "ncu"
    page = "\n".join([HEAD, UNITS, '"0","nvjet_hsh_128","1,000","24","2,000"'])
    fake.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/told\ncat <<'E'\n{page}\nE\n")
    fake.chmod(0o755)
    found = count(str(fake), "bert", 20.0)
    assert (found["model"], found["exit_code"]) == ("bert", 0)
    assert found["kinds"]["compute"]["bytes"] == 1024
    told = (tmp_path / "told").read_text()
    assert "--clock-control none" in told and told.endswith("--model bert --counters\n")
    began = monotonic()
    with pytest.raises(TimeoutExpired):
        run_within(["sh", "-c", "sleep 30 & wait"], 0.2)
    assert monotonic() - began < 10


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["==ERROR== no permission"], "no permission"),
        ([HEAD, UNITS.replace("ns", "us")], "time_duration.sum in us"),
        (['"ID","Other"', '"0","1"'], "counted nothing"),
    ],
)
def test_counters_that_are_none_are_refused(lines: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        summed(lines, "")


def test_a_step_of_a_trace_is_cut_out_and_reads_like_the_whole(tmp_path: Path) -> None:
    profile = pytest.importorskip("benchmarks.workload.gpu_profile")
    events = [
        moved
        for step in range(3)
        for moved in (
            event("user_annotation", f"ProfilerStep#{step}", 1000 * step, 900),
            event("cpu_op", "aten::mm", 1000 * step + 1, 5, **{"External id": step, "Ev Idx": 1}),
            launch(1000 * step + 2, step),
            kernel("gemm", 1000 * step + 100 + step, 50, launch=step, **{"blocks per SM": 1}),
            {"ph": "s", "cat": "ac2g", "name": "ac2g", "ts": 1000 * step},
        )
    ]
    path = tmp_path / "small.json.gz"
    profile.write_step(trace(*events), path, {"rank": 1, "world_size": 2})
    found = read_kineto(path)
    assert (found.events, found.rank, found.world_size, found.gpu) == (4, 1, 2, "Test GPU")
    assert found.activities.correlation.tolist() == [1]
    assert found.steps.shape == (1, 2)
