"""Kernel packing: which patterns can share a launch without sharing loops, by which plans, and how.

Remote fusion of arXiv:2009.10924; TorchInductor's combo kernels. The patterns exchange no data, so
their shapes need not agree. The programs of the kernels follow one another in the grid. Each kernel
keeps its rows, columns and scheme; only the number of warps is common.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.emit.emit import PACKABLE_BODIES, tensor_arguments
from nostall.fusion.codegen.emit.program import Launch, NodeNumbering, Program, assemble_file
from nostall.fusion.codegen.emit.tile_parts import specializes_counts
from nostall.fusion.codegen.expressions.lines import Lines
from nostall.fusion.codegen.loops.dynamic_rows import needs_size_arguments
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.kernel_plan import PackedPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.dynamic_size import Total
from nostall.fusion.graph.graph import Graph


def independent_parts(graph: Graph, operators: Iterable[int]) -> list[tuple[int, ...]]:
    """Partition operators into parts that neither exchange data nor read a common tensor."""
    parts: list[tuple[set[int], set[int]]] = []
    for index in sorted(operators):
        tensors = {index, *graph.sources[index]}
        connected = [part for part in parts if part[1] & tensors]
        separate = [part for part in parts if not part[1] & tensors]
        members = {index}.union(*(part for part, _ in connected))
        touched = tensors.union(*(sources for _, sources in connected))
        parts = [*separate, (members, touched)]
    return sorted(tuple(sorted(members)) for members, _ in parts)


def common_warps(schedules: Iterable[Schedule]) -> set[int]:
    """Numbers of warps with which each of the schedules has a plan that can be packed."""
    return set.intersection(
        *({kernel.plan.num_warps for kernel in _packable(schedule)} for schedule in schedules)
    )


def plan_packed(schedules: Sequence[Schedule]) -> tuple[PlannedKernel, ...]:
    """The kernels with the smallest sum of modelled times among those of equal numbers of warps.

    Raises :class:`BadFusion` if there is no common number of warps.
    """
    warps = common_warps(schedules)
    if not warps:
        raise BadFusion(
            f"{len(schedules)} parts have no single kernel with the same number of warps; make "
            "them separate kernels"
        )
    choices = [
        [_fastest_kernel(schedule, count) for schedule in schedules] for count in sorted(warps)
    ]
    fastest = min(choices, key=lambda ranked: sum(seconds for seconds, _, _ in ranked))
    return tuple(kernel for _, _, kernel in fastest)


def _packable(schedule: Schedule) -> Iterable[PlannedKernel]:
    if needs_size_arguments(schedule):
        return ()
    return (kernel for kernel in plans(schedule).legal if kernel.plan.scheme in PACKABLE_BODIES)


def _fastest_kernel(schedule: Schedule, warps: int) -> tuple[float, str, PlannedKernel]:
    """The packable kernel with ``warps`` warps and the least modelled time, with its sort key."""
    ranked = (
        (modelled_seconds(kernel), str(kernel.plan), kernel)
        for kernel in _packable(schedule)
        if kernel.plan.num_warps == warps
    )
    return min(ranked, key=lambda entry: entry[:2])


def emit_packed(kernels: Sequence[PlannedKernel]) -> Program:
    """The source and the launch of several kernels of a graph with equal numbers of warps."""
    schedules = [kernel.schedule for kernel in kernels]
    functions, main = [], Lines()
    counts: list[int] = []
    names: list[str] = []
    blocks: list[int] = []
    with main.block():
        main("pid = tl.program_id(0)")
        for at, kernel in enumerate(kernels):
            text, programs = _write_function(kernel, at)
            functions.append(text)
            blocks.append(programs)
            with main.block(_branch(at, at == len(kernels) - 1)):
                main(_call(kernel, at))
            counts += [kernel.schedule.outer_row_count, programs]
            names += [f"count{at}", f"blocks{at}"]
    launch = Launch(
        f"stitched_packed_{len(kernels)}",
        tuple(dict.fromkeys(name for each in schedules for name in tensor_arguments(each))),
        tuple(counts),
        (Total(blocks), 1),
        kernels[0].plan.num_warps,
        any(map(specializes_counts, schedules)),
        tuple(names),
    )
    inputs = tuple(dict.fromkeys(index for each in schedules for index in each.mapping.inputs))
    outputs = tuple(dict.fromkeys(index for each in schedules for index in each.mapping.outputs))
    plan = PackedPlan(tuple(kernel.plan for kernel in kernels))
    numbers = NodeNumbering(inputs)
    source, launches = assemble_file(str(plan), [(main, launch)], numbers, "".join(functions))
    arguments = numbers.tensor_arguments((*inputs, *outputs))
    return Program(schedules[0].mapping.graph, plan, source, inputs, outputs, arguments, launches)


def _write_function(kernel: PlannedKernel, at: int) -> tuple[str, int]:
    """The Triton function of kernel number ``at``, and its number of programs."""
    lines = Lines()
    with lines.block():
        programs = PACKABLE_BODIES[kernel.plan.scheme](kernel, lines)
    signature = ", ".join(("pid", *tensor_arguments(kernel.schedule), "count"))
    return f"\n\n@triton.jit\ndef _part_{at}({signature}):\n{lines}", programs


def _branch(at: int, is_last: bool) -> str:
    """The head of the branch for the programs of kernel number ``at``."""
    if is_last:
        return "else:"
    end = " + ".join(f"blocks{n}" for n in range(at + 1))
    return f"{'elif' if at else 'if'} pid < {end}:"


def _call(kernel: PlannedKernel, at: int) -> str:
    """The call of the function of kernel number ``at``."""
    before = " + ".join(f"blocks{n}" for n in range(at))
    pid = f"pid - ({before})" if at else "pid"
    arguments = ", ".join((pid, *tensor_arguments(kernel.schedule), f"count{at}"))
    return f"_part_{at}({arguments})"
