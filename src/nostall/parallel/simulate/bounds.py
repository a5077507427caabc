"""What no order can beat: the longest chain of one micro-batch, and the busiest resource."""

from __future__ import annotations

from collections import defaultdict

from nostall.parallel.plan.plan import Plan
from nostall.parallel.plan.workload import Workload
from nostall.parallel.simulate.costs import Costs, costs


def critical_path_s(work: Workload, plan: Plan) -> float:
    """One micro-batch through all stages and back to each, then that stage's all-reduce."""
    found = costs(work, plan)
    onward = sum(found.forward) + sum(t.seconds for t in found.onward)
    path, longest = onward, 0.0
    for s in range(len(plan.stages) - 1, -1, -1):
        path += found.backward[s]
        longest = max(longest, path + found.weight[s] + found.allreduce[s].seconds)
        if s:
            path += found.back[s - 1].seconds
    return longest


def load_bound_s(work: Workload, plan: Plan) -> float:
    """The busiest worker or link over all micro-batches."""
    return max(loads(costs(work, plan), work.micro_batches))


def loads(found: Costs, micro_batches: int) -> list[float]:
    """Seconds that each worker and each resource is busy in an iteration."""
    workers = [0.0] * (max(found.worker) + 1)
    for s, worker in enumerate(found.worker):
        each = found.forward[s] + found.backward[s] + found.weight[s]
        workers[worker] += micro_batches * each
    links: defaultdict[int, float] = defaultdict(float)
    for transfer in (*found.onward, *found.back):
        for resource, seconds in transfer.loads:
            links[resource] += micro_batches * seconds
    for transfer in found.allreduce:
        for resource, seconds in transfer.loads:
            links[resource] += seconds
    return [*workers, *links.values()]
