"""Reference interpreter of operator graphs in numpy, to check generated kernels against.

Floats of any width are computed in fp64 without intermediate rounding; integers wrap at their own
width. If an operand of amax, amin, maximum or minimum is NaN, the result is NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nostall.fusion.errors import BadGraph
from nostall.fusion.graph.graph import Graph, Node

Array = NDArray[Any]


def interpret(graph: Graph, inputs: Sequence[Array]) -> list[Array]:
    """The outputs of a graph for one array for each input node.

    Float results are fp64; others have the node's dtype. Raises :class:`BadGraph` if the graph has
    opaque nodes or if shapes of inputs are wrong.
    """
    shapes = [graph[index].shape for index in graph.inputs]
    if [tuple(np.shape(value)) for value in inputs] != shapes:
        raise BadGraph(
            f"got inputs of shape {[tuple(np.shape(v)) for v in inputs]}; the graph takes "
            f"{shapes}; give one array for each input node, in order"
        )
    remaining_inputs = iter(inputs)
    values: list[Array] = []
    with np.errstate(all="ignore"):
        for node in graph:
            operands = [values[index] for index in node.inputs]
            value = next(remaining_inputs) if node.op == "input" else _evaluate(node, operands)
            values.append(np.asarray(value).astype(_numpy_dtype(node.dtype)))
    return [values[index] for index in graph.outputs]


def _numpy_dtype(dtype: str) -> str:
    return "float64" if "float" in dtype else dtype


def _evaluate(node: Node, operands: list[Array]) -> Any:
    if node.op in _ELEMENTWISE:
        if "float" in node.dtype and node.op != "where":
            # numpy would compute functions of int8 and uint8 in fp16.
            operands = [value.astype(np.float64) for value in operands]
        return _ELEMENTWISE[node.op](*operands)
    if node.op in _REDUCTIONS:
        return _REDUCTIONS[node.op](operands[0], node.dims, node.keepdim)
    if node.op in _OTHERS:
        return _OTHERS[node.op](node, *operands)
    raise BadGraph(f"{node} cannot be interpreted; only graphs without opaque nodes can")


def _cast(node: Node, value: Array) -> Array:
    if node.dtype == "bool":
        return np.asarray(value != 0)
    if "float" in node.dtype or value.dtype.kind != "f":
        return value
    # The cast of NaN or Inf to an integer is undefined; 0 takes its place.
    return np.trunc(np.where(np.isfinite(value), value, 0.0))


def _random(node: Node, seed: Array) -> Array:
    """Uniform numbers from the Philox counter values (0, 0, 0, 0), (1, 0, 0, 0), ...

    Each counter value gives four words of 32 bits. ``words`` 1 uses the first of them, 4 uses all,
    and 8 uses both halves of each word, the low half first.
    """
    if node["words"] == 1:
        word = _philox(int(seed[0]), node.elements)[0].astype(np.int64)
        folded = np.where(word > 0x7FFFFFFF, 0xFFFFFFFF - word, word).astype(np.float32)
        numbers = folded * np.float32(4.6566127342e-10)
    elif node["words"] == 8:
        words = np.stack(_philox(int(seed[0]), math.ceil(node.elements / 8)), axis=-1)
        halves = np.stack([words & np.uint64(0xFFFF), words >> np.uint64(16)], axis=-1)
        numbers = ((halves.reshape(-1)[: node.elements] + 0.5) / 65536).astype(np.float32)
    else:
        words = np.stack(_philox(int(seed[0]), math.ceil(node.elements / 4)), axis=-1)
        words = words.reshape(-1)[: node.elements]
        # The largest words round to 2^32 in fp32. The factor maps 2^32 to the number before 1.
        numbers = words.astype(np.float32) * np.float32((1 - 2**-24) * 2**-32)
    # The largest number below 1 in the node's dtype, so that no result rounds to 1.
    maximum = {"float16": 1 - 2**-11, "bfloat16": 1 - 2**-8}.get(node.dtype, 1.0)
    return np.asarray(np.minimum(numbers, maximum)).reshape(node.shape)


def _philox(seed: int, count: int) -> list[Array]:
    """The four words of Philox 4x32-10 (Salmon et al., SC 2011) for the counters 0, 1, ..."""
    wide, low = np.uint64, np.uint64(0xFFFFFFFF)
    key = [np.uint64(seed >> shift & 0xFFFFFFFF) for shift in (0, 32)]
    words = [np.arange(count, dtype=wide), *(np.zeros(count, wide) for _ in "234")]
    for _ in range(10):
        a, b = words[0] * wide(0xD2511F53), words[2] * wide(0xCD9E8D57)
        high = wide(32)
        words = [
            (b >> high) ^ words[1] ^ key[0],
            b & low,
            (a >> high) ^ words[3] ^ key[1],
            a & low,
        ]
        key = [(key[0] + wide(0x9E3779B9)) & low, (key[1] + wide(0xBB67AE85)) & low]
    return words


def _constant(node: Node) -> Array:
    return np.full(node.shape, node["value"])


def _iota(node: Node) -> Array:
    start, step = node["start"], node["step"]
    assert not isinstance(start, (str, tuple)) and not isinstance(step, (str, tuple))
    return start + step * np.arange(node.shape[0])


def _slice(node: Node, value: Array) -> Array:
    dim, start, step = node["dim"], node["start"], node["step"]
    assert isinstance(dim, int) and isinstance(start, int) and isinstance(step, int)
    positions = start + step * np.arange(node.shape[dim])
    return np.asarray(np.take(value, positions, axis=dim))


def _erf(value: Array) -> Array:
    return np.asarray(np.vectorize(math.erf, otypes=[np.float64])(value))


def _lgamma(value: float) -> float:
    """log |gamma|; its poles are at 0 and the negative integers."""
    if math.isnan(value):
        return value
    return math.inf if value <= 0 and value == math.floor(value) else math.lgamma(value)


LGAMMA = np.vectorize(_lgamma, otypes=[np.float64])
"""The logarithm of the gamma function, which numpy lacks."""


def _sigmoid(value: Array) -> Array:
    power = np.exp(-np.abs(value))
    return np.asarray(np.where(value >= 0, 1 / (1 + power), power / (1 + power)))


def _sign(value: Array) -> Array:
    # The sign of NaN is 0 in PyTorch and NaN in numpy; numpy has no sign of bool.
    return value if value.dtype == bool else np.nan_to_num(np.sign(value), nan=0.0)


def _shift(function: Callable[..., Array], value: Array, count: Array) -> Array:
    """A shift; by a count outside of the dtype's width, as if all bits had left."""
    bits = 8 * value.dtype.itemsize
    is_inside = (count >= 0) & (count < bits)
    last = function(value, np.asarray(bits - 1, value.dtype))
    emptied = last >> 1 if np.issubdtype(value.dtype, np.unsignedinteger) else last
    emptied = np.zeros_like(value) if function is np.left_shift else emptied
    inside = np.where(is_inside, count, 0).astype(value.dtype)
    return np.where(is_inside, function(value, inside), emptied)


def _pow(base: Array, exponent: Array) -> Array:
    if base.dtype.kind in "iu" and np.any(exponent < 0):
        # In PyTorch, the integer 0 to a negative power is 0.
        power = np.trunc(np.power(base.astype(np.float64), exponent))
        return np.where(np.isinf(power), 0.0, power)
    return np.asarray(np.power(base, exponent))


LIBDEVICE_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "cosh": np.cosh,
    "sinh": np.sinh,
    "tan": np.tan,
    "log10": np.log10,
    "erfc": np.vectorize(math.erfc, otypes=[np.float64]),
    "lgamma": LGAMMA,
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "copysign": np.copysign,
}
"""Functions that PyTorch and CUDA's libdevice name alike, by that name."""

_ELEMENTWISE: Mapping[str, Callable[..., Any]] = {
    "copy": np.array,
    "neg": np.negative,
    "abs": np.abs,
    "relu": lambda value: np.maximum(value, 0),
    "sign": _sign,
    "floor": np.floor,
    "ceil": np.ceil,
    "round": np.round,
    "trunc": np.trunc,
    "square": np.square,
    "logical_not": np.logical_not,
    "bitwise_not": np.bitwise_not,
    "isnan": np.isnan,
    "isinf": np.isinf,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "logical_and": np.logical_and,
    "logical_or": np.logical_or,
    "logical_xor": np.logical_xor,
    "bitwise_and": np.bitwise_and,
    "bitwise_or": np.bitwise_or,
    "bitwise_xor": np.bitwise_xor,
    "bitwise_left_shift": functools.partial(_shift, np.left_shift),
    "bitwise_right_shift": functools.partial(_shift, np.right_shift),
    "where": np.where,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log2": np.log2,
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "rsqrt": lambda value: 1 / np.sqrt(value),
    "reciprocal": lambda value: 1 / value,
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "sin": np.sin,
    "cos": np.cos,
    "erf": _erf,
    **LIBDEVICE_FUNCTIONS,
    "div": np.true_divide,
    "pow": _pow,
    "remainder": np.remainder,
    "fmod": np.fmod,
}

_REDUCTIONS: Mapping[str, Callable[..., Any]] = {
    "sum": lambda value, dims, keep: np.sum(value, axis=dims, keepdims=keep),
    "prod": lambda value, dims, keep: np.prod(value, axis=dims, keepdims=keep),
    "amax": lambda value, dims, keep: np.max(value, axis=dims, keepdims=keep),
    "amin": lambda value, dims, keep: np.min(value, axis=dims, keepdims=keep),
    "any": lambda value, dims, keep: np.any(value, axis=dims, keepdims=keep),
    "all": lambda value, dims, keep: np.all(value, axis=dims, keepdims=keep),
}

_OTHERS: Mapping[str, Callable[..., Any]] = {
    "constant": _constant,
    "iota": _iota,
    "cast": _cast,
    "random": _random,
    "checked_index": lambda node, value: value,
    "view": lambda node, value: value.reshape(node.shape),
    "expand": lambda node, value: np.broadcast_to(value, node.shape),
    "permute": lambda node, value: value.transpose(node.dims),
    "slice": _slice,
    "dot": lambda node, left, right: np.matmul(left, right),
}
