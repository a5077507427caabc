"""Latency-evaluator of FusionStitching (arXiv:2009.10924): the modelled time of a kernel.

    L = N_wave * L_warp,    N_wave = N_warp / occupancy,    L_warp = N_instruction * CPI

A kernel's time is that of its best launch among a few (warps of a block, elements of a lane).
Occupancy follows from the registers of the values that are live at the same time. nostall adds two
terms: each warp waits for memory once for its loads and once for its stores, and no kernel is
faster than its bytes at copy bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.evaluate.legality import RowLayout, connected_parts, row_layout
from nostall.fusion.graph.partition import Mask, Partition, members

_BASE_REGISTERS = 24
"""Registers of a thread for addresses and indices, assumed."""
_DEPENDENT_CYCLES = 5.0
"""Cycles from an instruction of a warp to one that needs its result, assumed."""
_MAX_ILP = 4
"""Independent elements of a lane whose instructions overlap, assumed."""
_REDUCTION_INSTRUCTIONS = 24.0
"""Instructions of one reduction over a block: shuffles, shared memory, barrier; assumed."""
_ACCESS_INSTRUCTIONS = 0.5
"""Instructions per element that is loaded or stored, address arithmetic included; assumed."""
_WIDE = 64
"""Values this many times smaller than the largest one need no registers worth counting."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One way to launch a connected part of a kernel."""

    warps: int
    """Warps of a block."""
    elements: int
    """Elements of a lane."""


class LatencyEvaluator:
    """Models kernels and partitions of the graph of a :class:`DeltaEvaluator`."""

    def __init__(self, delta: DeltaEvaluator) -> None:
        self.delta = delta
        self._seconds: dict[Mask, float] = {}

    def cost(self, partition: Partition) -> float:
        """Modelled seconds of all kernels of a partition; infinity if one of them is illegal."""
        return sum(self.kernel_seconds(mask) for mask in partition.groups)

    def kernel_seconds(self, mask: Mask) -> float:
        """Modelled seconds of one kernel at its best launch; infinity if it is illegal."""
        if mask not in self._seconds:
            self._seconds[mask] = self._kernel_seconds(mask)
        return self._seconds[mask]

    def _kernel_seconds(self, mask: Mask) -> float:
        time = self.delta.kernel_time(mask)
        if time is None:
            return math.inf
        seconds = 0.0
        for part in connected_parts(self.delta.work, mask):
            layout = row_layout(self.delta.work, part)
            assert layout is not None  # the kernel is legal, so each part has a layout
            seconds += min(
                self._launch_seconds(part, layout, launch) for launch in _launches(layout)
            )
        return max(seconds, time.memory) + time.calls

    def _launch_seconds(self, mask: Mask, layout: RowLayout, launch: Launch) -> float:
        """N_wave * L_warp in seconds."""
        hardware, work = self.delta.hardware, self.delta.work
        warp_elements = 32 * launch.elements
        widest = max(work.iterations[index] for index in members(mask))
        warps = max(1.0, widest / warp_elements)
        if layout.levels:
            warps = max(warps, layout.rows * max(0.25, math.ceil(layout.columns / warp_elements)))
        needed = _BASE_REGISTERS + self._live_values(mask, widest) * launch.elements
        spilled = max(0, needed - hardware.max_registers)
        registers = min(needed, hardware.max_registers)
        resident = min(hardware.max_warps, hardware.registers // (32 * registers))
        resident = max(launch.warps, resident // launch.warps * launch.warps)
        compute = self.delta.instructions(mask, layout) / 32
        access = _ACCESS_INSTRUCTIONS * launch.elements * self._accesses(mask, widest)
        reductions = layout.levels * _REDUCTION_INSTRUCTIONS
        warp_instructions = compute / warps + access + 2.0 * spilled + reductions
        ilp = min(_MAX_ILP, launch.elements)
        issue_cycles = max(
            _DEPENDENT_CYCLES / ilp, min(resident, warps / hardware.sms) / hardware.schedulers
        )
        memory_wait = 2 * hardware.latency_s
        waves = max(1.0, warps / (hardware.sms * resident))
        return waves * (warp_instructions * issue_cycles / hardware.clock_hz + memory_wait)

    def _live_values(self, mask: Mask, widest: int) -> int:
        """The largest number of row-wide values that are live at the same time."""
        graph = self.delta.graph
        last_use: dict[int, int] = {}
        for index in members(mask):
            for source in graph.sources[index]:
                last_use[source] = index
        live: set[int] = set()
        most = 1
        for index in members(mask):
            live |= {
                s for s in (*graph.sources[index], index) if graph[s].elements * _WIDE > widest
            }
            most = max(most, len(live))
            live = {source for source in live if last_use.get(source, -1) > index}
        return most

    def _accesses(self, mask: Mask, widest: int) -> int:
        """The number of row-wide values that the kernel reads or writes."""
        graph = self.delta.graph
        inside = set(members(mask))
        read = {source for index in inside for source in graph.sources[index]} - inside
        written = {index for index in inside if self.delta.is_output(index, inside)}
        return sum(graph[index].elements * _WIDE > widest for index in read | written)


def _launches(layout: RowLayout) -> Iterator[Launch]:
    """Candidate launches with 1 to 32 warps; a row that is used again stays in one block."""
    for warps in (1, 2, 4, 8, 16, 32):
        if not layout.levels:
            yield from (Launch(warps, elements) for elements in (1, 4, 8))
        else:
            yield Launch(warps, max(1, math.ceil(layout.columns / (32 * warps))))
