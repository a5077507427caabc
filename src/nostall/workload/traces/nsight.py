"""Reader for the SQLite export of Nsight Systems (``nsys export --type sqlite``).

Tables and columns are those of NVIDIA's "SQLite Export Schema Reference".  A report has only the
tables of what was recorded, and columns differ between versions, so each is optional here.  Times
are nanoseconds.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from nostall.core.errors import BadTrace
from nostall.core.text.plurals import pluralize
from nostall.workload.traces.event_columns import MAX_DEVICE, ColumnBuilder
from nostall.workload.traces.kineto.categories import DATA_LOADER, PROFILER_STEP
from nostall.workload.traces.kineto.reader import build_recording
from nostall.workload.traces.kineto.schema import Event, EventArguments, Metadata
from nostall.workload.traces.recording import WHOLE_GRAPH, Recording

MAGIC = b"SQLite format 3\x00"
"""First bytes of an SQLite database."""
_KERNELS, _COPIES = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_MEMCPY"
_FILLS, _GRAPHS = "CUPTI_ACTIVITY_KIND_MEMSET", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_CALLS, _RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"
_DEVICES = "TARGET_INFO_CUDA_DEVICE"
_WORK = {_KERNELS: "kernel", _GRAPHS: "kernel", _COPIES: "gpu_memcpy", _FILLS: "gpu_memset"}
"""Category of the rows of each table of GPU work."""
_COPY_KINDS = {1: "HtoD", 2: "DtoH", 3: "HtoA", 4: "AtoH", 5: "AtoA", 6: "AtoD", 7: "DtoA",
               8: "DtoD", 9: "HtoH", 10: "PtoP"}  # fmt: skip
"""Names of CUPTI's CUpti_ActivityMemcpyKind."""
_RANGE_TYPES = (59, 60)
"""NVTX ranges of a thread (push, pop) and of a process (start, end)."""
_STEP = re.compile(
    r"(?:profiler|train(?:ing)?|global|optimi[sz]er)?[ _]?(?:step|iter(?:ation)?)(?:[ _:#=]*\d+)?",
    re.IGNORECASE,
)
"""NVTX ranges with such names are steps."""
_LOADER = re.compile(r"(?:data[ _]?load(?:er|ing)?|load[ _](?:data|batch))\b.*", re.IGNORECASE)
"""NVTX ranges with such names are waits for the data loader."""
_VERSION = re.compile(r"_v\d+$")
"""End of the name of a runtime call: the version of its interface."""
_ROWS = 10_000
_PROCESS = 24
"""Bits of a thread id in a global id; the process id is above them."""
_Row = Sequence[int | str | None]


def is_sqlite(path: Path) -> bool:
    """Whether a file is an SQLite database; False if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_nsight(path: Path) -> Recording:
    """Read the GPU activities, runtime calls and NVTX ranges of one export.

    Raises :class:`~nostall.core.errors.BadTrace` if the file is no export of Nsight Systems, if it
    is damaged, or if no GPU work is in it.
    """
    address = f"{path.absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(address, uri=True)) as database:
            database.text_factory = lambda text: text.decode(errors="replace")
            return _Export(path, database).read()
    except sqlite3.Error as error:
        raise BadTrace(
            f"{path}: the SQLite database is damaged ({error}); export it again with 'nsys export "
            "--type sqlite'"
        ) from error


class _Export:
    """An open export."""

    def __init__(self, path: Path, database: sqlite3.Connection) -> None:
        self.path, self.database = path, database
        tables = database.execute("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
        self.columns = {
            table: {row[1] for row in database.execute(f'PRAGMA table_info("{table}")')}
            for (table,) in tables.fetchall()
            if table in (*_WORK, _CALLS, _RANGES, "StringIds", "TARGET_INFO_GPU", _DEVICES,
                         "StringTable")
        }  # fmt: skip
        self.gpus = self._gpus()
        # Correlation ids are unique in a process; old versions do not write whose a kernel is.
        work = [self.columns[table] for table in _WORK if table in self.columns]
        self.has_processes = all("globalPid" in columns for columns in work)

    def read(self) -> Recording:
        if "StringIds" not in self.columns:
            old = "StringTable" in self.columns
            raise BadTrace(
                f"{self.path} is "
                + ("a database of nvprof, which nostall does not read" if old else
                   "an SQLite database without the tables of Nsight Systems")
                + "; record with 'nsys profile --trace=cuda,nvtx', export with 'nsys export --type "
                "sqlite' and give that file"
            )  # fmt: skip
        columns = ColumnBuilder()
        for table in (*_WORK, _CALLS, _RANGES):
            for events in self._events(table):
                columns.add(events)
        if not columns.start:
            raise BadTrace(
                f"{self.path}: Nsight Systems recorded no GPU work; record with 'nsys profile "
                "--trace=cuda,nvtx'"
            )
        return build_recording(self.path, columns, self._metadata(), remarks=self._remarks())

    def _metadata(self) -> Metadata:
        if "name" not in self.columns.get("TARGET_INFO_GPU", ()):
            return Metadata()
        rows = self.database.execute('SELECT name FROM "TARGET_INFO_GPU"').fetchall()
        return next((Metadata(gpu=str(name)) for (name,) in rows if name), Metadata())

    def _gpus(self) -> dict[tuple[int, int], int]:
        """GPU by process and its own number of it: CUDA_VISIBLE_DEVICES renumbers GPUs."""
        if not {"pid", "cudaId", "gpuId"} <= self.columns.get(_DEVICES, set()):
            return {}
        rows = self.database.execute(f'SELECT pid, cudaId, gpuId FROM "{_DEVICES}"').fetchall()
        return {
            (pid, device): gpu
            for pid, device, gpu in rows
            if isinstance(gpu, int) and 0 <= gpu <= MAX_DEVICE
        }

    def _remarks(self) -> list[str]:
        """Graphs that were recorded as one activity each."""
        if _GRAPHS not in self.columns:
            return []
        (count,) = self.database.execute(f'SELECT count(*) FROM "{_GRAPHS}"').fetchone()
        return [
            f"{pluralize(count, 'launch')} of CUDA graphs {'is' if count == 1 else 'are'} recorded "
            "without their kernels, and their time counts as memory; record with "
            "--cuda-graph-trace=node to see them"
        ] if count else []  # fmt: skip

    def _events(self, table: str) -> Iterator[list[Event]]:
        """The rows of a table as events, in lists; nothing if the report has no such table."""
        if table not in self.columns or "start" not in self.columns[table]:
            return
        fields = {
            _CALLS: ("globalTid", self._correlation("globalTid"), self._text("nameId")),
            _RANGES: ("globalTid", "eventType", self._range_name()),
        }.get(table, ("globalPid", self._correlation("globalPid"), self._work_name(table),
                      "deviceId", "contextId", "streamId", "bytes"))  # fmt: skip
        known = self.columns[table]
        has_ids = "correlationId" in known and (not self.has_processes or fields[0] in known)
        chosen = [
            f if f in known or (f.startswith("(") and (has_ids or "correlationId" not in f))
            else "NULL"
            for f in fields
        ]  # fmt: skip
        end = '"end"' if "end" in known else "NULL"
        rows = self.database.execute(
            f'SELECT "start", {end}, {", ".join(chosen)} FROM "{table}" AS t'
        )
        make = {_CALLS: _call, _RANGES: _range}.get(table)
        while batch := rows.fetchmany(_ROWS):
            events = [make(row) if make else self._work(row, table) for row in batch]
            yield [event for event in events if event is not None]

    def _correlation(self, owner: str) -> str:
        """SQL of the id of a call and its activities: the correlation id below the process."""
        process = f"((t.{owner} >> {_PROCESS}) & 0xFFFFFF)" if self.has_processes else "0"
        return f"(CASE WHEN t.correlationId > 0 THEN ({process} << 32) + t.correlationId END)"

    def _text(self, *ids: str, table: str = _CALLS) -> str:
        """SQL of the text of the first of some columns of string ids that the table has."""
        known = [name for name in ids if name in self.columns.get(table, ())]
        texts = [f"(SELECT value FROM StringIds WHERE id = t.{name})" for name in known]
        return f"(coalesce({', '.join([*texts, 'NULL', 'NULL'])}))"

    def _range_name(self) -> str:
        table = self.columns.get(_RANGES, set())
        if not table:
            return "(NULL)"
        own = "t.text" if "text" in table else "NULL"
        return f"(coalesce({own}, {self._text('textId', table=_RANGES)}))"

    def _work_name(self, table: str) -> str:
        if table == _KERNELS:
            return self._text("demangledName", "shortName", "mangledName", table=table)
        if table == _COPIES:
            return "(t.copyKind)" if "copyKind" in self.columns[table] else "(NULL)"
        return "(t.graphId)" if "graphId" in self.columns[table] else "(NULL)"

    def _work(self, row: _Row, table: str) -> Event:
        start, end, process, correlation, name, device, context, stream, size = row
        if table == _COPIES:
            name = f"Memcpy {_COPY_KINDS.get(_number(name), 'of unknown kind')}"
        elif table == _FILLS:
            name = "Memset (Device)"
        elif table == _GRAPHS:
            name = f"{WHOLE_GRAPH} {_number(name)}"
        lane = _number(process) >> _PROCESS & 0xFFFFFF
        context = _number(context) & 0x3FFF
        args = EventArguments(
            device=self.gpus.get((lane, _number(device)), device),
            stream=(lane << 38) + (context << 24) + (_number(stream) & 0xFFFFFF),
            correlation=correlation,
            bytes=size,
        )
        return _event(_WORK[table], name, start, end, process, args)


def _call(row: _Row) -> Event:
    start, end, thread, correlation, name = row
    args = EventArguments(correlation=correlation)
    return _event("cuda_runtime", _VERSION.sub("", str(name)), start, end, thread, args)


def _range(row: _Row) -> Event | None:
    start, end, thread, kind, name = row
    if end is None or (kind is not None and kind not in _RANGE_TYPES):
        return None
    text = str(name)
    if _STEP.fullmatch(text):
        text = f"{PROFILER_STEP} {text}"
    elif _LOADER.fullmatch(text):
        text = f"{DATA_LOADER} {text}"
    return _event("user_annotation", text, start, end, thread, None)


def _event(
    category: str,
    name: int | str | None,
    start: int | str | None,
    end: int | str | None,
    thread: int | str | None,
    args: EventArguments | None,
) -> Event:
    is_time = isinstance(start, int) and isinstance(end, int)
    return Event(
        ph="X",
        cat=category,
        name=name,
        ts=_number(start) / 1e3 if is_time else None,
        dur=(_number(end) - _number(start)) / 1e3 if is_time else None,
        pid=_number(thread) >> _PROCESS,
        tid=_number(thread),
        args=args,
    )


def _number(value: object) -> int:
    return value if isinstance(value, int) else 0
