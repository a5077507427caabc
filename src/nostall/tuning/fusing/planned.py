"""One traced pass, region by region: a plan, the kernels generated for it, and what both cost.

Every time is *modelled* by the delta-evaluator, before (each operator a kernel of its own) as well
as after, so that both can be compared.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from nostall.core.errors import BadInput, MissingPart
from nostall.fusion.capture import Captured
from nostall.fusion.codegen.cost.default_plan import default_plan, modelled_seconds
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.runtime.kernel import StitchedKernel
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators, stitch
from nostall.fusion.codegen.tiling.kernel_plan import plans
from nostall.fusion.evaluate import Delta
from nostall.fusion.explore import explore, greedy, refined
from nostall.fusion.explore.default_partition import explored
from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.partition import mask_of
from nostall.fusion.graph.regions import Region, regions
from nostall.tuning.fusing.document import (
    Counted,
    Drawn,
    FusedKernel,
    Other,
    Pass,
    Schedules,
    counted,
)

SHOWN = 4
"""Schedules behind the chosen one that are kept."""
MOST_COLUMNS, MOST_SECONDS = 20_000, 60.0
"""Where the integer programme gives up on a region."""

Patterns = Sequence[tuple[int, ...]]
Planner = Callable[[Delta], tuple[Patterns, str]]
"""Patterns of a region's graph, and a note where they are not what was asked for."""


def _refined(delta: Delta) -> tuple[Patterns, str]:
    return refined(delta, explore(delta).connected).connected.kernels, ""


def _optimum(delta: Delta) -> tuple[Patterns, str]:
    from nostall.fusion.explore.programme import optimum

    known = explore(delta).connected
    found = optimum(delta, most=MOST_COLUMNS, seconds=MOST_SECONDS, known=known)
    if found.proven:
        return found.plan.kernels, ""
    note = f"the optimum is not known ({found.stopped}); the plan is that of explore"
    return explored(delta.graph), note


STRATEGIES: dict[str, Planner] = {
    # What nostall.fusion.fuse runs.
    "explore": lambda delta: (explored(delta.graph), ""),
    "refined": _refined,
    "greedy": lambda delta: (greedy(delta).kernels, ""),
    "optimum": _optimum,
}


def check_strategy(name: str) -> None:
    """Raise :class:`BadInput` for an unknown one, :class:`MissingPart` where SciPy is needed."""
    if name not in STRATEGIES:
        raise BadInput(f"--strategy is {name!r}; allowed are {', '.join(STRATEGIES)}")
    if name == "optimum":
        try:
            import_module("scipy.optimize")
        except ImportError as error:
            raise MissingPart(
                f"the integer programme needs SciPy ({error}); pip install 'nostall[fusion]', or "
                "take another --strategy"
            ) from error


@dataclass(frozen=True)
class PlannedRegion:
    """What became of one region; nodes are those of the whole graph."""

    kernels: tuple[FusedKernel, ...]
    programs: tuple[Program, ...]
    alone: tuple[int, ...]
    seconds_unfused: float
    seconds_alone: float
    greedy_kernels: int
    greedy_seconds: float
    splits: tuple[str, ...]
    no_kernel: tuple[str, ...]
    note: str


def planned(captured: Captured, strategy: str, folder: Path) -> Iterator[PlannedRegion]:
    """The regions of a pass, one after the other; ``folder`` holds what is imported.

    Raises :class:`MissingPart` without Triton.
    """
    for part in regions(captured.graph):
        yield _region(part, STRATEGIES[strategy], folder)


def _region(part: Region, planner: Planner, folder: Path) -> PlannedRegion:
    graph = part.graph
    delta = Delta(graph)
    patterns, note = planner(delta)
    stitched = stitch(graph, patterns, folder=folder)
    programs = [step.program for step in stitched.steps if isinstance(step, StitchedKernel)]
    alone = [step for step in stitched.steps if not isinstance(step, StitchedKernel)]
    simple = greedy(delta)
    return PlannedRegion(
        kernels=tuple(_kernel(part, delta, program) for program in programs),
        programs=tuple(programs),
        alone=tuple(part.origins[index] for index in alone),
        seconds_unfused=delta.single(delta.operators),
        seconds_alone=delta.single(mask_of(alone)),
        greedy_kernels=len(simple),
        greedy_seconds=delta.cost(simple),
        splits=tuple(_splits(graph, patterns, programs)),
        no_kernel=tuple(stitched.illegal_reasons.elements()),
        note=note,
    )


def _kernel(part: Region, delta: Delta, program: Program) -> FusedKernel:
    operators = operators_of(program)
    mask = mask_of(operators)
    alone, hardware = delta.single(mask), delta.hardware
    parts = delta.parts(mask)
    before = sum(_bytes(delta, 1 << index) for index in operators)
    # Code generation may launch more kernels than the evaluator thinks of.
    calls = len(program.launches) * (hardware.launch_s + hardware.ramp_s)
    return FusedKernel(
        name=program.launches[0].name,
        operators=tuple(part.origins[index] for index in operators),
        scheme=str(program.plan).split()[0],
        plan=str(program.plan),
        launches=tuple(launch.name for launch in program.launches),
        source=source_file(program),
        bytes_before=before,
        # What the evaluator takes for no kernel is not said to gain anything.
        bytes_after=_bytes(delta, mask) if parts else before,
        seconds_before=alone,
        seconds_after=parts.memory + parts.beyond + calls if parts else alone,
        schedules=_schedules(program, operators),
    )


def _bytes(delta: Delta, mask: int) -> int:
    """Bytes that one kernel moves, as the evaluator counts them."""
    parts = delta.parts(mask)
    return round(parts.memory * delta.hardware.copy_bytes_per_second) if parts else 0


def source_file(program: Program) -> str:
    """Where a run directory keeps the source; names carry a hash of the text."""
    return f"kernels/{program.launches[0].name}.py"


def operators_of(program: Program) -> tuple[int, ...]:
    """The operators that a program computes, by what its outputs need beyond its inputs."""
    graph, found = program.graph, set[int]()
    waiting = list(program.outputs)
    while waiting:
        index = waiting.pop()
        if index not in found:
            found.add(index)
            waiting.extend(i for i in graph.sources[index] if i not in program.inputs)
    return tuple(sorted(found & set(graph.operators)))


def _schedules(program: Program, operators: Sequence[int]) -> Schedules:
    """What the schedule was chosen from, and how much longer others would take, modelled."""
    unlisted = Schedules(legal=1, next_best=(), refused=())
    try:
        of = schedule_operators(program.graph, operators)
    except BadInput:
        return unlisted
    found = plans(of)
    times = {str(plan): modelled_seconds(of, plan) for plan in found.legal}
    if (chosen := times.pop(str(program.plan), None)) is None:
        return unlisted
    behind = sorted(times.items(), key=lambda item: (item[1], item[0]))[:SHOWN]
    return Schedules(
        legal=len(found.legal),
        next_best=tuple(Other(plan=name, ratio=time / chosen) for name, time in behind),
        refused=counted(refused.reason for refused in found.illegal),
    )


def _splits(graph: Graph, patterns: Patterns, programs: Sequence[Program]) -> Iterator[str]:
    """Why patterns of the plan are not the kernels that were generated."""
    made = {operators_of(program) for program in programs}
    for pattern in patterns:
        if tuple(sorted(pattern)) in made:
            continue
        try:
            default_plan(schedule_operators(graph, pattern))
        except BadInput as error:
            yield str(error)


def pass_of(name: str, captured: Captured, found: Sequence[PlannedRegion]) -> Pass:
    """A pass as the document has it; operators of regions that were not planned run alone."""
    graph = captured.graph
    covered = {i for region in found for kernel in region.kernels for i in kernel.operators}
    alone = tuple(index for index in graph.operators if index not in covered)
    known = {index for region in found for index in region.alone}
    rest = mask_of(index for index in alone if index not in known)
    delta = Delta(graph) if rest else None
    unplanned = delta.single(rest) if delta is not None else 0.0
    explained = sorted(captured.explanation.refused.items(), key=lambda item: (-item[1], item[0]))
    notes = Counter(region.note for region in found if region.note)
    if rest:
        notes[f"interrupted: {rest.bit_count()} operators were not planned"] += 1
    return Pass(
        name=name,
        nodes=tuple(_drawn(graph)),
        kernels=tuple(kernel for region in found for kernel in region.kernels),
        alone=alone,
        taken=captured.explanation.taken,
        refused=tuple(
            Counted(reason=why, what=target, count=count) for (why, target), count in explained
        ),
        splits=counted(why for region in found for why in region.splits),
        no_kernel=counted(why for region in found for why in region.no_kernel),
        seconds_unfused=sum(region.seconds_unfused for region in found) + unplanned,
        seconds_alone=sum(region.seconds_alone for region in found) + unplanned,
        greedy_kernels=sum(region.greedy_kernels for region in found),
        greedy_seconds=sum(region.greedy_seconds for region in found),
        notes=tuple(f"{note} ({n} regions)" if n > 1 else note for note, n in notes.items()),
    )


def _drawn(graph: Graph) -> Iterator[Drawn]:
    for node in graph:
        if node.kind in ("layout", "constant"):
            continue
        target = str(node["target"]) if node.kind == "opaque" else node.op
        # What a kernel cannot read is opaque, and stands in no kernel's way.
        given = node.kind == "input" or target.startswith(("placeholder ", "get_attr "))
        yield Drawn(
            index=node.index,
            name="input" if given else _short(target),
            kind="input" if given else node.kind,
            shape=node.shape,
            dtype=node.dtype,
            reads=graph.sources[node.index],
            bytes=node.bytes,
            result=node.index in graph.results,
        )


def _short(target: str) -> str:
    """``addmm`` for ``aten.addmm.default``."""
    parts = target.strip("<>").split()[-1].split(".")
    return parts[1] if len(parts) > 2 else parts[-1]
