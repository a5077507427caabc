"""CUPTI's records as nostall reads them, and the clear words where there are none."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from nostall.core import LaunchSpec, MissingPart
from nostall.gpu import cupti
from nostall.gpu.cupti import Activity, CuptiTimer
from nostall.gpu.driver import Arguments, Cuda, Loaded
from nostall.gpu.timing import Flush
from tests.unit.gpu.fake_driver import FakeDriver, Program

RECORD = 168
"""Bytes of a kernel's record in this pretended version."""


class Library:
    """Writes records of the driver's launches into buffers that it asks for."""

    def __init__(self, driver: FakeDriver, status: int = 0, dropped: int = 0) -> None:
        self.driver, self.status, self.dropped = driver, status, dropped
        self.enabled = False
        self.seen: list[tuple[float, float]] = []
        launch = driver.cuLaunchKernel

        def watched(*arguments: Any) -> Any:
            start = driver.clock
            answer = launch(*arguments)
            if self.enabled:
                self.seen.append((start, driver.clock))
            return answer

        driver.cuLaunchKernel = watched  # type: ignore[method-assign]

    def cuptiActivityRegisterCallbacks(self, requested: Any, completed: Any) -> int:  # noqa: N802
        self.requested, self.completed = requested, completed
        return self.status

    def cuptiActivityEnable(self, kind: Any) -> int:  # noqa: N802
        assert kind.value == 10
        self.enabled = True
        return 0

    def cuptiActivityDisable(self, kind: Any) -> int:  # noqa: N802
        self.enabled = False
        return 0

    def cuptiActivityFlushAll(self, flag: Any) -> int:  # noqa: N802
        kept, self.seen = self.seen[self.dropped :], []
        for part in (kept[::2], kept[1::2]):  # buffers need not come back in order
            buffer, size, most = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
            self.requested(ctypes.byref(buffer), ctypes.byref(size), ctypes.byref(most))
            assert buffer.value is not None and buffer.value % 8 == 0
            assert size.value >= RECORD * (len(part) + 1)
            for number, (start, end) in enumerate(part):
                at = buffer.value + number * RECORD
                ctypes.c_uint32.from_address(at).value = 10
                ctypes.c_uint64.from_address(at + 16).value = round((1 + start) * 1e9)
                ctypes.c_uint64.from_address(at + 24).value = round((1 + end) * 1e9)
            self.completed(None, 0, buffer.value, size.value, RECORD * len(part))
        return 0

    def cuptiActivityGetNextRecord(self, buffer: Any, valid: Any, record: Any) -> int:  # noqa: N802
        held = record._obj
        following = buffer.value if held.value is None else held.value + RECORD
        if following >= buffer.value + valid.value:
            return 12
        held.value = following
        return 0

    def cuptiGetResultString(self, status: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
        return 0


def _ready(seconds: float) -> tuple[FakeDriver, Cuda, list[Loaded]]:
    def nothing(driver: FakeDriver, values: Any) -> None:
        pass

    slow = Program(nothing, lambda place: seconds, 0)
    driver = FakeDriver({b"a": Program(nothing, parameters=0), b"b": slow})
    cuda = Cuda(0, driver)
    return driver, cuda, [cuda.load(name, "k") for name in (b"a", b"b")]


@pytest.mark.parametrize("cold", [False, True])
def test_times_are_those_of_the_kernels_alone(cold: bool) -> None:
    driver, cuda, kernels = _ready(25e-6)
    activity = Activity(Library(driver))
    flush = Flush(cuda) if cold else None
    spec = LaunchSpec()
    timer = CuptiTimer(cuda, spec, Arguments.of(spec, {}, []), 4, flush, activity)
    for _ in range(2):  # the second time nothing is left of the first
        original, candidate = timer.pairs(kernels, 5)
        assert np.allclose(original, 10e-6) and np.allclose(candidate, 25e-6)
        assert len(original) == len(candidate) == 5
    assert not activity._buffers


def test_records_that_got_lost_are_no_times() -> None:
    driver, cuda, kernels = _ready(25e-6)
    spec = LaunchSpec()
    activity = Activity(Library(driver, dropped=1))
    timer = CuptiTimer(cuda, spec, Arguments.of(spec, {}, []), 1, None, activity)
    with pytest.raises(MissingPart, match=r"recorded 5 kernels, 6 ran.*--timing graph"):
        timer.pairs(kernels, 3)


def test_no_permission() -> None:
    with pytest.raises(MissingPart, match=r"INSUFFICIENT_PRIVILEGES.*--timing graph"):
        Activity(Library(FakeDriver(), status=35))


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder as pathfinder

    def missing(name: str) -> Any:
        raise RuntimeError("not found")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", missing)
    monkeypatch.setattr(cupti.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError()))
    with pytest.raises(MissingPart, match=r"CUPTI is not here.*pip install nvidia-cuda-cupti"):
        cupti._library()
