"""Kernels with fp8 and int16 tensors, compiled for sm_90 without a GPU."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from nostall.core.launch import Buffer
from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.tuning.sources.triton_source import compile_triton

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
pytest.importorskip("torch")


@pytest.mark.parametrize(("dtype", "kind"), [("float8_e4m3fn", "e4m3"), ("float8_e5m2", "e5m2")])
def test_casts_to_fp8_are_instructions(dtype: str, kind: str, tmp_path: Path) -> None:
    """The instruction saturates at the largest finite value, even for infinity. The kernel inserts
    NaN before it (e4m3) or the byte of infinity after it (e5m2)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    build = Builder()
    graph = build.graph(build("cast", build.input((8, 64)), dtype=dtype))
    program = emit(
        plan_kernel(schedule_operators(graph, graph.operators), KernelPlan("thread", 1, (128,), 1))
    )
    path = tmp_path / "kernels.py"
    path.write_text(program.source)
    (function,) = imported(path, program)
    types = {"p0": "*fp32", "p1": {"e4m3": "*fp8e4nv", "e5m2": "*fp8e5"}[kind], "count": "i32"}
    source = ASTSource(function, signature=types, constexprs={})
    options = {"enable_fp_fusion": True}
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    converted = rf"cvt\.rn\.satfinite\.{kind}x2\.f32\s+(%rs\d+), %r\d+, (%r\d+);"
    results, operands = zip(*re.findall(converted, ptx), strict=True)
    if kind == "e4m3":
        chosen = re.findall(r"selp\.b32\s+(%r\d+), 2143289344, ", ptx)  # NaN
        assert chosen == list(operands)
    else:
        below = re.findall(r"selp\.b16\s+(%rs\d+), -4, (%rs\d+), ", ptx)
        above = re.findall(r"selp\.b16\s+%rs\d+, 124, (%rs\d+), ", ptx)
        assert [byte for _, byte in below] == list(results)
        assert [name for name, _ in below] == above


def imported(path: Path, program: Program) -> list[object]:
    spec = importlib.util.spec_from_file_location("kernels_to_compile", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [getattr(module, launch.name) for launch in program.launches]


def test_launches_know_fp8_and_int16(tmp_path: Path) -> None:
    build = Builder()
    x, y = build.input((8, 64), dtype="float8_e5m2"), build.input((8, 64), dtype="int16")
    both = build("mul", build("cast", x, dtype="float32"), build("cast", y, dtype="float32"))
    graph = build.graph(build("cast", both, dtype="float8_e4m3fn"))
    program = emit(
        plan_kernel(schedule_operators(graph, graph.operators), KernelPlan("thread", 1, (128,), 1))
    )
    path = tmp_path / "kernels.py"
    path.write_text(program.source)
    ((name, launch),) = launch_specs(program).items()
    dtypes = [argument.dtype for argument in launch.args if isinstance(argument, Buffer)]
    assert dtypes == ["f8e5m2", "i16", "f8e4m3"]
    assert compile_triton(path, name, launch, "sm_90").kernel == name
