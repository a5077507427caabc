"""Train a word-level language model with an LSTM, as PyTorch's example does."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1_000_000)
parser.add_argument(
    "--best", choices=["default", "graphs"], help="torch.compile and a fused optimiser"
)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()


class Model(nn.Module):
    def __init__(self, words, width, layers):
        super().__init__()
        self.drop = nn.Dropout(0.2)
        self.encoder = nn.Embedding(words, width)
        self.rnn = nn.LSTM(width, width, layers, dropout=0.2)
        self.decoder = nn.Linear(width, words)
        self.decoder.weight = self.encoder.weight

    def forward(self, tokens, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(tokens)), hidden)
        return self.decoder(self.drop(output)).flatten(0, 1), hidden


torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
words, width, layers, length, batch, every = (
    (200, 32, 2, 8, 4, 10) if options.tiny else (33278, 650, 2, 35, 40, 20)
)  # fmt: skip
model = Model(words, width, layers).to(device)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True if options.best else None)
if options.best:
    model.compile(mode="reduce-overhead" if options.best == "graphs" else "default")

text = torch.randint(0, words, (16 * length + 1, batch), device=device)
hidden = tuple(torch.zeros(layers, batch, width, device=device) for _ in range(2))
for step in range(options.steps):
    begin = step % 16 * length
    hidden = tuple(part.detach() for part in hidden)
    if options.best == "graphs":  # the next replay overwrites outputs
        hidden = tuple(part.clone() for part in hidden)
    optimizer.zero_grad()
    output, hidden = model(text[begin : begin + length], hidden)
    loss = criterion(output, text[begin + 1 : begin + 1 + length].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    if step % every == every - 1:
        print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
