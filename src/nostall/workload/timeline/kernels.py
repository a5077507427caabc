"""Measured time of each kernel of a timeline, with its modelled position in the roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from nostall.core.errors import BadHardware, BadInput
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Resource
from nostall.workload.timeline.analysis import Timeline
from nostall.workload.traces.recording import ActivityType
from nostall.workload.traces.work_kinds import WorkKind, work_kinds

Bound = Literal["compute", "memory"]


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """Position of a kernel in the roofline of one GPU."""

    intensity: float
    """FLOP per byte."""
    bound: Bound
    """The roof at that intensity."""
    roof_seconds: float
    """Modelled time at the roof."""
    seconds: float
    """Measured time."""

    @property
    def attained_share(self) -> float:
        """Share of the roof that is attained; above 1 the FLOP, the bytes or the time are wrong."""
        return self.roof_seconds / self.seconds


def roofline_point(
    flops: float,
    bytes_moved: float,
    seconds: float,
    hardware: Hardware,
    precision: str = "fp32",
) -> RooflinePoint:
    """Place a kernel that took ``seconds`` under the peak rates of a GPU.

    The roof is the peak rate without an efficiency, because it is an upper bound.  Raises
    :class:`~nostall.core.errors.BadInput` if bytes or seconds are not positive or FLOP are
    negative.
    """
    if bytes_moved <= 0 or seconds <= 0 or flops < 0:
        raise BadInput(
            f"a kernel has {flops!r} FLOP, {bytes_moved!r} bytes and {seconds!r} s; allowed are "
            "bytes > 0, seconds > 0 and FLOP >= 0; leave out kernels without them"
        )
    compute_seconds = flops / hardware.rate(Resource.COMPUTE, precision)
    memory_seconds = bytes_moved / hardware.rate(Resource.MEMORY)
    bound: Bound = "compute" if compute_seconds > memory_seconds else "memory"
    roof_seconds = max(compute_seconds, memory_seconds)
    return RooflinePoint(flops / bytes_moved, bound, roof_seconds, seconds)


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of one kernel name on one GPU."""

    name: str
    kind: WorkKind
    launches: int
    seconds: float
    """Measured."""
    roofline_seconds: float
    """Measured seconds of the launches whose FLOP and bytes the trace gives."""
    roofline: RooflinePoint | None
    """Modelled position of these launches together; None if there are none, or no hardware."""


def kernel_times(timeline: Timeline, hardware: Hardware | None = None) -> list[KernelTime]:
    """The time of each kernel name, the longest first; ``hardware`` adds roofline positions."""
    recording = timeline.recording
    kernels = recording.activities
    is_kernel = (kernels.device == timeline.device) & (kernels.type == ActivityType.KERNEL)
    kernels = kernels.select(
        is_kernel
        & (kernels.end > timeline.begin)
        & (kernels.start < timeline.begin + timeline.span)
    )
    kinds = work_kinds(kernels, recording.names)
    length = kernels.end - kernels.start
    by_name = np.argsort(kernels.name, kind="stable")
    operator = _longest_kernel_only(kernels.operator, length)
    bounds = np.flatnonzero(np.diff(kernels.name[by_name])) + 1
    groups = np.split(by_name, bounds) if len(by_name) else []
    times = []
    for group in groups:
        name = recording.names[kernels.name[group[0]]]
        operators, lengths = operator[group].tolist(), length[group].tolist()
        roofline_seconds, roofline = _roofline(timeline, name, operators, lengths, hardware)
        times.append(
            KernelTime(
                name=name,
                kind=WorkKind(int(kinds[group[0]])),
                launches=len(group),
                seconds=float(length[group].sum()),
                roofline_seconds=roofline_seconds,
                roofline=roofline,
            )
        )
    return sorted(times, key=lambda kernel: -kernel.seconds)


def _longest_kernel_only(
    operator: NDArray[np.int64], length: NDArray[np.float64]
) -> NDArray[np.int64]:
    """The operator ids, with -1 for all but the longest kernel of each operator.

    An operator can launch several kernels, for example a split-K product and its reduction.  The
    longest kernel does most of the work and gets all FLOP and bytes of the operator.
    """
    order = np.lexsort((length, operator))
    is_longest = np.ones(len(order), dtype=np.bool_)
    is_longest[:-1] = operator[order][1:] != operator[order][:-1]
    longest_only = np.full_like(operator, -1)
    longest_only[order[is_longest]] = operator[order[is_longest]]
    return longest_only


def _roofline(
    timeline: Timeline,
    name: str,
    operators: list[int],
    lengths: list[float],
    hardware: Hardware | None,
) -> tuple[float, RooflinePoint | None]:
    """(seconds of the launches whose cost is known, their position in the roofline together)."""
    if hardware is None:
        return 0.0, None
    flops = bytes_moved = seconds = 0.0
    precision = ""
    for operator, length in zip(operators, lengths, strict=True):
        cost = timeline.recording.operator_costs.get(operator)
        if cost is not None and length > 0:
            flops, bytes_moved = flops + cost.flops, bytes_moved + cost.bytes_moved
            seconds, precision = seconds + length, cost.precision
    if not seconds:
        return 0.0, None
    if precision == "fp32" and "tf32" in name:
        precision = "tf32"
    try:
        return seconds, roofline_point(flops, bytes_moved, seconds, hardware, precision)
    except BadHardware:
        return 0.0, None  # the hardware has no peak rate for this precision
