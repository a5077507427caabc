"""Conformance checks for spaces, objectives and searches, and a tiny space to try them on.

Whoever writes a space, an objective or a search calls its checker from a test; a broken promise
is a :class:`~nostall.core.ContractBroken` that says what to do.
"""

from nostall.testing.objective import check_objective
from nostall.testing.recording import Diary, InterruptedSpace, Recorder, recorded
from nostall.testing.reference import Disorder, Permutations, Slide
from nostall.testing.search import check_search
from nostall.testing.space import check_space

__all__ = [
    "Diary",
    "Disorder",
    "InterruptedSpace",
    "Permutations",
    "Recorder",
    "Slide",
    "check_objective",
    "check_search",
    "check_space",
    "recorded",
]
