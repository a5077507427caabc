"""Reference for checking a run: the same training in a single process."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from nostall.parallel.module.job import Job, to_device
from nostall.parallel.module.precision import coarsest, tolerance


class Reference:
    """A copy of the module that is trained on whole batches."""

    def __init__(self, job: Job, device: torch.device, dtype: torch.dtype = torch.float64) -> None:
        """``dtype`` is the coarsest type that the step computes in; it limits the tolerance."""
        self.job, self.dtype = job, dtype
        self.device = device
        self.module = copy.deepcopy(job.module).to(device)
        self.optimizer = make_optimizer(job, self.module.parameters())

    def step(self, inputs: Any, targets: Any) -> float:
        """Forward and backward pass of one iteration; returns its loss.

        The gradients stay until :meth:`update`.
        """
        inputs, targets = to_device((inputs, targets), self.device)
        loss = self.job.run(inputs, targets, self.module)
        loss.backward()
        return float(loss.detach())

    def gradient_error(self, gradients: Mapping[str, torch.Tensor | None]) -> float:
        """Largest difference of a gradient from the reference, divided by the tolerance.

        ``gradients`` has every parameter that a rank holds, by name; None counts as zeros.  At most
        1 counts as equal; the error is infinite if a value is not a number.
        """
        worst = 0.0
        for name, gradient in gradients.items():
            parameter = self.module.get_parameter(name)
            expected = parameter.grad
            if expected is None and gradient is None:
                continue
            expected = torch.zeros_like(parameter) if expected is None else expected
            actual = torch.zeros_like(parameter) if gradient is None else gradient
            difference = float((actual - expected).abs().max())
            size = float(expected.abs().max())
            worst = max(worst, self._error(difference, size, parameter.dtype))
        return worst

    def loss_error(self, loss: float, expected: float, dtype: torch.dtype) -> float:
        """Difference of two losses of a type, divided by the tolerance; at most 1 is equal."""
        return self._error(abs(loss - expected), abs(expected), dtype)

    def update(self) -> None:
        """Step the optimiser and clear the gradients."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _error(self, difference: float, size: float, dtype: torch.dtype) -> float:
        """A difference relative to the size of the values, divided by the tolerance.

        The tolerance is that of the coarser one of ``dtype`` and the type of the computation.
        """
        if not (math.isfinite(difference) and math.isfinite(size)):
            return math.inf
        return difference / max(size, 1e-6) / tolerance(coarsest((dtype, self.dtype)))


def make_optimizer(
    job: Job, parameters: Iterable[torch.nn.Parameter]
) -> torch.optim.Optimizer | None:
    """The job's optimiser over the trainable ones of ``parameters``; SGD if the job has none.

    None if all ``parameters`` are frozen.
    """
    trainable = [p for p in parameters if p.requires_grad]
    if not trainable:
        return None
    return job.optimizer(trainable) if job.optimizer else torch.optim.SGD(trainable, lr=0.01)
