"""The delta-evaluator of FusionStitching (arXiv:2009.10924): what fusing a pattern gains.

    f(P) = T_reduced_mem + T_reduced_calls - T_penalty

against every operator of P as a kernel of its own.  Memory: bytes that need not move any more, at
copy bandwidth.  Calls: kernels that are not launched.  Penalty: what the simplified
latency-evaluator says of the one kernel beyond the time its bytes take, less the same for the
single kernels.  So the gain is exactly the difference of two modelled times, and those of disjoint
patterns add.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from nostall.core import Measurement, Objective
from nostall.core.measurement import Kind
from nostall.fusion.codegen.generate import has_no_template, no_kernel_reason
from nostall.fusion.evaluate.legality import (
    MOST_ARGUMENTS,
    MOST_OPERATORS,
    MOST_PACKED,
    WIDEST_BLOCK,
    Mapping,
    connected,
    mapping,
)
from nostall.fusion.evaluate.signature import Signature, Signatures
from nostall.fusion.evaluate.work import Work
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import Mask, Plan, mask_of, members
from nostall.fusion.graph.regions import region
from nostall.fusion.hardware import H200, Hardware

_WARPS = 32
"""Warps an SM is taken to hold: the simplified evaluator knows no register counts."""
_ELEMENTS = 8
"""Elements of one lane, assumed."""
_DEPENDENT = 5.0
"""Cycles from one instruction of a warp to the next, assumed (ALU 4, some wait longer)."""
_BARRIER = 150.0
"""Cycles of a reduction inside a block: five shuffles, a store, a barrier, a load, five more."""
_NARROW = 64
"""Operands so many times smaller than the widest stay in the cache."""
_HELD_BYTES = 160 * 1024
"""Bytes of its rows that one block can keep on chip; the rest is read again, assumed."""


@dataclass(frozen=True, slots=True)
class Parts:
    """A kernel's modelled time, seconds: memory, calls, and what is beyond both."""

    memory: float
    calls: float
    beyond: float

    @property
    def total(self) -> float:
        return self.memory + self.calls + self.beyond


class Delta:
    """Evaluates patterns of one graph.  ``parts`` and ``gain`` remember what they were asked."""

    def __init__(self, graph: Graph, hardware: Hardware = H200) -> None:
        self.graph = graph
        self.hardware = hardware
        self.work = Work(graph)
        self.operators = mask_of(graph.operators)
        self._known: dict[Mask, Parts | None] = {}
        self._gains: dict[Mask, float | None] = {}
        self._generated: dict[Mask, bool] = {}
        # Equal patterns are asked about once, wherever they stand.
        self._signatures = Signatures(graph)
        self._evaluated: dict[Signature, Parts | None] = {}
        self._written: dict[Signature, bool] = {}
        alone = {i: self._signatures.of(1 << i) for i in graph.operators}
        first = {signature: i for i, signature in alone.items()}
        without = {signature for signature, i in first.items() if has_no_template(graph, i)}
        self._without_kernel = mask_of(i for i in graph.operators if alone[i] in without)
        single = {signature: self._alone(i) for signature, i in first.items()}
        self._single = {i: single[alone[i]] for i in graph.operators}

    def _alone(self, index: int) -> Parts:
        laid = mapping(self.work, 1 << index)
        assert laid is not None  # a single operator has no reduction that it uses itself
        return self._kernel([1 << index], [laid])

    def single(self, mask: Mask) -> float:
        """Modelled seconds of the operators as kernels of their own."""
        return sum(self._single[index].total for index in members(mask))

    def parts(self, mask: Mask) -> Parts | None:
        """The modelled time of the operators as one kernel; None where that is no legal kernel."""
        if mask not in self._known:
            self._known[mask] = self._evaluate(mask)
        return self._known[mask]

    def joins(self, mask: Mask) -> bool:
        """Whether the operators may be one kernel of a plan: legal here, and the code generator
        can write each connected part.  That takes milliseconds: to be asked of sets that are to be
        chosen, where :meth:`parts` and :meth:`gain` are asked of all that are looked at."""
        if self.parts(mask) is None:
            return False
        if mask not in self._generated:
            alone = not mask & (mask - 1)
            self._generated[mask] = alone or self._can_be_written(mask)
        return self._generated[mask]

    def _can_be_written(self, mask: Mask) -> bool:
        signature = self._signatures.of(mask)
        if signature not in self._written:
            pattern = region(self.graph, list(members(mask))).graph
            self._written[signature] = no_kernel_reason(pattern, pattern.operators) is None
        return self._written[signature]

    def gain(self, mask: Mask) -> float | None:
        """f(P) in seconds; None where P is no legal kernel, 0 for a single operator."""
        if mask not in self._gains:
            parts = self.parts(mask)
            self._gains[mask] = None if parts is None else self.single(mask) - parts.total
        return self._gains[mask]

    def terms(self, mask: Mask) -> tuple[float, float, float] | None:
        """T_reduced_mem, T_reduced_calls and T_penalty."""
        parts = self.parts(mask)
        if parts is None:
            return None
        alone = [self._single[index] for index in members(mask)]
        return (
            sum(part.memory for part in alone) - parts.memory,
            sum(part.calls for part in alone) - parts.calls,
            parts.beyond - sum(part.beyond for part in alone),
        )

    def cost(self, plan: Plan) -> float:
        """Modelled seconds of all kernels of a plan; infinity where one of them is not legal."""
        total = 0.0
        for mask in plan.groups:
            parts = self.parts(mask)
            if parts is None:
                return math.inf
            total += parts.total
        return total

    def is_connected(self, mask: Mask) -> bool:
        """Whether the operators hang together by data or by a source that they share."""
        return len(connected(self.work, mask)) == 1

    def _evaluate(self, mask: Mask) -> Parts | None:
        if not mask & (mask - 1):
            return self._single[mask.bit_length() - 1]
        if mask.bit_count() > MOST_OPERATORS or mask & ~self.operators:
            return None
        if mask & self._without_kernel or not self.is_convex(mask):
            return None
        signature = self._signatures.of(mask)
        if signature not in self._evaluated:
            self._evaluated[signature] = self._fused(mask)
        return self._evaluated[signature]

    def _fused(self, mask: Mask) -> Parts | None:
        pieces = connected(self.work, mask)
        if len(pieces) > MOST_PACKED:
            return None
        mappings = [mapping(self.work, piece) for piece in pieces]
        legal = [found for found in mappings if found is not None]
        if len(legal) < len(pieces) or self._arguments(mask) > MOST_ARGUMENTS:
            return None
        return self._kernel(pieces, legal)

    def is_convex(self, mask: Mask) -> bool:
        """As :meth:`nostall.fusion.graph.graph.Graph.is_convex`, of a mask."""
        return self.hull(mask) == mask

    def hull(self, mask: Mask) -> Mask:
        """The operators with all that lies on paths between them (opaque nodes too)."""
        above = below = 0
        for index in members(mask):
            above |= self.graph.ancestors[index]
            below |= self.graph.descendants[index]
        return mask | above & below

    def _arguments(self, mask: Mask) -> int:
        inside = set(members(mask))
        sources = {edge.source for index in inside for edge in self.work.edges[index]}
        return len(sources - inside) + sum(1 for index in inside if self.written(index, inside))

    def written(self, index: int, inside: set[int]) -> bool:
        """Whether a kernel of these operators has to write the value of this one of them."""
        return index in self.graph.results or not inside.issuperset(self.graph.consumers[index])

    def _ends(self, index: int, inside: set[int]) -> bool:
        """Whether an operator is a reduction across blocks at the end of a kernel: its partial
        results need another stage."""
        crossing = index in self.work.crossing
        return crossing and inside.isdisjoint(self.graph.consumers[index])

    def _kernel(self, pieces: Sequence[Mask], mappings: Sequence[Mapping]) -> Parts:
        """Parts of a kernel share the launch, the ramp and the memory's latency."""
        hardware = self.hardware
        moved = instructions = warps = delay = 0.0
        stages = 1
        for mask, laid in zip(pieces, mappings, strict=True):
            bytes_, again = self._traffic(mask, laid)
            moved += bytes_ + again
            instructions += self.instructions(mask, laid)
            warps += self._warps(mask, laid)
            delay = max(delay, laid.levels * _BARRIER / hardware.clock_hz)
            inside = set(members(mask))
            if any(self._ends(index, inside) for index in inside):
                stages = max(stages, 2)
            if laid.columns > WIDEST_BLOCK:
                stages = max(stages, laid.levels + 1)
        full = hardware.copy_bytes_per_second
        resident = max(1.0, min(warps, hardware.sms * _WARPS))
        in_flight = resident * hardware.bytes_in_flight / hardware.latency_s
        memory = moved / full
        stretched = moved / min(full, in_flight)
        # N_wave * L_warp: each warp waits for itself or for its turn, whichever is longer.
        waves = math.ceil(warps / (hardware.sms * _WARPS)) or 1
        turn = max(_DEPENDENT, _WARPS / hardware.schedulers * resident / (hardware.sms * _WARPS))
        computing = waves * (instructions / 32 / max(1.0, warps)) * turn / hardware.clock_hz
        beyond = max(stretched, computing) - memory + delay
        return Parts(memory, stages * (hardware.launch_s + hardware.ramp_s), beyond)

    def _traffic(self, mask: Mask, laid: Mapping) -> tuple[float, float]:
        """Bytes that move, and bytes that move again: because a row does not fit on the chip, or
        because what one row reads lies in others."""
        straight: dict[int, dict[int, int]] = {}
        across: dict[int, int] = {}
        written = partial = 0
        inside = set(members(mask))
        for index in members(mask):
            # What only reduces takes the values of each row as they come.
            last = index in self.work.reductions and inside.isdisjoint(self.graph.consumers[index])
            for edge in self.work.edges[index]:
                if laid.levels and not laid.meets(edge.rows) and not last:
                    across[edge.source] = max(across.get(edge.source, 0), edge.touched)
                elif edge.source not in inside:
                    straight.setdefault(edge.source, {})[edge.view] = edge.touched
            if self.written(index, inside):
                written += self.work.bytes[index]
            if laid.levels and self._ends(index, inside):
                partial += self._partial(index)
        read = [min(self.work.bytes[s], sum(views.values())) for s, views in straight.items()]
        wide = sum(size for size in read if size * _NARROW > max(read)) if laid.levels else 0
        again = wide * laid.levels if wide > _HELD_BYTES * laid.rows else 0
        return float(written + sum(read)), float(again + partial + sum(across.values()))

    def _partial(self, index: int) -> int:
        """Bytes of the partial results of a reduction across rows whose blocks each hold rows of
        all columns: written once by each block in fp32, and read once."""
        elements = self.graph[index].elements * 2 * self.hardware.sms
        return 2 * 4 * min(elements, self.work.iterated[index])

    def instructions(self, mask: Mask, laid: Mapping) -> float:
        """Of all lanes.  A value smaller than its readers is computed once for each row that a
        block holds; where rows are too wide for that, by everything that reads it."""
        inside = set(members(mask))
        times: dict[int, float] = {}
        for index in members(mask):
            for edge in self.work.edges[index]:
                if edge.stretch <= 1 or edge.source not in inside:
                    continue
                if laid.columns > WIDEST_BLOCK and not laid.levels:
                    again = edge.stretch
                elif not laid.meets(edge.rows):
                    again = min(edge.stretch, laid.rows)
                else:
                    continue
                times[edge.source] = max(times.get(edge.source, 1.0), again)
        counted = self.work.instructions
        return sum(counted[index] * times.get(index, 1.0) for index in inside)

    def _warps(self, mask: Mask, laid: Mapping) -> float:
        widest = max(self.work.iterated[index] for index in members(mask))
        if not laid.levels:
            return max(1.0, widest / (32 * _ELEMENTS))
        # A row is one block of up to 32 warps, or shares a warp's program with others.
        return max(1.0, laid.rows * min(32.0, max(0.25, laid.columns / (32 * _ELEMENTS))))


class DeltaObjective(Objective[Plan]):
    """A plan's modelled time by the delta-evaluator, seconds."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(self, delta: Delta) -> None:
        self.delta = delta

    def evaluate(self, states: Sequence[Plan]) -> list[Measurement]:
        return [self._measurement(self.delta.cost(state)) for state in states]

    def _measurement(self, seconds: float) -> Measurement:
        source = {"evaluator": "delta", "hardware": self.delta.hardware.name}
        legal = math.isfinite(seconds)
        why = None if legal else "a kernel that cannot be generated"
        return Measurement(self.unit, (seconds,) if legal else (), self.kind, source, why)
