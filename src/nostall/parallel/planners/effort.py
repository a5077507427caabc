"""How much work a planner may do, and whom it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic

from nostall.parallel.plan import Workload

BASE_SECONDS, SECONDS_PER_LAYER_GPU = 1.5, 1 / 2400
"""The default limit: 3.5 s for 300 layers on 16 GPUs, 28 s for 1,000 on 64."""
Report = Callable[[float, str], None]
"""Called with the part that is done (0 to 1) and what is going on."""


@dataclass(frozen=True, slots=True)
class Effort:
    """``seconds`` is a limit that planners keep by doing less; ``evaluations`` limits simulated
    plans in searches, which alone makes them reproducible on any machine.

    ``recompute`` allows re-computation of activations where nothing else fits.
    """

    seconds: float = 20.0
    evaluations: int | None = None
    seed: int = 0
    recompute: bool = True
    report: Report | None = None
    started: float = field(default_factory=monotonic)

    @classmethod
    def of(
        cls,
        work: Workload,
        *,
        seconds: float | None = None,
        evaluations: int | None = None,
        seed: int = 0,
        recompute: bool = True,
        report: Report | None = None,
    ) -> Effort:
        """As much as is due to the size of the problem, unless ``seconds`` says otherwise."""
        size = len(work.profile) * len(work.cluster)
        due = BASE_SECONDS + size * SECONDS_PER_LAYER_GPU
        return cls(due if seconds is None else seconds, evaluations, seed, recompute, report)

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
