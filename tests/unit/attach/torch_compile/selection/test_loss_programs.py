"""Chunked losses from the measurement to the stored selection: by time, and by peak memory."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.attach.torch_compile.measure.graph_comparison import judge
from nostall.attach.torch_compile.store.records import ComparisonRecord
from tests.unit.fusion.codegen.interpreter_process import run_interpreted

REASONS = {
    "faster": "faster as a whole",
    "less memory": "less peak memory, and not slower beyond the noise",
    "too slow": "faster as a whole (all kernels 0.800x, then all kernels, logits kept 1.100x)",
    "fewer chunks": (
        "less peak memory, and not slower beyond the noise (all kernels 0.980x, then all kernels, "
        "fewer chunks 1.000x)"
    ),
    "slow with fewer chunks": (
        "no gain beyond the noise (all kernels 0.980x, then all kernels, fewer chunks 0.990x, then "
        "all kernels, logits kept 1.000x)"
    ),
    "more memory": (
        "no gain beyond the noise (all kernels 1.200x, then all kernels, logits kept 1.000x)"
    ),
}
CHUNKED = {"faster": 8, "less memory": 8, "fewer chunks": 4}
KEPT = ("more memory", "slow with fewer chunks")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Any:
    module = "tests.unit.attach.torch_compile.selection.loss_programs"
    return run_interpreted(module, tmp_path_factory.mktemp("stores"))


@pytest.mark.slow
@pytest.mark.parametrize("case", REASONS)
def test_time_and_memory_decide_whether_a_loss_has_logits(outcomes: Any, case: str) -> None:
    for run in outcomes[case].values():
        assert run["reason"] == REASONS[case]
        assert run["state"] == ("inductor" if case in KEPT else "stitched")
        assert bool(run["loss"]) == (case in CHUNKED)
        assert run["chunks"] == CHUNKED.get(case, 0)
        assert run["difference"] < 1e-6


@pytest.mark.slow
def test_the_report_names_the_peak_memory(outcomes: Any) -> None:
    for run in outcomes["less memory"].values():
        assert run["explanation"] == (
            "  peak memory of a step: candidate 0.050 GB, Inductor's version 0.100 GB, "
            "beside inputs of 0.000 GB"
        )


def record(
    ratio: float, inductor: int | None, stitched: int | None, inputs: int = 0
) -> ComparisonRecord:
    low, high = (1.0, 1.0) if ratio == 1.0 else (ratio, ratio)
    return ComparisonRecord(
        kind="measured", clock="recorded", inductor=(), stitched=(), null=(), ratio=ratio, low=low,
        high=high, null_low=1.0, null_high=1.0, difference=0.0, inductor_bytes=inductor,
        stitched_bytes=stitched, input_bytes=inputs,
    )  # fmt: skip


MB = 1_000_000


@pytest.mark.parametrize(
    ("ratio", "inductor", "stitched", "verdict"),
    [
        (1.2, None, None, "faster"),
        (1.2, 1000 * MB, 1019 * MB, "faster"),
        (1.2, 1000 * MB, 1022 * MB, "more memory"),
        # Less than a MB is the rounding of allocations.
        (1.2, 1 * MB, 2 * MB, "faster"),
        (1.0, 1000 * MB, 940 * MB, "less memory"),
        (1.0, 1000 * MB, 960 * MB, "same"),
        (0.98, 1000 * MB, 500 * MB, "slower"),
        (0.98, None, None, "slower"),
    ],
)
def test_verdicts(ratio: float, inductor: int | None, stitched: int | None, verdict: str) -> None:
    assert judge(record(ratio, inductor, stitched)) == verdict


@pytest.mark.parametrize(
    ("ratio", "stitched", "inputs", "verdict"),
    [
        # 3 % more than Inductor's version allocates, 1 % more of what the step has in memory.
        (1.2, 1030 * MB, 2000 * MB, "faster"),
        (1.2, 1062 * MB, 2000 * MB, "more memory"),
        # What a step saves is compared with what it allocates.
        (1.0, 940 * MB, 2000 * MB, "less memory"),
    ],
)
def test_inputs_belong_to_the_peak_memory_of_a_step(
    ratio: float, stitched: int, inputs: int, verdict: str
) -> None:
    assert judge(record(ratio, 1000 * MB, stitched, inputs)) == verdict
