"""Which kernels can be put into an FX graph, and for which of its ATen calls they stand.

An ATen call goes away as a whole or not at all: a kernel that computes only a part of one is left
out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from nostall.attach.torch_compile.rewrite.kernel_selection import Selection, Stitching
from nostall.attach.torch_compile.store.records import Kept, StepRecord
from nostall.attach.torch_compile.store.regions import stitched_region
from nostall.attach.warning import say_once
from nostall.fusion.capture import CapturedGraph, capture
from nostall.fusion.capture.randomness import numbers_depend_on_kernels
from nostall.fusion.errors import BadCapture
from nostall.fusion.graph.dynamic_size import varies
from nostall.fusion.graph.graph import MAX_ELEMENTS, Graph
from nostall.fusion.graph.operations import COMPUTE
from nostall.fusion.graph.regions import Region, find_regions


@dataclass(frozen=True)
class Part:
    """A kernel in terms of the whole graph.  ``key`` names the operators that it computes, whoever
    does that by whatever plan; ``kernel`` is one that does."""

    key: str
    kernel: str
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    operators: tuple[int, ...]
    reduces: bool


def parts_of(
    module: GraphModule, kept: Kept, selection: Selection, done: Stitching
) -> tuple[CapturedGraph, list[Part]] | None:
    """The operators of a functional ATen graph, and the kernels that can stand for some of them;
    None for a graph that is left alone.

    Raises :class:`BadCapture` for nodes without ``meta["val"]`` that cannot be given one.
    """
    captured = _captured(module)
    if captured is None:
        # With other kernels around them forward and backward could draw different numbers.
        done.refused["random numbers that depend on the kernel they are in", "whole graph"] += 1
        return None
    done.refused.update(captured.report.unsupported)
    found: list[Part] = []
    for region in _regions(captured):
        try:
            record = stitched_region(region.graph, kept, selection.regions)
        except Exception as error:  # one region is not worth the others
            say_once(f"a region is not stitched: {type(error).__name__}: {error}")
            done.refused[f"{type(error).__name__} while stitching", "a region"] += 1
            continue
        for why, count in record.refused.items():
            # In front stands which operator, with its sizes.
            done.refused[why.partition(": ")[2] or why, "no kernel"] += count
        found += [_part(step, region) for step in record.steps]
    taken = _wanted(captured.graph, found, selection, done)
    parts = _whole_calls(captured, taken, done)
    if parts:
        _bounded(captured)
    return captured, parts


def regions_of(module: GraphModule) -> list[Graph]:
    """The regions of an ATen graph, each once, as :func:`parts_of` will find them.  Where Dynamo
    listens, PyTorch compiles again for sizes with which kernels could not count the elements."""
    captured = _captured(module)
    if captured is None:
        return []
    _bounded(captured, where_heard=True)
    return list({region.graph.key: region.graph for region in _regions(captured)}.values())


def _regions(captured: CapturedGraph) -> tuple[Region, ...]:
    return find_regions(captured.graph, owners(captured), _pairs_of_seeds(captured))


def _pairs_of_seeds(captured: CapturedGraph) -> frozenset[int]:
    """Views of what Inductor draws for a graph.  As inputs of kernels they make regions equal that
    draw their numbers from different seeds: the layers of a model."""
    graph, found = captured.graph, set[int]()
    for node, value in captured.values.items():
        is_seed = str(node.target) == "prims.inductor_lookup_seed.default"
        if is_seed and isinstance(value, int) and graph[value].op == "view":
            found.update(graph[graph[value].inputs[0]].inputs)
    return frozenset(found)


def _captured(module: GraphModule) -> CapturedGraph | None:
    complete(module.graph)
    return None if _draws_by_kernel(module) else capture(module)


def _draws_by_kernel(module: GraphModule) -> bool:
    drawn = [n for n in module.graph.nodes if str(n.target) == "prims.inductor_random.default"]
    on_gpu = any(node.meta["val"].device.type == "cuda" for node in drawn)
    return on_gpu and numbers_depend_on_kernels()


def _part(step: StepRecord, region: Region) -> Part:
    def outside(indices: Iterable[int]) -> tuple[int, ...]:
        return tuple(region.origins[i] for i in indices)

    text = f"{region.graph.key} {step.operators}"
    key = hashlib.sha256(text.encode()).hexdigest()
    reads, gives, operators = map(outside, (step.reads, step.gives, step.operators))
    return Part(key, step.kernel, reads, gives, operators, step.reduces)


def _wanted(graph: Graph, parts: list[Part], selection: Selection, done: Stitching) -> list[Part]:
    # Without a tensor to read nobody says on which device, or what a size that varies is.
    def told(part: Part) -> bool:
        every = graph.varying is None or _varying(graph, part.reads)
        return bool(part.reads) and (every or not _varying(graph, part.gives))

    slower = sum(told(part) and part.key in selection.left for part in parts)
    if slower:
        done.refused["not faster than what Inductor makes of it", "a kernel"] += slower
    return [part for part in parts if told(part) and selection.takes(part)]


def _varying(graph: Graph, nodes: Iterable[int]) -> bool:
    return any(varies(size, graph.varying) for index in nodes for size in graph[index].shape)


def _bounded(captured: CapturedGraph, *, where_heard: bool = False) -> None:
    """Have PyTorch compile again for a size with which kernels could not count the elements: asked
    where Dynamo listens, that becomes a guard.  ``where_heard``: elsewhere it is not asked."""
    graph = captured.graph
    varying = graph.varying
    if varying is None:
        return
    most = max(n.elements // varying for n in graph if n.elements % varying == 0)
    for node in captured.values:
        value = node.meta.get("val")
        for size in value.shape if isinstance(value, torch.Tensor) else ():
            if isinstance(size, torch.SymInt) and size.node.expr == captured.symbol:
                if where_heard and size.node.shape_env.frozen:
                    return
                if not size * most <= MAX_ELEMENTS:
                    raise BadCapture("more elements than kernels can count")
                return


def _whole_calls(captured: CapturedGraph, parts: list[Part], done: Stitching) -> list[Part]:
    """The kernels between which whole ATen calls are computed, and nothing else."""
    graph = captured.graph
    owner = owners(captured)
    known = {*captured.origins, *_pairs_of_seeds(captured)}
    while True:
        held = {index for part in parts for index in part.operators}
        given = {index for part in parts for index in part.gives}
        cut = {owner[i] for i in graph.operators if i not in held and i in owner}
        left = [
            part
            for part in parts
            if any(owner.get(i) in cut for i in part.operators)
            or any(i not in given and i not in known for i in part.reads)
        ]
        unlike = [p for p in parts if p not in left and not _alike(captured, p)]
        if not left and not unlike:
            return parts
        done.refused["a part of an ATen call", "no kernel"] += len(left)
        done.refused["a result that lies otherwise", "no kernel"] += len(unlike)
        parts = [part for part in parts if part not in left and part not in unlike]


def owners(captured: CapturedGraph) -> dict[int, FxNode]:
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


def _alike(captured: CapturedGraph, part: Part) -> bool:
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


def _plain(sizes: Iterable[Any], captured: CapturedGraph) -> tuple[int, ...]:
    """Sizes as the captured graph has them."""
    varying = captured.graph.varying
    return tuple(
        size if isinstance(size, int) else int(size.node.expr.subs(captured.symbol, varying))
        for size in sizes
    )


def complete(graph: FxGraph) -> None:
    """Give nodes that a pass made without ``meta["val"]`` theirs."""
    modes = [v.fake_mode for n in graph.nodes if isinstance(v := n.meta.get("val"), FakeTensor)]
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta and modes:

            def held(operand: FxNode) -> Any:
                return operand.meta["val"]

            args, named = torch.fx.map_arg((node.args, node.kwargs), held)
            with modes[0]:
                node.meta["val"] = node.target(*args, **named)
