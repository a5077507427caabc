"""Optimiser steps: functions without torch.compile's backend leave lists of tensors to PyTorch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from benchmarks.fusion.optimizer_cases import CASES  # noqa: E402

from nostall.fusion.capture.left_to_pytorch import LISTS  # noqa: E402
from nostall.fusion.fuse import stitch_function  # noqa: E402


def test_a_step_on_lists_of_tensors_equals_that_of_eager_pytorch() -> None:
    case = CASES["AdamW"]

    def updated(wrap: Any) -> tuple[Any, Any]:
        changed, step = case.make(case.shapes(True), "cpu", False)
        wrapped = wrap(step)
        for _ in range(2):
            wrapped()
        return changed, wrapped

    expected, _ = updated(lambda step: step)
    actual, stitched = updated(stitch_function)
    for left, right in zip(actual, expected, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)
    assert {reason for reason, _ in stitched.unfused} == {LISTS}
