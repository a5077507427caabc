"""Operators that PyTorch has for narrow floats only, in wide floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``torch._grouped_mm``: one matrix product for each group.

    ``offs``: the ends of the groups along the axis that has no axis of groups beside it: rows of
    ``left`` (rows x depth, groups x depth x columns), columns of ``right``, or the depth of both,
    which gives groups x rows x columns. Rows and columns behind the last end, which PyTorch leaves
    undefined, are 0. Raises NotImplementedError for a bias, which PyTorch refuses, too.
    """
    if bias is not None:
        raise NotImplementedError("a grouped matrix product with a bias")
    if offs is None:
        return torch.bmm(left, right)
    ends = offs.tolist()
    parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if left.dim() == right.dim() == 2:
        return torch.stack([left[:, part] @ right[part] for part in parts])
    result = left.new_zeros(left.shape[-2], right.shape[-1])
    for group, part in enumerate(parts):
        if left.dim() == 2:
            result[part] = left[part] @ right[group]
        else:
            result[:, part] = left[group] @ right[:, part]
    return result


WIDE: Mapping[Any, Callable[..., Tensor]] = {_aten._grouped_mm.default: grouped_mm}
"""Functions on wide floats, by operator."""
