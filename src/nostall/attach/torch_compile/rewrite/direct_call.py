"""How Inductor's code calls a stitched kernel: as a plain function, not as an operator.

PyTorch's dispatcher costs more than the launch.  Inductor knows where every tensor of a graph lies,
so what the operator checks at every call is checked here, once, when the code is written.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from nostall.attach.torch_compile.runtime.custom_op import STITCHED, resolve
from nostall.attach.torch_compile.store.records import TensorRecord
from nostall.fusion.graph.dynamic_size import varies

FUNCTION = "nostall_launch"
IMPORT = f"from nostall.attach.torch_compile.runtime.custom_op import launch as {FUNCTION}"


class DirectCall(ir.FallbackKernel):  # type: ignore[misc]
    """The call of an operator, written as that of the function that does the work."""

    def codegen(self, wrapper: Any) -> None:
        if self._is_direct():
            _outermost(wrapper).add_import_once(IMPORT)
        super().codegen(wrapper)

    def get_kernel_name(self) -> str:
        return FUNCTION if self._is_direct() else str(super().get_kernel_name())

    def _is_direct(self) -> bool:
        """Whether the code is Python and all inputs lie as the kernel was made for."""
        if V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False):
            return False
        record = resolve(self.constant_args[0]).record
        return len(record.inputs) == len(self.inputs) and all(
            _lies(value, one, record.varying)
            for value, one in zip(self.inputs, record.inputs, strict=True)
        )


def _outermost(wrapper: Any) -> Any:
    """What writes the file: that of a part of a graph (one CUDA graph of several) has no head."""
    while (above := getattr(wrapper, "parent_wrapper", None)) is not None:
        wrapper = above
    return wrapper


def _lies(value: Any, wanted: TensorRecord, varying: int | None) -> bool:
    sizes = value.get_size()
    return (
        len(sizes) == len(wanted.shape)
        and all(a == b or varies(b, varying) for a, b in zip(sizes, wanted.shape, strict=True))
        and tuple(value.get_stride()) == wanted.strides
        and value.get_dtype() is getattr(torch, wanted.dtype)
    )


@cache
def register() -> None:
    """From now on Inductor writes direct calls."""

    def lower(*args: Any, **kwargs: Any) -> Any:
        return [_ours(made) for made in DirectCall.create(STITCHED, *args, **kwargs)]

    # Inductor asks for the strides that the graph says only where this is a fallback.
    lower._is_fallback_handler = True  # type: ignore[attr-defined]
    register_lowering(STITCHED, type_promotion_kind=None)(lower)


def _ours(value: Any) -> Any:
    """A result, for Inductor: memory of our own, whose strides and alignment need no check."""
    value.skip_size_stride_alignment_checks = True
    V.graph.unaligned_buffers.discard(value.get_name())
    return ir.TensorBox.create(value)
