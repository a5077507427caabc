"""FLOP and bytes of operators, from what ``record_shapes=True`` leaves of their arguments.

Bytes are the least that an operator moves: each tensor read or written once.  What is not in the
table, or was not recorded well enough, is not counted: attention hides whether it is causal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import msgspec

MATMULS = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators that launch a product themselves, and the position of its left factor."""

_PRECISIONS = {
    "float": ("fp32", 4),
    "c10::Half": ("fp16", 2),
    "c10::BFloat16": ("bf16", 2),
    "double": ("fp64", 8),
}

_LIST = msgspec.json.Decoder(list[object])
_NUMBERS = msgspec.json.Decoder(list[int])


@dataclass(frozen=True, slots=True)
class Amounts:
    """``flops`` at the peak of ``precision``; ``size``: bytes."""

    flops: float
    size: float
    precision: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """``shapes``: sizes of each argument, empty where it is no tensor; ``types``: of its elements;
    ``plain``: the text of those that are no tensors (strides, paddings), where it was recorded."""

    shapes: Sequence[Sequence[int]]
    types: Sequence[str]
    plain: Sequence[str]

    def tensors(self) -> list[tuple[Sequence[int], int]]:
        """Shape and bytes of an element of all tensors; raises ``KeyError`` for unknown types."""
        return [
            (shape, _PRECISIONS[kind][1])
            for shape, kind in zip(self.shapes, self.types, strict=True)
            if shape
        ]

    def numbers(self, at: int) -> list[int]:
        """A plain argument that is a list of whole numbers."""
        return _NUMBERS.decode(self.plain[at])


def amounts(operator: str, shapes: bytes, types: bytes, plain: bytes = b"[]") -> Amounts | None:
    """What an operator of :data:`OPERATORS` computes and moves, from the JSON of its arguments;
    None where they are not those of one, or not known well enough."""
    return _amounts(operator, shapes, types, plain if operator in _CONVOLUTIONS else b"[]")


@lru_cache(maxsize=4096)  # every step repeats the shapes of the one before
def _amounts(operator: str, shapes: bytes, types: bytes, plain: bytes) -> Amounts | None:
    try:
        given = Arguments(
            [_shape(value) for value in _LIST.decode(shapes)],
            [str(value) for value in _LIST.decode(types)],
            [str(value) for value in _LIST.decode(plain)],
        )
        return OPERATORS[operator](given)
    except (msgspec.DecodeError, ValueError, LookupError):
        return None


def _shape(value: object) -> list[int]:
    """A list of sizes; empty where it is something else."""
    if isinstance(value, list) and all(isinstance(n, int) and n >= 0 for n in value):
        return value
    return []


# -- rules: they raise ValueError or LookupError where the arguments are not as they know them --


def _product(at: int, given: Arguments) -> Amounts:
    """2 m n k, times the batch; both factors and the product."""
    (left, right), kinds = given.shapes[at : at + 2], given.types[at : at + 2]
    precision, width = _PRECISIONS[kinds[0]]
    if kinds[0] != kinds[1] or len(left) < 2 or len(left) != len(right) or right[-2] != left[-1]:
        raise ValueError
    batch, m, k, n = math.prod(left[:-2]), left[-2], left[-1], right[-1]
    elements = batch * (m * k + k * n + m * n)
    return Amounts(2.0 * batch * m * n * k, float(elements * width), precision)


def _convolution(given: Arguments) -> Amounts:
    """``aten::cudnn_convolution(x, weight, padding, stride, dilation, ...)``."""
    x, weight = given.shapes[:2]
    padding, stride, dilation = (given.numbers(at) for at in (2, 3, 4))
    out = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, p, s, d in zip(x[2:], weight[2:], padding, stride, dilation, strict=True)
    ]
    return _filtered(given, x, weight, [x[0], weight[0], *out])


def _convolution_backward(given: Arguments) -> Amounts:
    """``aten::convolution_backward(gradient, x, weight, ...)``: one of its two products, which are
    as large as the forward one; each is a kernel of its own."""
    gradient, x, weight = given.shapes[:3]
    return _filtered(given, x, weight, gradient)


def _filtered(
    given: Arguments, x: Sequence[int], weight: Sequence[int], out: Sequence[int]
) -> Amounts:
    precision, width = _PRECISIONS[given.types[0]]
    if len(x) < 3 or not len(x) == len(weight) == len(out):
        raise ValueError
    elements = sum(math.prod(shape) for shape in (x, weight, out))
    return Amounts(2.0 * math.prod(out) * math.prod(weight[1:]), float(elements * width), precision)


def _pass(given: Arguments, *, writes: bool) -> Amounts:
    """All tensors once, and the result, as large as the largest of them; one FLOP an element."""
    tensors = given.tensors()
    most = max(math.prod(shape) for shape, _ in tensors)
    width = next(w for shape, w in tensors if math.prod(shape) == most)
    size = sum(math.prod(shape) * w for shape, w in tensors) + (most * width if writes else 0)
    if not size:
        raise ValueError
    return Amounts(float(most), float(size), "fp32")


Rule = Callable[[Arguments], Amounts]

_CONVOLUTIONS: dict[str, Rule] = {
    "aten::cudnn_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}
_ELEMENTWISE = (
    *("add", "sub", "mul", "div", "neg", "exp", "log", "sqrt", "rsqrt", "pow", "clamp_min"),
    *("relu", "threshold_backward", "gelu", "gelu_backward", "silu", "silu_backward"),
    *("sigmoid", "sigmoid_backward", "tanh", "tanh_backward"),
    *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
    *("native_layer_norm", "native_layer_norm_backward"),
    *("native_batch_norm", "native_batch_norm_backward"),
)
_IN_PLACE = ("add_", "sub_", "mul_", "div_", "relu_", "clamp_min_", "sigmoid_", "tanh_")
_ONE_WAY = ("sum", "mean", "amax", "fill_", "copy_")
"""Nothing but their arguments counts: reductions give little, ``copy_`` does not read its first."""

OPERATORS: dict[str, Rule] = {
    **{name: partial(_product, at) for name, at in MATMULS.items()},
    **_CONVOLUTIONS,
    **{f"aten::{name}": partial(_pass, writes=True) for name in (*_ELEMENTWISE, *_IN_PLACE)},
    **{f"aten::{name}": partial(_pass, writes=False) for name in _ONE_WAY},
}
"""Operators that launch kernels themselves."""
