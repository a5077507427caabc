"""Train until a step, from the latest checkpoint on, by any plan and on any number of processes.

torchrun --nproc-per-node 2 resume.py two.json checkpoints 4
torchrun --nproc-per-node 4 resume.py four.json checkpoints 8
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from language_model import Corpus
from language_model import build as build_job

from nostall.parallel import build

LAST_STEP = 8


def main(plan: str, folder: str, until: int) -> None:
    trainer = build(plan, build_job(), optimizer=lambda own: torch.optim.AdamW(own, lr=1e-2))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(trainer.optimizer, LAST_STEP)
    corpus = Corpus()
    sampler = trainer.sampler(len(corpus))
    trainer.load(folder, scheduler=scheduler, sampler=sampler)  # nothing, if there is none
    loader = torch.utils.data.DataLoader(corpus, batch_sampler=sampler)
    while trainer.steps < until:
        for batch in loader:
            loss = trainer.step(batch, max_norm=1.0)
            scheduler.step()
            if dist.get_rank() == 0:
                print(f"step {trainer.steps} loss {float(loss):.6f}")
            if trainer.steps % 2 == 0:
                trainer.save(folder, scheduler=scheduler, sampler=sampler)
            if trainer.steps == until:
                break
    trainer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
