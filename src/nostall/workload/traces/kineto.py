"""Kineto traces (torch.profiler's export_chrome_trace): streamed into columns, once through."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec
import numpy as np

from nostall.core.errors import BadTrace
from nostall.workload.traces.amounts import OPERATORS, Amounts, amounts
from nostall.workload.traces.chunks import Progress, TraceFile
from nostall.workload.traces.events import Arguments, Event, Frame
from nostall.workload.traces.recording import SECONDS, Activities, Calls, Recording

GPU = {
    "kernel": 0,
    "Kernel": 0,
    "gpu_memcpy": 1,
    "Memcpy": 1,
    "gpu_memset": 2,
    "Memset": 2,
}
"""Categories of GPU activities, spelt as old and new Kineto do."""
RUNTIME = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime"})
OPERATOR = frozenset({"cpu_op", "Operator"})
MOST_DULL = 10_000
"""Names of operators that are remembered; a trace may make up a new name for every call."""
_LOADING = "enumerate(DataLoader)"
BYTES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Float8_e4m3fn": 1,
    "Float8_e5m2": 1,
    "Half": 2,
    "BFloat16": 2,
    "Short": 2,
    "Float": 4,
    "Int": 4,
    "Double": 8,
    "Long": 8,
}
"""Bytes an element, by the names that NCCL records carry."""


def read_kineto(path: Path, progress: Progress | None = None) -> Recording:
    """Read one trace, gzipped or not; memory holds only GPU activities and runtime calls.

    Raises :class:`~nostall.core.errors.BadTrace` naming file and position where there is nothing to
    read, and naming the file where no activity ran on a GPU.
    """
    file = TraceFile(path, progress)
    columns = _Columns()
    for events in file.lists(columns.decode):
        columns.add(events)
    if not columns.events:
        raise BadTrace(f"{path}: no events: {file.damage or 'the list is empty'}; record anew")
    frame, damage = _frame(file)
    if not columns.start:
        why = f" ({damage})" if damage else ""
        raise BadTrace(
            f"{path}: none of {columns.events} events ran on a GPU{why}; record with "
            "ProfilerActivity.CUDA on a machine with a GPU"
        )
    return columns.recording(path, frame, damage)


def _frame(file: TraceFile) -> tuple[Frame, str | None]:
    if file.frame.startswith(b"[") or not file.frame:
        return Frame(), file.damage
    try:
        return msgspec.json.decode(file.frame, type=Frame), file.damage
    except msgspec.DecodeError as error:
        where = f"what stands around the events cannot be read ({error})"
        return Frame(), file.damage or where


class _Columns:
    """Columns that grow while the trace streams by."""

    def __init__(self) -> None:
        self._events = msgspec.json.Decoder(list[Event])
        self._raw = msgspec.json.Decoder(list[msgspec.Raw])
        self._one = msgspec.json.Decoder(Event)
        self.events = self.left_out = 0
        self.names: dict[str, int] = {}
        self.start, self.end = array("d"), array("d")
        self.name, self.kind, self.device = array("i"), array("b"), array("h")
        self.stream, self.correlation, self.operator = array("q"), array("q"), array("q")
        self.size, self.message = array("d"), array("d")
        self.call_start, self.call_end = array("d"), array("d")
        self.call_correlation, self.call_waits = array("q"), array("b")
        self.steps: list[tuple[float, float]] = []
        self.loading: list[tuple[float, float]] = []
        self.amounts: dict[int, Amounts] = {}
        self._dull: set[str | int | None] = set()

    def decode(self, text: bytes | memoryview) -> list[Event]:
        """A list of events; where a field of one has another type, that one is left out."""
        try:
            return self._events.decode(text)
        except msgspec.ValidationError:
            found = []
            for raw in self._raw.decode(text):
                try:
                    found.append(self._one.decode(raw))
                except msgspec.ValidationError:
                    self.events += 1
                    self.left_out += 1
            return found

    def add(self, events: list[Event]) -> None:
        """Sort one list of events into the columns."""
        self.events += len(events)
        gpu, runtime, operator, dull = GPU.get, RUNTIME, OPERATOR, self._dull
        for event in events:
            if event.ph != "X":
                continue
            category = event.cat
            if event.dur < 0:
                self.left_out += 1
            elif category in operator:
                if event.name not in dull:
                    self._operator(event)
            elif category in runtime:
                self._call(event)
            elif category is not None and (kind := gpu(category)) is not None:
                self._activity(event, kind)
            elif category == "user_annotation":
                self._annotation(event)

    def _activity(self, event: Event, kind: int) -> None:
        args = event.args or _NONE
        name = str(event.name)
        self.start.append(event.ts)
        self.end.append(event.ts + event.dur)
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.kind.append(kind)
        self.stream.append(_number(args.stream if args.stream is not None else event.tid))
        self.device.append(min(_number(args.device), 32767))
        self.correlation.append(-1 if args.correlation is None else args.correlation)
        # Old Kineto repeats the correlation instead of naming the operator.
        own = args.external is None or args.external == args.correlation
        self.operator.append(-1 if own or args.external is None else args.external)
        self.size.append(args.bytes or 0.0)
        self.message.append((args.elements or 0.0) * BYTES.get(args.dtype or "", 0))

    def _call(self, event: Event) -> None:
        args = event.args or _NONE
        self.call_start.append(event.ts)
        self.call_end.append(event.ts + event.dur)
        self.call_correlation.append(-1 if args.correlation is None else args.correlation)
        self.call_waits.append("Synchronize" in str(event.name))

    def _annotation(self, event: Event) -> None:
        name = str(event.name)
        if name.startswith("ProfilerStep"):
            self.steps.append((event.ts, event.ts + event.dur))
        elif name.startswith(_LOADING):
            self.loading.append((event.ts, event.ts + event.dur))

    def _operator(self, event: Event) -> None:
        """What is counted, and data loaders; other names are remembered as of no interest."""
        name = str(event.name)
        if name in OPERATORS:
            self._count(name, event)
        elif name.startswith(_LOADING):
            self.loading.append((event.ts, event.ts + event.dur))
        elif len(self._dull) < MOST_DULL:
            self._dull.add(event.name)

    def _count(self, name: str, event: Event) -> None:
        args = event.args or _NONE
        if args.external is None or not args.dims or not args.types:
            return
        found = amounts(name, bytes(args.dims), bytes(args.types), bytes(args.plain or b"[]"))
        if found is not None:
            self.amounts[args.external] = found

    def recording(self, path: Path, frame: Frame, damage: str | None) -> Recording:
        """The columns, sorted by start."""
        order = np.argsort(np.frombuffer(self.start), kind="stable")
        # Clocks count from the epoch; subtracting first keeps the nanoseconds of a float.
        origin = float(np.frombuffer(self.start)[order[0]])
        return Recording(
            path=path,
            activities=self._activities(order, origin),
            calls=self._calls(origin),
            names=tuple(self.names),
            steps=_spans(self.steps, origin),
            loading=_spans(self.loading, origin),
            amounts=self.amounts,
            origin=origin * SECONDS,
            rank=frame.distributed.rank if frame.distributed else None,
            world_size=frame.distributed.world_size if frame.distributed else None,
            gpu=next((d.name for d in frame.devices if d.name), "unknown GPU"),
            schema=frame.schema,
            events=self.events,
            left_out=self.left_out,
            damage=damage,
        )

    def _activities(self, order: np.ndarray, origin: float) -> Activities:
        device = np.array(self.device, dtype=np.int16)[order]
        if (named := device >= 0).any():
            device[~named] = device[named].min()  # some copies of old traces name no device
        return Activities(
            start=(np.array(self.start)[order] - origin) * SECONDS,
            end=(np.array(self.end)[order] - origin) * SECONDS,
            name=np.array(self.name, dtype=np.int32)[order],
            kind=np.array(self.kind, dtype=np.int8)[order],
            stream=np.array(self.stream, dtype=np.int64)[order],
            device=device,
            correlation=np.array(self.correlation, dtype=np.int64)[order],
            size=np.array(self.size)[order],
            message=np.array(self.message)[order],
            operator=np.array(self.operator, dtype=np.int64)[order],
        )

    def _calls(self, origin: float) -> Calls:
        order = np.argsort(np.array(self.call_start), kind="stable")
        return Calls(
            start=(np.array(self.call_start)[order] - origin) * SECONDS,
            end=(np.array(self.call_end)[order] - origin) * SECONDS,
            correlation=np.array(self.call_correlation, dtype=np.int64)[order],
            waits=np.array(self.call_waits, dtype=bool)[order],
        )


def _spans(spans: list[tuple[float, float]], origin: float) -> np.ndarray:
    return (np.array(sorted(spans), dtype=np.float64).reshape(-1, 2) - origin) * SECONDS


_NONE = Arguments()


def _number(value: int | str | None) -> int:
    """Streams and devices are numbers, or text that holds one ('stream 7')."""
    if isinstance(value, int):
        return value
    digits = "".join(c for c in str(value) if c.isdigit())
    return int(digits) if digits else -1
