"""The kernels in Triton's interpreter against exact attention."""

from __future__ import annotations

import pytest

from tests.unit.fusion.codegen.interpreter_process import run_interpreted
from tests.unit.serving.attention.interpreted import CASES

MODULE = "tests.unit.serving.attention.interpreted"


def test_results_are_exact_to_fp32_rounding() -> None:
    errors = run_interpreted(MODULE, "float32")
    assert set(errors) == set(CASES)
    assert all(value < 2e-6 for value in errors.values()), errors


@pytest.mark.slow
def test_fp16_caches_and_queries() -> None:
    errors = run_interpreted(MODULE, "float16", "queue")
    assert errors["queue"] < 2e-3
