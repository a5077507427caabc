"""DAPPLE's closed form of a plan's latency (section 4, equations 1 and 2, algorithm 1).

Compute stages and the network stages between them form one sequence; the pivot stage is the one
with the least bubble.  ``L = warm-up + steady + ending``.  Bubbles inside the pivot stage are
ignored, as the paper states, so the formula is close only for orders that hide transfers (PB).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.parallel.plan import Plan, Workload
from nostall.parallel.simulate import Costs, costs

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Latency:
    """The three phases of an iteration, modelled, in seconds."""

    warm_up_s: float
    steady_s: float
    ending_s: float
    pivot: int
    """Number of the pivot stage, counting compute and network stages from 0."""

    @property
    def total_s(self) -> float:
        """DAPPLE's L."""
        return self.warm_up_s + self.steady_s + self.ending_s


@njit(cache=True)  # type: ignore[untyped-decorator]
def latency(
    forward: Floats, backward: Floats, allreduce: Floats, n: int, micro_batches: int
) -> tuple[float, float, float, int]:
    """Warm-up, steady and ending seconds and the pivot of the first ``n`` stages of a sequence."""
    q = n - 1
    between = 0.0
    for s in range(n - 2, -1, -1):
        steady_s = (micro_batches - 1) * (forward[s] + backward[s])
        steady_q = (micro_batches - 1) * (forward[q] + backward[q]) + between
        if steady_s > steady_q:
            q = s
            between = 0.0
        else:
            between += forward[s] + backward[s]
    warm_up = forward[: q + 1].sum()
    steady = (micro_batches - 1) * (forward[q] + backward[q])
    ending = 0.0
    after = 0.0
    for s in range(q, -1, -1):
        after += backward[s]
        ending = max(ending, allreduce[s] + after)
    after = backward[q]
    for s in range(q + 1, n):
        after += backward[s]
        ending = max(ending, allreduce[s] - after)
    return warm_up, steady, ending, q


def stage_sequence(plan_costs: Costs) -> tuple[Floats, Floats, Floats]:
    """Forward, backward and all-reduce seconds of stage 0, network stage 0, stage 1, ..."""
    n = 2 * len(plan_costs.forward) - 1
    forward, backward, allreduce = np.zeros(n), np.zeros(n), np.zeros(n)
    forward[::2] = plan_costs.forward
    backward[::2] = np.array(plan_costs.backward) + np.array(plan_costs.weight_gradient)
    allreduce[::2] = [t.seconds for t in plan_costs.allreduce]
    forward[1::2] = [t.seconds for t in plan_costs.forward_transfers]
    backward[1::2] = [t.seconds for t in plan_costs.backward_transfers]
    return forward, backward, allreduce


def closed_form(workload: Workload, plan: Plan) -> Latency:
    """DAPPLE's L of a plan with one stage per worker."""
    forward, backward, allreduce = stage_sequence(costs(workload, plan))
    return Latency(*latency(forward, backward, allreduce, len(forward), workload.micro_batches))
