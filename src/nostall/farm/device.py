"""The GPU device of each farm worker, and a device that forwards its calls to a worker."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from nostall.core.errors import BadInput, MissingPart
from nostall.farm.farm import GPU_VARIABLE, WorkerPool
from nostall.gpu import Device, Kernel, LocalGpu, MeasurementPlan, Outcome

MakeDevice = Callable[[Kernel, MeasurementPlan, int], Device]


def make_local_gpu(kernel: Kernel, plan: MeasurementPlan, ordinal: int) -> Device:
    """Create a :class:`LocalGpu` in a Dask worker.

    Raises :class:`MissingPart` if the worker is a daemon process, which cannot have children.
    """
    if multiprocessing.current_process().daemon:
        raise MissingPart(
            "this Dask worker is a daemon process and cannot start the process that holds the GPU; "
            "start workers with DASK_DISTRIBUTED__WORKER__DAEMON=False, or with --no-nanny"
        )
    return LocalGpu(kernel, plan, ordinal)


@dataclass(frozen=True)
class DeviceSpec:
    """Data with which a worker opens its device.  It is pickled and sent to the worker."""

    kernel: Kernel
    plan: MeasurementPlan
    make: MakeDevice = make_local_gpu
    """Must be picklable: a function at the top level of a module."""


_device_lock = threading.Lock()
"""Held by the user of the open device."""
_open_devices: list[tuple[DeviceSpec, Device]] = []
"""The open device of this process: at most one."""
_users: list[DeviceSpec] = []
"""Devices that are in use, being opened, or waited for."""
_closing: list[DeviceSpec] = []
"""Devices that :func:`close_device` waits to close."""


@contextmanager
def open_device(spec: DeviceSpec) -> Iterator[Device]:
    """Open this process's device for ``spec``, and lend it to one user at a time.

    The device stays open until another spec is opened.  A worker with several threads has one
    device, because it has one GPU.
    """
    _users.append(spec)
    try:
        with _device_lock:
            if not _open_devices or _open_devices[0][0] != spec:
                _close_all()
                _open_devices.append((spec, spec.make(spec.kernel, spec.plan, _gpu_ordinal())))
            yield _open_devices[0][1]
    finally:
        _users.remove(spec)


def close_device(spec: DeviceSpec) -> None:
    """Close this process's device for ``spec``, so that other clients can use the GPU.

    Waits for the device's user.  Does nothing if the device of another spec is open, because
    several clients may share a worker.
    """
    if spec not in (*_users, *(open_spec for open_spec, _ in _open_devices)):
        return
    _closing.append(spec)
    try:
        with _device_lock:
            if _open_devices and _open_devices[0][0] == spec:
                _close_all()
    finally:
        _closing.remove(spec)


def is_wanted(spec: DeviceSpec) -> bool:
    """False while :func:`close_device` waits for this device; its user should then finish."""
    return spec not in _closing


def _close_all() -> None:
    while _open_devices:
        _, device = _open_devices.pop()
        if isinstance(device, LocalGpu):
            device.close()


class FarmDevice:
    """A :class:`~nostall.gpu.device.Device` on a farm worker; on another one if that is lost.

    ``info`` describes the GPU that gave the last outcome.
    """

    def __init__(self, farm: WorkerPool, spec: DeviceSpec) -> None:
        self.farm, self.spec = farm, spec
        self._info: Mapping[str, str] | None = None

    @property
    def info(self) -> Mapping[str, str]:
        if self._info is None:
            self._info = self.farm.call(_device_info, self.spec)
        return self._info

    def evaluate(self, cubin: bytes) -> Outcome:
        return self._call("evaluate", cubin)

    def compare(self, cubin: bytes, rounds: int, checks: int) -> Outcome:
        return self._call("compare", cubin, rounds, checks)

    def _call(self, method: str, *arguments: Any) -> Outcome:
        outcome, self._info = self.farm.call(_call_device, self.spec, method, *arguments)
        return outcome


def _call_device(
    spec: DeviceSpec, method: str, *arguments: Any
) -> tuple[Outcome, Mapping[str, str]]:
    with open_device(spec) as device:
        outcome: Outcome = getattr(device, method)(*arguments)
        return outcome, dict(device.info)


def _device_info(spec: DeviceSpec) -> Mapping[str, str]:
    with open_device(spec) as device:
        return dict(device.info)


def _gpu_ordinal() -> int:
    text = os.environ.get(GPU_VARIABLE, "0")
    if not text.isdecimal():
        raise BadInput(f"{GPU_VARIABLE} is {text!r}; give the number of a GPU, such as 0")
    return int(text)
