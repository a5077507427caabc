"""A branch of a captured graph: who waits for whom, told by pretended streams."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from cuda.bindings import driver as real

from nostall.gpu import branch
from nostall.gpu.branch import NON_BLOCKING, beside, way_of

OK, BAD = real.CUresult.CUDA_SUCCESS, real.CUresult.CUDA_ERROR_INVALID_VALUE
MAIN = 7


@dataclass
class Pretended:
    """PyTorch's current stream and the driver; ``told`` is what happened, in order."""

    captures: dict[int, int] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)
    made: list[int] = field(default_factory=list)
    failing: str = ""
    current: Any = None
    CUstreamCaptureStatus = real.CUstreamCaptureStatus

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:  # noqa: N802
        assert flags == NON_BLOCKING == int(real.CUstream_flags.CU_STREAM_NON_BLOCKING)
        if self.failing == "create":
            return BAD, None
        self.made.append(100 + len(self.made))
        return OK, self.made[-1]

    def cuStreamGetCaptureInfo(self, stream: int) -> tuple[Any, ...]:  # noqa: N802
        if self.failing == "info":
            return BAD, None, None, None, None, None, None
        status = self.CUstreamCaptureStatus
        if stream not in self.captures:
            return OK, status.CU_STREAM_CAPTURE_STATUS_NONE, 0, None, None, None, 0
        active = status.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return OK, active, self.captures[stream], None, None, None, 0


class Stream:
    def __init__(self, gpu: Pretended, handle: int) -> None:
        self.gpu, self.cuda_stream, self.device = gpu, handle, torch.device("cuda", 0)

    def wait_stream(self, other: Stream) -> None:
        self.gpu.told.append(f"{self.cuda_stream} waits for {other.cuda_stream}")
        if other.cuda_stream in self.gpu.captures:
            self.gpu.captures[self.cuda_stream] = self.gpu.captures[other.cuda_stream]


class Made:
    def __init__(self, gpu: Pretended) -> None:
        self.gpu = gpu
        gpu.told.append(f"made on {gpu.current.cuda_stream}")

    def record_stream(self, stream: Stream) -> None:
        self.gpu.told.append(f"kept for {stream.cuda_stream}")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    found = Pretended(captures={MAIN: 1})
    found.current = Stream(found, MAIN)

    @contextmanager
    def on(stream: Stream) -> Any:
        before, found.current = found.current, stream
        yield
        found.current = before

    monkeypatch.setattr(branch, "_branches", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: found.current)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: Stream(found, handle))
    monkeypatch.setattr(
        torch.cuda,
        "is_current_stream_capturing",
        lambda: found.current.cuda_stream in found.captures,
    )
    return found


def made(gpu: Pretended) -> list[str]:
    """What happened since the last time, for one more call."""
    gpu.told.clear()
    beside(lambda: Made(gpu), gpu)  # type: ignore[arg-type,return-value]
    return list(gpu.told)


def test_the_first_call_of_a_capture_forks_and_later_ones_wait_for_nothing(gpu: Pretended) -> None:
    end = ["made on 100", "7 waits for 100", "kept for 7"]
    assert made(gpu) == ["100 waits for 7", *end]
    assert made(gpu) == end
    # The next capture: when one ends all of its streams leave it.
    gpu.captures = {MAIN: 2}
    assert made(gpu) == ["100 waits for 7", *end]
    assert gpu.made == [100]


def test_what_is_not_captured_stays_in_order(gpu: Pretended) -> None:
    gpu.captures.clear()
    assert made(gpu) == ["made on 7"]
    assert not gpu.made


def test_a_branch_of_another_capture_is_left_alone(gpu: Pretended) -> None:
    made(gpu)
    gpu.captures[100] = 5
    assert made(gpu) == ["made on 7"]


@pytest.mark.parametrize("failing", ["create", "info"])
def test_a_driver_that_does_not_tell_means_in_order(gpu: Pretended, failing: str) -> None:
    gpu.failing = failing
    assert made(gpu) == ["made on 7"]


def test_without_the_driver_bindings_all_is_in_order(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(branch, "_bindings", lambda: None)
    beside(lambda: Made(gpu))  # type: ignore[arg-type,return-value]
    assert gpu.told == ["made on 7"]


def test_each_stream_has_a_branch_of_its_own(gpu: Pretended) -> None:
    made(gpu)
    gpu.captures[8], gpu.current = 3, Stream(gpu, 8)
    assert made(gpu)[1] == "made on 101"


@pytest.mark.parametrize(
    ("main", "other", "way"),
    [(None, None, "in order"), (4, None, "fork"), (4, 4, "branch"), (4, 5, "in order")],
)
def test_the_way_is_by_the_numbers_of_the_captures(
    main: int | None, other: int | None, way: str
) -> None:
    assert way_of(main, other) == way
