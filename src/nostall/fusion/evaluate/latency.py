"""The latency-evaluator of FusionStitching (arXiv:2009.10924): how long a kernel takes.

    L = N_wave * L_warp,    N_wave = N_warp / occupancy,    L_warp = N_instruction * CPI

for every launch of a small set (warps of a block, elements of a lane); the best counts.  Occupancy
comes from the registers that the values alive at once need.  Our additions: loads and stores wait
for memory once a warp, and no kernel is faster than its bytes at copy bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nostall.core import Measurement, Objective
from nostall.core.measurement import Kind
from nostall.fusion.evaluate.delta import Delta
from nostall.fusion.evaluate.legality import Mapping, connected, mapping
from nostall.fusion.graph.partition import Mask, Plan, members

_BASE_REGISTERS = 24
"""Addresses and indices, assumed."""
_DEPENDENT = 5.0
"""Cycles from an instruction of a warp to one that needs its result, assumed."""
_MOST_ILP = 4
"""Independent elements that a lane overlaps, assumed."""
_REDUCTION = 24.0
"""Instructions of one reduction over a block: shuffles, shared memory, barrier, assumed."""
_MEMORY = 0.5
"""Load and store instructions an element, with their address arithmetic, assumed."""
_WIDE = 64
"""Values so many times smaller than the widest take no registers worth counting."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One way to run a piece of a kernel: warps of a block, elements of a lane."""

    warps: int
    elements: int


class Latency:
    """Evaluates kernels and plans of the graph of a :class:`Delta`."""

    def __init__(self, delta: Delta) -> None:
        self.delta = delta
        self._known: dict[Mask, float] = {}

    def cost(self, plan: Plan) -> float:
        """Modelled seconds of all kernels; infinity where one of them is not legal."""
        return sum(self.kernel(mask) for mask in plan.groups)

    def kernel(self, mask: Mask) -> float:
        """Modelled seconds of one kernel at its best launch; infinity where it is not legal."""
        if mask not in self._known:
            self._known[mask] = self._kernel(mask)
        return self._known[mask]

    def _kernel(self, mask: Mask) -> float:
        parts = self.delta.parts(mask)
        if parts is None:
            return math.inf
        seconds = 0.0
        for piece in connected(self.delta.work, mask):
            laid = mapping(self.delta.work, piece)
            assert laid is not None  # parts() said that it is legal
            seconds += min(self._waves(piece, laid, launch) for launch in _launches(laid))
        return max(seconds, parts.memory) + parts.calls

    def _waves(self, mask: Mask, laid: Mapping, launch: Launch) -> float:
        """N_wave * L_warp in seconds."""
        hardware, work = self.delta.hardware, self.delta.work
        lanes = 32 * launch.elements
        widest = max(work.iterated[index] for index in members(mask))
        warps = max(1.0, widest / lanes)
        if laid.levels:
            warps = max(warps, laid.rows * max(0.25, math.ceil(laid.columns / lanes)))
        needed = _BASE_REGISTERS + self._alive(mask, widest) * launch.elements
        spilled = max(0, needed - hardware.most_registers)
        registers = min(needed, hardware.most_registers)
        resident = min(hardware.max_warps, hardware.registers // (32 * registers))
        resident = max(launch.warps, resident // launch.warps * launch.warps)
        counted = self.delta.instructions(mask, laid) / 32
        touched = _MEMORY * launch.elements * self._accesses(mask, widest)
        each = counted / warps + touched + 2.0 * spilled + laid.levels * _REDUCTION
        ilp = min(_MOST_ILP, launch.elements)
        turn = max(_DEPENDENT / ilp, min(resident, warps / hardware.sms) / hardware.schedulers)
        waiting = 2 * hardware.latency_s
        waves = max(1.0, warps / (hardware.sms * resident))
        return waves * (each * turn / hardware.clock_hz + waiting)

    def _alive(self, mask: Mask, widest: int) -> int:
        """Most row-wide values that are needed at the same time."""
        graph = self.delta.graph
        last: dict[int, int] = {}
        for index in members(mask):
            for source in graph.sources[index]:
                last[source] = index
        alive: set[int] = set()
        most = 1
        for index in members(mask):
            alive |= {
                s for s in (*graph.sources[index], index) if graph[s].elements * _WIDE > widest
            }
            most = max(most, len(alive))
            alive = {source for source in alive if last.get(source, -1) > index}
        return most

    def _accesses(self, mask: Mask, widest: int) -> int:
        """Row-wide values that are read or written."""
        graph = self.delta.graph
        inside = set(members(mask))
        read = {source for index in inside for source in graph.sources[index]} - inside
        written = {index for index in inside if self.delta.written(index, inside)}
        return sum(graph[index].elements * _WIDE > widest for index in read | written)


class LatencyObjective(Objective[Plan]):
    """A plan's modelled time by the latency-evaluator, seconds."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(self, latency: Latency) -> None:
        self.latency = latency

    def evaluate(self, states: Sequence[Plan]) -> list[Measurement]:
        source = {"evaluator": "latency", "hardware": self.latency.delta.hardware.name}
        found = []
        for state in states:
            seconds = self.latency.cost(state)
            legal = math.isfinite(seconds)
            why = None if legal else "a kernel that cannot be generated"
            samples = (seconds,) if legal else ()
            found.append(Measurement(self.unit, samples, self.kind, source, why))
        return found


def _launches(laid: Mapping) -> Iterator[Launch]:
    """Blocks of 1 to 32 warps; a row that is used again stays with one block."""
    for warps in (1, 2, 4, 8, 16, 32):
        if not laid.levels:
            yield from (Launch(warps, elements) for elements in (1, 4, 8))
        else:
            yield Launch(warps, max(1, math.ceil(laid.columns / (32 * warps))))
