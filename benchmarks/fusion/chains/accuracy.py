"""Check of a chain's outputs against eager PyTorch in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.fusion.chains.programs import HALF, SINGLE, Chain
from benchmarks.fusion.chains.timing import Inputs, Method

TOLERANCE = {HALF: 2e-2, torch.bfloat16: 2e-2, SINGLE: 1e-3, torch.int8: 1.5 / 127}
"""Allowed error by dtype, relative to the largest value of an output.

int8 may be off by one, because a value halfway may be rounded either way.
"""
MAX_EAGER_RATIO = 4
"""Errors up to this multiple of eager PyTorch's error in the chain's own dtype are allowed, too."""


class AccuracyCheck:
    """Reference outputs of a chain for fixed inputs, and the check of a method against them."""

    def __init__(self, chain: Chain, inputs: Inputs) -> None:
        self.inputs = inputs
        fp32_inputs = [x.float() if x.is_floating_point() else x for x in inputs]
        outputs = _tensors(chain.function(*inputs))
        self.has_dropout = chain.without_dropout is not None
        exact = chain.without_dropout or chain.function
        self.references = _tensors(exact(*fp32_inputs))
        self.kept_share = float((outputs[0] != 0).float().mean())
        self.dtypes = [*(x.dtype for x in outputs), *([SINGLE] if self.has_dropout else [])]
        self.eager_errors = self._errors(outputs)

    def errors(self, method: Method) -> list[float]:
        """Largest error of each output, relative to the output's largest value.

        With dropout two numbers: the error of the elements that are not dropped, and the difference
        between their share and eager PyTorch's.
        """
        inputs = [x.clone() for x in self.inputs] if method.overwrites else self.inputs
        return self._errors(_tensors(method.run(inputs)))

    def failure(self, errors: Sequence[float]) -> str:
        """Message about the first output whose error is too large; empty if there is none."""
        for index, (error, eager_error, dtype) in enumerate(
            zip(errors, self.eager_errors, self.dtypes, strict=True)
        ):
            tolerance = max(TOLERANCE[dtype], MAX_EAGER_RATIO * eager_error)
            if not error <= tolerance:  # true for NaN, too
                return (
                    f"output {index} is off by {error:.2g} of its largest value; "
                    f"at most {tolerance:.2g}"
                )
        return ""

    def _errors(self, outputs: Sequence[Tensor]) -> list[float]:
        if not self.has_dropout:
            return [
                _error(reference, output)
                for reference, output in zip(self.references, outputs, strict=True)
            ]
        (reference,), (output,) = self.references, outputs
        is_kept = output != 0
        return [
            _error(reference * is_kept, output),
            abs(float(is_kept.float().mean()) - self.kept_share),
        ]


def _tensors(result: object) -> list[Tensor]:
    values = list(result) if isinstance(result, (tuple, list)) else [result]
    return [x for x in values if isinstance(x, Tensor)]


def _error(reference: Tensor, output: Tensor) -> float:
    """Largest error relative to the largest value; NaN if only one of both has a NaN somewhere."""
    reference, output = reference.float(), output.float().view(reference.shape)
    both = reference.isnan() & output.isnan()
    difference = (reference - output).abs().masked_fill(both, 0.0)
    size = reference.abs().masked_fill(reference.isnan(), 0.0).max().clamp_min(1e-6)
    return float(difference.max() / size)
