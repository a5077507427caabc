"""Kernel packing: patterns that exchange no data in one launch, whatever their shapes.

(Remote fusion of arXiv:2009.10924; Inductor's combo kernels.)  The programs of one part follow
those of another; each keeps its rows, columns and scheme, only the number of warps is common.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.emit.emit import tensor_arguments, write_body
from nostall.fusion.codegen.emit.program import Launch, NodeNumbering, Program, assemble_file
from nostall.fusion.codegen.emit.prologue import specializes_counts
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan, PackedPlan, plans
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.dynamic_size import Total
from nostall.fusion.graph.graph import Graph

PACKABLE = ("thread", "warp", "block", "looped")
"""Schemes of one kernel, without partial results."""


def independent_parts(graph: Graph, operators: Iterable[int]) -> list[tuple[int, ...]]:
    """The parts of a set that neither pass data to each other nor read a common source."""
    parts: list[tuple[set[int], set[int]]] = []
    for index in sorted(operators):
        touched = {index, *graph.sources[index]}
        near = [part for part in parts if part[1] & touched]
        apart = [part for part in parts if not part[1] & touched]
        inside = {index}.union(*(part for part, _ in near))
        parts = [*apart, (inside, touched.union(*(sources for _, sources in near)))]
    return sorted(tuple(sorted(inside)) for inside, _ in parts)


def common_warps(parts: Iterable[Schedule]) -> set[int]:
    """Numbers of warps with which every part can be one kernel."""
    found = [
        {p.num_warps for p in plans(schedule).legal if p.scheme in PACKABLE} for schedule in parts
    ]
    return set.intersection(*found)


def packed_plan(parts: Sequence[Schedule]) -> PackedPlan:
    """The plans with the least modelled time of all parts one after the other.

    Raises :class:`BadFusion` where the parts have no number of warps in common.
    """
    warps = common_warps(parts)
    if not warps:
        raise BadFusion(
            f"{len(parts)} parts have no single kernel with the same number of warps; make them "
            "separate kernels"
        )
    chosen = [[_fastest_plan(schedule, number) for schedule in parts] for number in sorted(warps)]
    least = min(chosen, key=lambda found: sum(seconds for seconds, _, _ in found))
    return PackedPlan(tuple(plan for _, _, plan in least))


def _fastest_plan(schedule: Schedule, warps: int) -> tuple[float, str, KernelPlan]:
    """The plan of a part with this many warps and the least modelled time."""
    fitting = [p for p in plans(schedule).legal if p.scheme in PACKABLE and p.num_warps == warps]
    ranked = ((modelled_seconds(schedule, plan), str(plan), plan) for plan in fitting)
    return min(ranked, key=lambda rank: rank[:2])


def emit_packed(parts: Sequence[Schedule], plan: PackedPlan) -> Program:
    """One kernel for several patterns of one graph."""
    functions = []
    main = Lines()
    counts: list[int] = []
    names: list[str] = []
    blocks: list[int] = []
    with main.block():
        main("pid = tl.program_id(0)")
        for at, (schedule, own) in enumerate(zip(parts, plan.plans, strict=True)):
            lines = Lines()
            with lines.block():
                blocks.append(write_body(schedule, own, lines))
            signature = ", ".join(("pid", *tensor_arguments(schedule), "count"))
            functions.append(f"\n\n@triton.jit\ndef _part_{at}({signature}):\n{lines}")
            before = " + ".join(f"blocks{n}" for n in range(at))
            given = ", ".join(
                (f"pid - ({before})" if at else "pid", *tensor_arguments(schedule), f"count{at}")
            )
            if at < len(parts) - 1:
                end = " + ".join(f"blocks{n}" for n in range(at + 1))
                head = f"{'elif' if at else 'if'} pid < {end}:"
            else:
                head = "else:"
            with main.block(head):
                main(f"_part_{at}({given})")
            counts += [schedule.outer_row_count, blocks[-1]]
            names += [f"count{at}", f"blocks{at}"]
    launch = Launch(
        f"stitched_packed_{len(parts)}",
        tuple(dict.fromkeys(name for schedule in parts for name in tensor_arguments(schedule))),
        tuple(counts),
        (Total(blocks), 1),
        plan.plans[0].num_warps,
        any(specializes_counts(schedule) for schedule in parts),
        tuple(names),
    )
    inputs = tuple(dict.fromkeys(index for schedule in parts for index in schedule.mapping.inputs))
    outputs = tuple(
        dict.fromkeys(index for schedule in parts for index in schedule.mapping.outputs)
    )
    numbers = NodeNumbering(inputs)
    source, launches = assemble_file(str(plan), [(main, launch)], numbers, "".join(functions))
    graph = parts[0].mapping.graph
    called = numbers.tensor_arguments((*inputs, *outputs))
    return Program(graph, plan, source, inputs, outputs, called, launches)
