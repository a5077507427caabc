"""The kernels in Triton's interpreter against exact attention."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.unit.fusion.codegen.interpreter_process import run_interpreted
from tests.unit.serving.attention.interpreted import CASES

MODULE = "tests.unit.serving.attention.interpreted"


LONG = (
    "many splits", "long decodes", "shared prefixes", "shared prefixes, trees, odd group",
    "decodes with nested prefixes",
)  # fmt: skip
"""Cases of thousands of keys, or of a combination, which take longer than all others together.

Nested prefixes stay, and decodes with them in fp8.
"""


def check_fp32_rounding(names: Collection[str], dtype: str = "float32") -> None:
    errors = run_interpreted(MODULE, dtype, *names)
    assert set(errors) == set(names)
    assert all(value < 2e-6 for value in errors.values()), errors


def test_results_are_exact_to_fp32_rounding() -> None:
    check_fp32_rounding(CASES.keys() - set(LONG))


@pytest.mark.slow
def test_results_of_long_sequences_are_exact_to_fp32_rounding() -> None:
    check_fp32_rounding(LONG)


def test_fp8_caches_and_queries_have_scales() -> None:
    check_fp32_rounding(
        ("queue", "odd group, padded heads, soft cap", "decodes with nested prefixes"), "float8"
    )


@pytest.mark.slow
def test_fp16_caches_and_queries() -> None:
    errors = run_interpreted(MODULE, "float16", "queue")
    assert errors["queue"] < 2e-3
