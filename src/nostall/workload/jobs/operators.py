"""What a step does, operator by operator: amounts of each call, and the kind that sets its rate."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OperatorKind(StrEnum):
    """Operators that reach similar shares of a GPU's peaks at similar sizes."""

    PRODUCT = "product"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    NORMALISATION = "normalisation"
    """Statistics and what is done with them: layer and batch norm, softmax."""
    REDUCTION = "reduction"
    EMBEDDING = "embedding"

    @property
    def computes(self) -> bool:
        """Whether its time counts as compute (arXiv:1910.05930's T_c), else as memory access."""
        return self in (OperatorKind.PRODUCT, OperatorKind.CONVOLUTION, OperatorKind.ATTENTION)


@dataclass(frozen=True, slots=True)
class Operator:
    """Calls of one operator with the same amounts; ``flops`` and ``size`` (bytes) of all of them.

    ``flops`` is 0 where PyTorch's counter has no formula.
    """

    kind: OperatorKind
    name: str
    calls: int
    flops: float
    size: float
