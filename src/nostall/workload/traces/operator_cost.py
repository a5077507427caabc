"""FLOP and bytes of recorded operators, from the argument shapes that ``record_shapes=True`` adds.

Bytes count each tensor once, read or written: a lower bound of what the operator moves.  Operators
without a rule in :data:`COST_RULES`, or with incompletely recorded arguments, have no cost.
Attention has no rule because the trace does not record whether it is causal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import msgspec

MATMULS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Matrix products that launch a kernel, and the argument position of their left factor."""

_PRECISIONS = {
    "float": ("fp32", 4),
    "c10::Half": ("fp16", 2),
    "c10::BFloat16": ("bf16", 2),
    "double": ("fp64", 8),
}
"""Precision and bytes per element of the dtypes that PyTorch records."""

_MAX_COST = 1e24
"""FLOP and bytes of an operator; with more, its shapes are damaged."""
_JSON_LIST = msgspec.json.Decoder(list[object])
_JSON_INTEGERS = msgspec.json.Decoder(list[int])


@dataclass(frozen=True, slots=True)
class OperatorCost:
    """FLOP and bytes of one call of an operator."""

    flops: float
    bytes_moved: float
    precision: str
    """The precision whose peak FLOP/s bounds the operator."""


@dataclass(frozen=True, slots=True)
class RecordedArguments:
    """Arguments of an operator as a trace records them, one entry per argument."""

    shapes: Sequence[Sequence[int]]
    """Empty for an argument that is not a tensor."""
    dtypes: Sequence[str]
    values: Sequence[str]
    """Text of arguments that are not tensors (strides, paddings); may be empty."""

    def tensors(self) -> list[tuple[Sequence[int], int]]:
        """(shape, bytes per element) of each tensor.  Raises ``KeyError`` for unknown dtypes."""
        return [
            (shape, _PRECISIONS[dtype][1])
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
            if shape
        ]

    def integers(self, position: int) -> list[int]:
        """The argument at ``position``, which is a list of integers."""
        return _JSON_INTEGERS.decode(self.values[position])


def operator_cost(
    operator: str, shapes: bytes, dtypes: bytes, values: bytes = b"[]"
) -> OperatorCost | None:
    """Cost of an operator of :data:`COST_RULES` from the JSON text of its recorded arguments.

    None if the arguments are incomplete or not those that the operator takes.
    """
    return _cached_cost(operator, shapes, dtypes, values if operator in _CONVOLUTIONS else b"[]")


@lru_cache(maxsize=4096)  # all training steps have the same shapes
def _cached_cost(operator: str, shapes: bytes, dtypes: bytes, values: bytes) -> OperatorCost | None:
    try:
        arguments = RecordedArguments(
            [_shape(value) for value in _JSON_LIST.decode(shapes)],
            [str(value) for value in _JSON_LIST.decode(dtypes)],
            [str(value) for value in _JSON_LIST.decode(values)],
        )
        cost = COST_RULES[operator](arguments)
    except (msgspec.DecodeError, ValueError, LookupError, OverflowError, RecursionError):
        return None
    is_plausible = 0 <= cost.flops <= _MAX_COST and 0 < cost.bytes_moved <= _MAX_COST
    return cost if is_plausible else None


def _shape(value: object) -> list[int]:
    """The value if it is a list of sizes, else an empty list."""
    if isinstance(value, list) and all(isinstance(n, int) and n >= 0 for n in value):
        return value
    return []


# Cost rules.  Each raises ValueError or LookupError if the arguments are not those it expects.


def _matmul(left_position: int, arguments: RecordedArguments) -> OperatorCost:
    """2 m n k FLOP per batch element; bytes of both factors and of the product."""
    factors = slice(left_position, left_position + 2)
    (left, right), dtypes = arguments.shapes[factors], arguments.dtypes[factors]
    precision, width = _PRECISIONS[dtypes[0]]
    if dtypes[0] != dtypes[1] or len(left) < 2 or len(left) != len(right) or right[-2] != left[-1]:
        raise ValueError
    batch, m, k, n = math.prod(left[:-2]), left[-2], left[-1], right[-1]
    elements = batch * (m * k + k * n + m * n)
    return OperatorCost(2.0 * batch * m * n * k, float(elements * width), precision)


def _convolution(arguments: RecordedArguments) -> OperatorCost:
    """``aten::cudnn_convolution(x, weight, padding, stride, dilation, ...)``."""
    x, weight = arguments.shapes[:2]
    padding, stride, dilation = (arguments.integers(position) for position in (2, 3, 4))
    output = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, p, s, d in zip(x[2:], weight[2:], padding, stride, dilation, strict=True)
    ]
    return _convolution_cost(arguments, x, weight, [x[0], weight[0], *output])


def _convolution_backward(arguments: RecordedArguments) -> OperatorCost:
    """``aten::convolution_backward(gradient, x, weight, ...)``: one of its two products.

    Each product is a kernel of its own and has the FLOP of the forward convolution.
    """
    gradient, x, weight = arguments.shapes[:3]
    return _convolution_cost(arguments, x, weight, gradient)


def _convolution_cost(
    arguments: RecordedArguments, x: Sequence[int], weight: Sequence[int], output: Sequence[int]
) -> OperatorCost:
    precision, width = _PRECISIONS[arguments.dtypes[0]]
    if len(x) < 3 or not len(x) == len(weight) == len(output):
        raise ValueError
    elements = sum(math.prod(shape) for shape in (x, weight, output))
    flops = 2.0 * math.prod(output) * math.prod(weight[1:])
    return OperatorCost(flops, float(elements * width), precision)


def _memory_pass(arguments: RecordedArguments, *, writes_result: bool) -> OperatorCost:
    """All tensors once, plus a result as large as the largest of them; one FLOP per element."""
    tensors = arguments.tensors()
    largest = max(math.prod(shape) for shape, _ in tensors)
    width = next(w for shape, w in tensors if math.prod(shape) == largest)
    result_bytes = largest * width if writes_result else 0
    total_bytes = sum(math.prod(shape) * w for shape, w in tensors) + result_bytes
    if not total_bytes:
        raise ValueError
    return OperatorCost(float(largest), float(total_bytes), "fp32")


CostRule = Callable[[RecordedArguments], OperatorCost]

_CONVOLUTIONS: dict[str, CostRule] = {
    "aten::cudnn_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
_OUT_OF_PLACE = (
    *("add", "sub", "mul", "div", "neg", "exp", "log", "sqrt", "rsqrt", "pow", "clamp_min"),
    *("relu", "threshold_backward", "gelu", "gelu_backward", "silu", "silu_backward"),
    *("sigmoid", "sigmoid_backward", "tanh", "tanh_backward"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("native_layer_norm", "native_layer_norm_backward"),
    *("native_batch_norm", "native_batch_norm_backward"),
)
_IN_PLACE = ("add_", "sub_", "mul_", "div_", "relu_", "clamp_min_", "sigmoid_", "tanh_")
_ARGUMENTS_ONLY = ("sum", "mean", "amax", "fill_", "copy_")
"""Operators of which only the arguments count: the result of a reduction is small, and ``copy_``
writes its first argument without reading it."""

COST_RULES: dict[str, CostRule] = {
    **{name: partial(_matmul, position) for name, position in MATMULS.items()},
    **_CONVOLUTIONS,
    **{
        f"aten::{name}": partial(_memory_pass, writes_result=True)
        for name in (*_OUT_OF_PLACE, *_IN_PLACE)
    },
    **{f"aten::{name}": partial(_memory_pass, writes_result=False) for name in _ARGUMENTS_ONLY},
}
"""Cost rules of operators that launch kernels themselves, by PyTorch's name."""
