"""Tests of the references that kernel results are compared with."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.fusion import Builder  # noqa: E402
from tests.unit.fusion.codegen.accuracy import fp32_reference  # noqa: E402


def test_contraction_rounds_a_product_and_its_sum_once() -> None:
    """1125 * 0.001 is 1.125 in fp32, and slightly more before rounding."""
    build = Builder()
    x, count = build.input((1,)), build.input((1,))
    graph = build.graph(build("add", x, build("mul", count, build.constant(0.001))))
    inputs = [torch.tensor([-1.125]), torch.tensor([1125.0])]
    (separate,) = fp32_reference(graph, inputs, ())
    (contracted,) = fp32_reference(graph, inputs, (), contracted=True)
    assert separate.item() == 0.0
    assert 0.0 < contracted.item() < 1e-6
    # A product that is stored in memory is rounded first.
    product = graph.sources[graph.outputs[0]][1]
    (stored,) = fp32_reference(graph, inputs, {product}, contracted=True)
    assert stored.item() == 0.0
