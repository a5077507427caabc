"""Columns of GPU activities, runtime calls and operators, collected from events of a trace.

An activity whose time cannot be true, zero or damaged by a changed digit, is left out; sentences
about the events that are not used go to the user.
"""

from __future__ import annotations

import re
from array import array
from collections import Counter

import msgspec
import numpy as np

from nostall.core.text.plurals import pluralize
from nostall.workload.traces.kineto.categories import (
    DATA_LOADER,
    PHASES,
    PROFILER_STEP,
    ROLES,
    SYNCHRONISING_CALL,
    EventRole,
    Lanes,
)
from nostall.workload.traces.kineto.schema import (
    MAX_ID,
    Event,
    EventArguments,
    Scalar,
    lenient_event,
    parse_amount,
    parse_integer,
    parse_number,
    printable,
)
from nostall.workload.traces.operator_cost import COST_RULES, OperatorCost, operator_cost
from nostall.workload.traces.recording import TIME_UNIT, Activities, HostCalls, RuntimeCalls

MIN_DISTANCE = 1e6
"""Smallest distance, in microseconds, of an activity that can be out of the trace's time."""
UNLAUNCHED_DISTANCE = 60e6
"""The same for an activity whose launch is not recorded, so that nothing contradicts its time."""
_LAUNCH = re.compile(r"(?:cuda|cu|hip)\w*Launch\w*Kernel")
"""Names of runtime calls that launch one kernel."""
MAX_DURATION = 3600e6
"""Longest duration, in microseconds, that may exceed the rest of the trace tenfold."""
_MIN_RATIO = 10.0
_MAX_SHARE = 0.01


def has_usable_time(start: np.ndarray, end: np.ndarray, launch: np.ndarray) -> np.ndarray:
    """Whether the time of each activity can be true; bool, shape [activities].

    ``start`` and ``end`` are microseconds, and so is ``launch``, the start of the call that
    launched the activity (NaN: not recorded).  Activities are rejected if they are few, and if
    their distance from all others is ten times the time that the others span, and:

    - the call that launched them is not as far from the others, or
    - their launch is not recorded, and the distance is more than a minute.
    """
    usable = np.ones(len(start), dtype=bool)
    known_launches = launch[np.isfinite(launch)]
    # With very few activities, launches tell which of them are in the time of the trace.
    context = known_launches if len(start) < 3 else np.empty(0)
    for apart, distance in _far_groups(np.concatenate((start, context))):
        rows = apart[apart < len(start)]
        delay = start[rows] - launch[rows]
        agrees = np.abs(delay) < distance / 2
        is_unknown = ~np.isfinite(delay) & (distance < UNLAUNCHED_DISTANCE)
        usable[rows] &= agrees | is_unknown
    duration = end - start
    rows = np.flatnonzero(usable & (duration > MAX_DURATION))
    if len(rows) and len(rows) <= max(1, _MAX_SHARE * len(start)) and usable.sum() > len(rows):
        others = usable.copy()
        others[rows] = False
        span = end[others].max() - start[others].min()
        usable[rows] &= duration[rows] <= _MIN_RATIO * span
    return usable if usable.any() else np.ones(len(start), dtype=bool)


def _far_groups(times: np.ndarray) -> list[tuple[np.ndarray, float]]:
    """(rows, distance) of small groups of times that are far from all others."""
    order = np.argsort(times, kind="stable")
    groups = []
    low, high = 0, len(order)
    while high - low > 1:
        current = times[order[low:high]]
        gaps = np.diff(current)
        cut = int(np.argmax(gaps)) + 1
        before, after = cut, len(current) - cut
        # Of two groups of the same size, the earlier one is rejected: a missing time is zero.
        is_first = before <= after
        core = current[cut:] if is_first else current[:cut]
        distance = float(gaps[cut - 1])
        is_far = distance > MIN_DISTANCE and distance > _MIN_RATIO * float(core[-1] - core[0])
        if not is_far or min(before, after) > max(1, _MAX_SHARE * len(times)):
            break
        rows = order[low : low + cut] if is_first else order[low + cut : high]
        groups.append((rows, distance))
        low, high = (low + cut, high) if is_first else (low, low + cut)
    return groups


def launching_calls(
    start: np.ndarray, key: np.ndarray, call_start: np.ndarray, call_key: np.ndarray
) -> np.ndarray:
    """Row of the call that launched each activity, int64; -1: it is not recorded.

    ``start`` and ``key`` have the shape [activities], ``call_start`` and ``call_key`` the shape
    [calls].  An activity and its call have the same key, for example a correlation id; negative
    keys are unknown, and so is 0 if several calls have it: profilers count from 1 and write 0 for
    calls that launch nothing.  Ids of several processes can be equal and ids can wrap around, so of
    several calls with the key the last one that began before the activity counts, else the first.
    """
    rows = np.full(len(key), -1, dtype=np.int64)
    if not len(call_key):
        return rows
    order = np.lexsort((call_start, call_key))
    keys, starts = call_key[order], call_start[order]
    first = np.searchsorted(keys, key, side="left")
    count = np.searchsorted(keys, key, side="right") - first
    count[(key < 0) | ((key == 0) & (count > 1))] = 0
    rows[count > 0] = order[first[count > 0]]
    for activity in np.flatnonzero(count > 1).tolist():
        low = int(first[activity])
        same = starts[low : low + int(count[activity])]
        before = int(np.searchsorted(same, start[activity], side="right"))
        rows[activity] = order[low + max(before - 1, 0)]
    return rows


NO_LANE = "none, on lane"
NO_PHASE = "without a valid phase"
OPEN = "with a begin and an end (phases B and E) and without a duration"
NO_TIME = "without a valid start or duration"
OUT_OF_TIME = "with a time far outside the trace"
NOT_AN_EVENT = "with other JSON than an event"


MAX_HOST_NAMES = 100_000
"""Limit of the names of host calls; a trace can have a new name for every call."""
OTHER_NAMES = "(other names)"
"""Name of the host calls beyond that limit."""
MIN_FRAME = 50.0
"""Duration, in microseconds, of the shortest Python frame that is kept: most frames of a trace are
shorter, and belong to what a launch costs the host."""
MAX_UNPLACED = 5_000_000
"""Limit of the events without a category that wait for the names of their lanes."""
MAX_CATEGORIES = 20
"""Limit of the unknown categories that are counted by name."""
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

Span = tuple[float, float, int]
"""(start, end, thread) of a step or of a wait for the data loader; microseconds."""
MAX_DEVICE = 32767
_STEP_NUMBER = re.compile(r"\d{1,18}$")
_NO_ARGUMENTS = EventArguments()


class ColumnBuilder:
    """Collects the columns of a recording from lists of events."""

    def __init__(self) -> None:
        self._decode_list = msgspec.json.Decoder(list[Event]).decode
        self._decode_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
        self._decode_event = msgspec.json.Decoder(Event).decode
        self.events = 0
        self.unusable: Counter[str] = Counter()
        """Events that are skipped, by reason."""
        self.unknown_categories: Counter[str] = Counter()
        """Events of unknown categories that have a stream or a launch."""
        self.host_categories: Counter[str] = Counter()
        """The same for events that have none."""
        self.lanes = Lanes()
        self._unplaced: list[Event] = []
        """Events without a category on lanes that have no names yet."""
        self.names: dict[str, int] = {}
        self.start, self.end = array("d"), array("d")
        self.name, self.type, self.device = array("i"), array("b"), array("h")
        self.stream, self.correlation, self.operator = array("q"), array("q"), array("q")
        self.copied_bytes, self.message_bytes = array("d"), array("d")
        self.groups: dict[str, int] = {}
        self.group, self.sequence = array("i"), array("q")
        self.call_start, self.call_end = array("d"), array("d")
        self.call_correlation, self.call_external = array("q"), array("q")
        self.call_name, self.call_thread = array("i"), array("i")
        self.host_start, self.host_end = array("d"), array("d")
        self.host_name, self.host_thread = array("i"), array("i")
        self.host_is_operator = array("b")
        self.host_names: dict[str, int] = {}
        """Names of runtime calls, operators and annotations."""
        self.thread_process = array("q")
        """Process of each thread of the host."""
        self.steps: list[Span] = []
        self.step_numbers: set[int] = set()
        self.loading: list[Span] = []
        self.operator_costs: dict[int, OperatorCost] = {}
        self._ids: dict[Scalar, int] = {}
        self._name_indices: dict[str | int | None, int] = {}
        self._host_name_indices: dict[str | int | None, int] = {}
        self._threads: dict[tuple[Scalar, Scalar], int] = {}

    def decode(self, text: bytes | memoryview) -> list[Event]:
        """Decode a JSON list of events; fields of wrong types are missing in an event.

        Raises :class:`msgspec.DecodeError` if the text is not valid JSON, or has a list in it.
        """
        try:
            return self._decode_list(text)
        except msgspec.ValidationError:
            events = []
            for raw in self._decode_raw_list(text):
                event = self._decode_lenient(bytes(raw))
                if event is None:
                    self.events += 1
                    self.unusable[NOT_AN_EVENT] += 1
                else:
                    events.append(event)
            return events

    def _decode_lenient(self, text: bytes) -> Event | None:
        if text.startswith(b"["):
            raise msgspec.DecodeError("a list in the list of events is damage")
        try:
            return self._decode_event(text)
        except msgspec.ValidationError:
            return lenient_event(text)

    def add(self, events: list[Event]) -> None:
        """Append the events to the columns."""
        self.events += len(events)
        # Local names: this loop runs once per event of the file.
        role_of = ROLES.get
        operator, call, nothing = EventRole.OPERATOR, EventRole.CALL, EventRole.IGNORED
        for event in events:
            if event.ph != "X":
                if event.ph == "M":
                    self.lanes.name(event)
                elif event.ph not in PHASES:
                    self.unusable[NO_PHASE] += 1
                elif event.ph == "B":
                    self.unusable[OPEN] += 1
                continue
            role = role_of(event.cat) if event.cat else self._role_of_lane(event)
            if role is nothing:
                continue
            if role is operator:
                self._add_operator(event)
            elif role is call:
                self._add_call(event)
            elif role is None:
                self._add_unknown(event)
            elif role is EventRole.FRAME:
                self._add_frame(event)
            elif role is EventRole.ANNOTATION:
                self._add_annotation(event)
            else:
                self._add_activity(event, role)

    def _role_of_lane(self, event: Event) -> EventRole:
        """The role of an event without a category; it is kept if its lane has no names yet."""
        role = self.lanes.classify(event)
        if role is not None:
            return role
        if len(self._unplaced) < MAX_UNPLACED:
            self._unplaced.append(event)
        else:
            self._count_unknown(NO_LANE, self.unknown_categories)
        return EventRole.IGNORED

    def finish(self) -> None:
        """Add the events whose lanes got their names behind them; call it after the last list."""
        waiting, self._unplaced = self._unplaced, []
        self.events -= len(waiting)
        self.add(waiting)
        for event in self._unplaced:
            label = f"{NO_LANE} {self.lanes.label(event)}"
            self._count_unknown(label, self.unknown_categories)
        self._unplaced = []

    def _span(self, event: Event) -> tuple[float, float] | None:
        """(start, end); None if the event has no valid times, which is counted."""
        start, duration = event.ts, event.dur
        if type(start) is float and type(duration) is float and duration >= 0:
            return start, start + duration
        start, duration = parse_number(start), parse_number(duration)
        if start is None or duration is None or duration < 0:
            self.unusable[NO_TIME] += 1
            return None
        return start, start + duration

    def _add_activity(self, event: Event, role: EventRole) -> None:
        if (span := self._span(event)) is None:
            return
        args = event.args or _NO_ARGUMENTS
        self.start.append(span[0])
        self.end.append(span[1])
        self.name.append(self._name_index(event.name))
        self.type.append(role)
        self.stream.append(self._parse_id(args.stream if args.stream is not None else event.tid))
        device = args.device if args.device is not None else self.lanes.device(event.pid)
        self.device.append(min(self._parse_id(device), MAX_DEVICE))
        correlation = self._parse_id(args.correlation)
        self.correlation.append(correlation)
        # Old versions of Kineto write the correlation id instead of the operator's id.
        operator = self._parse_id(args.external_id)
        self.operator.append(-1 if operator == correlation else operator)
        self.copied_bytes.append(0.0 if args.bytes is None else parse_amount(args.bytes))
        elements, dtype_bytes = args.message_elements, DTYPE_BYTES.get(args.dtype or "", 0)
        self.message_bytes.append(parse_amount(elements) * dtype_bytes if elements else 0.0)
        self.group.append(-1 if args.group is None else self._group_index(args))
        self.sequence.append(-1 if args.sequence is None else self._parse_id(args.sequence))

    def _name_index(self, name: str | int | None) -> int:
        index = self._name_indices.get(name)
        if index is None:
            index = self._name_indices[name] = self.names.setdefault(
                printable(name), len(self.names)
            )
        return index

    def _group_index(self, args: EventArguments) -> int:
        # Groups of different ranks can have the same name.
        name = f"{args.group} {bytes(args.group_ranks).decode(errors='replace')}".strip()
        return self.groups.setdefault(name, len(self.groups))

    def _add_call(self, event: Event) -> None:
        if (span := self._span(event)) is None:
            return
        args = event.args or _NO_ARGUMENTS
        self.call_start.append(span[0])
        self.call_end.append(span[1])
        self.call_correlation.append(self._parse_id(args.correlation))
        self.call_external.append(self._parse_id(args.external_id))
        self.call_name.append(self._host_name_index(event.name))
        self.call_thread.append(self._thread(event))

    def _add_annotation(self, event: Event) -> None:
        name = str(event.name)
        if (span := self._span(event)) is None:
            return
        if name.startswith(PROFILER_STEP):
            self.steps.append((*span, self._thread(event)))
            if number := _STEP_NUMBER.search(name):
                self.step_numbers.add(int(number[0]))
        elif name.startswith(DATA_LOADER):
            self.loading.append((*span, self._thread(event)))
        else:
            self._add_host_call(event, span, is_operator=False)

    def _add_frame(self, event: Event) -> None:
        span = self._span(event)
        if span is not None and span[1] - span[0] >= MIN_FRAME:
            self._add_host_call(event, span, is_operator=False)

    def _add_operator(self, event: Event) -> None:
        """Add an operator or a data loader, and the cost of an operator that has a cost rule."""
        name = str(event.name)
        if name in COST_RULES:
            self._add_cost(name, event)
        if (span := self._span(event)) is None:
            return
        if name.startswith(DATA_LOADER):
            self.loading.append((*span, self._thread(event)))
        else:
            self._add_host_call(event, span, is_operator=True)

    def _add_host_call(self, event: Event, span: tuple[float, float], *, is_operator: bool) -> None:
        self.host_start.append(span[0])
        self.host_end.append(span[1])
        self.host_name.append(self._host_name_index(event.name))
        self.host_thread.append(self._thread(event))
        self.host_is_operator.append(is_operator)

    def _host_name_index(self, name: str | int | None) -> int:
        index = self._host_name_indices.get(name)
        if index is None:
            is_full = len(self.host_names) >= MAX_HOST_NAMES
            text = OTHER_NAMES if is_full else printable(name)
            index = self.host_names.setdefault(text, len(self.host_names))
            if not is_full:
                self._host_name_indices[name] = index
        return index

    def _thread(self, event: Event) -> int:
        """Number of the thread of the host that an event ran on."""
        key = event.pid, event.tid
        thread = self._threads.get(key)
        if thread is None:
            thread = self._threads[key] = len(self._threads)
            self.thread_process.append(self._parse_id(event.pid))
        return thread

    def _add_cost(self, name: str, event: Event) -> None:
        args = event.args or _NO_ARGUMENTS
        if args.external_id is None or not args.input_shapes or not args.input_dtypes:
            return
        shapes, dtypes = bytes(args.input_shapes), bytes(args.input_dtypes)
        cost = operator_cost(name, shapes, dtypes, bytes(args.input_values or b"[]"))
        if cost is not None:
            self.operator_costs[self._parse_id(args.external_id)] = cost

    def _add_unknown(self, event: Event) -> None:
        """Count an event that may be GPU work of a category that nostall does not know."""
        args = event.args or _NO_ARGUMENTS
        if event.cat is None:
            return
        is_host = args.stream is None and args.correlation is None
        self._count_unknown(event.cat, self.host_categories if is_host else self.unknown_categories)

    def _count_unknown(self, category: str, counts: Counter[str]) -> None:
        if category in counts or len(counts) < MAX_CATEGORIES:
            counts[category] += 1

    def _parse_id(self, value: Scalar) -> int:
        """The number of a stream, device, call or operator; -1 if it is missing or negative.

        'stream 7' is 7.  Other text and numbers beyond 64 bits get numbers of their own.
        """
        if type(value) is int and -1 <= value < MAX_ID:
            return value
        if value is None:
            return -1
        number = parse_integer(value)
        if number is not None and number < MAX_ID:
            return max(number, -1)
        return self._ids.setdefault(value, MAX_ID + len(self._ids))

    def note_out_of_time(self, count: int) -> None:
        """Count events whose times cannot be true."""
        if count:
            self.unusable[OUT_OF_TIME] += count

    def usable_activities(self) -> np.ndarray:
        """Rows of the activities whose times can be true; the others are counted as unusable."""
        start, end = np.array(self.start), np.array(self.end)
        calls = np.array(self.call_start)
        rows = launching_calls(
            start,
            np.array(self.correlation, np.int64),
            calls,
            np.array(self.call_correlation, np.int64),
        )
        launch = np.full(len(start), np.nan)
        launch[rows >= 0] = calls[rows[rows >= 0]]
        usable = has_usable_time(start, end, launch)
        self.note_out_of_time(int((~usable).sum()))
        return np.flatnonzero(usable)

    def remarks(self) -> list[str]:
        """Skipped events, by reason, and events of unknown categories, a sentence each."""
        remarks = [
            f"{pluralize(count, 'event')} {reason} {'is' if count == 1 else 'are'} skipped"
            for reason, count in self.unusable.items()
        ]
        if self.unknown_categories:
            names = ", ".join(repr(name[:40]) for name in self.unknown_categories)
            count = self.unknown_categories.total()
            remarks.append(
                f"{pluralize(count, 'event')} of unknown categories ({names}) "
                f"{'is' if count == 1 else 'are'} not counted as GPU work"
            )
        return remarks

    def lost_work(self) -> list[str]:
        """A sentence if kernels of recorded launch calls are missing.

        Nothing is known of launches of graphs, whose kernels ROCm gives other ids, nor of traces
        whose correlation ids do not link activities to calls.
        """
        is_launch = np.array([_LAUNCH.match(name) for name in self.host_names], bool)
        ids = np.array(self.call_correlation, np.int64)
        ids = ids[is_launch[np.array(self.call_name, np.int32)] & (ids > 0)]
        has_work = np.isin(ids, np.array(self.correlation, np.int64))
        lost = int((~has_work).sum())
        if not lost or not has_work.any():
            return []
        return [
            f"{lost:,} of {pluralize(len(ids), 'launch call')} {'has' if lost == 1 else 'have'} no "
            "GPU event: it is lost, and its time counts as idle, or a graph captured the call"
        ]

    def activities(self, rows: np.ndarray, origin: float) -> Activities:
        """The activities of some rows, in seconds since ``origin`` (microseconds)."""
        columns = self._columns(Activities, "", rows, origin)
        device = columns["device"]
        if (has_device := device >= 0).any():
            # Some copies in old traces have no device.
            device[~has_device] = device[has_device].min()
        return Activities(**columns)

    def calls(self, origin: float) -> RuntimeCalls:
        """The runtime calls, in seconds since ``origin`` (microseconds)."""
        order = np.argsort(np.array(self.call_start), kind="stable")
        waits = np.array([SYNCHRONISING_CALL.search(n) for n in self.host_names], bool)
        columns = self._columns(RuntimeCalls, "call_", order, origin)
        return RuntimeCalls(**columns, synchronizes=waits[columns["name"]])

    def host_calls(self, origin: float, rows: np.ndarray | None = None) -> HostCalls:
        """The operators and annotations, in seconds since ``origin``, the longer one first.

        ``rows``: mask of those that are wanted; None: all.
        """
        order = np.lexsort((-np.array(self.host_end), np.array(self.host_start)))
        order = order if rows is None else order[rows[order]]
        columns = self._columns(HostCalls, "host_", order, origin)
        columns["is_operator"] = columns["is_operator"].astype(bool)
        return HostCalls(**columns)

    def _columns(
        self,
        table: type[Activities | RuntimeCalls | HostCalls],
        prefix: str,
        rows: np.ndarray,
        origin: float,
    ) -> dict[str, np.ndarray]:
        """Some rows of the columns of a table, which are collected here with a prefix."""
        names = [name for name in table.__dataclass_fields__ if hasattr(self, prefix + name)]
        columns = {name: np.array(getattr(self, prefix + name))[rows] for name in names}
        for edge in ("start", "end"):
            columns[edge] = (columns[edge] - origin) * TIME_UNIT
        return columns


def outer_steps(columns: ColumnBuilder) -> list[Span]:
    """The steps without those that are a part of another step of their process.

    Profilers mark a step twice where two are active, and ranges such as that of an optimiser's step
    are named like the steps around them.
    """
    ends: dict[int, float] = {}
    outer = []
    for step in sorted(columns.steps, key=lambda step: (step[0], -step[1])):
        process = columns.thread_process[step[2]]
        if step[1] > ends.get(process, -np.inf):
            ends[process] = step[1]
            outer.append(step)
    return outer


def spans(rows: list[Span], origin: float) -> tuple[np.ndarray, np.ndarray]:
    """Sorted (start, end) in seconds since ``origin``, shape [rows, 2], and the thread of each."""
    table = np.array(sorted(rows), dtype=np.float64).reshape(-1, 3)
    return (table[:, :2] - origin) * TIME_UNIT, table[:, 2].astype(np.int64)
