"""Tests of kernel names and node numbering: equal layers share their kernels."""

from __future__ import annotations

import pytest

from nostall.fusion import Builder, Graph
from nostall.fusion.codegen.emit.program import NodeNumbering, Program
from nostall.fusion.codegen.generate import generate
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore import explore

torch = pytest.importorskip("torch")


def stack(layers: int) -> list[Graph]:
    """The forward and backward graphs of several equal layers."""
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
        return [capture(each).graph for each in passes]


def programs(graph: Graph) -> list[Program]:
    return [generate(graph, kernel) for kernel in explore(DeltaEvaluator(graph)).connected.kernels]


def test_equal_layers_share_their_kernels() -> None:
    """The first and the last of three layers may have other kernels than the middle one."""
    forward, backward = ([p.source for p in programs(graph)] for graph in stack(3))
    assert (len(forward), len(set(forward))) == (6, 3)
    assert (len(backward), len(set(backward))) == (7, 5)


def test_kernel_names_do_not_depend_on_node_numbers() -> None:
    """Equal operators at other nodes of a graph, with inputs in another order."""
    build = Builder()
    x, row = build.input((64, 96)), build.input((96,))
    first = build("mul", build("exp", x), row)
    wall = build.opaque("matmul", first, shape=(64, 96), dtype="float32")
    second = build("mul", build("exp", wall), row)
    graph = build.graph(first, second)
    programs = [generate(graph, (last - 1, last)) for last in (first, second)]
    assert programs[0].source == programs[1].source
    assert programs[0].launches == programs[1].launches
    assert (programs[0].argument_names, programs[0].inputs, programs[1].inputs) == (
        ("p0", "p1", "p3"),
        (x, row),
        (wall, row),
    )
    assert programs[0].nodes_by_argument == {"p0": x, "p1": row, "p3": first}


def test_only_node_names_are_renumbered() -> None:
    names = NodeNumbering([7, 40])
    text = "v40_0 = x7at1 * 1e7 + tl.float8e5(a12) % 7 + count7  # %40 = exp(%12)"
    assert names.renumber(text) == (
        "v1_0 = x0at1 * 1e7 + tl.float8e5(a2) % 7 + count7  # %1 = exp(%2)"
    )
