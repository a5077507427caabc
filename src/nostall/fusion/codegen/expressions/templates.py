"""One line of Triton for each operator: what the kernel computes, as a table.

Floats are computed in fp32 whatever their width in memory, integers and bools in their own.
Only ``cast`` rounds, where none of :mod:`~nostall.fusion.codegen.tiling.sequence_tiles` is left out: an fp16 value
that stays in the kernel keeps its fp32 bits, so kernels are closer to the exact result than
operator-by-operator execution, not bit-equal to it.
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
    """A name in the kernel and its dtype there; for constants the ``number``.  ``plus_one``: what
    1 + the value is, where that is no sum (:mod:`~nostall.fusion.codegen.expressions.one_plus`).  ``half_text``: an
    unsigned number of 32 bits whose upper half says what the value is, ``scaled_template``: a template for
    its product with a number (:mod:`~nostall.fusion.codegen.expressions.dropout_masks`)."""

    text: str
    dtype: str
    number: Number | None = None
    plus_one: str = ""
    half_text: str = ""
    scaled_template: str = ""


def compute_dtype(dtype: str) -> str:
    """The dtype in which values of ``dtype`` are computed."""
    return "float32" if "float" in dtype else dtype


def constant_value(node: Node) -> Value:
    number = node["value"]
    assert isinstance(number, (int, float))
    dtype = compute_dtype(node.dtype)
    return Value(literal(number, dtype), dtype, number)


def literal(number: Number, dtype: str) -> str:
    """A number as it is written in a kernel."""
    if dtype == "bool":
        return str(bool(number))
    if dtype != "float32":
        return str(int(number))
    value = float(number)
    if math.isnan(value) or abs(value) > LARGEST_FLOAT:
        # Triton would make a number that is not of fp32 fp64.
        return f'float("{"nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}")'
    return repr(value)


def full_tensor(number: Number, dtype: str) -> str:
    """A number as a tensor of one element, for places where Triton takes no Python number."""
    return f"tl.full((1, 1), {literal(number, dtype)}, {TRITON_DTYPES[dtype]})"


_INTEGER_CONVERSIONS = {
    "int64": "_of_int64({})",
    "int32": "_of_int32({})",
    **dict.fromkeys(("int16", "int8", "uint8"), "_of_int32({}.to(tl.int32))"),
}
"""Integers as fp32.  LLVM would make a conversion to bf16 of that and a rounding to bf16, which for
0 and -1 from a bool, two at a time, is wrong in Triton 3.6: -1 becomes 1."""


def convert(value: Value, dtype: str) -> str:
    """The text of ``value`` as ``dtype``; numbers stay numbers."""
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
    """As :func:`convert`, but never a Python number."""
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
_IDENTITY_ON_INTEGERS = frozenset({"floor", "ceil", "round", "trunc"})

_PROPAGATE_NAN = ", propagate_nan=tl.PropagateNan.ALL"
_SAME_DTYPE_TEMPLATES = {
    "copy": "{}",
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
    # Triton's own clears the bit, an instruction that no reader can take in.
    "abs": "libdevice.abs({})",
    "sign": "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, 0.0))",
}
# On bools, which Triton holds in one bit, + would be exclusive or.
_BOOL_TEMPLATES = {
    "add": "{} | {}",
    "mul": "{} & {}",
    "maximum": "{} | {}",
    "minimum": "{} & {}",
    "bitwise_not": "{} == 0",
    "copy": "{}",
}
_COMPARISON_SIGNS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGIC_SIGNS = {"logical_and": "&", "logical_or": "|", "logical_xor": "^"}
_WIDENED_OPERATORS = frozenset({"sign", "relu", "maximum", "minimum"})
_PROMOTION_ORDER = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32")


def expression(node: Node, operands: Sequence[Value], template: str | None = None) -> Value:
    """``node`` computed from ``operands``, in the dtype of :func:`compute_dtype`; for floats by a
    ``template``, where one is given, in place of the operator's own."""
    dtype = compute_dtype(node.dtype)
    given = _with_tensor_operand(node, operands)
    if template is not None and dtype == "float32":
        texts = (_parenthesize(convert(operand, dtype)) for operand in given)
        return Value(template.format(*texts), dtype)
    return Value(_operator_text(node, given, dtype), dtype)


def _with_tensor_operand(node: Node, operands: Sequence[Value]) -> Sequence[Value]:
    """The operands with the first made a tensor where all are numbers."""
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
        common = max((o.dtype for o in operands), key=_PROMOTION_ORDER.index)
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
    if op in ("pow", "remainder", "fmod"):
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
    wanted = "float32" if op in _FLOAT_TEMPLATES else dtype
    texts = [_parenthesize(convert(o, wanted)) for o in operands]
    result = template.format(*texts)
    # Where Python numbers are operands, Triton may have widened the result.
    return f"({result}).to({TRITON_DTYPES[dtype]})" if op in _WIDENED_OPERATORS else result


LARGEST_BELOW_ONE = {"float16": 1 - 2**-11, "bfloat16": 1 - 2**-8}
"""Random numbers of narrow floats end here: rounding would make some of them 1."""
_RANDOM_TEMPLATES: Mapping[object, str] = {1: "tl.rand{}", 4: "_random{}", 8: "_number_of(_half{})"}


def _random_text(node: Node, operands: Sequence[Value]) -> str:
    """From the seed and what :mod:`~nostall.fusion.codegen.emit.philox` says of each element."""
    text = _RANDOM_TEMPLATES[node["words"]].format(random_call("", operands))
    most = LARGEST_BELOW_ONE.get(node.dtype)
    return f"tl.minimum({text}, {most})" if most else text


def random_call(function: str, operands: Sequence[Value]) -> str:
    """A call for random numbers, with the seed and what says which they are."""
    seed, *counted = operands
    return f"{function}({', '.join([as_tensor(seed, 'int64'), *(one.text for one in counted)])})"


def _parenthesize(text: str) -> str:
    """A negative number in brackets, so that it can stand behind any operator."""
    return f"({text})" if text.startswith("-") else text


def _where_text(operands: Sequence[Value], dtype: str) -> str:
    chosen, yes, no = operands
    # Two numbers would get the type that Triton guesses.
    first = as_tensor(yes, dtype) if no.number is not None else convert(yes, dtype)
    return f"tl.where({convert(chosen, 'bool')}, {first}, {convert(no, dtype)})"


def _cast_text(node: Node, value: Value) -> str:
    dtype = compute_dtype(node.dtype)
    if node.dtype == dtype:
        return convert(value, dtype)
    return f"{to_storage(as_tensor(value, dtype), node.dtype)}.to(tl.float32)"


def to_storage(text: str, dtype: str) -> str:
    """A computed value as it is written to memory of ``dtype``."""
    if dtype == "bool":
        return f"{text}.to(tl.int8)"
    if dtype == compute_dtype(dtype):
        return text
    # The hardware's conversion to fp8 (satfinite) ends at the largest finite number, infinity
    # included; PyTorch's does not.  NaN stays NaN, so e4m3 gets one; infinity has to be a byte.
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


_SPECIAL_OPERATORS: dict[str, Callable[[Node, Sequence[Value], str], str]] = {
    "pow": _pow_text,
    "fmod": _fmod_text,
    "remainder": _remainder_text,
}


# -- reductions ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reduction:
    """How partial results of a reduction are kept (as ``dtype``) and put together.

    ``neutral`` is what masked lanes hold, ``reduce_template`` reduces an axis of a tensor, ``combine_template`` puts two
    partial results together.
    """

    node: Node
    dtype: str
    neutral: str
    reduce_template: str
    combine_template: str

    def reduce(self, text: str, axis: int) -> str:
        return self.reduce_template.format(text, axis, keep=", keep_dims=True")

    def reduce_all(self, text: str) -> str:
        """Of a tensor of one axis, as a tensor of one element.

        A scalar stands between, which lies alike in all threads: what comes from the axis of a
        tensor is laid out anew where it meets others, by Triton 3.6 through shared memory.
        """
        whole = self.reduce_template.format(text, 0, keep="")
        return f"tl.full((1, 1), {whole}, {TRITON_DTYPES[self.dtype]})"

    def combine(self, left: str, right: str) -> str:
        return self.combine_template.format(left, right)

    def to_partial(self, operand: Value) -> str:
        """An operand as a partial result."""
        if self.node.op in ("any", "all"):
            operand = Value(as_tensor(operand, "bool"), "bool")
        return as_tensor(operand, self.dtype)

    def from_partial(self, text: str) -> Value:
        """What the node's value is, from the partial result of everything."""
        dtype = compute_dtype(self.node.dtype)
        return Value(convert(Value(text, self.dtype), dtype), dtype)


def make_reduction(node: Node) -> Reduction:
    """How ``node`` is reduced; raises :class:`BadFusion` where there is no template."""
    dtype = compute_dtype(node.dtype)
    # Triton adds and compares integers of fewer bits in 32.
    kept = dtype if dtype in ("float32", "int64") else "int32"
    if node.op in ("any", "all"):
        keep, neutral = ("max", "0") if node.op == "any" else ("min", "1")
        whole = f"tl.{keep}({{}}, {{}}{{keep}})"
        return Reduction(node, "int32", neutral, whole, f"tl.{keep}imum({{}}, {{}})")
    if dtype == "bool":
        raise BadFusion(f"{node}: there is no {node.op} of bools; use any or all")
    if node.op == "sum":
        return Reduction(node, kept, "0", "tl.sum({}, {}{keep})", "{} + {}")
    name = {"prod": "_mul", "amax": "_max", "amin": "_min"}[node.op]
    neutral = "1" if node.op == "prod" else _extreme_literal(kept, lowest=node.op == "amax")
    whole = f"tl.reduce({{}}, {{}}, {name}{{keep}})"
    return Reduction(node, kept, neutral, whole, f"{name}({{}}, {{}})")


def _extreme_literal(dtype: str, lowest: bool) -> str:
    if dtype == "float32":
        return 'float("-inf")' if lowest else 'float("inf")'
    bits = 64 if dtype == "int64" else 32
    return str(-(2 ** (bits - 1))) if lowest else str(2 ** (bits - 1) - 1)


def check_template(node: Node, operands: Sequence[Node]) -> None:
    """Raises :class:`BadFusion` where ``node`` cannot be written as Triton."""
    if node.kind == "reduce":
        make_reduction(node)
        return
    if node.kind == "dot":
        if bad := [o.dtype for o in (node, *operands) if o.dtype not in DOT_DTYPES]:
            raise BadFusion(f"{node}: small dots are of {', '.join(DOT_DTYPES)}, not of {bad[0]}")
        return
    if node.op == "random":
        return
    values = [
        constant_value(o) if o.op == "constant" else Value("x", compute_dtype(o.dtype))
        for o in operands
    ]
    expression(node, values)
