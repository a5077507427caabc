"""Tests of kernels compiled for sm_90 without a GPU: safety and instruction counts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nostall.fusion import Builder
from nostall.fusion.codegen.emit.emit import emit
from nostall.fusion.codegen.emit.program import Program
from nostall.fusion.codegen.generate import generate, schedule_operators
from nostall.fusion.codegen.runtime.launch_specs import launch_specs
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan
from nostall.fusion.codegen.tiling.planned_kernel import plan_kernel
from nostall.fusion.graph.graph import Graph
from nostall.sass import Program as SassProgram
from nostall.sass import validate
from nostall.tuning.sources.triton_source import compile_triton
from tests.unit.fusion.codegen import oldest_triton
from tests.unit.fusion.codegen.sm90_code import cubin_opcodes, opcodes
from tests.unit.fusion.pattern_tables import DYNAMIC, PACKED
from tests.unit.fusion.patterns import attention_backward, norm_backward

pytestmark = pytest.mark.slow

pytest.importorskip("triton")
pytest.importorskip("torch")

FROM_LIBDEVICE = ("tanh", "expm1", "log1p", "round", "trunc")


def opcodes_by_version(program: Program, folder: Path) -> list[list[str]]:
    """Opcodes of a kernel by the installed Triton and, if available, the oldest supported one."""
    found = [opcodes(program, folder)]
    if oldest_triton.INSTALLATION.is_dir():
        ((cubin, _),) = oldest_triton.compile_program(program, folder)
        found.append(cubin_opcodes(cubin))
    return found


def _all_operators() -> Graph:
    """A graph with all operators that have their own templates."""
    build = Builder()
    x, y = build.input((8, 64)), build.input((8, 64))
    value = build("add", x, y)
    for op in (*FROM_LIBDEVICE, "erf", "sin", "sigmoid", "rsqrt", "relu", "sign"):
        value = build("add", value, build(op, x))
    value = build("add", value, build("pow", x, y))
    value = build("add", value, build("remainder", x, y))
    told = build("logical_and", build("isnan", value), build("lt", x, y))
    kept = build("where", told, value, build.constant(0.0))
    return build.graph(
        build("any", told, dims=(1,), keepdim=False),
        build("prod", kept, dims=(1,), keepdim=False),
        build("amin", kept, dims=(1,), keepdim=True),
        build("cast", kept, dtype="bfloat16"),
    )


CASES = {
    "column": (norm_backward((64, 768), "bfloat16"), KernelPlan("column", 1, (512, 256), 8, 16)),
    "dots": (attention_backward((8, 4, 24, 32), "bfloat16"), KernelPlan("matrix", 1, (1024,), 4)),
    "everything": (_all_operators(), KernelPlan("warp", 4, (64,), 4)),
}


def _program(name: str) -> Program:
    graph, plan = CASES[name]
    return emit(plan_kernel(schedule_operators(graph, graph.operators), plan))


@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_to_safe_code(name: str, tmp_path: Path) -> None:
    program = _program(name)
    path = tmp_path / "kernels.py"
    path.write_text(program.source)
    for kernel, launch in launch_specs(program).items():
        source = compile_triton(path, kernel, launch, "sm_90")
        verdict = validate(source.cubin)
        assert verdict.safe, verdict.findings[:3]


@pytest.mark.parametrize("make", [PACKED["dynamic"], DYNAMIC["dropout"]])
def test_packed_kernels_and_random_numbers_compile(
    make: Callable[[], Graph], tmp_path: Path
) -> None:
    graph = make()
    program = generate(graph, graph.operators)
    path = tmp_path / "kernels.py"
    path.write_text(program.source)
    ((name, launch),) = launch_specs(program).items()
    kernel = SassProgram.from_cubin(compile_triton(path, name, launch, "sm_90").cubin).kernel()
    assert kernel.name == name


def _softmax_dropout(words: int) -> Graph:
    build = Builder()
    x = build("cast", build.input((64, 2048), "float16"), dtype="float32")
    powers = build("exp", build("sub", x, build("amax", x, dims=(1,), keepdim=True)))
    shares = build("div", powers, build("sum", powers, dims=(1,), keepdim=True))
    seed = build.input((1,), "int64")
    drawn = build("random", seed, shape=(64, 2048), dtype="float32", words=words)
    shares = build("cast", shares, dtype="float16")
    kept = build("mul", build("gt", drawn, build.constant(0.1)), shares)
    scaled = build("mul", kept, build.constant(1 / 0.9))
    return build.graph(build("cast", scaled, dtype="float16"))


@pytest.mark.parametrize(
    "plan", [KernelPlan("block", 1, (2048,), 4), KernelPlan("block", 2, (2048,), 4)]
)
def test_neighbouring_elements_share_a_philox_counter(plan: KernelPlan, tmp_path: Path) -> None:
    """Philox takes 20 wide multiplications for four (or eight) elements, and there are no layout
    conversions."""
    found = {}
    for words in (1, 4, 8):
        graph = _softmax_dropout(words)
        program = emit(plan_kernel(schedule_operators(graph, graph.operators), plan))
        path = tmp_path / f"kernels_{words}.py"
        path.write_text(program.source)
        ((name, launch),) = launch_specs(program).items()
        cubin = compile_triton(path, name, launch, "sm_90").cubin
        found[words] = cubin_opcodes(cubin)
    wide = {
        words: sum(code.startswith(("IMAD.WIDE", "IMAD.HI")) for code in codes)
        for words, codes in found.items()
    }
    elements = plan.rows * 2048 // (32 * plan.num_warps)
    assert wide[1] >= 16 * elements
    assert wide[4] <= 20 * elements / 4 <= wide[1] / 3
    assert wide[8] <= 20 * elements / 8
    assert len(found[8]) < len(found[4]) - 5 * elements < len(found[1]) / 2
    shared = [sum(code.startswith(("STS", "LDS")) for code in codes) for codes in found.values()]
    assert shared[0] == shared[1] == shared[2]


def test_softmax_with_dropout_takes_few_instructions(tmp_path: Path) -> None:
    """At most 21.7 per element; 28.3 with 32-bit words and two multiplications by the mask."""
    graph, plan = _softmax_dropout(8), KernelPlan("block", 1, (2048,), 2)
    program = emit(plan_kernel(schedule_operators(graph, graph.operators), plan))
    elements = 2048 / (32 * plan.num_warps)
    for codes in opcodes_by_version(program, tmp_path):
        assert sum(not code.startswith("NOP") for code in codes) <= 21.7 * elements
        # Random bits are not converted to floats; exp, division and dropout are a product each.
        assert not any(code.startswith("I2F") for code in codes)
        assert sum(code == "FMUL" for code in codes) <= 3.2 * elements


def test_flat_kernels_load_vectors(tmp_path: Path) -> None:
    """For any number of rows, because the mask text shows that it ends at a multiple of a row."""
    graph = DYNAMIC["bias and gelu"]()
    schedule = schedule_operators(graph, graph.operators)
    program = emit(plan_kernel(schedule, KernelPlan("thread", 1, (512,), 2)))
    path = tmp_path / "kernels.py"
    path.write_text(program.source)
    ((name, launch),) = launch_specs(program).items()
    cubin = compile_triton(path, name, launch, "sm_90").cubin
    loads = {
        i.opcode
        for i in SassProgram.from_cubin(cubin).kernel().instructions
        if i.opcode.startswith("LDG")
    }
    assert any(".128" in opcode for opcode in loads), loads


def _unaligned_norm(columns: int) -> Graph:
    """A layer norm multiplied by another input, in fp16."""
    build = Builder()
    x, other = (build.input((64, columns), "float16") for _ in range(2))
    weight = build.input((columns,), "float16")
    mean = build("mul", build("sum", x, dims=(1,), keepdim=True), build.constant(1 / columns))
    centred = build("sub", x, mean)
    square = build("sum", build("square", centred), dims=(1,), keepdim=True)
    normed = build("mul", build("mul", centred, build("rsqrt", square)), weight)
    return build.graph(build("cast", build("mul", normed, other), dtype="float16"))


@pytest.mark.parametrize(
    ("columns", "chunks", "warps", "access"),
    [(5000, (1024,) * 5, 4, "128"), (768, (256,) * 3, 1, "128"), (2500, (512,) * 5, 4, "64")],
)
def test_accesses_are_as_wide_as_rows_are_aligned_without_layout_conversions(
    columns: int, chunks: tuple[int, ...], warps: int, access: str, tmp_path: Path
) -> None:
    graph = _unaligned_norm(columns)
    scheme = "warp" if warps == 1 else "block"
    program = emit(
        plan_kernel(
            schedule_operators(graph, graph.operators), KernelPlan(scheme, 1, chunks, warps)
        ),  # type: ignore[arg-type]
    )
    path = tmp_path / "kernels.py"
    path.write_text(program.source)
    ((name, launch),) = launch_specs(program).items()
    cubin = compile_triton(path, name, launch, "sm_90").cubin
    codes = cubin_opcodes(cubin)
    of_memory = {code for code in codes if code.startswith(("LDG", "STG"))}
    assert of_memory == {f"LDG.E.{access}", f"STG.E.{access}"}
    # No layout conversions: shared memory only holds one value of each warp.
    assert not {code for code in codes if code.startswith(("STS.", "LDS.", "LDSM"))}
    barriers = [at for at, code in enumerate(codes) if code.startswith("BAR")]
    assert len(barriers) <= (3 if warps > 1 else 0)
    # Both inputs with rows are loaded before the first barrier.
    if barriers:
        before = [code for code in codes[: barriers[0]] if code.startswith("LDG")]
        assert len(before) >= 2 * len(chunks)


MAX_INSTRUCTIONS_PER_ELEMENT = {"erf": 17.5, "tanh": 11.5, "sigmoid": 4}
"""libdevice's erf takes 28 and its tanh 17 (Triton 3.6: 22), with branches."""


def test_special_functions_have_no_branches_and_few_instructions(tmp_path: Path) -> None:
    build = Builder()
    x = build.input((8, 8192), "float32")
    counts = {}
    for op in ("neg", *MAX_INSTRUCTIONS_PER_ELEMENT):
        graph = build.graph(build(op, x))
        program = emit(
            plan_kernel(
                schedule_operators(graph, graph.operators), KernelPlan("thread", 1, (4096,), 8)
            )
        )
        codes = opcodes(program, tmp_path)
        counts[op] = sum(not code.startswith("NOP") for code in codes)
        # One for a masked store and one behind the end; none for the 16 elements.
        assert sum(code.startswith("BRA") for code in codes) <= 2
    each = {op: (counts[op] - counts["neg"]) / 16 for op in MAX_INSTRUCTIONS_PER_ELEMENT}
    assert {
        op: most for op, most in MAX_INSTRUCTIONS_PER_ELEMENT.items() if each[op] > most
    } == {}, each


def _gelu_times(op: str) -> Graph:
    """GELU as PyTorch decomposes it, with tanh or erf, times another input, in fp16."""
    build = Builder()
    given, other = build.input((64, 4096), "float16"), build.input((64, 4096), "float16")
    x = build("cast", given, dtype="float32")
    if op == "tanh":
        cubic = build("mul", build("mul", build("mul", x, x), x), build.constant(0.044715))
        inner = build("mul", build("add", x, cubic), build.constant(0.7978845608028654))
    else:
        inner = build("mul", x, build.constant(0.7071067811865476))
    half = build("mul", x, build.constant(0.5))
    gelu = build("mul", half, build("add", build(op, inner), build.constant(1)))
    return build.graph(build("mul", build("cast", gelu, dtype="float16"), other))


@pytest.mark.parametrize(("op", "each"), [("tanh", 17), ("erf", 21)])
def test_gelu_takes_half_of_the_memory_time(op: str, each: float, tmp_path: Path) -> None:
    """An H200 can issue 42 instructions while it copies the 6 bytes of an element."""
    graph = _gelu_times(op)
    program = emit(
        plan_kernel(schedule_operators(graph, graph.operators), KernelPlan("thread", 1, (1024,), 4))
    )
    for codes in opcodes_by_version(program, tmp_path):
        assert len(codes) <= 8 * each
        assert sum(code == "MUFU.EX2" for code in codes) == 8
        assert sum(code == "MUFU.RCP" for code in codes) == 8


def _minus_one_or_zero(case: str) -> Graph:
    """A bf16 output for which LLVM can derive that values are -1 or 0 (or 1)."""
    build = Builder()
    x = build.input((64, 512), "bfloat16")
    if case == "sign":
        return build.graph(build("sign", x))
    mask = build("gt", x, build.constant(0.0))
    dtype = "int64" if case == "a mask less 1, long" else "int32"
    number = build("cast", mask, dtype=dtype)
    if case == "neg":
        number = build("neg", number)
    else:
        number = build("sub", number, build.constant(1, dtype))
    return build.graph(build("cast", number, dtype="bfloat16"))


@pytest.mark.parametrize("case", ["sign", "neg", "a mask less 1", "a mask less 1, long"])
def test_minus_one_keeps_its_sign_in_pairs_of_bf16(case: str, tmp_path: Path) -> None:
    """The LLVM of Triton 3.6 turns -1 into 1 if it converts a pair of bools to signed bf16."""
    graph = _minus_one_or_zero(case)
    program = emit(
        plan_kernel(schedule_operators(graph, graph.operators), KernelPlan("thread", 1, (512,), 4))
    )
    for codes in opcodes_by_version(program, tmp_path):
        assert "LDG.E.64" in codes  # pairs
        assert not any(code.startswith("I2F.BF16") for code in codes)


def test_the_oldest_triton_compiles_all_operators(tmp_path: Path) -> None:
    assert oldest_triton.shared_bytes(_program("everything"), tmp_path) >= 0


def test_results_of_partial_reductions_need_no_layout_conversion(tmp_path: Path) -> None:
    """A conversion in Triton 3.6 would take 1,024 stores to shared memory for each warp."""
    from tests.unit.fusion.codegen.interpreted.online_rows import lse_and_softmax

    graph = lse_and_softmax((64, 131072), "float16")
    program = emit(
        plan_kernel(
            schedule_operators(graph, graph.operators),
            KernelPlan("split", 1, (4096,), 16, splits=16),
        )
    )
    *_, (last, _) = oldest_triton.compile_program(program, tmp_path)
    codes = cubin_opcodes(last)
    assert not any(code.startswith(("STS", "BAR")) for code in codes)


def _softmax_of_a_product(columns: int) -> Graph:
    build = Builder()
    x = build("mul", build.input((64, columns)), build.input((columns,)))
    highest = build("amax", x, dims=(1,), keepdim=True)
    powers = build("exp", build("sub", x, highest))
    return build.graph(build("div", powers, build("sum", powers, dims=(1,), keepdim=True)))


@pytest.mark.parametrize(
    "plan",
    [
        KernelPlan("block", 1, (4096,), 8),
        KernelPlan("looped", 1, (1024,), 4),
        KernelPlan("split", 1, (1024,), 4, 4),
    ],
    ids=str,
)
def test_a_product_minus_its_maximum_is_not_contracted(plan: KernelPlan, tmp_path: Path) -> None:
    """An FMA would give the rounding error of the product (1e30 for 1e37) instead of 0."""
    graph = _softmax_of_a_product(4096)
    program = emit(plan_kernel(schedule_operators(graph, graph.operators), plan))
    fused = []
    as_it_was = re.sub(r"libdevice\.sub_rn\(([^,()]+), ([^,()]+)\)", r"(\1 - \2)", program.source)
    assert as_it_was != program.source
    for name, source in (("apart", program.source), ("fused", as_it_was)):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        codes = [
            instruction.opcode
            for kernel, launch in launch_specs(program).items()
            for instruction in SassProgram.from_cubin(
                compile_triton(path, kernel, launch, "sm_90").cubin
            )
            .kernel()
            .instructions
        ]
        fused.append(sum(code.startswith("FFMA") for code in codes))
    assert fused[0] < fused[1]
    each = plan.chunks[0] // (32 * plan.num_warps)
    assert fused[1] - fused[0] >= each, fused


def test_large_outputs_are_stored_with_evict_first(tmp_path: Path) -> None:
    build = Builder()
    graph = build.graph(build("exp", build.input((16384, 2048), "float16")))
    schedule, plan = schedule_operators(graph, graph.operators), KernelPlan("thread", 1, (1024,), 4)
    for streamed in (False, True):
        program = emit(plan_kernel(schedule, replace(plan, evict_first=streamed)))
        for codes in opcodes_by_version(program, tmp_path):
            stores = [code for code in codes if code.startswith("STG.")]
            assert stores and {".EF" in code for code in stores} == {streamed}
            waits = [at for at, code in enumerate(codes) if code.startswith("BAR.SYNC")]
            assert len(waits) == streamed and all(at < codes.index(stores[0]) for at in waits)
