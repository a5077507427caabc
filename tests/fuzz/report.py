"""Results of fuzzing: outcomes, mutations, failures, the slowest mutant, peak memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol


class Source(Protocol):
    """What determines a mutant."""

    @property
    def seed(self) -> int: ...

    @property
    def original(self) -> str: ...

    @property
    def mutation(self) -> str: ...


@dataclass
class Report:
    """Results of one or more batches."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Outcome -> number of mutants."""
    kinds: Counter[str] = field(default_factory=Counter)
    """Name of the mutation -> number of mutants."""
    failures: list[dict[str, Any]] = field(default_factory=list)
    """Crashes, timeouts and errors without a message, with the seed of the mutant."""
    slowest: dict[str, Any] = field(default_factory=lambda: {"seconds": 0.0})
    peak_rss_mib: float = 0.0

    def add(self, report: Report) -> None:
        """Add the results of another batch."""
        self.outcomes += report.outcomes
        self.kinds += report.kinds
        self.failures += report.failures
        self.slowest = max(self.slowest, report.slowest, key=lambda s: s["seconds"])
        self.peak_rss_mib = max(self.peak_rss_mib, report.peak_rss_mib)

    def fail(self, mutant: Source, message: str) -> None:
        """Record a failure with everything that is needed to repeat it."""
        source = {"seed": mutant.seed, "of": mutant.original, "how": mutant.mutation}
        self.failures.append({**source, "what": message})

    def as_json(self, max_failures: int = 50) -> dict[str, Any]:
        """The report for a result file."""
        return {
            "outcomes": dict(self.outcomes.most_common()),
            "mutations": dict(self.kinds.most_common()),
            "failures_count": len(self.failures),
            "failures": self.failures[:max_failures],
            "slowest": self.slowest,
            "peak_rss_mib": round(self.peak_rss_mib, 1),
        }
