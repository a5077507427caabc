"""The benchmark of gains on another GPU and with another ptxas, with a fake device."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from benchmarks.kernels.suite import build
from benchmarks.kernels.unseen import unseen_entries
from benchmarks.ptx.dependent_launch_cell import ChainPlan
from benchmarks.ptx.transfer import measure_transfer, run, summary_line

from nostall.ptx.schedule.state import PtxState
from tests.benchmarks.ptx.test_dependent_launch import open_fake

ABOUT = {"gpu": "NVIDIA H200", "driver_version": "580"}


@pytest.mark.slow
def test_the_recorded_state_is_built_again_with_each_ptxas() -> None:
    (entry,) = (entry for entry in unseen_entries() if entry.name == "stencil")
    source = build(entry, None)
    assert source.launch is not None
    state = PtxState(kernel_name="cutlass_stencil")
    winner = {
        "kernel": "stencil",
        "grid": source.launch.grid,
        "recipe": {"state": state.dump()},
        "deployed": 1.1,
        "gpu": ABOUT,
    }
    record = measure_transfer(entry, ChainPlan((), winner, 20, open_fake))
    assert record["deployed"]["verdict"] == "faster" and record["versions"]
    assert record["settings"]["kernel_name"] == "cutlass_stencil"
    assert "searched on NVIDIA H200 1.1000, here 1.25" in summary_line("stencil", record)


def test_a_kernel_without_its_build_is_a_failure_and_others_go_on(tmp_path: Path) -> None:
    winner = {
        "kernel": "stencil",
        "method": "assembler",
        "grid": (7, 7, 7),
        "recipe": {"state": PtxState().dump()},
        "deployed": 1.1,
        "gpu": ABOUT,
    }
    winners, baseline = tmp_path / "w.json", tmp_path / "b.json"
    winners.write_text(json.dumps({"records": [winner]}))
    baseline.write_text(json.dumps({"kernels": {}}))
    options = argparse.Namespace(
        budget_s=100.0, winners=[winners], baseline=baseline, out=tmp_path / "t.json",
        suite=["unseen"], kernels=["*"], no_versions=False,
    )  # fmt: skip
    done = run(options, open_device=open_fake)
    assert "does not make the build" in done["stencil"]["failure"]
    assert json.loads(options.out.read_text())["kernels"] == done
