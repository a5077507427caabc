"""Patches for Triton's interpreter, so that it runs generated kernels in tests without a GPU.

``TRITON_INTERPRET=1`` must be set before Triton is imported. The interpreter has no libdevice and
no PTX, and it calls the combine function of a reduction for each element; numpy functions replace
all three. Its conversion of fp32 to bf16 truncates, so it is replaced by one that rounds. Its
conversions to fp8 are wrong, so it cannot check those.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from nostall.core.errors import BadInput
from tools.interpreters import gluon_interpreter
from tools.interpreters.reference import LIBDEVICE_FUNCTIONS

_LIBDEVICE: dict[str, Callable[..., Any]] = {
    "fast_dividef": np.divide,
    "fast_expf": np.exp,
    "abs": np.abs,
    "sub_rn": np.subtract,
    "expm1": np.expm1,
    "log1p": np.log1p,
    "rint": np.rint,
    "trunc": np.trunc,
    "pow": np.power,
    "fmod": np.fmod,
    **LIBDEVICE_FUNCTIONS,
}
_PTX: dict[str, Callable[..., Any]] = {
    "rcp.approx.ftz.f32 $0, $1;": np.reciprocal,
    "cvt.rni.s32.f32 $0, $1;": lambda x: np.nan_to_num(np.rint(x)),
    "cvt.rn.f32.s32 $0, $1;": np.asarray,
    "cvt.rn.f32.s64 $0, $1;": np.asarray,
}
_REDUCTIONS: dict[str, Callable[..., Any]] = {"_max": np.max, "_min": np.min, "_mul": np.prod}
"""Reductions by the name of their combine function in generated kernels."""


def prepare() -> None:
    """Patch Triton in this process. Raises :class:`BadInput` if Triton is not interpreting."""
    import triton
    from triton.language.extra import libdevice

    if not triton.knobs.runtime.interpret:
        raise BadInput(
            "Triton compiles kernels in this process; set TRITON_INTERPRET=1 before Triton is "
            "imported, so that it interprets them"
        )
    from triton.runtime.interpreter import ReduceOps, interpreter_builder

    # Assertions of kernels are checked, as with the options of their launches.
    interpreter_builder.options = dataclasses.replace(
        interpreter_builder.options, debug=True, sanitize_overflow=False
    )
    np.seterr(all="ignore")
    for name, function in _LIBDEVICE.items():
        setattr(libdevice, name, functools.partial(_elementwise, function))
    triton.language.inline_asm_elementwise = _inline_ptx
    # Kernels run in numpy even if the machine has a GPU.
    triton.language.target_info.cuda_capability_geq = lambda *_: False
    original = ReduceOps.apply_impl

    def apply_impl(self: Any, operands: Any) -> Any:
        function = _REDUCTIONS.get(getattr(self.combine_fn, "__name__", ""))
        if function is None:
            return original(self, operands)
        data, dtype = operands[0].handle.data, operands[0].dtype
        # numpy would widen the product of narrow integers.
        result = function(data, axis=self.axis, keepdims=self.keep_dims).astype(data.dtype)
        return self.to_tensor(result, dtype)

    ReduceOps.apply_impl = apply_impl
    _round_bfloat16()
    gluon_interpreter.prepare()


def _round_bfloat16() -> None:
    """Replace the interpreter's conversion of fp32 to bf16 by one that rounds to nearest even."""
    from triton import language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float

    def convert(values: Any, from_dtype: Any, to_dtype: Any, rounding_mode: Any) -> Any:
        if (from_dtype, to_dtype) != (tl.float32, tl.bfloat16):
            return original(values, from_dtype, to_dtype, rounding_mode)
        bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return np.where(np.isnan(values), np.uint16(0x7FC0), rounded).reshape(values.shape)

    interpreter._convert_float = convert


def _inline_ptx(
    text: str, constraints: str, operands: list[Any], dtype: Any = None, **_: object
) -> Any:
    result = _elementwise(_PTX[text], *operands)
    return result if dtype is None else result.to(dtype)


def _elementwise(function: Callable[..., Any], *operands: Any) -> Any:
    """Apply a numpy function to tensors of the interpreter; floats take the tensors' dtype."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    first = next(operand for operand in operands if not isinstance(operand, float))
    dtype, scalar = first.handle.data.dtype, first.dtype
    arrays = (dtype.type(x) if isinstance(x, float) else x.handle.data for x in operands)
    data = np.asarray(function(*arrays))
    kind = tl.block_type(scalar, list(data.shape)) if first.type.is_block() else scalar
    return tl.core.tensor(TensorHandle(data.astype(dtype), scalar), kind)
