"""Work on a branch of a captured graph: which stream waits for which, on fake streams."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real

from nostall.gpu import capture_branch
from nostall.gpu.capture_branch import NON_BLOCKING, placement, run_on_branch

OK, BAD = real.CUresult.CUDA_SUCCESS, real.CUresult.CUDA_ERROR_INVALID_VALUE
MAIN = 7


@dataclass
class FakeGpu:
    """A fake of the driver, with PyTorch's current stream."""

    captures: dict[int, int] = field(default_factory=dict)
    """Capture id by stream."""
    events: list[str] = field(default_factory=list)
    created: list[int] = field(default_factory=list)
    """Streams created by the driver."""
    failing: str = ""
    """The call that fails: ``create``, ``info`` or none."""
    current: Any = None
    CUstreamCaptureStatus = real.CUstreamCaptureStatus

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert flags == NON_BLOCKING == int(real.CUstream_flags.CU_STREAM_NON_BLOCKING)
        if self.failing == "create":
            return BAD, None
        self.created.append(100 + len(self.created))
        return OK, self.created[-1]

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        if self.failing == "info":
            return BAD, None, None, None, None, None, None
        status = self.CUstreamCaptureStatus
        if stream not in self.captures:
            return OK, status.CU_STREAM_CAPTURE_STATUS_NONE, 0, None, None, None, 0
        active = status.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return OK, active, self.captures[stream], None, None, None, 0


class FakeStream:
    def __init__(self, gpu: FakeGpu, handle: int) -> None:
        self.gpu, self.cuda_stream, self.device = gpu, handle, torch.device("cuda", 0)

    def wait_stream(self, stream: FakeStream) -> None:
        self.gpu.events.append(f"{self.cuda_stream} waits for {stream.cuda_stream}")
        if stream.cuda_stream in self.gpu.captures:
            self.gpu.captures[self.cuda_stream] = self.gpu.captures[stream.cuda_stream]


class FakeTensor:
    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        gpu.events.append(f"created on {gpu.current.cuda_stream}")

    def record_stream(self, stream: FakeStream) -> None:
        self.gpu.events.append(f"recorded for {stream.cuda_stream}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    gpu = FakeGpu(captures={MAIN: 1})
    gpu.current = FakeStream(gpu, MAIN)

    @contextmanager
    def use_stream(stream: FakeStream) -> Any:
        before, gpu.current = gpu.current, stream
        yield
        gpu.current = before

    monkeypatch.setattr(capture_branch, "_branches", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: gpu.current)
    monkeypatch.setattr(torch.cuda, "stream", use_stream)
    monkeypatch.setattr(
        torch.cuda, "ExternalStream", lambda handle, device: FakeStream(gpu, handle)
    )
    monkeypatch.setattr(
        torch.cuda,
        "is_current_stream_capturing",
        lambda: gpu.current.cuda_stream in gpu.captures,
    )
    return gpu


def events_of_a_call(gpu: FakeGpu) -> list[str]:
    """Call :func:`run_on_branch` once and return what happened."""
    gpu.events.clear()
    run_on_branch(lambda: FakeTensor(gpu), gpu)  # type: ignore[arg-type,return-value]
    return list(gpu.events)


def test_only_the_first_call_of_a_capture_waits_for_the_main_stream(gpu: FakeGpu) -> None:
    end = ["created on 100", "7 waits for 100", "recorded for 7"]
    assert events_of_a_call(gpu) == ["100 waits for 7", *end]
    assert events_of_a_call(gpu) == end
    # The next capture.  When a capture ends, all of its streams leave it.
    gpu.captures = {MAIN: 2}
    assert events_of_a_call(gpu) == ["100 waits for 7", *end]
    assert gpu.created == [100]


def test_without_a_capture_work_stays_in_order(gpu: FakeGpu) -> None:
    gpu.captures.clear()
    assert events_of_a_call(gpu) == ["created on 7"]
    assert not gpu.created


def test_a_branch_in_another_capture_is_not_used(gpu: FakeGpu) -> None:
    events_of_a_call(gpu)
    gpu.captures[100] = 5
    assert events_of_a_call(gpu) == ["created on 7"]


@pytest.mark.parametrize("failing", ["create", "info"])
def test_work_stays_in_order_if_a_driver_call_fails(gpu: FakeGpu, failing: str) -> None:
    gpu.failing = failing
    assert events_of_a_call(gpu) == ["created on 7"]


def test_work_stays_in_order_without_the_driver_bindings(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(capture_branch, "_import_bindings", lambda: None)
    run_on_branch(lambda: FakeTensor(gpu))  # type: ignore[arg-type,return-value]
    assert gpu.events == ["created on 7"]


def test_each_main_stream_has_its_own_branch(gpu: FakeGpu) -> None:
    events_of_a_call(gpu)
    gpu.captures[8], gpu.current = 3, FakeStream(gpu, 8)
    assert events_of_a_call(gpu)[1] == "created on 101"


@pytest.mark.parametrize(
    ("main", "branch", "expected"),
    [(None, None, "in order"), (4, None, "fork"), (4, 4, "branch"), (4, 5, "in order")],
)
def test_placement_by_capture_ids(main: int | None, branch: int | None, expected: str) -> None:
    assert placement(main, branch) == expected
