"""Run in a process of its own: fused PyTorch functions in Triton's interpreter, results as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nostall.fusion.codegen.interpreted import prepare
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


def main() -> None:
    prepare()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder = Path(sys.argv[1])
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
    # Another shape is another trace; a structured result and a number come back as they were.
    other = torch.randn(2, 24)

    def several(a: Tensor, scale: float) -> dict[str, Tensor]:
        return {"sum": (a * scale).sum(-1), "sorted": torch.sort(a.exp(), -1).values}

    more = fuse(several, folder=folder)
    with torch.no_grad():
        result["other shape"] = largest(fused(other), model(other))
        found, want = more(other, 2.0), several(other, 2.0)
    result["structure"] = {key: largest(found[key], want[key]) for key in want}
    result["refused"] = [f"{operator}: {why}" for why, operator in more.refused]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
