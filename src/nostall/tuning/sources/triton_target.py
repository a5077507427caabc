"""Override Triton's target and device, to compile for a GPU that is not present."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_LOCK = threading.Lock()
"""Held while the driver is replaced, because all threads share it."""


@contextlib.contextmanager
def pretend_target(driver: Any, target: Any) -> Iterator[None]:
    """Let kernels that are compiled in this context see ``target`` as the current target.

    ``driver`` is ``triton.runtime.driver``.  Without this context, ``tl.target_info`` reports the
    present GPU, or fails without one.  If the present GPU has that target, nothing is replaced.
    """
    with _LOCK:
        if driver._active is None and "torch" not in sys.modules:
            # Triton looks for a GPU by importing PyTorch, which takes seconds and is seldom needed.
            with _replaced(driver, None, _LazyTargetDriver(target, driver)):
                yield
            return
        active = _active_driver(driver)
        if active is None or active.get_current_target() != target:
            with _replaced(driver, active, _TargetDriver(target, active)):
                yield
            return
    yield


@contextlib.contextmanager
def pretend_device(driver: Any, target: Any, device: str) -> Iterator[None]:
    """Let launches that only compile see ``target`` as the target of a device named ``device``.

    Triton keeps what it compiles by the device, so nothing is mixed with kernels of a present GPU.
    """
    with _LOCK:
        active = _active_driver(driver)
        with _replaced(driver, active, _CompilingDriver(target, active, device)):
            yield


@contextlib.contextmanager
def _replaced(driver: Any, active: Any, other: Any) -> Iterator[None]:
    driver.set_active(other)
    try:
        yield
    finally:
        driver._active = active


def _active_driver(driver: Any) -> Any:
    """The driver of the present GPU, or None without a GPU."""
    try:
        return driver.active
    except RuntimeError:  # raised by Triton if there is no active driver
        return None


@dataclass(frozen=True)
class _TargetDriver:
    """A driver with another target; all other attributes are those of the present GPU's driver."""

    target: Any
    real: Any

    def get_current_target(self) -> Any:
        return self.target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


@dataclass(frozen=True)
class _LazyTargetDriver:
    """As :class:`_TargetDriver`, but a present GPU is looked for when an attribute is read."""

    target: Any
    config: Any
    """``triton.runtime.driver``."""

    def get_current_target(self) -> Any:
        return self.target

    def __getattr__(self, name: str) -> Any:
        try:
            real = self.config.default
        except RuntimeError:  # raised by Triton if there is no active driver
            real = None
        return getattr(real, name)


@dataclass(frozen=True)
class _CompilingDriver(_TargetDriver):
    """A driver of a device that compiles, and launches nothing."""

    device: str

    def get_current_device(self) -> str:
        return self.device

    def get_current_stream(self, device: str) -> int:
        return 0
