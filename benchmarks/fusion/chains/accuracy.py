"""Whether a version of a chain computes the same as eager PyTorch does in fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from benchmarks.fusion.chains.programs import HALF, SINGLE, Chain
from benchmarks.fusion.chains.timing import Inputs, Method

TOLERANCE = {HALF: 2e-2, SINGLE: 1e-3, torch.int8: 1.5 / 127}
"""Error allowed, of the largest value of an output; int8 may be rounded the other way."""
TIMES_EAGER = 4
"""An error is none that is at most this many times that of eager in the chain's own dtype."""


class Judge:
    """Knows what a chain's outputs have to be for some inputs."""

    def __init__(self, chain: Chain, inputs: Inputs) -> None:
        self.inputs = inputs
        wide = [x.float() if x.is_floating_point() else x for x in inputs]
        own = _tensors(chain.function(*inputs))
        self.dropped = chain.certain is not None
        self.wants = _tensors(chain.certain(*wide) if chain.certain else chain.function(*wide))
        self.share = float((own[0] != 0).float().mean())
        self.dtypes = [*(x.dtype for x in own), *([SINGLE] if self.dropped else [])]
        self.eager = self._errors(own)

    def errors(self, method: Method) -> list[float]:
        """Largest errors, relative to the largest value, one for each output.

        With dropout: of the elements that are left, and by how much their share is another.
        """
        given = [x.clone() for x in self.inputs] if method.overwrites else self.inputs
        return self._errors(_tensors(method.run(given)))

    def wrong(self, found: Sequence[float]) -> str:
        """Which output is wrong, in words; empty where none is."""
        for at, (error, least, dtype) in enumerate(
            zip(found, self.eager, self.dtypes, strict=True)
        ):
            most = max(TOLERANCE[dtype], TIMES_EAGER * least)
            if not error <= most:  # NaN is wrong, too
                return f"output {at} is off by {error:.2g} of its largest value; at most {most:.2g}"
        return ""

    def _errors(self, gots: Sequence[Tensor]) -> list[float]:
        if not self.dropped:
            return [_error(want, got) for want, got in zip(self.wants, gots, strict=True)]
        (want,), (got,) = self.wants, gots
        kept = got != 0
        return [_error(want * kept, got), abs(float(kept.float().mean()) - self.share)]


def _tensors(given: object) -> list[Tensor]:
    found = list(given) if isinstance(given, (tuple, list)) else [given]
    return [x for x in found if isinstance(x, Tensor)]


def _error(want: Tensor, got: Tensor) -> float:
    want, got = want.float(), got.float().view(want.shape)
    return float((want - got).abs().max() / want.abs().max().clamp_min(1e-6))
