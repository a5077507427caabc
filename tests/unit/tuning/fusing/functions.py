"""Fused PyTorch functions in Triton's interpreter; run by ``tests.unit.fusion.codegen.interpreting``."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nostall.fusion.fuse import fuse


class Block(nn.Module):
    """Two matrix products with a norm, a gate and a residual around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return (x + y).softmax(-1).log()


def largest(one: Tensor, other: Tensor) -> float:
    return float((one - other).detach().abs().max())


def dynamic_batch(folder: Path) -> dict[str, object]:
    """A model called with several batch sizes: largest differences, and how many graphs it took."""
    model = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 8), nn.GELU())
    fused = fuse(model, folder=folder, dynamic=True)
    differences = []
    for rows in (5, 3, 16):
        x = torch.randn(rows, 24, requires_grad=True)
        (want,) = torch.autograd.grad(model(x).square().sum(), x)
        got = fused(x)
        differences.append(largest(got, model(x)))
        (gradient,) = torch.autograd.grad(got.square().sum(), x)
        differences.append(largest(gradient, want))
    return {"largest": max(differences), "kernels": [graph.kernels for graph in fused.graphs]}


def dropout(folder: Path) -> dict[str, object]:
    """What dropout does in a fused function: a mask for both passes, again for the same seed."""

    def function(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.25) + F.dropout(x.exp(), 0.5) * 1000

    fused = fuse(function, folder=folder)
    x = torch.ones(64, 48, requires_grad=True)
    torch.manual_seed(1)
    first, second = fused(x), fused(x)
    torch.manual_seed(1)
    again = fused(x)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    wide = (first > 500).float()
    small = ((first - wide * 2000 * torch.e).abs() > 1).float()
    expected = small * 2 / 0.75 + wide * 2000 * torch.e
    return {
        "kernels": [graph.kernels for graph in fused.graphs],
        "refused": len(fused.refused),
        "again": torch.equal(first, again),
        "fresh": not torch.equal(first, second),
        "kept": [float(small.mean()), float(wide.mean())],
        "together": float((small * wide).mean()),
        "forward": largest(first, expected),
        "backward": largest(gradient, expected),
    }


def asserted(folder: Path) -> dict[str, object]:
    """Functions that assert something of what a kernel computes, and give nothing for it."""

    def function(label: Tensor, x: Tensor) -> Tensor:
        return x.softmax(-1) - F.one_hot(label * 2, 24)

    fused, label, x = fuse(function, folder=folder), torch.arange(12), torch.randn(12, 24)
    result: dict[str, object] = {"difference": largest(fused(label, x), function(label, x))}
    result["refused"] = sorted({operator for _, operator in fused.refused})
    try:
        fused(label + 1, x)
    except RuntimeError as error:
        result["said"] = str(error)
    return result


def fused_and_plain(folder: Path) -> dict[str, object]:
    """Largest differences between fused functions and the same without, kernels, refusals."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(3, 4, 24)
    fused = fuse(model, folder=folder)
    result: dict[str, object] = {}
    expected = model(x)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    got = fused(x)
    got.square().sum().backward()
    result["forward"] = largest(got, expected)
    result["backward"] = max(
        largest(p.grad, want) for p, want in zip(model.parameters(), gradients, strict=True)
    )
    result["graphs"] = [graph.kernels for graph in fused.graphs]

    def several(a: Tensor, scale: float) -> dict[str, Tensor]:
        return {"sum": (a * scale).sum(-1), "sorted": torch.sort(a.exp(), -1).values}

    more, other = fuse(several, folder=folder), torch.randn(2, 24)
    found, want = more(other, 2.0), several(other, 2.0)
    result["structure"] = {key: largest(found[key], want[key]) for key in want}
    result["dropout"] = dropout(folder)
    result["dynamic"] = dynamic_batch(folder)
    result["asserted"] = asserted(folder)
    result["refused"] = [f"{operator}: {why}" for why, operator in more.refused]
    return result
