"""The kernels of a timeline, by name: how often, how long, and under which roof."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import BadHardware
from nostall.workload.hardware.description import Hardware
from nostall.workload.model.roofline import Placement, place
from nostall.workload.timeline.analysis import Timeline
from nostall.workload.traces.kinds import Kind, kinds


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel: measured seconds, and its modelled place under the roofline.

    ``placed`` of ``seconds`` are operators whose shapes the trace recorded; ``placement`` adds them
    up (None: there are none, or no hardware was given).
    """

    name: str
    kind: Kind
    launches: int
    seconds: float
    placed: float
    placement: Placement | None


def kernel_times(timeline: Timeline, hardware: Hardware | None = None) -> list[KernelTime]:
    """Every kernel name, the one with the most time first."""
    recording = timeline.recording
    own = recording.activities
    rows = (own.device == timeline.device) & (own.kind == 0) & (own.end > timeline.begin)
    own = own.select(rows & (own.start < timeline.begin + timeline.span))
    kind = kinds(own, recording.names)
    length = own.end - own.start
    order = np.argsort(own.name, kind="stable")
    operator = _of_longest(own.operator, length)
    groups = np.split(order, np.flatnonzero(np.diff(own.name[order])) + 1) if len(order) else []
    found = []
    for group in groups:
        name = recording.names[own.name[group[0]]]
        operators = operator[group].tolist()
        placed, placement = _placed(timeline, name, operators, length[group].tolist(), hardware)
        seconds = float(length[group].sum())
        of = Kind(int(kind[group[0]]))
        found.append(KernelTime(name, of, len(group), seconds, placed, placement))
    return sorted(found, key=lambda k: -k.seconds)


def _of_longest(operator: NDArray[np.int64], length: NDArray[np.float64]) -> NDArray[np.int64]:
    """The operators, but -1 where another kernel of the same operator took longer: a product that
    is split and then summed up is done by the kernel that does most of it."""
    order = np.lexsort((length, operator))
    last = np.ones(len(order), dtype=np.bool_)
    last[:-1] = operator[order][1:] != operator[order][:-1]
    found = np.full_like(operator, -1)
    found[order[last]] = operator[order[last]]
    return found


def _placed(
    timeline: Timeline,
    name: str,
    operators: list[int],
    seconds: list[float],
    hardware: Hardware | None,
) -> tuple[float, Placement | None]:
    """Seconds of the launches whose amounts are known, and where they are together."""
    if hardware is None:
        return 0.0, None
    flops = size = time = 0.0
    precision = ""
    for operator, length in zip(operators, seconds, strict=True):
        found = timeline.recording.amounts.get(operator)
        if found is not None and length > 0:
            flops, size, time = flops + found.flops, size + found.size, time + length
            precision = found.precision
    if not time:
        return 0.0, None
    if precision == "fp32" and "tf32" in name:
        precision = "tf32"
    try:
        return time, place(flops, size, time, hardware, precision)
    except BadHardware:
        return 0.0, None  # this GPU has no peak of that precision on record
