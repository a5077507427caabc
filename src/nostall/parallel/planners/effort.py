"""How much work a planner may do, and whom it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

DEFAULT_SECONDS = 20.0
Report = Callable[[float, str], None]
"""Called with the part that is done (0 to 1) and what is going on."""


@dataclass(frozen=True, slots=True)
class Effort:
    """``seconds`` is a limit that planners keep by doing less; ``evaluations`` limits simulated
    plans in searches, which alone makes them reproducible on any machine.

    ``recompute`` allows re-computation of activations where nothing else fits.
    """

    seconds: float = DEFAULT_SECONDS
    evaluations: int | None = None
    seed: int = 0
    recompute: bool = True
    report: Report | None = None
    started: float = field(default_factory=monotonic)

    @property
    def over(self) -> bool:
        """Whether the time is up."""
        return monotonic() - self.started >= self.seconds

    @property
    def left(self) -> float:
        """Seconds left, at least a millisecond."""
        return max(1e-3, self.seconds - (monotonic() - self.started))

    def tell(self, part: float, what: str) -> None:
        """Report progress."""
        if self.report is not None:
            self.report(min(1.0, part), what)
