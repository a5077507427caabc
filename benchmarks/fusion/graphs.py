"""Operator graphs for the explorers: regions of models, and graphs repeated to any length."""

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
class NamedGraph:
    """A region with its name: model, pass, and its number in the pass."""

    name: str
    graph: Graph


def capture_passes(name: str, *, small: bool = False) -> dict[str, CapturedGraph]:
    """Graphs of a model's passes (forward and backward, or inference), traced with fake tensors."""
    with FakeTensorMode():
        module, inputs = models(small)[name]()
    if name in INFERENCE_ONLY:
        return {"inference": capture(inference_graph(module, *inputs))}
    forward, backward = training_graphs(module, *inputs)
    return {"forward": capture(forward), "backward": capture(backward)}


def model_regions(min_operators: int, max_operators: int) -> Iterator[NamedGraph]:
    """Distinct regions of all models with ``min_operators`` to ``max_operators`` operators."""
    seen: set[str] = set()
    for model in models():
        for direction, captured in capture_passes(model).items():
            for number, region in enumerate(find_regions(captured.graph)):
                fits = min_operators <= len(region.graph.operators) <= max_operators
                if fits and region.graph.key not in seen:
                    seen.add(region.graph.key)
                    yield NamedGraph(f"{model} {direction} {number}", region.graph)


def repeat_graph(graph: Graph, nodes: int) -> Graph:
    """Chain copies of a graph to at most ``nodes`` nodes.

    One input of each copy is an output of the same shape and dtype of the previous copy.
    """
    repeated_nodes = list(graph.nodes)
    outputs = list(graph.outputs)
    entry, exit_node = next(
        (input_node, output_node)
        for output_node in graph.outputs
        for input_node in graph.inputs
        if (graph[input_node].shape, graph[input_node].dtype)
        == (graph[output_node].shape, graph[output_node].dtype)
        and graph[output_node].kind != "input"
    )
    previous_exit = exit_node
    while len(repeated_nodes) + len(graph) <= nodes:
        copy_of: dict[int, int] = {entry: previous_exit}
        for node in graph:
            if node.index != entry:
                copy_of[node.index] = len(repeated_nodes)
                inputs = tuple(copy_of[index] for index in node.inputs)
                repeated_nodes.append(replace(node, index=len(repeated_nodes), inputs=inputs))
        previous_exit = copy_of[exit_node]
        outputs += [copy_of[index] for index in graph.outputs]
    return Graph(tuple(repeated_nodes), tuple(dict.fromkeys(outputs)))
