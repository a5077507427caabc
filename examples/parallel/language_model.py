"""A small language model for the examples of training by a plan: a job and a data set."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from nostall.parallel.module import Job

WIDTH, TOKENS, LENGTH = 32, 64, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def build() -> Job:
    """The job for ``nostall plan`` and ``nostall.parallel.build``."""
    torch.manual_seed(0)
    tokens = torch.zeros(8, LENGTH, dtype=torch.long)  # an example batch
    return Job(LanguageModel(), (tokens,), tokens, next_token)


class Corpus(torch.utils.data.Dataset):
    """256 samples: tokens, and the tokens that follow them.  A rank reads its own ones only."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, TOKENS // 8, (LENGTH + 1,), generator=generator)
        return tokens[:-1], tokens[1:]
