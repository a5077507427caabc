"""Kernels that keep rows in shared memory, in Triton's interpreter with a Gluon of numpy; run by
``tests.unit.fusion.codegen.interpreting``."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.emit.shared import emit_shared
from nostall.fusion.codegen.runtime.kernel import load_kernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.loop_peeling import find_peeling
from nostall.fusion.codegen.tiling.on_chip import rematerialization_options
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.codegen.tiling.shared_memory import Reuse
from nostall.fusion.graph.graph import Graph
from tests.unit.fusion.codegen.accuracy import (
    OutOfBoundsWrite,
    find_value_errors,
    random_inputs,
    with_guard_bands,
)
from tests.unit.fusion.codegen.bounds_checking import BoundsCheckedKernel
from tests.unit.fusion.codegen.online_rows import cross_entropy
from tests.unit.fusion.codegen.wide_rows import late_input, softmax_norm, wide_rows

COLUMNS, WIDTHS = 300, (64, 128, 256)
"""No multiple of any of them: the last chunk has lanes that do not exist."""


def programs(graph: Graph, draw: random.Random) -> Iterator[Program]:
    """A kernel for all that may be kept or not, with buffers that share memory in one of three
    ways."""
    schedule = schedule_operators(graph, graph.operators)
    for ahead in (False, True):
        for demoted in range(len(rematerialization_options(schedule, ahead))):
            plan = KernelPlan("shared", 1, (draw.choice(WIDTHS),), 1, 1, demoted, ahead)
            if illegal_reason(schedule, plan) is None:
                yield emit_shared(plan_kernel(schedule, plan), draw.choice(get_args(Reuse)))


def odd_programs(graph: Graph, draw: random.Random) -> Iterator[Program]:
    """Kernels that keep what they read by lanes: as much as they can, less, and copied ahead."""
    schedule = schedule_operators(graph, graph.operators)
    for ahead in (False, True):
        ways = (
            len(rematerialization_options(schedule, ahead, is_peeled=True))
            if find_peeling(schedule)
            else 0
        )
        for demoted in sorted({0, ways // 2}) if ways else ():
            plan = KernelPlan("shared", 1, (draw.choice(WIDTHS),), 1, 1, demoted, ahead, True)
            if illegal_reason(schedule, plan) is None:
                yield emit_shared(plan_kernel(schedule, plan), draw.choice(get_args(Reuse)))


def wrong(program: Program, seed: int, folder: Path) -> list[str]:
    kernel = BoundsCheckedKernel(load_kernel(program, folder))
    whole = StitchedGraph(program.graph, (kernel,), Counter())  # type: ignore[arg-type]
    inputs = random_inputs(program.graph, seed)
    try:
        found = find_value_errors(whole, inputs, with_guard_bands(whole)(*inputs))
    except OutOfBoundsWrite as stray:
        found = [str(stray)]
    return [f"{program.plan}: {text}\n{program.graph}" for text in [*found, *kernel.violations]]


def rows_on_chip(folder: Path, examples: int) -> tuple[list[str], int]:
    """What is wrong with chains and random graphs, and how many kernels there were."""
    found: list[str] = []
    kernels = 0
    makers = (softmax_norm, late_input, cross_entropy)
    graphs = [make((3, COLUMNS), "float16") for make in makers]
    for seed in range(examples):
        graph = graphs[seed] if seed < len(graphs) else wide_rows(seed, COLUMNS)
        for program in programs(graph, random.Random(seed)):
            kernels += 1
            found += wrong(program, seed, folder)
    return found, kernels


def odd_rows_on_chip(folder: Path, examples: int) -> tuple[list[str], Counter[str]]:
    """What is wrong with one to three rows of any length at odd places, and how many kernels there
    were of which kind."""
    found: list[str] = []
    kernels: Counter[str] = Counter()
    makers = (softmax_norm, late_input, cross_entropy)
    for seed in range(examples):
        draw = random.Random(seed)
        # Any odd number, or a little more than chunks take.
        some, few = 2 * draw.randint(16, 350) + 1, 64 * draw.randint(1, 8) + draw.randint(1, 3)
        columns = draw.choice((some, few))
        shape = 1 + seed % 3, columns
        graph = makers[seed // 2 % 3](shape, draw.choice(("float16", "float32")))
        if seed % 2:
            graph = wide_rows(seed, columns, most_rows=3)
        for program in odd_programs(graph, draw):
            assert isinstance(program.plan, KernelPlan)
            kernels["ahead" if program.plan.async_copies else "read"] += 1
            kernels["demoted"] += program.plan.rematerialized > 0
            found += wrong(program, seed, folder)
    return found, kernels


# What is damaged in the kernel of a softmax and a norm: a pattern, and what stands for its match.
DAMAGES = {
    "a chunk too early": (r"\.index\((\d+) \+ at\)\.store", r".index(\1 - 1 + at).store"),
    "another buffer's place": (r"\.index\(\d+ \+ at\)\.load", ".index(at).load"),
    "never written": (r"as_\w+\.index\(.*\)\.store\(\w+\)", "None"),
    "rounded": (r"\.store\((v\d+)\)", r".store(\1.to(gl.float16).to(gl.float32))"),
}


def broken(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """What is found when a right kernel is damaged."""
    graph = softmax_norm((3, COLUMNS), "float32")
    schedule = schedule_operators(graph, graph.operators)
    right = emit_shared(plan_kernel(schedule, KernelPlan("shared", 1, (64,), 1)), "none")
    for name, (pattern, damaged) in DAMAGES.items():
        match = list(re.finditer(pattern, right.source))[-1]
        source = right.source[: match.start()] + match.expand(damaged)
        source += right.source[match.end() :]
        yield name, wrong(replace(right, source=source), 1, folder)
