"""An FX graph with calls of stitched kernels in place of the operators that they compute.

Whatever is not replaced stays as it is, for Inductor or eager PyTorch.  An ATen call goes away as a
whole or not at all: a kernel that computes only a part of one is left out.
"""

from __future__ import annotations

import contextlib
import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import pairwise
from typing import Any, Literal

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from nostall.attach.compile.operator import STITCHED
from nostall.attach.compile.records import Kept, StepRecord
from nostall.attach.compile.region import stitched_region
from nostall.attach.delivery import say_once
from nostall.fusion.capture import Captured, capture
from nostall.fusion.capture.randomness import numbers_depend_on_kernels
from nostall.fusion.errors import BadCapture
from nostall.fusion.graph import MOST_ELEMENTS, Graph
from nostall.fusion.operations import COMPUTE
from nostall.fusion.regions import regions
from nostall.fusion.varying import varies

Extent = Literal["reductions", "all"]
"""Which kernels are put in: those with reductions (a chain of elementwise operators is what
Inductor does well, and can hide in its matrix products), or all."""


@dataclass
class Stitching:
    """What became of the graphs of one compilation: kernels put in, by name, and what was left to
    others, counted as (reason, operator)."""

    kernels: list[str] = field(default_factory=list)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(frozen=True)
class _Part:
    """A kernel in terms of the whole graph."""

    name: str
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    operators: tuple[int, ...]
    reduces: bool


def rewrite(module: GraphModule, kept: Kept, extent: Extent, done: Stitching) -> None:
    """Put stitched kernels into a functional ATen graph, in place.

    Raises :class:`BadCapture` for nodes without ``meta["val"]`` that cannot be given one.
    """
    _complete(module.graph)
    if _draws_by_kernel(module):
        # With other kernels around them forward and backward could draw different numbers.
        done.refused["random numbers that depend on the kernel they are in", "whole graph"] += 1
        return
    captured = capture(module)
    done.refused.update(captured.explanation.refused)
    parts = []
    for region in regions(captured.graph):
        try:
            record = stitched_region(region.graph, kept)
        except Exception as error:  # one region is not worth the others
            say_once(f"a region is not stitched: {type(error).__name__}: {error}")
            done.refused[f"{type(error).__name__} while stitching", "a region"] += 1
            continue
        for why, count in record.refused.items():
            # In front stands which operator, with its sizes.
            done.refused[why.partition(": ")[2] or why, "no kernel"] += count
        parts += [_part(step, region.origins) for step in record.steps]
    parts = _whole_calls(captured, _wanted(captured.graph, parts, extent), done)
    if not parts:
        return
    _bounded(captured)
    _replace(module, captured, parts)
    done.kernels += [part.name for part in parts]


def parts_of(module: GraphModule) -> list[Graph]:
    """The regions of an ATen graph, each once, as :func:`rewrite` will find them."""
    _complete(module.graph)
    found = {region.graph.key: region.graph for region in regions(capture(module).graph)}
    return list(found.values())


def _draws_by_kernel(module: GraphModule) -> bool:
    drawn = [n for n in module.graph.nodes if str(n.target) == "prims.inductor_random.default"]
    on_gpu = any(node.meta["val"].device.type == "cuda" for node in drawn)
    return on_gpu and numbers_depend_on_kernels()


def _part(step: StepRecord, origins: tuple[int, ...]) -> _Part:
    def outside(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(origins[i] for i in indices)

    reads, gives, operators = map(outside, (step.reads, step.gives, step.operators))
    return _Part(step.kernel, reads, gives, operators, step.reduces)


def _wanted(graph: Graph, parts: list[_Part], extent: Extent) -> list[_Part]:
    # Without a tensor to read nobody says on which device, or what a size that varies is.
    def told(part: _Part) -> bool:
        every = graph.varying is None or _varying(graph, part.reads)
        return bool(part.reads) and (every or not _varying(graph, part.gives))

    return [p for p in parts if told(p) and (extent == "all" or p.reduces)]


def _varying(graph: Graph, nodes: Iterable[int]) -> bool:
    return any(varies(size, graph.varying) for index in nodes for size in graph[index].shape)


def _bounded(captured: Captured) -> None:
    """Have PyTorch compile again for a size with which kernels could not count the elements: asked
    where Dynamo listens, that becomes a guard."""
    graph = captured.graph
    varying = graph.varying
    if varying is None:
        return
    most = max(n.elements // varying for n in graph if n.elements % varying == 0)
    for node in captured.values:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.expr == captured.symbol:
                if not size * most <= MOST_ELEMENTS:
                    raise BadCapture("more elements than kernels can count")
                return


def _whole_calls(captured: Captured, parts: list[_Part], done: Stitching) -> list[_Part]:
    """The kernels between which whole ATen calls are computed, and nothing else."""
    graph = captured.graph
    owner = _owners(captured)
    while True:
        held = {index for part in parts for index in part.operators}
        given = {index for part in parts for index in part.gives}
        cut = {owner[i] for i in graph.operators if i not in held and i in owner}
        left = [
            part
            for part in parts
            if any(owner.get(i) in cut for i in part.operators)
            or any(i not in given and i not in captured.origins for i in part.reads)
        ]
        unlike = [p for p in parts if p not in left and not _alike(captured, p)]
        if not left and not unlike:
            return parts
        done.refused["a part of an ATen call", "no kernel"] += len(left)
        done.refused["a result that lies otherwise", "no kernel"] += len(unlike)
        parts = [part for part in parts if part not in left and part not in unlike]


def _owners(captured: Captured) -> dict[int, FxNode]:
    """Of every operator the ATen call that it was lowered from: lowering goes node by node."""
    found: dict[int, FxNode] = {}
    first = 0
    for node, value in captured.values.items():
        last = max((value,) if isinstance(value, int) else value, default=-1)
        for index in range(first, last + 1):
            if captured.graph[index].kind in COMPUTE:
                found[index] = node
        first = max(first, last + 1)
    return found


def _alike(captured: Captured, part: _Part) -> bool:
    """Whether every result that PyTorch knows lies as PyTorch thinks."""
    for index in part.gives:
        origin, node = captured.origins.get(index), captured.graph[index]
        if origin is None:
            continue
        value = origin.meta["val"]
        if (_plain(value.shape, captured), _plain(value.stride(), captured)) != (
            node.shape,
            node.strides,
        ):
            return False
    return True


def _plain(sizes: Iterable[Any], captured: Captured) -> tuple[int, ...]:
    """Sizes as the captured graph has them."""
    varying = captured.graph.varying
    return tuple(
        size if isinstance(size, int) else int(size.node.expr.subs(captured.symbol, varying))
        for size in sizes
    )


def _replace(module: GraphModule, captured: Captured, parts: Sequence[_Part]) -> None:
    graph = module.graph
    new = _New(graph, captured)
    for part in parts:
        given = [new.values[index] for index in part.reads]
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

    def __init__(self, graph: FxGraph, captured: Captured) -> None:
        self._graph, self._captured = graph, captured
        self.values: dict[int, FxNode] = dict(captured.origins)
        self.at = {node: place for place, node in enumerate(graph.nodes)}
        self._output = graph.output_node()

    def kernel(self, part: _Part, given: list[FxNode]) -> list[FxNode]:
        """The call of a kernel; a node for each of its results."""
        call = self._call(STITCHED, (given, part.name), given)
        # Inductor then lays tensors out as the kernel reads them.
        call.meta["eager_input_vals"] = ([node.meta["val"] for node in given], part.name), {}
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

    What changes a tensor in place stays behind all that stood before it, and before all behind.
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
        raise Entangled("a kernel waits for a change in place that waits for the kernel")
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


class Entangled(Exception):
    """Kernels cannot be put in order around changes in place; the graph stays as it was."""


def _complete(graph: FxGraph) -> None:
    """Give nodes that a pass made without ``meta["val"]`` theirs."""
    modes = [v.fake_mode for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor)]
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and modes:

            def held(operand: FxNode) -> Any:
                return operand.meta["val"]

            args, named = torch.fx.map_arg((node.args, node.kwargs), held)
            with modes[0]:
                node.meta["val"] = node.target(*args, **named)
