"""Fixed orders of a worker's forward and backward passes, and how many micro-batches wait in it.

An operation is ``(kind * stages + stage) * micro_batches + micro_batch``; kinds are 0 forward,
1 backward (of the inputs alone where it is split), 2 weight gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from nostall.parallel.errors import BadPlan
from nostall.parallel.plan.plan import Plan, Policy

FORWARD, BACKWARD, WEIGHT = 0, 1, 2


def in_flight(policy: Policy, stages: int, micro_batches: int) -> list[int]:
    """Micro-batches that each stage may hold, before any memory limit.

    DAPPLE section 3: PA S - i, PB 2 (S - i) - 1.  The list order takes PB's, which lets a transfer
    each way hide; zero-bubble takes 1F1B's, so that it needs no more memory.  It is greedy, not
    ZB-H1's own order (arXiv:2401.10241), and reaches that one's bubble only with more in flight.
    """
    if policy == "gpipe":
        wanted = [micro_batches] * stages
    elif policy in ("pb", "list"):
        wanted = [2 * (stages - i) - 1 for i in range(stages)]
    elif policy == "interleaved":
        wanted = [micro_batches] * stages
    else:
        wanted = [stages - i for i in range(stages)]
    return [min(k, micro_batches) for k in wanted]


def caps(plan: Plan, micro_batches: int) -> list[int]:
    """:func:`in_flight` under the plan's own limits.

    GPipe keeps every micro-batch by definition, and greedy orders may be given more than theirs.
    """
    own = in_flight(plan.policy, len(plan.stages), micro_batches)
    if plan.in_flight is None or plan.policy in ("gpipe", "interleaved"):
        return own
    if plan.policy in ("list", "zero-bubble"):
        return [min(k, micro_batches) for k in plan.in_flight]
    # A fixed order that waits for more forwards than the stage before lets through blocks itself.
    limited = (min(k, d) for k, d in zip(own, plan.in_flight, strict=True))
    return list(itertools.accumulate(limited, min))


def fixed_orders(plan: Plan, workers: Sequence[int], micro_batches: int) -> list[list[int]] | None:
    """Operations of each worker in order; None for policies that choose as they go."""
    if plan.policy in ("list", "zero-bubble"):
        return None
    if plan.policy == "interleaved":
        return _interleaved(workers, micro_batches)
    stages = len(plan.stages)
    warm_up = caps(plan, micro_batches)
    return [_one_by_one(s, stages, micro_batches, warm_up[s]) for s in range(stages)]


def _one_by_one(stage: int, stages: int, micro_batches: int, warm_up: int) -> list[int]:
    """``warm_up`` forwards, then one backward and one forward in turn (early backward)."""
    forward = [stage * micro_batches + m for m in range(micro_batches)]
    backward = [(stages + stage) * micro_batches + m for m in range(micro_batches)]
    order = forward[:warm_up]
    for m in range(micro_batches):
        order.append(backward[m])
        order.extend(forward[warm_up + m : warm_up + m + 1])
    return order


def _interleaved(worker: Sequence[int], micro_batches: int) -> list[list[int]]:
    """Megatron-LM's interleaved order (arXiv:2104.04473, section 2.2.2)."""
    workers, stages = max(worker) + 1, len(worker)
    chunks = stages // workers
    if list(worker) != [s % workers for s in range(stages)] or stages % workers:
        raise BadPlan(
            f"the stages lie on GPU groups {list(worker)[:12]}; the interleaved order needs them "
            "dealt out in turn (0 1 2 0 1 2); use policy list for other mappings"
        )
    if micro_batches % workers and chunks > 1:
        raise BadPlan(
            f"{micro_batches} micro-batches over {workers} workers; the interleaved order needs a "
            "multiple; change --global-batch or --micro-batch, or use policy list"
        )
    step = workers if chunks > 1 else micro_batches
    pairs = [
        (chunk, m)
        for group in range(0, micro_batches, step)
        for chunk in range(chunks)
        for m in range(group, min(group + step, micro_batches))
    ]
    orders = []
    for w in range(workers):
        forward = [(chunk * workers + w) * micro_batches + m for chunk, m in pairs]
        backward = [
            (stages + (chunks - 1 - chunk) * workers + w) * micro_batches + m for chunk, m in pairs
        ]
        ahead = workers - w - 1 if chunks == 1 else 2 * (workers - w - 1) + (chunks - 1) * workers
        ahead = min(ahead, len(forward) - 1)
        order = forward[:ahead]
        for i in range(len(backward)):
            order.extend(forward[ahead + i : ahead + i + 1])
            order.append(backward[i])
        orders.append(order)
    return orders
