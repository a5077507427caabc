"""Train a recommender: embedding bags, interactions of features, and two multilayer perceptrons."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument("--best", choices=["default", "graphs"], help="torch.compile")
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()


def perceptron(*sizes):
    layers = []
    for inputs, outputs in zip(sizes, sizes[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Recommender(nn.Module):
    def __init__(self, tables, rows, width):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(tables))
        self.bottom = perceptron(13, 512, 256, width)
        pairs = (tables + 1) * tables // 2
        self.top = perceptron(width + pairs, 1024, 512, 256, 1)
        row, column = torch.tril_indices(tables + 1, tables + 1, offset=-1)
        self.register_buffer("row", row)
        self.register_buffer("column", column)

    def forward(self, dense, indices, offsets):
        x = self.bottom(dense)
        found = [x] + [bag(i, o) for bag, i, o in zip(self.bags, indices, offsets)]
        features = torch.stack(found, dim=1)
        products = torch.bmm(features, features.transpose(1, 2))
        pairs = products[:, self.row, self.column]
        return self.top(torch.cat([x, pairs], dim=1)).squeeze(1)


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
tables, rows, width, batch, every = (
    (4, 100, 16, 32, 20) if options.tiny else (26, 20_000, 64, 2048, 20)
)
model = Recommender(tables, rows, width).to(device)
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.01)
criterion = nn.BCEWithLogitsLoss()
if options.best:
    model.compile(mode="reduce-overhead" if options.best == "graphs" else "default")

batches = []
for _ in range(4):
    indices = torch.randint(0, rows, (tables, 4 * batch), device=device)
    offsets = torch.arange(0, 4 * batch, 4, device=device).repeat(tables, 1)
    clicks = torch.randint(0, 2, (batch,), device=device).float()
    batches.append((torch.randn(batch, 13, device=device), indices, offsets, clicks))
for step in range(options.steps):
    dense, indices, offsets, clicks = batches[step % 4]
    optimizer.zero_grad()
    loss = criterion(model(dense, indices, offsets), clicks)
    loss.backward()
    optimizer.step()
    if step % every == every - 1:
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
