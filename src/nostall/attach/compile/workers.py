"""Kernels made by Inductor's worker processes, which have nothing to do by then.

A thread of the program takes turns with the program itself, one kernel after the other.  Workers
see no GPU; what they make is in the store and in Triton's cache, where it is found later.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nostall.attach.compile.operator import resolve
from nostall.attach.compile.parts import Extent
from nostall.attach.compile.race import prepared
from nostall.fusion.graph import Graph

LONGEST = 120.0
"""Seconds that all of it may take elsewhere; what is not there by then is done here."""
_PASSED_ON = ("NOSTALL_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

Answer = tuple[list[str], float]
"""Kernels by name, and the processor seconds that they took."""
Sent = Future[Answer] | None
Submit = Callable[..., Future[Answer]]


@dataclass
class Workers:
    """Makes kernels for a device; ``cpu_seconds`` is what workers took for it."""

    device: torch.device
    cpu_seconds: float = 0.0

    def make(self, regions: Sequence[tuple[Graph, int, Extent]]) -> None:
        """Plan regions (:func:`~nostall.attach.compile.race.prepared`) and have their kernels ready
        in this process; what fails elsewhere, or cannot be sent, is done here."""
        until = time.monotonic() + LONGEST
        planned = [(region, self._sent(planned_elsewhere, *region)) for region in regions]
        compiled: dict[str, Sent] = {}
        for region, sent in planned:
            names = self._answer(sent, until)
            for kernel in prepared(*region) if names is None else names:
                if kernel not in compiled and self.device.type == "cuda":
                    compiled[kernel] = self._sent(compiled_elsewhere, kernel, self._capability)
        for kernel, sent in compiled.items():
            self._answer(sent, until)
            resolve(kernel).warm(self.device)

    def _sent(self, work: Callable[..., Answer], *given: Any) -> Sent:
        submit = inductors_pool() if self.device.type == "cuda" else None
        if submit is None:
            return None
        passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        try:
            return submit(work, passed, *given)
        except Exception:  # the pool is being closed, or broken
            return None

    def _answer(self, sent: Sent, until: float) -> list[str] | None:
        if sent is None:
            return None
        try:
            names, seconds = sent.result(max(0.0, until - time.monotonic()))
        except Exception:  # what fails in another process is said better here
            return None
        self.cpu_seconds += seconds
        return names

    @property
    def _capability(self) -> int:
        major, minor = torch.cuda.get_device_capability(self.device)
        return int(10 * major + minor)


def inductors_pool() -> Submit | None:
    """How to hand work to Inductor's processes; None where there are none."""
    try:
        from torch._inductor.async_compile import AsyncCompile

        if not AsyncCompile.use_process_pool():
            return None
        submit: Submit = AsyncCompile.process_pool().submit
        return submit
    except Exception:  # PyTorch's own affair, which changes from version to version
        return None


def planned_elsewhere(
    environment: dict[str, str], graph: Graph, most: int, extent: Extent
) -> Answer:
    """In a worker: the kernels of a region, which are in the store then."""
    began = time.process_time()
    os.environ.update(environment)
    return prepared(graph, most, extent), time.process_time() - began


def compiled_elsewhere(environment: dict[str, str], kernel: str, capability: int) -> Answer:
    """In a worker: a kernel into Triton's cache."""
    began = time.process_time()
    os.environ.update(environment)
    with compiling_for(capability):
        resolve(kernel).warm(torch.device("cuda"))
    return [kernel], time.process_time() - began


@contextmanager
def compiling_for(capability: int) -> Iterator[None]:
    """Triton compiles for GPUs of this capability (90: 9.0), whether or not there is one."""
    from triton.runtime import driver

    before = driver._active
    driver.set_active(Architecture(capability))
    try:
        yield
    finally:
        driver._active = before


@dataclass(frozen=True)
class Architecture:
    """As much of a driver as Triton asks before it compiles."""

    capability: int

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0
