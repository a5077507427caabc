"""Which pairs of instructions keep their order, and which are free: one row for each rule."""

from __future__ import annotations

import pytest

from nostall.ptx.program.blocks import Block
from nostall.ptx.schedule.space import BlockGraph, build_graph
from tests.unit.ptx.ptx_texts import module


def graph(body: str, outer: str = "") -> BlockGraph:
    """The dependences of the only outer block of a kernel."""
    (kernel,) = module(body, outer=outer).kernels
    blocks: tuple[Block, ...] = kernel.outer_blocks
    assert len(blocks) == 1, [len(block) for block in blocks]
    return build_graph(blocks[0])


def is_free(body: str, first: int, last: int) -> bool:
    """Whether no chain of dependences leads from unit ``first`` to unit ``last``."""
    found = graph(DECLARATIONS + body)
    before: set[int] = set()
    todo = [last]
    while todo:
        new = found.predecessors[todo.pop()] - before
        before |= new
        todo += new
    return first not in before


DECLARATIONS = ".reg .b64 %SP, %SPL; .reg .v2 .f32 v; .param .b32 p0;\n"
MMA = (
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, "
    "{%r5,%r6}, {%f1,%f2,%f3,%f4};"
)

WGMMA = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, "
    "%rd2, 1, 1, 1, 0;"
)
COPY = "cp.async.ca.shared.global [%r1], [%rd1], 4;"
TCGEN05_LD = "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r1, %r2}, [%r3];"
CALL = "{ .param .b32 p; st.param.b32 [p], %r1; call f, (p); }"

ORDERED = {
    # Registers.
    "read after write": "add.s32 %r1, %r2, 1; add.s32 %r3, %r1, 1;",
    "write after read": "add.s32 %r3, %r1, 1; add.s32 %r1, %r2, 1;",
    "write after write": "mov.b32 %r1, 1; mov.b32 %r1, 2;",
    "guarded write after write": "mov.b32 %r1, 1; @%p1 mov.b32 %r1, 2;",
    "write after guarded write": "@%p1 mov.b32 %r1, 1; mov.b32 %r1, 2;",
    "opposite guards": "@%p1 mov.b32 %r1, 1; @!%p1 mov.b32 %r1, 2;",
    "guard": "setp.eq.s32 %p1, %r1, 0; @!%p1 mov.b32 %r2, 2;",
    "write after guard": "@%p1 mov.b32 %r2, 2; setp.eq.s32 %p1, %r1, 0;",
    "second predicate of a pair": "setp.eq.s32 %p2|%p1, %r1, 0; @%p1 mov.b32 %r2, 2;",
    "address": "add.s64 %rd1, %rd2, 4; st.global.b32 [%rd1], %r1;",
    "post address": "ld.global.b32 %r1, [%rd1]; add.s64 %rd1, %rd2, 4;",
    "vector element": "mov.b64 {%r1, %r2}, %rd1; add.s32 %r3, %r2, 1;",
    "stack pointer": "add.u64 %SP, %SPL, 8; mov.u64 %rd1, %SP;",
    "part of a vector register": "mov.f32 v.x, %f1; mov.f32 %f2, v.y;",
    "undeclared name": "mov.b32 %x, 1; mov.b32 %r1, %x;",
    "undeclared name is a fence": "mov.b32 %r1, nowhere; ld.global.b32 %r2, [%rd1];",
    "leading zero": "mov.b32 %r01, 1; mov.b32 %r2, %r1;",
    "unknown opcode writes its operands": "mov.b32 %r1, %r2; frob.b32 %r3, %r2;",
    "unknown opcode reads its operands": "frob.b32 %r3, %r2; mov.b32 %r1, %r3;",
    # The carry flag.
    "carry chain": "add.cc.u32 %r1, %r2, %r3; addc.u32 %r4, %r5, %r6;",
    "two carry chains": "add.cc.u32 %r1, %r2, %r3; add.cc.u32 %r4, %r5, %r6;",
    "carry overwritten": "addc.u32 %r1, %r2, %r3; sub.cc.u32 %r4, %r5, %r6;",
    "carry of mad": "mad.lo.cc.u32 %r1, %r2, %r3, %r4; madc.hi.u32 %r5, %r6, %r7, %r8;",
    # Memory.
    "load above store": "st.global.b32 [%rd1], %r1; ld.global.b32 %r2, [%rd2];",
    "store above load": "ld.shared.b32 %r2, [%r3]; st.shared.b32 [%r1], %r4;",
    "two stores": "st.global.b32 [%rd1], %r1; st.global.b32 [%rd2], %r2;",
    "generic load": "st.shared.b32 [%r1], %r2; ld.b32 %r3, [%rd1];",
    "generic store": "ld.local.b32 %r1, [%rd2]; st.b32 [%rd1], %r2;",
    "cluster and block": "st.shared::cta.b32 [%r1], %r2; ld.shared::cluster.b32 %r3, [%r4];",
    "volatile loads": "ld.volatile.global.b32 %r1, [%rd1]; ld.volatile.shared.b32 %r2, [%r3];",
    "load above acquire": "ld.acquire.gpu.global.b32 %r1, [%rd1]; ld.global.b32 %r2, [%rd2];",
    "store below release": "st.shared.b32 [%r1], %r2; st.release.gpu.global.b32 [%rd1], %r3;",
    "qualifier that is not known": "ld.global.fresh.b32 %r1, [%rd1]; ld.global.b32 %r2, [%rd2];",
    "relaxed": "ld.relaxed.gpu.global.b32 %r1, [%rd1]; ld.relaxed.gpu.global.b32 %r2, [%rd1];",
    "atomics": "atom.global.add.u32 %r1, [%rd1], 1; red.shared.add.u32 [%r2], 1;",
    "load and atomic": "ld.global.b32 %r1, [%rd1]; atom.global.add.u32 %r2, [%rd2], 1;",
    "constant load and atomic": "atom.global.add.u32 %r2, [%rd2], 1; ld.global.nc.b32 %r1, [%rd1];",
    "membar": "st.global.b32 [%rd1], %r1; membar.gl;",
    "fence": "fence.acq_rel.gpu; ld.global.b32 %r1, [%rd1];",
    "texture": "st.global.b32 [%rd1], %r1; tex.1d.v2.f32.s32 {%f1,%f2}, [%rd2,{%r2}];",
    "surface": "suld.b.1d.b32.trap {%r1}, [%rd1, {%r2}]; ld.global.b32 %r3, [%rd2];",
    "asynchronous copy and load": f"{COPY} ld.shared.b32 %r2, [%r3];",
    "asynchronous copy and its wait": f"{COPY} cp.async.wait_all;",
    "load above wait": "cp.async.wait_group 0; ld.shared.b32 %r2, [%r3];",
    "barrier": "st.shared.b32 [%r1], %r2; bar.sync 0;",
    "mbarrier": "mbarrier.arrive.shared.b64 %rd1, [%r1]; ld.shared.b32 %r2, [%r3];",
    "prefetch of a dependent launch": "griddepcontrol.wait; ld.global.nc.b32 %r1, [%rd1];",
    "clocks": "mov.u32 %r1, %clock; mov.u32 %r2, %clock;",
    "clock and load": "mov.u32 %r1, %clock; ld.global.b32 %r2, [%rd1];",
    "nanosleep": "nanosleep.u32 20; ld.global.b32 %r2, [%rd1];",
    "call and load": f"ld.global.b32 %r2, [%rd1]; {CALL}",
    "call and constant load": f"{CALL} ld.const.b32 %r2, [%rd1];",
    "call and trap": f"{CALL} trap;",
    "parameters of a call outside of a scope": "st.param.b32 [p0], %r1; ld.param.b32 %r2, [p0];",
    "unknown and load": "frob.b32 %r1; ld.global.b32 %r2, [%rd1];",
    "unknown and constant load": "ld.global.nc.b32 %r2, [%rd1]; frob.b32 %r1;",
    # Threads of a warp.
    "shuffle above warp barrier": "bar.warp.sync -1; shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;",
    "vote below warp barrier": "vote.sync.any.pred %p1, %p2, -1; bar.warp.sync -1;",
    "mma above warp barrier": f"bar.warp.sync -1; {MMA}",
    "mma below warp barrier": f"{MMA} bar.warp.sync -1;",
    "mma and barrier that threads may reach apart": f"{MMA} barrier.sync 0;",
    "ldmatrix and warp barrier":
        "bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2];",
    "activemask": "bar.warp.sync -1; activemask.b32 %r1;",
    "shuffles of two branches may meet":
        "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1; shfl.sync.bfly.b32 %r3, %r4, 1, 31, -1;",
    "shuffle and vote": "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1; vote.sync.any.pred %p1, %p2, -1;",
    "mma and a loop in a scope": f"{MMA} {{ L: setp.eq.s32 %p1, %r9, 0; @%p1 bra L; }}",
    "call and shuffle": f"{CALL} shfl.sync.bfly.b32 %r3, %r4, 1, 31, -1;",
    "shuffle and arrival of copies":
        "cp.async.mbarrier.arrive.noinc.shared.b64 [%r5]; shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;",
    # Asynchronous matrix instructions.
    "two wgmma": f"{WGMMA} {WGMMA.replace('%f', '%r5')}",
    "two tcgen05": f"{TCGEN05_LD} tcgen05.st.sync.aligned.32x32b.x1.b32 [%r5], {{%r6}};",
}  # fmt: skip

FREE = {
    "mma and barrier": f"{MMA} bar.sync 0;",
    "mma and aligned barrier": f"{MMA} barrier.cta.sync.aligned 0, 128;",
    "independent": "add.s32 %r1, %r2, 1; add.s32 %r3, %r2, 1;",
    "guards alike": "@%p1 add.s32 %r1, %r2, 1; @%p1 add.s32 %r3, %r2, 1;",
    "sink": "mov.b64 {%r1, _}, %rd1; mov.b64 {_, %r2}, %rd1;",
    "two loads": "ld.global.b32 %r1, [%rd1]; ld.global.b32 %r2, [%rd2];",
    "load and generic load": "ld.shared.b32 %r1, [%r3]; ld.b32 %r2, [%rd2];",
    "shared store and global load": "st.shared.b32 [%r3], %r1; ld.global.b32 %r2, [%rd2];",
    "global store and shared store": "st.global.b32 [%rd3], %r1; st.shared.b32 [%r2], %r4;",
    "local store and global load": "st.local.b32 [%rd3], %r1; ld.global.b32 %r2, [%rd2];",
    "constant load and store": "st.global.b32 [%rd1], %r1; ld.const.b32 %r2, [%rd2];",
    "read-only load and store": "st.global.b32 [%rd1], %r1; ld.global.nc.b32 %r2, [%rd2];",
    "read-only load and block barrier": "bar.sync 0; ld.global.nc.b32 %r2, [%rd2];",
    "parameter and fence": "membar.gl; ld.param.b64 %rd1, [a];",
    "parameter and call": f"{CALL} ld.param.b64 %rd1, [a];",
    "computation and fence": "membar.gl; add.s32 %r1, %r2, 1;",
    "computation and call": f"{CALL} add.s32 %r3, %r4, 1;",
    "computation and unknown": "frob.b32 %r1; add.s32 %r3, %r4, 1;",
    "computation and clock": "mov.u32 %r1, %clock; add.s32 %r3, %r4, 1;",
    "no carry": "add.cc.u32 %r1, %r2, %r3; shf.l.wrap.b32 %r4, %r5, %r6, %r7;",
    "mma and computation": f"{MMA} add.s32 %r7, %r8, 1;",
    "two mma": f"{MMA} {MMA.replace('%f', '%r1')}",
    "mma and shuffle": f"{MMA} shfl.sync.bfly.b32 %r7, %r8, 1, 31, -1;",
    "mma and asynchronous copy": f"{MMA} cp.async.ca.shared.global [%r7], [%rd1], 4;",
    "two ldmatrix": "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r2]; "
                    "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r3}, [%r4];",
    "other registers and wait": "wgmma.wait_group.sync.aligned 0; add.f32 %f6, %f7, %f7;",
    "same names in two scopes":
        "{ .reg .b32 t; mov.b32 t, %r1; add.s32 %r2, t, 1; } "
        "{ .reg .b32 t; mov.b32 t, %r3; add.s32 %r4, t, 1; }",
}  # fmt: skip

ASYNCHRONOUS = {
    "accumulator above wait":
        ("wgmma.wait_group.sync.aligned 0; add.f32 %f5, %f1, %f1; {USER}", False),
    "accumulator above commit":
        ("wgmma.commit_group.sync.aligned; add.f32 %f5, %f1, %f1; {USER}", False),
    "fragment below fence": ("mov.b32 %r1, %r9; wgmma.fence.sync.aligned; {USER}", False),
    "descriptor below fence": ("mov.b64 %rd2, %rd9; wgmma.fence.sync.aligned; {USER}", False),
    "copy of an accumulator above wait":
        ("wgmma.wait_group.sync.aligned 0; add.f32 %f5, %f6, %f6; {USER} mov.f32 %f7, %f1;"
         " mov.f32 %f6, %f7;", False),
    "other registers above wait":
        ("wgmma.wait_group.sync.aligned 0; add.f32 %f5, %f6, %f6; {USER}", True),
    "other registers below fence": ("mov.b32 %r8, %r9; wgmma.fence.sync.aligned; {USER}", True),
    "result above tcgen05.wait":
        ("tcgen05.wait::ld.sync.aligned; add.s32 %r7, %r1, 1; {LD}", False),
    "data below tcgen05.wait":
        ("mov.b32 %r2, 1; tcgen05.wait::st.sync.aligned; {LD}", False),
    "address below tcgen05.commit":
        ("mov.b32 %r3, 1; tcgen05.commit.cta_group::1.b64 [%rd1]; {LD}", False),
    "other registers above tcgen05.fence":
        ("tcgen05.fence::after_thread_sync; mov.b32 %r9, 1; {LD}", True),
}  # fmt: skip
"""Two units, whether they are free, and an asynchronous instruction elsewhere in the function."""


@pytest.mark.parametrize("body", ORDERED.values(), ids=ORDERED.keys())
def test_pairs_that_keep_their_order(body: str) -> None:
    assert not is_free(body, 0, 1)


@pytest.mark.parametrize("body", FREE.values(), ids=FREE.keys())
def test_pairs_that_are_free(body: str) -> None:
    assert is_free(body, 0, 1)


@pytest.mark.parametrize(("body", "free"), ASYNCHRONOUS.values(), ids=ASYNCHRONOUS.keys())
def test_registers_in_flight_cross_no_wait(body: str, free: bool) -> None:
    text = body.replace("{USER}", f"@%p1 bra L; {WGMMA} L:").replace(
        "{LD}", f"@%p1 bra L; {TCGEN05_LD} L:"
    )
    (kernel,) = module(text).kernels
    predecessors = build_graph(kernel.outer_blocks[0]).predecessors
    assert predecessors == (frozenset(), frozenset() if free else frozenset((0,)))


def test_freedom_counts_the_pairs_without_a_chain_between_them() -> None:
    assert graph("mov.b32 %r1, 1; mov.b32 %r2, 2; add.s32 %r3, %r1, %r2;").freedom == 1
    assert graph("mov.b32 %r1, 1; mov.b32 %r2, %r1; mov.b32 %r3, %r2;").freedom == 0


def test_an_order_is_legal_if_it_is_a_permutation_that_keeps_dependences() -> None:
    found = graph("mov.b32 %r1, 1; mov.b32 %r2, 2; add.s32 %r3, %r1, %r2;")
    assert found.is_legal((1, 0, 2))
    assert not found.is_legal((0, 2, 1))
    assert not found.is_legal((0, 1))
    assert not found.is_legal((0, 0, 2))


def test_registers_of_a_declaration_without_white_space_keep_their_order() -> None:
    body = "{.reg.b16 hl, hu;.reg.b32 fl;mov.b32 {hl, hu}, %r5;cvt.f32.f16 fl, hl;}"
    (kernel,) = module(body).kernels
    inner = build_graph(kernel.blocks[1])
    assert inner.predecessors == (frozenset(), frozenset((0,)))
