"""What every legal schedule of a function must respect, derived once from the original.

Per block: edges (first, second, cycles) that say "second issues at least so many cycles after
first", the least distance of instructions from the block's start and end, and which neighbours
may follow each other how closely.  The verifier does not use this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from nostall.sass.program.opcodes import Pipe
from nostall.sass.program.program import Function
from nostall.sass.program.slots import slot_register
from nostall.sass.safety.latency import LatencyTable
from nostall.sass.schedule.constraints import BlockScan, BoardUse, Leftover
from nostall.sass.schedule.dependence_scan import scan

Ints = NDArray[np.int32]
_LONG_AGO = 64
"""Cycles since issue beyond which only a scoreboard counts."""
_PIPES = {pipe: number for number, pipe in enumerate(Pipe)}


@dataclass(frozen=True)
class BlockGraph:
    """Constraints of one block, in local numbers (original index minus ``start``).

    Edges into instruction l: from ``first[into[l] : into[l + 1]]``, at least ``cycles`` later.
    ``after_start`` and ``before_end``: least cycles from the block's start to the instruction, and
    from the instruction to the block's end.
    """

    start: int
    end: int
    into: Ints
    first: Ints
    cycles: Ints
    after_start: Ints
    before_end: Ints
    boards: BoardUse


@dataclass(frozen=True)
class Graph:
    """Constraints of a function; ``fixed`` marks instructions whose control must not change and
    that nothing may cross; ``memory`` marks global, shared and local accesses; ``drains`` marks
    DEPBAR, which may wait at once; ``pipe`` and ``gap`` give the least stall between neighbours."""

    blocks: tuple[BlockGraph, ...]
    block_of: Ints
    fixed: NDArray[np.bool_]
    memory: NDArray[np.bool_]
    drains: NDArray[np.bool_]
    pipe: Ints
    gap: Ints
    next_original: Ints
    stall_original: Ints
    slots: Ints
    edge_count: int

    def rules(
        self, block: BlockGraph
    ) -> tuple[int, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints, Ints]:
        """What the compiled loops take of a block and of the function, in their order: from
        ``start`` to ``stall_original``."""
        return (
            block.start,
            block.into,
            block.first,
            block.cycles,
            block.after_start,
            block.before_end,
            self.pipe,
            self.gap,
            self.next_original,
            self.stall_original,
        )


def build(function: Function, sm: int) -> Graph:
    """Derive the constraints of ``function`` (in its original order)."""
    floors = LatencyTable.load(sm)
    n = len(function.instructions)
    stuck = function.pinned | function.frozen
    scans = [
        scan(function.instructions[b.start : b.end], sm, floors, stuck) for b in function.blocks
    ]
    arrivals = _arrivals(function, sm, floors, scans)
    blocks: list[BlockGraph] = []
    for block, found, arriving in zip(function.blocks, scans, arrivals, strict=True):
        found.protect_entry(arriving)
        blocks.append(_pack(block.start, block.end, found))
    fixed = np.array(
        [i.is_barrier or i.index in stuck for i in function.instructions], dtype=np.bool_
    )
    following = np.full(n, -1, dtype=np.int32)
    for block in function.blocks:
        following[block.start : block.end - 1] = np.arange(block.start + 1, block.end)
    return Graph(
        blocks=tuple(blocks),
        block_of=np.array(function.block_numbers, dtype=np.int32),
        fixed=fixed,
        memory=np.array(
            [i.pipe is Pipe.LSU and not i.is_barrier for i in function.instructions],
            dtype=np.bool_,
        ),
        drains=np.array([i.base == "DEPBAR" for i in function.instructions], dtype=np.bool_),
        pipe=np.array([_PIPES[i.pipe] for i in function.instructions], dtype=np.int32),
        gap=_gaps(function, floors),
        next_original=following,
        stall_original=np.array([i.control.stall for i in function.instructions], dtype=np.int32),
        slots=_slots(function),
        edge_count=sum(len(b.first) for b in blocks),
    )


def _pack(start: int, end: int, found: BlockScan) -> BlockGraph:
    count = len(found.edges)
    ends = np.fromiter(chain.from_iterable(found.edges), np.int32, 2 * count).reshape(-1, 2) - start
    cycles = np.fromiter(found.edges.values(), np.int32, count)
    order = np.lexsort((ends[:, 0], ends[:, 1]))
    into = np.searchsorted(ends[order, 1], np.arange(end - start + 1)).astype(np.int32)
    return BlockGraph(
        start,
        end,
        into,
        np.ascontiguousarray(ends[order, 0]),
        np.ascontiguousarray(cycles[order]),
        np.array([found.after_start.get(i, 0) for i in range(start, end)], dtype=np.int32),
        np.array([found.before_end.get(i, 0) for i in range(start, end)], dtype=np.int32),
        found.boards,
    )


def _arrivals(
    function: Function, sm: int, floors: LatencyTable, scans: list[BlockScan]
) -> list[dict[Leftover, int]]:
    """What may be in flight when each block begins (item -> cycles since issue, at least)."""
    arriving: list[dict[Leftover, int]] = [{} for _ in scans]
    todo = list(range(len(scans)))
    while todo:
        number = todo.pop()
        found = scans[number]
        leaving = {item: min(since, _LONG_AGO) for item, since in found.leftovers.items()}
        for item, since in arriving[number].items():
            later = since + found.length
            if item.boards & found.waited or (item.fixed and later >= item.ceiling):
                continue
            leaving[item] = min(later, leaving.get(item, _LONG_AGO), _LONG_AGO)
        for successor in function.blocks[number].succ:
            into = arriving[successor]
            worse = {k: v for k, v in leaving.items() if v < into.get(k, _LONG_AGO + 1)}
            if worse:
                into.update(worse)
                todo.append(successor)
    return arriving


def _gaps(function: Function, floors: LatencyTable) -> Ints:
    """Least stall between neighbours, by pipe of the first and pipe of the second."""
    sample = {i.pipe: i for i in function.instructions}
    table = np.full((len(_PIPES), len(_PIPES)), 2, dtype=np.int32)
    for a, first in sample.items():
        for b, second in sample.items():
            table[_PIPES[a], _PIPES[b]] = floors.min_issue_gap(first, second)
    return table


def _slots(function: Function) -> Ints:
    """[n, 4]: the general register in operand slots a, b, c (-1: none), and whether the
    instruction overwrites one of them (bit mask)."""
    table = np.full((len(function.instructions), 4), -1, dtype=np.int32)
    for instruction in function.instructions:
        overwritten = 0
        for slot in range(3):
            register = slot_register(instruction, slot)
            if register is not None:
                table[instruction.index, slot] = register
                overwritten |= (register in instruction.defs) << slot
        table[instruction.index, 3] = overwritten
    return table
