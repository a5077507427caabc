"""Time that Numba takes to compile a model: it counts in limits of seconds, so it is printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from nostall.cli.terminal.console import err

MIN_SHOWN_SECONDS = 1.0


@dataclass
class CompileTime:
    """Seconds of compilation so far."""

    seconds: float = 0.0

    def show(self) -> None:
        """Print the time if it is long enough to matter."""
        if self.seconds >= MIN_SHOWN_SECONDS:
            err.print(
                f"{self.seconds:.1f} s of the time limit compiled nostall's models with Numba; the "
                "next run on this machine takes them from its cache"
            )


@contextmanager
def measured_compile_time() -> Iterator[CompileTime]:
    """Measure how long Numba compiles in this context."""
    from numba.core import event

    total = CompileTime()
    listener = event.TimingListener()
    event.register("numba:compile", listener)
    try:
        yield total
    finally:
        event.unregister("numba:compile", listener)
        if listener.done:
            total.seconds = listener.duration
