"""Precision of a computation, and the differences that its rounding allows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from nostall.parallel.module.effects import operations

TOLERANCE = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
}
"""Largest allowed difference of a gradient, divided by its tensor's largest value, and of a loss,
divided by the loss: the sums are rounded in another order.  Other types: ``COARSE_TOLERANCE``."""
COARSE_TOLERANCE = 0.05


def tolerance(dtype: torch.dtype) -> float:
    """The largest allowed relative difference of values that are computed in this type."""
    return TOLERANCE.get(dtype, COARSE_TOLERANCE)


def coarsest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The type of these with the largest rounding error; integers do not count."""
    rounded = [d for d in dtypes if d.is_floating_point or d.is_complex]
    return max(rounded, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def computed_dtypes(nodes: Iterable[Node]) -> set[torch.dtype]:
    """Element types of the values of operations and of those in their sub-graphs.

    Under autocast these differ from the types of parameters and of the loss.
    """
    values = [leaf for n in operations(nodes) for leaf in tree_leaves(n.meta.get("val"))]
    return {value.dtype for value in values if isinstance(value, torch.Tensor)}
