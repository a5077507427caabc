"""Matrix-unit kernels: all operand types, TMA descriptors, warp specialisation, large tiles."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from kernel_spec import constants, dst, floats, inout, integers, spec, src


@triton.jit
def matmul(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    acc_type: tl.constexpr = tl.int32 if a.dtype.element_ty == tl.int8 else (
        tl.float64 if a.dtype.element_ty == tl.float64 else tl.float32
    )  # fmt: skip
    acc = tl.zeros((BM, BN), acc_type)
    for k in range(0, K, BK):
        x = tl.load(a + offs_m[:, None] * K + k + offs_k[None, :])
        y = tl.load(b + (k + offs_k)[:, None] * N + offs_n[None, :])
        acc = tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=acc_type)
    tl.store(c + offs_m[:, None] * N + offs_n[None, :], acc.to(c.dtype.element_ty))


@triton.jit
def matmul_fp8(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + offs_m[:, None] * K + k + offs_k[None, :])
        y = tl.load(b + offs_n[None, :] * K + k + offs_k[:, None])
        acc = tl.dot(x.to(tl.float8e4nv, bitcast=True), y.to(tl.float8e4nv, bitcast=True), acc)
    tl.store(c + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.bfloat16))


@triton.jit
def matmul_int4(a, b, scale, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + offs_m[:, None] * K + k + offs_k[None, :])
        packed = tl.load(b + ((k + offs_k) // 8)[:, None] * N + offs_n[None, :])
        s = tl.load(scale + k // BK * N + offs_n)
        w = ((packed >> (offs_k % 8 * 4)[:, None]) & 0xF) - 8
        acc = tl.dot(x, (w * s[None, :]).to(tl.float16), acc)
    tl.store(c + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.float16))


@triton.jit
def split_k(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    part = K // tl.num_programs(2)
    offs_k = tl.program_id(2) * part + tl.arange(0, BK)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, part, BK):
        x = tl.load(a + offs_m[:, None] * K + k + offs_k[None, :])
        acc = tl.dot(x, tl.load(b + (k + offs_k)[:, None] * N + offs_n[None, :]), acc)
    tl.atomic_add(c + offs_m[:, None] * N + offs_n[None, :], acc, sem="relaxed")


@triton.jit
def persistent_matmul(a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    offs_k = tl.arange(0, BK)
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(M, BM) * tiles_n, tl.num_programs(0), flatten=True
    ):
        offs_m = tile // tiles_n * BM + tl.arange(0, BM)
        offs_n = tile % tiles_n * BN + tl.arange(0, BN)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            x = tl.load(a + offs_m[:, None] * K + k + offs_k[None, :])
            acc = tl.dot(x, tl.load(b + (k + offs_k)[:, None] * N + offs_n[None, :]), acc)
        tl.store(c + offs_m[:, None] * N + offs_n[None, :], acc.to(tl.float16))


@triton.jit
def descriptor_matmul(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPECIALISE: tl.constexpr,
):  # fmt: skip
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    c_desc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    acc = tl.zeros((BM, BN), tl.float32)
    for k in tl.range(0, K, BK, warp_specialize=SPECIALISE):
        acc = tl.dot(a_desc.load([m, k]), b_desc.load([n, k]).T, acc)
    c_desc.store([m, n], acc.to(tl.float16))


@triton.jit
def descriptor_persistent(
    a, b, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SPECIALISE: tl.constexpr,
):  # fmt: skip
    a_desc = tl.make_tensor_descriptor(a, [M, K], [K, 1], [BM, BK])
    b_desc = tl.make_tensor_descriptor(b, [N, K], [K, 1], [BN, BK])
    c_desc = tl.make_tensor_descriptor(c, [M, N], [N, 1], [BM, BN])
    tiles_n = tl.cdiv(N, BN)
    for tile in tl.range(
        tl.program_id(0), tl.cdiv(M, BM) * tiles_n, tl.num_programs(0), warp_specialize=SPECIALISE
    ):
        m, n = tile // tiles_n * BM, tile % tiles_n * BN
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, K, BK):
            acc = tl.dot(a_desc.load([m, k]), b_desc.load([n, k]).T, acc)
        c_desc.store([m, n], acc.to(tl.float16))


@triton.jit
def scaled_matmul(a, a_scale, b, b_scale, c, M, N, K, BM: tl.constexpr, BN: tl.constexpr,
                  BK: tl.constexpr):  # fmt: skip
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    offs_k = tl.arange(0, BK)
    offs_s = tl.arange(0, BK // 32)
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x = tl.load(a + offs_m[:, None] * K + k + offs_k[None, :])
        y = tl.load(b + offs_n[None, :] * K + k + offs_k[:, None])
        sx = tl.load(a_scale + offs_m[:, None] * (K // 32) + k // 32 + offs_s[None, :])
        sy = tl.load(b_scale + offs_n[:, None] * (K // 32) + k // 32 + offs_s[None, :])
        acc = tl.dot_scaled(x, sx, "e4m3", y, sy, "e4m3", acc)
    tl.store(c + offs_m[:, None] * N + offs_n[None, :], acc)


@triton.jit
def convolution(
    x, w, y, height, width, C, F, R: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    # Channels last; an R x R filter as a sum of R * R products.
    offs_p = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_f = tl.program_id(1) * BN + tl.arange(0, BN)
    offs_c = tl.arange(0, BK)
    row, column = offs_p // width, offs_p % width
    acc = tl.zeros((BM, BN), tl.float32)
    for tap in range(R * R):
        r = row + tap // R - R // 2
        s = column + tap % R - R // 2
        ok = (r >= 0) & (r < height) & (s >= 0) & (s < width)
        for c in range(0, C, BK):
            a = tl.load(
                x + (r * width + s)[:, None] * C + c + offs_c[None, :], ok[:, None], other=0.0
            )
            b = tl.load(w + (tap * C + c + offs_c)[:, None] * F + offs_f[None, :])
            acc = tl.dot(a, b, acc)
    tl.store(y + offs_p[:, None] * F + offs_f[None, :], tl.maximum(acc, 0.0).to(tl.float16))


@triton.jit
def attention_backward(
    q, k, v, do, lse, delta, dk, dv, scale, ctx, D: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    base = tl.program_id(1) * ctx
    offs_n = tl.program_id(0) * BN + tl.arange(0, BN)
    offs_d = tl.arange(0, D)
    keys = tl.load(k + (base + offs_n)[:, None] * D + offs_d[None, :])
    values = tl.load(v + (base + offs_n)[:, None] * D + offs_d[None, :])
    dkeys = tl.zeros((BN, D), tl.float32)
    dvalues = tl.zeros((BN, D), tl.float32)
    for start in range(0, ctx, BM):
        offs_m = base + start + tl.arange(0, BM)
        qt = tl.load(q + offs_m[None, :] * D + offs_d[:, None])
        p = tl.exp2(tl.dot(keys, qt) * scale - tl.load(lse + offs_m)[None, :])
        grad = tl.load(do + offs_m[:, None] * D + offs_d[None, :])
        dvalues = tl.dot(p.to(tl.float16), grad, dvalues)
        dp = tl.dot(values, tl.trans(grad)) - tl.load(delta + offs_m)[None, :]
        dkeys = tl.dot((p * dp).to(tl.float16), tl.trans(qt), dkeys)
    tl.store(dk + (base + offs_n)[:, None] * D + offs_d[None, :], dkeys.to(tl.float16))
    tl.store(dv + (base + offs_n)[:, None] * D + offs_d[None, :], dvalues.to(tl.float16))


@triton.jit
def batched_dot(a, b, c, S: tl.constexpr):
    batch = tl.arange(0, 4)[:, None, None] * S * S
    place = batch + tl.arange(0, S)[None, :, None] * S + tl.arange(0, S)[None, None, :]
    tl.store(c + place, tl.dot(tl.load(a + place), tl.load(b + place)))


@triton.jit
def gemv(a, x, y, N, BM: tl.constexpr, BN: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, N, BN):
        offs_n = start + tl.arange(0, BN)
        v = tl.load(x + offs_n).to(tl.float32)
        acc += tl.load(a + offs_m[:, None] * N + offs_n[None, :]).to(tl.float32) * v[None, :]
    tl.store(y + offs_m, tl.sum(acc, 1))


def _matmul(dtype, out, tile, warps=4, stages=3, precision="tf32"):  # type: ignore[no-untyped-def]
    m, n, k = tile
    return spec(
        src("a", dtype, 512, 512), src("b", dtype, 512, 512), dst("c", out, 512, 512),
        integers(M=512, N=512, K=512), constants(BM=m, BN=n, BK=k, PRECISION=precision),
        grid=(512 // m, 512 // n), warps=warps, stages=stages,
    )  # fmt: skip


def _plain(dtype="f16", out="f16", tile=(128, 128, 64), grid=(4, 4), warps=4, stages=3, **more):  # type: ignore[no-untyped-def]
    m, n, k = tile
    return spec(
        src("a", dtype, 512, 512), src("b", dtype, 512, 512), inout("c", out, 512, 512),
        integers(M=512, N=512, K=512), constants(BM=m, BN=n, BK=k, **more),
        grid=grid, warps=warps, stages=stages,
    )  # fmt: skip


LAUNCHES = {
    "matmul@bf16": _matmul("bf16", "bf16", (64, 128, 32)),
    "matmul@tf32": _matmul("f32", "f32", (64, 64, 32)),
    "matmul@tf32x3": _matmul("f32", "f32", (64, 64, 32), precision="tf32x3"),
    "matmul@ieee": _matmul("f32", "f32", (32, 32, 16), precision="ieee"),
    "matmul@int8": _matmul("i8", "i32", (64, 64, 64)),
    "matmul@int8small": _matmul("i8", "i32", (32, 32, 64), warps=2),
    "matmul@fp64": _matmul("f64", "f64", (32, 32, 16), precision="ieee"),
    "matmul@bigtile": _matmul("f16", "f32", (128, 256, 32), warps=4),
    "matmul@spill": _matmul("f16", "f32", (128, 128, 32), warps=2, stages=2),
    "matmul@huge": _matmul("f16", "f16", (256, 128, 64), warps=8),
    "matmul@deep": _matmul("f16", "f16", (64, 64, 64), warps=4, stages=5),
    "matmul@single": _matmul("f16", "f16", (16, 16, 16), warps=1, stages=2),
    "matmul@nopipe": _matmul("f16", "f16", (64, 64, 32), warps=4, stages=1),
    "matmul_fp8": _plain("u8", "bf16", (64, 64, 128), (8, 8)),
    "matmul_fp8@big": _plain("u8", "bf16", (128, 128, 128), (4, 4), warps=8),
    "matmul_int4": spec(
        src("a", "f16", 512, 512), src("b", "i32", 64, 512), src("scale", "f32", 16, 512),
        dst("c", "f16", 512, 512), integers(M=512, N=512, K=512), constants(BM=16, BN=64, BK=32),
        grid=(32, 8),
    ),
    "split_k": _plain(out="f32", tile=(64, 64, 32), grid=(8, 8, 4)),
    "persistent_matmul": _plain(tile=(64, 64, 32), grid=(16,)),
    "descriptor_matmul": _plain(SPECIALISE=False),
    "descriptor_matmul@specialised": _plain(SPECIALISE=True),
    "descriptor_persistent": _plain(grid=(8,), SPECIALISE=False),
    "descriptor_persistent@specialised": _plain(grid=(8,), SPECIALISE=True),
    "descriptor_persistent@wide": _plain(tile=(128, 256, 64), grid=(8,), warps=8, SPECIALISE=True),
    "scaled_matmul": spec(
        src("a", "u8", 512, 512), src("a_scale", "u8", 512, 16), src("b", "u8", 512, 512),
        src("b_scale", "u8", 512, 16), dst("c", "f32", 512, 512), integers(M=512, N=512, K=512),
        constants(BM=128, BN=128, BK=128), grid=(4, 4), stages=2,
    ),
    "convolution": spec(
        src("x", "f16", 32, 32, 64), src("w", "f16", 9, 64, 64), dst("y", "f16", 32, 32, 64),
        integers(height=32, width=32, C=64, F=64), constants(R=3, BM=64, BN=64, BK=32),
        grid=(16, 1),
    ),
    "attention_backward": spec(
        *(src(name, "f16", 4, 512, 64) for name in ("q", "k", "v", "do")),
        src("lse", "f32", 4, 512), src("delta", "f32", 4, 512), dst("dk", "f16", 4, 512, 64),
        dst("dv", "f16", 4, 512, 64), floats(scale=0.18), integers(ctx=512),
        constants(D=64, BM=32, BN=64), grid=(8, 4), stages=2,
    ),
    "batched_dot": spec(
        src("a", "f16", 4, 32, 32), src("b", "f16", 4, 32, 32), dst("c", "f32", 4, 32, 32),
        constants(S=32),
    ),
    "gemv": spec(
        src("a", "f16", 1024, 1024), src("x", "f16", 1024), dst("y", "f32", 1024),
        integers(N=1024), constants(BM=8, BN=256), grid=(128,),
    ),
}  # fmt: skip
