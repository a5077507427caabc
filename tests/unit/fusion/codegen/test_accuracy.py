"""What results of kernels are held to."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from nostall.fusion import Builder  # noqa: E402
from tests.unit.fusion.codegen.accuracy import in_fp32  # noqa: E402


def test_a_product_and_a_sum_may_be_rounded_once() -> None:
    """1125 * 0.001 is 1.125 in fp32, and a little more before it is rounded."""
    build = Builder()
    x, count = build.input((1,)), build.input((1,))
    graph = build.graph(build("add", x, build("mul", count, build.constant(0.001))))
    given = [torch.tensor([-1.125]), torch.tensor([1125.0])]
    (twice,) = in_fp32(graph, given, ())
    (once,) = in_fp32(graph, given, (), contracted=True)
    assert twice.item() == 0.0
    assert 0.0 < once.item() < 1e-6
    # A product that stands in memory was rounded there.
    product = graph.sources[graph.outputs[0]][1]
    (apart,) = in_fp32(graph, given, {product}, contracted=True)
    assert apart.item() == 0.0
