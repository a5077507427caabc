"""The same training in a single process: what a plan's run has to equal."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from nostall.parallel.module.job import Job, on_device

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Largest difference / largest value of a gradient that counts as equal; sums are rounded in
another order.  Coarser types: 0.05."""
COARSE = 0.05


class Reference:
    """A copy of the module, trained on whole batches."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job = job
        self.device = device
        self.module = copy.deepcopy(job.module).to(device)
        self.optimizer = optimizer_of(job, list(self.module.parameters()))

    def step(self, inputs: Any, targets: Any) -> float:
        """Loss of an iteration; its gradients stay until :meth:`update`."""
        inputs, targets = on_device((inputs, targets), self.device)
        named = isinstance(inputs, Mapping)
        output = self.module(**inputs) if named else self.module(*inputs)
        loss = self.job.loss(output, targets)
        loss.backward()
        return float(loss.detach())

    def worst(self, names: Mapping[str, torch.nn.Parameter]) -> float:
        """Largest difference of a gradient as a part of its tolerance; at most 1 is equal."""
        worst = 0.0
        for name, parameter in names.items():
            wanted = self.module.get_parameter(name).grad
            if wanted is None and parameter.grad is None:
                continue
            wanted = torch.zeros_like(parameter) if wanted is None else wanted
            found = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            scale = max(float(wanted.abs().max()), 1e-6)
            allowed = TOLERANCE.get(parameter.dtype, COARSE)
            worst = max(worst, float((found - wanted).abs().max()) / scale / allowed)
        return worst

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def optimizer_of(job: Job, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The job's optimiser over these parameters."""
    wanted = [p for p in parameters if p.requires_grad]
    return job.optimizer(wanted) if job.optimizer else torch.optim.SGD(wanted, lr=0.01)
