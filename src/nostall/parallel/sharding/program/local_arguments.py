"""Arguments of operators that hold sizes of whole tensors, replaced by those of local ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Shape = tuple[int, ...]
Sizes = Callable[[Sequence[torch.Tensor], Sequence[Shape]], Any]
"""Gives an argument from the local inputs and the local shapes of the outputs."""
_aten = torch.ops.aten


def _output_shape(inputs: Sequence[torch.Tensor], outputs: Sequence[Shape]) -> list[int]:
    return list(outputs[0])


def _output_rows(inputs: Sequence[torch.Tensor], outputs: Sequence[Shape]) -> int:
    return outputs[0][0]


def _samples(inputs: Sequence[torch.Tensor], outputs: Sequence[Shape]) -> int:
    return int(inputs[0].shape[0])


def _channels(inputs: Sequence[torch.Tensor], outputs: Sequence[Shape]) -> list[int]:
    return [int(inputs[0].shape[1])]


SIZE_ARGUMENTS: dict[Any, tuple[int, Sizes]] = {
    _aten.view.default: (1, _output_shape),
    _aten._unsafe_view.default: (1, _output_shape),
    _aten.reshape.default: (1, _output_shape),
    _aten.expand.default: (1, _output_shape),
    _aten.new_empty.default: (1, _output_shape),
    _aten.new_full.default: (1, _output_shape),
    _aten.new_ones.default: (1, _output_shape),
    _aten.new_zeros.default: (1, _output_shape),
    _aten.slice_backward.default: (1, _output_shape),
    _aten.select_backward.default: (1, _output_shape),
    _aten.embedding_dense_backward.default: (2, _output_rows),
    _aten.convolution_backward.default: (3, _channels),
    _aten.native_group_norm.default: (3, _samples),
    _aten.native_group_norm_backward.default: (5, _samples),
}
"""By operator, the position of the argument and the function that gives it."""


def localize(
    target: Any, args: list[Any], inputs: Sequence[torch.Tensor], outputs: Sequence[Shape]
) -> list[Any]:
    """The arguments of an operator with the sizes of its local inputs and outputs."""
    if target not in SIZE_ARGUMENTS:
        return args
    position, sizes = SIZE_ARGUMENTS[target]
    return [*args[:position], sizes(inputs, outputs), *args[position + 1 :]]
