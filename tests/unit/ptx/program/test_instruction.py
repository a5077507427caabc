"""Registers and resources of instructions, by the table of opcodes."""

from __future__ import annotations

import pytest

from nostall.ptx.program.instruction import Instruction
from nostall.ptx.program.opcodes import RULES, find_rule
from nostall.ptx.program.resources import Resource
from tests.unit.ptx.ptx_texts import module


def instruction(text: str, registers: str = "") -> Instruction:
    (kernel,) = module(f"{registers}\n{text}").kernels
    return kernel.instructions[0]


def registers(names: frozenset[str | Resource]) -> set[str]:
    return {name for name in names if isinstance(name, str)}


@pytest.mark.parametrize(
    ("text", "reads", "writes"),
    [
        ("add.s32 %r1, %r2, %r3;", "%r2 %r3", "%r1"),
        ("@%p1 add.s32 %r1, %r2, 7;", "%p1 %r1 %r2", "%r1"),
        ("@!%p1 st.global.b32 [%rd1+4], %r2;", "%p1 %rd1 %r2", ""),
        ("mov.b64 {%r1, %r2}, %rd3;", "%rd3", "%r1 %r2"),
        ("mov.b64 {_, %r2}, %rd3;", "%rd3", "%r2"),
        ("mov.b64 %rd3, {%r1, %r2};", "%r1 %r2", "%rd3"),
        ("ld.global.v4.b32 {%r1, %r2, _, %r4}, [%rd1];", "%rd1", "%r1 %r2 %r4"),
        ("setp.lt.and.s32 %p1|%p2, %r1, %r2, !%p3;", "%r1 %r2 %p3", "%p1 %p2"),
        ("lop3.or.b32 %r1|%p1, %r2, %r3, %r4, 0x1, %p2;", "%r2 %r3 %r4 %p2", "%r1 %p1"),
        ("shfl.sync.bfly.b32 %r1|%p1, %r2, 16, 31, -1;", "%r2", "%r1 %p1"),
        ("elect.sync _|%p1, -1;", "", "%p1"),
        ("atom.global.add.u32 %r1, [%rd1], %r2;", "%rd1 %r2", "%r1"),
        ("atom.global.add.u32 _, [%rd1], %r2;", "%rd1 %r2", ""),
        ("red.global.add.u32 [%rd1], %r2;", "%rd1 %r2", ""),
        ("bar.red.popc.u32 %r1, 0, %p1;", "%p1", "%r1"),
        ("bar.sync %r1, %r2;", "%r1 %r2", ""),
        ("mbarrier.arrive.shared.b64 %rd1, [%r1];", "%r1", "%rd1"),
        ("mbarrier.arrive.shared::cluster.b64 [%r1], 1;", "%r1", ""),
        ("mbarrier.try_wait.shared.b64 %p1, [%r1], %rd1;", "%r1 %rd1", "%p1"),
        ("tex.2d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%rd1, {%r1,%r2}];", "%rd1 %r1 %r2",
         "%f1 %f2 %f3 %f4"),
        ("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1, %r2}, [%r3];", "%r3", "%r1 %r2"),
        ("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%r3], {%r1, %r2};", "%r1 %r2 %r3", ""),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1,%f2}, {%r1}, {%r2}, {%f1,%f3};",
         "%r1 %r2 %f1 %f3", "%f1 %f2"),
        ("cp.async.cg.shared.global [%r1], [%rd1], 16, %r2;", "%r1 %rd1 %r2", ""),
        ("tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3];", "%r3", "%r1 %r2"),
        ("tcgen05.st.sync.aligned.32x32b.x2.b32 [%r3], {%r1, %r2};", "%r1 %r2 %r3", ""),
        ("wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1,%f2,%f3,%f4}, %rd1, %rd2, %p1,"
         " 1, 1, 0, 0;", "%f1 %f2 %f3 %f4 %rd1 %rd2 %p1", "%f1 %f2 %f3 %f4"),
        ("call (%r1), k, (%r2);", "%r1 %r2", "%r1 %r2"),
        ("frobnicate.b32 %r1, [%rd1], %r2;", "%r1 %rd1 %r2", "%r1 %rd1 %r2"),
        ("mov.u32 %r1, %tid.x;", "", "%r1"),
        ("add.s32 %r1, %undeclared, 1;", "%undeclared %r1", "%undeclared %r1"),
        ("add.s32 %r1, undeclared, 1;", "undeclared %r1", "undeclared %r1"),
        ("add.s32 %r01, WARP_SZ, %r002;", "%r2", "%r1"),
        ("add .cc .u32 %r1, %r2, 1;", "%r2", "%r1"),
        ("bra.uni somewhere;", "", ""),
    ],
)  # fmt: skip
def test_registers(text: str, reads: str, writes: str) -> None:
    found = instruction(text)
    assert registers(found.reads) == set(reads.split())
    assert registers(found.writes) == set(writes.split())


@pytest.mark.parametrize(
    ("declaration", "text", "reads", "writes"),
    [
        (".reg .v4 .f32 v;", "mov.f32 v.x, %f1;", "%f1 v", "v"),
        (".reg .v2 .f32 v<3>;", "mov.f32 %f1, v2.y;", "v2", "%f1"),
        (".reg .b64 %SP, %SPL;", "add.u64 %SP, %SPL, 8;", "%SPL", "%SP"),
        (".reg .b32 sum; .reg .b32 acc<2>;", "add.s32 sum, acc1, acc0;", "acc0 acc1", "sum"),
        (".reg.b32 sum, acc<2>;", "add.s32 sum, acc1, acc0;", "acc0 acc1", "sum"),
        (".reg .b32 acc<0xb>, old<012>;", "add.s32 acc10, old9, 1;", "old9", "acc10"),
        (".shared .b32 s[4];", "atom.shared.add.u32 %r1, s[4], %r2;", "%r2", "%r1"),
        (".reg.v4.f32 v;", "mov.f32 v .x, %f1;", "%f1 v", "v"),
        ("", "vadd.s32.s32.s32 %r1.h0, %r2.b1, %r3, %r1;", "%r1 %r2 %r3", "%r1"),
    ],
)
def test_named_and_partial_registers(declaration: str, text: str, reads: str, writes: str) -> None:
    found = instruction(text, declaration)
    assert registers(found.reads) == set(reads.split())
    assert registers(found.writes) == set(writes.split())


def test_a_scope_has_registers_of_its_own() -> None:
    body = """
    { .reg .b32 t; mov.b32 t, %r1; { .reg .b32 t; mov.b32 t, 1; mov.b32 %r2, t; } mov.b32 %r3, t; }
    { .reg .b32 t; mov.b32 t, %r1; }
    """
    (kernel,) = module(body).kernels
    written = [registers(i.writes) for i in kernel.instructions]
    assert written[:6] == [{"t@1"}, {"t@2"}, {"%r2"}, {"%r3"}, {"t@3"}, set()]
    assert [registers(i.reads) for i in kernel.instructions][2:4] == [{"t@2"}, {"t@1"}]


@pytest.mark.parametrize(
    ("text", "resource"),
    [
        ("add.cc.u32 %r1, %r2, %r3;", Resource.CARRY),
        ("mad.lo.cc.u32 %r1, %r2, %r3, %r4;", Resource.CARRY),
        ("addc.cc.u32 %r1, %r2, %r3;", Resource.CARRY),
        ("add .cc .u32 %r1, %r2, %r3;", Resource.CARRY),
        ("ld .volatile .global .u32 %r1, [%rd1];", Resource.FENCE),
        ("mov.u32 %r1, undeclared;", Resource.FENCE),
        ("st.shared.b32 [%r1], %r2;", Resource.SHARED),
        ("st.b32 [%rd1], %r2;", Resource.LOCAL),
        ("ld.volatile.global.b32 %r1, [%rd1];", Resource.FENCE),
        ("ld.acquire.gpu.global.b32 %r1, [%rd1];", Resource.FENCE),
        ("mov.u64 %rd1, %clock64;", Resource.FENCE),
        ("mov.u32 %r1, %globaltimer_lo;", Resource.FENCE),
        ("mov.u32 %r1, %pm3;", Resource.FENCE),
        ("mov.u32 %r1, %brand_new;", Resource.FENCE),
        ("bar.warp.sync -1;", Resource.CONVERGENCE),
        ("wgmma.wait_group.sync.aligned 0;", Resource.WGMMA),
        ("tcgen05.wait::ld.sync.aligned;", Resource.TCGEN05),
    ],
)
def test_written_resources(text: str, resource: Resource) -> None:
    assert resource in instruction(text).writes


@pytest.mark.parametrize(
    "text",
    [
        "ld.param.b64 %rd1, [a];",
        "ld.param.b64 %rd1, [b+4];",
        "mov.u32 %r1, %ctaid.x;",
        "mov.u32 %r1, %envreg5;",
        "shf.l.wrap.b32 %r1, %r2, %r3, %r4;",
        "createpolicy.fractional.L2::evict_first.b64 %rd1, 1.0;",
    ],
)
def test_pure_instructions_touch_registers_only(text: str) -> None:
    found = instruction(text)
    assert not {n for n in found.reads | found.writes if isinstance(n, Resource)}


def test_the_carry_flag_is_read() -> None:
    for opcode in ("addc.u32", "subc.u32", "madc.lo.u32"):
        assert Resource.CARRY in instruction(f"{opcode} %r1, %r2, %r3, %r4;").reads
    assert Resource.CARRY not in instruction("sub.u32 %r1, %r2, %r3;").reads


def test_unknown_opcodes_are_counted_by_name() -> None:
    found = module("frob.b32 %r1;\nfrob.b32 %r2;\nmov.b32 %r1, 0;\nmultimem.new %r1;")
    assert found.unknown_opcodes == {"frob.b32": 2, "multimem.new": 1}
    assert module("mov.b32 %r1, undeclared;").unknown_opcodes == {"mov.b32": 1}


def test_the_longest_row_holds() -> None:
    assert find_rule("bar.warp.sync") is RULES["bar.warp.sync"]
    assert find_rule("bar.sync.fresh") is RULES["bar.sync"]
    assert find_rule("tcgen05.wait::st.sync.aligned") is RULES["tcgen05.wait"]
    assert [find_rule(o) for o in ("barrel.sync", "bar.fresh", "mbarrier.fresh", "wgmma")] == (
        [None] * 4
    )
