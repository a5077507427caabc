"""Checks of fused PyTorch functions in Triton's interpreter.

Run by ``tests.unit.fusion.codegen.interpreted.interpreting`` in a process of its own.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nostall.fusion.fuse import stitch_function


class Block(nn.Module):
    """Two matrix products with a norm, a gate and a residual around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.up, self.down = nn.Linear(24, 32), nn.Linear(32, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x))))
        return (x + y).softmax(-1).log()


def max_difference(result: Tensor, expected: Tensor) -> float:
    return float((result - expected).detach().abs().max())


def dynamic_batch(folder: Path) -> dict[str, object]:
    """Call a model with several batch sizes; returns the largest difference and kernel counts."""
    model = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 8), nn.GELU())
    fused = stitch_function(model, folder=folder, dynamic=True)
    differences = []
    for rows in (5, 3, 16):
        x = torch.randn(rows, 24, requires_grad=True)
        (expected,) = torch.autograd.grad(model(x).square().sum(), x)
        result = fused(x)
        differences.append(max_difference(result, model(x)))
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
        differences.append(max_difference(gradient, expected))
    return {"largest": max(differences), "kernels": [graph.kernels for graph in fused.graphs]}


def dropout(folder: Path) -> dict[str, object]:
    """Properties of dropout in a fused function: one mask for both passes, repeatable by seed."""

    def function(x: Tensor) -> Tensor:
        return F.dropout(x * 2, 0.25) + F.dropout(x.exp(), 0.5) * 1000

    fused = stitch_function(function, folder=folder)
    x = torch.ones(64, 48, requires_grad=True)
    torch.manual_seed(1)
    first, second = fused(x), fused(x)
    torch.manual_seed(1)
    repeated = fused(x)
    (gradient,) = torch.autograd.grad(first.sum(), x)
    wide = (first > 500).float()
    small = ((first - wide * 2000 * torch.e).abs() > 1).float()
    expected = small * 2 / 0.75 + wide * 2000 * torch.e
    return {
        "kernels": [graph.kernels for graph in fused.graphs],
        "refused": len(fused.unfused),
        "again": torch.equal(first, repeated),
        "fresh": not torch.equal(first, second),
        "kept": [float(small.mean()), float(wide.mean())],
        "together": float((small * wide).mean()),
        "forward": max_difference(first, expected),
        "backward": max_difference(gradient, expected),
    }


def asserted(folder: Path) -> dict[str, object]:
    """A function with an assertion on its inputs, which has no result and must still be run."""

    def function(label: Tensor, x: Tensor) -> Tensor:
        return x.softmax(-1) - F.one_hot(label * 2, 24)

    fused = stitch_function(function, folder=folder)
    label, x = torch.arange(12), torch.randn(12, 24)
    result: dict[str, object] = {"difference": max_difference(fused(label, x), function(label, x))}
    result["refused"] = sorted({operator for _, operator in fused.unfused})
    try:
        fused(label + 1, x)
    except RuntimeError as error:
        result["said"] = str(error)
    return result


def fused_and_plain(folder: Path) -> dict[str, object]:
    """Compare fused functions with the originals: largest differences, kernels, unfused calls."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(3, 4, 24)
    fused = stitch_function(model, folder=folder)
    result: dict[str, object] = {}
    expected = model(x)
    expected.square().sum().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    output = fused(x)
    output.square().sum().backward()
    result["forward"] = max_difference(output, expected)
    result["backward"] = max(
        max_difference(parameter.grad, gradient)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True)
    )
    result["graphs"] = [graph.kernels for graph in fused.graphs]

    def several(a: Tensor, scale: float) -> dict[str, Tensor]:
        return {"sum": (a * scale).sum(-1), "sorted": torch.sort(a.exp(), -1).values}

    fused_several, a = stitch_function(several, folder=folder), torch.randn(2, 24)
    outputs, wanted = fused_several(a, 2.0), several(a, 2.0)
    result["structure"] = {key: max_difference(outputs[key], wanted[key]) for key in wanted}
    result["dropout"] = dropout(folder)
    result["dynamic"] = dynamic_batch(folder)
    result["asserted"] = asserted(folder)
    result["refused"] = [f"{operator}: {reason}" for reason, operator in fused_several.unfused]
    return result
