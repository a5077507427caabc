"""Simulating a plan: from costs and orders to the compiled engine and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nostall.parallel.errors import BadPlan
from nostall.parallel.plan.plan import Plan
from nostall.parallel.plan.workload import Workload
from nostall.parallel.simulate.costs import Costs, Transfer, costs
from nostall.parallel.simulate.engine import run
from nostall.parallel.simulate.orders import caps, fixed_orders

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """One simulated iteration, modelled, in seconds from its start.

    ``starts`` (3, stages, M): when forward, backward and weight-gradient operations start, -1
    where there is none; ``sent`` (transfers, M) the same for boundaries onward, back, and
    all-reduces (first column).  ``held`` is the most micro-batches that each stage held at once.
    """

    iteration_s: float
    costs: Costs
    starts: Floats
    sent: Floats
    held: tuple[int, ...]
    split: bool

    @property
    def durations(self) -> Floats:
        """Seconds of each kind in each stage, shape (3, stages)."""
        return np.array([self.costs.forward, self.costs.backward, self.costs.weight])


def simulate(work: Workload, plan: Plan) -> Timeline:
    """Run the plan through the engine.

    Raises :class:`BadPlan` for an order that blocks itself.
    """
    found = costs(work, plan)
    m = work.micro_batches
    seconds, starts, sent, held = _run(found, plan, m)
    if math.isinf(seconds):
        raise BadPlan(
            f"the {plan.policy} order blocks itself on this plan: an operation waits for one that "
            "comes later on the same worker; use policy list"
        )
    stages = len(plan.stages)
    return Timeline(
        seconds,
        found,
        starts.reshape(3, stages, m),
        sent.reshape(-1, m),
        tuple(int(k) for k in held),
        plan.policy == "zero-bubble",
    )


def simulated_s(work: Workload, plan: Plan) -> float:
    """The iteration's modelled seconds alone; infinite for an order that blocks itself."""
    return _run(costs(work, plan), plan, work.micro_batches)[0]


def _run(found: Costs, plan: Plan, micro_batches: int) -> tuple[float, Floats, Floats, Longs]:
    orders = fixed_orders(plan, found.worker, micro_batches)
    flat = [op for order in orders for op in order] if orders is not None else []
    ends = np.cumsum([0, *(len(order) for order in orders or [])])
    transfers = (*found.onward, *found.back, *found.allreduce)
    at, resource, seconds = _loads(transfers)
    result: tuple[float, Floats, Floats, Longs] = run(
        micro_batches,
        np.array([found.forward, found.backward, found.weight]),
        np.array(found.worker, dtype=np.int64),
        np.array(caps(plan, micro_batches), dtype=np.int64),
        plan.policy == "zero-bubble",
        np.array(flat, dtype=np.int64),
        ends.astype(np.int64),
        np.array([t.seconds for t in transfers]),
        at,
        resource,
        seconds,
        found.resources,
    )
    return result


def _loads(transfers: Sequence[Transfer]) -> tuple[Longs, Longs, Floats]:
    """Resources and seconds of all transfers, one after another, and where each begins."""
    at = np.cumsum([0, *(len(t.loads) for t in transfers)])
    pairs = [pair for t in transfers for pair in t.loads]
    return (
        at.astype(np.int64),
        np.array([resource for resource, _ in pairs], dtype=np.int64),
        np.array([seconds for _, seconds in pairs], dtype=np.float64),
    )
