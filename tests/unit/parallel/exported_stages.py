"""Train exported stages on two forked processes, and check them against one process.

``python -m tests.unit.parallel.exported_stages FOLDER NAME ...`` reads ``FOLDER/NAME.py`` and
prints as JSON why each rank refuses a weight that two of its stages share.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from tests.unit.parallel.execute.trainer.ranks import on_ranks


class Model(nn.Module):
    """Layers of different kinds; with ``skips``, the last one reads a result of the first;
    with ``turns``, results are no contiguous tensors."""

    def __init__(self, seed: int, *, skips: bool, turns: bool = False) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.skips, self.turns = skips, turns
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor) -> Any:
        x = first = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            x = x.mT.contiguous().mT if self.turns else x
        return self.head(x + first if self.skips else x)


def check_stages(folder: Path, names: list[str]) -> str:
    """Check the stages of each file on this rank; returns why a tied weight is refused."""
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(rank)  # check gives all processes rank 0's values
    tokens, targets = torch.randint(0, 16, (2, 8, 5), generator=generator)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    text: dict[str, Any] = {}
    for name in names:
        text = {}
        exec((folder / f"{name}.py").read_text(), text)
        skips = name != "interleaved"
        text["check"](Model(rank, skips=skips), (tokens,), targets, loss, "cpu")
        # A step that averages where the loss adds up is another one.
        with pytest.raises(ValueError, match="in stages differs from one process"):
            text["check"](Model(rank, skips=skips), (tokens,), targets, loss, "cpu", mean=False)
    with pytest.raises(ValueError, match="stage 2 reads a value of stage 0"):
        text["check"](Model(rank, skips=True), (tokens,), targets, loss, "cpu")
    with pytest.raises(ValueError, match="memory is not contiguous"):
        text["check"](Model(rank, skips=False, turns=True), (tokens,), targets, loss, "cpu")
    tied = Model(rank, skips=False)
    tied.head.weight = tied.embed.weight
    with pytest.raises(ValueError, match="in stages") as caught:
        text["check"](tied, (tokens,), targets, loss, "cpu")
    return str(caught.value).partition(", and")[0]


def main() -> None:
    folder = Path(sys.argv[1])
    print(json.dumps(on_ranks(2, folder, check_stages, folder, sys.argv[2:])))


if __name__ == "__main__":
    main()
