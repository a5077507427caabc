"""Graph observation: instructions as nodes, dependences with their slack as edges.

Nodes and edges stay in original order, so a network can learn what an instruction is. The current
position of an instruction is one of its features.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.sass.program.opcodes import Pipe
from nostall.sass.program.program import Function
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.arrays import Int32Array, UInt8Array
from nostall.sass.schedule.graph import DependenceGraph

Float32Array = NDArray[np.float32]

NODE_FEATURES = (
    *(f"pipe={pipe.value}" for pipe in Pipe),
    "memory access",
    "cannot move",
    "guarded",
    "place in the block",
    "size of the block",
    "stall",
    "yield",
    "sets a write scoreboard",
    "sets a read scoreboard",
    "waits",
    "reuse",
)
"""Columns of the node features, all between 0 and 1; policy files record this list."""

EDGE_FEATURES = ("least cycles", "cycles now", "slack")
"""Columns of the edge features: cycles / 16, between -16 and 16; policy files record this list."""

_STATIC = len(Pipe) + 3
"""Number of the first column that depends on the schedule."""
_CYCLE_SCALE, _MAX_VALUE = 16.0, 16.0


@njit(cache=True)  # type: ignore[untyped-decorator]
def _find_issue_cycles(
    order: Int32Array,
    stall: UInt8Array,
    bounds: Int32Array,
    issue: Int32Array,
    place: Float32Array,
) -> None:
    """Compute the issue cycle of each instruction in its block, and its relative position there.

    ``bounds`` [blocks, 2] are the blocks' first and end positions.
    """
    for b in range(len(bounds)):
        now, start, end = 0, bounds[b, 0], bounds[b, 1]
        for p in range(start, end):
            issue[order[p]] = now
            place[order[p]] = (p - start) / (end - start)
            now += stall[order[p]]


class GraphView:
    """Observes the schedules of one kernel as graphs."""

    def __init__(self, function: Function, graph: DependenceGraph) -> None:
        n = len(function.instructions)
        self.nodes = n
        """Number of nodes."""
        pairs, cycles = [], []
        for block in graph.blocks:
            edges = block.arrays
            later = np.repeat(np.arange(block.start, block.end), np.diff(edges.edge_offsets))
            pairs.append(np.stack([edges.edge_first + block.start, later], axis=1))
            cycles.append(edges.edge_cycles)
        none = np.zeros((0, 2), dtype=np.int32)
        self.edges = np.concatenate([none, *pairs]).astype(np.int32)
        """Dependences inside blocks by original index (earlier, later), int32 [E, 2]."""
        self._least_cycles = np.concatenate([np.zeros(0, np.int32), *cycles]).astype(np.float32)
        self._bounds = np.array([(b.start, b.end) for b in graph.blocks], dtype=np.int32)
        self._static = np.zeros((n, len(NODE_FEATURES)), dtype=np.float32)
        pipes = list(Pipe)
        for i in function.instructions:
            row = self._static[i.index]
            row[pipes.index(i.pipe)] = 1.0
            guarded = float(i.is_guarded)
            row[len(Pipe) : _STATIC] = graph.memory[i.index], graph.fixed[i.index], guarded
            enclosing = graph.blocks[graph.block_numbers[i.index]]
            row[_STATIC + 1] = min(1.0, (enclosing.end - enclosing.start) / 1024)

    def observe(self, state: Schedule) -> tuple[Float32Array, Float32Array]:
        """Node features [n, features] and edge features [E, 3] of ``state``."""
        nodes = self._static.copy()
        issue = np.empty(self.nodes, dtype=np.int32)
        place = np.empty(self.nodes, dtype=np.float32)
        _find_issue_cycles(state.order, state.stall, self._bounds, issue, place)
        nodes[:, _STATIC] = place
        nodes[:, _STATIC + 2] = state.stall / 15.0
        nodes[:, _STATIC + 3] = state.yields
        nodes[:, _STATIC + 4] = state.write_sb < 6
        nodes[:, _STATIC + 5] = state.read_sb < 6
        nodes[:, _STATIC + 6] = state.wait > 0
        nodes[:, _STATIC + 7] = state.reuse > 0
        now = (issue[self.edges[:, 1]] - issue[self.edges[:, 0]]).astype(np.float32)
        columns = [self._least_cycles, now, now - self._least_cycles]
        values = np.stack(columns, axis=1) / _CYCLE_SCALE
        return nodes, np.clip(values, -_MAX_VALUE, _MAX_VALUE)
