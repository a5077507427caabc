"""The plug-in's tables on the device, in Triton's interpreter."""

from __future__ import annotations

import pytest
from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytest.importorskip("torch", reason="the device builder needs PyTorch")


@pytest.mark.parametrize("stored", [pytest.param("float32", marks=pytest.mark.slow), "float8"])
def test_a_part_of_a_step_reads_its_prefixes_once_and_nothing_else_is_written(stored: str) -> None:
    found = run_interpreted("tests.unit.attach.vllm.interpreted_part", stored)
    assert found["error"] < 1e-5
    assert (found["shared"], found["is_left"]) == (1, True)
