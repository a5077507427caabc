"""Modelled slow-down of a traced step if it were distributed over several nodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from nostall.core.errors import BadInput
from nostall.workload.characterization.what_if import WhatIf
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Resource
from nostall.workload.model.slowdown import BUCKET_BYTES, last_bucket_share
from nostall.workload.model.traffic import ring_allreduce_bytes
from nostall.workload.timeline.analysis import Timeline


@dataclass(frozen=True, slots=True)
class TraceSlowdown:
    """A data-parallel step over several nodes beside the measured step."""

    question: str
    nodes: int
    step_seconds: float
    """Measured seconds of the step."""
    gradient_bytes: float
    """Bytes that the nodes exchange in a step."""
    best: float
    """Modelled factor of the step time if computation hides all but the last bucket."""
    worst: float
    """Modelled factor of the step time if nothing is hidden."""

    def as_json(self) -> dict[str, Any]:
        return {
            "question": self.question,
            "nodes": self.nodes,
            "step_seconds": self.step_seconds,
            "gradient_bytes": self.gradient_bytes,
            "modelled_slowdown_at_least": self.best,
            "modelled_slowdown_at_most": self.worst,
        }


def slowdown_over_nodes(
    timeline: Timeline, question: WhatIf, hardware: Hardware | None
) -> TraceSlowdown:
    """Add a ring all-reduce between the nodes to the measured step.

    Communication inside the node stays as measured.  Raises
    :class:`~nostall.core.errors.BadInput` without a network, or if the trace does not record the
    bytes of its collectives and the question has none.
    """
    assert question.nodes is not None
    if hardware is None or not hardware.ethernet:
        given = "no hardware is given" if hardware is None else f"{hardware.name} has no ethernet"
        raise BadInput(
            f"--what-if {question.text}: {given}; add --hardware with the network between the "
            "nodes, or give a table of measured steps"
        )
    steps = timeline.steps or 1
    gradient_bytes = question.gradient_bytes or _recorded_bytes(timeline) / steps
    if not gradient_bytes:
        raise BadInput(
            f"--what-if {question.text}: the trace does not record how many bytes its ranks "
            f"exchange; add them, as in nodes={question.nodes},gradients=438MB"
        )
    moved = ring_allreduce_bytes(question.nodes, gradient_bytes)
    last = last_bucket_share(gradient_bytes, BUCKET_BYTES) * moved
    step = timeline.span / steps
    return TraceSlowdown(
        question=question.text,
        nodes=question.nodes,
        step_seconds=step,
        gradient_bytes=gradient_bytes,
        best=1 + hardware.seconds(Resource.ETHERNET, last) / step,
        worst=1 + hardware.seconds(Resource.ETHERNET, moved) / step,
    )


def _recorded_bytes(timeline: Timeline) -> float:
    """Bytes of the collectives in the span."""
    activities = timeline.recording.activities
    inside = (
        (activities.device == timeline.device)
        & (activities.end > timeline.begin)
        & (activities.start < timeline.begin + timeline.span)
    )
    return float(np.sum(activities.message_bytes[inside]))
