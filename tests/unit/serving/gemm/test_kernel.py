"""The GEMM kernel in Triton's interpreter."""

from __future__ import annotations

from tests.unit.fusion.codegen.interpreter_process import run_interpreted


def test_products_of_odd_sizes_are_exact_to_fp16_rounding() -> None:
    errors = run_interpreted("tests.unit.serving.gemm.interpreted")
    assert len(errors) == 16
    assert {name: error for name, error in errors.items() if not error < 1e-3} == {}
