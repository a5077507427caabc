"""A decoder step with three hand-written Triton kernels: 4-bit weights, attention, a gated norm."""

# ruff: noqa: N803

import torch
import triton
import triton.language as tl

WIDTH, HEADS, BATCH, LENGTH, LAYERS = 4096, 32, 128, 1024, 4


@triton.autotune(
    configs=[
        triton.Config({"BLOCK_N": 64, "BLOCK_K": 64}, num_warps=4, num_stages=3),
        triton.Config({"BLOCK_N": 128, "BLOCK_K": 64}, num_warps=8, num_stages=3),
        triton.Config({"BLOCK_N": 64, "BLOCK_K": 128}, num_warps=4, num_stages=2),
    ],
    key=["N", "K"],
)
@triton.jit
def int4_matmul(
    x, packed, scales, y, N, K, M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """y = x @ w: 4-bit weights, two of neighbouring rows in a byte, a scale for 128 rows."""
    rows, columns = tl.arange(0, M), tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    halves = tl.arange(0, BLOCK_K // 2)
    total = tl.zeros((M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        byte = tl.load(packed + (k // 2 + halves)[:, None] * N + columns[None, :])
        scale = tl.load(scales + (k // 128) * N + columns)[None, :]
        low = ((byte & 15).to(tl.float16) - 8.0) * scale
        high = ((byte >> 4).to(tl.float16) - 8.0) * scale
        even = tl.load(x + rows[:, None] * K + (k + 2 * halves)[None, :])
        odd = tl.load(x + rows[:, None] * K + (k + 2 * halves + 1)[None, :])
        total = tl.dot(even, low.to(tl.float16), total)
        total = tl.dot(odd, high.to(tl.float16), total)
    tl.store(y + rows[:, None] * N + columns[None, :], total.to(tl.float16))


@triton.jit
def decode_attention(q, k, v, y, length, scale, D: tl.constexpr, BLOCK: tl.constexpr):
    """One query of a head against its keys and values."""
    head = tl.program_id(0).to(tl.int64)
    at, dims = tl.arange(0, BLOCK), tl.arange(0, D)
    query = tl.load(q + head * D + dims).to(tl.float32) * scale
    highest, total = -float("inf"), 0.0
    out = tl.zeros((D,), dtype=tl.float32)
    for start in range(0, length, BLOCK):
        place = head * length * D + (start + at)[:, None] * D + dims[None, :]
        score = tl.sum(tl.load(k + place).to(tl.float32) * query[None, :], 1)
        top = tl.maximum(highest, tl.max(score, 0))
        weight = tl.exp(score - top)
        keep = tl.exp(highest - top)
        total = total * keep + tl.sum(weight, 0)
        out = out * keep + tl.sum(weight[:, None] * tl.load(v + place).to(tl.float32), 0)
        highest = top
    tl.store(y + head * D + dims, (out / total).to(tl.float16))


@triton.jit
def gated_norm(x, gate, weight, y, width, BLOCK: tl.constexpr):
    """Root mean square norm of x * sigmoid(gate), a row a block."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    keep = at < width
    value = tl.load(x + row + at, keep, 0.0).to(tl.float32)
    value *= tl.sigmoid(tl.load(gate + row + at, keep, 0.0).to(tl.float32))
    norm = value * tl.rsqrt(tl.sum(value * value, 0) / width + 1e-6)
    result = norm * tl.load(weight + at, keep, 0.0).to(tl.float32)
    tl.store(y + row + at, result.to(tl.float16), keep)


class Decoder:
    """Weights, cache and buffers of some layers."""

    def __init__(self):
        half = {"device": "cuda", "dtype": torch.float16}
        shape = LAYERS, WIDTH // 2, WIDTH
        self.packed = torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)
        self.scales = torch.full((LAYERS, WIDTH // 128, WIDTH), 0.003, **half)
        cache = BATCH // 16 * HEADS, LENGTH, WIDTH // HEADS
        self.keys, self.values = (torch.randn(cache, **half) for _ in range(2))
        self.weight = torch.ones(WIDTH, **half)
        self.x = torch.randn(BATCH, WIDTH, **half)
        self.gate, self.y, self.normal = (torch.randn(BATCH, WIDTH, **half) for _ in range(3))


def step(model):
    """All layers, in place; returns the state."""
    heads = len(model.keys)
    for layer in range(LAYERS):
        grid = lambda meta: (WIDTH // meta["BLOCK_N"],)  # noqa: E731
        int4_matmul[grid](
            model.x, model.packed[layer], model.scales[layer], model.y, WIDTH, WIDTH, BATCH
        )
        decode_attention[(heads,)](
            model.y, model.keys, model.values, model.gate, LENGTH, 0.088, WIDTH // HEADS, 64
        )
        gated_norm[(BATCH,)](model.y, model.gate, model.weight, model.x, WIDTH, WIDTH)
    return model.x
