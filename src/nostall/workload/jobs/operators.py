"""The operators of a training step: FLOP, bytes and kind of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class OperatorKind(StrEnum):
    """Classes of operators that reach similar shares of a GPU's peak rates at equal sizes."""

    PRODUCT = "product"
    """Matrix products."""
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    ELEMENTWISE = "elementwise"
    NORMALISATION = "normalisation"
    """Layer norm, batch norm, softmax: a reduction and an elementwise pass that uses its result."""
    REDUCTION = "reduction"
    EMBEDDING = "embedding"

    @property
    def is_compute_bound(self) -> bool:
        """Whether its time counts as T_c of arXiv:1910.05930, not as memory access."""
        return self in (OperatorKind.PRODUCT, OperatorKind.CONVOLUTION, OperatorKind.ATTENTION)


@dataclass(frozen=True, slots=True)
class Operator:
    """All calls of one operator that have the same FLOP and bytes."""

    kind: OperatorKind
    name: str
    """PyTorch's name, for example ``aten.mm.default``."""
    calls: int
    flops: float
    """FLOP of all calls together; 0 if PyTorch's FLOP counter has no formula."""
    bytes_moved: float
    """Bytes that all calls together read and write."""
