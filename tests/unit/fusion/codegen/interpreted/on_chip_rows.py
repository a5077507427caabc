"""Kernels that keep rows in shared memory, in Triton's interpreter with a Gluon made of NumPy.

``tests.unit.fusion.codegen.interpreted.interpreting`` runs them.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

from benchmarks.fusion.chains.mechanisms.reuse_rules import Reuse, emit_by

from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.loop_peeling import find_peeling
from nostall.fusion.codegen.tiling.on_chip import rematerialization_options
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)
from tests.unit.fusion.codegen.graphs.wide_rows import late_input, softmax_norm, wide_rows
from tests.unit.fusion.codegen.interpreted.bounds_checking import BoundsCheckedKernel
from tests.unit.fusion.codegen.interpreted.online_rows import cross_entropy
from tests.unit.fusion.patterns import head_norms, quantised_norm

COLUMNS, WIDTHS = 300, (64, 128, 256)
"""Columns, and chunk widths that do not divide them, so that the last chunk is masked."""


def programs(graph: Graph, draw: random.Random) -> Iterator[Program]:
    """Kernels of all rematerialization options, each with a random width and reuse of memory."""
    schedule = schedule_operators(graph, graph.operators)
    for copies in (False, True):
        for option in range(len(rematerialization_options(schedule, copies))):
            plan = KernelPlan("shared", 1, (draw.choice(WIDTHS),), 1, 1, option, copies)
            if illegal_reason(schedule, plan) is None:
                yield emit_by(plan_kernel(schedule, plan), draw.choice(get_args(Reuse)))


def peeled_programs(graph: Graph, draw: random.Random) -> Iterator[Program]:
    """Kernels of peeled rows that keep all values or fewer, with and without async copies."""
    schedule = schedule_operators(graph, graph.operators)
    for copies in (False, True):
        options = (
            len(rematerialization_options(schedule, copies, is_peeled=True))
            if find_peeling(schedule)
            else 0
        )
        for option in sorted({0, options // 2}) if options else ():
            plan = KernelPlan("shared", 1, (draw.choice(WIDTHS),), 1, 1, option, copies, True)
            if illegal_reason(schedule, plan) is None:
                yield emit_by(plan_kernel(schedule, plan), draw.choice(get_args(Reuse)))


def find_errors(program: Program, seed: int, folder: Path) -> list[str]:
    """Run a program on random inputs; describe wrong values and accesses outside its tensors."""
    kernel = BoundsCheckedKernel(load_kernel(program, folder))
    stitched = StitchedGraph(program.graph, (kernel,), Counter())  # type: ignore[arg-type]
    inputs = random_inputs(program.graph, seed)
    try:
        errors = find_value_errors(stitched, inputs, with_guard_bands(stitched)(*inputs))
    except OutOfBoundsWrite as stray:
        errors = [str(stray)]
    return [f"{program.plan}: {text}\n{program.graph}" for text in [*errors, *kernel.violations]]


def rows_on_chip_errors(folder: Path, examples: int) -> tuple[list[str], int]:
    """Errors of fixed and random graphs, and the number of kernels."""
    errors: list[str] = []
    kernels = 0
    makers = (softmax_norm, late_input, cross_entropy)
    graphs = [make((3, COLUMNS), "float16") for make in makers]
    with_blocks = [quantised_norm((3, 320), "float16", 32), head_norms((3, 320), "float32", 10)]
    for seed in range(examples + len(with_blocks)):
        graph = graphs[seed] if seed < len(graphs) else wide_rows(seed, COLUMNS)
        graph = with_blocks[seed - examples] if seed >= examples else graph
        for program in programs(graph, random.Random(seed)):
            kernels += 1
            errors += find_errors(program, seed, folder)
    return errors, kernels


def unaligned_rows_on_chip_errors(folder: Path, examples: int) -> tuple[list[str], Counter[str]]:
    """Errors of graphs with one to three unaligned rows, and the number of kernels of each kind."""
    errors: list[str] = []
    kernels: Counter[str] = Counter()
    makers = (softmax_norm, late_input, cross_entropy)
    for seed in range(examples):
        draw = random.Random(seed)
        # Any odd number of columns, or a few more than full chunks.
        odd, above_multiple = (
            2 * draw.randint(16, 350) + 1,
            64 * draw.randint(1, 8) + draw.randint(1, 3),
        )
        columns = draw.choice((odd, above_multiple))
        shape = 1 + seed % 3, columns
        graph = makers[seed // 2 % 3](shape, draw.choice(("float16", "float32")))
        if seed % 2:
            graph = wide_rows(seed, columns, most_rows=3)
        for program in peeled_programs(graph, draw):
            assert isinstance(program.plan, KernelPlan)
            kernels["ahead" if program.plan.async_copies else "read"] += 1
            kernels["demoted"] += program.plan.rematerialized > 0
            errors += find_errors(program, seed, folder)
    return errors, kernels


# Damages to the kernel of a softmax and a norm: a regular expression and its replacement.
DAMAGES = {
    "a chunk too early": (r"\.index\((\d+) \+ at\)\.store", r".index(\1 - 1 + at).store"),
    "another buffer's place": (r"\.index\(\d+ \+ at\)\.load", ".index(at).load"),
    "never written": (r"as_\w+\.index\(.*\)\.store\(\w+\)", "None"),
    "rounded": (r"\.store\((v\d+)\)", r".store(\1.to(gl.float16).to(gl.float32))"),
}


def damaged_kernel_errors(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """The errors that are found in damaged kernels; there should be some for each damage."""
    graph = softmax_norm((3, COLUMNS), "float32")
    schedule = schedule_operators(graph, graph.operators)
    correct = emit_by(plan_kernel(schedule, KernelPlan("shared", 1, (64,), 1)), "none")
    for name, (pattern, damaged) in DAMAGES.items():
        match = list(re.finditer(pattern, correct.source))[-1]
        source = correct.source[: match.start()] + match.expand(damaged)
        source += correct.source[match.end() :]
        yield name, find_errors(replace(correct, source=source), 1, folder)
