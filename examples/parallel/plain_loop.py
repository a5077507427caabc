"""Train by a plan in a plain loop: torchrun --nproc-per-node 2 plain_loop.py plan.json"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from language_model import Corpus
from language_model import build as build_job

from nostall.parallel import build


def main(plan: str) -> None:
    trainer = build(plan, build_job(), optimizer=lambda own: torch.optim.AdamW(own, lr=1e-2))
    corpus = Corpus()
    loader = torch.utils.data.DataLoader(corpus, batch_sampler=trainer.sampler(len(corpus)))
    for batch in loader:
        loss = trainer.step(batch, max_norm=1.0)
        if dist.get_rank() == 0:
            print(f"step {trainer.steps} loss {float(loss):.6f}")
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
