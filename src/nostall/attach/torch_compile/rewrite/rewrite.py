"""Replace operators of an FX graph by calls of stitched kernels.

Operators that no kernel computes stay as they are, for Inductor or eager PyTorch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from nostall.attach.torch_compile.rewrite.kernel_selection import (
    KernelFilter,
    KernelMatch,
    RewriteResult,
)
from nostall.attach.torch_compile.rewrite.list_kernels import insert_list_kernels
from nostall.attach.torch_compile.rewrite.matching import match_kernels
from nostall.attach.torch_compile.rewrite.nodes import erase_unused, fake_mode, sort_by_position
from nostall.attach.torch_compile.rewrite.products import match_products
from nostall.attach.torch_compile.runtime.custom_op import STITCHED_OP
from nostall.attach.torch_compile.store.kernel_store import KernelStore
from nostall.fusion.capture import CapturedGraph
from nostall.fusion.graph.dynamic_size import varies


def insert_kernels(
    module: GraphModule, store: KernelStore, kernel_filter: KernelFilter, result: RewriteResult
) -> None:
    """Insert stitched kernels into a functional ATen graph, in place.

    The inserted kernels and the operators that are not fused are added to ``result``.

    Raises :class:`BadCapture` for nodes without ``meta["val"]`` if it cannot be computed.
    """
    lines = insert_list_kernels(module, store, kernel_filter, result)
    explained = len(result.explanations)
    matched = match_kernels(module, store, kernel_filter, result)
    if lines and len(result.explanations) > explained:
        result.explanations[-1] += [f"  {line}" for line in lines]
    elif lines:
        result.explanations.append(lines)
    if matched is not None:
        _insert(module, *matched, result)


def insert_all(
    module: GraphModule, store: KernelStore, kernel_filter: KernelFilter, result: RewriteResult
) -> None:
    """Insert the kernels of all sources into an ATen graph, in place.

    Those over lists come first, then stitched kernels, then those of matrix products: each source
    sees the graph that the one before it leaves.
    """
    explained = len(result.explanations)
    insert_kernels(module, store, kernel_filter, result)
    if kernel_filter.products:
        insert_products(module, kernel_filter, result)
        # One explanation for each graph; none if the graph must not be changed.
        for lines in result.explanations[explained + 1 :]:
            result.explanations[explained] += [f"  {line}" for line in lines]
        del result.explanations[explained + 1 :]


def insert_products(module: GraphModule, kernel_filter: KernelFilter, result: RewriteResult) -> int:
    """Insert the product kernels that ``kernel_filter.regions`` has, in place; returns how many.

    Products without a record stay with cuBLAS. The kernels and an explanation are added to
    ``result``.
    """
    matched = match_products(module, kernel_filter, result)
    if matched is None:
        return 0
    _insert(module, *matched, result)
    return len(matched[1])


def _insert(
    module: GraphModule,
    captured: CapturedGraph,
    matches: Sequence[KernelMatch],
    result: RewriteResult,
) -> None:
    if matches:
        replace_operators(module, captured, matches)
        result.kernels += [match.kernel for match in matches]


def replace_operators(
    module: GraphModule, captured: CapturedGraph, matches: Sequence[KernelMatch]
) -> None:
    """Replace the operators of matches by calls of their kernels, in place."""
    graph = module.graph
    editor = _GraphEditor(graph, captured)
    for match in matches:
        inputs = [editor.input_node(index) for index in match.inputs]
        results = editor.add_kernel_call(match, inputs)
        for index, result in zip(match.outputs, results, strict=True):
            origin = editor.values.get(index)
            editor.values[index] = result
            if origin is not None:
                result.meta = {**origin.meta, "val": result.meta["val"]}
                origin.replace_all_uses_with(result)
    for node, value in captured.values.items():
        if isinstance(value, int) and editor.is_hidden_view(value):
            view = editor.view_node(value)
            if view is not None and _has_same_layout(view.meta["val"], node.meta["val"]):
                node.replace_all_uses_with(view)
    erase_unused(graph)
    sort_by_position(graph, editor.position)
    module.recompile()


class _GraphEditor:
    """Adds nodes to an FX graph for values of the captured graph."""

    def __init__(self, graph: FxGraph, captured: CapturedGraph) -> None:
        self._graph, self._captured = graph, captured
        # The FX node of each value of the captured graph that has one.
        self.values: dict[int, FxNode] = dict(captured.origins)
        # Preferred position of each node; several nodes may have the same.
        self.position = {node: index for index, node in enumerate(graph.nodes)}
        self._output = graph.output_node()

    def input_node(self, index: int) -> FxNode:
        """The node of a value that a kernel reads; adds views that the FX graph does not have."""
        if index in self.values:
            return self.values[index]
        node = self.view_node(index)
        assert node is not None  # kernels read views of a dynamic size only if PyTorch has them
        return node

    def add_kernel_call(self, match: KernelMatch, inputs: list[FxNode]) -> list[FxNode]:
        """Add the call of a kernel; returns a node for each of its results."""
        call = self._add_call(STITCHED_OP, (inputs, match.kernel), inputs)
        # Inductor then gives the inputs the strides that they have here.
        values = [node.meta["val"] for node in inputs]
        call.meta["eager_input_vals"] = (values, match.kernel), {}
        results = range(len(match.outputs))
        return [self._add_call(operator.getitem, (call, i), [call]) for i in results]

    def is_hidden_view(self, index: int) -> bool:
        """Whether a value of PyTorch is a view of a kernel's result without a node in PyTorch.

        That happens inside of one ATen call that was lowered to several operators.
        """
        graph, origins = self._captured.graph, self._captured.origins
        while graph[index].kind == "layout":
            index = graph[index].inputs[0]
            if index in origins:
                return False
            if index in self.values:
                return True
        return False

    def view_node(self, index: int) -> FxNode | None:
        """The node of a value or of a view of one, added if necessary.

        None if the view has dynamic sizes that cannot be expressed by ``-1``.
        """
        node, varying = self._captured.graph[index], self._captured.graph.varying
        if index in self.values and not self.is_hidden_view(index):
            return self.values[index]
        base = self.view_node(node.inputs[0])
        dynamic = [varies(size, varying) for size in node.shape]
        if base is None or sum(dynamic) > (node.op != "slice"):
            return None
        aten = torch.ops.aten
        # -1 means the size of the tensor in ``expand``, and the remaining size in ``view``.
        shape = [
            -1 if is_dynamic else size for is_dynamic, size in zip(dynamic, node.shape, strict=True)
        ]
        if node.op == "permute":
            return self._add_call(aten.permute.default, (base, list(node.dims)), [base])
        if node.op == "expand":
            return self._add_call(aten.expand.default, (base, shape), [base])
        if node.op == "slice":
            dim, start, step = (node[name] for name in ("dim", "start", "step"))
            assert isinstance(dim, int) and isinstance(start, int) and isinstance(step, int)
            stop = start + step * (node.shape[dim] - 1) + 1
            return self._add_call(aten.slice.Tensor, (base, dim, start, stop, step), [base])
        return self._add_call(aten.view.default, (base, shape), [base])

    def _add_call(self, target: Any, args: tuple[Any, ...], inputs: list[FxNode]) -> FxNode:
        with self._graph.inserting_before(self._output), fake_mode(inputs):
            call = self._graph.call_function(target, args)
            values = torch.fx.map_arg(args, lambda node: node.meta["val"])
            call.meta["val"] = target(*values)
        self.position[call] = max(self.position[node] for node in inputs)
        return call


def _has_same_layout(a: Any, b: Any) -> bool:
    return bool(a.shape == b.shape and a.stride() == b.stride())
