"""Tests on PyTorch's operator samples: graphs equal PyTorch, kernels equal graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.result_file import load, results

from tests.unit.fusion.codegen.interpreter_process import run_interpreted

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("expecttest", reason="PyTorch's package of operator samples imports it")

from tests.unit.fusion.capture.op_samples import (  # noqa: E402
    REFERENCE,
    Sample,
    capture_sample,
    check_graphs,
    graph_errors,
    samples,
)

pytestmark = pytest.mark.slow

PARTS, SLICES = 8, 24
"""These tests check the graphs of each 8th and the kernels of each 24th operator; all operators are
checked by ``benchmarks/fusion/correctness/opinfo.py``."""


def test_graphs_of_operators_equal_pytorch() -> None:
    known = load(results("fusion") / "opinfo_interpreted.json")["graphs"]
    summary = check_graphs(samples(known[::PARTS], REFERENCE, 1))
    assert summary.errors == []
    # The first sample of a few operators cannot be captured.
    assert len(summary.operators) >= 0.8 * len(known[::PARTS]) >= 20


def test_kernels_of_operators_equal_their_graphs(tmp_path: Path) -> None:
    result = run_interpreted("tests.unit.fusion.capture.op_samples", tmp_path, 1, 7, SLICES)
    assert result["wrong"] == []
    assert result["seen"]["kernels"] >= 20


def sample(function: Any, *inputs: Any) -> Sample:
    return Sample("test", str(inputs[0].dtype).removeprefix("torch."), function, inputs)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32"])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.add(x, x, alpha=-1),
        lambda x: x * -1,
        lambda x: x > -1,
        lambda x: x.clamp(-3, 7),
        lambda x: torch.where(x > 2, x, -1),
        lambda x: x % -3,
        lambda x: x + 300,
        lambda x: x & 300,
        lambda x: x.any(),
        lambda x: x[1].any(),
        lambda x: x[:3].all(),
        lambda x: x.view(5, 1).any(1, keepdim=True),
        lambda x: x.exp() + x.sigmoid(),
    ],
)
def test_integer_constants_wrap_and_any_and_all_work_as_in_pytorch(
    function: Any, dtype: str
) -> None:
    x = torch.tensor([1, 5, 100, 0, 7]).to(getattr(torch, dtype))
    integers = sample(function, x)
    captured = capture_sample(integers)
    assert not isinstance(captured, str)
    assert graph_errors(integers, captured) == []


def test_gather_from_a_scalar_is_opaque() -> None:
    scalar = sample(lambda x, at: x.gather(0, at).exp(), torch.rand(()), torch.tensor(0))
    reason = capture_sample(scalar)
    assert isinstance(reason, str) and "gather" in reason


def test_check_detects_a_wrong_graph() -> None:
    x = torch.rand(4, 6, dtype=torch.float64)
    exp, expm1 = sample(torch.exp, x), sample(torch.expm1, x)
    captured = capture_sample(exp)
    assert not isinstance(captured, str)
    assert graph_errors(exp, captured) == []
    assert len(graph_errors(expm1, captured)) == 1
