"""What the kernels of a plan ask of the GPU, *modelled*: scheme by scheme, nothing is compiled.

A *demand* is that of one program: instructions of each warp, registers of each thread, bytes, and
how often its warps wait for memory and for each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nostall.fusion.codegen.cost.dots import dot_demand
from nostall.fusion.codegen.cost.gpu import Demand
from nostall.fusion.codegen.cost.sequence import turned_demand
from nostall.fusion.codegen.cost.tile import COUNTS, Counts, TileCost, tile_cost, waiting
from nostall.fusion.codegen.emit.two_stage import finish_tile
from nostall.fusion.codegen.loops.mapping import Operand
from nostall.fusion.codegen.loops.reduction_levels import Pass, Value, passes
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import behind, bytes_ahead, operands
from nostall.fusion.codegen.tiling.kernel_plan import WARP, KernelPlan
from nostall.fusion.codegen.tiling.loop_peeling import lanes
from nostall.fusion.codegen.tiling.on_chip import demotions, varying
from nostall.fusion.graph.operations import DTYPE_BYTES

_PARTIAL = 4
"""Bytes of a partial result."""
SECTOR_BYTES = 32
"""Memory gives that much at least."""
_PAIR_BYTES = 64
"""Of two sectors, which memory likes to give together (seen: runs of one take longer)."""
_RESCALED = 3.0
"""Instructions for each element of a pair of reductions with one walk, beside the exp and the two
that reductions take."""
_FEW = 60.0
"""Instructions of a kernel that only puts partial results together, assumed."""


def demands(of: Schedule, plan: KernelPlan, counts: Counts = COUNTS) -> tuple[Demand, ...]:
    """Those of all kernels of a plan, in their order."""
    if plan.scheme == "matrix":
        return (dot_demand(of, plan, counts),)
    if plan.scheme == "turned":
        return (turned_demand(of, plan, counts),)
    if plan.scheme == "shared":
        return (_kept(of, plan, counts),)
    if plan.scheme == "looped":
        return (_looped(of, plan, counts),)
    if plan.scheme == "split":
        return tuple(_split(of, plan, part, counts) for part in passes(of))
    if plan.scheme == "column":
        return _walk(of, plan, counts), _finish(of, plan)
    return (_held(of, plan, counts),)


def _held(of: Schedule, plan: KernelPlan, counts: Counts) -> Demand:
    """Whole rows in registers, or no rows at all."""
    flat = plan.scheme == "thread"
    programs = -(-of.row_count // (plan.chunks[0] if flat else plan.rows))
    tile = tile_cost(of, plan, plan.chunks, of.body, of.mapping.outputs, counts)
    moved = _bytes(of, of.mapping.inputs, of.mapping.outputs) / programs
    found = Demand(
        programs=programs,
        warps=plan.num_warps,
        instructions=counts.program + tile.instructions,
        registers=tile.registers,
        moved=moved,
        phases=_levels(of),
        barriers=tile.barriers,
        shared=tile.converted,
    )
    return found if flat else _in_runs(of, plan, found)


def _looped(of: Schedule, plan: KernelPlan, counts: Counts) -> Demand:
    programs = -(-of.row_count // plan.rows)
    turns = -(-lanes(of, plan.peeled) // plan.chunks[0])
    parts = passes(of)
    instructions, registers, barriers, read = counts.program, 0.0, 0.0, 0.0
    steps, hidden = 0.0, 0.0
    for part in parts:
        tile = _step(of, plan, part, counts)
        instructions += turns * (tile.instructions + _copies(of, plan, tile, counts))
        registers = max(registers, tile.registers)
        barriers += tile.barriers + turns * plan.ahead
        steps += (1 if plan.ahead else waiting(turns, tile.elements)) * part.has_columns
        hidden += behind(turns) * (plan.ahead and part.has_columns)
        read += _bytes(of, of.mapping.read_by((*part.wide, *part.reductions)), ())
    once = _bytes(of, of.mapping.inputs, ())
    moved = _bytes(of, of.mapping.inputs, of.mapping.outputs) / programs
    found = Demand(
        programs=programs,
        warps=plan.num_warps,
        instructions=instructions,
        registers=registers,
        moved=moved,
        turns=turns * len(passes(of)),
        steps=steps,
        hidden=hidden,
        phases=sum(bool(part.reductions) for part in parts),
        barriers=barriers,
        shared=_ahead(of, plan),
        again=max(0.0, read - once) / programs,
    )
    return _in_runs(of, plan, found)


def _kept(of: Schedule, plan: KernelPlan, counts: Counts) -> Demand:
    """Rows in shared memory: as :func:`_looped`, but what is kept is neither read nor computed
    again.  Accesses to shared memory take the instructions that those to memory do."""
    kept = demotions(of, plan.ahead, plan.peeled)[plan.demoted]
    held = kept.arena(plan.chunks[0])
    instructions, registers, barriers, steps = counts.program, 0.0, 0.0, 0.0
    known: set[Value] = set()
    again = 0.0
    by_row = varying(of, of.rows)
    for part in kept.passes:
        tile = _step(of, plan, part, counts)
        left = [v for v in (*part.taken, *part.wide) if v in kept.needed and v not in part.there]
        ours = sum(isinstance(value, int) for value in part.taken) + len(left)
        reads = [v for v in part.taken if isinstance(v, Operand) and v not in part.there]
        early = [value for value in reads if kept.is_early(value)]
        again += sum(_bytes(of, [v.source], ()) for v in reads if v in known and v in by_row)
        known.update(reads)
        instructions += held.chunks * (tile.instructions + counts.access * ours * tile.accesses)
        registers = max(registers, tile.registers)
        barriers += tile.barriers + part.has_columns + bool(early)
        steps += bool(early) + waiting(held.chunks, tile.elements) * (len(reads) > len(early))
    moved = _bytes(of, of.mapping.inputs, of.mapping.outputs) / of.row_count
    found = Demand(
        programs=of.row_count,
        warps=plan.num_warps,
        instructions=instructions,
        registers=registers,
        moved=moved,
        turns=held.chunks * len(kept.passes),
        steps=steps,
        phases=_levels(of),
        barriers=barriers,
        shared=held.bytes,
        again=again / of.row_count,
    )
    return _in_runs(of, plan, found)


def _split(of: Schedule, plan: KernelPlan, part: Pass, counts: Counts) -> Demand:
    """One pass; the partial results of those before are read by every program."""
    groups = -(-of.row_count // plan.rows)
    finished = len(part.running(part.finished))
    partial = _PARTIAL * of.row_count * plan.parts * finished
    if not part.has_columns:
        return Demand(
            programs=groups,
            warps=plan.num_warps,
            instructions=_FEW,
            registers=counts.fixed,
            moved=partial / groups,
            phases=1.0,
            barriers=2,
        )
    turns = -(-lanes(of, plan.peeled) // (plan.chunks[0] * plan.parts))
    tile = _step(of, plan, part, counts)
    programs = groups * plan.parts
    reads = of.mapping.read_by((*part.wide, *part.reductions))
    made = _PARTIAL * of.row_count * plan.parts * len(part.running(part.reductions))
    moved = _bytes(of, reads, part.wide_outputs) + made + partial * plan.parts
    found = Demand(
        programs=programs,
        warps=plan.num_warps,
        instructions=counts.program
        + counts.across_warps * finished
        + turns * (tile.instructions + _copies(of, plan, tile, counts)),
        registers=tile.registers,
        moved=moved / programs,
        turns=turns,
        steps=1 if plan.ahead else waiting(turns, tile.elements),
        hidden=behind(turns) if plan.ahead else 0.0,
        phases=float(finished > 0),
        barriers=tile.barriers + turns * plan.ahead + 2 * finished * (plan.num_warps > 1),
        shared=_ahead(of, plan),
    )
    return _in_runs(of, plan, found)


def _walk(of: Schedule, plan: KernelPlan, counts: Counts) -> Demand:
    """The first kernel of ``column``: groups of rows one after the other."""
    summed = of.count(of.summed)
    turns = -(-summed // (plan.rows * plan.parts))
    programs = of.row_count // summed * plan.parts
    outputs = [index for index in of.body if index in of.mapping.outputs]
    operators, held = (*of.body, *of.tails), len(of.tails)
    tile = tile_cost(of, plan, plan.chunks, operators, outputs, counts, held=held, walked=True)
    moved = _bytes(of, of.mapping.inputs, outputs) + _PARTIAL * plan.parts * _results(of)
    found = Demand(
        programs=programs,
        warps=plan.num_warps,
        instructions=counts.program + turns * (tile.instructions + _copies(of, plan, tile, counts)),
        registers=tile.registers,
        moved=moved / programs,
        turns=turns,
        steps=1 if plan.ahead else turns,
        hidden=behind(turns) if plan.ahead else 0.0,
        # What the next turn loads waits for no reduction of this one.
        phases=_levels(of),
        barriers=turns * (tile.barriers + plan.ahead),
        shared=tile.converted + _ahead(of, plan),
    )
    return _in_runs(of, plan, found)


def _finish(of: Schedule, plan: KernelPlan) -> Demand:
    """The second one: partial results are added up."""
    results = _results(of)
    width, warps = finish_tile(plan.parts, results)
    programs = max(1, -(-results // width))
    each = width * plan.parts / (WARP * warps)
    moved = _PARTIAL * plan.parts * results / programs
    return Demand(
        programs=programs,
        warps=warps,
        instructions=_FEW + 2 * each,
        registers=COUNTS.fixed + each,
        moved=moved,
        phases=1.0,
        barriers=2,
    )


def _step(of: Schedule, plan: KernelPlan, part: Pass, counts: Counts) -> TileCost:
    """One step of a loop over columns: accumulators stay."""
    running = part.running(part.reductions)
    operators, held = sorted((*part.wide, *running)), len(running)
    chunks, outputs = plan.chunks[:1], part.wide_outputs
    tile = tile_cost(of, plan, chunks, operators, outputs, counts, held=held, turned=True)
    more = len(part.pairs) * (counts.operators["share"] + _RESCALED) * tile.elements
    return replace(tile, instructions=tile.instructions + more)


def _copies(of: Schedule, plan: KernelPlan, tile: TileCost, counts: Counts) -> float:
    """Instructions that a turn has more where what it reads is copied before."""
    return counts.access * tile.accesses * len(operands(of)) if plan.ahead else 0.0


def _ahead(of: Schedule, plan: KernelPlan) -> int:
    """Bytes of shared memory for the turns that come."""
    return bytes_ahead(of, plan.rows * sum(plan.chunks)) if plan.ahead else 0


def _in_runs(of: Schedule, plan: KernelPlan, demand: Demand) -> Demand:
    """With what comes of short runs, where rows lie along memory and a tile has few of them: bytes
    that come along unasked (programs beside it need those), sectors that are written in parts, and
    those that come without the other one of their pair."""
    if not of.along_rows:
        return demand
    graph, outputs = of.mapping.graph, set(of.mapping.outputs)
    needed = wasted = partial = single = 0.0
    for index in (*of.mapping.inputs, *of.mapping.outputs):
        run, moved = plan.rows * DTYPE_BYTES[graph[index].dtype], graph[index].bytes
        more = moved * max(0.0, SECTOR_BYTES / run - 1)
        needed += moved
        wasted += more
        partial += more * (index in outputs)
        single += moved * (run < _PAIR_BYTES)
    share = 1 / max(1.0, needed)
    return replace(
        demand,
        beside=(demand.moved + demand.again) * wasted * share,
        partial=demand.moved * partial * share,
        single=demand.moved * single * share,
    )


def _levels(of: Schedule) -> int:
    return max(of.level.values(), default=0)


def _results(of: Schedule) -> int:
    return sum(of.mapping.graph[index].elements for index in of.tails)


def _bytes(of: Schedule, reads: Iterable[int], writes: Iterable[int]) -> float:
    return float(sum(of.mapping.graph[index].bytes for index in (*reads, *writes)))
