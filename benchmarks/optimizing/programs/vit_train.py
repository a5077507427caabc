"""Train a Vision Transformer of transformers on random images, in a plain loop with autocast."""

import argparse

import torch
from transformers import ViTConfig, ViTForImageClassification

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100_000)
parser.add_argument(
    "--best", choices=["default", "graphs"], help="torch.compile and a fused optimiser"
)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
hidden, layers, size, batch, every = (64, 2, 32, 4, 5) if options.tiny else (768, 12, 224, 64, 5)
config = ViTConfig(
    hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=hidden // 16 // 4 or 1,
    intermediate_size=4 * hidden, image_size=size, patch_size=16, num_labels=100,
    hidden_dropout_prob=0.1,
)  # fmt: skip
model = ViTForImageClassification(config).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True if options.best else None)
if options.best:
    model.compile(mode="reduce-overhead" if options.best == "graphs" else "default")

images = torch.randn(4 * batch, 3, size, size, device=device)
labels = torch.randint(0, 100, (4 * batch,), device=device)
for step in range(options.steps):
    rows = slice(step % 4 * batch, (step % 4 + 1) * batch)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(pixel_values=images[rows], labels=labels[rows]).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % every == every - 1:
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
