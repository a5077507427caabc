"""Tests of explanations: what is refused, what that costs in bytes, and what would change it."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from nostall.fusion.capture import capture  # noqa: E402
from nostall.fusion.capture.left_to_pytorch import ATTENTION, LEFT, NO_RULE, OWN, reason  # noqa: E402
from nostall.fusion.capture.trace import decompositions  # noqa: E402
from nostall.fusion.explain import (  # noqa: E402
    _CHANGES,
    BETWEEN_KERNELS,
    Refusal,
    _bytes_between,
    explain_graph,
)
from nostall.fusion.graph.builder import Builder  # noqa: E402

ELEMENTS, FP32 = 32 * 64, 4


def captured(function: Any, *inputs: Any) -> Any:
    trace = make_fx(function, tracing_mode="fake", decomposition_table=decompositions())
    return capture(trace(*inputs))


def test_bytes_at_the_borders_of_a_refused_call_count_twice() -> None:
    """The operand is written and read for the scan only; so is its result."""
    graph = captured(lambda x: x.exp().cumsum(0) * 2, torch.rand(32, 64))
    explanation = explain_graph(graph)
    (refusal,) = explanation.refusals
    assert (explanation.regions, explanation.operators) == (2, 2)
    assert (refusal.operator, refusal.count) == ("aten.cumsum.default", 1)
    assert refusal.reason.startswith("scan")
    assert refusal.bytes == 4 * ELEMENTS * FP32
    assert "PyTorch's own kernel" in refusal.change


def test_values_that_are_needed_anyway_cost_less() -> None:
    """The exponential is a result, and the scan's result is not read by a kernel."""

    def function(x: Any) -> Any:
        y = x.exp()
        return y, y.cumsum(0)

    (refusal,) = explain_graph(captured(function, torch.rand(32, 64))).refusals
    assert refusal.bytes == ELEMENTS * FP32

    def read_again(x: Any) -> Any:
        y = x.exp()
        return y * 2, y.cumsum(0)

    (refusal,) = explain_graph(captured(read_again, torch.rand(32, 64))).refusals
    assert refusal.bytes == 0


def test_bytes_between_kernels_are_counted() -> None:
    graph = captured(lambda x: x.exp().softmax(-1) + 1, torch.rand(32, 64))
    operators = graph.graph.operators
    assert explain_graph(graph, [operators]).refusals == ()
    (refusal,) = explain_graph(graph, [operators[:1], operators[1:]]).refusals
    assert refusal.reason == BETWEEN_KERNELS
    assert refusal.bytes == 2 * ELEMENTS * FP32


def test_the_most_expensive_refusal_comes_first_and_lines_name_everything() -> None:
    def function(x: Any) -> Any:
        return (x.exp().sort(0).values * 2).sum(), x[:1].exp().cumsum(1).exp()

    lines = explain_graph(captured(function, torch.rand(32, 64))).lines()
    assert "regions with" in lines[0] and "cross their borders" in lines[0]
    assert "1 x aten.sort.default: sorting" in lines[1]
    assert "aten.cumsum.default" in lines[2]
    assert all("change: " in line for line in lines[1:])


@pytest.mark.parametrize(
    "known", [*sorted(set(LEFT.values())), ATTENTION, NO_RULE, OWN, *(r for r, _ in _CHANGES)]
)
def test_every_reason_says_what_would_have_to_change(known: str) -> None:
    assert Refusal(known, "aten.op.default", 1, 0).change != "see the reason"


def test_own_operators_are_not_to_be_reported() -> None:
    assert reason("nostall.linear_loss.default") == OWN
    assert "report" not in Refusal(OWN, "nostall.linear_loss.default", 1, 0).change


def test_a_value_that_each_kernel_computes_again_crosses_no_border() -> None:
    build = Builder()
    x = build.input((8, 16), "float16")
    wide = build("cast", x, dtype="float32")
    scale = build("sum", wide, dims=(1,), keepdim=True)
    result = build("mul", wide, scale)
    graph = build.graph(result)
    assert _bytes_between(graph, [(wide, scale), (wide, result)]) == 2 * graph[scale].bytes
    stored = 2 * (graph[scale].bytes + graph[wide].bytes)
    assert _bytes_between(graph, [(wide, scale), (result,)]) == stored


def test_regions_between_which_heads_are_views_count() -> None:
    def function(x: Any) -> Any:
        first, second = (x * 2).view(4, 8, 4, 16).chunk(2, -1)
        return first.exp() + second

    assert explain_graph(captured(function, torch.rand(32, 64))).regions == 2
