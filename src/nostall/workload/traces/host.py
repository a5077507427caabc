"""Reader for the host side of a Kineto trace: operators, data loader and runtime calls."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nostall.core.errors import BadTrace
from nostall.core.files.text_blocks import Progress
from nostall.workload.traces.event_columns import ColumnBuilder, column_remarks
from nostall.workload.traces.kineto.categories import DATA_LOADER, ROLES, EventRole
from nostall.workload.traces.kineto.metadata import read_metadata
from nostall.workload.traces.kineto.schema import Event
from nostall.workload.traces.recording import TIME_UNIT, RuntimeCalls
from nostall.workload.traces.stream.event_stream import TraceFile
from nostall.workload.traces.usable_times import has_usable_time


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


class _HostColumns(ColumnBuilder):
    """Columns that have every operator, not only those with a cost."""

    def __init__(self) -> None:
        super().__init__()
        self.operator_names: dict[str, int] = {}
        self.operator_start, self.operator_end = array("d"), array("d")
        self.operator_name, self.thread = array("i"), array("q")

    def add_host(self, events: list[Event]) -> None:
        """Append the operators, annotations and runtime calls of the events."""
        self.add([e for e in events if ROLES.get(e.cat) is not EventRole.OPERATOR])
        self.events += sum(ROLES.get(e.cat) is EventRole.OPERATOR for e in events)
        for event in events:
            if event.ph != "X" or ROLES.get(event.cat) is not EventRole.OPERATOR:
                continue
            if (span := self._span(event)) is None:
                continue
            name = str(event.name)
            if name.startswith(DATA_LOADER):
                self.loading.append(span)
                continue
            index = self.operator_names.setdefault(name, len(self.operator_names))
            self.operator_start.append(span[0])
            self.operator_end.append(span[1])
            self.operator_name.append(index)
            self.thread.append(self._parse_id(event.tid))


def read_host(path: Path, progress: Progress | None = None) -> HostRecording:
    """Read the host side of a trace, plain or gzipped.

    Raises :class:`~nostall.core.errors.BadTrace` if it has neither operators nor runtime calls.
    """
    file = TraceFile(path, progress)
    columns = _HostColumns()
    for events in file.event_lists(columns.decode):
        columns.add_host(events)
    start = np.concatenate((np.array(columns.operator_start), np.array(columns.call_start)))
    if not len(start):
        raise BadTrace(
            f"{path}: none of its events is GPU work, an operator or a runtime call; record the "
            "trace with ProfilerActivity.CPU or ProfilerActivity.CUDA"
        )
    end = np.concatenate((np.array(columns.operator_end), np.array(columns.call_end)))
    usable = has_usable_time(start, end, np.full(len(start), np.nan))
    origin = float(start[usable].min())
    num_rejected = int((~usable).sum())
    columns.note_out_of_time(num_rejected)
    metadata, damage = read_metadata(file.frame, is_complete=file.end_damage is None)
    distributed = metadata.distributed
    rows = np.flatnonzero(usable[: len(columns.operator_start)])
    return HostRecording(
        path=path,
        operators=_operators(columns, rows, origin),
        names=tuple(columns.operator_names),
        calls=columns.calls(origin),
        steps=_spans(columns.steps, origin),
        loading=_spans(columns.loading, origin),
        rank=distributed.rank if distributed else None,
        world_size=distributed.world_size if distributed else None,
        events=columns.events,
        remarks=(*file.remarks, *column_remarks(columns), *([damage] if damage else [])),
    )


def _operators(columns: _HostColumns, rows: np.ndarray, origin: float) -> HostOperators:
    start = np.array(columns.operator_start)[rows]
    end = np.array(columns.operator_end)[rows]
    order = np.lexsort((-end, start))
    return HostOperators(
        start=(start[order] - origin) * TIME_UNIT,
        end=(end[order] - origin) * TIME_UNIT,
        name=np.array(columns.operator_name, dtype=np.int32)[rows][order],
        thread=np.array(columns.thread, dtype=np.int64)[rows][order],
    )


def _spans(spans: list[tuple[float, float]], origin: float) -> np.ndarray:
    return (np.array(sorted(spans), dtype=np.float64).reshape(-1, 2) - origin) * TIME_UNIT
