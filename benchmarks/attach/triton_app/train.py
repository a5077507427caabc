"""Train layers whose gates are hand-written Triton kernels; prints the loss every 50 steps."""

import argparse

import torch
import triton
import triton.language as tl
from torch import nn


@triton.jit
def gate_forward(a, b, y, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one = tl.load(a + at, at < count, 0.0)
    tl.store(y + at, one * tl.sigmoid(one) * tl.load(b + at, at < count, 0.0), at < count)


@triton.jit
def gate_backward(dy, a, b, da, db, count, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(dy + at, at < count, 0.0)
    one, two = tl.load(a + at, at < count, 0.0), tl.load(b + at, at < count, 0.0)
    s = tl.sigmoid(one)
    tl.store(da + at, grad * two * s * (1 + one * (1 - s)), at < count)
    tl.store(db + at, grad * one * s, at < count)


class Gate(torch.autograd.Function):
    @staticmethod
    def forward(context, a, b):
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


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return x + self.down(Gate.apply(self.gate(x), self.up(x)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(1024) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x = torch.randn(4096, 1024, device="cuda")
    for number in range(1, options.steps + 1):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number % 50 == 0:
            print(f"step {number} loss {loss.item():.9f}", flush=True)
