"""Reference for checking a run: the same training in a single process."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from nostall.parallel.module.job import Job, to_device

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest allowed difference of a gradient, divided by its tensor's largest value: the sums are
rounded in another order.  Other types: ``COARSE_TOLERANCE``."""
COARSE_TOLERANCE = 0.05


class Reference:
    """A copy of the module that is trained on whole batches."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job = job
        self.device = device
        self.module = copy.deepcopy(job.module).to(device)
        self.optimizer = make_optimizer(job, list(self.module.parameters()))

    def step(self, inputs: Any, targets: Any) -> float:
        """Forward and backward pass of one iteration; returns its loss.

        The gradients stay until :meth:`update`.
        """
        inputs, targets = to_device((inputs, targets), self.device)
        is_named = isinstance(inputs, Mapping)
        output = self.module(**inputs) if is_named else self.module(*inputs)
        loss = self.job.loss(output, targets)
        loss.backward()
        return float(loss.detach())

    def gradient_error(self, parameters: Mapping[str, torch.nn.Parameter]) -> float:
        """Largest difference of a gradient from the reference, divided by the tolerance.

        ``parameters`` are those of a run, by name.  At most 1 counts as equal.
        """
        worst = 0.0
        for name, parameter in parameters.items():
            expected = self.module.get_parameter(name).grad
            if expected is None and parameter.grad is None:
                continue
            expected = torch.zeros_like(parameter) if expected is None else expected
            actual = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            scale = max(float(expected.abs().max()), 1e-6)
            tolerance = TOLERANCE.get(parameter.dtype, COARSE_TOLERANCE)
            worst = max(worst, float((actual - expected).abs().max()) / scale / tolerance)
        return worst

    def update(self) -> None:
        """Step the optimiser and clear the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_optimizer(job: Job, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The job's optimiser over the trainable ones of ``parameters``; SGD if the job has none."""
    trainable = [p for p in parameters if p.requires_grad]
    return job.optimizer(trainable) if job.optimizer else torch.optim.SGD(trainable, lr=0.01)
