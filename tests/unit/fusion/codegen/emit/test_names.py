"""Kernels are named by what they compute: layers that are equal share theirs."""

from __future__ import annotations

import pytest

from nostall.fusion import Builder, Graph
from nostall.fusion.codegen.emit.program import NodeNumbering, Program
from nostall.fusion.codegen.generate import generate
from nostall.fusion.evaluate import DeltaEvaluator
from nostall.fusion.explore import explore

torch = pytest.importorskip("torch")


def stack(layers: int) -> list[Graph]:
    """Forward and backward pass of a few equal layers."""
    from torch._subclasses import FakeTensorMode

    from nostall.fusion.capture import capture, training_graphs

    class Layer(torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.back = torch.nn.Linear(96, 256), torch.nn.Linear(256, 96)
            self.norm = torch.nn.LayerNorm(96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[name-defined]
            return self.norm(x + self.back(torch.nn.functional.gelu(self.wide(x))))

    with FakeTensorMode():
        module = torch.nn.Sequential(*(Layer() for _ in range(layers)))
        passes = training_graphs(module, torch.randn(64, 96, requires_grad=True))
        return [capture(one).graph for one in passes]


def programs(graph: Graph) -> list[Program]:
    return [generate(graph, kernel) for kernel in explore(DeltaEvaluator(graph)).connected.kernels]


def test_equal_layers_share_their_kernels() -> None:
    """Of three layers the first and the last may differ from the one between."""
    forward, backward = ([p.source for p in programs(graph)] for graph in stack(3))
    assert (len(forward), len(set(forward))) == (6, 3)
    assert (len(backward), len(set(backward))) == (7, 5)


def test_where_inputs_come_from_names_no_kernel() -> None:
    """The same operators on inputs in another order, behind other nodes."""
    build = Builder()
    x, row = build.input((64, 96)), build.input((96,))
    first = build("mul", build("exp", x), row)
    wall = build.opaque("matmul", first, shape=(64, 96), dtype="float32")
    second = build("mul", build("exp", wall), row)
    graph = build.graph(first, second)
    one, other = (generate(graph, (last - 1, last)) for last in (first, second))
    assert one.source == other.source and one.launches == other.launches
    assert (one.argument_names, one.inputs, other.inputs) == (
        ("p0", "p1", "p3"),
        (x, row),
        (wall, row),
    )
    assert one.nodes_by_argument == {"p0": x, "p1": row, "p3": first}


def test_only_what_names_a_node_is_renumbered() -> None:
    names = NodeNumbering([7, 40])
    text = "v40_0 = x7at1 * 1e7 + tl.float8e5(a12) % 7 + count7  # %40 = exp(%12)"
    assert names.renumber(text) == (
        "v1_0 = x0at1 * 1e7 + tl.float8e5(a2) % 7 + count7  # %1 = exp(%2)"
    )
