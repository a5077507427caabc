"""Reader for the launch parameters of a Kineto trace's kernels."""

from __future__ import annotations

import math
from collections.abc import Iterator
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


class _Arguments(msgspec.Struct, gc=False):
    grid: tuple[int, int, int] | None = None
    block: tuple[int, int, int] | None = None
    registers: int | None = msgspec.field(name="registers per thread", default=None)
    shared_memory: int | None = msgspec.field(name="shared memory", default=None)

    @property
    def is_sound(self) -> bool:
        if self.grid is None or self.block is None:
            return False
        if self.registers is None or self.shared_memory is None:
            return False
        sizes = (*self.grid, *self.block)
        rest = (self.registers, self.shared_memory)
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
    totals: dict[tuple[str, tuple[int, ...], tuple[int, ...], int, int], list[float]] = {}
    for events in TraceFile(path, None).event_lists(_decode):
        for event in events:
            if event.ph != "X" or event.cat != "kernel" or event.args is None:
                continue
            arguments, duration = event.args, event.dur
            if duration is None or not 0 < duration < math.inf or not arguments.is_sound:
                continue
            assert arguments.grid is not None and arguments.block is not None
            assert arguments.registers is not None and arguments.shared_memory is not None
            parameters = (arguments.grid, arguments.block)
            key = (event.name, *parameters, arguments.registers, arguments.shared_memory)
            total = totals.setdefault(key, [0, 0.0])
            total[0] += 1
            total[1] += duration * 1e-6
    return sorted(_launches(totals), key=lambda launches: -launches.seconds)


def _launches(totals: dict[tuple[str, tuple[int, ...], tuple[int, ...], int, int], list[float]]
              ) -> Iterator[KernelLaunches]:  # fmt: skip
    for (name, (x, y, z), (a, b, c), registers, shared), (count, seconds) in totals.items():
        yield KernelLaunches(name, (x, y, z), (a, b, c), registers, shared, int(count), seconds)


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
