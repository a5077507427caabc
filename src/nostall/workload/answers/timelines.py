"""What the GPUs of one or several traces wait for, what to fix first, and what would change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nostall.core.errors import BadInput, BadTrace
from nostall.workload.answers.whatif import WhatIf
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Resource
from nostall.workload.timeline.advice import Advice, advise
from nostall.workload.timeline.analysis import Timeline, analyse
from nostall.workload.timeline.kernels import KernelTime, kernel_times
from nostall.workload.traces.chakra import ChakraTrace
from nostall.workload.traces.ranks import Ranks

PART_OF = {
    Resource.COMPUTE: "compute",
    Resource.MEMORY: "memory",
    Resource.PCIE: "data",
    Resource.NVLINK: "weights",
    Resource.ETHERNET: "weights",
}
"""Which measured part a resource bounds; a trace does not say what its collectives went over."""
MOST_KERNELS = 25


@dataclass(frozen=True)
class Rank:
    """One GPU of one trace, with what follows from it."""

    timeline: Timeline
    kernels: tuple[KernelTime, ...]
    advice: tuple[Advice, ...]
    changed: tuple[tuple[str, float], ...]

    @property
    def name(self) -> str:
        """Rank and device as the trace gives them, else the file's name."""
        rank = self.timeline.recording.rank
        first = f"rank {rank}" if rank is not None else self.timeline.recording.path.name
        return f"{first}, GPU {self.timeline.device}"

    def as_json(self) -> dict[str, Any]:
        own = self.timeline
        return {
            "kind": "measured",
            "file": str(own.recording.path),
            "rank": own.recording.rank,
            "device": own.device,
            "gpu": own.recording.gpu,
            "events": own.recording.events,
            "seconds": own.span,
            "steps": own.steps,
            "parts_seconds": dict(own.parts),
            "communication_seconds": own.communication,
            "overlap": own.overlap,
            "kernels": own.kernels,
            "top_kernels": [_kernel(k) for k in self.kernels[:MOST_KERNELS]],
            "fix_first": [
                {
                    "problem": a.problem,
                    "measured_seconds": a.seconds,
                    "modelled_gain_at_most": a.gain,
                    "who": a.level,
                    "how": a.how,
                }
                for a in self.advice
            ],
            "what_if": [{"question": q, "modelled_speedup": s} for q, s in self.changed],
        }


@dataclass(frozen=True)
class TracesAnswer:
    """Everything that is said of traces."""

    ranks: tuple[Rank, ...]
    chakra: tuple[ChakraTrace, ...]
    left_out: tuple[str, ...]
    remarks: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "ranks": [rank.as_json() for rank in self.ranks],
            "chakra": [_chakra(one) for one in self.chakra],
            "left_out": len(self.left_out),
            "reasons": list(self.left_out),
            "remarks": list(self.remarks),
        }


def answer_traces(
    read: Ranks | None,
    chakra: Sequence[ChakraTrace] = (),
    hardware: Hardware | None = None,
    questions: Sequence[WhatIf] = (),
    unread: Sequence[str] = (),
) -> TracesAnswer:
    """Timelines, kernels, advice and what-ifs of every trace that was read.

    ``unread`` says why further files were not.
    """
    left_out = [*unread, *(read.left_out if read else ())]
    ranks: list[Rank] = []
    for recording in read.recordings if read else ():
        try:
            timelines = analyse(recording)
        except BadTrace as error:
            left_out.append(str(error))
            continue
        ranks += [_rank(timeline, hardware, questions) for timeline in timelines]
    if not ranks and not chakra:
        raise BadTrace(left_out[0] if left_out else "no traces were given; give at least one file")
    remarks = list(read.remarks) if read else []
    remarks += [f"{c.path}: {c.damage}; what came before is used" for c in chakra if c.damage]
    return TracesAnswer(tuple(ranks), tuple(chakra), tuple(left_out), tuple(remarks))


def _rank(timeline: Timeline, hardware: Hardware | None, questions: Sequence[WhatIf]) -> Rank:
    kernels = kernel_times(timeline, hardware)
    changed = tuple((q.text, _speedup(timeline, q, hardware)) for q in questions)
    return Rank(timeline, tuple(kernels), tuple(advise(timeline, kernels)), changed)


def _speedup(timeline: Timeline, question: WhatIf, hardware: Hardware | None) -> float:
    """Amdahl over the measured part that the resource bounds."""
    if question.resource is None:
        raise BadInput(
            f"--what-if {question.text}: a trace does not hold what a projection needs; give a job "
            "table for it, or ask for a rate such as nvlink=x2"
        )
    if question.factor is None and hardware is None:
        raise BadInput(
            f"--what-if {question.text}: a trace does not say how fast its links are; add "
            "--hardware, or ask for a factor such as nvlink=x2"
        )
    factor = question.factor or question.of(hardware) if hardware else question.factor
    assert factor is not None
    part = timeline.parts[PART_OF[question.resource]]
    return timeline.span / (timeline.span - part * (1 - 1 / factor))


def _kernel(kernel: KernelTime) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": kernel.name,
        "class": kernel.kind.name.lower(),
        "launches": kernel.launches,
        "seconds": kernel.seconds,
    }
    if kernel.placement is not None:
        found["modelled_roofline"] = {
            "placed_seconds": kernel.placed,
            "flop_per_byte": kernel.placement.intensity,
            "bound": kernel.placement.bound,
            "reached": kernel.placement.reached,
        }
    return found


def _chakra(one: ChakraTrace) -> dict[str, Any]:
    return {
        "kind": "measured",
        "file": str(one.path),
        "version": one.version,
        "nodes": one.nodes,
        "gpu_nodes": one.gpu_nodes,
        "gpu_seconds": {kind.name.lower(): value for kind, value in one.seconds.items()},
        "host_seconds": one.host_seconds,
        "collective_bytes": dict(one.moved),
        "flops": one.flops,
    }
