"""Delta-evaluator of FusionStitching (arXiv:2009.10924): the modelled gain of fusing a pattern.

    f(P) = T_reduced_mem + T_reduced_calls - T_penalty

The gain compares one kernel for pattern P with one kernel for each of its operators:

- T_reduced_mem: bytes that no longer move, at copy bandwidth.
- T_reduced_calls: kernels that are no longer launched.
- T_penalty: the time that a simplified latency-evaluator adds to the fused kernel beyond that of
  its bytes, minus what it adds to the single kernels.

So the gain is exactly the difference of two modelled times, and gains of disjoint patterns add.

Signatures of patterns, so that the equal patterns of repeated layers are evaluated once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from nostall.core import Measurement, Objective
from nostall.core.measurement import Kind
from nostall.fusion.codegen.generate import has_no_template, no_kernel_reason
from nostall.fusion.evaluate.legality import (
    MAX_ARGUMENTS,
    MAX_BLOCK_COLUMNS,
    MAX_OPERATORS,
    MAX_PACKED_PARTS,
    RowLayout,
    connected_parts,
    row_layout,
)
from nostall.fusion.evaluate.work import GraphWork
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.partition import Mask, Partition, members, to_mask
from nostall.fusion.graph.regions import extract_region
from nostall.fusion.hardware import H200, Hardware

Signature = tuple[int, ...]


class Signatures:
    """Computes signatures of patterns of one graph.

    Two patterns have the same signature if, operator by operator in topological order, they have
    equal operations, read through equal views, share the same operands and write the same results.
    The signature does not contain whether other operators are between them (convexity).
    """

    def __init__(self, graph: Graph) -> None:
        numbers: dict[Hashable, int] = {}
        operand_numbers: list[int] = []
        self._own: dict[int, int] = {}
        self._reads: dict[int, tuple[int, ...]] = {}
        self._readers: dict[int, tuple[int, ...]] = {}
        for node in graph:
            tensor = (node.shape, node.dtype, node.strides)
            attributes = tuple((name, repr(value)) for name, value in node.attributes)
            inputs = tuple(operand_numbers[i] for i in node.inputs)
            operation = (node.op, *tensor, attributes, inputs)
            # A kernel repeats a view or constant, so its reader depends on the whole operation.
            # Of other operands, a reader depends only on the tensor.
            is_repeated = node.kind in ("layout", "constant")
            operand = operation if is_repeated else tensor
            operand_numbers.append(numbers.setdefault(operand, len(numbers)))
            if node.kind not in COMPUTE:
                continue
            self._own[node.index] = numbers.setdefault(operation, len(numbers))
            self._reads[node.index] = (*node.inputs, *map(graph.base, node.inputs))
            # The reader -1, which is in no pattern, stands for the caller of the graph.
            result = (-1,) if node.index in graph.results else ()
            self._readers[node.index] = (*graph.consumers[node.index], *result)

    def signature(self, mask: Mask) -> Signature:
        """The signature of a set of operators."""
        order = members(mask)
        inside = set(order)
        place: dict[int, int] = {}
        numbers = []
        for index in order:
            numbers.append(self._own[index])
            numbers += [place.setdefault(read, len(place)) for read in self._reads[index]]
            numbers.append(place.setdefault(index, len(place)))
            numbers.append(inside.issuperset(self._readers[index]))
        return tuple(numbers)


_WARPS = 32
"""Resident warps of an SM, assumed: the simplified evaluator does not estimate registers."""
_ELEMENTS = 8
"""Elements of one lane, assumed."""
_DEPENDENT_CYCLES = 5.0
"""Cycles from one instruction of a warp to the next, assumed (4 for the ALU, others longer)."""
_BARRIER_CYCLES = 150.0
"""Cycles of a reduction in a block: five shuffles, a store, a barrier, a load, five shuffles."""
_NARROW = 64
"""Operands this many times smaller than the largest one stay in the cache."""
_ON_CHIP_BYTES = 160 * 1024
"""Bytes of its rows that one block can keep on chip, assumed; it reads the rest again."""


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Modelled time of one kernel, in seconds."""

    memory: float
    """Time of its bytes at copy bandwidth."""
    calls: float
    """Time of its launches."""
    overhead: float
    """Time beyond both: instructions and latencies that the memory time does not hide."""

    @property
    def total(self) -> float:
        return self.memory + self.calls + self.overhead


class DeltaEvaluator:
    """Models patterns (sets of operators) of one graph as kernels. Results are cached."""

    def __init__(self, graph: Graph, hardware: Hardware = H200) -> None:
        self.graph = graph
        self.hardware = hardware
        self.work = GraphWork(graph)
        self.operators = to_mask(graph.operators)
        self._times: dict[Mask, KernelTime | None] = {}
        self._gains: dict[Mask, float | None] = {}
        self._fusible: dict[Mask, bool] = {}
        # Patterns with equal signatures share one evaluation.
        self._signatures = Signatures(graph)
        self._times_by_signature: dict[Signature, KernelTime | None] = {}
        self._generatable: dict[Signature, bool] = {}
        own = {i: self._signatures.signature(1 << i) for i in graph.operators}
        examples = {signature: i for i, signature in own.items()}
        unsupported = {signature for signature, i in examples.items() if has_no_template(graph, i)}
        self._without_template = to_mask(i for i in graph.operators if own[i] in unsupported)
        times = {signature: self._single_time(i) for signature, i in examples.items()}
        self._single_times = {i: times[own[i]] for i in graph.operators}

    def _single_time(self, index: int) -> KernelTime:
        layout = row_layout(self.work, 1 << index)
        assert layout is not None  # a single operator does not use its own reduction
        return self._packed_time([1 << index], [layout])

    def unfused_seconds(self, mask: Mask) -> float:
        """Modelled seconds of the operators with one kernel for each."""
        return sum(self._single_times[index].total for index in members(mask))

    def kernel_time(self, mask: Mask) -> KernelTime | None:
        """Modelled time of the operators as one kernel; None if that is no legal kernel."""
        if mask not in self._times:
            self._times[mask] = self._evaluate(mask)
        return self._times[mask]

    def can_fuse(self, mask: Mask) -> bool:
        """Whether the operators can be one kernel: it is legal here and can be generated.

        The code generator must support each connected part. It takes milliseconds to answer, so
        explorers call this only for patterns that they select, and :meth:`kernel_time` or
        :meth:`gain` for all candidates.
        """
        if self.kernel_time(mask) is None:
            return False
        if mask not in self._fusible:
            is_single = not mask & (mask - 1)
            self._fusible[mask] = is_single or self._can_generate(mask)
        return self._fusible[mask]

    def _can_generate(self, mask: Mask) -> bool:
        signature = self._signatures.signature(mask)
        if signature not in self._generatable:
            pattern = extract_region(self.graph, list(members(mask))).graph
            self._generatable[signature] = no_kernel_reason(pattern, pattern.operators) is None
        return self._generatable[signature]

    def gain(self, mask: Mask) -> float | None:
        """f(P) in seconds; None if P is no legal kernel, 0 for a single operator."""
        if mask not in self._gains:
            time = self.kernel_time(mask)
            self._gains[mask] = None if time is None else self.unfused_seconds(mask) - time.total
        return self._gains[mask]

    def cost(self, partition: Partition) -> float:
        """Modelled seconds of all kernels of a partition; infinity if one of them is illegal."""
        total = 0.0
        for mask in partition.groups:
            time = self.kernel_time(mask)
            if time is None:
                return math.inf
            total += time.total
        return total

    def is_connected(self, mask: Mask) -> bool:
        """Whether the operators are connected by data or by sources that they share."""
        return len(connected_parts(self.work, mask)) == 1

    def _evaluate(self, mask: Mask) -> KernelTime | None:
        if not mask & (mask - 1):
            return self._single_times[mask.bit_length() - 1]
        if mask.bit_count() > MAX_OPERATORS or mask & ~self.operators:
            return None
        if mask & self._without_template or self.convex_hull(mask) != mask:
            return None
        signature = self._signatures.signature(mask)
        if signature not in self._times_by_signature:
            self._times_by_signature[signature] = self._fused_time(mask)
        return self._times_by_signature[signature]

    def _fused_time(self, mask: Mask) -> KernelTime | None:
        parts = connected_parts(self.work, mask)
        if len(parts) > MAX_PACKED_PARTS:
            return None
        layouts = [row_layout(self.work, part) for part in parts]
        legal = [layout for layout in layouts if layout is not None]
        if len(legal) < len(parts) or self._argument_count(mask) > MAX_ARGUMENTS:
            return None
        return self._packed_time(parts, legal)

    def convex_hull(self, mask: Mask) -> Mask:
        """The operators and all nodes on paths between them, opaque nodes included."""
        above = below = 0
        for index in members(mask):
            above |= self.graph.ancestors[index]
            below |= self.graph.descendants[index]
        return mask | above & below

    def _argument_count(self, mask: Mask) -> int:
        """Tensors that the kernel reads or writes."""
        inside = set(members(mask))
        sources = {edge.source for index in inside for edge in self.work.edges[index]}
        return len(sources - inside) + sum(1 for index in inside if self.is_output(index, inside))

    def is_output(self, index: int, inside: set[int]) -> bool:
        """Whether a kernel of the operators ``inside`` has to write the value of one of them."""
        return index in self.graph.results or not inside.issuperset(self.graph.consumers[index])

    def _needs_second_stage(self, index: int, inside: set[int]) -> bool:
        """Whether an operator is a reduction across blocks at the end of a kernel."""
        crosses_blocks = index in self.work.cross_block_reductions
        return crosses_blocks and inside.isdisjoint(self.graph.consumers[index])

    def _packed_time(self, parts: Sequence[Mask], layouts: Sequence[RowLayout]) -> KernelTime:
        """Modelled time of one kernel of independent parts.

        The parts share the launch, the ramp and the latency of memory.
        """
        hardware = self.hardware
        moved = instructions = warps = delay = 0.0
        stages = 1
        for mask, layout in zip(parts, layouts, strict=True):
            first_bytes, reread_bytes = self._moved_bytes(mask, layout)
            moved += first_bytes + reread_bytes
            instructions += self.instructions(mask, layout)
            warps += self._warps(mask, layout)
            delay = max(delay, layout.levels * _BARRIER_CYCLES / hardware.clock_hz)
            inside = set(members(mask))
            if any(self._needs_second_stage(index, inside) for index in inside):
                stages = max(stages, 2)
            if layout.columns > MAX_BLOCK_COLUMNS:
                stages = max(stages, layout.levels + 1)
        bandwidth = hardware.copy_bytes_per_second
        capacity = hardware.sms * _WARPS
        resident = max(1.0, min(warps, capacity))
        latency_bound = resident * hardware.bytes_in_flight / hardware.latency_s
        memory = moved / bandwidth
        achieved_memory = moved / min(bandwidth, latency_bound)
        # N_wave * L_warp: a warp issues after its previous instruction and after the other warps of
        # its scheduler, whichever takes longer.
        waves = math.ceil(warps / capacity) or 1
        issue_cycles = max(_DEPENDENT_CYCLES, _WARPS / hardware.schedulers * resident / capacity)
        warp_instructions = instructions / 32 / max(1.0, warps)
        compute = waves * warp_instructions * issue_cycles / hardware.clock_hz
        overhead = max(achieved_memory, compute) - memory + delay
        return KernelTime(memory, stages * (hardware.launch_s + hardware.ramp_s), overhead)

    def _moved_bytes(self, mask: Mask, layout: RowLayout) -> tuple[float, float]:
        """Bytes that a kernel moves once, and bytes that it reads a second time.

        A kernel reads a row a second time if it does not fit on chip, or if other rows need it.
        """
        aligned: dict[int, dict[int, int]] = {}
        across: dict[int, int] = {}
        written = partial = 0
        inside = set(members(mask))
        for index in members(mask):
            # A reduction at the end of the kernel uses the values of each row as they come.
            is_last = index in self.work.reductions and inside.isdisjoint(
                self.graph.consumers[index]
            )
            for edge in self.work.edges[index]:
                if layout.levels and not layout.is_aligned(edge.rows) and not is_last:
                    across[edge.source] = max(across.get(edge.source, 0), edge.read_bytes)
                elif edge.source not in inside:
                    aligned.setdefault(edge.source, {})[edge.view] = edge.read_bytes
            if self.is_output(index, inside):
                written += self.work.bytes[index]
            if layout.levels and self._needs_second_stage(index, inside):
                partial += self._partial_bytes(index)
        read = [min(self.work.bytes[s], sum(views.values())) for s, views in aligned.items()]
        wide = sum(size for size in read if size * _NARROW > max(read)) if layout.levels else 0
        reread_bytes = wide * layout.levels if wide > _ON_CHIP_BYTES * layout.rows else 0
        return float(written + sum(read)), float(reread_bytes + partial + sum(across.values()))

    def _partial_bytes(self, index: int) -> int:
        """Bytes of the partial results of a reduction across blocks.

        Each of two blocks an SM holds rows of all columns. It writes one fp32 value for each
        result, and the second stage reads it.
        """
        elements = self.graph[index].elements * 2 * self.hardware.sms
        return 2 * 4 * min(elements, self.work.iterations[index])

    def instructions(self, mask: Mask, layout: RowLayout) -> float:
        """Instructions of all lanes of a kernel.

        A value that its readers broadcast is computed once for each row of a block; if rows are too
        wide for that, each element that reads it computes it again.
        """
        inside = set(members(mask))
        repeats: dict[int, float] = {}
        for index in members(mask):
            for edge in self.work.edges[index]:
                if edge.reuse <= 1 or edge.source not in inside:
                    continue
                if layout.columns > MAX_BLOCK_COLUMNS and not layout.levels:
                    count = edge.reuse
                elif not layout.is_aligned(edge.rows):
                    count = min(edge.reuse, layout.rows)
                else:
                    continue
                repeats[edge.source] = max(repeats.get(edge.source, 1.0), count)
        instructions = self.work.instructions
        return sum(instructions[index] * repeats.get(index, 1.0) for index in inside)

    def _warps(self, mask: Mask, layout: RowLayout) -> float:
        """Warps of a kernel, with the assumed elements of a lane."""
        widest = max(self.work.iterations[index] for index in members(mask))
        if not layout.levels:
            return max(1.0, widest / (32 * _ELEMENTS))
        # A row takes a block of up to 32 warps, or a part of a warp.
        return max(1.0, layout.rows * min(32.0, max(0.25, layout.columns / (32 * _ELEMENTS))))


class DeltaObjective(Objective[Partition]):
    """Objective: the modelled seconds of a partition by the delta-evaluator."""

    kind: ClassVar[Kind] = "modelled"
    unit: ClassVar[str] = "s"

    def __init__(self, delta: DeltaEvaluator) -> None:
        self.delta = delta

    def evaluate(self, states: Sequence[Partition]) -> list[Measurement]:
        return [self._measurement(self.delta.cost(state)) for state in states]

    def _measurement(self, seconds: float) -> Measurement:
        source = {"evaluator": "delta", "hardware": self.delta.hardware.name}
        is_legal = math.isfinite(seconds)
        failure = None if is_legal else "a kernel that cannot be generated"
        samples = (seconds,) if is_legal else ()
        return Measurement(self.unit, samples, self.kind, source, failure)
