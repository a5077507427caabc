"""Kernels over rows, and scans: norms, losses, optimisers, convolutions, recurrences, rendering."""

# ruff: noqa: N803
from __future__ import annotations

import triton
import triton.language as tl

from benchmarks.kernels.new_projects.arguments import given, launch, out, require
from nostall.core import LaunchSpec


@triton.jit
def geglu_backward(dw_ptr, e_ptr, g_ptr, h_ptr, de_ptr, dg_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    dw = tl.load(dw_ptr + at).to(tl.float32)
    e = tl.load(e_ptr + at).to(tl.float32)
    g = tl.load(g_ptr + at).to(tl.float32)
    s = 0.7978845608028654
    inner = s * e * (1.0 + 0.044715 * e * e)
    t = 2.0 / (1.0 + tl.exp(-2.0 * inner)) - 1.0
    half = 0.5 * (1.0 + t)
    f = half * e
    slope = half + 0.5 * e * (1.0 - t * t) * s * (1.0 + 3.0 * 0.044715 * e * e)
    tl.store(h_ptr + at, (f * g).to(tl.bfloat16))
    tl.store(dg_ptr + at, (dw * f).to(tl.bfloat16))
    tl.store(de_ptr + at, (dw * g * slope).to(tl.bfloat16))


def launch_geglu_backward(
    rows: int, columns: int, *, tile: tuple[int], warps: int, stages: int
) -> LaunchSpec:
    """Unsloth's backward pass of GEGLU with the tanh approximation."""
    size = rows * columns
    return launch(
        (size // tile[0],),
        (
            *(given(f"{x}_ptr", "bf16", size) for x in ("dw", "e", "g")),
            *(out(f"{x}_ptr", "bf16", size) for x in ("h", "de", "dg")),
        ),
        warps, stages, BLOCK=tile[0],
    )  # fmt: skip


@triton.jit
def group_norm(
    x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr,
    CHANNELS: tl.constexpr, PIXELS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    group = row % GROUPS
    size: tl.constexpr = CHANNELS // GROUPS * PIXELS
    offs = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    square = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        x = tl.load(x_ptr + row * size + start + offs).to(tl.float32)
        total += x
        square += x * x
    mean = tl.sum(total, 0) / size
    rstd = 1.0 / tl.sqrt(tl.sum(square, 0) / size - mean * mean + 1e-5)
    for start in range(0, size, BLOCK):
        at = start + offs
        x = tl.load(x_ptr + row * size + at).to(tl.float32)
        channel = group * (CHANNELS // GROUPS) + at // PIXELS
        weight = tl.load(weight_ptr + channel).to(tl.float32)
        bias = tl.load(bias_ptr + channel).to(tl.float32)
        y = (x - mean) * rstd * weight + bias
        tl.store(y_ptr + row * size + at, y.to(tl.float16))
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


def launch_group_norm(
    batch: int, channels: int, pixels: int, groups: int,
    *, tile: tuple[int], warps: int, stages: int,
) -> LaunchSpec:  # fmt: skip
    """FlagGems' group normalisation of a batch of images."""
    require(channels // groups * pixels % tile[0] == 0, f"a group is not a multiple of {tile}")
    shape = (batch, channels, pixels)
    return launch(
        (batch * groups,),
        (
            given("x_ptr", "f16", *shape),
            given("weight_ptr", "f16", channels),
            given("bias_ptr", "f16", channels),
            out("y_ptr", "f16", *shape),
            out("mean_ptr", "f32", batch * groups),
            out("rstd_ptr", "f32", batch * groups),
        ),
        warps, stages, CHANNELS=channels, PIXELS=pixels, GROUPS=groups, BLOCK=tile[0],
    )  # fmt: skip


@triton.jit
def causal_conv(
    x_ptr, weight_ptr, bias_ptr, y_ptr,
    T: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(1) * BLOCK_T
    batch = tl.program_id(2) * T
    w0 = tl.load(weight_ptr + c * 4).to(tl.float32)
    w1 = tl.load(weight_ptr + c * 4 + 1).to(tl.float32)
    w2 = tl.load(weight_ptr + c * 4 + 2).to(tl.float32)
    w3 = tl.load(weight_ptr + c * 4 + 3).to(tl.float32)
    bias = tl.load(bias_ptr + c).to(tl.float32)
    x = x_ptr + (batch + first) * CHANNELS + c
    start = first + tl.zeros_like(c)
    a = tl.load(x - 3 * CHANNELS, mask=start >= 3, other=0.0).to(tl.float32)
    b = tl.load(x - 2 * CHANNELS, mask=start >= 2, other=0.0).to(tl.float32)
    d = tl.load(x - CHANNELS, mask=start >= 1, other=0.0).to(tl.float32)
    for step in range(BLOCK_T):
        e = tl.load(x + step * CHANNELS).to(tl.float32)
        y = bias + w0 * a + w1 * b + w2 * d + w3 * e
        y = y / (1.0 + tl.exp(-y))
        tl.store(y_ptr + (batch + first + step) * CHANNELS + c, y.to(tl.bfloat16))
        a, b, d = b, d, e


def launch_causal_conv(
    batch: int, t: int, channels: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """The update of causal-conv1d over a piece of a sequence: width 4, SiLU."""
    return launch(
        (channels // tile[1], t // tile[0], batch),
        (
            given("x_ptr", "bf16", batch, t, channels),
            given("weight_ptr", "bf16", channels, 4),
            given("bias_ptr", "bf16", channels),
            out("y_ptr", "bf16", batch, t, channels),
        ),
        warps, stages, T=t, CHANNELS=channels, BLOCK_T=tile[0], BLOCK_C=tile[1],
    )  # fmt: skip


@triton.jit
def wkv(
    w_ptr, u_ptr, k_ptr, v_ptr, y_ptr,
    T: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = tl.program_id(1) * T * CHANNELS + c
    w = -tl.exp(tl.load(w_ptr + c))
    u = tl.load(u_ptr + c)
    a = tl.zeros((BLOCK,), tl.float32)
    b = tl.zeros((BLOCK,), tl.float32)
    peak = tl.full((BLOCK,), -1e38, tl.float32)
    for step in range(T):
        k = tl.load(k_ptr + at + step * CHANNELS).to(tl.float32)
        v = tl.load(v_ptr + at + step * CHANNELS).to(tl.float32)
        top = tl.maximum(peak, u + k)
        e1 = tl.exp(peak - top)
        e2 = tl.exp(u + k - top)
        y = (e1 * a + e2 * v) / (e1 * b + e2)
        tl.store(y_ptr + at + step * CHANNELS, y.to(tl.bfloat16))
        top = tl.maximum(peak + w, k)
        e1 = tl.exp(peak + w - top)
        e2 = tl.exp(k - top)
        a = e1 * a + e2 * v
        b = e1 * b + e2
        peak = top


def launch_wkv(
    batch: int, t: int, channels: int, *, tile: tuple[int], warps: int, stages: int
) -> LaunchSpec:
    """RWKV-4's recurrence with its stabilised exponentials."""
    return launch(
        (channels // tile[0], batch),
        (
            given("w_ptr", "f32", channels),
            given("u_ptr", "f32", channels),
            given("k_ptr", "bf16", batch, t, channels),
            given("v_ptr", "bf16", batch, t, channels),
            out("y_ptr", "bf16", batch, t, channels),
        ),
        warps, stages, T=t, CHANNELS=channels, BLOCK=tile[0],
    )  # fmt: skip


@triton.jit
def lion_update(p_ptr, g_ptr, m_ptr, pout_ptr, mout_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    p = tl.load(p_ptr + at)
    g = tl.load(g_ptr + at).to(tl.float32)
    m = tl.load(m_ptr + at).to(tl.float32)
    p = p * (1.0 - 1e-4 * 1e-2)
    difference = m - g
    update = difference * 0.9 + g
    sign = tl.where(update > 0, 1.0, tl.where(update < 0, -1.0, 0.0))
    tl.store(pout_ptr + at, p - 1e-4 * sign)
    tl.store(mout_ptr + at, (difference * 0.99 + g).to(tl.bfloat16))


def launch_lion_update(size: int, *, tile: tuple[int], warps: int, stages: int) -> LaunchSpec:
    """lion-pytorch's update, weights f32, the rest bf16."""
    return launch(
        (size // tile[0],),
        (
            given("p_ptr", "f32", size),
            given("g_ptr", "bf16", size),
            given("m_ptr", "bf16", size),
            out("pout_ptr", "f32", size),
            out("mout_ptr", "bf16", size),
        ),
        warps, stages, BLOCK=tile[0],
    )  # fmt: skip


@triton.jit
def volume_rendering(
    density_ptr, delta_ptr, colour_ptr, image_ptr, weight_ptr,
    SAMPLES: tl.constexpr, RAYS: tl.constexpr,
):  # fmt: skip
    ray = tl.program_id(0) * RAYS + tl.arange(0, RAYS)
    s = tl.arange(0, SAMPLES)
    at = ray[:, None] * SAMPLES + s[None, :]
    optical = tl.load(density_ptr + at) * tl.load(delta_ptr + at)
    before = tl.cumsum(optical, 1) - optical
    weight = tl.exp(-before) * (1.0 - tl.exp(-optical))
    tl.store(weight_ptr + at, weight)
    for channel in tl.static_range(3):
        colour = tl.load(colour_ptr + at * 3 + channel).to(tl.float32)
        tl.store(image_ptr + ray * 3 + channel, tl.sum(weight * colour, 1))


def launch_volume_rendering(
    rays: int, samples: int, *, tile: tuple[int], warps: int, stages: int
) -> LaunchSpec:
    """nerfacc's rendering: transmittance by a scan along each ray, then weighted colours."""
    return launch(
        (rays // tile[0],),
        (
            given("density_ptr", "f32", rays, samples, low=0.0),
            given("delta_ptr", "f32", rays, samples, low=0.0, high=0.1),
            given("colour_ptr", "f16", rays, samples, 3, low=0.0),
            out("image_ptr", "f32", rays, 3),
            out("weight_ptr", "f32", rays, samples),
        ),
        warps, stages, SAMPLES=samples, RAYS=tile[0],
    )  # fmt: skip


@triton.jit
def merge_attention(
    o_ptr, lse_ptr, y_ptr, total_ptr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, D)
    acc = tl.zeros((BLOCK, D), tl.float32)
    lse = tl.full((BLOCK,), float("-inf"), tl.float32)
    for part in range(PARTS):
        o = tl.load(o_ptr + (part * ROWS + row)[:, None] * D + d[None, :]).to(tl.float32)
        other = tl.load(lse_ptr + part * ROWS + row)
        share = 1.0 / (1.0 + tl.exp(lse - other))
        acc = acc - share[:, None] * (acc - o)
        lse = tl.maximum(lse, other) + tl.log(1.0 + tl.exp(-tl.abs(lse - other)))
    tl.store(y_ptr + row[:, None] * D + d[None, :], acc.to(tl.bfloat16))
    tl.store(total_ptr + row, lse)


def launch_merge_attention(
    parts: int, rows: int, d: int, *, tile: tuple[int], warps: int, stages: int
) -> LaunchSpec:
    """Ring attention's merge of partial outputs by their log-sum-exp."""
    return launch(
        (rows // tile[0],),
        (
            given("o_ptr", "bf16", parts, rows, d),
            given("lse_ptr", "f32", parts, rows),
            out("y_ptr", "bf16", rows, d),
            out("total_ptr", "f32", rows),
        ),
        warps, stages, PARTS=parts, ROWS=rows, D=d, BLOCK=tile[0],
    )  # fmt: skip


@triton.jit
def layernorm_backward(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, rstd_ptr, dx_ptr, dweight_ptr, dbias_ptr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    c = tl.arange(0, COLUMNS)
    weight = tl.load(weight_ptr + c).to(tl.float32)
    dweight = tl.zeros((COLUMNS,), tl.float32)
    dbias = tl.zeros((COLUMNS,), tl.float32)
    for step in range(ROWS):
        row = block * ROWS + step
        x = tl.load(x_ptr + row * COLUMNS + c).to(tl.float32)
        dy = tl.load(dy_ptr + row * COLUMNS + c).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normal = (x - tl.load(mean_ptr + row)) * rstd
        grad = dy * weight
        first = tl.sum(normal * grad, 0) / COLUMNS
        second = tl.sum(grad, 0) / COLUMNS
        dx = (grad - (normal * first + second)) * rstd
        tl.store(dx_ptr + row * COLUMNS + c, dx.to(tl.float16))
        dweight += dy * normal
        dbias += dy
    tl.store(dweight_ptr + block * COLUMNS + c, dweight)
    tl.store(dbias_ptr + block * COLUMNS + c, dbias)


def launch_layernorm_backward(blocks: int, rows: int, columns: int, *, warps: int) -> LaunchSpec:
    """attorch's backward pass of layer norm; a second kernel adds up the blocks."""
    shape = (blocks * rows, columns)
    return launch(
        (blocks,),
        (
            given("dy_ptr", "f16", *shape),
            given("x_ptr", "f16", *shape),
            given("weight_ptr", "f16", columns),
            given("mean_ptr", "f32", blocks * rows),
            given("rstd_ptr", "f32", blocks * rows, low=1.0, high=2.0),
            out("dx_ptr", "f16", *shape),
            out("dweight_ptr", "f32", blocks, columns),
            out("dbias_ptr", "f32", blocks, columns),
        ),
        warps, 3, ROWS=rows, COLUMNS=columns,
    )  # fmt: skip


@triton.jit
def mlstm_state(
    k_ptr, v_ptr, i_ptr, f_ptr, c_ptr, n_ptr, m_ptr,
    T: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(2)
    row = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    column = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    t = tl.arange(0, BLOCK_T)
    state = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    norm = tl.zeros((BLOCK_D,), tl.float32)
    peak = 0.0
    chunks: tl.constexpr = T // BLOCK_T
    for chunk in range(chunks):
        at = (head * chunks + chunk) * D
        tl.store(c_ptr + (at + row)[:, None] * D + column[None, :], state.to(tl.bfloat16))
        tl.store(n_ptr + at + row, norm)
        tl.store(m_ptr + head * chunks + chunk, peak)
        time = head * T + chunk * BLOCK_T + t
        forget = tl.load(f_ptr + time)
        forget = -tl.log(1.0 + tl.exp(-forget))
        total = tl.sum(forget, 0)
        gate = tl.load(i_ptr + time) + total - tl.cumsum(forget, 0)
        new = tl.maximum(total + peak, tl.max(gate, 0))
        scale = tl.exp(gate - new)
        old = tl.exp(total + peak - new)
        k = tl.load(k_ptr + time[None, :] * D + row[:, None]).to(tl.float32) * scale[None, :]
        v = tl.load(v_ptr + time[:, None] * D + column[None, :])
        state = state * old + tl.dot(k.to(tl.bfloat16), v)
        norm = norm * old + tl.sum(k, 1)
        peak = new


def launch_mlstm_state(
    heads: int, t: int, d: int, *, tile: tuple[int, int], warps: int, stages: int
) -> LaunchSpec:
    """xLSTM's chunkwise mLSTM: the states between chunks, with their stabiliser."""
    block_d, block_t = tile
    chunks = t // block_t
    return launch(
        (d // block_d, d // block_d, heads),
        (
            given("k_ptr", "bf16", heads, t, d),
            given("v_ptr", "bf16", heads, t, d),
            given("i_ptr", "f32", heads, t),
            given("f_ptr", "f32", heads, t, low=2.0, high=4.0),
            out("c_ptr", "bf16", heads, chunks, d, d),
            out("n_ptr", "f32", heads, chunks, d),
            out("m_ptr", "f32", heads, chunks),
        ),
        warps, stages, T=t, D=d, BLOCK_D=block_d, BLOCK_T=block_t,
    )  # fmt: skip
