"""Roofline model (Williams et al., 2009): the bound of a kernel and the share of it attained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nostall.core.errors import BadInput
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Resource

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
