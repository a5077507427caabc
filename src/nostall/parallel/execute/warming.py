"""One pass of each kind through a stage before any message is under way.

CUDA loads a kernel at its first launch, and may wait for all that runs on the GPU before it does
(CUDA programming guide, lazy loading).  What runs may be NCCL, waiting for a message that another
rank sends only after it has got the one that this kernel is to make: both would wait for ever.
"""

from __future__ import annotations

from typing import Any

import torch

from nostall.parallel.execute.passes import StagePasses
from nostall.parallel.module.model import Model
from nostall.parallel.module.piece import Piece

_NUMBER = -1
"""No micro-batch has it."""


def warm_up(
    model: Model,
    passes: StagePasses,
    piece: Piece,
    batch: tuple[Any, Any],
    samples: int,
    device: torch.device,
    *,
    split: bool,
) -> None:
    """Both passes of ``piece``, on zeros and so many samples: ``batch``, which is on the device.

    ``split``: the backward pass in halves.  Gradients that are there, and what random numbers come
    next, stay as they are.
    """
    kept = [p.grad for p in passes.parameters]
    received = {
        name: torch.zeros(model.shape(name, samples), dtype=model.dtype(name), device=device)
        for name in piece.received
    }
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        sent, _ = passes.forward(_NUMBER, piece, received, batch, 1.0)
        gradients = {n: torch.zeros_like(t) for n, t in sent.items() if t.is_floating_point()}
        if split:
            passes.backward_inputs(_NUMBER, gradients)
            passes.backward_weights(_NUMBER)
        else:
            passes.backward(_NUMBER, gradients)
    for parameter, grad in zip(passes.parameters, kept, strict=True):
        parameter.grad = grad
    if device.type == "cuda":
        torch.cuda.synchronize(device)
