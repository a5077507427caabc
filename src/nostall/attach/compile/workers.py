"""Kernels compiled by Inductor's worker processes, which have nothing to do by then.

Triton in a thread of the program takes turns with the program itself, one kernel after the other.
Workers see no GPU; what they make is in Triton's cache, where it is found by who launches it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from nostall.attach.compile.operator import resolve

LONGEST = 120.0
"""Seconds that all kernels together may take; what is not there by then is compiled here."""
_PASSED_ON = ("NOSTALL_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")

Submit = Callable[..., "Future[float]"]


@dataclass
class Workers:
    """Compiles kernels for a device; ``cpu_seconds`` is what workers took for it."""

    device: torch.device
    cpu_seconds: float = 0.0
    _waiting: dict[str, Future[float] | None] = field(default_factory=dict)

    def add(self, kernel: str) -> None:
        """Have a kernel compiled, by name."""
        if kernel not in self._waiting and self.device.type == "cuda":
            self._waiting[kernel] = self._sent(kernel)

    def finish(self) -> None:
        """Wait for all of them, and have them ready in this process; what failed elsewhere, or was
        not sent, is compiled here."""
        until = time.monotonic() + LONGEST
        for kernel, sent in self._waiting.items():
            # What fails in another process is said better here.
            with suppress(Exception):
                left = max(0.0, until - time.monotonic())
                self.cpu_seconds += 0.0 if sent is None else sent.result(left)
            resolve(kernel).warm(self.device)
        self._waiting.clear()

    def _sent(self, kernel: str) -> Future[float] | None:
        submit = inductors_pool()
        if submit is None:
            return None
        major, minor = torch.cuda.get_device_capability(self.device)
        passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        try:
            return submit(compiled, kernel, 10 * major + minor, passed)
        except Exception:  # the pool is being closed, or broken
            return None


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


def compiled(kernel: str, capability: int, environment: dict[str, str]) -> float:
    """In a worker: a kernel into Triton's cache.  Processor seconds that it took."""
    began = time.process_time()
    os.environ.update(environment)
    with compiling_for(capability):
        resolve(kernel).warm(torch.device("cuda"))
    return time.process_time() - began


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
