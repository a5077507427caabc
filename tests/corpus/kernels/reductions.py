"""Reductions over rows and columns: sums, scans, sorts, normalisations, losses."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from kernel_spec import constants, dst, floats, index, inout, integers, spec, src


@triton.jit
def layernorm(x, w, b, y, mean, rstd, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < columns
    v = tl.load(x + row * columns + offs, mask, other=0.0).to(tl.float32)
    m = tl.sum(v, 0) / columns
    d = tl.where(mask, v - m, 0.0)
    r = 1.0 / tl.sqrt(tl.sum(d * d, 0) / columns + eps)
    tl.store(mean + row, m)
    tl.store(rstd + row, r)
    y_row = d * r * tl.load(w + offs, mask).to(tl.float32) + tl.load(b + offs, mask).to(tl.float32)
    tl.store(y + row * columns + offs, y_row.to(tl.float16), mask)


@triton.jit
def layernorm_backward(dx, dy, dw, db, x, w, mean, rstd, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < columns
    g = tl.load(dy + row * columns + offs, mask, other=0.0).to(tl.float32)
    r = tl.load(rstd + row)
    xhat = (tl.load(x + row * columns + offs, mask, other=0.0) - tl.load(mean + row)) * r
    wg = tl.where(mask, g * tl.load(w + offs, mask, other=0.0), 0.0)
    c1 = tl.sum(xhat * wg, 0) / columns
    c2 = tl.sum(wg, 0) / columns
    tl.store(dx + row * columns + offs, ((wg - xhat * c1 - c2) * r).to(tl.float16), mask)
    tl.atomic_add(dw + offs, g * xhat, mask)
    tl.atomic_add(db + offs, g, mask)


@triton.jit
def cross_entropy(logits, labels, loss, grad, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    highest = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        v = tl.load(logits + row * columns + offs, offs < columns, other=-float("inf"))
        v = v.to(tl.float32)
        new = tl.maximum(highest, tl.max(v, 0))
        total = total * tl.exp(highest - new) + tl.sum(tl.exp(v - new), 0)
        highest = new
    tl.store(loss + row, tl.log(total) + highest - tl.load(logits + row * columns + label))
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        v = tl.load(logits + row * columns + offs, offs < columns, other=0.0).to(tl.float32)
        p = tl.exp(v - highest) / total - tl.where(offs == label, 1.0, 0.0)
        tl.store(grad + row * columns + offs, p.to(tl.bfloat16), offs < columns)


@triton.jit
def softmax_backward(y, dy, dx, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    a = tl.load(y + row * columns + offs, offs < columns, other=0.0)
    g = tl.load(dy + row * columns + offs, offs < columns, other=0.0)
    tl.store(dx + row * columns + offs, a * (g - tl.sum(a * g, 0)), offs < columns)


@triton.jit
def sum_columns(x, y, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    offs_n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, rows, BM):
        offs_m = start + tl.arange(0, BM)
        mask = (offs_m[:, None] < rows) & (offs_n[None, :] < columns)
        acc += tl.load(x + offs_m[:, None] * columns + offs_n[None, :], mask, other=0.0)
    tl.store(y + offs_n, tl.sum(acc, 0), offs_n < columns)


@triton.jit
def extremes(x, best, where, least, parity, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + offs, offs < columns, other=-float("inf"))
    value, position = tl.max(v, 0, return_indices=True)
    tl.store(best + row, value)
    tl.store(where + row, position)
    tl.store(least + row, tl.argmin(v, 0))
    tl.store(parity + row, tl.xor_sum(v.to(tl.int32, bitcast=True), 0))


@triton.jit
def _welford(mean_a, m2_a, n_a, mean_b, m2_b, n_b):
    delta = mean_b - mean_a
    n = n_a + n_b
    share = tl.where(n == 0.0, 0.0, n_b / n)
    return mean_a + delta * share, m2_a + m2_b + delta * delta * n_a * share, n


@triton.jit
def welford(x, mean, variance, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    mask = offs < columns
    v = tl.load(x + row * columns + offs, mask, other=0.0)
    m, m2, n = tl.reduce((v, v * 0.0, mask.to(tl.float32)), 0, _welford)
    tl.store(mean + row, m)
    tl.store(variance + row, m2 / n)


@triton.jit
def cumulative_sum(x, y, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + offs, offs < columns, other=0.0)
    tl.store(y + row * columns + offs, tl.cumsum(v, 0), offs < columns)


@triton.jit
def _linear(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def linear_recurrence(gate, token, y, steps, channels, BT: tl.constexpr, BC: tl.constexpr):
    offs_t = tl.arange(0, BT)
    offs_c = tl.program_id(0) * BC + tl.arange(0, BC)
    state = tl.zeros((BC,), tl.float32)
    for start in range(0, steps, BT):
        place = (start + offs_t)[:, None] * channels + offs_c[None, :]
        a, h = tl.associative_scan((tl.load(gate + place), tl.load(token + place)), 0, _linear)
        h += a * state[None, :]
        tl.store(y + place, h)
        state = tl.sum(tl.where(offs_t[:, None] == BT - 1, h, 0.0), 0)


@triton.jit
def sort_rows(x, y, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offs, tl.sort(tl.load(x + offs), descending=True))


@triton.jit
def top_k(x, y, columns, BLOCK: tl.constexpr, K: tl.constexpr):
    row = tl.program_id(0)
    v = tl.load(x + row * columns + tl.arange(0, BLOCK))
    tl.store(y + row * K + tl.arange(0, K), tl.topk(v, K))


@triton.jit
def histogram(x, y, n, BINS: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.histogram(tl.load(x + offs, offs < n, other=0), BINS)
    tl.atomic_add(y + tl.arange(0, BINS), counts)


@triton.jit
def gather_in_block(x, i, y, BM: tl.constexpr, BN: tl.constexpr):
    place = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    tl.store(y + place, tl.gather(tl.load(x + place), tl.load(i + place), 1))


@triton.jit
def flip_join_split(x, y, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs)
    pair = tl.reshape(v, (BLOCK // 2, 2))
    even, odd = tl.split(pair)
    z = tl.interleave(odd, even) + tl.flip(v, 0)
    tl.store(y + offs, tl.reshape(tl.trans(tl.reshape(z, (BLOCK // 16, 16))), (BLOCK,)))


@triton.jit
def quantise_rows(x, q, scale, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = tl.arange(0, BLOCK)
    v = tl.load(x + row * columns + offs, offs < columns, other=0.0).to(tl.float32)
    s = tl.max(tl.abs(v), 0) / 127.0 + 1e-9
    tl.store(scale + row, s)
    r = v / s
    r = tl.where(r >= 0, tl.floor(r + 0.5), tl.ceil(r - 0.5))
    tl.store(q + row * columns + offs, r.to(tl.int8), offs < columns)


R, C = 256, 1024
LAUNCHES = {
    "layernorm": spec(
        src("x", "f16", R, C), src("w", "f16", C), src("b", "f16", C), dst("y", "f16", R, C),
        dst("mean", "f32", R), dst("rstd", "f32", R), integers(columns=C), floats(eps=1e-5),
        constants(BLOCK=1024), grid=(R,),
    ),
    "layernorm@wide": spec(
        src("x", "f16", R, 5000), src("w", "f16", 5000), src("b", "f16", 5000),
        dst("y", "f16", R, 5000), dst("mean", "f32", R), dst("rstd", "f32", R),
        integers(columns=5000), floats(eps=1e-5), constants(BLOCK=8192), grid=(R,), warps=8,
    ),
    "layernorm_backward": spec(
        dst("dx", "f16", R, C), src("dy", "f16", R, C), inout("dw", "f32", C),
        inout("db", "f32", C), src("x", "f32", R, C), src("w", "f32", C), src("mean", "f32", R),
        src("rstd", "f32", R),
        integers(columns=C), constants(BLOCK=1024), grid=(R,),
    ),
    "cross_entropy": spec(
        src("logits", "bf16", R, 32000), index("labels", "i64", 32000, R), dst("loss", "f32", R),
        dst("grad", "bf16", R, 32000), integers(columns=32000), constants(BLOCK=2048), grid=(R,),
        warps=8,
    ),
    "softmax_backward": spec(
        src("y", "f32", R, C), src("dy", "f32", R, C), dst("dx", "f32", R, C), integers(columns=C),
        constants(BLOCK=1024), grid=(R,), warps=2,
    ),
    "sum_columns": spec(
        src("x", "f32", 4096, C), dst("y", "f32", C), integers(rows=4096, columns=C),
        constants(BM=32, BN=64), grid=(C // 64,),
    ),
    "extremes": spec(
        src("x", "f32", R, C), dst("best", "f32", R), dst("where", "i32", R),
        dst("least", "i32", R), dst("parity", "i32", R), integers(columns=C),
        constants(BLOCK=1024), grid=(R,),
    ),
    "welford": spec(
        src("x", "f32", R, C), dst("mean", "f32", R), dst("variance", "f32", R),
        integers(columns=C), constants(BLOCK=1024), grid=(R,),
    ),
    "cumulative_sum": spec(
        src("x", "f32", R, C), dst("y", "f32", R, C), integers(columns=C), constants(BLOCK=1024),
        grid=(R,),
    ),
    "linear_recurrence": spec(
        src("gate", "f32", 512, C), src("token", "f32", 512, C), dst("y", "f32", 512, C),
        integers(steps=512, channels=C), constants(BT=64, BC=16), grid=(C // 16,),
    ),
    "sort_rows": spec(
        src("x", "f32", R, 512), dst("y", "f32", R, 512), constants(BLOCK=512), grid=(R,)
    ),
    "sort_rows@short": spec(
        src("x", "i32", R, 64), dst("y", "i32", R, 64), constants(BLOCK=64), grid=(R,), warps=1
    ),
    "top_k": spec(
        src("x", "f32", R, 256), dst("y", "f32", R, 8), integers(columns=256),
        constants(BLOCK=256, K=8), grid=(R,), warps=2,
    ),
    "histogram": spec(
        index("x", "i32", 128, 65536), inout("y", "i32", 128), integers(n=65536),
        constants(BINS=128, BLOCK=2048), grid=(32,),
    ),
    "gather_in_block": spec(
        src("x", "f32", 32, 128), index("i", "i32", 128, 32, 128), dst("y", "f32", 32, 128),
        constants(BM=32, BN=128),
    ),
    "flip_join_split": spec(
        src("x", "f32", R, C), dst("y", "f32", R, C), constants(BLOCK=1024), grid=(R,)
    ),
    "quantise_rows": spec(
        src("x", "f16", R, C), dst("q", "i8", R, C), dst("scale", "f32", R), integers(columns=C),
        constants(BLOCK=1024), grid=(R,),
    ),
}  # fmt: skip
