"""A deep network of small layers: the host launches its kernels more slowly than a GPU runs them.

Usage: ``python small_layers.py [--steps N] [--layers N] [--width N] [--batch N]``.
"""

import argparse

import torch
from torch import nn
from torch.nn import functional


class Residual(nn.Module):
    """A small feed-forward network with a residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Network(nn.Module):
    """Predicts one number from features."""

    def __init__(self, features: int, width: int, layers: int) -> None:
        super().__init__()
        self.inputs = nn.Linear(features, width)
        self.layers = nn.ModuleList(Residual(width) for _ in range(layers))
        self.output = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inputs(x)
        for layer in self.layers:
            x = layer(x)
        return self.output(x).squeeze(-1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument(
        "--best", choices=["default", "graphs"], help="torch.compile, fused optimiser"
    )
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.width, args.batch = 3, 32, 16
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    network = Network(64, args.width, args.layers).to(device)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, fused=True if args.best else None)
    target = torch.randn(64, device=device)
    if args.best:
        network.compile(mode="reduce-overhead" if args.best == "graphs" else "default")
    every = 20 if args.tiny else 50
    for step in range(args.steps):
        features = torch.randn(args.batch, 64, device=device)
        optimizer.zero_grad()
        loss = functional.mse_loss(network(features), features @ target)
        loss.backward()
        optimizer.step()
        if step % every == every - 1:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
