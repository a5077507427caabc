"""Reader for Kineto traces (torch.profiler's ``export_chrome_trace``), in one streaming pass."""

from __future__ import annotations

from array import array
from pathlib import Path

import msgspec
import numpy as np

from nostall.core.errors import BadTrace
from nostall.workload.traces.event_stream import Progress, TraceFile
from nostall.workload.traces.kineto_schema import Event, EventArguments, Metadata
from nostall.workload.traces.operator_cost import COST_RULES, OperatorCost, operator_cost
from nostall.workload.traces.recording import (
    TIME_UNIT,
    Activities,
    ActivityType,
    Recording,
    RuntimeCalls,
)

# Old and new versions of Kineto spell categories differently.
GPU_CATEGORIES: dict[str, int] = {
    "kernel": ActivityType.KERNEL,
    "Kernel": ActivityType.KERNEL,
    "gpu_memcpy": ActivityType.MEMCPY,
    "Memcpy": ActivityType.MEMCPY,
    "gpu_memset": ActivityType.MEMSET,
    "Memset": ActivityType.MEMSET,
}
RUNTIME_CATEGORIES = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime"})
OPERATOR_CATEGORIES = frozenset({"cpu_op", "Operator"})
MAX_IGNORED_NAMES = 10_000
"""Limit of the set of ignored operator names; a trace can have a new name for every call."""
_DATA_LOADER = "enumerate(DataLoader)"
DTYPE_BYTES = {
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
"""Bytes per element of the dtypes that PyTorch records for NCCL kernels."""


def read_kineto(path: Path, progress: Progress | None = None) -> Recording:
    """Read one trace, plain or gzipped; memory holds only GPU activities and runtime calls.

    Raises :class:`~nostall.core.errors.BadTrace` if the file has no events (with the position of
    the damage), or no GPU activity.
    """
    file = TraceFile(path, progress)
    columns = _ColumnBuilder()
    for events in file.event_lists(columns.decode):
        columns.add(events)
    if not columns.events:
        raise BadTrace(
            f"{path}: no events: {file.damage or 'the list is empty'}; record the trace again"
        )
    metadata, damage = _metadata(file)
    if not columns.start:
        cause = f" ({damage})" if damage else ""
        raise BadTrace(
            f"{path}: none of {columns.events} events ran on a GPU{cause}; record the trace with "
            "ProfilerActivity.CUDA on a machine with a GPU"
        )
    return columns.recording(path, metadata, damage)


def _metadata(file: TraceFile) -> tuple[Metadata, str | None]:
    """The metadata of a trace that has been read, and the damage of the file."""
    if file.frame.startswith(b"[") or not file.frame:
        return Metadata(), file.damage
    try:
        return msgspec.json.decode(file.frame, type=Metadata), file.damage
    except msgspec.DecodeError as error:
        damage = f"the text before and after the events cannot be read ({error})"
        return Metadata(), file.damage or damage


class _ColumnBuilder:
    """Collects the columns of a recording from lists of events."""

    def __init__(self) -> None:
        self._decode_list = msgspec.json.Decoder(list[Event]).decode
        self._decode_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
        self._decode_event = msgspec.json.Decoder(Event).decode
        self.events = self.unusable_events = 0
        self.names: dict[str, int] = {}
        self.start, self.end = array("d"), array("d")
        self.name, self.type, self.device = array("i"), array("b"), array("h")
        self.stream, self.correlation, self.operator = array("q"), array("q"), array("q")
        self.copied_bytes, self.message_bytes = array("d"), array("d")
        self.call_start, self.call_end = array("d"), array("d")
        self.call_correlation, self.call_synchronizes = array("q"), array("b")
        self.steps: list[tuple[float, float]] = []
        self.loading: list[tuple[float, float]] = []
        self.operator_costs: dict[int, OperatorCost] = {}
        self._ignored_names: set[str | int | None] = set()

    def decode(self, text: bytes | memoryview) -> list[Event]:
        """Decode a JSON list of events; an event with a field of a wrong type is skipped."""
        try:
            return self._decode_list(text)
        except msgspec.ValidationError:
            events = []
            for raw in self._decode_raw_list(text):
                try:
                    events.append(self._decode_event(raw))
                except msgspec.ValidationError:
                    self.events += 1
                    self.unusable_events += 1
            return events

    def add(self, events: list[Event]) -> None:
        """Append the events to the columns."""
        self.events += len(events)
        # Local names: this loop runs once per event of the file.
        activity_type, ignored = GPU_CATEGORIES.get, self._ignored_names
        runtime_categories, operator_categories = RUNTIME_CATEGORIES, OPERATOR_CATEGORIES
        for event in events:
            if event.ph != "X":
                continue
            category = event.cat
            if event.dur < 0:
                self.unusable_events += 1
            elif category in operator_categories:
                if event.name not in ignored:
                    self._add_operator(event)
            elif category in runtime_categories:
                self._add_call(event)
            elif category is not None and (type_ := activity_type(category)) is not None:
                self._add_activity(event, type_)
            elif category == "user_annotation":
                self._add_annotation(event)

    def _add_activity(self, event: Event, activity_type: int) -> None:
        args = event.args or _NO_ARGUMENTS
        name = str(event.name)
        self.start.append(event.ts)
        self.end.append(event.ts + event.dur)
        self.name.append(self.names.setdefault(name, len(self.names)))
        self.type.append(activity_type)
        self.stream.append(_parse_id(args.stream if args.stream is not None else event.tid))
        self.device.append(min(_parse_id(args.device), 32767))
        self.correlation.append(-1 if args.correlation is None else args.correlation)
        # Old versions of Kineto write the correlation id instead of the operator's id.
        operator = args.external_id
        if operator is None or operator == args.correlation:
            operator = -1
        self.operator.append(operator)
        self.copied_bytes.append(args.bytes or 0.0)
        self.message_bytes.append(
            (args.message_elements or 0.0) * DTYPE_BYTES.get(args.dtype or "", 0)
        )

    def _add_call(self, event: Event) -> None:
        args = event.args or _NO_ARGUMENTS
        self.call_start.append(event.ts)
        self.call_end.append(event.ts + event.dur)
        self.call_correlation.append(-1 if args.correlation is None else args.correlation)
        self.call_synchronizes.append("Synchronize" in str(event.name))

    def _add_annotation(self, event: Event) -> None:
        name = str(event.name)
        if name.startswith("ProfilerStep"):
            self.steps.append((event.ts, event.ts + event.dur))
        elif name.startswith(_DATA_LOADER):
            self.loading.append((event.ts, event.ts + event.dur))

    def _add_operator(self, event: Event) -> None:
        """Add an operator with a cost rule or a data loader; remember other names as ignored."""
        name = str(event.name)
        if name in COST_RULES:
            self._add_cost(name, event)
        elif name.startswith(_DATA_LOADER):
            self.loading.append((event.ts, event.ts + event.dur))
        elif len(self._ignored_names) < MAX_IGNORED_NAMES:
            self._ignored_names.add(event.name)

    def _add_cost(self, name: str, event: Event) -> None:
        args = event.args or _NO_ARGUMENTS
        if args.external_id is None or not args.input_shapes or not args.input_dtypes:
            return
        shapes, dtypes = bytes(args.input_shapes), bytes(args.input_dtypes)
        cost = operator_cost(name, shapes, dtypes, bytes(args.input_values or b"[]"))
        if cost is not None:
            self.operator_costs[args.external_id] = cost

    def recording(self, path: Path, metadata: Metadata, damage: str | None) -> Recording:
        """The recording, with columns sorted by start."""
        order = np.argsort(np.frombuffer(self.start), kind="stable")
        # Times count from the epoch; subtracting before scaling keeps nanoseconds in a float64.
        origin = float(np.frombuffer(self.start)[order[0]])
        distributed = metadata.distributed
        return Recording(
            path=path,
            activities=self._activities(order, origin),
            calls=self._calls(origin),
            names=tuple(self.names),
            steps=_spans(self.steps, origin),
            loading=_spans(self.loading, origin),
            operator_costs=self.operator_costs,
            origin=origin * TIME_UNIT,
            rank=distributed.rank if distributed else None,
            world_size=distributed.world_size if distributed else None,
            gpu=next((d.name for d in metadata.devices if d.name), "unknown GPU"),
            schema=metadata.schema,
            events=self.events,
            unusable_events=self.unusable_events,
            damage=damage,
        )

    def _activities(self, order: np.ndarray, origin: float) -> Activities:
        device = np.array(self.device, dtype=np.int16)[order]
        if (has_device := device >= 0).any():
            # Some copies in old traces have no device.
            device[~has_device] = device[has_device].min()
        return Activities(
            start=(np.array(self.start)[order] - origin) * TIME_UNIT,
            end=(np.array(self.end)[order] - origin) * TIME_UNIT,
            name=np.array(self.name, dtype=np.int32)[order],
            type=np.array(self.type, dtype=np.int8)[order],
            stream=np.array(self.stream, dtype=np.int64)[order],
            device=device,
            correlation=np.array(self.correlation, dtype=np.int64)[order],
            copied_bytes=np.array(self.copied_bytes)[order],
            message_bytes=np.array(self.message_bytes)[order],
            operator=np.array(self.operator, dtype=np.int64)[order],
        )

    def _calls(self, origin: float) -> RuntimeCalls:
        order = np.argsort(np.array(self.call_start), kind="stable")
        return RuntimeCalls(
            start=(np.array(self.call_start)[order] - origin) * TIME_UNIT,
            end=(np.array(self.call_end)[order] - origin) * TIME_UNIT,
            correlation=np.array(self.call_correlation, dtype=np.int64)[order],
            synchronizes=np.array(self.call_synchronizes, dtype=bool)[order],
        )


def _spans(spans: list[tuple[float, float]], origin: float) -> np.ndarray:
    """(start, end) in seconds since ``origin``, sorted, shape [spans, 2]."""
    return (np.array(sorted(spans), dtype=np.float64).reshape(-1, 2) - origin) * TIME_UNIT


_NO_ARGUMENTS = EventArguments()


def _parse_id(value: int | str | None) -> int:
    """The number of a stream or device, which can be text such as 'stream 7'; -1 if none."""
    if isinstance(value, int):
        return value
    digits = "".join(c for c in str(value) if c.isdigit())
    return int(digits) if digits else -1
