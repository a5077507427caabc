"""Advice from a trace alone: what costs time, and which command or setting addresses it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from nostall.workload.characterization import TracesCharacterization, characterize_traces
from nostall.workload.timeline.host import HOST_PARTS
from nostall.workload.traces.ranks import read_ranks

SUFFIXES = (".json", ".json.gz", ".sqlite")
NO_BOUND = "no bound: a trace alone has no rates of its memory-bound kernels"


@dataclass(frozen=True)
class Advice:
    """One cause of lost time."""

    where: str
    problem: str
    seconds: float
    share: float
    """Of the measured span."""
    remedy: str


def is_trace(word: str) -> bool:
    """Whether an argument is a trace and not a program."""
    return word.endswith(SUFFIXES) and not Path(word).is_dir()


def advise(path: Path) -> tuple[list[Advice], list[str]]:
    """What to fix first in a trace, longest first, and notes; nothing is tried.

    Raises :class:`~nostall.core.errors.BadTrace` for a file that is no trace.
    """
    result = characterize_traces(read_ranks([path]))
    return sorted(_causes(result), key=lambda a: -a.share), list(result.notes)


def _causes(result: TracesCharacterization) -> list[Advice]:
    found = [
        Advice(gpu.name, b.problem, b.seconds, b.seconds / gpu.timeline.span, b.remedy)
        for gpu in result.gpus
        for b in gpu.bottlenecks
    ]
    return found + [
        Advice(
            result.labels[host.recording.path],
            part.replace("_", " "),
            host.parts[part],
            host.parts[part] / host.span,
            "the trace has no GPU; `nostall optimize -- PROGRAM` tries changes on its steps",
        )
        for host in result.hosts
        for part in HOST_PARTS
        if host.parts[part] > 0
    ]
