"""What a Triton kernel hears when it asks for what it is compiled (``tl.target_info``)."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_ONE_AT_A_TIME = threading.Lock()
"""Or one would put back what another one had put there."""


@contextlib.contextmanager
def told(driver: Any, target: Any) -> Iterator[None]:
    """Make it ``target``, whatever GPU is there: Triton would tell of that one, or of none.

    ``driver`` is ``triton.runtime.driver``, which all threads share: it stays as it is where the
    GPU that is there is the target.
    """
    with _ONE_AT_A_TIME:
        before = _active(driver)
        if before is None or before.get_current_target() != target:
            driver.set_active(_Target(target, before))
            try:
                yield
            finally:
                driver._active = before
            return
    yield


def _active(driver: Any) -> Any:
    """The driver of the GPU that is there; None where there is none."""
    try:
        return driver.active
    except RuntimeError:  # Triton's word for it
        return None


@dataclass(frozen=True)
class _Target:
    """A driver that says another target; all else is that of the GPU that is there, if any."""

    target: Any
    real: Any

    def get_current_target(self) -> Any:
        return self.target

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)
