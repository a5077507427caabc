"""Conformance checks for spaces, objectives and searches, and a small space to try them on.

A test of a new space, objective or search calls the check of that contract. A violation raises
:class:`~nostall.core.ContractBroken`, whose message explains the fix.
"""

from nostall.testing.objective import check_objective
from nostall.testing.recording import (
    InterruptedSpace,
    RecordingObjective,
    RecordingObserver,
    record_evaluations,
)
from nostall.testing.reference import Disorder, Permutations, Slide
from nostall.testing.search import check_search
from nostall.testing.space import check_space

__all__ = [
    "Disorder",
    "InterruptedSpace",
    "Permutations",
    "RecordingObjective",
    "RecordingObserver",
    "Slide",
    "check_objective",
    "check_search",
    "check_space",
    "record_evaluations",
]
