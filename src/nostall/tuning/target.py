"""What a Triton kernel hears when it asks for what it is compiled (``tl.target_info``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@contextlib.contextmanager
def told(driver: Any, target: Any) -> Iterator[None]:
    """Make it ``target``, whatever GPU is there: Triton would tell of that one, or of none.

    ``driver`` is ``triton.runtime.driver``, which all threads share: it stays as it is where the
    GPU that is there is the target.
    """
    try:
        here = driver.active.get_current_target()
    except RuntimeError:  # Triton's word for no GPU
        here = None
    if here == target:
        yield
        return
    before = driver._active
    driver.set_active(_Target(target))
    try:
        yield
    finally:
        driver._active = before


@dataclass(frozen=True)
class _Target:
    """As much of a driver as Triton asks while it compiles for a target that it was given."""

    target: Any

    def get_current_target(self) -> Any:
        return self.target
