"""Characterisation of profiler traces: measured times, and modelled bounds of the speed-ups.

Modelled slow-down of a traced step if it were distributed over several nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nostall.core.errors import BadInput, BadTrace
from nostall.core.text.labels import file_labels, printable
from nostall.core.text.plurals import pluralize
from nostall.workload.characterization.what_if import WhatIf
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Resource
from nostall.workload.model.breakdown import ring_allreduce_bytes
from nostall.workload.model.slowdown import BUCKET_BYTES, last_bucket_share
from nostall.workload.timeline.analysis import Timeline, build_timelines
from nostall.workload.timeline.bottlenecks import Bottleneck, find_bottlenecks
from nostall.workload.timeline.collectives import has_collectives, match_collectives
from nostall.workload.timeline.host import HostTimeline, build_host_timeline
from nostall.workload.timeline.kernels import KernelTime, kernel_times
from nostall.workload.traces.chakra.reader import ChakraTrace
from nostall.workload.traces.host import HostRecording
from nostall.workload.traces.ranks import RankRecordings
from nostall.workload.traces.recording import Recording


@dataclass(frozen=True)
class RankWaiting:
    """Time that one rank spends in the collectives of the job."""

    recording: Recording
    collective_seconds: float
    """Measured seconds of all collectives on this rank."""
    waiting_seconds: float
    """Seconds of these that the rank waits for the last rank."""
    name: str
    """The label of its trace."""


@dataclass(frozen=True)
class CollectiveSummary:
    """The collectives that all ranks of a job run together, measured."""

    collectives: int
    """Number of collectives."""
    message_bytes: float
    """Bytes that one rank contributes to all of them."""
    transfer_seconds: float
    """Seconds of all collectives without waiting."""
    ranks: tuple[RankWaiting, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": "measured",
            "collectives": self.collectives,
            "message_bytes": self.message_bytes,
            "transfer_seconds": self.transfer_seconds,
            "ranks": [
                {
                    "file": str(rank.recording.path),
                    "rank": rank.recording.rank,
                    "collective_seconds": rank.collective_seconds,
                    "waiting_seconds": rank.waiting_seconds,
                }
                for rank in self.ranks
            ],
        }


def are_ranks_of_one_job(recordings: Sequence[Recording]) -> bool:
    """Whether the traces can be of different ranks of one job, and run collectives.

    Traces without ranks can be; only their collectives tell.
    """
    ranks = {recording.rank for recording in recordings}
    return (
        len(recordings) > 1
        and (ranks == {None} or (None not in ranks and len(ranks) == len(recordings)))
        and len({recording.world_size for recording in recordings}) == 1
        and any(has_collectives(recording) for recording in recordings)
    )


def collective_summary(
    recordings: Sequence[Recording], labels: Mapping[Path, str]
) -> tuple[CollectiveSummary | None, list[str]]:
    """The summary (None if no collective has two traces), and what it does not count."""
    collectives, remarks = match_collectives(recordings)
    if not collectives:
        return None, remarks
    seconds, waits = [0.0] * len(recordings), [0.0] * len(recordings)
    for collective in collectives:
        rows = zip(collective.ranks, collective.seconds, collective.waits, strict=True)
        for rank, spent, waited in rows:
            seconds[rank] += spent
            waits[rank] += waited
    summary = CollectiveSummary(
        collectives=len(collectives),
        message_bytes=sum(c.message_bytes for c in collectives),
        transfer_seconds=sum(c.transfer for c in collectives),
        ranks=tuple(
            RankWaiting(recording, spent, waited, labels[recording.path])
            for recording, spent, waited in zip(recordings, seconds, waits, strict=True)
        ),
    )
    return summary, remarks


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


PART_OF_RESOURCE = {
    Resource.COMPUTE: "compute",
    Resource.MEMORY: "memory",
    Resource.PCIE: "data",
    Resource.NVLINK: "weights",
    Resource.ETHERNET: "weights",
}
"""The part of a timeline that a resource bounds.  A trace does not record which link a collective
uses, so both links bound all exposed communication."""
MAX_KERNELS = 25
"""Kernels, and operators of the host, in the JSON output."""


@dataclass(frozen=True)
class GpuCharacterization:
    """One GPU of one Kineto trace."""

    timeline: Timeline
    kernels: tuple[KernelTime, ...]
    bottlenecks: tuple[Bottleneck, ...]
    what_if: tuple[tuple[str, float], ...]
    """(question, modelled speed-up: the measured span over the modelled one)."""
    slowdowns: tuple[TraceSlowdown, ...]
    """The answers to ``nodes=N`` questions."""
    label: str
    """The rank, or the file name if the trace has no rank; two files have different labels."""

    @property
    def name(self) -> str:
        """The label and the device."""
        return f"{self.label}, GPU {self.timeline.device}"

    @property
    def notes(self) -> tuple[str, ...]:
        """GPU events outside the steps or without a launch, a sentence each."""
        return self._notes(self.timeline.remarks)

    @property
    def edge_notes(self) -> tuple[str, ...]:
        """How the edges of the span were chosen, if the trace has no steps for them."""
        return () if self.timeline.steps else self._notes((self.timeline.edges,))

    def _notes(self, remarks: Sequence[str]) -> tuple[str, ...]:
        path, device = self.timeline.recording.path, self.timeline.device
        return tuple(printable(f"{path}, GPU {device}: {remark}") for remark in remarks)

    def as_json(self) -> dict[str, Any]:
        timeline = self.timeline
        recording = timeline.recording
        return {
            "kind": "measured",
            "file": str(recording.path),
            "rank": recording.rank,
            "device": timeline.device,
            "gpu": recording.gpu,
            "events": recording.events,
            "seconds": timeline.span,
            "span": timeline.edges,
            "steps": timeline.steps,
            "parts_seconds": dict(timeline.parts),
            "idle_other_seconds": {reason.value: s for reason, s in timeline.other.items()},
            "gaps_that_occur_once": [
                {
                    "start_seconds": gap.start,
                    "seconds": gap.seconds,
                    "host_call": gap.call,
                    "host_call_seconds": gap.call_seconds,
                }
                for gap in timeline.single_gaps
            ],
            "longest_host_calls": {
                part: {"host_call": name, "seconds": seconds}
                for part, (name, seconds) in timeline.longest_calls.items()
            },
            "launch_seconds_without_host_call": timeline.silent_seconds,
            "communication_seconds": timeline.communication,
            "overlap": timeline.overlap,
            "kernels": timeline.num_kernels,
            "top_kernels": [_kernel_json(kernel) for kernel in self.kernels[:MAX_KERNELS]],
            "fix_first": [
                {
                    "problem": bottleneck.problem,
                    "measured_seconds": bottleneck.seconds,
                    "modelled_gain_at_most": bottleneck.max_speedup,
                    "who": bottleneck.remedy,
                    "how": bottleneck.method,
                }
                for bottleneck in self.bottlenecks
            ],
            "what_if": [
                {"question": question, "modelled_speedup": speedup}
                for question, speedup in self.what_if
            ],
            "slowdown": [answer.as_json() for answer in self.slowdowns],
        }


@dataclass(frozen=True)
class TracesCharacterization:
    """The result for a set of traces."""

    gpus: tuple[GpuCharacterization, ...]
    hosts: tuple[HostTimeline, ...]
    """Traces without GPU activities."""
    collectives: CollectiveSummary | None
    """None if there are fewer than two ranks, or if their collectives do not match."""
    chakra: tuple[ChakraTrace, ...]
    skip_reasons: tuple[str, ...]
    """Reasons for unreadable traces and traces without GPU time."""
    notes: tuple[str, ...]
    """Damage of files, missing ranks and other limits of the result."""
    labels: Mapping[Path, str]
    """The rank of each trace, or its file name; two files have different labels."""

    def as_json(self) -> dict[str, Any]:
        """The JSON output of the command; it has ``collectives`` only if they were matched."""
        matched = {"collectives": self.collectives.as_json()} if self.collectives else {}
        return {
            "ranks": [gpu.as_json() for gpu in self.gpus],
            "hosts": [_host_json(host) for host in self.hosts],
            **matched,
            "chakra": [_chakra_json(trace) for trace in self.chakra],
            "left_out": len(self.skip_reasons),
            "reasons": list(self.skip_reasons),
            "remarks": list(self.notes),
        }


def characterize_traces(
    ranks: RankRecordings | None,
    chakra: Sequence[ChakraTrace] = (),
    hardware: Hardware | None = None,
    questions: Sequence[WhatIf] = (),
    unreadable: Sequence[str] = (),
) -> TracesCharacterization:
    """Analyse Kineto traces (``ranks``) and Chakra traces.

    ``unreadable`` are the reasons for files that could not be read.  Raises
    :class:`~nostall.core.errors.BadTrace` if no trace has GPU time.
    """
    skip_reasons = [*unreadable, *(ranks.unreadable if ranks else ())]
    recordings = ranks.recordings if ranks else ()
    labels = _labels([*recordings, *(ranks.hosts if ranks else ())], chakra)
    gpus: list[GpuCharacterization] = []
    for recording in recordings:
        try:
            timelines = build_timelines(recording)
        except BadTrace as error:
            skip_reasons.append(str(error))
            continue
        gpus += [
            _characterize_gpu(timeline, hardware, questions, labels[recording.path])
            for timeline in timelines
        ]
    hosts: list[HostTimeline] = []
    for host in ranks.hosts if ranks else ():
        try:
            hosts.append(build_host_timeline(host))
        except BadTrace as error:
            skip_reasons.append(str(error))
    if not gpus and not hosts and not chakra:
        raise BadTrace(skip_reasons[0] if skip_reasons else "no traces; give at least one file")
    if questions and not gpus:
        raise BadInput(
            f"--what-if {questions[0].text}: no trace has GPU activities to ask about; record one "
            "with ProfilerActivity.CUDA"
        )
    notes = list(ranks.notes) if ranks else []
    notes += [f"{trace.path}: {remark}" for trace in chakra for remark in trace.remarks]
    notes += [note for gpu in gpus for note in _overlap_notes(gpu)]
    collectives = None
    if are_ranks_of_one_job(recordings):
        try:
            collectives, remarks = collective_summary(recordings, labels)
            notes += remarks
        except BadTrace as error:
            notes.append(f"the waiting of ranks for each other is unknown: {error}")
    notes += [note for gpu in gpus for note in gpu.notes]
    return TracesCharacterization(
        tuple(gpus),
        tuple(hosts),
        collectives,
        tuple(chakra),
        tuple(map(printable, skip_reasons)),
        tuple(map(printable, notes)),
        labels,
    )


def _overlap_notes(gpu: GpuCharacterization) -> list[str]:
    count = gpu.timeline.num_overlapping
    if not count:
        return []
    return [
        f"{gpu.timeline.recording.path}: {pluralize(count, 'kernel')} of GPU {gpu.timeline.device} "
        f"{'overlaps' if count == 1 else 'overlap'} another kernel of the same stream (branches of "
        "a CUDA graph, dependent launches, or damaged times); each moment counts once, but sums of "
        "kernels count both"
    ]


def _labels(
    recordings: Sequence[Recording | HostRecording], chakra: Sequence[ChakraTrace]
) -> dict[Path, str]:
    """Labels of the traces; traces of one rank have their file names, too."""
    traces: list[tuple[Path, int | None]] = [(r.path, r.rank) for r in recordings]
    traces += [(trace.path, None) for trace in chakra]
    ranks = [rank for _, rank in traces]
    files = file_labels([path for path, _ in traces])
    labels = {}
    for (path, rank), file in zip(traces, files, strict=True):
        if rank is None:
            labels[path] = file
        else:
            labels[path] = f"rank {rank}" + (f" ({file})" if ranks.count(rank) > 1 else "")
    return labels


def _characterize_gpu(
    timeline: Timeline, hardware: Hardware | None, questions: Sequence[WhatIf], label: str
) -> GpuCharacterization:
    kernels = kernel_times(timeline, hardware)
    what_if = tuple((q.text, _speedup(timeline, q, hardware)) for q in questions if q.nodes is None)
    slowdowns = tuple(
        slowdown_over_nodes(timeline, q, hardware) for q in questions if q.nodes is not None
    )
    bottlenecks = find_bottlenecks(timeline, kernels)
    return GpuCharacterization(
        timeline, tuple(kernels), tuple(bottlenecks), what_if, slowdowns, label
    )


def _speedup(timeline: Timeline, question: WhatIf, hardware: Hardware | None) -> float:
    """Amdahl's law for the measured part that the resource of the question bounds."""
    if question.resource is None:
        raise BadInput(
            f"--what-if {question.text}: a trace has too little information for a projection to "
            "another architecture; give a job table, or ask for a rate such as nvlink=x2"
        )
    factor = question.factor if hardware is None else question.factor_on(hardware)
    if factor is None:
        raise BadInput(
            f"--what-if {question.text}: a trace does not record the rates of its links; add "
            "--hardware, or ask for a factor such as nvlink=x2"
        )
    seconds = timeline.parts[PART_OF_RESOURCE[question.resource]]
    return timeline.span / (timeline.span - seconds + seconds / factor)


def _kernel_json(kernel: KernelTime) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "name": kernel.name,
        "class": kernel.kind.name.lower(),
        "launches": kernel.launches,
        "seconds": kernel.seconds,
    }
    if kernel.roofline is not None:
        fields["modelled_roofline"] = {
            "placed_seconds": kernel.roofline_seconds,
            "flop_per_byte": kernel.roofline.intensity,
            "bound": kernel.roofline.bound,
            "reached": kernel.roofline.attained_share,
        }
    return fields


def _host_json(host: HostTimeline) -> dict[str, Any]:
    return {
        "kind": "measured",
        "file": str(host.recording.path),
        "rank": host.recording.rank,
        "events": host.recording.events,
        "seconds": host.span,
        "steps": host.steps,
        "parts_seconds": dict(host.parts),
        "top_operators": [asdict(operator) for operator in host.operators[:MAX_KERNELS]],
    }


def _chakra_json(trace: ChakraTrace) -> dict[str, Any]:
    return {
        "kind": "measured",
        "file": str(trace.path),
        "version": trace.version,
        "nodes": trace.nodes,
        "gpu_nodes": trace.gpu_nodes,
        "gpu_seconds": {kind.name.lower(): value for kind, value in trace.seconds.items()},
        "host_seconds": trace.host_seconds,
        "collective_bytes": dict(trace.moved_bytes),
        "flops": trace.flops,
    }
