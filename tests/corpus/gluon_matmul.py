# mypy: ignore-errors
# ruff: noqa: N803, N806
"""A matrix product in Gluon: one warp loads tiles by TMA, four multiply them by wgmma."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tests.corpus.kernels.kernel_spec import constants, dst, integers, spec, src


@gluon.jit
def _load(a, b, tiles_a, tiles_b, ready, empty, K, BK: gl.constexpr, STAGES: gl.constexpr):
    stage = 0
    phase = 1
    for k in range(0, K, BK):
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(ready.index(stage), a.block_type.nbytes + b.block_type.nbytes)
        m, n = gl.program_id(0) * 64, gl.program_id(1) * 128
        tma.async_load(a, [m, k], ready.index(stage), tiles_a.index(stage))
        tma.async_load(b, [k, n], ready.index(stage), tiles_b.index(stage))
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1


@gluon.jit
def _multiply(c, N, tiles_a, tiles_b, ready, empty, K, BK: gl.constexpr, STAGES: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    acc = gl.zeros((64, 128), gl.float32, layout)
    stage = 0
    phase = 0
    for _ in range(0, K, BK):
        mbarrier.wait(ready.index(stage), phase)
        acc = warpgroup_mma(tiles_a.index(stage), tiles_b.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index(stage), count=1)
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    m = gl.program_id(0) * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
    n = gl.program_id(1) * 128 + gl.arange(0, 128, gl.SliceLayout(0, layout))
    silu = acc / (1.0 + gl.exp(-acc))
    gl.store(c + m[:, None] * N + n[None, :], silu.to(gl.bfloat16))


@gluon.jit
def gluon_matmul(a, b, c, M, N, K, STAGES: gl.constexpr):
    BK: gl.constexpr = 64
    layout_a: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BK], gl.bfloat16)
    layout_b: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, 128], gl.bfloat16)
    a = tma.make_tensor_descriptor(a, [M, K], [K, 1], [64, BK], layout_a)
    b = tma.make_tensor_descriptor(b, [K, N], [N, 1], [BK, 128], layout_b)
    tiles_a = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, BK], layout_a)
    tiles_b = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, 128], layout_b)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    gl.warp_specialize(
        [
            (_multiply, (c, N, tiles_a, tiles_b, ready, empty, K, BK, STAGES)),
            (_load, (a, b, tiles_a, tiles_b, ready, empty, K, BK, STAGES)),
        ],
        [1],
        [24],
    )


LAUNCHES = {
    "gluon_matmul": spec(
        src("a", "bf16", 512, 512), src("b", "bf16", 512, 512), dst("c", "bf16", 512, 512),
        integers(M=512, N=512, K=512), constants(STAGES=3), grid=(8, 4), warps=4, stages=1,
    )
}  # fmt: skip
