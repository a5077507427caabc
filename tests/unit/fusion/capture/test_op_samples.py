"""PyTorch's own samples of operators: their graphs beside PyTorch, their kernels beside graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.result_file import load, results

from tests.unit.fusion.codegen.process import in_the_interpreter

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytest.importorskip("expecttest", reason="PyTorch's samples are read by its own testing package")

from tests.unit.fusion.capture.op_samples import (  # noqa: E402
    REFERENCE,
    Sample,
    compared,
    samples,
    taken,
    unlike_pytorch,
)

PARTS, SLICES = 4, 24
"""One of so many parts of the operators has its graphs compared here, and its kernels interpreted;
all of them in ``benchmarks/fusion/correctness/opinfo.py``."""


def test_graphs_of_operators_mean_what_pytorch_does() -> None:
    known = load(results("fusion") / "opinfo_interpreted.json")["graphs"]
    told = compared(samples(known[::PARTS], REFERENCE, 1))
    assert told.wrong == []
    # Of a few operators only other samples than the first one are a graph.
    assert len(told.operators) >= 0.8 * len(known[::PARTS]) >= 40


def test_kernels_of_operators_are_right(tmp_path: Path) -> None:
    found = in_the_interpreter("tests.unit.fusion.capture.op_samples", tmp_path, 1, 7, SLICES)
    assert found["wrong"] == []
    assert found["seen"]["kernels"] >= 20


def sample(function: Any, *inputs: Any) -> Sample:
    return Sample("mine", str(inputs[0].dtype).removeprefix("torch."), function, inputs)


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
def test_numbers_beyond_an_integer_wrap_and_bytes_are_true_as_in_pytorch(
    function: Any, dtype: str
) -> None:
    x = torch.tensor([1, 5, 100, 0, 7]).to(getattr(torch, dtype))
    given = sample(function, x)
    found = taken(given)
    assert not isinstance(found, str)
    assert unlike_pytorch(given, found) == []


def test_what_cannot_be_gathered_stays_as_it_is() -> None:
    found = taken(sample(lambda x, at: x.gather(0, at).exp(), torch.rand(()), torch.tensor(0)))
    assert isinstance(found, str) and "gather" in found


def test_a_graph_that_means_something_else_is_seen() -> None:
    x = torch.rand(4, 6, dtype=torch.float64)
    right, other = sample(torch.exp, x), sample(torch.expm1, x)
    found = taken(right)
    assert not isinstance(found, str)
    assert unlike_pytorch(right, found) == []
    assert len(unlike_pytorch(other, found)) == 1
