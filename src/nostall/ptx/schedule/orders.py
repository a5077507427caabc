"""Random orders of a block that keep its dependences."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from nostall.ptx.schedule.graph import BlockGraph


def random_order(
    graph: BlockGraph, present: Sequence[int], rng: np.random.Generator, sigma: float
) -> tuple[int, ...]:
    """A random legal order near the ``present`` one, by list scheduling.

    The key of a unit is its present position plus normal noise of standard deviation ``sigma``.
    The ready unit with the smallest key comes next; a unit is ready after its predecessors, and
    from its earliest position on. Some unit is always ready: of the units that are left, the first
    one in the text has no predecessor left, and its earliest position is at most its place there.
    """
    keys = np.empty(len(present))
    keys[list(present)] = np.arange(len(present)) + rng.normal(0.0, sigma, len(present))
    waiting = [len(before) for before in graph.predecessors]
    ready: list[tuple[float, int]] = []
    delayed: list[tuple[int, int]] = []

    def release(unit: int, position: int) -> None:
        earliest = graph.block.earliest[unit]
        if earliest > position:
            heapq.heappush(delayed, (earliest, unit))
        else:
            heapq.heappush(ready, (keys[unit], unit))

    for unit, count in enumerate(waiting):
        if count == 0:
            release(unit, 0)
    order: list[int] = []
    while len(order) < len(present):
        while delayed and delayed[0][0] <= len(order):
            unit = heapq.heappop(delayed)[1]
            heapq.heappush(ready, (keys[unit], unit))
        _, unit = heapq.heappop(ready)
        order.append(unit)
        for successor in graph.successors[unit]:
            waiting[successor] -= 1
            if waiting[successor] == 0:
                release(successor, len(order))
    return tuple(order)
