"""Rules by which buffers of rows share memory, for a comparison with the rule of kernels.

- ``"none"``: no buffer reuses memory.
- ``"dominance"`` (arXiv:1811.05213, arXiv:2009.10924): a buffer reuses the memory of one whose
  producer its own producer dominates.  This is valid for every order of the operators.
- ``"order"``: a buffer reuses the memory of one that is dead in the order in which the kernel runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.emit.schemes.shared import emit_shared
from nostall.fusion.codegen.loops.reduction_levels import ValueKey
from nostall.fusion.codegen.tiling.on_chip import (
    OnChipValues,
    operand_values,
    rematerialization_options,
)
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.codegen.tiling.shared_memory import Arena, SharingRule, any_dead_buffer

Reuse = Literal["none", "dominance", "order"]


def sharing_rule(kept: OnChipValues, reuse: Reuse) -> SharingRule:
    """Which buffers of these values may take the memory of which dead ones."""
    if reuse == "order":
        return any_dead_buffer
    pairs = dominated_pairs(kept) if reuse == "dominance" else frozenset()
    return lambda earlier, later: (earlier.name, later.name) in pairs


def arena_by(kept: OnChipValues, chunk_lanes: int, reuse: Reuse) -> Arena:
    """The allocation by a rule."""
    return kept.arena(chunk_lanes, sharing_rule(kept, reuse))


def emit_by(kernel: PlannedKernel, reuse: Reuse) -> Program:
    """The program of the scheme ``shared`` with buffers that share memory by a rule."""
    plan = kernel.plan
    options = rematerialization_options(kernel.schedule, plan.async_copies, plan.peeled)
    return emit_shared(kernel, sharing_rule(options[plan.rematerialized], reuse))


def peak_live_bytes(arena: Arena) -> int:
    """The maximum bytes that are live between two passes: a lower bound of every allocation."""
    passes = range(max((b.last_pass for b in arena.buffers), default=0))
    live = (
        sum(arena.buffer_bytes(b) for b in arena.buffers if b.first_pass <= p < b.last_pass)
        for p in passes
    )
    return max(live, default=0)


def dominated_pairs(kept: OnChipValues) -> frozenset[tuple[int, int]]:
    """Pairs of buffers (a, b) such that the producer of b dominates the producer of a.

    Dominance is that of the papers, from the root (the last step): all paths from a's producer
    to the end go through b's.
    """
    steps, successors = _dataflow_steps(kept)
    postdominators = immediate_postdominators(successors)
    producers = [steps[value, numbers[0]] for value, numbers in kept.passes_using.items()]
    pairs = set()
    for a, producer in enumerate(producers):
        dominators = set()
        step = producer
        while (step := postdominators[step]) < len(successors):
            dominators.add(step)
        pairs |= {(a, b) for b, candidate in enumerate(producers) if candidate in dominators}
    return frozenset(pairs)


def _dataflow_steps(
    kept: OnChipValues,
) -> tuple[dict[tuple[ValueKey, int], int], list[list[int]]]:
    """The dataflow graph of the kernel: all operators and loads, in execution order.

    Returns the step number of each (value, pass), and the successors of each step, which are
    the steps that use its result.  A value that is recomputed has a step in each pass.
    """
    steps: dict[tuple[ValueKey, int], int] = {}
    successors: list[list[int]] = []
    latest: dict[ValueKey, int] = {}
    for number, current in enumerate(kept.passes):
        loads: list[ValueKey] = [
            v for v in current.operands if not isinstance(v, int) and v not in current.on_chip
        ]
        row_operators = [index for index in current.row_operators if index not in latest]
        operators = {*current.column_operators, *row_operators, *current.reductions}
        for value in [*loads, *sorted(operators)]:
            step = steps[value, number] = latest[value] = len(successors)
            successors.append([])
            for source in (
                () if not isinstance(value, int) else operand_values(kept.schedule, value)
            ):
                if source in latest:
                    successors[latest[source]].append(step)
    return steps, successors


def immediate_postdominators(successors: Sequence[Sequence[int]]) -> list[int]:
    """The immediate postdominator of every step of a directed acyclic graph.

    It is the next step on all paths to the end.  The end is ``len(successors)``; it follows steps
    without successors.  Steps are in topological order, so one backward sweep yields the result of
    the iterative algorithm of Cooper, Harvey and Kennedy (2001).
    """
    end = len(successors)
    postdominators = [end] * (end + 1)

    def common(a: int, b: int) -> int:
        while a != b:
            a, b = (postdominators[a], b) if a < b else (a, postdominators[b])
        return a

    for step in reversed(range(end)):
        nearest = None
        for successor in successors[step]:
            nearest = successor if nearest is None else common(nearest, successor)
        postdominators[step] = end if nearest is None else nearest
    return postdominators[:end]
