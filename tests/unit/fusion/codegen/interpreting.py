"""Run in a process of its own: stitched kernels in Triton's interpreter, results as JSON.

``python -m tests.unit.fusion.codegen.interpreting FOLDER EXAMPLES`` prints, for every chain, for random
graphs and for kernels that were broken on purpose, what was found wrong.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from benchmarks.fusion.correctness.random_graphs import FLOATS, drawn_graphs, one
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as fixed_seed

from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators, stitch
from nostall.fusion.codegen.tiling import legality
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.plan_variants import single_chunk_kernels, with_evict_first
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.graph.graph import Graph
from nostall.fusion.testing.triton_interpreter import prepare
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)
from tests.unit.fusion.codegen.label_columns import broken as broken_marks
from tests.unit.fusion.codegen.label_columns import marked_rows
from tests.unit.fusion.codegen.on_chip_rows import broken as broken_on_chip
from tests.unit.fusion.codegen.on_chip_rows import odd_rows_on_chip, rows_on_chip
from tests.unit.fusion.codegen.philox_graphs import random_number_errors
from tests.unit.fusion.codegen.random_graphs import RandomGraph
from tests.unit.fusion.codegen.small_dots import small_dots
from tests.unit.fusion.patterns import DYNAMIC, PACKED, PATTERNS, as_int8
from tests.unit.tuning.fusing.functions import fused_and_plain

GRAPHS = 300
"""That are drawn, of which some are interpreted."""
STRANGE, PLAIN = 3, 1
"""Seeds with and without NaN and Inf among the inputs."""


def different(schedule: Schedule) -> list[KernelPlan]:
    """A plan of every scheme, with one and several chunks and parts: those of each kind that run
    the fewest programs, which is what takes time here."""
    kinds: dict[object, KernelPlan] = {}
    for plan in sorted(plans(schedule).legal_plans, key=lambda plan: programs(schedule, plan)):
        ahead = plan.async_copies and plan.scheme != "shared"
        kinds.setdefault((plan.scheme, len(plan.chunks) > 1, plan.splits > 1, ahead), plan)
    early = [replace(plan, eager_loads=True) for plan in kinds.values()]
    streamed = [
        kernel.plan
        for plan in early
        if (kernel := with_evict_first(PlannedKernel(schedule, plan))) is not None
    ]
    wide = [
        kernel.plan
        for plan in kinds.values()
        for kernel in single_chunk_kernels(PlannedKernel(schedule, plan))
    ]
    return [*kinds.values(), *streamed[:1], *wide[:1]]


def programs(schedule: Schedule, plan: KernelPlan) -> float:
    if plan.scheme == "thread":
        return schedule.row_count / plan.chunks[0]
    return schedule.row_count / plan.rows * plan.splits


def wrong(graph: Graph, stitched: StitchedGraph, seed: int) -> list[str]:
    inputs = random_inputs(graph, seed)
    try:
        return find_value_errors(stitched, inputs, with_guard_bands(stitched)(*inputs))
    except OutOfBoundsWrite as stray:
        return [str(stray)]


def chains(folder: Path) -> Iterator[tuple[str, list[str]]]:
    for name, make in PATTERNS.items():
        graph = make()
        found: list[str] = []
        for at, plan in enumerate(different(schedule_operators(graph, graph.operators))):
            whole = stitch(
                graph, [graph.operators], choice=lambda s, p=plan: plan_kernel(s, p), folder=folder
            )
            found += [f"refused: {reason}" for reason in whole.illegal_reasons]
            # NaN stays in its row: other rows show the numbers.
            found += [f"{plan}: {text}" for text in wrong(graph, whole, PLAIN if at else STRANGE)]
        yield name, found


INTERPRETED = (
    "layer norm",
    "softmax of an outer axis",
    "norm backward",
    "bias and gelu",
    "dropout",
    "attention",
    "weighed history",
)
"""Of the dynamic chains those that differ in what they do with rows; the source of all of them is
held to be independent of their number."""


def dynamic(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Chains whose number of rows is known at run time only, with one kernel for all of them."""
    for name in INTERPRETED:
        graph = DYNAMIC[name]()
        found: list[str] = []
        for plan in different(schedule_operators(graph, graph.operators)):
            whole = stitch(
                graph, [graph.operators], choice=lambda s, p=plan: plan_kernel(s, p), folder=folder
            )
            found += [f"refused: {reason}" for reason in whole.illegal_reasons]
            found += [f"{plan}, {text}" for text in wrong_at_sizes(graph, whole)]
        yield name, found


def wrong_at_sizes(graph: Graph, stitched: StitchedGraph) -> Iterator[str]:
    """What is wrong at one row, at an odd number and at more than planned."""
    for rows in (1, 5, 16):
        sized = Graph(tuple(n.resized(graph.varying, rows) for n in graph), graph.outputs)
        inputs = random_inputs(sized, PLAIN)
        try:
            outputs = with_guard_bands(stitched)(*inputs)
            found = find_value_errors(replace(stitched, graph=sized), inputs, outputs)
        except OutOfBoundsWrite as stray:
            found = [str(stray)]
        yield from (f"{rows} rows: {text}" for text in found)


def packs(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Chains of different shapes in one kernel."""
    for name, make in PACKED.items():
        graph = make()
        whole = stitch(graph, [graph.operators], folder=folder)
        found = [f"{whole.kernels} kernels"] if len(whole.steps) != 1 else []
        if graph.varying:
            found += wrong_at_sizes(graph, whole)
        else:
            found += wrong(graph, whole, STRANGE) + wrong(graph, whole, PLAIN)
        yield name, found


BEYOND = (57344.0, 61440.0, 65536.0, 1e30, float("inf"))
"""The largest number of e5m2, the first that rounds to infinity, and more."""


def infinities(folder: Path) -> list[str]:
    """Casts to e5m2 beyond the largest number: the bytes, which no conversion decides."""
    x = torch.tensor([*BEYOND, *(-value for value in BEYOND), 0.0, -1.5])[None]
    build = Builder()
    graph = build.graph(build("cast", build.input(tuple(x.shape)), dtype="float8_e5m2"))
    (made,) = stitch(graph, folder=folder)(x)
    wanted = x.to(torch.float8_e5m2)
    same = (made.view(torch.uint8) == wanted.view(torch.uint8))[0].tolist()
    return [f"{value}" for value, right in zip(x[0].tolist(), same, strict=True) if not right]


def halves(folder: Path) -> list[str]:
    """Numbers between two whole ones, and beyond int8, as int8: which ones they become."""
    x = torch.arange(-130, 130.5, 0.25)
    x = torch.cat([x, torch.tensor([3e9, -3e9, float("inf"), float("-inf"), float("nan")])])[None]
    build = Builder()
    graph = build.graph(as_int8(build, build.input(tuple(x.shape))))
    (made,) = stitch(graph, folder=folder)(x)
    wanted = x.round().clamp(-127, 127).nan_to_num().to(torch.int8)
    same = (made == wanted)[0].tolist()
    return [f"{value}" for value, right in zip(x[0].tolist(), same, strict=True) if not right]


def examples_of(count: int, number: int = 0) -> Callable[[Any], Any]:
    """Decorator for a property test: ``count`` examples of the seed ``number``, without shrinking.

    Without a seed Hypothesis derives the examples from the test's source text, so that a renamed
    variable changes them.
    """
    options = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    return lambda test: fixed_seed(number)(options(test))


def random_dots(folder: Path, examples: int) -> tuple[list[str], int]:
    """What is wrong with chains around small dots, each one kernel; how many there were."""
    found: list[str] = []
    seen: list[str] = []

    @examples_of(examples)
    @given(small_dots())
    def check(made: RandomGraph) -> None:
        graph = made.graph
        stitched = stitch(graph, [graph.operators], folder=folder)
        seen.append(graph.key)
        problems = [f"refused: {reason}" for reason in stitched.illegal_reasons]
        if len(stitched.steps) != 1:
            problems.append(f"{len(stitched.steps)} kernels")
        for text in problems or wrong(graph, stitched, made.seed):
            found.append(f"{text}\n{graph}")

    check()
    return found, len(seen)


def random_graphs(folder: Path, examples: int) -> tuple[list[str], Counter[str], str]:
    """What is wrong with the first ``examples`` of the graphs that run on a GPU, too; what was
    seen; and a digest of all of those."""
    found: list[str] = []
    seen: Counter[str] = Counter()

    def check(made: RandomGraph) -> None:
        if seen["graphs"] < examples:
            seen["graphs"] += 1
            found.extend(f"{text}\n{made.graph}" for text in one(made, folder, seen))

    return found, seen, drawn_graphs(GRAPHS, 0, FLOATS, check)


# What is damaged: the chain, a pattern whose last match is replaced, and by what.
DAMAGES = {
    "masked lanes count": ("layer norm, two chunks", r"tl\.where\(inside\w*, (\w+), 0\)", r"\1"),
    "lanes beyond the end are stored": ("bias and gelu", r", mask=inside\)", ")"),
    "masked lanes are the least": ("sum of a broadcast", r'float\("inf"\)', "-100.0"),
    "nan is dropped": ("gated", r"PropagateNan\.ALL", "PropagateNan.NONE"),
    "a wrong stride": ("layer norm", r"r \* 100", "r * 99"),
    "padding counts": ("attention", r"tl\.where\(in_i\d, (x\d), 0\.0\)", r"(\1 + 1.0)"),
    "numbers of the row before": ("dropout", r"(_half\(\w+, )(\w)", r"\1-22 + \2"),
    "a row too many": ("norm backward", "live = m < count", "live = m < count + 1"),
}


def broken(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """What is found when right kernels are damaged."""
    for name, (chain, pattern, damaged) in DAMAGES.items():
        graph = PATTERNS[chain]()
        schedule = schedule_operators(graph, graph.operators)
        right = [emit(plan_kernel(schedule, plan)) for plan in different(schedule)]
        program, match = next(
            (program, found[-1])
            for program in right
            if (found := list(re.finditer(pattern, program.source)))
        )
        source = program.source[: match.start()] + match.expand(damaged)
        source += program.source[match.end() :]
        kernel = load_kernel(replace(program, source=source), folder)
        yield name, wrong(graph, StitchedGraph(graph, (kernel,), Counter()), STRANGE)


def main() -> None:
    prepare()
    legality.EVICT_FIRST_BYTES = 0  # allows evict_first for all outputs
    torch.set_num_threads(1)
    folder, examples = Path(sys.argv[1]), int(sys.argv[2])
    found, seen, digest = random_graphs(folder, 20 * examples)
    result = {
        "chains": dict(chains(folder)),
        "dynamic": dict(dynamic(folder)),
        "packed": dict(packs(folder)),
        "drawn": dict(random_number_errors(folder)),
        "random": found,
        "seen": seen,
        "digest": digest,
        "dots": random_dots(folder, 2 * examples),
        "on chip": rows_on_chip(folder, examples),
        "odd on chip": odd_rows_on_chip(folder, 2 * examples),
        "marked": marked_rows(folder),
        "infinities": infinities(folder),
        "halves": halves(folder),
        "broken": dict(broken(folder)),
        "broken on chip": dict(broken_on_chip(folder)),
        "broken marks": dict(broken_marks(folder)),
        "fused": fused_and_plain(folder),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
