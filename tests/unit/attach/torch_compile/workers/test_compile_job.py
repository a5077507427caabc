"""Compile jobs: description of inputs, and serialization."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("triton")
torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from nostall.attach.torch_compile.workers.compile_job import (  # noqa: E402
    CompileJob,
    describe_inputs,
)
from nostall.attach.torch_compile.workers.torch_state import (  # noqa: E402
    NotOffloadable,
    TorchState,
)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ([(x := torch.ones(8)), x.view(2, 4)], "share memory"),
        ([torch.ones(8)[1:]], "misaligned"),
        (["a string"], "an input is str"),
    ],
)
def test_inputs_that_layouts_do_not_describe_are_rejected(inputs: list[Any], message: str) -> None:
    with pytest.raises(NotOffloadable, match=message):
        describe_inputs(inputs)


def test_inputs_are_described_by_layouts_and_numbers() -> None:
    x = torch.ones(2, 3).t().requires_grad_()
    assert describe_inputs([x, 5]) == (((3, 2), (1, 3), torch.float32, x.device, True), 5)


def test_graphs_are_serialized_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch 2.13 registers a type for all threads meanwhile."""
    from torch.fx._graph_pickler import GraphPickler

    active, most = 0, 0
    original = GraphPickler.dumps

    def dumps(*args: Any) -> bytes:
        nonlocal active, most
        active += 1
        most = max(most, active)
        time.sleep(0.05)
        data: bytes = original(*args)
        active -= 1
        return data

    monkeypatch.setattr(GraphPickler, "dumps", dumps)
    job = CompileJob(torch.fx.symbolic_trace(nn.ReLU()), describe_inputs([torch.ones(3)]), {}, None)
    jobs = [replace(job, state=TorchState.capture()) for _ in range(4)]
    threads = [threading.Thread(target=job.serialize) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (active, most) == (0, 1)
