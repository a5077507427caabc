"""Observation of the game on PTX: a row of features for each unit, in the present order."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nostall.ptx.program.resources import Reference, Resource
from nostall.ptx.schedule.space import PtxSpace
from nostall.ptx.schedule.state import PtxState

_SPACES = (Resource.GLOBAL, Resource.SHARED, Resource.FENCE, Resource.CONVERGENCE, Resource.WGMMA)
_MATRIX = ("mma", "wgmma", "tcgen05")
FEATURES = (
    "block",
    "loops",
    "position",
    "predecessor",
    "successor",
    "matrix product",
    *(f"{how} {space.name.lower()}" for space in _SPACES for how in ("reads", "writes")),
)
"""Columns.  All are in [0, 1]: the block by its number, the loops around it up to 3, the position
in the block, and the distances to the nearest predecessor and successor, up to 32 positions."""
_MAX_LOOPS, _MAX_DISTANCE = 3, 32


class UnitTable:
    """Observes states of one space."""

    def __init__(self, space: PtxSpace) -> None:
        self.space = space
        self.rows = sum(map(len, space.blocks))
        self._fixed = [
            np.array([_fixed(unit.reads, unit.writes, unit.words) for unit in block.units])
            for block in space.blocks
        ]

    def observe(self, state: PtxState) -> NDArray[np.float32]:
        """The table of a state, float32 [units, features]."""
        tables = [self._block(state, number) for number in range(len(self.space.blocks))]
        return np.concatenate(tables).astype(np.float32)

    def _block(self, state: PtxState, number: int) -> NDArray[np.float64]:
        order = self.space.order(state, number)
        graph = self.space.graphs[number]
        position = {unit: at for at, unit in enumerate(order)}
        place = np.arange(len(order)) / max(1, len(order) - 1)
        before = [max((position[p] for p in graph.predecessors[u]), default=None) for u in order]
        after = [min((position[s] for s in graph.successors[u]), default=None) for u in order]
        distances = [
            (_distance(at, before[at]), _distance(at, after[at])) for at in range(len(order))
        ]
        block = np.full(len(order), number / max(1, len(self.space.blocks) - 1))
        loops = np.full(len(order), min(graph.block.depth, _MAX_LOOPS) / _MAX_LOOPS)
        fixed = self._fixed[number][list(order)]
        return np.column_stack((block, loops, place, np.array(distances), fixed))


def _distance(at: int, other: int | None) -> float:
    """Positions between two units, 1 if there is no other one."""
    return 1.0 if other is None else min(abs(at - other), _MAX_DISTANCE) / _MAX_DISTANCE


def _fixed(
    reads: frozenset[Reference], writes: frozenset[Reference], words: frozenset[str]
) -> list[float]:
    """The features of a unit that do not depend on its place."""
    return [
        float(any(word.partition(".")[0] in _MATRIX for word in words)),
        *(float(space in side) for space in _SPACES for side in (reads, writes)),
    ]
