"""Triton expression templates, one for each operator.

Kernels compute floats in fp32 whatever their dtype in memory, and integers and bools in their own
dtype.  Only ``cast`` rounds to a narrow float, and
:mod:`~nostall.fusion.codegen.tiling.sequence_tiles` leaves out some casts: an fp16 value that stays
in a kernel keeps its fp32 bits.  So kernels are not bit-identical to operator-by-operator
execution, but closer to the exact result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Node

TRITON_DTYPES = {
    "float32": "tl.float32",
    "float16": "tl.float16",
    "bfloat16": "tl.bfloat16",
    "float8_e4m3fn": "tl.float8e4nv",
    "float8_e5m2": "tl.float8e5",
    "int64": "tl.int64",
    "int32": "tl.int32",
    "int16": "tl.int16",
    "int8": "tl.int8",
    "uint8": "tl.uint8",
    "bool": "tl.int1",
}

Number = int | float | bool
DOT_DTYPES = ("float32", "float16", "bfloat16")
LARGEST_FLOAT = 3.4028234663852886e38


@dataclass(frozen=True)
class Value:
    """A value in a kernel's source: an expression, its dtype, and shorter forms for some users."""

    text: str
    dtype: str  # the dtype of the expression
    number: Number | None = None  # of a constant
    plus_one: str = ""
    """An expression for 1 + the value that is not a sum; "" if there is none
    (:mod:`~nostall.fusion.codegen.expressions.peephole`)."""
    half_text: str = ""
    """A uint32 expression whose upper 16 bits are the integer of a 16-bit random number; "" for
    other values (:mod:`~nostall.fusion.codegen.expressions.peephole`)."""
    scaled_template: str = ""
    """A template for the product with a positive constant; "" if there is none
    (:mod:`~nostall.fusion.codegen.expressions.peephole`)."""


def compute_dtype(dtype: str) -> str:
    """The dtype in which kernels compute values of ``dtype``."""
    return "float32" if "float" in dtype else dtype


def constant_value(node: Node) -> Value:
    number = node["value"]
    assert isinstance(number, (int, float))
    dtype = compute_dtype(node.dtype)
    return Value(literal(number, dtype), dtype, number)


def literal(number: Number, dtype: str) -> str:
    """A number as a literal of the kernel's source."""
    if dtype == "bool":
        return str(bool(number))
    if dtype != "float32":
        return str(int(number))
    value = float(number)
    if math.isnan(value) or abs(value) > LARGEST_FLOAT:
        # Triton types a literal outside the range of fp32 as fp64.
        return f'float("{"nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}")'
    return repr(value)


def full_tensor(number: Number, dtype: str) -> str:
    """A number as a tensor of one element, for operations that reject Python scalars."""
    return f"tl.full((1, 1), {literal(number, dtype)}, {TRITON_DTYPES[dtype]})"


_INTEGER_CONVERSIONS = {
    "int64": "_of_int64({})",
    "int32": "_of_int32({})",
    **dict.fromkeys(("int16", "int8", "uint8"), "_of_int32({}.to(tl.int32))"),
}
"""Conversions of integers to fp32 by inline assembly, which avoids an LLVM bug.

LLVM combines a conversion to fp32 and a rounding to bf16 into one conversion to bf16.  With
Triton 3.6 that conversion is wrong for pairs of 0 and -1 that come from a bool: -1 becomes 1.
"""


def convert(value: Value, dtype: str) -> str:
    """The text of ``value`` converted to ``dtype``; constants stay Python numbers."""
    if value.number is not None:
        return literal(value.number, dtype)
    if value.dtype == dtype:
        return value.text
    if dtype == "bool":
        return f"({value.text} != 0)"
    if dtype == "float32" and value.dtype in _INTEGER_CONVERSIONS:
        return _INTEGER_CONVERSIONS[value.dtype].format(value.text)
    return f"{value.text}.to({TRITON_DTYPES[dtype]})"


def as_tensor(value: Value, dtype: str) -> str:
    """As :func:`convert`, but constants become tensors."""
    return full_tensor(value.number, dtype) if value.number is not None else convert(value, dtype)


# -- elementwise -----------------------------------------------------------------------------------

_FLOAT_TEMPLATES = {
    "exp": "tl.exp({})",
    "exp2": "tl.exp2({})",
    "expm1": "libdevice.expm1({})",
    "log": "tl.log({})",
    "log2": "tl.log2({})",
    "log1p": "libdevice.log1p({})",
    "sqrt": "tl.sqrt_rn({})",
    "rsqrt": "tl.rsqrt({})",
    "reciprocal": "1.0 / {}",
    "tanh": "_tanh({})",
    "sigmoid": "_sigmoid({})",
    "sin": "tl.sin({})",
    "cos": "tl.cos({})",
    "erf": "_erf({})",
    "div": "{} / {}",
    "floor": "tl.floor({})",
    "ceil": "tl.ceil({})",
    "round": "libdevice.rint({})",
    "trunc": "libdevice.trunc({})",
}
_LIBDEVICE_FUNCTIONS = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "tan"),
    *("log10", "erfc", "lgamma"),
)
_FLOAT_TEMPLATES |= {name: f"libdevice.{name}({{}})" for name in _LIBDEVICE_FUNCTIONS}
_FLOAT_TEMPLATES |= {
    name: f"libdevice.{name}({{}}, {{}})" for name in ("atan2", "hypot", "copysign")
}
_IDENTITY_ON_INTEGERS = frozenset({"floor", "ceil", "round", "trunc"})

_PROPAGATE_NAN = ", propagate_nan=tl.PropagateNan.ALL"
_SAME_DTYPE_TEMPLATES = {
    "copy": "{}",
    "checked_index": "{}",  # the tile asserts that it is in its range
    "neg": "-{}",
    "abs": "tl.abs({})",
    "relu": "tl.maximum({}, 0" + _PROPAGATE_NAN + ")",
    "square": "{0} * {0}",
    "sign": "tl.where({0} > 0, 1, tl.where({0} < 0, -1, 0))",
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "maximum": "tl.maximum({}, {}" + _PROPAGATE_NAN + ")",
    "minimum": "tl.minimum({}, {}" + _PROPAGATE_NAN + ")",
    "bitwise_and": "{} & {}",
    "bitwise_or": "{} | {}",
    "bitwise_xor": "{} ^ {}",
    "bitwise_not": "~{}",
}
_FLOAT_OVERRIDES = {
    # tl.abs clears the sign bit with an integer instruction; libdevice.abs becomes an operand
    # modifier of the instruction that uses it.
    "abs": "libdevice.abs({})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
}
# Triton holds bools in one bit, so + would be exclusive or.
_BOOL_TEMPLATES = {
    "add": "{} | {}",
    "mul": "{} & {}",
    "maximum": "{} | {}",
    "minimum": "{} & {}",
    "bitwise_not": "{} == 0",
    "bitwise_and": "{} & {}",
    "bitwise_or": "{} | {}",
    "bitwise_xor": "{} ^ {}",
    "copy": "{}",
}
_COMPARISON_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC_SIGNS = {"logical_and": "&", "logical_or": "|", "logical_xor": "^"}
_WIDENED_OPERATORS = frozenset({"sign", "relu", "maximum", "minimum"})
_PROMOTION_ORDER = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32")


def expression(node: Node, operands: Sequence[Value], template: str | None = None) -> Value:
    """The expression of ``node``, in the dtype of :func:`compute_dtype`.

    ``template`` replaces the operator's own template if the result is a float.
    """
    dtype = compute_dtype(node.dtype)
    operands = _with_tensor_operand(operands)
    if template is not None and dtype == "float32":
        texts = (_parenthesize(convert(operand, dtype)) for operand in operands)
        return Value(template.format(*texts), dtype)
    return Value(_operator_text(node, operands, dtype), dtype)


def _common_dtype(operands: Sequence[Value]) -> str:
    """The dtype in which PyTorch compares the operands."""
    dtypes = {operand.dtype for operand in operands}
    if dtypes == {"uint8", "int8"}:
        return "int16"  # neither holds the other
    return max(dtypes, key=_PROMOTION_ORDER.index)


def _with_tensor_operand(operands: Sequence[Value]) -> Sequence[Value]:
    """The operands; if all are constants, the first one becomes a tensor."""
    if not operands or any(value.number is None for value in operands):
        return operands
    return (Value(as_tensor(operands[0], operands[0].dtype), operands[0].dtype), *operands[1:])


def _operator_text(node: Node, operands: Sequence[Value], dtype: str) -> str:
    op = node.op
    if op == "random":
        return _random_text(node, operands)
    if op == "cast":
        return _cast_text(node, operands[0])
    if op == "where":
        return _where_text(operands, dtype)
    if op in _COMPARISON_SIGNS:
        common = _common_dtype(operands)
        left, right = (convert(o, common) for o in operands)
        return f"{left} {_COMPARISON_SIGNS[op]} {right}"
    if op in _LOGIC_SIGNS:
        left, right = (convert(o, "bool") for o in operands)
        return f"{left} {_LOGIC_SIGNS[op]} {right}"
    if op == "logical_not":
        return f"{convert(operands[0], 'bool')} == 0"
    if op in ("isnan", "isinf"):
        x = convert(operands[0], "float32")
        return f"{x} != {x}" if op == "isnan" else f'tl.abs({x}) == float("inf")'
    if op in _SPECIAL_OPERATORS:
        return _SPECIAL_OPERATORS[op](node, operands, dtype)
    if op in _IDENTITY_ON_INTEGERS and dtype != "float32":
        return convert(operands[0], dtype)
    table = (
        _FLOAT_TEMPLATES
        if op in _FLOAT_TEMPLATES
        else _BOOL_TEMPLATES
        if dtype == "bool"
        else _SAME_DTYPE_TEMPLATES
    )
    template = _FLOAT_OVERRIDES.get(op) if dtype == "float32" else None
    template = template or table.get(op)
    if template is None:
        raise BadFusion(f"{node}: there is no template for {op} of {node.dtype}")
    operand_dtype = "float32" if op in _FLOAT_TEMPLATES else dtype
    texts = [_parenthesize(convert(o, operand_dtype)) for o in operands]
    result = template.format(*texts)
    # Triton may widen the result if an operand is a Python number.
    return f"({result}).to({TRITON_DTYPES[dtype]})" if op in _WIDENED_OPERATORS else result


LARGEST_BELOW_ONE = {"float16": 1 - 2**-11, "bfloat16": 1 - 2**-8}
"""The maximum random number of a narrow float dtype; larger ones could round to 1."""
_RANDOM_TEMPLATES: Mapping[object, str] = {1: "tl.rand{}", 4: "_random{}", 8: "_number_of(_half{})"}


def _random_text(node: Node, operands: Sequence[Value]) -> str:
    """Random numbers from the seed and counters, which ``addresses.counter_offsets`` describes."""
    text = _RANDOM_TEMPLATES[node["words"]].format(random_call("", operands))
    maximum = LARGEST_BELOW_ONE.get(node.dtype)
    return f"tl.minimum({text}, {maximum})" if maximum else text


def random_call(function: str, operands: Sequence[Value]) -> str:
    """A call of a random number function with the seed and the counters of the elements."""
    seed, *counters = operands
    return f"{function}({', '.join([as_tensor(seed, 'int64'), *(c.text for c in counters)])})"


def _parenthesize(text: str) -> str:
    """Parenthesize a negative number, so it can follow any operator."""
    return f"({text})" if text.startswith("-") else text


def _where_text(operands: Sequence[Value], dtype: str) -> str:
    condition, if_true, if_false = operands
    # Triton would infer a dtype for two Python numbers.
    first = as_tensor(if_true, dtype) if if_false.number is not None else convert(if_true, dtype)
    return f"tl.where({convert(condition, 'bool')}, {first}, {convert(if_false, dtype)})"


def _cast_text(node: Node, value: Value) -> str:
    dtype = compute_dtype(node.dtype)
    if node.dtype == dtype:
        return convert(value, dtype)
    return f"{to_storage(as_tensor(value, dtype), node.dtype)}.to(tl.float32)"


def to_storage(text: str, dtype: str) -> str:
    """A computed value converted to ``dtype`` for a store to memory."""
    if dtype == "bool":
        return f"{text}.to(tl.int8)"
    if dtype == compute_dtype(dtype):
        return text
    # The hardware's conversion to fp8 (satfinite) clamps to the largest finite number, infinity
    # included; PyTorch's does not.  e4m3 has no infinity: a value that overflows becomes NaN before
    # the conversion, which keeps NaN.  For e5m2 the byte of infinity replaces the result.
    if dtype == "float8_e4m3fn":
        text = f'tl.where(tl.abs({text}) > 464.0, float("nan"), {text})'
    if dtype == "float8_e5m2":
        byte = f"{text}.to(tl.float8e5).to(tl.uint8, bitcast=True)"
        byte = f"tl.where({text} <= -61440.0, {0xFC}, {byte})"
        return f"tl.where({text} >= 61440.0, {0x7C}, {byte}).to(tl.float8e5, bitcast=True)"
    return f"{text}.to({TRITON_DTYPES[dtype]})"


def _pow_text(node: Node, operands: Sequence[Value], dtype: str) -> str:
    base, exponent = operands
    if exponent.number is not None:
        x, power = _parenthesize(convert(base, dtype)), float(exponent.number)
        if power in (1.0, 2.0, 3.0, 4.0):
            return " * ".join([x] * int(power))
        if dtype == "float32" and power in (0.5, -0.5, -1.0):
            return {0.5: f"tl.sqrt_rn({x})", -0.5: f"tl.rsqrt({x})", -1.0: f"1.0 / {x}"}[power]
    if dtype != "float32":
        raise BadFusion(f"{node}: powers of integers are computed for exponents 1 to 4 only")
    return f"libdevice.pow({as_tensor(base, dtype)}, {as_tensor(exponent, dtype)})"


def _fmod_text(node: Node, operands: Sequence[Value], dtype: str) -> str:
    left, right = operands
    if dtype != "float32":
        return f"{as_tensor(left, dtype)} % {_parenthesize(convert(right, dtype))}"
    return f"libdevice.fmod({as_tensor(left, dtype)}, {as_tensor(right, dtype)})"


def _remainder_text(node: Node, operands: Sequence[Value], dtype: str) -> str:
    rest, divisor = (
        f"({_fmod_text(node, operands, dtype)})",
        _parenthesize(convert(operands[1], dtype)),
    )
    if dtype == "uint8":
        return rest
    return (
        f"tl.where(({rest} != 0) & (({rest} < 0) != ({divisor} < 0)), {rest} + {divisor}, {rest})"
    )


_BITS = {"int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint8": 8}


def _shift_text(node: Node, operands: Sequence[Value], dtype: str) -> str:
    """A shift; beyond the width of the dtype the result is that of a shift by all bits."""
    if dtype not in _BITS:
        raise BadFusion(f"{node}: only integers are shifted, not {node.dtype}")
    value, count = as_tensor(operands[0], dtype), as_tensor(operands[1], dtype)
    last = _BITS[dtype] - 1
    is_inside = f"({count} >= 0) & ({count} <= {last})"
    inside = f"tl.where({is_inside}, {count}, {0 if node.op == 'bitwise_left_shift' else last})"
    if node.op == "bitwise_left_shift":
        return f"tl.where({is_inside}, {value} << {inside}, 0).to({TRITON_DTYPES[dtype]})"
    # An unsigned number is 0 then; a signed one is all copies of its sign.
    if dtype == "uint8":
        return f"tl.where({is_inside}, {value} >> {inside}, 0).to({TRITON_DTYPES[dtype]})"
    return f"({value} >> {inside}).to({TRITON_DTYPES[dtype]})"


_SPECIAL_OPERATORS: dict[str, Callable[[Node, Sequence[Value], str], str]] = {
    "pow": _pow_text,
    "fmod": _fmod_text,
    "remainder": _remainder_text,
    "bitwise_left_shift": _shift_text,
    "bitwise_right_shift": _shift_text,
}
