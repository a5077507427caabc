"""Accumulate gradients over two batches, clip them, and let the learning rate follow a cosine.

torchrun --nproc-per-node 2 accumulate.py plan.json
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from language_model import Corpus
from language_model import build as build_job

from nostall.parallel import build

STEPS, ACCUMULATED = 8, 2


def main(plan: str) -> None:
    trainer = build(plan, build_job(), optimizer=lambda own: torch.optim.AdamW(own, lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, STEPS)
    corpus = Corpus()
    loader = torch.utils.data.DataLoader(corpus, batch_sampler=trainer.sampler(len(corpus)))
    while trainer.steps < STEPS:
        for batch in loader:
            is_last = (trainer.passes + 1) % ACCUMULATED == 0
            loss = trainer.forward_backward(batch, scale=1 / ACCUMULATED, reduce=is_last)
            if not is_last:
                continue
            norm = trainer.clip_grad_norm_(1.0)
            trainer.optimizer.step()
            scheduler.step()
            trainer.zero_grad()
            if dist.get_rank() == 0:
                rate = scheduler.get_last_lr()[0]
                print(f"step {trainer.steps} loss {loss:.6f} norm {norm:.6f} rate {rate:.6f}")
            if trainer.steps == STEPS:
                break
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
