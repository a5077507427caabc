"""Operator graphs to explore: regions of real models, and models repeated to any length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch._subclasses import FakeTensorMode

from benchmarks.fusion.small_models import models
from nostall.fusion import Graph
from nostall.fusion.capture import CapturedGraph, capture, inference_graph, training_graphs
from nostall.fusion.graph.regions import find_regions

INFERENCE_ONLY = ("quantised-norm",)


@dataclass(frozen=True, slots=True)
class Named:
    """A region, named by model, direction and its number in the pass."""

    name: str
    graph: Graph


def captured(name: str, *, small: bool = False) -> dict[str, CapturedGraph]:
    """The passes of a model, traced with fake tensors: nothing is computed."""
    with FakeTensorMode():
        module, inputs = models(small)[name]()
    if name in INFERENCE_ONLY:
        return {"inference": capture(inference_graph(module, *inputs))}
    forward, backward = training_graphs(module, *inputs)
    return {"forward": capture(forward), "backward": capture(backward)}


def subgraphs(least: int, most: int) -> Iterator[Named]:
    """Different regions of all models with that many operators."""
    seen: set[str] = set()
    for model in models():
        for direction, found in captured(model).items():
            for number, part in enumerate(find_regions(found.graph)):
                fits = least <= len(part.graph.operators) <= most
                if fits and part.graph.key not in seen:
                    seen.add(part.graph.key)
                    yield Named(f"{model} {direction} {number}", part.graph)


def repeated(graph: Graph, nodes: int) -> Graph:
    """Copies of a graph one behind the other, until there are about so many nodes: an input
    of a copy is an output of the same shape of the copy before."""
    made = list(graph.nodes)
    outputs = list(graph.outputs)
    entry, exit_ = next(
        (one, other)
        for other in graph.outputs
        for one in graph.inputs
        if (graph[one].shape, graph[one].dtype) == (graph[other].shape, graph[other].dtype)
        and graph[other].kind != "input"
    )
    last = exit_
    while len(made) + len(graph) <= nodes:
        place: dict[int, int] = {entry: last}
        for node in graph:
            if node.index != entry:
                place[node.index] = len(made)
                inputs = tuple(place[index] for index in node.inputs)
                made.append(replace(node, index=len(made), inputs=inputs))
        last = place[exit_]
        outputs += [place[index] for index in graph.outputs]
    return Graph(tuple(made), tuple(dict.fromkeys(outputs)))
