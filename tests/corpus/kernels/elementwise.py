"""Elementwise kernels: arithmetic of all types, special functions, random numbers."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from kernel_spec import constants, dst, floats, integers, spec, src
from triton.language.extra import libdevice


@triton.jit
def vector_add(x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    tl.store(z + offs, tl.load(x + offs, mask) + tl.load(y + offs, mask), mask)


@triton.jit
def special_functions(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n, other=0.0)
    a = tl.exp(v) + tl.log(tl.abs(v) + 1.0) + tl.sqrt(tl.abs(v)) + tl.rsqrt(v * v + 1.0)
    b = tl.sin(v) * tl.cos(v) + tl.erf(v) + tl.sigmoid(v) + tl.exp2(v) + tl.log2(v * v + 1.0)
    c = tl.floor(v) + tl.ceil(v) + tl.fma(a, b, v) + tl.sqrt_rn(v * v) + tl.div_rn(a, b + 2.0)
    tl.store(y + offs, a + b + c, offs < n)


@triton.jit
def library_functions(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n, other=0.0)
    r = libdevice.tanh(v) + libdevice.pow(tl.abs(v), 1.7) + libdevice.atan2(v, 2.0)
    r += libdevice.lgamma(tl.abs(v) + 1.0) + libdevice.cbrt(v) + libdevice.log1p(v * v)
    tl.store(y + offs, r + libdevice.rint(v) + libdevice.fmod(v, 0.3), offs < n)


@triton.jit
def gelu_bias(x, bias, y, n, columns, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n).to(tl.float32) + tl.load(bias + offs % columns).to(tl.float32)
    t = 0.7978845608 * (v + 0.044715 * v * v * v)
    g = 0.5 * v * (1.0 + (1.0 - 2.0 / (tl.exp(2.0 * t) + 1.0)))
    tl.store(y + offs, g.to(y.dtype.element_ty), offs < n)


@triton.jit
def double_precision(x, y, z, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + offs, offs < n, other=1.0)
    b = tl.load(y + offs, offs < n, other=1.0)
    c = a * b + a / (b * b + 1.0) + tl.sqrt(tl.abs(a)) + tl.exp(b) - tl.floor(a)
    tl.store(z + offs, tl.where(a > b, c, -c).to(tl.float32).to(tl.float64) + c, offs < n)


@triton.jit
def integer_division(x, y, q, r, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + offs, offs < n, other=1)
    b = tl.load(y + offs, offs < n, other=1) + 1
    tl.store(q + offs, a // b + a // 7, offs < n)
    tl.store(r + offs, a % b + a % 1000, offs < n)


@triton.jit
def bit_tricks(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + offs, offs < n, other=0).to(tl.uint32)
    a ^= a << 13
    a ^= a >> 17
    a ^= a << 5
    b = tl.umulhi(a, 0x9E3779B9) + (a & 0xFF00FF00) | (~a & 0x0F0F0F0F)
    tl.store(y + offs, (b.to(tl.uint64) * a.to(tl.uint64) >> 7).to(tl.int64), offs < n)


@triton.jit
def narrow_types(x, y, half, brain, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(x + offs, offs < n, other=0)
    b = tl.load(half + offs, offs < n, other=0.0)
    c = tl.load(brain + offs, offs < n, other=0.0)
    d = b * b + b - tl.minimum(b, 0.5)
    e = c * c + tl.maximum(c, 0.25)
    s = d.to(tl.float32) + e.to(tl.float32) + a.to(tl.float32)
    tl.store(y + offs, tl.clamp(s, -128.0, 127.0).to(tl.int8), offs < n)
    tl.store(half + offs, (d + e.to(tl.float16)).to(tl.float16), offs < n)


@triton.jit
def eight_bit_floats(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n, other=0.0)
    a = v.to(tl.float8e5).to(tl.float32) + v.to(tl.float8e4nv).to(tl.float32)
    tl.store(y + offs, a.to(tl.float8e4nv).to(tl.uint8, bitcast=True), offs < n)


@triton.jit
def dropout(x, y, n, p, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = tl.rand(seed, offs) > p
    tl.store(y + offs, tl.where(keep, tl.load(x + offs, offs < n) / (1.0 - p), 0.0), offs < n)


@triton.jit
def normal_noise(y, n, seed, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offs, tl.randn(seed, offs), offs < n)


@triton.jit
def polynomial(x, y, n, DEGREE: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n, other=0.0)
    r = v
    for power in tl.static_range(DEGREE):
        r = r * v + 1.0 / (power + 1)
    tl.store(y + offs, r, offs < n)


@triton.jit
def inline_assembly(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n, other=0)
    r = tl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $1, $1, 0x0123; lop3.b32 $0, t, $1, 0x5a, 0x96; }",
        "=r,r", [v], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    tl.store(y + offs, r, offs < n)


@triton.jit
def adamw(p, g, m, v, n, lr, beta1, beta2, eps, decay, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < n
    grad = tl.load(g + offs, mask).to(tl.float32)
    first = beta1 * tl.load(m + offs, mask) + (1 - beta1) * grad
    second = beta2 * tl.load(v + offs, mask) + (1 - beta2) * grad * grad
    w = tl.load(p + offs, mask)
    w -= lr * (first / (tl.sqrt(second) + eps) + decay * w)
    tl.store(m + offs, first, mask)
    tl.store(v + offs, second, mask)
    tl.store(p + offs, w, mask)


@triton.jit
def rotary(x, cos, sin, y, heads, D: tl.constexpr):
    row = tl.program_id(0)
    half: tl.constexpr = D // 2
    offs = tl.arange(0, half)
    c = tl.load(cos + row // heads * half + offs)
    s = tl.load(sin + row // heads * half + offs)
    a = tl.load(x + row * D + offs).to(tl.float32)
    b = tl.load(x + row * D + half + offs).to(tl.float32)
    tl.store(y + row * D + offs, (a * c - b * s).to(tl.float16))
    tl.store(y + row * D + half + offs, (b * c + a * s).to(tl.float16))


N = 65536
B = constants(BLOCK=1024)
GRID = (N // 1024,)
LAUNCHES = {
    "vector_add": spec(
        src("x", "f32", N), src("y", "f32", N), dst("z", "f32", N), integers(n=N), B, grid=GRID
    ),
    "vector_add@odd": spec(
        src("x", "f16", N), src("y", "f16", N), dst("z", "f16", N), integers(n=N - 3), B, grid=GRID
    ),
    "special_functions": spec(
        src("x", "f32", N), dst("y", "f32", N), integers(n=N), B, grid=GRID
    ),
    "library_functions": spec(
        src("x", "f32", N), dst("y", "f32", N), integers(n=N), B, grid=GRID
    ),
    "gelu_bias": spec(
        src("x", "bf16", N), src("bias", "bf16", 1024), dst("y", "bf16", N),
        integers(n=N, columns=1024), B, grid=GRID,
    ),
    "double_precision": spec(
        src("x", "f64", N), src("y", "f64", N), dst("z", "f64", N), integers(n=N), B, grid=GRID
    ),
    "integer_division": spec(
        src("x", "i32", N), src("y", "i32", N), dst("q", "i32", N), dst("r", "i32", N),
        integers(n=N), B, grid=GRID,
    ),
    "integer_division@long": spec(
        src("x", "i64", N), src("y", "i64", N), dst("q", "i64", N), dst("r", "i64", N),
        integers(n=N), constants(BLOCK=256), grid=(N // 256,),
    ),
    "bit_tricks": spec(src("x", "i32", N), dst("y", "i64", N), integers(n=N), B, grid=GRID),
    "narrow_types": spec(
        src("x", "i8", N), dst("y", "i8", N), src("half", "f16", N), src("brain", "bf16", N),
        integers(n=N), B, grid=GRID,
    ),
    "eight_bit_floats": spec(
        src("x", "f32", N), dst("y", "u8", N), integers(n=N), B, grid=GRID
    ),
    "dropout": spec(
        src("x", "f32", N), dst("y", "f32", N), integers(n=N), floats(p=0.1), integers(seed=123),
        B, grid=GRID,
    ),
    "normal_noise": spec(dst("y", "f32", N), integers(n=N, seed=7), B, grid=GRID),
    "polynomial": spec(
        src("x", "f32", N), dst("y", "f32", N), integers(n=N), constants(DEGREE=40), B, grid=GRID
    ),
    "inline_assembly": spec(src("x", "i32", N), dst("y", "i32", N), integers(n=N), B, grid=GRID),
    "adamw": spec(
        *(src(name, "f32", N) for name in "pgmv"), integers(n=N),
        floats(lr=1e-3, beta1=0.9, beta2=0.99, eps=1e-8, decay=0.01), B, grid=GRID,
    ),
    "rotary": spec(
        src("x", "f16", 512, 128), src("cos", "f32", 64, 64), src("sin", "f32", 64, 64),
        dst("y", "f16", 512, 128), integers(heads=8), constants(D=128), grid=(512,), warps=1,
    ),
}  # fmt: skip
