"""Time that Numba takes to compile a model: the first run takes longer, so it is printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nostall.cli.terminal.console import err
from nostall.core.compile_clock import compiled_s

MIN_SHOWN_SECONDS = 1.0


@dataclass
class CompileTime:
    """Seconds of compilation so far."""

    seconds: float = 0.0

    def show(self, *, is_counted: bool = True) -> None:
        """Print the time if it is long enough to matter, and whether a time limit counts it."""
        if self.seconds >= MIN_SHOWN_SECONDS:
            counted = "of the time limit" if is_counted else "beside the time limit"
            err.print(
                f"{self.seconds:.1f} s {counted} compiled nostall's models with Numba; the next "
                "run on this machine takes them from its cache"
            )


@contextmanager
def measured_compile_time() -> Iterator[CompileTime]:
    """Measure how long Numba compiles in this context."""
    total, before = CompileTime(), compiled_s()
    try:
        yield total
    finally:
        total.seconds = compiled_s() - before
