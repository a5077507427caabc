"""An FX graph with calls of stitched kernels in place of the operators that they compute.

Whatever is not replaced stays as it is, for Inductor or eager PyTorch.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from nostall.attach.torch_compile.rewrite.kernel_selection import Selection, Stitching
from nostall.attach.torch_compile.rewrite.matching import Part, parts_of
from nostall.attach.torch_compile.runtime.custom_op import STITCHED
from nostall.attach.torch_compile.store.records import Kept
from nostall.fusion.capture import CapturedGraph
from nostall.fusion.graph.dynamic_size import varies


def rewrite(module: GraphModule, kept: Kept, selection: Selection, done: Stitching) -> None:
    """Put stitched kernels into a functional ATen graph, in place.

    Raises :class:`BadCapture` for nodes without ``meta["val"]`` that cannot be given one.
    """
    found = parts_of(module, kept, selection, done)
    if found is None or not found[1]:
        return
    captured, parts = found
    _replace(module, captured, parts)
    done.kernels += [part.kernel for part in parts]


def _replace(module: GraphModule, captured: CapturedGraph, parts: Sequence[Part]) -> None:
    graph = module.graph
    new = _New(graph, captured)
    for part in parts:
        given = [new.read(index) for index in part.reads]
        results = new.kernel(part, given)
        for index, result in zip(part.gives, results, strict=True):
            origin = new.values.get(index)
            new.values[index] = result
            if origin is not None:
                result.meta = {**origin.meta, "val": result.meta["val"]}
                origin.replace_all_uses_with(result)
    for node, value in captured.values.items():
        if isinstance(value, int) and new.hides(value):
            shown = new.shown(value)
            if shown is not None and _same(shown.meta["val"], node.meta["val"]):
                node.replace_all_uses_with(shown)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and not node.is_impure():
            graph.erase_node(node)
    _sort(graph, new.at)
    module.recompile()


class _New:
    """Nodes that are added.  ``values`` has the node that stands for a value of the captured graph,
    ``at`` the place that every node would like to have."""

    def __init__(self, graph: FxGraph, captured: CapturedGraph) -> None:
        self._graph, self._captured = graph, captured
        self.values: dict[int, FxNode] = dict(captured.origins)
        self.at = {node: place for place, node in enumerate(graph.nodes)}
        self._output = graph.output_node()

    def read(self, index: int) -> FxNode:
        """A value that a kernel is given; views of which PyTorch does not know are made."""
        if index in self.values:
            return self.values[index]
        shown = self.shown(index)
        assert shown is not None  # of what varies only PyTorch's own views are read
        return shown

    def kernel(self, part: Part, given: list[FxNode]) -> list[FxNode]:
        """The call of a kernel; a node for each of its results."""
        call = self._call(STITCHED, (given, part.kernel), given)
        # Inductor then lays tensors out as the kernel reads them.
        call.meta["eager_input_vals"] = ([node.meta["val"] for node in given], part.kernel), {}
        places = range(len(part.gives))
        return [self._call(operator.getitem, (call, place), [call]) for place in places]

    def hides(self, index: int) -> bool:
        """Whether a value of PyTorch's is a view of a result that PyTorch does not know: inside of
        what one ATen call was lowered to."""
        graph, origins = self._captured.graph, self._captured.origins
        while graph[index].kind == "layout":
            index = graph[index].inputs[0]
            if index in origins:
                return False
            if index in self.values:
                return True
        return False

    def shown(self, index: int) -> FxNode | None:
        """The node of a value, views of results included; None where its sizes cannot be told."""
        node, varying = self._captured.graph[index], self._captured.graph.varying
        if index in self.values and not self.hides(index):
            return self.values[index]
        below = self.shown(node.inputs[0])
        changing = [varies(size, varying) for size in node.shape]
        if below is None or sum(changing) > (node.op != "slice"):
            return None
        aten = torch.ops.aten
        # -1 is what the tensor has, or what is left.
        shape = [-1 if is_so else size for is_so, size in zip(changing, node.shape, strict=True)]
        if node.op == "permute":
            return self._call(aten.permute.default, (below, list(node.dims)), [below])
        if node.op == "expand":
            return self._call(aten.expand.default, (below, shape), [below])
        if node.op == "slice":
            dim, start, step = (node[name] for name in ("dim", "start", "step"))
            assert isinstance(dim, int) and isinstance(start, int) and isinstance(step, int)
            stop = start + step * (node.shape[dim] - 1) + 1
            return self._call(aten.slice.Tensor, (below, dim, start, stop, step), [below])
        return self._call(aten.view.default, (below, shape), [below])

    def _call(self, target: Any, args: tuple[Any, ...], reads: list[FxNode]) -> FxNode:
        with self._graph.inserting_before(self._output), _mode(reads):
            call = self._graph.call_function(target, args)
            given = torch.fx.map_arg(args, lambda node: node.meta["val"])
            call.meta["val"] = target(*given)
        self.at[call] = max(self.at[node] for node in reads)
        return call


def _same(one: Any, other: Any) -> bool:
    return bool(one.shape == other.shape and one.stride() == other.stride())


def _mode(reads: Sequence[FxNode]) -> Any:
    """The mode in which the nodes' tensors are fake."""
    modes = (getattr(node.meta["val"], "fake_mode", None) for node in reads)
    return next((mode for mode in modes if mode is not None), contextlib.nullcontext())


def _sort(graph: FxGraph, at: dict[FxNode, int]) -> None:
    """Put every node behind those that it reads, otherwise in the order of before.

    What changes a tensor in place stays behind all that stood before it, and before all behind;
    what draws from a random generator stays behind what drew before.
    """
    nodes = sorted(graph.nodes, key=lambda node: at[node])
    place = {node: number for number, node in enumerate(nodes)}
    after: dict[FxNode, list[FxNode]] = {node: list(node.users) for node in nodes}
    fences = [-1, *(place[node] for node in nodes if _changes(node)), len(nodes)]
    for low, high in pairwise(fences):
        for node in nodes[low + 1 : high]:
            if low >= 0:
                after[nodes[low]].append(node)
            if high < len(nodes):
                after[node].append(nodes[high])
        if low >= 0 and high < len(nodes):
            after[nodes[low]].append(nodes[high])
    for one, next_ in pairwise(node for node in nodes if _draws(node)):
        after[one].append(next_)
    waits = Counter(user for users in after.values() for user in users)
    ready: list[int] = []
    for node in nodes:
        if not waits[node]:
            heappush(ready, place[node])
    ordered: list[FxNode] = []
    while ready:
        node = nodes[heappop(ready)]
        ordered.append(node)
        for user in after[node]:
            waits[user] -= 1
            if not waits[user]:
                heappush(ready, place[user])
    if len(ordered) < len(nodes):
        raise Entangled("a kernel waits for a change in place or a draw that waits for the kernel")
    for before, node in pairwise(ordered):
        before.append(node)


def _changes(node: FxNode) -> bool:
    """Whether a call may change memory that others read; what has no schema is not trusted."""
    if node.op == "output":
        return True
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    schema = getattr(node.target, "_schema", None)
    return schema is None or bool(schema.is_mutable)


def _draws(node: FxNode) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class Entangled(Exception):
    """Kernels cannot be put in order around changes in place and random numbers; the graph stays as
    it was."""
