"""Emit and compile kernels of the scheme ``shared`` for tests (Gluon, sm_90)."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fusion.chains.mechanisms.reuse_rules import Reuse, emit_by

from nostall.core.launch import LaunchSpec
from nostall.fusion import Builder
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.legality import illegal_reason
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from nostall.tuning.sources.source import Source
from nostall.tuning.sources.triton_source import compile_triton


def emit_program(graph: Graph, plan: KernelPlan, reuse: Reuse = "order") -> Program:
    schedule = schedule_operators(graph, graph.operators)
    assert illegal_reason(schedule, plan) is None
    return emit_by(plan_kernel(schedule, plan), reuse)


def compile_program(program: Program, folder: Path) -> Source:
    path = folder / f"{program.launches[0].name}.py"
    path.write_text(program.source)
    ((name, launch),) = launch_specs(program).items()
    return compile_triton(path, name, launch, "sm_90")


def shared_bytes(source: Source) -> int:
    launch = source.launch
    assert isinstance(launch, LaunchSpec)
    return launch.shared


def all_operators_graph(columns: int = 3000) -> Graph:
    """Operators of all kinds before and after all kinds of reductions, so that kernels keep values
    of all dtypes on chip."""
    build = Builder()
    shape = (8, columns)
    x, y = build.input(shape, "float32"), build.input(shape, "bfloat16")
    mask, count = build.input(shape, "bool"), build.input(shape, "int16")
    narrow = [build.input(shape, dtype) for dtype in ("float8_e4m3fn", "float8_e5m2", "uint8")]
    value = build("where", mask, build("add", x, y), build.constant(0.0))
    for one in (count, *narrow):
        value = build("add", value, build("cast", one, dtype="float32"))
    for op in ("tanh", "expm1", "round", "erf", "sin", "sigmoid", "rsqrt", "relu", "sign"):
        value = build("add", value, build(op, x))
    value = build("add", value, build("remainder", x, build("pow", x, y)))
    reduced = [build(op, value, dims=(1,), keepdim=True) for op in ("sum", "prod", "amax", "amin")]
    has_nan = build("any", build("isnan", value), dims=(1,), keepdim=True)
    total = build("sum", count, dims=(1,), keepdim=True, dtype="int64")
    for one in (*reduced, total):
        value = build("add", value, one)
    value = build("where", has_nan, build("add", value, y), build("cast", count, dtype="float32"))
    value = build("where", mask, value, x)
    for one in narrow:
        value = build("add", value, build("cast", one, dtype="float32"))
    return build.graph(value, build("cast", value, dtype="float8_e5m2"), *reduced)
