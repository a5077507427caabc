"""Tests of hoisting slices above elementwise calls."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("torch")

import torch
from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.stitched import chain_graph
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.node import map_arg

from nostall.fusion.capture import capture, inference_graph
from nostall.fusion.capture.slicing import hoist_slices
from nostall.fusion.codegen.generate import grow_partition


class _Module(nn.Module):
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> object:
        return self.function(*inputs)


def traced(function: Callable[..., object], *inputs: Tensor) -> GraphModule:
    return inference_graph(_Module(function), *inputs)


def gates(x: Tensor, y: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    a, b, c = (torch.sigmoid(x * 2 + y) - bias).chunk(3, -1)
    return a * b, torch.tanh(c)


def overlapping(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    both = torch.where(x > 0, x + y, bias)
    return both[:, 1:5] * both[:, 2:6] + both[:, 8:].exp()[:, :4]


def row_wise(x: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    column = y[:, :1]
    return torch.add(x, column, alpha=3).split([1, 3], 0)[1] * bias


@pytest.mark.parametrize("function", [gates, overlapping, row_wise])
def test_slices_are_hoisted_and_results_stay_the_same(
    function: Callable[..., object],
) -> None:
    inputs = torch.randn(4, 12), torch.randn(4, 12), torch.randn(12)
    module = traced(function, *inputs)
    original = str(module.graph)
    hoisted = hoist_slices(module)
    hoisted.graph.lint()
    assert hoisted is not module and str(module.graph) == original
    elementwise = [
        n for n in hoisted.graph.nodes if torch.Tag.pointwise in getattr(n.target, "tags", ())
    ]
    read = {n.target for e in elementwise for n in e.all_input_nodes if n.op == "call_function"}
    assert torch.ops.aten.split.Tensor not in read
    for expected, result in zip(module(*inputs), hoisted(*inputs), strict=True):
        # PyTorch's CPU code rounds the ends of rows differently, by one bit.
        torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-7)
    for node in hoisted.graph.nodes:
        if node.op == "call_function" and isinstance(node.meta["val"], Tensor):
            args, kwargs = map_arg((node.args, node.kwargs), lambda operand: operand.meta["val"])
            assert node.meta["val"].shape == node.target(*args, **kwargs).shape


def whole_is_read(x: Tensor) -> Tensor:
    both = x + 1
    return both[:, :6] * both[:, 6:] + both.sum()


def slice_is_returned(x: Tensor) -> tuple[Tensor, Tensor]:
    a, b = (x + 1).chunk(2, -1)
    return a, b * 2


def steps(x: Tensor) -> Tensor:
    both = x + 1
    return both[:, ::2] * both[:, 1::2]


def random(x: Tensor) -> Tensor:
    a, b = torch.rand_like(x).chunk(2, -1)
    return a * b


@pytest.mark.parametrize("function", [whole_is_read, slice_is_returned, steps, random])
def test_other_modules_are_returned_unchanged(function: Callable[..., object]) -> None:
    module = traced(function, torch.randn(4, 12))
    assert hoist_slices(module) is module


def test_recurrent_cell_becomes_one_kernel() -> None:
    graph = chain_graph(CHAINS["LSTM cell 8192x1024"])
    assert len(grow_partition(graph)) == 1
    captured = capture(hoist_slices(traced(gates, *[torch.randn(4, 12)] * 2, torch.randn(12))))
    assert not captured.report.unsupported
