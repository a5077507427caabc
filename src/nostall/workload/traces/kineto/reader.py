"""Reader for Kineto traces (torch.profiler's ``export_chrome_trace``), in one streaming pass."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nostall.core.errors import BadTrace
from nostall.core.files.text_blocks import Progress
from nostall.core.text.plurals import pluralize
from nostall.workload.traces.event_columns import ColumnBuilder, outer_steps, spans
from nostall.workload.traces.kineto.schema import Metadata, read_metadata
from nostall.workload.traces.recording import TIME_UNIT, Recording
from nostall.workload.traces.stream import TraceFile


class NoGpuActivity(BadTrace):
    """A trace has events, and none of them ran on a GPU."""


def read_columns(path: Path, progress: Progress | None) -> tuple[TraceFile, ColumnBuilder]:
    """The columns of a trace, and its file, which was read to its end."""
    file = TraceFile(path, progress)
    columns = ColumnBuilder()
    for events in file.event_lists(columns.decode):
        columns.add(events)
    columns.finish()
    return file, columns


def read_kineto(path: Path, progress: Progress | None = None) -> Recording:
    """Read one trace, plain or gzipped; memory holds only GPU activities and calls on the host.

    Damaged events are skipped, and ``Recording.remarks`` counts them.  Raises
    :class:`~nostall.core.errors.BadTrace` if the file has no events (with the position of the
    damage), and :class:`NoGpuActivity` if none of them is a GPU activity.
    """
    file, columns = read_columns(path, progress)
    if not columns.events:
        cause = "; ".join(file.remarks) or "the list is empty"
        raise BadTrace(f"{path}: no events: {cause}; record the trace again")
    if not columns.start:
        causes = (*file.remarks, *columns.remarks())
        cause = f" ({'; '.join(causes)})" if causes else ""
        raise NoGpuActivity(
            f"{path}: none of {pluralize(columns.events, 'event')} ran on a GPU{cause}; record the "
            "trace with ProfilerActivity.CUDA on a machine with a GPU"
        )
    metadata, damage = read_metadata(file.frame, is_complete=file.end_damage is None)
    return build_recording(
        path, columns, metadata, remarks=file.remarks, damage=[damage] if damage else ()
    )


def build_recording(
    path: Path,
    columns: ColumnBuilder,
    metadata: Metadata,
    remarks: Sequence[str],
    damage: Sequence[str] = (),
) -> Recording:
    """The recording of columns that have GPU activities, which are sorted by start."""
    rows = columns.usable_activities()
    rows = rows[np.argsort(np.array(columns.start)[rows], kind="stable")]
    # Times count from the epoch; subtracting before scaling keeps nanoseconds in a float64.
    origin = columns.start[rows[0]]
    steps, step_thread = spans(outer_steps(columns), origin)
    loading, loading_thread = spans(columns.loading, origin)
    return Recording(
        path=path,
        activities=columns.activities(rows, origin),
        calls=columns.calls(origin),
        names=tuple(columns.names),
        steps=steps,
        loading=loading,
        step_thread=step_thread,
        step_numbers=frozenset(columns.step_numbers),
        loading_thread=loading_thread,
        host=columns.host_calls(origin),
        host_names=tuple(columns.host_names),
        thread_process=np.array(columns.thread_process, dtype=np.int64),
        operator_costs=columns.operator_costs,
        origin=origin * TIME_UNIT,
        rank=metadata.rank,
        world_size=metadata.world_size,
        gpu=metadata.gpu,
        schema=metadata.schema,
        events=columns.events,
        remarks=(
            *remarks,
            *columns.remarks(),
            *columns.lost_work(),
            *damage,
        ),
        groups=tuple(columns.groups),
    )
