"""The benchmark of dependent launches, with a device that measures nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kernels.unseen import unseen_entries
from benchmarks.ptx.dependent_launch import ChainFile, means, read_winners, summary_line
from benchmarks.ptx.dependent_launch_cell import (
    MODES,
    ChainPlan,
    measure_chain,
    prepare_chain,
    with_first_statement,
)

from nostall.gpu import Device, Kernel, MeasurementPlan, Outcome
from nostall.gpu.device import Timing

ROOT = Path(__file__).resolve().parents[3]


class FakeDevice:
    """Every candidate takes 8 us, and the original 10; a missing wait is noticed."""

    info: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, kernel: Kernel, plan: MeasurementPlan) -> None:
        self.kernel, self.plan = kernel, plan

    def evaluate(self, cubin: bytes) -> Outcome:
        if self.plan.dependent_launch and cubin == self.kernel.cubin:
            return Outcome("wrong")
        return Outcome("timed", Timing((10e-6,) * 5, (8e-6,) * 5))

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        original, candidate, null = (
            tuple(us * 1e-6 * (1 + 1e-4 * (n % 3)) for n in range(rounds)) for us in (10, 8, 10)
        )
        return Outcome("timed", Timing(original, candidate, null))


@contextmanager
def open_fake(kernel: Kernel, plan: MeasurementPlan) -> Iterator[Device]:
    yield FakeDevice(kernel, plan)


@pytest.mark.slow
def test_a_record_compares_all_waits_with_the_same_chain(tmp_path: Path) -> None:
    (entry,) = (entry for entry in unseen_entries() if entry.name == "stencil")
    plan = ChainPlan((), None, 20, open_fake)
    ready = prepare_chain(entry, plan)
    assert [v.label for v in ready.variants["compiler"]] == list(MODES)
    assert ready.notes == ["not a Triton kernel"]
    record = measure_chain(ready, plan)
    assert record["missing_wait"] == "wrong"
    assert record["figures"]["wait"]["ratio"] == pytest.approx(1.25, rel=1e-3)
    assert record["figures"]["best"] == record["figures"]["wait"]
    assert "order" not in record["figures"]
    assert record["screened"]["compiler"] == dict.fromkeys(MODES, 1.25)
    assert "wait 1.25" in summary_line(record)
    assert means([record]) == []
    path = tmp_path / "chains.json"
    results = ChainFile.open(path)
    results.records.append(record)
    results.save()
    assert ChainFile.open(path).records[0]["kernel"] == "stencil"


def test_means_are_over_kernels_with_all_figures() -> None:
    def record(ratio: float) -> dict[str, Any]:
        figure = {"ratio": ratio, "verdict": "faster"}
        return {"figures": dict.fromkeys(("order", "wait", "best", "triton"), figure)}

    (line,) = means([record(1.21), record(1.0), {"figures": {"wait": None}}])
    assert "over 2 kernels" in line
    assert "best 1.1000" in line


def test_the_best_record_of_each_kernel_gives_the_order() -> None:
    winners = read_winners(ROOT / "benchmarks/ptx/results/assembler_suite.json")
    assert winners["gemm_leakyrelu-512x512x2048@mma"]["deployed"] > 1
    assert read_winners(None) == {}


def test_a_statement_is_inserted_at_the_start_of_a_function() -> None:
    source = 'def f(x):\n    """Text."""\n    return x\n\n\ndef g(x):\n    return x\n'
    changed = with_first_statement(source, "f", "wait()")
    assert changed == source.replace('."""\n', '."""\n    wait()\n')
    assert with_first_statement(source, "g", "wait()").endswith("(x):\n    wait()\n    return x\n")
