"""Limits on a planner's work: seconds, simulated plans, and what it may do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from nostall.core.compile_clock import planning_clock
from nostall.parallel.errors import Infeasible
from nostall.parallel.plan import Workload

BASE_SECONDS, SECONDS_PER_LAYER_GPU = 1.5, 1 / 2400
"""Default time limit: 3.5 s for 300 layers on 16 GPUs, 28 s for 1,000 layers on 64 GPUs."""
ProgressCallback = Callable[[float, str], None]
"""Called with the fraction that is done (0 to 1) and a description of the current step."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Limits on one run of a planner, which starts when this object is created.

    Only ``evaluations``, with a time limit that is not reached, gives the same plan on every
    machine.
    """

    seconds: float = 20.0
    """Time limit; a planner that reaches it returns its best plan so far.  Seconds in which Numba
    compiles the planner do not count."""
    evaluations: int | None = None
    """Maximum number of plans that a search simulates; None for the planner's default."""
    seed: int = 0
    recompute: bool = True
    """Whether plans may re-compute activations if nothing else fits into memory."""
    report: ProgressCallback | None = None
    started: float = field(default_factory=planning_clock)
    """Start of the run by :func:`planning_clock`."""

    @classmethod
    def for_workload(
        cls,
        workload: Workload,
        *,
        seconds: float | None = None,
        evaluations: int | None = None,
        seed: int = 0,
        recompute: bool = True,
        report: ProgressCallback | None = None,
    ) -> Effort:
        """An effort whose time limit depends on the size of the problem unless it is given."""
        size = len(workload.profile) * len(workload.cluster)
        default = BASE_SECONDS + size * SECONDS_PER_LAYER_GPU
        return cls(default if seconds is None else seconds, evaluations, seed, recompute, report)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start, without those of compilation."""
        return planning_clock() - self.started

    @property
    def is_over(self) -> bool:
        """Whether the time limit is reached."""
        return self.elapsed_s >= self.seconds

    @property
    def remaining_s(self) -> float:
        """Seconds until the time limit, at least a millisecond."""
        return max(1e-3, self.seconds - self.elapsed_s)

    @property
    def recompute_options(self) -> tuple[bool, ...]:
        """Values of ``Plan.recompute`` to try, in order."""
        return (False, True) if self.recompute else (False,)

    def no_plan(self, reason: str) -> Infeasible:
        """The error of a planner that found no plan: ``reason``, unless the time limit ended it."""
        if self.is_over:
            reason = (
                f"the time limit of {self.seconds:g} s ended the planning before a plan was found "
                "that fits into memory; give a larger --seconds"
            )
        return Infeasible(reason)

    def with_progress(self, report: ProgressCallback) -> Effort:
        """The same effort with another progress callback; the time limit does not start again."""
        return replace(self, report=report)

    def report_progress(self, fraction: float, step: str) -> None:
        """Call the progress callback, if there is one."""
        if self.report is not None:
            self.report(min(1.0, fraction), step)
