"""Stitched kernels in Triton's interpreter.

``python -m tests.unit.fusion.codegen.interpreted.interpreting FOLDER EXAMPLES`` prints as JSON the
errors of the fixed patterns, of random graphs and of kernels that were damaged on purpose.
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
from benchmarks.fusion.correctness.random_graphs import FLOATS, check_graph, draw_graphs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as fixed_seed
from tools.interpreters.triton_interpreter import prepare

from nostall.fusion import Builder
from nostall.fusion.codegen.autotune.candidates import single_chunk_kernels, with_evict_first
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, stitch
from nostall.fusion.codegen.tiling import legality
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel
from nostall.fusion.graph.dynamic_size import SizeReader, primes_of
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)
from tests.unit.fusion.codegen.graphs.random_graphs import RandomGraph, operator_graphs
from tests.unit.fusion.codegen.graphs.small_dots import small_dots
from tests.unit.fusion.codegen.interpreted.label_columns import (
    damaged_kernel_errors as damaged_label_column_errors,
)
from tests.unit.fusion.codegen.interpreted.label_columns import label_column_errors
from tests.unit.fusion.codegen.interpreted.on_chip_rows import (
    damaged_kernel_errors as damaged_on_chip_errors,
)
from tests.unit.fusion.codegen.interpreted.on_chip_rows import (
    rows_on_chip_errors,
    unaligned_rows_on_chip_errors,
)
from tests.unit.fusion.codegen.interpreted.philox_graphs import random_number_errors
from tests.unit.fusion.pattern_tables import DYNAMIC, PACKED, PATTERNS
from tests.unit.fusion.patterns import as_int8
from tests.unit.tuning.fusing.functions import fused_and_plain

GRAPHS = 300
"""Random graphs in the digest; only the first of them are interpreted."""
SPECIAL_SEED, FINITE_SEED = 3, 1
"""Seeds of inputs with and without NaN and Inf."""


def representative_plans(schedule: Schedule) -> list[KernelPlan]:
    """Plans of all schemes, with one and several chunks and splits.

    Of each kind the plan that runs the fewest programs, because programs take the time here.
    """
    kinds: dict[object, KernelPlan] = {}
    for plan in sorted(plans(schedule).legal_plans, key=lambda plan: programs(schedule, plan)):
        copies = plan.async_copies and plan.scheme != "shared"
        kinds.setdefault((plan.scheme, len(plan.chunks) > 1, plan.splits > 1, copies), plan)
    eager = [replace(plan, eager_loads=True) for plan in kinds.values()]
    streamed = [
        kernel.plan
        for plan in eager
        if (kernel := with_evict_first(PlannedKernel(schedule, plan))) is not None
    ]
    wide = [
        kernel.plan
        for plan in kinds.values()
        for kernel in single_chunk_kernels(PlannedKernel(schedule, plan))
    ]
    return [*kinds.values(), *streamed[:1], *wide[:1]]


def programs(schedule: Schedule, plan: KernelPlan) -> float:
    """The number of programs of a kernel, roughly."""
    if plan.scheme == "thread":
        return schedule.row_count / plan.chunks[0]
    return schedule.row_count / plan.rows * plan.splits


def find_errors(graph: Graph, stitched: StitchedGraph, seed: int) -> list[str]:
    """Run a stitched graph on random inputs and describe wrong values and stray writes."""
    inputs = random_inputs(graph, seed)
    try:
        return find_value_errors(stitched, inputs, with_guard_bands(stitched)(*inputs))
    except OutOfBoundsWrite as stray:
        return [str(stray)]


def pattern_errors(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Errors of each fixed pattern, with all representative plans."""
    for name, make in PATTERNS.items():
        graph = make()
        errors: list[str] = []
        for at, plan in enumerate(representative_plans(schedule_operators(graph, graph.operators))):
            stitched = stitch(
                graph, [graph.operators], choice=lambda s, p=plan: plan_kernel(s, p), folder=folder
            )
            errors += [f"refused: {reason}" for reason in stitched.illegal_reasons]
            # One plan is enough for NaN and Inf, which hide other errors in their rows.
            seed = FINITE_SEED if at else SPECIAL_SEED
            errors += [f"{plan}: {text}" for text in find_errors(graph, stitched, seed)]
        yield name, errors


INTERPRETED = (
    "layer norm",
    "softmax of an outer axis",
    "norm backward",
    "quantised norm",
    "bias and gelu",
    "dropout",
    "attention",
    "weighed history",
)
"""The dynamic patterns that differ in how they use rows. Other tests check for all patterns that
the source does not depend on the number of rows."""


def dynamic_errors(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Errors of patterns with a dynamic number of rows, one kernel for several numbers."""
    for name in INTERPRETED:
        graph = DYNAMIC[name]()
        errors: list[str] = []
        for plan in representative_plans(schedule_operators(graph, graph.operators)):
            stitched = stitch(
                graph, [graph.operators], choice=lambda s, p=plan: plan_kernel(s, p), folder=folder
            )
            errors += [f"refused: {reason}" for reason in stitched.illegal_reasons]
            errors += [f"{plan}, {text}" for text in errors_at_sizes(graph, stitched)]
        yield name, errors


def errors_at_sizes(graph: Graph, stitched: StitchedGraph) -> Iterator[str]:
    """Errors with one row, an odd number of rows and more rows than the graph was traced with."""
    for rows in (1, 5, 16) if len(primes_of(graph.varying)) == 1 else SEVERAL_SIZES:
        sized = Graph(tuple(n.resized(graph.varying, rows) for n in graph), graph.outputs)
        inputs = random_inputs(sized, FINITE_SEED)
        try:
            outputs = with_guard_bands(stitched)(*inputs)
            errors = find_value_errors(replace(stitched, graph=sized), inputs, outputs)
        except OutOfBoundsWrite as stray:
            errors = [str(stray)]
        yield from (f"{rows} rows: {text}" for text in errors)


SEVERAL_SIZES = ((5, 19), (29, 2), (1, 3))
"""Sizes of graphs with two dynamic axes: in both orders, and smaller and larger than traced."""


def several_sizes_errors(folder: Path, examples: int) -> Iterator[tuple[str, list[str]]]:
    """Errors of random graphs of which two axes are dynamic, one kernel for several sizes."""
    count = [0, 0]

    @examples_of(examples)
    @given(operator_graphs(varying=7 * 11))
    def run(made: RandomGraph) -> None:
        shapes = [made.graph[index].shape for index in made.graph.inputs]
        if not SizeReader(made.graph.varying, shapes).is_complete:
            return
        stitched = stitch(made.graph, folder=folder)
        count[0] += 1
        count[1] += stitched.kernels
        errors = list(errors_at_sizes(made.graph, stitched))
        assert not errors, f"{made.graph}: {errors}"

    try:
        run()
    except AssertionError as error:
        yield "random", [str(error)]
    yield "kernels", [] if count[1] >= count[0] else [f"{count[1]} kernels of {count[0]} graphs"]


def packing_errors(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Errors of independent kernels of different shapes that are packed into one."""
    for name, make in PACKED.items():
        graph = make()
        stitched = stitch(graph, [graph.operators], folder=folder)
        errors = [f"{stitched.kernels} kernels"] if len(stitched.steps) != 1 else []
        if graph.varying:
            errors += errors_at_sizes(graph, stitched)
        else:
            errors += find_errors(graph, stitched, SPECIAL_SEED)
            errors += find_errors(graph, stitched, FINITE_SEED)
        yield name, errors


LARGE_VALUES = (57344.0, 61440.0, 65536.0, 1e30, float("inf"))
"""The largest finite e5m2 value, the first that rounds to infinity, and larger values."""


def e5m2_cast_errors(folder: Path) -> list[str]:
    """Large values that a kernel casts to other e5m2 bytes than PyTorch."""
    x = torch.tensor([*LARGE_VALUES, *(-value for value in LARGE_VALUES), 0.0, -1.5])[None]
    build = Builder()
    graph = build.graph(build("cast", build.input(tuple(x.shape)), dtype="float8_e5m2"))
    (made,) = stitch(graph, folder=folder)(x)
    wanted = x.to(torch.float8_e5m2)
    same = (made.view(torch.uint8) == wanted.view(torch.uint8))[0].tolist()
    return [f"{value}" for value, right in zip(x[0].tolist(), same, strict=True) if not right]


def int8_rounding_errors(folder: Path) -> list[str]:
    """Quarters and values outside int8 that a kernel quantizes to other integers than PyTorch."""
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


def random_dot_errors(folder: Path, examples: int) -> tuple[list[str], int]:
    """Errors of random graphs around small dots, each in one kernel, and the number of graphs."""
    errors: list[str] = []
    seen: list[str] = []

    @examples_of(examples)
    @given(small_dots())
    def check(example: RandomGraph) -> None:
        graph = example.graph
        stitched = stitch(graph, [graph.operators], folder=folder)
        seen.append(graph.key)
        problems = [f"refused: {reason}" for reason in stitched.illegal_reasons]
        if len(stitched.steps) != 1:
            problems.append(f"{len(stitched.steps)} kernels")
        for text in problems or find_errors(graph, stitched, example.seed):
            errors.append(f"{text}\n{graph}")

    check()
    return errors, len(seen)


def random_graph_errors(folder: Path, examples: int) -> tuple[list[str], Counter[str], str]:
    """Errors of random graphs, counts of what was run, and a digest of :data:`GRAPHS` graphs.

    A benchmark runs the same graphs on a GPU; the first ``examples`` of them run here.
    """
    errors: list[str] = []
    seen: Counter[str] = Counter()

    def check(example: RandomGraph) -> None:
        if seen["graphs"] < examples:
            seen["graphs"] += 1
            errors.extend(f"{text}\n{example.graph}" for text in check_graph(example, folder, seen))

    return errors, seen, draw_graphs(GRAPHS, 0, FLOATS, check)


# Damages: the graph pattern, a regular expression whose last match is replaced, the replacement.
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


def damaged_kernel_errors(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The errors that are found in damaged kernels; there should be some for each damage."""
    for name, (chain, pattern, damaged) in DAMAGES.items():
        graph = PATTERNS[chain]()
        schedule = schedule_operators(graph, graph.operators)
        correct = [emit(plan_kernel(schedule, plan)) for plan in representative_plans(schedule)]
        program, match = next(
            (program, found[-1])
            for program in correct
            if (found := list(re.finditer(pattern, program.source)))
        )
        source = program.source[: match.start()] + match.expand(damaged)
        source += program.source[match.end() :]
        kernel = load_kernel(replace(program, source=source), folder)
        yield name, find_errors(graph, StitchedGraph(graph, (kernel,), Counter()), SPECIAL_SEED)


def main() -> None:
    prepare()
    legality.EVICT_FIRST_BYTES = 0  # allows evict_first for all outputs
    torch.set_num_threads(1)
    folder, examples = Path(sys.argv[1]), int(sys.argv[2])
    errors, seen, digest = random_graph_errors(folder, 20 * examples)
    result = {
        "chains": dict(pattern_errors(folder)),
        "dynamic": dict(dynamic_errors(folder)),
        "several sizes": dict(several_sizes_errors(folder, 4 * examples)),
        "packed": dict(packing_errors(folder)),
        "drawn": dict(random_number_errors(folder)),
        "random": errors,
        "seen": seen,
        "digest": digest,
        "dots": random_dot_errors(folder, 2 * examples),
        "on chip": rows_on_chip_errors(folder, examples),
        "odd on chip": unaligned_rows_on_chip_errors(folder, 2 * examples),
        "marked": label_column_errors(folder),
        "infinities": e5m2_cast_errors(folder),
        "halves": int8_rounding_errors(folder),
        "broken": dict(damaged_kernel_errors(folder)),
        "broken on chip": dict(damaged_on_chip_errors(folder)),
        "broken marks": dict(damaged_label_column_errors(folder)),
        "fused": fused_and_plain(folder),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
