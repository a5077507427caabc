"""What a stitched graph holds on to: nothing, once its results are dropped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.unit.fusion.patterns import layer_norm

pytest.importorskip("triton")
pytest.importorskip("torch")

import torch

from nostall.fusion.capture import inference_graph
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import stitch
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.errors import BadFusion
from nostall.fusion.fuse import stitch_module


@pytest.fixture(autouse=True)
def _without_a_collector() -> Iterator[None]:
    """Whatever is part of a cycle stays."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def none(schedule: Schedule) -> PlannedKernel:
    """No kernel: operators run in PyTorch, one by one."""
    raise BadFusion("no plan")


def dropped(run: Callable[[], Any]) -> bool:
    results = run()
    watched = [weakref.ref(result) for result in results]
    del results
    return bool(watched) and all(reference() is None for reference in watched)


def test_results_of_a_graph_go_when_the_program_drops_them() -> None:
    graph = layer_norm((4, 8), "float32")
    inputs = [torch.randn(graph[index].shape) for index in graph.inputs]
    whole = stitch(graph, choice=none)
    assert not whole.kernels
    assert dropped(lambda: whole(*inputs))


def test_results_of_a_module_go_when_the_program_drops_them() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return (torch.softmax(x, -1) * 2.0,)

    x = torch.randn(4, 8)
    module = stitch_module(inference_graph(Doubled(), x), choice=none)
    assert not module.kernels
    assert dropped(lambda: module(x))
