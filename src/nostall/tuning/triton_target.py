"""Override the target that ``tl.target_info`` reports, to compile for a GPU that is not present."""

from __future__ import annotations

import contextlib
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
        active = _active_driver(driver)
        if active is None or active.get_current_target() != target:
            driver.set_active(_TargetDriver(target, active))
            try:
                yield
            finally:
                driver._active = active
            return
    yield


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
