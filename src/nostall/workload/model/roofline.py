"""Roofline placement (Williams et al., 2009) of a kernel: which roof it is under, and how near."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nostall.core.errors import BadInput
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Resource

Bound = Literal["compute", "memory"]


@dataclass(frozen=True, slots=True)
class Placement:
    """A kernel under the roofline of one GPU.

    ``intensity``: FLOP per byte.  ``bound``: the roof above that intensity.  ``reached``: share of
    that roof at the time it took; above 1 the amounts or the time cannot be right.
    """

    intensity: float
    bound: Bound
    roof_seconds: float
    seconds: float

    @property
    def reached(self) -> float:
        return self.roof_seconds / self.seconds


def place(
    flops: float, size: float, seconds: float, hardware: Hardware, precision: str = "fp32"
) -> Placement:
    """Place ``flops`` FLOP and ``size`` bytes that took ``seconds`` under the peaks of a GPU.

    Peaks are taken as they are, without efficiency: the roof is what cannot be passed.
    """
    if size <= 0 or seconds <= 0 or flops < 0:
        raise BadInput(
            f"a kernel has {flops!r} FLOP, {size!r} bytes and {seconds!r} s; allowed are bytes and "
            "seconds > 0 and FLOP >= 0, leave kernels without them out"
        )
    by_compute = flops / hardware.rate(Resource.COMPUTE, precision)
    by_memory = size / hardware.rate(Resource.MEMORY)
    bound: Bound = "compute" if by_compute > by_memory else "memory"
    return Placement(flops / size, bound, max(by_compute, by_memory), seconds)
