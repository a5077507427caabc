"""The CUPTI timer on a fake library: kernel times, lost records, missing library."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from nostall.core import LaunchSpec, MissingPart
from nostall.gpu import cupti
from nostall.gpu.cupti import Activity, CuptiTimer
from nostall.gpu.driver import Cuda, KernelArguments, LoadedKernel
from nostall.gpu.timing import L2Flush
from tests.unit.gpu.fake_driver import FakeDriver, Program

RECORD = 168
"""Bytes of a kernel's record in the fake version of CUPTI."""


class FakeLibrary:
    """Writes records of the fake driver's launches into buffers that it requests."""

    def __init__(self, driver: FakeDriver, status: int = 0, dropped: int = 0) -> None:
        self.driver, self.status, self.dropped = driver, status, dropped
        self.enabled = False
        self.spans: list[tuple[float, float]] = []
        launch = driver.cuLaunchKernel

        def recorded_launch(*arguments: Any) -> Any:
            start = driver.clock
            result = launch(*arguments)
            if self.enabled:
                self.spans.append((start, driver.clock))
            return result

        driver.cuLaunchKernel = recorded_launch  # type: ignore[method-assign]

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
        spans, self.spans = self.spans[self.dropped :], []
        for part in (spans[::2], spans[1::2]):  # CUPTI may return buffers out of order
            buffer, size, records = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t()
            self.requested(ctypes.byref(buffer), ctypes.byref(size), ctypes.byref(records))
            assert buffer.value is not None and buffer.value % 8 == 0
            assert size.value >= RECORD * (len(part) + 1)
            for number, (start, end) in enumerate(part):
                address = buffer.value + number * RECORD
                ctypes.c_uint32.from_address(address).value = 10
                ctypes.c_uint64.from_address(address + 16).value = round((1 + start) * 1e9)
                ctypes.c_uint64.from_address(address + 24).value = round((1 + end) * 1e9)
            self.completed(None, 0, buffer.value, size.value, RECORD * len(part))
        return 0

    def cuptiActivityGetNextRecord(self, buffer: Any, valid: Any, record: Any) -> int:  # noqa: N802
        current = record._obj
        following = buffer.value if current.value is None else current.value + RECORD
        if following >= buffer.value + valid.value:
            return 12
        current.value = following
        return 0

    def cuptiGetResultString(self, status: Any, text: Any) -> int:  # noqa: N802
        text._obj.value = b"CUPTI_ERROR_INSUFFICIENT_PRIVILEGES"
        return 0


def _load_kernels(seconds: float) -> tuple[FakeDriver, Cuda, list[LoadedKernel]]:
    """Kernel ``a`` takes 10 us, kernel ``b`` takes ``seconds``."""

    def no_work(driver: FakeDriver, values: Any) -> None:
        pass

    slow = Program(no_work, lambda address: seconds, 0)
    driver = FakeDriver({b"a": Program(no_work, parameters=0), b"b": slow})
    cuda = Cuda(0, driver)
    return driver, cuda, [cuda.load(name, "k") for name in (b"a", b"b")]


@pytest.mark.parametrize("cold", [False, True])
def test_times_are_those_of_the_kernels(cold: bool) -> None:
    driver, cuda, kernels = _load_kernels(25e-6)
    activity = Activity(FakeLibrary(driver))
    flush = L2Flush(cuda) if cold else None
    spec = LaunchSpec()
    timer = CuptiTimer(cuda, spec, KernelArguments.pack(spec, {}, []), 4, flush, activity)
    for _ in range(2):  # the second call must not see records of the first
        original, candidate = timer.time_interleaved(kernels, 5)
        assert np.allclose(original, 10e-6) and np.allclose(candidate, 25e-6)
        assert len(original) == len(candidate) == 5
    assert not activity._buffers


def test_lost_records_are_an_error() -> None:
    driver, cuda, kernels = _load_kernels(25e-6)
    spec = LaunchSpec()
    activity = Activity(FakeLibrary(driver, dropped=1))
    timer = CuptiTimer(cuda, spec, KernelArguments.pack(spec, {}, []), 1, None, activity)
    with pytest.raises(MissingPart, match=r"recorded 5 kernels, 6 ran.*--timing graph"):
        timer.time_interleaved(kernels, 3)


def test_missing_permission() -> None:
    with pytest.raises(MissingPart, match=r"INSUFFICIENT_PRIVILEGES.*--timing graph"):
        Activity(FakeLibrary(FakeDriver(), status=35))


def test_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import cuda.pathfinder as pathfinder

    def missing(name: str) -> Any:
        raise RuntimeError("not found")

    monkeypatch.setattr(pathfinder, "load_nvidia_dynamic_lib", missing)
    monkeypatch.setattr(cupti.ctypes, "CDLL", lambda name: (_ for _ in ()).throw(OSError()))
    message = r"CUPTI library is not found.*pip install nvidia-cuda-cupti"
    with pytest.raises(MissingPart, match=message):
        cupti._load_library()
