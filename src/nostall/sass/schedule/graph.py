"""Dependence graph of a function: the constraints that each legal schedule must meet.

The graph is derived once, from the original schedule. It has no role in the safety proof: the
verifier does not use this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from nostall.sass.program.opcodes import Pipe
from nostall.sass.program.program import Function
from nostall.sass.program.registers import slot_register
from nostall.sass.safety.latency import LatencyTable
from nostall.sass.schedule.arrays import BoolArray, Int32Array
from nostall.sass.schedule.constraints import BlockConstraints, InFlight, ScoreboardUse
from nostall.sass.schedule.dependence_scan import scan_block

_LONG_AGO = 64
"""Cycles since issue beyond which only scoreboards protect a register."""
_PIPE_NUMBERS = {pipe: number for number, pipe in enumerate(Pipe)}


class BlockArrays(NamedTuple):
    """Constraints of one block, as the compiled (numba) loops take them.

    Local numbers are original indices minus ``start``; the last six arrays are those of the
    whole function.
    """

    start: int
    """Original index of the first instruction."""
    edge_offsets: Int32Array
    """[n + 1]: local instruction l is the second of the edges offsets[l] to offsets[l + 1]."""
    edge_first: Int32Array
    """[edges]: local number of the first instruction."""
    edge_cycles: Int32Array
    """[edges]: least cycles from the first instruction to the second."""
    after_start: Int32Array
    """[n]: least cycles from the start of the block to the instruction."""
    before_end: Int32Array
    """[n]: least cycles from the instruction to the end of the block."""
    pipe: Int32Array
    gap: Int32Array
    next_original: Int32Array
    stall_original: Int32Array
    is_depbar: BoolArray


@dataclass(frozen=True)
class BlockGraph:
    """Constraints of the instructions with original indices ``start`` to ``end`` - 1."""

    start: int
    end: int
    arrays: BlockArrays
    scoreboards: ScoreboardUse


@dataclass(frozen=True)
class DependenceGraph:
    """Constraints of a function; all arrays are indexed by original index."""

    blocks: tuple[BlockGraph, ...]
    block_numbers: Int32Array
    """Number of the block of each instruction."""
    fixed: BoolArray
    """Instructions that stay as they are, and that no other may cross."""
    memory: BoolArray
    """Global, shared and local memory accesses."""
    slots: Int32Array
    """[n, 4]: register in the operand slots a, b and c (-1: none), and a bit mask of the slots
    whose register the instruction overwrites."""
    edge_count: int


def build_graph(
    function: Function, sm: int, *, measured_latencies: bool = False
) -> DependenceGraph:
    """Derive the constraints of ``function`` from its original schedule.

    ``measured_latencies``: issue distances measured on a GPU may lower mined ones.
    """
    floors = LatencyTable.load(sm, measured_latencies=measured_latencies)
    pinned = function.pinned | function.frozen
    scans = [
        scan_block(function.instructions[b.start : b.end], sm, floors, pinned)
        for b in function.blocks
    ]
    live_ins = _live_ins(function, scans)
    for constraints, live_in in zip(scans, live_ins, strict=True):
        constraints.protect_live_in(live_in)
    shared = _function_arrays(function, floors)
    blocks = tuple(
        BlockGraph(
            block.start,
            block.end,
            BlockArrays(block.start, *_edge_arrays(block.start, block.end, constraints), *shared),
            constraints.scoreboards,
        )
        for block, constraints in zip(function.blocks, scans, strict=True)
    )
    fixed = [i.is_barrier or i.index in pinned for i in function.instructions]
    memory = [i.pipe is Pipe.LSU and not i.is_barrier for i in function.instructions]
    return DependenceGraph(
        blocks=blocks,
        block_numbers=np.array(function.block_numbers, dtype=np.int32),
        fixed=np.array(fixed, dtype=np.bool_),
        memory=np.array(memory, dtype=np.bool_),
        slots=_operand_slots(function),
        edge_count=sum(len(block.arrays.edge_first) for block in blocks),
    )


def _edge_arrays(
    start: int, end: int, constraints: BlockConstraints
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array]:
    """``edge_offsets`` to ``before_end`` of :class:`BlockArrays`."""
    edges = constraints.edges
    count = len(edges)
    pairs = np.fromiter(chain.from_iterable(edges), np.int32, 2 * count).reshape(-1, 2) - start
    cycles = np.fromiter(edges.values(), np.int32, count)
    order = np.lexsort((pairs[:, 0], pairs[:, 1]))
    offsets = np.searchsorted(pairs[order, 1], np.arange(end - start + 1)).astype(np.int32)
    after_start, before_end = constraints.after_start, constraints.before_end
    return (
        offsets,
        np.ascontiguousarray(pairs[order, 0]),
        np.ascontiguousarray(cycles[order]),
        np.array([after_start.get(i, 0) for i in range(start, end)], dtype=np.int32),
        np.array([before_end.get(i, 0) for i in range(start, end)], dtype=np.int32),
    )


def _function_arrays(
    function: Function, floors: LatencyTable
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, BoolArray]:
    """``pipe`` to ``is_depbar`` of :class:`BlockArrays`.

    ``pipe`` is the pipe number of each instruction, ``gap`` [pipe, pipe] the least stall count
    between neighbours, ``next_original`` the next instruction of the original order in the block
    (-1: none), ``stall_original`` the original stall count. DEPBAR may wait for a scoreboard in
    the cycle after it is set.
    """
    instructions = function.instructions
    following = np.full(len(instructions), -1, dtype=np.int32)
    for block in function.blocks:
        following[block.start : block.end - 1] = np.arange(block.start + 1, block.end)
    return (
        np.array([_PIPE_NUMBERS[i.pipe] for i in instructions], dtype=np.int32),
        _pipe_gaps(function, floors),
        following,
        np.array([i.control.stall for i in instructions], dtype=np.int32),
        np.array([i.base == "DEPBAR" for i in instructions], dtype=np.bool_),
    )


def _live_ins(function: Function, scans: list[BlockConstraints]) -> list[dict[InFlight, int]]:
    """Items that may be in flight when each block begins -> least cycles since their issue.

    A forward data-flow analysis over the blocks, until nothing changes.
    """
    live_ins: list[dict[InFlight, int]] = [{} for _ in scans]
    worklist = list(range(len(scans)))
    while worklist:
        number = worklist.pop()
        scan = scans[number]
        live_out = {item: min(since, _LONG_AGO) for item, since in scan.live_out.items()}
        for item, since in live_ins[number].items():
            later = since + scan.length
            if item.scoreboards & scan.waited or (item.fixed_latency and later >= item.ceiling):
                continue
            if item.is_assumed and item.registers <= scan.overwritten:
                continue
            live_out[item] = min(later, live_out.get(item, _LONG_AGO), _LONG_AGO)
        for successor in function.blocks[number].succ:
            live_in = live_ins[successor]
            earlier = {k: v for k, v in live_out.items() if v < live_in.get(k, _LONG_AGO + 1)}
            if earlier:
                live_in.update(earlier)
                worklist.append(successor)
    return live_ins


def _pipe_gaps(function: Function, floors: LatencyTable) -> Int32Array:
    """Least stall count between neighbours, by the pipes of the first and the second."""
    sample = {i.pipe: i for i in function.instructions}
    gaps = np.full((len(_PIPE_NUMBERS), len(_PIPE_NUMBERS)), 2, dtype=np.int32)
    for a, first in sample.items():
        for b, second in sample.items():
            gaps[_PIPE_NUMBERS[a], _PIPE_NUMBERS[b]] = floors.min_issue_gap(first, second)
    return gaps


def _operand_slots(function: Function) -> Int32Array:
    """``slots`` of :class:`DependenceGraph`."""
    slots = np.full((len(function.instructions), 4), -1, dtype=np.int32)
    for instruction in function.instructions:
        overwritten = 0
        for slot in range(3):
            register = slot_register(instruction, slot)
            if register is not None:
                slots[instruction.index, slot] = register
                overwritten |= (register in instruction.defs) << slot
        slots[instruction.index, 3] = overwritten
    return slots
