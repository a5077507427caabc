"""A graph with fake versions and recorded times, for tests of the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from nostall.attach.torch_compile.measure.graph_comparison import GraphClocks  # noqa: E402
from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.rewrite.kernel_selection import RewriteResult  # noqa: E402
from nostall.attach.torch_compile.runtime.custom_op import record_call  # noqa: E402
from nostall.attach.torch_compile.selection.dispatcher import (  # noqa: E402
    GraphDispatcher,
    SelectionContext,
)
from nostall.attach.torch_compile.selection.graph_state import GraphState  # noqa: E402
from nostall.attach.torch_compile.selection.versions import Candidate  # noqa: E402
from nostall.attach.torch_compile.store.kernel_store import KernelStore  # noqa: E402
from nostall.attach.torch_compile.store.records import RegionRecord, SelectionRecord  # noqa: E402
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks  # noqa: E402
from nostall.gpu.clock import RecordedClock  # noqa: E402

FASTER = RecordedClock({"*": [[2.0] * 12, [1.0] * 12, [2.0] * 12]})
SAME = RecordedClock({"*": [[1.0] * 12, [1.0] * 12, [1.0] * 12]})
SLOWER = RecordedClock({"*": [[1.0] * 12, [2.0] * 12, [1.0] * 12]})
GRAPH = "a" * 64
REGION = RegionRecord(steps=(), not_fused={"too wide": 1})


class Versions:
    """A baseline and a candidate that record which of them ran."""

    def __init__(self, relative_error: float = 0.0) -> None:
        self.ran: list[str] = []
        self.relative_error = relative_error

    def baseline(self, x: Tensor) -> tuple[Tensor]:
        self.ran.append("baseline")
        return (x.exp(),)

    def candidate(self, x: Tensor) -> tuple[Tensor]:
        self.ran.append("candidate")
        record_call("kernel")
        return (x.exp() * (1 + self.relative_error),)


def dispatch(
    versions: Versions,
    clock: Any = FASTER,
    build: Callable[[Any, Any], Candidate] | None = None,
    tasks: BackgroundTasks | None = None,
) -> GraphDispatcher:
    def build_candidate(args: Any, selection: Any) -> Candidate:
        return Candidate(versions.candidate, RewriteResult(["kernel"]))

    store, tasks = KernelStore(), tasks or BackgroundTasks()
    context = SelectionContext(GRAPH, store, GraphClocks(clock, 0.1), tasks, {})
    state = GraphState(GraphReport(GRAPH))
    return GraphDispatcher(versions.baseline, build or build_candidate, context, state)


def call(graph: GraphDispatcher, versions: Versions, count: int) -> list[str]:
    """The version that each of some calls ran; comparisons before it do not count."""
    ran = []
    for _ in range(count):
        graph(torch.ones(3))
        ran.append(versions.ran[-1])
    return ran


def stored() -> SelectionRecord | None:
    return KernelStore().load(SelectionRecord, GRAPH)
