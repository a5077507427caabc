"""Run functions on Dask workers, of this machine or of others."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol, TypeVar

from nostall.core.errors import BadInput, MissingPart
from nostall.gpu import Device, Kernel, LocalGpu, MeasurementPlan, Outcome

A = TypeVar("A")
B = TypeVar("B")

GPU_VARIABLE = "NOSTALL_WORKER_GPU"
"""Environment variable of a worker: the number of its GPU, 0 by default."""
CONNECT_SECONDS = 10.0
"""Time limit for a scheduler's answer."""
WAIT_SECONDS = 20.0
"""Time limit for the wait for a worker, at the start and after the last one is lost."""
_POLL_SECONDS = 1.0
_PROTOCOL = "tls://"
_NO_PAGES: dict[str, list[str]] = {
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
}
"""Settings of Dask: no web pages, because they ask nobody for a secret."""
_IGNORE_SIGINT = {"preload": ["nostall.farm.ignore_sigint"]}
"""Option of local workers, which Ctrl-C in the terminal would end otherwise."""
_SCHEDULER_GONE = "the Dask scheduler is gone; start the run anew"


class WorkerPool(Protocol):
    """Interface of the workers of a search on several devices: :class:`Farm`, or a test's fake."""

    @property
    def workers(self) -> int: ...

    def map(
        self,
        function: Callable[[A], B],
        items: Sequence[A],
        *,
        on_interrupt: Callable[[], None] | None = None,
    ) -> list[B]: ...

    def call(self, function: Callable[..., B], *arguments: Any) -> B: ...

    def run_on_all(self, function: Callable[..., None], *arguments: Any) -> None: ...


class Farm:
    """Runs functions on Dask workers.

    Work of a lost worker is repeated by another one.  Exceptions that a function raises are raised
    in the caller.  All methods raise :class:`MissingPart` if the scheduler is gone, if no worker
    appears for ``wait_seconds``, or if three workers ended during the same call.
    """

    def __init__(self, client: Any, workers: int, wait_seconds: float = WAIT_SECONDS) -> None:
        """``client``: a connected ``distributed.Client``."""
        self.client, self.workers, self.wait_seconds = client, workers, wait_seconds
        self._preferred: str | None = None

    def map(
        self,
        function: Callable[[A], B],
        items: Sequence[A],
        *,
        on_interrupt: Callable[[], None] | None = None,
    ) -> list[B]:
        """Call ``function`` for each item, spread over the workers; results in order.

        ``on_interrupt`` must make the calls end soon.  After a first Ctrl-C it is called
        repeatedly (because a call that lost its worker starts anew) until all results are there.
        Without it, and after a second Ctrl-C, the calls are cancelled.
        """
        futures = [self.client.submit(function, item, pure=False) for item in items]
        try:
            return self._gather(futures)
        except KeyboardInterrupt:
            if on_interrupt is None:
                raise
            return self._gather(futures, on_interrupt)
        finally:
            self._cancel(futures)

    def call(self, function: Callable[..., B], *arguments: Any) -> B:
        """Call ``function`` on the same worker as the previous calls, as long as it lives."""
        addresses = self._addresses()
        if self._preferred not in addresses and addresses:
            self._preferred = min(addresses)
        preferred = [self._preferred] if self._preferred in addresses else None
        future = self.client.submit(
            function, *arguments, pure=False, workers=preferred, allow_other_workers=True
        )
        try:
            result: B = self._gather([future])[0]
            return result
        finally:
            self._cancel([future])

    def run_on_all(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call ``function`` on every worker that can be reached."""
        with suppress(OSError, RuntimeError):
            self.client.run(function, *arguments)

    def _gather(
        self, futures: list[Any], while_waiting: Callable[[], None] = lambda: None
    ) -> list[Any]:
        last_seen = monotonic()
        while_waiting()
        while not self._wait(futures):
            while_waiting()
            last_seen = monotonic() if self._addresses() else last_seen
            if monotonic() - last_seen > self.wait_seconds:
                raise MissingPart(
                    f"no worker has been there for {self.wait_seconds:g} s, and their results are "
                    "lost; see why they ended, and start the run anew"
                )
        return [self._result(future) for future in futures]

    def _cancel(self, futures: list[Any]) -> None:
        self.client.cancel([future for future in futures if not future.done()])

    def _wait(self, futures: list[Any]) -> bool:
        """Wait for all futures, at most ``_POLL_SECONDS``; returns whether all are done."""
        from distributed import CancelledError, wait

        try:
            wait(futures, timeout=_POLL_SECONDS)
        except TimeoutError:
            return False
        except CancelledError as error:
            raise MissingPart(_SCHEDULER_GONE) from error
        return True

    def _result(self, future: Any) -> Any:
        from distributed import CancelledError, KilledWorker

        try:
            return future.result()
        except KilledWorker as error:
            raise MissingPart(
                f"three workers ended while they did the same work ({error}); look at their logs"
            ) from error
        except CancelledError as error:
            raise MissingPart(_SCHEDULER_GONE) from error

    def _addresses(self) -> set[str]:
        """Addresses of the connected workers."""
        try:
            return set(self.client.nthreads())
        except (OSError, RuntimeError) as error:
            raise MissingPart(
                f"the Dask scheduler is gone ({error}); start the run anew"
            ) from error


@contextmanager
def local(workers: int, wait_seconds: float = WAIT_SECONDS) -> Iterator[Farm]:
    """Start ``workers`` worker processes on this machine.

    Worker i uses GPU i, and is restarted if it ends.  Scheduler and workers listen on the loopback
    interface and take connections only from holders of a key that exists in their memory, because
    other users of the machine reach that interface, too.
    """
    dask, distributed = _import_dask()
    security = _temporary_key(distributed)
    address = {
        "host": "127.0.0.1",
        "port": 0,
        "dashboard": False,
        "protocol": _PROTOCOL,
        "security": security,
    }
    common = {**address, "nthreads": 1, "memory_limit": 0, "silence_logs": logging.CRITICAL}
    nannies = {
        i: {
            "cls": distributed.Nanny,
            "options": {**common, "env": {GPU_VARIABLE: str(i)}, **_IGNORE_SIGINT},
        }
        for i in range(workers)
    }
    options = {**address, "dashboard_address": "127.0.0.1:0"}
    scheduler = {"cls": distributed.Scheduler, "options": options}
    # Workers must not be daemon processes: each starts a child process that holds its GPU.
    with (
        dask.config.set({"distributed.worker.daemon": False, **_NO_PAGES}),
        distributed.SpecCluster(
            nannies, scheduler, security=security, silence_logs=logging.CRITICAL
        ) as cluster,
        distributed.Client(cluster, security=security) as client,
    ):
        _wait_for_workers(client, workers, wait_seconds, "on this machine")
        yield Farm(client, workers, wait_seconds)


@contextmanager
def remote(
    address: str, workers: int | None = None, wait_seconds: float = WAIT_SECONDS
) -> Iterator[Farm]:
    """Connect to a running Dask scheduler and wait for ``workers`` of its workers (default: 1).

    Each worker must be started with one GPU (:data:`GPU_VARIABLE` or ``CUDA_VISIBLE_DEVICES``) and
    be allowed to have children: ``DASK_DISTRIBUTED__WORKER__DAEMON=False dask worker ADDRESS``.

    Raises :class:`BadInput` if ``address`` is invalid, and :class:`MissingPart` if the scheduler or
    a worker does not answer in time.
    """
    _, distributed = _import_dask()
    if not address.startswith(("tcp://", "tls://")):
        raise BadInput(
            f"--scheduler is {address!r}; give the address that `dask scheduler` prints, such as "
            "tcp://host:8786"
        )
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS)
    except (OSError, TimeoutError) as error:
        raise MissingPart(
            f"no Dask scheduler answers at {address} ({_first_line(error)}); start one with `dask "
            "scheduler`, or correct --scheduler"
        ) from error
    except ValueError as error:
        raise BadInput(
            f"--scheduler {address!r} is not understood ({_first_line(error)}); give tcp://host:8786"
        ) from error
    except TypeError as error:  # raised by Dask without a TLS context
        raise BadInput(
            f"--scheduler {address!r} needs keys ({_first_line(error)}); set "
            "DASK_DISTRIBUTED__COMM__TLS__CA_FILE, ...__CLIENT__KEY and ...__CLIENT__CERT, as for "
            "`dask scheduler`"
        ) from error
    with client:
        _wait_for_workers(client, workers or 1, wait_seconds, f"at {address}")
        yield Farm(client, workers or len(client.nthreads()), wait_seconds)


def _wait_for_workers(client: Any, workers: int, wait_seconds: float, where: str) -> None:
    try:
        client.wait_for_workers(workers, timeout=wait_seconds)
    except TimeoutError as error:
        raise MissingPart(
            f"{len(client.nthreads())} Dask workers {where} after {wait_seconds:g} s, {workers} "
            "are needed; start them with `dask worker ADDRESS --nthreads 1`, one per GPU"
        ) from error


def _import_dask() -> tuple[Any, Any]:
    try:
        import dask
        import distributed
    except ImportError as error:
        raise MissingPart(
            f"work over several GPUs needs Dask ({error}); pip install 'nostall[farm]'"
        ) from error
    return dask, distributed


def _temporary_key(distributed: Any) -> Any:
    """A new key and certificate, which exist only in the memory of this farm's processes."""
    try:
        return distributed.Security.temporary()
    except ImportError as error:
        raise MissingPart(
            f"workers on this machine need a key for their connections ({error}); "
            "pip install 'nostall[farm]'"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:120]


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
