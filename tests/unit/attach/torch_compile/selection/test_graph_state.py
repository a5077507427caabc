"""Phases of a graph: the report, and transitions that are not allowed."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from nostall.attach.torch_compile.report import GraphReport
from nostall.attach.torch_compile.selection.graph_state import (
    TRANSITIONS,
    GraphState,
    Phase,
)


def test_the_report_follows_the_phases() -> None:
    state = GraphState(GraphReport())
    assert (state.phase, state.report.state) == (Phase.OBSERVED, "inductor")
    state.advance(Phase.PREPARING)
    assert state.report.state == "compiling"
    state.advance(Phase.CANDIDATE)
    state.advance(Phase.COMPARED)
    assert (state.report.state, state.report.reason) == ("compiling", "")
    assert not state.is_decided
    state.decide("stitched", "faster as a whole")
    assert state.is_decided
    assert (state.report.state, state.report.reason) == ("stitched", "faster as a whole")


def test_another_candidate_may_be_prepared_after_a_comparison_but_not_after_the_decision() -> None:
    assert Phase.PREPARING in TRANSITIONS[Phase.COMPARED]
    assert TRANSITIONS[Phase.DECIDED] == {Phase.DECIDED}


@pytest.mark.parametrize("phase", [*Phase])
def test_a_decision_is_possible_in_every_phase(phase: Phase) -> None:
    assert Phase.DECIDED in TRANSITIONS[phase]


@pytest.mark.parametrize("phase", [Phase.OBSERVED, Phase.CANDIDATE, Phase.COMPARED])
def test_a_phase_that_may_not_follow_is_an_error(phase: Phase) -> None:
    state = GraphState(GraphReport())
    with pytest.raises(AssertionError, match=f"OBSERVED to {phase.name}"):
        state.advance(phase)
    assert state.phase is Phase.OBSERVED
