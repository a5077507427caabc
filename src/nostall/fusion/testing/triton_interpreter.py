"""Triton's interpreter made able to run stitched kernels, for checks without a GPU.

``TRITON_INTERPRET=1`` has to be set before Triton is imported.  The interpreter has no libdevice
and no PTX, and calls the combine function of a reduction for every element; numpy stands in for all
three.  It is no oracle for bf16 and fp8, whose conversions it gets wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from nostall.core.errors import BadInput
from nostall.fusion.testing import gluon_interpreter

_FUNCTIONS: dict[str, Callable[..., Any]] = {
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
}
_ASSEMBLY: dict[str, Callable[..., Any]] = {
    "rcp.approx.ftz.f32 $0, $1;": np.reciprocal,
    "cvt.rni.s32.f32 $0, $1;": lambda x: np.nan_to_num(np.rint(x)),
    "cvt.rn.f32.s32 $0, $1;": np.asarray,
    "cvt.rn.f32.s64 $0, $1;": np.asarray,
}
_COMBINED: dict[str, Callable[..., Any]] = {"_max": np.max, "_min": np.min, "_mul": np.prod}


def prepare() -> None:
    """Put the stand-ins in place.  Raises :class:`BadInput` where Triton does not interpret."""
    import triton
    from triton.language.extra import libdevice

    if not triton.knobs.runtime.interpret:
        raise BadInput(
            "Triton compiles here; set TRITON_INTERPRET=1 before it is imported to interpret"
        )
    from triton.runtime.interpreter import ReduceOps

    np.seterr(all="ignore")
    for name, function in _FUNCTIONS.items():
        setattr(libdevice, name, functools.partial(_elementwise, function))
    triton.language.inline_asm_elementwise = _assembly
    # Numpy is no GPU, also where there is one.
    triton.language.target_info.cuda_capability_geq = lambda *_: False
    original = ReduceOps.apply_impl

    def apply_impl(self: Any, operands: Any) -> Any:
        function = _COMBINED.get(getattr(self.combine_fn, "__name__", ""))
        if function is None:
            return original(self, operands)
        data, dtype = operands[0].handle.data, operands[0].dtype
        # numpy would widen the product of narrow integers.
        result = function(data, axis=self.axis, keepdims=self.keep_dims).astype(data.dtype)
        return self.to_tensor(result, dtype)

    ReduceOps.apply_impl = apply_impl
    gluon_interpreter.prepare()


def _assembly(
    text: str, constraints: str, operands: list[Any], dtype: Any = None, **_: object
) -> Any:
    found = _elementwise(_ASSEMBLY[text], *operands)
    return found if dtype is None else found.to(dtype)


def _elementwise(function: Callable[..., Any], *operands: Any) -> Any:
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    first = next(operand for operand in operands if not isinstance(operand, float))
    dtype, scalar = first.handle.data.dtype, first.dtype
    given = (dtype.type(x) if isinstance(x, float) else x.handle.data for x in operands)
    data = np.asarray(function(*given))
    kind = tl.block_type(scalar, list(data.shape)) if first.type.is_block() else scalar
    return tl.core.tensor(TensorHandle(data.astype(dtype), scalar), kind)
