"""Search of the kernels that make a candidate inaccurate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from nostall.attach.torch_compile.measure.rounding import errors, excess
from nostall.attach.torch_compile.rewrite.kernel_selection import match_key
from nostall.attach.torch_compile.runtime.custom_op import load_op
from nostall.attach.torch_compile.store.records import RegionRecord, StepRecord
from nostall.fusion.codegen.runtime import eager
from nostall.fusion.graph.dynamic_size import Size
from nostall.fusion.graph.graph import Graph

Region = tuple[Graph, RegionRecord]
"""A region's graph and its kernels."""


@dataclass(frozen=True)
class InaccurateKernel:
    """A kernel whose results are further off than those of PyTorch's operators."""

    key: str
    """Key of the kernel's match."""
    kernel: str
    reason: str
    """Names the operator, and says how far off its result is."""


def inaccurate_kernels(
    regions: Sequence[Region], inputs: Mapping[str, Sequence[Tensor]]
) -> Iterator[InaccurateKernel]:
    """The kernels that are inaccurate on these inputs (by kernel name), each judged on its own.

    A kernel is compared with its operators in fp64. PyTorch's operators one by one, in the dtypes
    of the graph, are the other version that its errors are compared with.
    """
    for graph, record in regions:
        for step in record.steps:
            if step.kernel in inputs and (reason := _excess(graph, step, inputs[step.kernel])):
                key = match_key(graph.key, step.operators)
                yield InaccurateKernel(key, step.kernel, reason)


def _excess(graph: Graph, step: StepRecord, inputs: Sequence[Tensor]) -> str:
    record = load_op(step.kernel).record
    # The kernel may depend on some of the graph's sizes only; so do its operators.
    graph = replace(graph, varying=record.varying)
    size = record.dynamic_size(inputs)
    exact = _run_operators(graph, step, inputs, size, wide=True)
    known = _run_operators(graph, step, inputs, size, wide=False)
    found = load_op(step.kernel)(inputs)
    terms = max(_terms(graph, index) for index in step.operators)
    for index, r, a, b in zip(step.outputs, exact, known, found, strict=True):
        if reason := excess(b, errors(r, b, a), errors(r, a, a), terms):
            return f"{graph.describe(index)}: {reason}"
    return ""


def _terms(graph: Graph, index: int) -> int:
    """The terms of each sum that an operator computes."""
    node = graph[index]
    if node.kind == "dot":
        return graph[node.inputs[0]].shape[-1]
    return max(1, graph[node.inputs[0]].elements // max(1, node.elements)) if node.inputs else 1


def _run_operators(
    graph: Graph, step: StepRecord, inputs: Sequence[Tensor], size: Size | None, *, wide: bool
) -> list[Tensor]:
    """The outputs of a kernel's operators in PyTorch, in fp64 or in the dtypes of the graph."""

    def widen(value: Tensor) -> Tensor:
        return value.double() if wide and value.dtype.is_floating_point else value

    device = inputs[0].device
    values = {i: widen(x) for i, x in zip(step.inputs, inputs, strict=True)}
    for index in step.operators:
        node = graph[index].resized(graph.varying, size)
        if wide and "float" in node.dtype:
            node = replace(node, dtype="float64")
        operands = [widen(eager.read_value(graph, i, values, size, device)) for i in node.inputs]
        values[index] = eager.run_operator(node, operands)
    return [values[index] for index in step.outputs]


def culprits(
    keys: Sequence[str], is_accurate_without: Callable[[Collection[str]], bool], attempts: int
) -> frozenset[str]:
    """A small part of ``keys`` without which the graph is accurate, by bisection.

    ``is_accurate_without`` compiles and checks the graph; it is called ``attempts`` times at most.
    Empty if no half of the keys is enough: kernels of both halves are inaccurate then.
    """
    found = list(keys)
    while len(found) > 1 and attempts > 0:
        middle = len(found) // 2
        for half in (found[:middle], found[middle:]):
            attempts -= 1
            if is_accurate_without(half):
                found = half
                break
            if attempts < 1:
                break
        else:
            break
    return frozenset() if len(found) == len(keys) > 1 else frozenset(found)
