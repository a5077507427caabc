"""Reductions hold the neutral element where there is no element of the row."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.expressions.reductions import make_reduction
from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytest.importorskip("triton")
pytest.importorskip("torch")


def test_lanes_without_an_element_change_no_reduction(tmp_path: Path) -> None:
    found = run_interpreted("tests.unit.fusion.codegen.interpreted.neutral_elements", tmp_path)
    assert {name: wrong for name, wrong in found["wrong"].items() if wrong} == {}
    assert len(found["wrong"]) == 23
    assert set(found["schemes"]) >= {"block", "looped", "warp"}


@pytest.mark.parametrize(
    ("op", "dtype", "partial", "neutral"),
    [
        ("sum", "float32", "float32", "0"),
        ("sum", "bfloat16", "float32", "0"),
        ("sum", "int64", "int64", "0"),
        ("prod", "float32", "float32", "1"),
        ("prod", "int32", "int32", "1"),
        ("amax", "float16", "float32", 'float("-inf")'),
        ("amax", "int64", "int64", "-9223372036854775808"),
        ("amax", "int32", "int32", "-2147483648"),
        ("amax", "int8", "int32", "-2147483648"),
        ("amin", "float32", "float32", 'float("inf")'),
        ("amin", "int64", "int64", "9223372036854775807"),
        ("amin", "uint8", "int32", "2147483647"),
        ("any", "bool", "int32", "0"),
        ("all", "bool", "int32", "1"),
    ],
)
def test_the_neutral_element_of_each_reduction(
    op: str, dtype: str, partial: str, neutral: str
) -> None:
    build = Builder()
    node = build.nodes[build(op, build.input((3, 5), dtype), dims=(1,), keepdim=False)]
    reduction = make_reduction(node)
    assert (reduction.dtype, reduction.neutral) == (partial, neutral)
