"""Checks of stitched kernels: guard bands around all memory, and values against fp64."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np
import torch
from tools.interpreters.reference import interpret
from torch import Tensor

from nostall.fusion.codegen.runtime import eager
from nostall.fusion.codegen.runtime.kernel import StitchedKernel
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.graph.dynamic_size import resized
from nostall.fusion.graph.graph import Graph, Node

GUARD_ELEMENTS = 4096
"""Poisoned elements before and after every tensor; kernels must not write them."""
MAX_ERROR_RATIO = 16
"""Allowed error as a multiple of the largest error of operator-by-operator execution in fp32."""
RELATIVE_ROUNDING = {"float32": 2e-6, "float16": 2**-10, "bfloat16": 2**-7}


class OutOfBoundsWrite(AssertionError):
    """A kernel wrote outside its outputs."""


class GuardedKernel:
    """A kernel that runs on copies of its tensors between guard bands, which it checks afterwards.

    Bands of floats are NaN. Raises :class:`OutOfBoundsWrite` if the kernel changed a band or an
    input.
    """

    def __init__(self, kernel: StitchedKernel) -> None:
        self.kernel = kernel
        self.program = kernel.program

    def __call__(
        self, *inputs: Tensor, size: int | None = None, device: torch.device | None = None
    ) -> tuple[Tensor, ...]:
        graph, varying = self.program.graph, self.program.graph.varying
        device = inputs[0].device if inputs else device or _DEVICE
        guarded_inputs = []
        for index, value in zip(self.program.inputs, inputs, strict=True):
            buffer, view = guarded_tensor(graph[index].resized(varying, size), device)
            view.copy_(value)
            guarded_inputs.append((buffer, view, buffer.clone()))
        outputs = [
            guarded_tensor(graph[i].resized(varying, size), device) for i in self.program.outputs
        ]
        workspaces = {}
        for space in self.program.workspaces:
            elements = resized(space.elements, varying, size) + 2 * GUARD_ELEMENTS
            dtype = getattr(torch, space.dtype)
            buffer = torch.full((elements,), _poison(dtype), dtype=dtype, device=device)
            workspaces[space.name] = buffer
        inside = slice(GUARD_ELEMENTS, -GUARD_ELEMENTS)
        self.kernel.launch(
            [view for _, view, _ in guarded_inputs],
            [view for _, view in outputs],
            {name: buffer[inside] for name, buffer in workspaces.items()},
            size,
        )
        for buffer, _, before in guarded_inputs:
            if not _equal_bytes(buffer, before):
                raise OutOfBoundsWrite(f"{self.kernel.file} wrote an input")
        for buffer, view in outputs:
            _check_guard_bands(buffer, view, self.kernel)
        for buffer in workspaces.values():
            _check_guard_bands(buffer, buffer[inside], self.kernel)
        return tuple(view for _, view in outputs)


_DEVICE = torch.device("cpu")


def _poison(dtype: torch.dtype) -> float | int | bool:
    """The value of guard bands and of outputs before a launch."""
    return float("nan") if dtype.is_floating_point else dtype == torch.bool or 113


def guarded_tensor(node: Node, device: torch.device) -> tuple[Tensor, Tensor]:
    """A poisoned buffer with guard bands, and a view of it with the strides of a node."""
    dtype = getattr(torch, node.dtype)
    extent = sum((n - 1) * s for n, s in zip(node.shape, node.strides, strict=True)) + 1
    size = extent + 2 * GUARD_ELEMENTS
    buffer = torch.full((size,), _poison(dtype), dtype=dtype, device=device)
    return buffer, buffer.as_strided(node.shape, node.strides, GUARD_ELEMENTS)


def _equal_bytes(left: Tensor, right: Tensor) -> bool:
    # Bytes, because NaN values differ from themselves and have several encodings.
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def _check_guard_bands(buffer: Tensor, view: Tensor, kernel: StitchedKernel) -> None:
    inside = torch.zeros(buffer.shape, dtype=torch.bool, device=buffer.device)
    inside.as_strided(view.shape, view.stride(), GUARD_ELEMENTS).fill_(True)
    clean = torch.full_like(buffer, _poison(buffer.dtype))
    if not _equal_bytes(buffer[~inside], clean[~inside]):
        raise OutOfBoundsWrite(f"{kernel.file} wrote memory beside an output or a workspace")


def with_guard_bands(stitched: StitchedGraph) -> StitchedGraph:
    """A copy of a stitched graph in which every kernel is a :class:`GuardedKernel`."""
    steps = tuple(s if isinstance(s, int) else GuardedKernel(s) for s in stitched.steps)
    return replace(stitched, steps=steps)  # type: ignore[arg-type]


def random_inputs(
    graph: Graph, seed: int, device: str = "cpu", *, special: bool = True
) -> list[Tensor]:
    """Random inputs of a graph; if ``special``, every third seed has NaN, Inf and -0.0 in them."""
    random = torch.Generator().manual_seed(seed)
    values = []
    for index in graph.inputs:
        node = graph[index]
        dtype = getattr(torch, node.dtype)
        if node.dtype == "bool":
            value = torch.rand(node.shape, generator=random) < 0.5
        elif "float" in node.dtype:
            value = torch.randn(node.shape, generator=random)
            if special and seed % 3 == 0 and value.numel() > 8:
                flat = value.view(-1)
                places = torch.randint(0, flat.numel(), (3,), generator=random)
                flat[places] = torch.tensor([float("nan"), float("inf"), -0.0])
        else:
            value = torch.randint(-5, 6, node.shape, generator=random)
        # Created on the target device: a copy to another device drops the gaps of strided tensors.
        strided = torch.empty_strided(node.shape, node.strides, dtype=dtype, device=device)
        values.append(strided.copy_(value.to(dtype)))
    return values


def stored_values(stitched: StitchedGraph) -> frozenset[int]:
    """The values that kernels or PyTorch operators store in memory, rounded to their dtypes."""
    outputs = ((s,) if isinstance(s, int) else s.program.outputs for s in stitched.steps)
    return frozenset(index for step in outputs for index in step)


def dot_operands(graph: Graph) -> frozenset[int]:
    """The operands of dots, which tensor cores and PyTorch read in their own dtypes."""
    dots = (node for node in graph if node.kind == "dot")
    return frozenset(graph.base(index) for node in dots for index in node.inputs)


def fp32_reference(
    graph: Graph,
    inputs: Sequence[Tensor],
    rounded: Container[int],
    *,
    contracted: bool = False,
) -> list[Tensor]:
    """The outputs of a graph run operator by operator, with floats in fp32.

    Casts and the values in ``rounded`` are rounded to their dtypes. ``contracted``: a product and
    the sum that reads it are rounded once, as in an FMA instruction.
    """
    values: list[Tensor] = []
    fp32_inputs = iter(
        [value.float() if value.dtype.is_floating_point else value for value in inputs]
    )
    for node in graph:
        fp32_node = replace(node, dtype="float32") if "float" in node.dtype else node
        operands = [values[index] for index in node.inputs]
        if node.op == "input":
            values.append(next(fp32_inputs))
        elif node.kind == "constant":
            values.append(eager.constant_value(fp32_node, _DEVICE))
        elif node.kind == "layout":
            values.append(eager.apply_view(node, operands[0]))
        elif node.op == "cast":
            rounded_value = operands[0].to(getattr(torch, node.dtype))
            values.append(rounded_value.to(getattr(torch, fp32_node.dtype)))
        elif contracted and node.op in ("add", "sub") and node.dtype in RELATIVE_ROUNDING:
            exact = [_product(graph, values, index, rounded) for index in node.inputs]
            values.append(eager.run_operator(replace(node, dtype="float64"), exact).float())
        else:
            values.append(eager.run_operator(fp32_node, operands))
        if node.index in rounded and "float" in node.dtype:
            values[-1] = values[-1].to(getattr(torch, node.dtype)).float()
    return [values[index] for index in graph.outputs]


def _product(graph: Graph, values: Sequence[Tensor], index: int, rounded: Container[int]) -> Tensor:
    """A value in fp64; a product is not rounded to fp32 first."""
    node = graph[index]
    if node.op != "mul" or node.dtype not in RELATIVE_ROUNDING or index in rounded:
        return values[index].double()
    return eager.run_operator(
        replace(node, dtype="float64"), [values[i].double() for i in node.inputs]
    )


def find_value_errors(
    stitched: StitchedGraph, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[str]:
    """Descriptions of wrong outputs; empty if all outputs are right.

    The error against fp64 may be the rounding of the output's dtype plus 16 times the largest error
    of PyTorch's operators run one by one in fp32. In that reference, values between kernels and the
    operands of dots have their own dtypes. NaN and Inf must be at the same places as in fp64 or in
    fp32, with or without contraction (x + 2 c may be 0 in one of them only).
    """
    graph = stitched.graph
    on_cpu = [value.cpu() for value in inputs]
    exact = interpret(graph, [_array(value) for value in on_cpu])
    rounded = stored_values(stitched) | dot_operands(graph)
    fp32 = fp32_reference(graph, on_cpu, rounded)
    contracted = fp32_reference(graph, on_cpu, rounded, contracted=True)
    errors = []
    references = zip(exact, fp32, contracted, strict=True)
    for index, output, reference in zip(graph.outputs, outputs, references, strict=True):
        node = graph[index]
        if tuple(output.shape) != node.shape or output.dtype != getattr(torch, node.dtype):
            errors.append(f"{node}: got {output.dtype} {tuple(output.shape)}")
        elif output.numel() and (text := _difference(node, output.cpu(), *reference)):
            errors.append(f"{node}: {text}")
    return errors


def _array(value: Tensor) -> np.ndarray:
    return (value.double() if value.dtype.is_floating_point else value).numpy()


def _difference(
    node: Node, output: Tensor, exact: np.ndarray, fp32: Tensor, contracted: Tensor
) -> str | None:
    """A description of the first wrong value of an output; None if all values are right."""
    if "float" not in node.dtype:
        reference = torch.from_numpy(np.ascontiguousarray(exact)).to(output.dtype)
        count = int((output != reference).sum())
        return f"{count} of {output.numel()} values differ" if count else None
    dtype = getattr(torch, node.dtype)
    fp64_exact = torch.from_numpy(np.ascontiguousarray(exact))
    expected = fp64_exact.to(dtype).double()
    references = (expected, fp32.to(dtype).double(), contracted.to(dtype).double())
    actual = output.double()
    finite = references[0].isfinite() & references[1].isfinite() & references[2].isfinite()
    same_class = [_value_class(actual) == _value_class(each) for each in references]
    wrong_class = ~(same_class[0] | same_class[1] | same_class[2])
    if bool(wrong_class.any()):
        at = tuple(int(i) for i in wrong_class.nonzero()[0])
        return f"at {at} got {actual[at]}, fp64 gives {expected[at]}, fp32 {references[1][at]}"
    fp32_errors = (fp32.double() - fp64_exact).abs()[finite]
    largest = float(fp32_errors.max()) if fp32_errors.numel() else 0.0
    allowed = MAX_ERROR_RATIO * largest + 1e-7
    error = (actual - expected).abs()
    too_large = finite & (error > allowed + RELATIVE_ROUNDING[node.dtype] * expected.abs())
    if bool(too_large.any()):
        at = tuple(int(i) for i in too_large.nonzero()[0])
        bound = f"allowed {allowed:.3g} + rounding"
        return f"at {at} got {actual[at]}, fp64 gives {expected[at]}, {bound}"
    return None


def _value_class(value: Tensor) -> Tensor:
    """0 for finite values, 1 for NaN, 2 and 3 for the infinities."""
    kind = value.isnan().to(torch.int8)
    kind[value == float("inf")] = 2
    kind[value == float("-inf")] = 3
    return kind
