"""Fixed orders of forward and backward passes per worker, and limits on micro-batches in flight.

An operation is encoded as ``(kind * stages + stage) * micro_batches + micro_batch``.  Kinds are 0
forward, 1 backward (gradients of inputs only, if the policy splits it), 2 weight gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from nostall.parallel.errors import BadPlan
from nostall.parallel.plan.plan import Plan, Policy


def default_in_flight(policy: Policy, stages: int, micro_batches: int) -> list[int]:
    """Micro-batches that each stage may hold under a policy, without any memory limit.

    DAPPLE, section 3: S - i for PA and 2 (S - i) - 1 for PB.  ``list`` takes PB's limit, which
    leaves time to hide a transfer in each direction.  ``zero-bubble`` takes 1F1B's limit, so it
    needs no more memory than 1F1B; it is greedy, is not the ZB-H1 order of arXiv:2401.10241, and
    reaches the bubble of ZB-H1 only with more micro-batches in flight.
    """
    if policy in ("gpipe", "interleaved"):
        limits = [micro_batches] * stages
    elif policy in ("pb", "list"):
        limits = [2 * (stages - i) - 1 for i in range(stages)]
    else:
        limits = [stages - i for i in range(stages)]
    return [min(k, micro_batches) for k in limits]


def in_flight_limits(plan: Plan, micro_batches: int) -> list[int]:
    """Micro-batches that each stage of a plan may hold: the policy's default under the plan's own.

    ``gpipe`` and ``interleaved`` ignore the plan's limits.  The greedy policies use the plan's
    limits in place of the default, so they may be above it.
    """
    default = default_in_flight(plan.policy, len(plan.stages), micro_batches)
    if plan.in_flight is None or plan.policy in ("gpipe", "interleaved"):
        return default
    if plan.policy in ("list", "zero-bubble"):
        return [min(k, micro_batches) for k in plan.in_flight]
    # A fixed order deadlocks if a stage waits for more forward passes than the previous stage may
    # start before its first backward pass, so limits must not increase from stage to stage.
    limited = (min(k, d) for k, d in zip(default, plan.in_flight, strict=True))
    return list(itertools.accumulate(limited, min))


def fixed_orders(plan: Plan, workers: Sequence[int], micro_batches: int) -> list[list[int]] | None:
    """Operations of each worker in order; None for the greedy policies, which have no fixed order.

    ``workers`` is the worker of each stage.
    """
    if plan.policy in ("list", "zero-bubble"):
        return None
    if plan.policy == "interleaved":
        return _interleaved(workers, micro_batches)
    stages = len(plan.stages)
    warm_up = in_flight_limits(plan, micro_batches)
    return [_one_forward_one_backward(s, stages, micro_batches, warm_up[s]) for s in range(stages)]


def _one_forward_one_backward(
    stage: int, stages: int, micro_batches: int, warm_up: int
) -> list[int]:
    """``warm_up`` forward passes, then backward and forward passes alternately (early backward)."""
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
    _check_interleaved(worker, micro_batches)
    group_size = workers if chunks > 1 else micro_batches
    chunk_order = [
        (chunk, m)
        for group in range(0, micro_batches, group_size)
        for chunk in range(chunks)
        for m in range(group, min(group + group_size, micro_batches))
    ]
    orders = []
    for w in range(workers):
        forward = [(chunk * workers + w) * micro_batches + m for chunk, m in chunk_order]
        backward = [
            (stages + (chunks - 1 - chunk) * workers + w) * micro_batches + m
            for chunk, m in chunk_order
        ]
        warm_up = workers - w - 1
        if chunks > 1:
            warm_up = 2 * warm_up + (chunks - 1) * workers
        warm_up = min(warm_up, len(forward) - 1)
        order = forward[:warm_up]
        for i in range(len(backward)):
            order.extend(forward[warm_up + i : warm_up + i + 1])
            order.append(backward[i])
        orders.append(order)
    return orders


def _check_interleaved(worker: Sequence[int], micro_batches: int) -> None:
    workers, stages = max(worker) + 1, len(worker)
    if list(worker) != [s % workers for s in range(stages)] or stages % workers:
        raise BadPlan(
            f"the stages are on GPU groups {list(worker)[:12]}; the interleaved order needs them "
            "assigned in rotation (0 1 2 0 1 2); use policy list for other mappings"
        )
    if micro_batches % workers and stages > workers:
        raise BadPlan(
            f"{micro_batches} micro-batches over {workers} workers; the interleaved order needs a "
            "multiple of the number of workers; change --global-batch or --micro-batch, or use "
            "policy list"
        )
