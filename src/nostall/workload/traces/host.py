"""Reader for the host side of a Kineto trace: operators, data loader and runtime calls."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from nostall.core.errors import BadTrace
from nostall.core.files.text_blocks import Progress
from nostall.workload.traces.event_columns import has_usable_time, outer_steps, spans
from nostall.workload.traces.kineto.reader import read_columns
from nostall.workload.traces.kineto.schema import read_metadata
from nostall.workload.traces.recording import HostCalls, RuntimeCalls


@dataclass(frozen=True)
class HostRecording:
    """The host side of a trace.  Times are seconds since its first operator or runtime call."""

    path: Path
    operators: HostCalls
    """Operators alone; annotations are left out."""
    names: tuple[str, ...]
    """Names of the operators, runtime calls and annotations."""
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
    file, columns = read_columns(path, progress)
    is_operator = np.array(columns.host_is_operator, dtype=bool)
    operator_start = np.array(columns.host_start)[is_operator]
    operator_end = np.array(columns.host_end)[is_operator]
    start = np.concatenate((operator_start, np.array(columns.call_start)))
    if not len(start):
        columns.unknown_categories += columns.host_categories
        causes = columns.remarks()
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
    is_operator[is_operator] = usable[: len(operator_start)]
    return HostRecording(
        path=path,
        operators=columns.host_calls(origin, is_operator),
        names=tuple(columns.host_names),
        calls=columns.calls(origin),
        steps=spans(outer_steps(columns), origin)[0],
        loading=spans(columns.loading, origin)[0],
        rank=metadata.rank,
        world_size=metadata.world_size,
        events=columns.events,
        remarks=(
            *file.remarks,
            *columns.remarks(),
            *([damage] if damage else []),
        ),
    )
