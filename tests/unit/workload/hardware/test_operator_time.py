"""Time models of operators: the fit recovers known factors, and a modelled step uses them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.workload.fit import fit_operator_time
from hypothesis import given
from hypothesis import strategies as st

from nostall.core import BadHardware, BadInput
from nostall.workload import Architecture, Resource, load_hardware, model_step
from nostall.workload.hardware.description import OperatorTimeModel
from nostall.workload.jobs.record import Operator, OperatorKind
from nostall.workload.model.population import removable_shares
from tests.unit.workload.job_records import TEST_HARDWARE, make_job

PEAKS = (1e14, 1e12)
"""FLOP/s and bytes/s."""


def random_operators(kind: OperatorKind, count: int = 40) -> list[Operator]:
    rng = np.random.default_rng(0)
    operators = []
    for _ in range(count):
        size = float(np.exp(rng.uniform(np.log(1e4), np.log(1e9))))
        flops = size * float(rng.uniform(1, 400)) if kind.is_compute_bound else 0.0
        operators.append(Operator(kind, "x", int(rng.integers(1, 4)), flops, size))
    return operators


factors = st.sampled_from([0.0, 0.3, 1.0, 2.5])


@given(st.sampled_from([0.0, 3e-6]), factors, factors, st.sampled_from(OperatorKind))
def test_the_fit_recovers_the_factors_of_exact_times(overhead, compute, memory, kind) -> None:
    if not (overhead or memory or (compute and kind.is_compute_bound)):
        return
    truth = OperatorTimeModel(overhead, compute if kind.is_compute_bound else 0.0, memory)
    operators = random_operators(kind)
    fit = fit_operator_time(operators, [truth.seconds(o, *PEAKS) for o in operators], *PEAKS)
    assert fit.time_model.overhead == pytest.approx(truth.overhead, abs=1e-12)
    assert fit.time_model.compute == pytest.approx(truth.compute, abs=1e-6)
    assert fit.time_model.memory == pytest.approx(truth.memory, abs=1e-6)
    assert fit.worst_error < 1e-6


def test_factors_stay_positive_if_the_unconstrained_optimum_is_not() -> None:
    operators = [Operator(OperatorKind.ELEMENTWISE, "x", 1, 0.0, s) for s in (1e6, 2e6, 4e6)]
    seconds = [1e-6, 4e-6, 16e-6]  # grow faster than the bytes
    fit = fit_operator_time(operators, seconds, *PEAKS)
    assert fit.time_model.overhead == 0
    assert fit.time_model.memory > 0
    assert fit.mean_error > 0.1


def test_too_few_or_impossible_measurements_cannot_be_fitted() -> None:
    small = Operator(OperatorKind.PRODUCT, "x", 1, 1e9, 1e6)
    for operators, seconds in (([], []), ([small, small], [1.0, 1.0]), ([small], [1.0, 2.0])):
        with pytest.raises(BadInput, match="two different operators"):
            fit_operator_time(operators, seconds, *PEAKS)
    large = Operator(OperatorKind.PRODUCT, "x", 1, 2e9, 1e6)
    with pytest.raises(BadInput, match="not positive"):
        fit_operator_time([small, large], [1.0, 0.0], *PEAKS)


FILE_WITH_OPERATORS = """
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


def test_each_operator_of_a_step_is_modelled(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE_WITH_OPERATORS)
    hardware = load_hardware(str(path))
    job = make_job(
        Architecture.SINGLE,
        precision="bf16",
        operators=(
            Operator(OperatorKind.PRODUCT, "mm", 3, 8e12, 1e9),
            Operator(OperatorKind.ELEMENTWISE, "add", 5, 0.0, 1e9),
            # Embeddings have no time model: 70 % of the peak.
            Operator(OperatorKind.EMBEDDING, "lookup", 1, 0.0, 7e8),
        ),
    )
    step = model_step(job, hardware)
    assert step.compute == pytest.approx(6e-6 + 1.25 * 0.08)
    assert step.memory == pytest.approx(2e-3 + 1e-3)
    resource, share = next(iter(removable_shares(job, hardware).items()))
    assert resource is Resource.COMPUTE
    assert share == pytest.approx(0.1 / step.total)  # overheads remain
    # Hardware without time models uses the sums of the job.
    flat_step = model_step(make_job(Architecture.SINGLE, operators=job.operators), TEST_HARDWARE)
    assert flat_step == model_step(make_job(Architecture.SINGLE), TEST_HARDWARE)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("compute = 1.25", "compute = -1", "operators.product.compute"),
        ('overhead = "2e-6 s"\ncompute = 1.25', "", "not all 0"),
        ("[operators.product]", "[operators.sorting]", "operators.sorting"),
        ('"2e-6 s"', "2e-6", "unit"),
    ],
)
def test_the_error_for_impossible_factors_names_the_file(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE_WITH_OPERATORS.replace(old, new))
    with pytest.raises(BadHardware) as error:
        load_hardware(str(path))
    assert message in str(error.value) and "mine.toml" in str(error.value)
