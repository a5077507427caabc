"""Graphs that a worker finds because PyTorch's caches have their code: failures end nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from nostall.attach.torch_compile.report import GraphReport  # noqa: E402
from nostall.attach.torch_compile.selection import precompile  # noqa: E402
from nostall.attach.torch_compile.selection.graph_state import GraphState  # noqa: E402
from nostall.attach.torch_compile.selection.precompile import Precompiler  # noqa: E402
from nostall.attach.torch_compile.workers.tasks import BackgroundTasks  # noqa: E402
from nostall.attach.torch_compile.workers.worker import JobResult  # noqa: E402


def test_a_graph_that_no_worker_can_observe_is_reported_and_raises_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module: Any = None
    precompiler = Precompiler(BackgroundTasks(), GraphState(GraphReport()))
    sparse = torch.eye(4).to_sparse()
    assert precompiler.observation(module, [sparse], {}) is None
    assert "SparseTensorImpl" in precompiler._report.local_only_reason

    jobs = list[str]()

    def run(job: Any) -> JobResult[Any]:
        jobs.append(type(job).__name__)
        return JobResult("no luck")

    worker = SimpleNamespace(run=run, attach_gpu=lambda: None)
    monkeypatch.setattr(precompile, "FIRST_INDUCTOR_WORKER", worker)
    find = precompiler.observation(module, [], {})
    assert find is not None and find() == []
    assert precompiler._report.local_only_reason == "no luck"
    precompiler._graphs(JobResult("stopped"))
    precompiler._state.decide("inductor", "asked for")
    assert precompiler._graphs(JobResult("killed")) == []
    assert find() == [] and jobs == ["ObserveJob"]
    assert precompiler._report.local_only_reason == "stopped" and not caplog.text
