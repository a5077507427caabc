"""Direct calls: Inductor's generated code calls stitched kernels as functions, not as operators.

PyTorch's dispatcher costs more host time than the launch.  Inductor fixes the layout of each tensor
at compile time.  So the checks that the operator makes at each call run once, when Inductor
generates its code.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import register_lowering
from torch._inductor.virtualized import V

from nostall.attach.torch_compile.runtime.custom_op import STITCHED_OP, load_op
from nostall.attach.torch_compile.runtime.list_op import LISTS_OP
from nostall.attach.torch_compile.store.records import TensorRecord

FUNCTION_NAME = "nostall_launch"
IMPORT_LINE = (
    f"from nostall.attach.torch_compile.runtime.custom_op import launch as {FUNCTION_NAME}"
)

LISTS_FUNCTION_NAME = "nostall_launch_lists"
LISTS_IMPORT_LINE = (
    "from nostall.attach.torch_compile.runtime.list_op import launch_lists as "
    f"{LISTS_FUNCTION_NAME}"
)


class DirectCall(ir.FallbackKernel):  # type: ignore[misc]
    """An Inductor node for the operator that is written as a direct call if that is possible."""

    import_line, function_name = IMPORT_LINE, FUNCTION_NAME

    def codegen(self, wrapper: Any) -> None:
        if self._is_direct():
            _root_wrapper(wrapper).add_import_once(self.import_line)
        super().codegen(wrapper)

    def get_kernel_name(self) -> str:
        return self.function_name if self._is_direct() else str(super().get_kernel_name())

    def _is_direct(self) -> bool:
        """Whether Inductor generates Python and all inputs have the kernel's layouts."""
        if V.graph.cpp_wrapper or getattr(V.graph, "fx_wrapper", False):
            return False
        record = load_op(self.constant_args[0]).record
        if len(record.inputs) != len(self.inputs):
            return False
        size = record.size_reader([value.get_size() for value in self.inputs])
        return all(map(_has_layout, self.inputs, record.with_size(size).inputs))


class ListCall(DirectCall):
    """As :class:`DirectCall`, for kernels over lists, which change tensors in place."""

    import_line, function_name = LISTS_IMPORT_LINE, LISTS_FUNCTION_NAME


def _root_wrapper(wrapper: Any) -> Any:
    """The code generator of the file; those of graph partitions write no imports."""
    while (parent := getattr(wrapper, "parent_wrapper", None)) is not None:
        wrapper = parent
    return wrapper


def _has_layout(value: Any, tensor: TensorRecord) -> bool:
    return (
        tuple(value.get_size()) == tensor.shape
        and tuple(value.get_stride()) == tensor.strides
        and value.get_dtype() is getattr(torch, tensor.dtype)
    )


@cache
def use_direct_calls() -> None:
    """Register the lowerings by which Inductor writes direct calls, once in a process."""
    for op, kind in ((STITCHED_OP, DirectCall), (LISTS_OP, ListCall)):

        def lower(*args: Any, op: Any = op, kind: Any = kind, **kwargs: Any) -> Any:
            return [_output_box(output) for output in kind.create(op, *args, **kwargs)]

        # Inductor gives inputs the strides of the graph only for fallback handlers.
        lower._is_fallback_handler = True  # type: ignore[attr-defined]
        register_lowering(op, type_promotion_kind=None)(lower)


def _output_box(output: Any) -> Any:
    """An output for Inductor, which need not check its size, strides and alignment.

    The kernel's launcher allocates outputs, so they are aligned and have the strides of the record.
    """
    output.skip_size_stride_alignment_checks = True
    V.graph.unaligned_buffers.discard(output.get_name())
    return ir.TensorBox.create(output)
