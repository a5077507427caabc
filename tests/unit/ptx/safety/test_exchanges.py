"""Which two neighbouring instructions the validator lets change places."""

from __future__ import annotations

import pytest

from tests.unit.ptx.safety.texts import compare

_WGMMA = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 "
    "{%r40,%r41,%r42,%r43}, {%r44,%r45,%r46,%r47}, %rd8, 1, 1, 1, 0;"
)
_SPARSE = (
    "wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.f16.f16 "
    "{%r55,%r56,%r57,%r58}, %rd11, %rd12, %r54, 0, 1, 1, 1, 0, 0;"
)
_STRONG_STORE = "st.volatile.shared.b32 [%r5], 1;"
_EXCHANGES = (
    "shfl.sync.idx.b32 %r1, %r2, 0, 31, -1;",
    "vote.sync.any.pred %p1, %p2, 7;",
    "elect.sync _|%p1, -1;",
    "redux.sync.max.s32 %r1, %r2, 15;",
    "match.all.sync.b32 %r1|%p1, %r2, -1;",
)
_SIGNALS = (
    "st.release.cta.global.b32 [%rd1], 1;",
    "st.relaxed.cluster.global.b32 [%rd1], 1;",
    "st.mmio.relaxed.sys.global.b32 [%rd1], 1;",
    "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5], %r6, [%r7];",
    "atom.global.exch.b32 %r8, [%rd1], 1;",
    "red.release.gpu.global.add.u32 [%rd1], 1;",
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 "
    "[%r5], %r6, [%r7];",
    "multimem.red.release.sys.global.add.u32 [%rd1], %r6;",
    "multimem.st.relaxed.sys.global.b32 [%rd1], %r6;",
    "mbarrier.arrive.shared.b64 %rd5, [%r5];",
    "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r5], 128;",
    "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r5];",
    "mbarrier.complete_tx.relaxed.cta.shared.b64 [%r5], 64;",
    "cp.async.mbarrier.arrive.noinc.shared.b64 [%r5];",
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r5], [%rd1], 64, [%r6];",
    "cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 "
    "[%r5], [%r6], 64, [%r7];",
    "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];",
    "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 "
    "[%r5], [%r6];",
    "griddepcontrol.launch_dependents;",
)
_LEGAL = {
    "arithmetic": ("add.s32 %r1, %r2, %r3;", "sub.s32 %r4, %r2, %r3;"),
    "weak loads of one location": ("ld.global.b32 %r1, [%rd1];", "ld.global.b32 %r2, [%rd1];"),
    "weak generic loads": ("ld.b32 %r1, [%rd1];", "ld.b32 %r2, [%rd2];"),
    "load and store of disjoint spaces": (
        "ld.shared.b32 %r1, [%r2];",
        "st.global.b32 [%rd1], %r3;",
    ),
    "stores of disjoint spaces": ("st.shared.b32 [%r1], %r2;", "st.global.b32 [%rd1], %r3;"),
    "local load and shared store": ("ld.local.b32 %r1, [stack];", "st.shared.b32 [buffer], %r2;"),
    "kernel parameter and store": ("ld.param.b32 %r1, [n];", "st.b32 [%rd1], %r3;"),
    "kernel parameter and dependent launch": ("ld.param.b32 %r1, [n];", "griddepcontrol.wait;"),
    "constant load and store": ("ld.const.b32 %r1, [%rd1];", "st.global.b32 [%rd2], %r2;"),
    "non-coherent load and barrier": ("ld.global.nc.b32 %r1, [%rd1];", "bar.sync 0;"),
    "texture and load": (
        "tex.1d.v4.f32.s32 {%f1,%f2,%f3,%f4}, [%rd1, {%r2}];",
        "ld.global.b32 %r1, [%rd2];",
    ),
    "surface loads": (
        "suld.b.1d.b32.trap {%r1}, [%rd1, {%r2}];",
        "suld.b.1d.b32.trap {%r3}, [%rd1, {%r4}];",
    ),
    "prefetch and load": ("prefetch.global.L2 [%rd1];", "ld.global.b32 %r1, [%rd1];"),
    "arithmetic and barrier": ("add.s32 %r1, %r2, %r3;", "bar.sync 0;"),
    "matrix transposition and barrier": (
        "movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;",
        "bar.sync 0;",
    ),
    "arithmetic and clock": ("add.s32 %r1, %r2, %r3;", "mov.u32 %r4, %clock;"),
    "constant special registers": ("mov.u32 %r1, %tid.x;", "mov.u32 %r2, %ctaid.y;"),
    "matrix products": (
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%f1,%f2,%f3,%f4}, {%r1,%r2,%r3,%r4}, "
        "{%r5,%r6}, {%f1,%f2,%f3,%f4};",
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r7,%r8}, {%r1}, {%r5}, {%r7,%r8};",
    ),
    "matrix product and shuffle": (
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r7,%r8}, {%r1}, {%r5}, {%r7,%r8};",
        "shfl.sync.bfly.b32 %r2, %r3, 1, 31, -1;",
    ),
    "matrix loads": (
        "ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r1,%r2}, [%r3];",
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%r4,%r5}, [%r6];",
    ),
    "matrix load and global store": (
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r3];",
        "st.global.b32 [%rd1], %r4;",
    ),
    "shuffle and load": ("shfl.sync.bfly.b32 %r2, %r3, 1, 31, -1;", "ld.global.b32 %r1, [%rd1];"),
    "shuffle and asynchronous copy": (
        "shfl.sync.bfly.b32 %r2, %r3, 1, 31, -1;",
        "cp.async.cg.shared.global [%r1], [%rd1], 16;",
    ),
    "shuffle and wait of a product": (
        "shfl.sync.bfly.b32 %r2, %r3, 1, 31, -1;",
        "wgmma.wait_group.sync.aligned 0;",
    ),
    "vote and acquire": ("vote.sync.any.pred %p1, %p2, -1;", "ld.acquire.gpu.b32 %r1, [%rd1];"),
    "carry and other arithmetic": ("add.cc.u32 %r1, %r2, %r3;", "add.u32 %r4, %r5, %r6;"),
    "unknown and other arithmetic": ("new.thing.b32 %r1, %r2;", "add.u32 %r4, %r5, %r6;"),
    "sinks": ("mov.b64 {%r1, _}, %rd1;", "mov.b64 {_, %r2}, %rd2;"),
    "other register after a fence": ("wgmma.fence.sync.aligned;", "add.s32 %r1, %r2, %r3;"),
    "descriptor after a fence": ("wgmma.fence.sync.aligned;", "mov.b64 %rd9, %rd10;"),
    "query of a handle": (
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p1, %rd1;",
        "bar.sync 0;",
    ),
}
"""Case -> two instructions that may change places."""

_ILLEGAL = {
    "read after write": ("add.s32 %r1, %r2, %r3;", "add.s32 %r4, %r1, %r3;"),
    "write after read": ("add.s32 %r4, %r1, %r3;", "add.s32 %r1, %r2, %r3;"),
    "write after write": ("add.s32 %r1, %r2, %r3;", "sub.s32 %r1, %r2, %r3;"),
    "named register": ("mov.b32 named, %r1;", "add.s32 %r2, named, 1;"),
    "stack pointer": ("cvta.local.u64 %SP, %SPL;", "add.u64 %rd1, %SP, 8;"),
    "part of a vector": ("mov.b64 {%r1, %r2}, %rd1;", "add.s32 %r3, %r2, 1;"),
    "second element with a sink": ("mov.b64 {_, %r2}, %rd1;", "add.s32 %r3, %r2, 1;"),
    "element of a vector register": ("mov.b32 %v.x, %r1;", "mov.b32 %v.y, %r2;"),
    "byte of a register": ("vadd.u32.u32.u32 %r1.b0, %r2.b1, %r3.b2, %r1;", "mov.b32 %r4, %r1;"),
    "second predicate of a pair": ("setp.lt.s32 %p1|%p2, %r1, %r2;", "selp.b32 %r3, 1, 0, %p2;"),
    "negated predicate operand": ("setp.lt.s32 %p1, %r1, %r2;", "and.pred %p3, %p4, !%p1;"),
    "guard": ("setp.lt.s32 %p1, %r1, %r2;", "@%p1 add.s32 %r3, %r4, 1;"),
    "negated guard": ("setp.lt.s32 %p1, %r1, %r2;", "@!%p1 add.s32 %r3, %r4, 1;"),
    "guarded write before a read": ("@%p1 mov.b32 %r1, 0;", "add.s32 %r2, %r1, 1;"),
    "guarded writes": ("@%p1 mov.b32 %r1, 0;", "@!%p1 mov.b32 %r1, 1;"),
    "guarded load over a default": ("mov.u32 %r1, 0;", "@%p1 ld.global.b32 %r1, [%rd1];"),
    "shuffle's predicate": ("shfl.sync.up.b32 %r1|%p1, %r2, 1, 0, -1;", "@%p1 mov.b32 %r3, 1;"),
    "load and store": ("ld.global.b32 %r1, [%rd1];", "st.global.b32 [%rd2], %r2;"),
    "stores": ("st.shared.b32 [%r1], %r2;", "st.shared.b32 [%r3], %r4;"),
    "generic load and shared store": ("ld.b32 %r1, [%rd1];", "st.shared.b32 [%r2], %r3;"),
    "generic store and local load": ("st.b32 [%rd1], %r1;", "ld.local.b32 %r2, [stack];"),
    "shared::cluster and shared": (
        "st.shared::cluster.b32 [%r1], %r2;",
        "ld.shared.b32 %r3, [%r4];",
    ),
    "load and barrier": ("ld.shared.b32 %r1, [%r2];", "bar.sync 0;"),
    "store and barrier": ("st.shared.b32 [%r2], %r1;", "barrier.sync 0;"),
    "load and cluster barrier": ("ld.global.b32 %r1, [%rd2];", "barrier.cluster.wait;"),
    "load and fence": ("ld.global.b32 %r1, [%rd2];", "fence.acq_rel.gpu;"),
    "store and membar": ("st.global.b32 [%rd2], %r1;", "membar.gl;"),
    "volatile loads": (
        "ld.volatile.global.b32 %r1, [%rd1];",
        "ld.volatile.global.b32 %r2, [%rd2];",
    ),
    "volatile and weak load": ("ld.volatile.global.b32 %r1, [%rd1];", "ld.global.b32 %r2, [%rd2];"),
    "relaxed loads": ("ld.relaxed.gpu.b32 %r1, [%rd1];", "ld.relaxed.gpu.b32 %r2, [%rd2];"),
    "acquire and weak load": ("ld.acquire.gpu.b32 %r1, [%rd1];", "ld.b32 %r2, [%rd2];"),
    "release and weak store": (
        "st.global.b32 [%rd1], %r1;",
        "st.release.gpu.global.b32 [%rd2], 1;",
    ),
    "loads that fetch again": ("ld.global.cv.b32 %r1, [%rd1];", "ld.global.cv.b32 %r2, [%rd2];"),
    "atomics": ("atom.global.add.u32 %r1, [%rd1], 1;", "atom.global.add.u32 %r2, [%rd2], 1;"),
    "reductions": ("red.global.add.u32 [%rd1], 1;", "red.global.add.u32 [%rd2], 1;"),
    "load and atomic": ("ld.global.b32 %r2, [%rd2];", "atom.global.add.u32 %r1, [%rd1], 1;"),
    "asynchronous copy and commit": (
        "cp.async.cg.shared.global [%r1], [%rd1], 16;",
        "cp.async.commit_group;",
    ),
    "asynchronous wait and load": ("cp.async.wait_group 0;", "ld.shared.b32 %r1, [%r2];"),
    "mbarriers": ("mbarrier.init.shared.b64 [%r1], 1;", "mbarrier.init.shared.b64 [%r2], 1;"),
    "mbarrier result": ("mbarrier.arrive.shared.b64 %rd1, [%r1];", "mov.b64 %rd2, %rd1;"),
    "bulk copies": ("cp.async.bulk.commit_group;", "cp.async.bulk.wait_group.read 0;"),
    "dependent launch and load": ("griddepcontrol.wait;", "ld.global.b32 %r1, [%rd1];"),
    "dependent launch and constant load": ("griddepcontrol.wait;", "ld.global.nc.b32 %r1, [%rd1];"),
    "dependent launch and store": (
        "st.global.b32 [%rd1], %r1;",
        "griddepcontrol.launch_dependents;",
    ),
    "clocks": ("mov.u32 %r1, %clock;", "mov.u64 %rd1, %globaltimer;"),
    "sleep and store": ("nanosleep.u32 20;", "st.global.b32 [%rd1], %r1;"),
    "surface and load": ("sust.b.1d.b32.trap [%rd1, {%r1}], {%r2};", "ld.global.b32 %r3, [%rd2];"),
    "surface load and store": (
        "suld.b.1d.b32.trap {%r1}, [%rd1, {%r2}];",
        "sust.b.1d.b32.trap [%rd1, {%r3}], {%r4};",
    ),
    "matrix product and warp barrier": (
        "mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%r7,%r8}, {%r1}, {%r5}, {%r7,%r8};",
        "bar.warp.sync -1;",
    ),
    "dead matrix product and barrier": (
        "barrier.sync 0;",
        "movmatrix.sync.aligned.m8n8.trans.b16 %r1, %r2;",
    ),
    "matrix load and store": (
        "ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%r1}, [%r3];",
        "st.shared.b32 [%r4], %r5;",
    ),
    "matrix store and load": (
        "stmatrix.sync.aligned.m8n8.x1.shared.b16 [%r3], {%r1};",
        "ld.shared.b32 %r5, [%r4];",
    ),
    "wmma load and warp barrier": (
        "wmma.load.a.sync.aligned.row.m8n8k4.shared.f64 {%rd1}, [%r1];",
        "bar.warp.sync -1;",
    ),
    "shuffles": (
        "shfl.sync.bfly.b32 %r1, %r2, 1, 31, -1;",
        "shfl.sync.bfly.b32 %r3, %r4, 1, 31, -1;",
    ),
    "vote and active mask": ("vote.sync.ballot.b32 %r1, %p1, -1;", "activemask.b32 %r2;"),
    "elect and redux": ("elect.sync %r1|%p1, -1;", "redux.sync.add.s32 %r2, %r3, -1;"),
    "match and barrier": ("match.any.sync.b32 %r1, %r2, -1;", "bar.sync 0;"),
    **{
        f"{exchange.split()[0]} and strong store": (_STRONG_STORE, exchange)
        for exchange in _EXCHANGES
    },
    **{f"shuffle and {signal.split()[0]}": (signal, _EXCHANGES[0]) for signal in _SIGNALS},
    "carry chain": ("add.cc.u32 %r1, %r2, %r3;", "addc.u32 %r4, %r5, %r6;"),
    "carry overwritten": ("madc.hi.u32 %r1, %r2, %r3, %r7;", "sub.cc.u32 %r4, %r5, %r6;"),
    "carries set": ("add.cc.u32 %r1, %r2, %r3;", "add.cc.u32 %r4, %r5, %r6;"),
    "unknown and load": ("new.thing.b32 %r1, %r2;", "ld.global.b32 %r4, [%rd1];"),
    "unknown and a register it names": ("new.thing.b32 %r1, %r2;", "mov.b32 %r3, %r2;"),
    "unknown and write of a register it names": ("mov.b32 %r2, 1;", "new.thing.b32 %r1, %r2;"),
    "unknown modifier of a load": ("ld.global.new.b32 %r1, [%rd1];", "ld.global.b32 %r2, [%rd1];"),
    "unknown form of a pure opcode": (
        "mul.async.b32 %r1, %r2, %r3;",
        "mul.async.b32 %r4, %r5, %r6;",
    ),
    "metadata of a sparse product and wait": (
        "wgmma.wait_group.sync.aligned 0;",
        "mov.b32 %r54, 1;",
    ),
    "accumulator and fence": ("mov.b32 %r40, 0;", "wgmma.fence.sync.aligned;"),
    "fragment and fence": ("mov.b32 %r47, %r1;", "wgmma.fence.sync.aligned;"),
    "accumulator and commit": ("mov.b32 %r1, %r41;", "wgmma.commit_group.sync.aligned;"),
    "accumulator and wait": ("wgmma.wait_group.sync.aligned 0;", "mov.b32 %r1, %r43;"),
    "copy of an accumulator and wait": (
        "wgmma.wait_group.sync.aligned 0;",
        "add.s32 %r1, %r60, 1;",
    ),
    "tensor memory load and wait": ("tcgen05.wait::ld.sync.aligned;", "add.s32 %r1, %r50, 1;"),
    "tensor memory store and wait": ("tcgen05.wait::st.sync.aligned;", "mov.b32 %r52, 1;"),
    "store of a call parameter and call": ("st.param.b32 [p], %r1;", "call.uni f, (p);"),
    "register count and barrier": ("setmaxnreg.dec.sync.aligned.u32 40;", "bar.sync 0;"),
}
"""Case -> two instructions that must keep their order."""
_OUTER = ".extern .func f(.param .b32 x);"
_BEFORE = ".param .b32 p;\n"
_AFTER = (
    f"\n{_WGMMA}\n{_SPARSE}\nmov.b32 %r60, %r41;\n"
    "tcgen05.ld.sync.aligned.32x32b.x2.b32 {%r50,%r51}, [%r1];\n"
    "tcgen05.st.sync.aligned.32x32b.x2.b32 [%r1], {%r52,%r53};"
)


@pytest.mark.parametrize("case", _LEGAL)
def test_independent_instructions_may_change_places(case: str) -> None:
    first, second = _LEGAL[case]
    before, after = (f"{_BEFORE}{a}\n{b}{_AFTER}" for a, b in ((first, second), (second, first)))
    assert not compare(before, after, _OUTER).findings
    assert not compare(after, before, _OUTER).findings


@pytest.mark.parametrize("case", _ILLEGAL)
def test_dependent_instructions_keep_their_order(case: str) -> None:
    first, second = _ILLEGAL[case]
    before, after = (f"{_BEFORE}{a}\n{b}{_AFTER}" for a, b in ((first, second), (second, first)))
    assert not compare(before, before, _OUTER).findings
    assert compare(before, after, _OUTER).findings
    assert compare(after, before, _OUTER).findings
