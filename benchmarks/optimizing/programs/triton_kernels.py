"""Train a small transformer whose norms and gates are hand-written Triton kernels."""

import argparse

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument(
    "--best", choices=["default", "graphs"], help="torch.compile and a fused optimiser"
)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()


@triton.jit
def norm_forward(x, w, y, scale, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    keep = at < width
    value = tl.load(x + row * width + at, keep, 0.0).to(tl.float32)
    r = 1 / tl.sqrt(tl.sum(value * value) / width + eps)
    tl.store(scale + row, r)
    weight = tl.load(w + at, keep, 0.0).to(tl.float32)
    tl.store(y + row * width + at, (value * r * weight).to(y.dtype.element_ty), keep)


@triton.jit
def norm_backward(dy, x, w, scale, dx, dw, width, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    keep = at < width
    value = tl.load(x + row * width + at, keep, 0.0).to(tl.float32)
    grad = tl.load(dy + row * width + at, keep, 0.0).to(tl.float32)
    weight = tl.load(w + at, keep, 0.0).to(tl.float32)
    r = tl.load(scale + row)
    normal, inner = value * r, grad * weight
    mean = tl.sum(inner * normal) / width
    tl.store(dx + row * width + at, ((inner - normal * mean) * r).to(dx.dtype.element_ty), keep)
    tl.store(dw + row * width + at, grad * normal, keep)


@triton.jit
def gate_forward(a, b, y, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    one = tl.load(a + at, keep, 0.0).to(tl.float32)
    two = tl.load(b + at, keep, 0.0).to(tl.float32)
    tl.store(y + at, (one * tl.sigmoid(one) * two).to(y.dtype.element_ty), keep)


@triton.jit
def gate_backward(dy, a, b, da, db, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    keep = at < count
    grad = tl.load(dy + at, keep, 0.0).to(tl.float32)
    one = tl.load(a + at, keep, 0.0).to(tl.float32)
    two = tl.load(b + at, keep, 0.0).to(tl.float32)
    s = tl.sigmoid(one)
    tl.store(da + at, (grad * two * s * (1 + one * (1 - s))).to(da.dtype.element_ty), keep)
    tl.store(db + at, (grad * one * s).to(db.dtype.element_ty), keep)


class Norm(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        flat = x.contiguous().view(-1, x.shape[-1])
        y, scale = torch.empty_like(flat), torch.empty(len(flat), device=x.device)
        width = flat.shape[1]
        norm_forward[(len(flat),)](
            flat, weight, y, scale, width, 1e-6, triton.next_power_of_2(width)
        )
        context.save_for_backward(flat, weight, scale)
        return y.view_as(x)

    @staticmethod
    def backward(context, dy):
        flat, weight, scale = context.saved_tensors
        grad = dy.contiguous().view_as(flat)
        dx, dw = torch.empty_like(flat), torch.empty_like(flat, dtype=torch.float32)
        width = flat.shape[1]
        block = triton.next_power_of_2(width)
        norm_backward[(len(flat),)](grad, flat, weight, scale, dx, dw, width, block)
        return dx.view_as(dy), dw.sum(0).to(weight.dtype)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(context, a, b):
        a, b = a.contiguous(), b.contiguous()
        y = torch.empty_like(a)
        gate_forward[(triton.cdiv(a.numel(), 1024),)](a, b, y, a.numel(), 1024)
        context.save_for_backward(a, b)
        return y

    @staticmethod
    def backward(context, dy):
        a, b = context.saved_tensors
        da, db = torch.empty_like(a), torch.empty_like(b)
        grid = (triton.cdiv(a.numel(), 1024),)
        gate_backward[grid](dy.contiguous(), a, b, da, db, a.numel(), 1024)
        return da, db


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.qkv, self.out = (
            nn.Linear(width, 3 * width, bias=False),
            nn.Linear(width, width, bias=False),
        )
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        batch, length, width = x.shape
        qkv = self.qkv(Norm.apply(x, self.norm1)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        h = Norm.apply(x, self.norm2)
        return x + self.down(Gate.apply(self.gate(h), self.up(h)))


class Model(nn.Module):
    def __init__(self, words, width, layers):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(Block(width, width // 64 or 1) for _ in range(layers))
        self.norm, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(Norm.apply(x, self.norm))


torch.manual_seed(0)
if not torch.cuda.is_available():
    raise SystemExit("this program needs a GPU")
words, width, layers, batch, length = (
    (512, 128, 2, 2, 64) if options.tiny else (32000, 1024, 8, 8, 512)
)
model = Model(words, width, layers).to("cuda", torch.bfloat16)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if options.best else None)
if options.best:
    model.compile(mode="reduce-overhead" if options.best == "graphs" else "default")

tokens = torch.randint(0, words, (4, batch, length + 1), device="cuda")
for step in range(options.steps):
    rows = tokens[step % 4]
    logits = model(rows[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
