"""Operator curves: the fit finds what made the times, and a step uses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import BadHardware, BadInput
from nostall.workload import Architecture, Resource, load_hardware, step
from nostall.workload.hardware import OperatorCurve, fit_operator
from nostall.workload.jobs.operators import Operator, OperatorKind
from nostall.workload.model import sensitivities
from tests.unit.workload.job_records import ROUND, job

PEAKS = (1e14, 1e12)


def operators(kind: OperatorKind, count: int = 40) -> list[Operator]:
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        size = float(np.exp(rng.uniform(np.log(1e4), np.log(1e9))))
        flops = size * float(rng.uniform(1, 400)) if kind.computes else 0.0
        found.append(Operator(kind, "x", int(rng.integers(1, 4)), flops, size))
    return found


factors = st.sampled_from([0.0, 0.3, 1.0, 2.5])


@given(st.sampled_from([0.0, 3e-6]), factors, factors, st.sampled_from(OperatorKind))
def test_the_fit_finds_what_made_the_times(overhead, compute, memory, kind) -> None:
    if not (overhead or memory or (compute and kind.computes)):
        return
    truth = OperatorCurve(overhead, compute if kind.computes else 0.0, memory)
    some = operators(kind)
    found = fit_operator(some, [truth.seconds(o, *PEAKS) for o in some], *PEAKS)
    assert found.curve.overhead == pytest.approx(truth.overhead, abs=1e-12)
    assert found.curve.compute == pytest.approx(truth.compute, abs=1e-6)
    assert found.curve.memory == pytest.approx(truth.memory, abs=1e-6)
    assert found.worst_error < 1e-6


def test_factors_stay_physical_where_the_free_optimum_is_not() -> None:
    some = [Operator(OperatorKind.ELEMENTWISE, "x", 1, 0.0, s) for s in (1e6, 2e6, 4e6)]
    found = fit_operator(some, [1e-6, 4e-6, 16e-6], *PEAKS)  # grows faster than the bytes do
    assert found.curve.overhead == 0
    assert found.curve.memory > 0
    assert found.mean_error > 0.1


def test_too_little_to_fit() -> None:
    one = Operator(OperatorKind.PRODUCT, "x", 1, 1e9, 1e6)
    for some, seconds in (([], []), ([one, one], [1.0, 1.0]), ([one], [1.0, 2.0])):
        with pytest.raises(BadInput, match="two different operators"):
            fit_operator(some, seconds, *PEAKS)
    other = Operator(OperatorKind.PRODUCT, "x", 1, 2e9, 1e6)
    with pytest.raises(BadInput, match="not positive"):
        fit_operator([one, other], [1.0, 0.0], *PEAKS)


FITTED = """
name = "mine"
memory = "1 TB/s"
memory_size = "16 GiB"
pcie = "10 GB/s"
gpus_per_server = 4
[flops]
bf16 = "100 TFLOP/s"
[operators.product]
overhead = "2e-6 s"
compute = 1.25
[operators.elementwise]
memory = 2
"""


def test_a_step_with_operators_is_timed_one_by_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FITTED)
    hardware = load_hardware(str(path))
    made = job(
        Architecture.SINGLE,
        precision="bf16",
        operators=(
            Operator(OperatorKind.PRODUCT, "mm", 3, 8e12, 1e9),
            Operator(OperatorKind.ELEMENTWISE, "add", 5, 0.0, 1e9),
            Operator(OperatorKind.EMBEDDING, "lookup", 1, 0.0, 7e8),  # no curve: 70 % of the peak
        ),
    )
    found = step(made, hardware)
    assert found.compute == pytest.approx(6e-6 + 1.25 * 0.08)
    assert found.memory == pytest.approx(2e-3 + 1e-3)
    first = sensitivities(made, hardware)[0]
    assert first.resource is Resource.COMPUTE
    assert first.removable == pytest.approx(0.1 / found.total)  # the fixed cost stays
    # Hardware without curves knows the sums only.
    flat = step(job(Architecture.SINGLE, operators=made.operators), ROUND)
    assert flat == step(job(Architecture.SINGLE), ROUND)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("compute = 1.25", "compute = -1", "operators.product.compute"),
        ('overhead = "2e-6 s"\ncompute = 1.25', "", "not all 0"),
        ("[operators.product]", "[operators.sorting]", "operators.sorting"),
        ('"2e-6 s"', "2e-6", "unit"),
    ],
)
def test_impossible_curves_name_the_file(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FITTED.replace(old, new))
    with pytest.raises(BadHardware) as error:
        load_hardware(str(path))
    assert said in str(error.value) and "mine.toml" in str(error.value)
