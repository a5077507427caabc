"""Tests that stitched graphs and modules keep no references to their results."""

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
def _without_garbage_collector() -> Iterator[None]:
    """Disable garbage collection, so that reference cycles keep objects alive."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def no_kernel(schedule: Schedule) -> PlannedKernel:
    """A plan chooser without kernels: operators run in PyTorch, one by one."""
    raise BadFusion("no plan")


def are_results_freed(run: Callable[[], Any]) -> bool:
    """Whether all results of a call are freed when the caller drops them."""
    results = run()
    references = [weakref.ref(result) for result in results]
    del results
    return bool(references) and all(reference() is None for reference in references)


def test_graph_results_are_freed_with_their_last_reference() -> None:
    graph = layer_norm((4, 8), "float32")
    inputs = [torch.randn(graph[index].shape) for index in graph.inputs]
    stitched = stitch(graph, choice=no_kernel)
    assert not stitched.kernels
    assert are_results_freed(lambda: stitched(*inputs))


def test_module_results_are_freed_with_their_last_reference() -> None:
    class Doubled(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return (torch.softmax(x, -1) * 2.0,)

    x = torch.randn(4, 8)
    module = stitch_module(inference_graph(Doubled(), x), choice=no_kernel)
    assert not module.kernels
    assert are_results_freed(lambda: module(x))
