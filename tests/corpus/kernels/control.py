"""Control flow: loops, divergence, calls, printing, assertions, early returns."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl
from kernel_spec import constants, dst, integers, spec, src


@triton.jit
def collatz(x, steps, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n, other=0) + 1
    count = tl.zeros((BLOCK,), tl.int32)
    while tl.max((v > 1).to(tl.int32), 0) == 1:
        count += (v > 1).to(tl.int32)
        v = tl.where(v > 1, tl.where(v % 2 == 0, v // 2, 3 * v + 1), v)
    tl.store(steps + offs, count, offs < n)


@triton.jit
def branches(x, y, mode, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n, other=0.0)
    if mode == 0:
        v = tl.exp(v)
    elif mode == 2:
        v = v * v + tl.sum(v, 0)
    elif mode == 3:
        if tl.program_id(0) % 2 == 0:
            v = tl.sin(v)
        else:
            v = tl.sqrt(tl.abs(v))
    else:
        return
    tl.store(y + offs, v, offs < n)


@triton.jit
def scalar_branch(x, y, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    offs = row * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs)
    if tl.sum(v, 0) > 0.0:
        v = v / tl.max(v, 0)
        tl.store(y + offs, v)
    else:
        tl.store(y + offs, -v)


@triton.jit
def nested_loops(x, y, planes, rows, columns, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for p in range(tl.program_id(0), planes, tl.num_programs(0)):
        for r in range(rows):
            base = (p * rows + r) * columns
            for start in range(0, columns, BLOCK):
                v = tl.load(x + base + start + offs, start + offs < columns, other=0.0)
                acc = acc * 0.5 + v
    tl.store(y + tl.program_id(0) * BLOCK + offs, acc)


# Triton passes only scalars to a function that it may not inline.
@triton.jit(noinline=True)
def _horner(v, a, b, c):
    return ((a * v + b) * v + c) * v


@triton.jit(noinline=True)
def _row_norm(x, row, columns, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, columns, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        v = tl.load(x + row * columns + offs, offs < columns, other=0.0)
        total += v * v
    return tl.sum(total, 0)


@triton.jit
def device_calls(x, y, z, columns, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    norm = _row_norm(x, row, columns, BLOCK)
    other = _row_norm(x, (row + 1) % tl.num_programs(0), columns, BLOCK)
    scale = _horner(norm, 0.1, 0.2, other) + _horner(other, 0.4, norm, 0.6)
    offs = tl.arange(0, BLOCK)
    tl.store(y + row * columns + offs, tl.load(x + row * columns + offs) * scale, offs < columns)
    tl.store(z + row, norm - other)


@triton.jit
def prints(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n, other=0.0)
    if tl.program_id(0) == 0:
        tl.device_print("sum ", tl.sum(v, 0))
    tl.store(y + offs, v + 1.0, offs < n)


@triton.jit(debug=True)
def asserts(x, y, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + offs, offs < n, other=0)
    tl.device_assert(v >= 0, "negative")
    tl.store(y + offs, v * 2, offs < n)


@triton.jit
def unrolled(x, y, z, TIMES: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK * TIMES + tl.arange(0, BLOCK)
    for i in tl.static_range(TIMES):
        a = tl.load(x + offs + i * BLOCK)
        b = tl.load(y + offs + i * BLOCK)
        tl.store(z + offs + i * BLOCK, a * b + i)


@triton.jit
def unroll_factor(x, y, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(0, n, BLOCK, loop_unroll_factor=4):
        acc += tl.load(x + start + offs)
    tl.store(y + offs, acc)


@triton.jit
def many_arguments(
    a, b, c, d, e, f, g, h, out, n, i1, i2, i3, i4, i5, i6, i7, i8, BLOCK: tl.constexpr
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = offs < n
    v = tl.load(a + offs, m) * i1 + tl.load(b + offs, m) * i2 + tl.load(c + offs, m) * i3
    v += tl.load(d + offs, m) * i4 + tl.load(e + offs, m) * i5 + tl.load(f + offs, m) * i6
    v += tl.load(g + offs, m) * i7 + tl.load(h + offs, m) * i8
    tl.store(out + offs, v, m)


@triton.jit
def many_registers(x, y, stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    # All rows are live from the first load to the last store.
    offs = tl.arange(0, BLOCK)
    place = tl.arange(0, ROWS)[:, None] * stride + offs[None, :]
    v = tl.load(x + place)
    total = tl.sum(v, 1)
    w = tl.exp(v - tl.max(v, 1)[:, None]) * total[:, None]
    tl.store(y + place, w / (tl.sum(w, 1)[:, None] + v))


@triton.jit
def mandelbrot(y, width, limit, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cr = (offs % width).to(tl.float32) / width * 3.0 - 2.0
    ci = (offs // width).to(tl.float32) / width * 3.0 - 1.5
    zr = tl.zeros((BLOCK,), tl.float32)
    zi = tl.zeros((BLOCK,), tl.float32)
    count = tl.zeros((BLOCK,), tl.int32)
    step = 0
    while step < limit:
        inside = zr * zr + zi * zi < 4.0
        new = zr * zr - zi * zi + cr
        zi = tl.where(inside, 2.0 * zr * zi + ci, zi)
        zr = tl.where(inside, new, zr)
        count += inside.to(tl.int32)
        step += 1
    tl.store(y + offs, count)


N = 32768
LAUNCHES = {
    "collatz": spec(
        src("x", "i32", N), dst("steps", "i32", N), integers(n=N), constants(BLOCK=128),
        grid=(N // 128,),
    ),
    "branches": spec(
        src("x", "f32", N), dst("y", "f32", N), integers(mode=3, n=N), constants(BLOCK=512),
        grid=(N // 512,),
    ),
    "scalar_branch": spec(
        src("x", "f32", N), dst("y", "f32", N), constants(BLOCK=512), grid=(N // 512,)
    ),
    "nested_loops": spec(
        src("x", "f32", 64, 16, 200), dst("y", "f32", 16, 64),
        integers(planes=64, rows=16, columns=200), constants(BLOCK=64), grid=(16,), warps=2,
    ),
    "device_calls": spec(
        src("x", "f32", 64, 512), dst("y", "f32", 64, 512), dst("z", "f32", 64),
        integers(columns=512), constants(BLOCK=256), grid=(64,),
    ),
    "prints": spec(
        src("x", "f32", N), dst("y", "f32", N), integers(n=N), constants(BLOCK=256),
        grid=(N // 256,),
    ),
    "asserts": spec(
        src("x", "i32", N), dst("y", "i32", N), integers(n=N), constants(BLOCK=256),
        grid=(N // 256,),
    ),
    "unrolled": spec(
        src("x", "f32", N), src("y", "f32", N), dst("z", "f32", N),
        constants(TIMES=8, BLOCK=512), grid=(N // 4096,),
    ),
    "unroll_factor": spec(
        src("x", "f32", N), dst("y", "f32", 256), integers(n=N), constants(BLOCK=256)
    ),
    "many_arguments": spec(
        *(src(name, "f32", N) for name in "abcdefgh"), dst("out", "f32", N), integers(n=N - 5),
        integers(**{f"i{k}": 3 * k for k in range(1, 9)}), constants(BLOCK=512), grid=(N // 512,),
    ),
    "many_registers": spec(
        src("x", "f32", 32, 256), dst("y", "f32", 32, 256), integers(stride=256),
        constants(ROWS=32, BLOCK=256), warps=2,
    ),
    "many_registers@spill": spec(
        src("x", "f32", 32, 256), dst("y", "f32", 32, 256), integers(stride=256),
        constants(ROWS=32, BLOCK=256), warps=1,
    ),
    "mandelbrot": spec(
        dst("y", "i32", N), integers(width=256, limit=100), constants(BLOCK=256), grid=(N // 256,)
    ),
}  # fmt: skip
