"""Reader for the host side of a Kineto trace: operators, data loader and runtime calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nostall.core.errors import BadTrace
from nostall.core.files.text_blocks import Progress
from nostall.workload.traces.event_columns import (
    ColumnBuilder,
    event_remarks,
    has_usable_time,
    outer_steps,
    spans,
)
from nostall.workload.traces.kineto.metadata import read_metadata
from nostall.workload.traces.recording import TIME_UNIT, RuntimeCalls
from nostall.workload.traces.stream import TraceFile


@dataclass(frozen=True)
class HostOperators:
    """Calls of operators in columns of shape [calls], sorted by start."""

    start: np.ndarray
    """Seconds."""
    end: np.ndarray
    """Seconds."""
    name: np.ndarray
    """Index into ``HostRecording.names``."""
    thread: np.ndarray
    """Number of the thread that ran the operator."""


@dataclass(frozen=True)
class HostRecording:
    """The host side of a trace.  Times are seconds since its first operator or runtime call."""

    path: Path
    operators: HostOperators
    names: tuple[str, ...]
    """Names of the operators."""
    calls: RuntimeCalls
    steps: np.ndarray
    """Start and end of each ProfilerStep, shape [steps, 2]."""
    loading: np.ndarray
    """Start and end of each wait of the host for its data loader, shape [waits, 2]."""
    rank: int | None
    world_size: int | None
    events: int
    """Number of events that were read."""
    remarks: tuple[str, ...]
    """Damage of the file and skipped events, a sentence each."""


def read_host(path: Path, progress: Progress | None = None) -> HostRecording:
    """Read the host side of a trace, plain or gzipped.

    Raises :class:`~nostall.core.errors.BadTrace` if it has neither operators nor runtime calls.
    """
    file = TraceFile(path, progress)
    columns = ColumnBuilder()
    for events in file.event_lists(columns.decode):
        columns.add(events)
    columns.finish()
    is_operator = np.array(columns.host_is_operator, dtype=bool)
    operator_start = np.array(columns.host_start)[is_operator]
    operator_end = np.array(columns.host_end)[is_operator]
    start = np.concatenate((operator_start, np.array(columns.call_start)))
    if not len(start):
        causes = event_remarks(columns.unusable, columns.unknown_categories)
        cause = f" ({'; '.join(causes)})" if causes else ""
        raise BadTrace(
            f"{path}: none of its events is GPU work, an operator or a runtime call{cause}; record "
            "the trace with ProfilerActivity.CPU or ProfilerActivity.CUDA"
        )
    end = np.concatenate((operator_end, np.array(columns.call_end)))
    usable = has_usable_time(start, end, np.full(len(start), np.nan))
    origin = float(start[usable].min())
    num_rejected = int((~usable).sum())
    columns.note_out_of_time(num_rejected)
    metadata, damage = read_metadata(file.frame, is_complete=file.end_damage is None)
    distributed = metadata.distributed
    rows = np.flatnonzero(is_operator)[usable[: len(operator_start)]]
    return HostRecording(
        path=path,
        operators=_operators(columns, rows, origin),
        names=tuple(columns.host_names),
        calls=columns.calls(origin),
        steps=spans(outer_steps(columns), origin)[0],
        loading=spans(columns.loading, origin)[0],
        rank=distributed.rank if distributed else None,
        world_size=distributed.world_size if distributed else None,
        events=columns.events,
        remarks=(
            *file.remarks,
            *event_remarks(columns.unusable, columns.unknown_categories),
            *([damage] if damage else []),
        ),
    )


def _operators(columns: ColumnBuilder, rows: np.ndarray, origin: float) -> HostOperators:
    start = np.array(columns.host_start)[rows]
    end = np.array(columns.host_end)[rows]
    order = np.lexsort((-end, start))
    return HostOperators(
        start=(start[order] - origin) * TIME_UNIT,
        end=(end[order] - origin) * TIME_UNIT,
        name=np.array(columns.host_name, dtype=np.int32)[rows][order],
        thread=np.array(columns.host_thread, dtype=np.int64)[rows][order],
    )
