"""Lower bounds of a plan's iteration time in any order: the critical path and the largest load."""

from __future__ import annotations

from collections import defaultdict

from nostall.parallel.plan.plan import Plan
from nostall.parallel.plan.workload import Workload
from nostall.parallel.simulate.costs import Costs, costs


def critical_path_s(workload: Workload, plan: Plan) -> float:
    """Seconds of the longest chain of dependent operations of one micro-batch.

    A chain runs forward through all stages, backward to some stage, and ends with the weight
    gradients and the all-reduce of that stage.
    """
    plan_costs = costs(workload, plan)
    path = sum(plan_costs.forward) + sum(t.seconds for t in plan_costs.forward_transfers)
    longest = 0.0
    for s in range(len(plan.stages) - 1, -1, -1):
        path += plan_costs.backward[s]
        end = path + plan_costs.weight_gradient[s] + plan_costs.allreduce[s].seconds
        longest = max(longest, end)
        if s:
            path += plan_costs.backward_transfers[s - 1].seconds
    return longest


def load_bound_s(workload: Workload, plan: Plan) -> float:
    """Seconds that the busiest worker or network resource is occupied in an iteration."""
    return max(_loads(costs(workload, plan), workload.micro_batches))


def _loads(plan_costs: Costs, micro_batches: int) -> list[float]:
    """Seconds that each worker and each network resource is occupied in an iteration."""
    workers = [0.0] * (max(plan_costs.worker) + 1)
    for s, worker in enumerate(plan_costs.worker):
        stage_s = plan_costs.forward[s] + plan_costs.backward[s] + plan_costs.weight_gradient[s]
        workers[worker] += micro_batches * stage_s
    resources: defaultdict[int, float] = defaultdict(float)
    for transfer in (*plan_costs.forward_transfers, *plan_costs.backward_transfers):
        for resource, seconds in transfer.loads:
            resources[resource] += micro_batches * seconds
    for transfer in plan_costs.allreduce:
        for resource, seconds in transfer.loads:
            resources[resource] += seconds
    return [*workers, *resources.values()]
