"""Phases of a graph without a stored selection, and the one place that advances them."""

from __future__ import annotations

from enum import Enum, auto

from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.store.records import Version


class Phase(Enum):
    """Phase of a graph; Inductor's version runs in all phases but the last."""

    # Inductor compiles its version, and its graphs are observed; the first step runs.
    OBSERVED = auto()
    # Background tasks generate and compile kernels.  Then the kernels are tuned and compared, and
    # the candidate is compiled.
    PREPARING = auto()
    # The candidate is compiled, and waits for the end of the step.
    CANDIDATE = auto()
    # The baseline and a candidate were measured.
    COMPARED = auto()
    # One version is final.
    DECIDED = auto()


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    # The user's process ran a backward pass twice in the first step, so Inductor's version stays.
    Phase.OBSERVED: frozenset({Phase.PREPARING, Phase.DECIDED}),
    # The preparation failed, all kernels are slower, or rank 0 has selected Inductor's version.
    Phase.PREPARING: frozenset({Phase.CANDIDATE, Phase.DECIDED}),
    # The comparison failed, or rank 0 has selected the candidate.
    Phase.CANDIDATE: frozenset({Phase.COMPARED, Phase.DECIDED}),
    # The candidate is not faster, and another one is prepared.
    Phase.COMPARED: frozenset({Phase.PREPARING, Phase.DECIDED}),
    # What waits for the end of a step is dropped if Inductor's version is selected meanwhile.
    Phase.DECIDED: frozenset({Phase.DECIDED}),
}
"""Phases that may follow each phase.  Comments say when the regular next phase is skipped."""


class GraphState:
    """The phase of one graph, shared by everything that prepares and selects its version.

    User threads advance it, one at a time; background threads only read it.
    """

    def __init__(self, report: GraphReport) -> None:
        self.report = report
        self._phase = Phase.OBSERVED

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def is_decided(self) -> bool:
        """Whether a version was selected: no further work for the candidate is needed."""
        return self._phase is Phase.DECIDED

    def advance(self, phase: Phase) -> None:
        """Enter a phase, and update the report."""
        assert phase in TRANSITIONS[self._phase], f"{self._phase.name} to {phase.name}"
        self._phase = phase
        if phase is Phase.PREPARING:
            self.report.state = "compiling"

    def decide(self, version: Version, reason: str) -> None:
        """Enter the last phase with this version, and report why."""
        self.advance(Phase.DECIDED)
        self.report.state, self.report.reason = version, reason
