"""Lowering rules from ATen operators to nostall's, as a table with one rule for each overload.

A rule takes a :class:`Call`, adds its nodes, and returns the node of the result (or a tuple of
nodes). It raises :class:`Unsupported` if fused kernels do not support the operator with these
arguments.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from nostall.fusion.capture import operator_rules as views
from nostall.fusion.capture import reduction_rules as reductions
from nostall.fusion.capture.call import Call, Unsupported, Value, compute_dtype, dtype_name
from nostall.fusion.capture.operator_rules import (
    comparison,
    extreme_and_index,
    extreme_index,
    gather,
    inductor_random,
    inductor_seed,
    one_hot,
    scatter,
    uniform,
)
from nostall.fusion.capture.reduction_rules import SOFTMAX_STATISTICS, Rule, reduction
from nostall.fusion.codegen.loops.dot_axes import MAX_MATRIX_AXIS
from nostall.fusion.graph.operations import COMPARISONS, OPERATIONS

MAX_FLOPS_PER_BYTE = {"float16": 64.0, "bfloat16": 64.0, "float32": 8.0, "float64": 8.0}
"""Arithmetic intensity up to which a batched matrix product counts as memory-bound and is fused.

An H200 copies 4.3e12 bytes/s (measured) and computes 67e12 FLOP/s in fp32 without tensor cores and
989e12 FLOP/s in 16 bits with them (vendor). The fp32 limit is half of the ratio. The 16-bit limit
is a quarter, because tensor cores reach less on matrices of a few tiles.
"""

MAX_E4M3 = 448.0
"""The largest finite float8_e4m3fn number."""


def _elementwise(op: str) -> Rule:
    if op in COMPARISONS:
        return comparison(op)

    def rule(call: Call) -> Value:
        operand = call.operand if op in ("mul", "div") else call.rounded_operand
        return call.finish(op, *(operand(place) for place in range(OPERATIONS[op].arity or 0)))

    return rule


def _add_or_sub(op: str) -> Rule:
    """The rule of ``add`` or ``sub``, whose second operand is multiplied by ``alpha``."""

    def rule(call: Call) -> Value:
        # PyTorch rounds a Python number to the tensor's dtype on the CPU, and not on a GPU.
        on_cpu = call.result.device.type == "cpu"
        operand = call.rounded_operand if on_cpu else call.operand
        left, right = operand(0), operand(1)
        alpha = call.argument(2, "alpha", 1)
        if alpha != 1:
            right = call.add("mul", right, call.number(alpha), dtype=call.dtype)
        return call.finish(op, left, right)

    return rule


def _fma(call: Call) -> Value:
    product = call.add("mul", call.operand(0), call.operand(1), dtype=call.dtype)
    return call.finish("add", product, call.operand(2))


def _add_scaled(op: str) -> Rule:
    """The rule of ``addcmul`` or ``addcdiv``: x + value * (a * b), or x + value * (a / b)."""

    def rule(call: Call) -> Value:
        x, left, right = (call.operand(place) for place in range(3))
        value = call.argument(3, "value", 1)
        dtype = compute_dtype(call.result.dtype)
        if value != 1:
            left = call.add("mul", left, call.number(value, dtype), dtype=dtype)
        return call.finish("add", x, call.add(op, left, right, dtype=dtype))

    return rule


def _select_scatter(call: Call) -> Value:
    """Lower a copy of a tensor in which one position of an axis has other values."""
    x, source = call.tensor(0), call.tensor(1)
    shape = call.shape(x)
    dim = call.axis(call.argument(2, "dim"), len(shape))
    index = call.axis(call.argument(3, "index"), call.static_size(dim, shape))
    kept = (*shape[:dim], 1, *shape[dim + 1 :])
    position = call.number(index, "int64")
    mask = one_hot(call, x, dim, call.build("expand", position, shape=kept))
    return call.finish("where", mask, call.build("view", source, shape=kept), x)


def _glu(call: Call) -> Value:
    """The first half times the sigmoid of the second half, rounded once, as in ATen."""
    x = call.tensor(0)
    shape = call.shape(x)
    dim = call.axis(call.argument(1, "dim", -1), len(shape))
    size = call.static_size(dim, shape) // 2
    half = (*shape[:dim], size, *shape[dim + 1 :])
    first, second = (
        call.build("slice", x, shape=half, dim=dim, start=start, step=1) for start in (0, size)
    )
    gate = call.add("sigmoid", second, dtype=compute_dtype(call.result.dtype))
    return call.finish("mul", first, gate)


def _power(call: Call) -> Value:
    exponent = call.argument(1, "exponent")
    x = call.tensor(0)
    simple = {2: "square", 0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if exponent == 1 and call.build.nodes[x].dtype == dtype_name(call.result.dtype):
        return x
    if exponent == 3:
        return call.finish("mul", call.add("square", x, dtype=call.dtype), x)
    if exponent in simple:
        return call.finish(simple[exponent], x)
    return call.finish("pow", x, call.rounded_operand(1))


def _clamp(call: Call) -> Value:
    low, high = call.argument(1, "min"), call.argument(2, "max")
    bounds = [(op, b) for op, b in (("maximum", low), ("minimum", high)) if b is not None]
    x = call.tensor(0)
    for at, (op, bound) in enumerate(bounds):
        limit = call.values[bound] if isinstance(bound, Node) else call.number(bound)
        assert isinstance(limit, int)
        is_last = at == len(bounds) - 1
        x = call.finish(op, x, limit) if is_last else call.add(op, x, limit, dtype=call.dtype)
    return x


def _bound(op: str) -> Rule:
    """The rule of ``clamp_min`` or ``clamp_max``: a clamp with one bound."""
    return lambda call: call.finish(op, call.tensor(0), call.rounded_operand(1))


def _cast(call: Call) -> Value:
    operand = call.node.args[0]
    assert isinstance(operand, Node)
    if operand.meta["val"].device != call.result.device:
        raise Unsupported("copies between devices")
    keeps_dtype = operand.meta["val"].dtype == call.result.dtype
    x = call.tensor(0)
    if call.result.dtype == torch.bool:
        x = call.rounded(x)
    dtype = call.build.nodes[x].dtype
    if call.result.dtype == torch.float8_e4m3fn and "float" in dtype and _e4m3_saturates():
        for op, limit in (("maximum", -MAX_E4M3), ("minimum", MAX_E4M3)):
            x = call.add(op, x, call.number(limit, dtype), dtype=dtype)
    return call.finish("copy" if keeps_dtype else "cast", x)


@cache
def _e4m3_saturates() -> bool:
    """Whether PyTorch casts too large numbers to the largest e4m3 number instead of to NaN.

    It does from version 2.12 on (pytorch#178817).
    """
    with _disable_current_modes():
        return not bool(torch.tensor(2 * MAX_E4M3).to(torch.float8_e4m3fn).float().isnan())


def _full(call: Call) -> Value:
    place = {"scalar_tensor": 0}.get(call.node.target._opname, 1)
    value = call.argument(place, "fill_value")
    if not isinstance(value, (bool, int, float)):
        raise Unsupported("a filling value that is no number")
    shape, _ = call.layout(call.result)
    return call.build.constant(value, dtype_name(call.result.dtype), shape)


def _arange(call: Call) -> Value:
    start, step = call.argument(0, "start"), call.argument(2, "step", 1)
    if not all(isinstance(value, (int, float)) for value in (start, step)):
        raise Unsupported("counting from a number that is known at run time only")
    return call.finish("iota", start=start, step=step)


def _iota(call: Call) -> Value:
    """Lower ``prims.iota``, to which Inductor decomposes ``arange``."""
    start, step = call.argument(1, "start"), call.argument(2, "step")
    if not (isinstance(start, int) and isinstance(step, int)):
        raise Unsupported("counting from a number that is known at run time only")
    return call.finish("iota", start=start, step=step)


def _copy(call: Call) -> Value:
    """Lower a copy of the second operand into the layout of the first."""
    source = call.tensor(1)
    shape, _ = call.layout(call.result)
    if call.shape(source) != shape:
        source = call.build("expand", source, shape=shape)
    keeps_dtype = call.build.nodes[source].dtype == call.dtype
    return call.finish("copy" if keeps_dtype else "cast", source)


def _div_with_mode(call: Call) -> Value:
    """A division of floats that rounds to an integer; as ATen's, exact where x is a multiple."""
    mode = call.argument(2, "rounding_mode")
    if not call.result.dtype.is_floating_point or mode not in (None, "trunc", "floor"):
        raise Unsupported("division of integers")
    x, y = call.rounded_operand(0), call.rounded_operand(1)
    dtype = compute_dtype(call.result.dtype)
    quotient = call.add("div", x, y, dtype=dtype)
    if mode is None:
        return call.finish("cast" if dtype != call.dtype else "copy", quotient)
    if mode == "trunc":
        return call.finish("trunc", quotient)
    # As in c10/util/generic_math.h: (x - fmod(x, y)) / y is an integer but for rounding.
    rest = call.add("fmod", x, y, dtype=dtype)
    whole = call.add("div", call.add("sub", x, rest, dtype=dtype), y, dtype=dtype)
    zero, one = call.number(0.0, dtype), call.number(1.0, dtype)
    signs = (call.add("lt", value, zero) for value in (y, rest))
    is_below = call.add("logical_and", call.add("ne", rest, zero), call.add("ne", *signs))
    whole = call.add("where", is_below, call.add("sub", whole, one, dtype=dtype), whole)
    rounded = call.add("floor", call.add("add", whole, call.number(0.5, dtype), dtype=dtype))
    signed_zero = call.add("mul", quotient, zero, dtype=dtype)
    rounded = call.add("where", call.add("eq", whole, zero), signed_zero, rounded)
    by_zero = call.add("eq", y, zero)
    return call.finish("where", by_zero, quotient, rounded)


def _fextreme(op: str) -> Rule:
    """The rule of ``fmax`` or ``fmin``, which return the other operand if one is NaN."""

    def rule(call: Call) -> Value:
        x, y = call.operand(0), call.operand(1)
        either = call.add(op, x, y, dtype=call.dtype)
        known = call.add("where", call.add("isnan", y), x, either)
        return call.finish("where", call.add("isnan", x), y, known)

    return rule


def _bmm(call: Call) -> Value:
    left, right = call.tensor(0), call.tensor(1)
    (_, m, k), n = call.shape(left), call.shape(right)[-1]
    size = call.result.element_size()
    max_intensity = MAX_FLOPS_PER_BYTE.get(call.dtype, 0.0)
    moved_bytes = size * (m * k + k * n + m * n)
    if max(m, n, k) > MAX_MATRIX_AXIS or 2 * m * n * k > max_intensity * moved_bytes:
        raise Unsupported("matrix product that does not wait for memory")
    return call.finish("dot", left, right)


_SHIFTS = "{0}.Tensor {0}.Tensor_Scalar {0}.Scalar_Tensor {1}.Tensor {1}.Scalar"
_WITHOUT_SCALARS = (
    "neg abs relu sign floor ceil round trunc logical_not bitwise_not isnan isinf maximum "
    "minimum logical_and logical_or logical_xor exp exp2 expm1 log log2 log1p sqrt rsqrt "
    "reciprocal tanh sigmoid sin cos erf acos acosh asin asinh atan atanh cosh sinh tan "
    "log10 erfc lgamma atan2 hypot"
)
_WITH_SCALARS = "mul eq ne lt le gt ge copysign div remainder fmod"
_ELEMENTWISE = {
    **{name: f"{name}.default" for name in _WITHOUT_SCALARS.split()},
    **{name: f"{name}.Tensor {name}.Scalar" for name in _WITH_SCALARS.split()},
    "bitwise_and": "bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor",
    "bitwise_or": "bitwise_or.Tensor bitwise_or.Scalar bitwise_or.Scalar_Tensor",
    "bitwise_xor": "bitwise_xor.Tensor bitwise_xor.Scalar bitwise_xor.Scalar_Tensor",
    "bitwise_left_shift": _SHIFTS.format("bitwise_left_shift", "__lshift__"),
    "bitwise_right_shift": _SHIFTS.format("bitwise_right_shift", "__rshift__"),
    "where": "where.self",
    "pow": "pow.Tensor_Tensor pow.Scalar",
    "copy": "clone.default",
}

_MISCELLANEOUS_RULES: list[tuple[Rule, str]] = [
    (_add_or_sub("add"), "add.Tensor add.Scalar"),
    (_add_or_sub("sub"), "sub.Tensor sub.Scalar"),
    (_power, "pow.Tensor_Scalar"),
    (_add_scaled("mul"), "addcmul.default"),
    (_add_scaled("div"), "addcdiv.default"),
    (_select_scatter, "select_scatter.default"),
    (_glu, "glu.default"),
    (_clamp, "clamp.default clamp.Tensor"),
    (_bound("maximum"), "clamp_min.default clamp_min.Tensor"),
    (_bound("minimum"), "clamp_max.default clamp_max.Tensor"),
    (_cast, "_to_copy.default"),
    (reduction("sum"), "sum.dim_IntList sum.default"),
    (reduction("prod"), "prod.dim_int prod.default"),
    (reduction("amax"), "amax.default"),
    (reduction("amin"), "amin.default"),
    (reduction("any"), "any.default any.dim any.dims"),
    (reduction("all"), "all.default all.dim all.dims"),
    (reductions.mean, "mean.dim mean.default"),
    (reductions.var, "var.correction"),
    (reductions.var_mean, "var_mean.correction"),
    (views.identity, "alias.default detach.default lift_fresh_copy.default"),
    (views.view, "view.default reshape.default _unsafe_view.default unsqueeze.default"),
    (views.view, "squeeze.dims squeeze.dim squeeze.default"),
    (views.expand, "expand.default"),
    (views.permute, "permute.default"),
    (views.transpose, "transpose.int"),
    (views.slice, "slice.Tensor"),
    (views.select, "select.int"),
    (views.split, "split.Tensor split_with_sizes.default"),
    (views.repeat, "repeat.default"),
    (views.cat, "cat.default"),
    (views.slice_scatter, "slice_scatter.default"),
    (_copy, "copy.default"),
    (_div_with_mode, "div.Tensor_mode div.Scalar_mode"),
    (extreme_index("amax"), "argmax.default"),
    (extreme_index("amin"), "argmin.default"),
    (extreme_and_index("amax"), "max.dim"),
    (extreme_and_index("amin"), "min.dim"),
    (reduction("amax"), "max.default"),
    (reduction("amin"), "min.default"),
    (_fextreme("maximum"), "fmax.default"),
    (_fextreme("minimum"), "fmin.default"),
    (views.unbind, "unbind.int"),
    (_full, "full.default full_like.default scalar_tensor.default"),
    (_arange, "arange.start_step"),
    (gather, "gather.default"),
    (scatter("value"), "scatter.value"),
    (scatter("src"), "scatter.src"),
    (scatter("sum"), "scatter_add.default"),
    (_bmm, "bmm.default"),
]

RULES: dict[str, Rule] = {
    **{
        f"aten.{name}": _elementwise(op)
        for op, names in _ELEMENTWISE.items()
        for name in names.split()
    },
    **{f"aten.{name}": rule for rule, names in _MISCELLANEOUS_RULES for name in names.split()},
    "prims.convert_element_type.default": _cast,
    "prims.fma.default": _fma,
    "prims.iota.default": _iota,
    SOFTMAX_STATISTICS: reductions.softmax_statistics,
    "prims.inductor_lookup_seed.default": inductor_seed,
    "prims.inductor_random.default": inductor_random,
    "nostall.uniform.default": uniform,
}
"""The rule of each overload that fused kernels support, by the overload's full name."""
