"""The schedule as a graph: instructions, and dependences with how much room each has left.

Nodes and edges are in original order and never change places, so a network can learn what an
instruction is; where it stands now is one of its features.
"""

from __future__ import annotations

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.sass.program.opcodes import Pipe
from nostall.sass.program.program import Function
from nostall.sass.schedule import Schedule
from nostall.sass.schedule.graph import Graph

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
"""Meaning of the columns of ``nodes``; all between 0 and 1."""

EDGE_FEATURES = ("least cycles", "cycles now", "slack")
"""Meaning of the columns of ``edge_values``; cycles / 16, at most 16."""

_STATIC = len(Pipe) + 3
_CYCLES, _MOST = 16.0, 16.0


@njit(cache=True)  # type: ignore[untyped-decorator]
def _issue(
    order: NDArray[np.int32],
    stall: NDArray[np.uint8],
    bounds: NDArray[np.int32],
    issue: NDArray[np.int32],
    place: NDArray[np.float32],
) -> None:
    """Cycle of each instruction since its block began, and its relative place there."""
    for b in range(len(bounds)):
        now, start, end = 0, bounds[b, 0], bounds[b, 1]
        for p in range(start, end):
            issue[order[p]] = now
            place[order[p]] = (p - start) / (end - start)
            now += stall[order[p]]


class GraphView:
    """The graph of one kernel.

    ``edges``: int32 [E, 2], dependences inside blocks by original index (earlier, later).
    """

    def __init__(self, function: Function, graph: Graph) -> None:
        n = len(function.instructions)
        self.nodes = n
        pairs, least = [], []
        for block in graph.blocks:
            later = np.repeat(np.arange(block.start, block.end), np.diff(block.into))
            pairs.append(np.stack([block.first + block.start, later], axis=1))
            least.append(block.cycles)
        none = np.zeros((0, 2), dtype=np.int32)
        self.edges = np.concatenate([none, *pairs]).astype(np.int32)
        self._least = np.concatenate([np.zeros(0, np.int32), *least]).astype(np.float32)
        self._bounds = np.array([(b.start, b.end) for b in graph.blocks], dtype=np.int32)
        self._static = np.zeros((n, len(NODE_FEATURES)), dtype=np.float32)
        pipes = list(Pipe)
        for i in function.instructions:
            row = self._static[i.index]
            row[pipes.index(i.pipe)] = 1.0
            guarded = float(i.is_guarded)
            row[len(Pipe) : _STATIC] = graph.memory[i.index], graph.fixed[i.index], guarded
            block = graph.blocks[graph.block_of[i.index]]
            row[_STATIC + 1] = min(1.0, (block.end - block.start) / 1024)

    def of(self, state: Schedule) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(nodes [n, features], edge values [E, 3]), float32."""
        nodes = self._static.copy()
        issue = np.empty(self.nodes, dtype=np.int32)
        place = np.empty(self.nodes, dtype=np.float32)
        _issue(state.order, state.stall, self._bounds, issue, place)
        nodes[:, _STATIC] = place
        nodes[:, _STATIC + 2] = state.stall / 15.0
        nodes[:, _STATIC + 3] = state.yields
        nodes[:, _STATIC + 4] = state.write_sb < 6
        nodes[:, _STATIC + 5] = state.read_sb < 6
        nodes[:, _STATIC + 6] = state.wait > 0
        nodes[:, _STATIC + 7] = state.reuse > 0
        now = (issue[self.edges[:, 1]] - issue[self.edges[:, 0]]).astype(np.float32)
        values = np.stack([self._least, now, now - self._least], axis=1) / _CYCLES
        return nodes, np.clip(values, -_MOST, _MOST)
