"""Operators of a captured step on the local tensors of one device.

The positions of tensors among the arguments are found once, so that a call costs little.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from nostall.parallel.sharding.program.gpu_operators import GPU_OPERATORS
from nostall.parallel.sharding.program.local_arguments import SIZE_ARGUMENTS, localize

_WITHOUT_STRIDES = {torch.ops.aten.view.default: torch.ops.aten.reshape.default}
"""Operators that need strides which a redistribution does not keep, and what replaces them."""


class LocalOperator:
    """The operator of an FX node, called with local inputs."""

    def __init__(
        self,
        node: Node,
        indices: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        device: torch.device,
    ) -> None:
        """``indices`` are the outputs that are read, ``shapes`` their local shapes."""
        self.indices, self.shapes = tuple(indices), tuple(shapes)
        self.node_target: Any = node.target
        target: Any = _WITHOUT_STRIDES.get(self.node_target, self.node_target)
        self.target = GPU_OPERATORS.get(target, target) if device.type != "cpu" else target
        self._has_sizes = self.node_target in SIZE_ARGUMENTS
        leaves, self._structure = tree_flatten((list(node.args), dict(node.kwargs)))
        self._leaves = [device if isinstance(leaf, torch.device) else leaf for leaf in leaves]
        self._tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Node)]
        # Most operators have tensors among their positional arguments only, outside of lists.
        args, self._kwargs = tree_unflatten(self._leaves, self._structure)
        self._args = list(args)
        self._positions = [i for i, arg in enumerate(args) if isinstance(arg, Node)]
        self._is_flat = len(self._positions) == len(self._tensors)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The outputs at ``indices``."""
        if self._is_flat:
            args, kwargs = self._args.copy(), self._kwargs
            for position, value in zip(self._positions, inputs, strict=True):
                args[position] = value
        else:
            leaves = self._leaves.copy()
            for position, value in zip(self._tensors, inputs, strict=True):
                leaves[position] = value
            args, kwargs = tree_unflatten(leaves, self._structure)
        if self._has_sizes:
            args = localize(self.node_target, args, inputs, self.shapes)
        result = self.target(*args, **kwargs)
        return [result[i] for i in self.indices] if isinstance(result, list | tuple) else [result]
