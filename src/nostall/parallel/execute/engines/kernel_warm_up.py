"""Warm-up of a stage's CUDA kernels, before any message between ranks is under way.

CUDA loads a kernel at its first launch and may wait for all running work on the GPU before it does
(CUDA programming guide, lazy loading).  That work may be an NCCL kernel that waits for a message
which another rank sends only after it receives the output of the kernel being loaded: a deadlock.
"""

from __future__ import annotations

from typing import Any

import torch

from nostall.parallel.execute.engines.stage_passes import StagePasses
from nostall.parallel.module.model import Model
from nostall.parallel.module.segment import Segment

_MICRO_BATCH = -1
"""A number that no micro-batch of a run has."""


def warm_up(
    model: Model,
    passes: StagePasses,
    segment: Segment,
    batch: tuple[Any, Any],
    samples: int,
    device: torch.device,
    *,
    split_backward: bool,
) -> None:
    """Run the forward and backward pass of a segment once, with zeros as received tensors.

    ``batch`` holds ``samples`` samples on the device.  Gradients and the state of the random number
    generators are the same afterwards.
    """
    gradients_before = [p.grad for p in passes.parameters]
    received = {
        name: torch.zeros(model.shape(name, samples), dtype=model.dtype(name), device=device)
        for name in segment.received
    }
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        sent, _ = passes.forward(_MICRO_BATCH, segment, received, batch, 1.0)
        gradients = {n: torch.zeros_like(t) for n, t in sent.items() if model.has_gradient(n)}
        if split_backward:
            passes.backward_inputs(_MICRO_BATCH, gradients)
            passes.backward_weights(_MICRO_BATCH)
        else:
            passes.backward(_MICRO_BATCH, gradients)
    for parameter, grad in zip(passes.parameters, gradients_before, strict=True):
        parameter.grad = grad
    if device.type == "cuda":
        torch.cuda.synchronize(device)
