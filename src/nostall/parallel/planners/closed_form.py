"""DAPPLE's closed form of a plan's latency (section 4, equations 1 and 2, algorithm 1).

Compute stages and the network stages between them form one row; the pivot is the one with the
least bubble.  ``L = warm-up + steady + ending``; bubbles inside the pivot are ignored, as the
paper says, so only orders that hide transfers (PB) come close to it.
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
    """The three parts in seconds; ``pivot`` counts compute and network stages from 0."""

    warm_up_s: float
    steady_s: float
    ending_s: float
    pivot: int

    @property
    def total_s(self) -> float:
        """DAPPLE's L."""
        return self.warm_up_s + self.steady_s + self.ending_s


@njit(cache=True)  # type: ignore[untyped-decorator]
def latency(
    forward: Floats, backward: Floats, allreduce: Floats, n: int, micro_batches: int
) -> tuple[float, float, float, int]:
    """Warm-up, steady, ending and pivot of the first ``n`` entries of a row."""
    q = n - 1
    between = 0.0
    for s in range(n - 2, -1, -1):
        mine = (micro_batches - 1) * (forward[s] + backward[s])
        pivots = (micro_batches - 1) * (forward[q] + backward[q]) + between
        if mine > pivots:
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


def row(found: Costs) -> tuple[Floats, Floats, Floats]:
    """Forward, backward and all-reduce seconds of stage 0, link 0, stage 1, link 1, ..."""
    n = 2 * len(found.forward) - 1
    forward, backward, allreduce = np.zeros(n), np.zeros(n), np.zeros(n)
    forward[::2] = found.forward
    backward[::2] = np.array(found.backward) + np.array(found.weight)
    allreduce[::2] = [t.seconds for t in found.allreduce]
    forward[1::2] = [t.seconds for t in found.onward]
    backward[1::2] = [t.seconds for t in found.back]
    return forward, backward, allreduce


def closed_form(work: Workload, plan: Plan) -> Latency:
    """DAPPLE's L of a plan with one stage a worker."""
    forward, backward, allreduce = row(costs(work, plan))
    return Latency(*latency(forward, backward, allreduce, len(forward), work.micro_batches))
