"""Simulation of a plan: converts costs and orders to arrays and runs the compiled engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.errors import BadPlan
from nostall.parallel.plan.plan import Plan
from nostall.parallel.plan.workload import Workload
from nostall.parallel.simulate.costs import Costs, Transfer, costs
from nostall.parallel.simulate.orders import fixed_orders, in_flight_limits

if TYPE_CHECKING:
    from nostall.parallel.simulate.engine import TransferArrays

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One simulated iteration; all times are modelled, in seconds from its start."""

    iteration_s: float
    costs: Costs
    operation_starts: Floats
    """Starts of forward, backward and weight-gradient operations, shape (3, stages, M); -1 if
    there is no such operation."""
    transfer_starts: Floats
    """Starts of transfers, shape (transfers, M): forward and backward over each boundary, then the
    all-reduces, which use the first column only; -1 if there is no such transfer."""
    peak_in_flight: tuple[int, ...]
    """Most micro-batches that each stage held at once."""
    splits_backward: bool
    """Whether weight gradients are separate operations."""

    @property
    def durations(self) -> Floats:
        """Seconds of each kind of operation in each stage, shape (3, stages)."""
        return _durations(self.costs)


def simulate(workload: Workload, plan: Plan) -> Timeline:
    """Simulate one iteration of a plan; raises :class:`BadPlan` if its order deadlocks."""
    plan_costs = costs(workload, plan)
    m = workload.micro_batches
    seconds, operation_starts, transfer_starts, peak = _run(plan_costs, plan, m)
    if math.isinf(seconds):
        raise BadPlan(
            f"the {plan.policy} order deadlocks on this plan: an operation waits for a later "
            "operation of the same worker; use policy list"
        )
    return Timeline(
        seconds,
        plan_costs,
        operation_starts.reshape(3, len(plan.stages), m),
        transfer_starts.reshape(-1, m),
        tuple(int(k) for k in peak),
        _splits_backward(plan),
    )


def simulated_s(workload: Workload, plan: Plan) -> float:
    """Modelled seconds of one iteration of a plan; infinite if its order deadlocks."""
    return _run(costs(workload, plan), plan, workload.micro_batches)[0]


def _run(plan_costs: Costs, plan: Plan, micro_batches: int) -> tuple[float, Floats, Floats, Longs]:
    from nostall.parallel.simulate.engine import StageArrays, run

    orders = fixed_orders(plan, plan_costs.worker, micro_batches) or []
    stages = StageArrays(
        _durations(plan_costs),
        np.array(plan_costs.worker, dtype=np.int64),
        np.array(in_flight_limits(plan, micro_batches), dtype=np.int64),
        np.array([operation for order in orders for operation in order], dtype=np.int64),
        np.cumsum([0, *(len(order) for order in orders)]).astype(np.int64),
    )
    transfers = _transfer_arrays(
        (
            *plan_costs.forward_transfers,
            *plan_costs.backward_transfers,
            *plan_costs.allreduce,
        )
    )
    result: tuple[float, Floats, Floats, Longs] = run(
        micro_batches, _splits_backward(plan), stages, transfers, plan_costs.resources
    )
    return result


def _durations(plan_costs: Costs) -> Floats:
    return np.array([plan_costs.forward, plan_costs.backward, plan_costs.weight_gradient])


def _splits_backward(plan: Plan) -> bool:
    return plan.policy == "zero-bubble"


def _transfer_arrays(transfers: Sequence[Transfer]) -> TransferArrays:
    from nostall.parallel.simulate.engine import TransferArrays

    loads = [load for t in transfers for load in t.loads]
    return TransferArrays(
        np.array([t.seconds for t in transfers]),
        np.cumsum([0, *(len(t.loads) for t in transfers)]).astype(np.int64),
        np.array([resource for resource, _ in loads], dtype=np.int64),
        np.array([seconds for _, seconds in loads], dtype=np.float64),
    )
