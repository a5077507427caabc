"""Operators of a captured step on the local tensors of one device.

The positions of tensors among the arguments are found once, so that a call costs little.

Operators that replace, on a GPU, those that PyTorch has for CPUs only.

Steps are traced for CPUs, so that a plan can be made without a GPU.  The one operator that PyTorch
selects by device is attention: the CPU's becomes cuDNN's where PyTorch would take it, else
FlashAttention for half precision without a mask, and memory-efficient attention.

Arguments of operators that hold sizes of whole tensors, replaced by those of local ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.fx import Node
from torch.nn.attention import SDPBackend
from torch.utils._pytree import tree_flatten, tree_unflatten

from nostall.parallel.errors import BadPlan

_aten = torch.ops.aten
_ALIGNMENT = 16
"""Memory-efficient attention reads masks in groups of this many columns."""


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and logarithms of the sums of exponentials."""
    _check(query, dropout_p)
    if _is_flash(query, attn_mask):
        result = _aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, is_causal, False, scale=scale
        )
    else:
        result = _aten._scaled_dot_product_efficient_attention(
            query, key, value, _bias(query, key, attn_mask), True, 0.0, is_causal, scale=scale
        )
    return result[0], result[1]


def _attention_backward(
    *saved: Any, attn_mask: torch.Tensor | None = None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value; ``saved`` are the arguments of the CPU's operator."""
    gradient, query, key, value, output, sums, _dropout, is_causal = saved
    # Without dropout, kernels read neither seed nor offset, but the operators need tensors.
    if _is_flash(query, attn_mask):
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)
        offset = torch.empty((), dtype=torch.uint64, device=query.device)
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            gradient, query, key, value, output, sums, None, None, query.shape[2], key.shape[2],
            0.0, is_causal, seed, offset, scale=scale,
        )  # fmt: skip
    else:
        seed = torch.empty((), dtype=torch.int64, device=query.device)
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            gradient, query, key, value, _bias(query, key, attn_mask), output, sums, seed, seed,
            0.0, [True, True, True, False], is_causal, scale=scale,
        )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`_attention`, by cuDNN and without a mask."""
    _check(query, dropout_p)
    result = _aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, is_causal, scale=scale
    )
    return result[0], result[1].reshape(query.shape[:3])


def _cudnn_backward(
    *saved: Any, attn_mask: None = None, scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As :func:`_attention_backward`, by cuDNN and without a mask."""
    gradient, query, key, value, output, sums, _dropout, is_causal = saved
    seed = torch.empty((), dtype=torch.int64, device=query.device)
    gradients = _aten._scaled_dot_product_cudnn_attention_backward(
        gradient, query, key, value, output, sums.unsqueeze(-1), seed, seed, None, None, None,
        query.shape[2], key.shape[2], 0.0, is_causal, scale=scale,
    )  # fmt: skip
    return gradients[0], gradients[1], gradients[2]


def _check(query: torch.Tensor, dropout_p: float) -> None:
    """Raise :class:`BadPlan` for attention that has no kernel here."""
    if dropout_p:
        raise BadPlan(
            f"attention with dropout {dropout_p} does not run sharded on a GPU, because shards "
            "would draw other random numbers; set the dropout of attention to 0"
        )
    if query.dtype is torch.float64:
        raise BadPlan(
            "attention in float64 has no fused kernel on a GPU; use float32, bfloat16 or float16"
        )


def _is_flash(query: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return mask is None and query.dtype in (torch.bfloat16, torch.float16)


def _bias(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask added to the scores, for all samples and heads, with aligned rows."""
    if mask is None:
        return None
    if mask.dtype is torch.bool:
        zeros = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device)
        mask = zeros.masked_fill(mask.logical_not(), float("-inf"))
    columns = key.shape[2]
    padded = torch.nn.functional.pad(mask, (0, -columns % _ALIGNMENT))[..., :columns]
    return padded.expand(*query.shape[:3], columns)


GPU_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
}
"""By operator for CPUs, the function that replaces it."""
CUDNN_OPERATORS: dict[Any, Callable[..., Any]] = {
    _aten._scaled_dot_product_flash_attention_for_cpu.default: _cudnn,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _cudnn_backward,
}
"""The same where cuDNN computes attention."""


def _gpu_operator(target: Any, node: Node, device: torch.device) -> Any:
    """The operator that a GPU runs in the place of one that was traced for a CPU."""
    if target in CUDNN_OPERATORS and device.type == "cuda" and node.kwargs.get("attn_mask") is None:
        first = 0 if CUDNN_OPERATORS[target] is _cudnn else 1
        query, key = (own.meta["val"] for own in node.args[first : first + 2])
        options = (*node.args, node.kwargs.get("is_causal", False))
        is_causal = any(own is True for own in options)
        sizes = (query.shape[2], key.shape[2], query.shape[3])
        has_one_head_each = query.shape[1] == key.shape[1]
        if has_one_head_each and _takes_cudnn(*sizes, query.dtype, device, is_causal=is_causal):
            return CUDNN_OPERATORS[target]
    return GPU_OPERATORS.get(target, target)


@cache
def _takes_cudnn(
    queries: int, keys: int, width: int, dtype: torch.dtype, device: torch.device, *,
    is_causal: bool,
) -> bool:  # fmt: skip
    """Whether PyTorch selects cuDNN for attention of these sizes; a head of a sample decides."""
    query, key = (
        torch.empty(1, 1, length, width, dtype=dtype, device=device, requires_grad=True)
        for length in (queries, keys)
    )
    with torch.enable_grad():
        found = torch._fused_sdp_choice(query, key, key, None, 0.0, is_causal)
    return bool(found == int(SDPBackend.CUDNN_ATTENTION))


Shape = tuple[int, ...]
Sizes = Callable[[Sequence[torch.Tensor], Sequence[Shape]], Any]
"""Gives an argument from the local inputs and the local shapes of the outputs."""


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
        self.target = target if device.type == "cpu" else _gpu_operator(target, node, device)
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
        args, kwargs = self.bind(inputs, inputs)
        result = self.target(*args, **kwargs)
        return [result[i] for i in self.indices] if isinstance(result, list | tuple) else [result]

    def bind(
        self, inputs: Sequence[Any], shaped: Sequence[torch.Tensor]
    ) -> tuple[list[Any], dict[str, Any]]:
        """The arguments of a call with ``inputs``, which have the shapes of ``shaped``."""
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
            args = localize(self.node_target, args, shaped, self.shapes)
        return args, kwargs
