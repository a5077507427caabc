"""Reader for the launch parameters of a Kineto trace's kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nostall.workload.traces.stream import TraceFile

LARGEST = 1 << 31
"""Above every size that a GPU accepts."""


@dataclass(frozen=True, slots=True)
class KernelLaunches:
    """Launches of one kernel with the same parameters."""

    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    registers: int
    """Of a thread."""
    shared_memory: int
    """Bytes of a block."""
    count: int
    seconds: float
    """Sum over the launches."""


class _Arguments(msgspec.Struct, frozen=True, gc=False):
    grid: tuple[int, int, int] = (0, 0, 0)
    block: tuple[int, int, int] = (0, 0, 0)
    registers: int = msgspec.field(name="registers per thread", default=-1)
    shared_memory: int = msgspec.field(name="shared memory", default=-1)

    @property
    def is_sound(self) -> bool:
        sizes, rest = (*self.grid, *self.block), (self.registers, self.shared_memory)
        return min(sizes) >= 1 and min(rest) >= 0 and max(*sizes, *rest) < LARGEST


class _Kernel(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str | None = None
    name: str = ""
    dur: float | None = None
    args: _Arguments | None = None


_decode_list = msgspec.json.Decoder(list[_Kernel]).decode
_decode_raw_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_decode_kernel = msgspec.json.Decoder(_Kernel).decode


def read_launches(path: Path) -> list[KernelLaunches]:
    """Launches of the kernels of a trace by name and parameters, those with most time first.

    Events without the parameters, as in traces of ROCm, are left out.  Raises
    :class:`~nostall.core.errors.BadTrace` if the file has no list of events.
    """
    totals: dict[tuple[str, _Arguments], list[float]] = {}
    for events in TraceFile(path, None).event_lists(_decode):
        for event in events:
            if event.ph != "X" or event.cat != "kernel" or event.args is None:
                continue
            if event.dur is not None and 0 < event.dur < math.inf and event.args.is_sound:
                total = totals.setdefault((event.name, event.args), [0, 0.0])
                total[0] += 1
                total[1] += event.dur * 1e-6
    launches = [
        KernelLaunches(name, a.grid, a.block, a.registers, a.shared_memory, int(count), seconds)
        for (name, a), (count, seconds) in totals.items()
    ]
    return sorted(launches, key=lambda row: -row.seconds)


def _decode(text: bytes | memoryview) -> list[_Kernel]:
    """Decode a list of events; an event with fields of other types is left out.

    Raises :class:`msgspec.DecodeError` if the text is not valid JSON.
    """
    try:
        return _decode_list(text)
    except msgspec.ValidationError:
        events = []
        for raw in _decode_raw_list(text):
            try:
                events.append(_decode_kernel(raw))
            except msgspec.ValidationError:
                continue
        return events
