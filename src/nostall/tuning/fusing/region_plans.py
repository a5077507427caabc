"""Partition of each region of a traced pass into kernels, with their source and modelled costs.

All times are modelled by the delta-evaluator, those before fusion (one kernel for each operator) as
well as those after it, so that they can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from nostall.core.errors import BadInput, MissingPart
from nostall.core.text.suggest import unknown
from nostall.fusion.capture import CapturedGraph
from nostall.fusion.codegen.cost.default_plan import default_plan, is_last_choice, modelled_seconds
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.runtime.kernel import StitchedKernel
from nostall.fusion.codegen.runtime.stitched_graph import stitch
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explain import explain_graph
from nostall.fusion.explore import explore, greedy_partition, refine
from nostall.fusion.explore.default_partition import default_partition
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import to_mask
from nostall.fusion.graph.regions import Region
from nostall.fusion.region_plans import captured_regions, operators_between
from nostall.tuning.fusing.document import (
    AlternativeSchedule,
    FusedKernel,
    GraphNode,
    Pass,
    ReasonCount,
    Schedules,
    count_reasons,
)

MAX_ALTERNATIVES = 4
"""Schedules after the selected one that are recorded."""
MAX_COLUMNS, MAX_SECONDS = 20_000, 60.0
"""Limits of the integer program for one region."""

Patterns = Sequence[tuple[int, ...]]
"""Kernels of a region, each as a tuple of operators."""
Planner = Callable[[DeltaEvaluator], tuple[Patterns, str]]
"""Function that partitions a region. Its note is not empty if it used another strategy."""


def _refined(delta: DeltaEvaluator) -> tuple[Patterns, str]:
    return refine(delta, explore(delta).connected).connected.kernels, ""


def _optimum(delta: DeltaEvaluator) -> tuple[Patterns, str]:
    from nostall.fusion.explore.integer_program import find_optimum

    known = explore(delta).connected
    optimum = find_optimum(delta, max_columns=MAX_COLUMNS, seconds=MAX_SECONDS, known=known)
    if optimum.proven:
        return optimum.partition.kernels, ""
    note = f"the optimum is not known ({optimum.stopped}); the plan is that of explore"
    return default_partition(delta.graph), note


STRATEGIES: dict[str, Planner] = {
    "explore": lambda delta: (default_partition(delta.graph), ""),
    "refined": _refined,
    "greedy": lambda delta: (greedy_partition(delta).kernels, ""),
    "optimum": _optimum,
}
"""Planners by the name of their ``--strategy``."""


def check_strategy(name: str) -> None:
    """Raise :class:`BadInput` for an unknown strategy, :class:`MissingPart` without SciPy."""
    if name not in STRATEGIES:
        raise BadInput(unknown("--strategy", name, STRATEGIES))
    if name == "optimum":
        try:
            import_module("scipy.optimize")
        except ImportError as error:
            raise MissingPart(
                f"the integer program needs SciPy ({error}); pip install 'nostall[fusion]', or "
                "take another --strategy"
            ) from error


@dataclass(frozen=True)
class RegionPlan:
    """The kernels of one region; nodes are those of the captured graph, times are modelled."""

    kernels: tuple[FusedKernel, ...]
    programs: tuple[Program, ...]
    """The generated program of each kernel."""
    alone: tuple[int, ...]
    """Operators that no kernel contains; PyTorch runs them one by one."""
    seconds_unfused: float
    seconds_alone: float
    greedy_kernels: int
    greedy_seconds: float
    splits: tuple[str, ...]
    """Why kernels of the partition were split into smaller ones."""
    no_kernel: tuple[str, ...]
    """Why operators are in ``alone``."""
    note: str
    """Why the partition is not that of the requested strategy; empty if it is."""


def plan_regions(captured: CapturedGraph, strategy: str, folder: Path) -> Iterator[RegionPlan]:
    """Partition the regions of a pass one after the other and generate their kernels.

    Sources are written to ``folder``, from which they are imported. Raises :class:`MissingPart`
    without Triton.
    """
    for region in captured_regions(captured):
        yield _plan_region(region, STRATEGIES[strategy], folder)


def _plan_region(region: Region, planner: Planner, folder: Path) -> RegionPlan:
    graph = region.graph
    delta = DeltaEvaluator(graph)
    patterns, note = planner(delta)
    stitched = stitch(graph, patterns, folder=folder)
    programs = [step.program for step in stitched.steps if isinstance(step, StitchedKernel)]
    alone = [step for step in stitched.steps if not isinstance(step, StitchedKernel)]
    greedy = greedy_partition(delta)
    return RegionPlan(
        kernels=tuple(_fused_kernel(region, delta, program) for program in programs),
        programs=tuple(programs),
        alone=tuple(region.origins[index] for index in alone),
        seconds_unfused=delta.unfused_seconds(delta.operators),
        seconds_alone=delta.unfused_seconds(to_mask(alone)),
        greedy_kernels=len(greedy),
        greedy_seconds=delta.cost(greedy),
        splits=tuple(_split_reasons(graph, patterns, programs)),
        no_kernel=tuple(stitched.illegal_reasons.elements()),
        note=note,
    )


def _fused_kernel(region: Region, delta: DeltaEvaluator, program: Program) -> FusedKernel:
    operators = operators_between(program.graph, program.inputs, program.outputs)
    mask = to_mask(operators)
    unfused, hardware = delta.unfused_seconds(mask), delta.hardware
    time = delta.kernel_time(mask)
    bytes_before = sum(_moved_bytes(delta, 1 << index) for index in operators)
    # The generated program may have more launches than the evaluator assumes.
    calls = len(program.launches) * (hardware.launch_s + hardware.ramp_s)
    return FusedKernel(
        name=program.launches[0].name,
        operators=tuple(region.origins[index] for index in operators),
        scheme=str(program.plan).split()[0],
        plan=str(program.plan),
        launches=tuple(launch.name for launch in program.launches),
        source=source_file(program),
        bytes_before=bytes_before,
        # No gain is claimed for a kernel that is illegal by the evaluator.
        bytes_after=_moved_bytes(delta, mask) if time else bytes_before,
        seconds_before=unfused,
        seconds_after=time.memory + time.overhead + calls if time else unfused,
        schedules=_schedules(program, operators),
    )


def _moved_bytes(delta: DeltaEvaluator, mask: int) -> int:
    """Bytes that one kernel moves by the evaluator; 0 if the kernel is illegal."""
    time = delta.kernel_time(mask)
    return round(time.memory * delta.hardware.copy_bytes_per_second) if time else 0


def source_file(program: Program) -> str:
    """Path of a program's source in the run directory; kernel names contain a hash of the text."""
    return f"kernels/{program.launches[0].name}.py"


def _schedules(program: Program, operators: Sequence[int]) -> Schedules:
    """The alternatives of a program's schedule, with modelled times relative to it."""
    unlisted = Schedules(legal=1, next_best=(), refused=())
    try:
        schedule = schedule_operators(program.graph, operators)
    except BadInput:
        return unlisted
    candidates = plans(schedule)
    times = {str(kernel.plan): modelled_seconds(kernel) for kernel in candidates.legal}
    if (selected := times.pop(str(program.plan), None)) is None:
        return unlisted
    last = {str(kernel.plan) for kernel in candidates.legal if is_last_choice(kernel)}
    others = ((name, time) for name, time in times.items() if name not in last)
    next_best = sorted(others, key=lambda item: (item[1], item[0]))[:MAX_ALTERNATIVES]
    return Schedules(
        legal=len(candidates.legal),
        last_choices=len(last),
        next_best=tuple(
            AlternativeSchedule(plan=name, ratio=time / selected) for name, time in next_best
        ),
        refused=count_reasons(plan.reason for plan in candidates.illegal),
    )


def _split_reasons(graph: Graph, patterns: Patterns, programs: Sequence[Program]) -> Iterator[str]:
    """Why patterns of the partition could not be generated as one kernel."""
    generated = {operators_between(p.graph, p.inputs, p.outputs) for p in programs}
    for pattern in patterns:
        if tuple(sorted(pattern)) in generated:
            continue
        try:
            default_plan(schedule_operators(graph, pattern))
        except BadInput as error:
            yield str(error)


def make_pass(name: str, captured: CapturedGraph, plans: Sequence[RegionPlan]) -> Pass:
    """The record of a pass. Operators of regions without a plan count as run by PyTorch."""
    graph = captured.graph
    covered = {i for plan in plans for kernel in plan.kernels for i in kernel.operators}
    alone = tuple(index for index in graph.operators if index not in covered)
    planned_alone = {index for plan in plans for index in plan.alone}
    unplanned = to_mask(index for index in alone if index not in planned_alone)
    delta = DeltaEvaluator(graph) if unplanned else None
    unplanned_seconds = delta.unfused_seconds(unplanned) if delta is not None else 0.0
    kernels = [kernel.operators for plan in plans for kernel in plan.kernels]
    explanation = explain_graph(captured, kernels)
    notes = Counter(plan.note for plan in plans if plan.note)
    if unplanned:
        notes[f"interrupted: {unplanned.bit_count()} operators were not planned"] += 1
    return Pass(
        name=name,
        nodes=tuple(_graph_nodes(graph)),
        kernels=tuple(kernel for plan in plans for kernel in plan.kernels),
        alone=alone,
        taken=captured.report.fusible,
        regions=explanation.regions,
        refused=tuple(
            ReasonCount(
                reason=each.reason,
                what=each.operator,
                count=each.count,
                bytes=each.bytes,
                change=each.change,
            )
            for each in explanation.refusals
        ),
        splits=count_reasons(reason for plan in plans for reason in plan.splits),
        no_kernel=count_reasons(reason for plan in plans for reason in plan.no_kernel),
        seconds_unfused=sum(plan.seconds_unfused for plan in plans) + unplanned_seconds,
        seconds_alone=sum(plan.seconds_alone for plan in plans) + unplanned_seconds,
        greedy_kernels=sum(plan.greedy_kernels for plan in plans),
        greedy_seconds=sum(plan.greedy_seconds for plan in plans),
        notes=tuple(f"{note} ({n} regions)" if n > 1 else note for note, n in notes.items()),
    )


def _graph_nodes(graph: Graph) -> Iterator[GraphNode]:
    for node in graph:
        if node.kind in ("layout", "constant"):
            continue
        target = str(node["target"]) if node.kind == "opaque" else node.op
        # An input that kernels cannot read is an opaque node without operands.
        is_input = node.kind == "input" or target.startswith(("placeholder ", "get_attr "))
        yield GraphNode(
            index=node.index,
            name="input" if is_input else _short_name(target),
            kind="input" if is_input else node.kind,
            shape=node.shape,
            dtype=node.dtype,
            reads=graph.sources[node.index],
            bytes=node.bytes,
            result=node.index in graph.results,
        )


def _short_name(target: str) -> str:
    """The operator's name without namespace and overload: ``addmm`` for ``aten.addmm.default``."""
    parts = target.strip("<>").split()[-1].split(".")
    return parts[1] if len(parts) > 2 else parts[-1]
