"""Work of a launch whose floating-point operations are unknown, for strategies that need one."""

from __future__ import annotations

from nostall.core import Objective, Search
from nostall.core.space import S

SIP = "sip"
"""Strategy that accepts by the difference in TFLOPS."""
NOMINAL_TFLOPS = 100.0
"""Rate that the start state is taken to have: a slow-down of 1 % is then 1 TFLOPS, the start
temperature of SIP, whose published experiments are kernels of about this rate."""


def strategy_name(search: Search) -> str:
    """The name of a strategy; of the one that runs on each worker, if there are several."""
    inner = getattr(search, "search", search)
    return str(getattr(inner, "name", ""))


def nominal_flops(objective: Objective[S], start: S) -> float | None:
    """Floating-point operations with which the start state has :data:`NOMINAL_TFLOPS`.

    None if the start cannot be evaluated, or if its value is not in seconds.  A memory-bound kernel
    has no useful count of operations; what SIP needs is a scale for the differences of times.
    """
    measurement = objective.evaluate([start])[0]
    if measurement.failure is not None or objective.unit != "s" or not measurement.value > 0:
        return None
    return NOMINAL_TFLOPS * 1e12 * measurement.value
