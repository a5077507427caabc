"""Memory kernels: atomics, cache hints, transposes, gathers, pipelined copies, descriptors."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from kernel_spec import constants, dst, index, inout, integers, spec, src


@triton.jit
def atomics(x, total, high, low, bits, swapped, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    v = tl.load(x + offs, mask, other=0)
    slot = offs % 64
    tl.atomic_add(total + slot, v, mask)
    tl.atomic_max(high + slot, v, mask, sem="relaxed")
    tl.atomic_min(low + slot, v, mask, sem="release", scope="cta")
    tl.atomic_or(bits + slot, v, mask, scope="sys")
    tl.atomic_and(bits + slot, v, mask, sem="acquire")
    tl.atomic_xor(bits + slot, v, mask)
    old = tl.atomic_xchg(swapped + slot, v, mask)
    tl.atomic_cas(swapped + slot, old, v + 1)


@triton.jit
def float_atomics(x, single, half, count, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n, other=0.0)
    tl.atomic_add(single + offs % 256, v, offs < n)
    tl.atomic_add(half + offs % 256, v.to(tl.float16), offs < n)
    tl.atomic_max(single + offs % 128, v, offs < n)
    tl.atomic_add(count, 1)


@triton.jit
def lock_and_add(lock, x, total, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    v = tl.load(x + tl.program_id(0) * BLOCK + offs)
    while tl.atomic_cas(lock, 0, 1) == 1:
        pass
    tl.store(total + offs, tl.load(total + offs) + v)
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


@triton.jit
def transpose(x, y, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.program_id(1) * BN + tl.arange(0, BN)
    v = tl.load(x + offs_m[:, None] * columns + offs_n[None, :])
    tl.store(y + offs_n[:, None] * rows + offs_m[None, :], tl.trans(v))


@triton.jit
def embedding(table, tokens, y, D: tl.constexpr):
    row = tl.program_id(0)
    token = tl.load(tokens + row)
    offs = tl.arange(0, D)
    tl.store(y + row * D + offs, tl.load(table + token * D + offs))


@triton.jit
def embedding_backward(dy, tokens, grad, D: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, D)
    token = tl.load(tokens + row)
    tl.atomic_add(grad + token * D + offs, tl.load(dy + row * D + offs), sem="relaxed")


@triton.jit
def sparse_rows(values, columns, starts, x, y, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    first = tl.load(starts + row)
    last = first + 64
    acc = tl.zeros((BLOCK,), tl.float32)
    place = first
    while place < last:
        offs = place + tl.arange(0, BLOCK)
        column = tl.load(columns + offs, offs < last, other=0)
        value = tl.load(values + offs, offs < last, other=0.0)
        acc += value * tl.load(x + column, offs < last, other=0.0)
        place += BLOCK
    tl.store(y + row, tl.sum(acc, 0))


@triton.jit
def cache_hints(x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + offs, cache_modifier=".cg")
    b = tl.load(y + offs, eviction_policy="evict_last")
    c = tl.load(z + offs, volatile=True) + tl.load(z + offs, cache_modifier=".ca")
    tl.store(x + offs, a + b + c, cache_modifier=".cs")
    tl.store(y + offs, a - b, eviction_policy="evict_first")
    tl.store(z + offs, a * c, cache_modifier=".wt")


@triton.jit
def pipelined_copy(x, y, z, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    offs_m = tl.program_id(0) * BM + tl.arange(0, BM)
    offs_n = tl.arange(0, BN)
    for start in tl.range(0, columns, BN, num_stages=4):
        place = offs_m[:, None] * columns + start + offs_n[None, :]
        v = tl.load(x + place)
        w = tl.load(y + place)
        tl.store(z + place, tl.exp(v) * w + v)


@triton.jit
def scattered_bytes(x, i, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(i + offs, offs < n, other=0)
    tl.store(y + place, tl.load(x + offs, offs < n), offs < n)


@triton.jit
def strided_3d(x, y, a, b, c, sa, sb, sc, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    i, j, k = offs // (b * c), offs // c % b, offs % c
    mask = offs < a * b * c
    tl.store(y + offs, tl.load(x + i * sa + j * sb + k * sc, mask), mask)


@triton.jit
def im2col(x, y, height, width, KH: tl.constexpr, KW: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, column = offs // width, offs % width
    inside = offs < height * width
    for dy in tl.static_range(KH):
        for dx in tl.static_range(KW):
            r = row + dy - KH // 2
            c = column + dx - KW // 2
            ok = inside & (r >= 0) & (r < height) & (c >= 0) & (c < width)
            v = tl.load(x + r * width + c, ok, other=0.0)
            tl.store(y + (dy * KW + dx) * height * width + offs, v, inside)


@triton.jit
def descriptor_copy(x, y, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BM, BN])
    target = tl.make_tensor_descriptor(y, [rows, columns], [columns, 1], [BM, BN])
    m, n = tl.program_id(0) * BM, tl.program_id(1) * BN
    target.store([m, n], source.load([m, n]) * 2.0)


@triton.jit
def descriptor_reduce(x, y, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x, [rows, columns], [columns, 1], [BM, BN])
    target = tl.make_tensor_descriptor(y, [BM, columns], [columns, 1], [BM, BN])
    for start in range(0, rows, BM):
        target.atomic_add([0, tl.program_id(0) * BN], source.load([start, tl.program_id(0) * BN]))


N = 65536
LAUNCHES = {
    "atomics": spec(
        src("x", "i32", N), inout("total", "i32", 64), inout("high", "i32", 64),
        inout("low", "i32", 64), inout("bits", "i32", 64), inout("swapped", "i32", 64),
        integers(n=N), constants(BLOCK=256), grid=(N // 256,),
    ),
    "float_atomics": spec(
        src("x", "f32", N), inout("single", "f32", 256), inout("half", "f16", 256),
        inout("count", "i32", 1), integers(n=N), constants(BLOCK=512), grid=(N // 512,),
    ),
    "lock_and_add": spec(
        dst("lock", "i32", 1), src("x", "f32", 64, 512), inout("total", "f32", 512),
        constants(BLOCK=512), grid=(64,),
    ),
    "transpose": spec(
        src("x", "f32", 1024, 512), dst("y", "f32", 512, 1024), integers(rows=1024, columns=512),
        constants(BM=64, BN=64), grid=(16, 8),
    ),
    "transpose@half": spec(
        src("x", "f16", 1024, 512), dst("y", "f16", 512, 1024), integers(rows=1024, columns=512),
        constants(BM=32, BN=128), grid=(32, 4),
    ),
    "embedding": spec(
        src("table", "f16", 1000, 256), index("tokens", "i64", 1000, 512),
        dst("y", "f16", 512, 256),
        constants(D=256), grid=(512,), warps=1,
    ),
    "embedding_backward": spec(
        src("dy", "f32", 512, 256), index("tokens", "i32", 1000, 512),
        inout("grad", "f32", 1000, 256),
        constants(D=256), grid=(512,),
    ),
    "sparse_rows": spec(
        src("values", "f32", 20000), index("columns", "i32", 4096, 20000),
        index("starts", "i32", 19000, 256), src("x", "f32", 4096), dst("y", "f32", 256),
        constants(BLOCK=128), grid=(256,),
    ),
    "cache_hints": spec(
        inout("x", "f32", N), inout("y", "f32", N), inout("z", "f32", N), integers(n=N),
        constants(BLOCK=1024), grid=(N // 1024,),
    ),
    "pipelined_copy": spec(
        src("x", "f32", 1024, 1024), src("y", "f32", 1024, 1024), dst("z", "f32", 1024, 1024),
        integers(rows=1024, columns=1024), constants(BM=16, BN=64), grid=(64,), stages=4,
    ),
    "scattered_bytes": spec(
        src("x", "i8", N), index("i", "i32", N, N), dst("y", "i8", N), integers(n=N),
        constants(BLOCK=512), grid=(N // 512,),
    ),
    "strided_3d": spec(
        src("x", "f32", N), dst("y", "f32", N), integers(a=32, b=48, c=33, sa=1, sb=33, sc=1600),
        constants(BLOCK=512), grid=(99,),
    ),
    "im2col": spec(
        src("x", "f32", 100, 100), dst("y", "f32", 9, 100, 100), integers(height=100, width=100),
        constants(KH=3, KW=3, BLOCK=256), grid=(40,),
    ),
    "descriptor_copy": spec(
        src("x", "f16", 512, 512), dst("y", "f16", 512, 512), integers(rows=512, columns=512),
        constants(BM=64, BN=64), grid=(8, 8),
    ),
    "descriptor_reduce": spec(
        src("x", "f32", 512, 512), inout("y", "f32", 64, 512), integers(rows=512, columns=512),
        constants(BM=64, BN=32), grid=(16,),
    ),
}  # fmt: skip
