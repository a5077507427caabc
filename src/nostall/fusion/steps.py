"""Steps of a stitched module: their order, and which of its results need memory of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from torch._ops import HigherOrderOperator
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from nostall.fusion.capture import CapturedGraph
from nostall.fusion.capture.memory import draws_random_numbers, mutated_tensors, shared_memory
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph
from nostall.fusion.graph.graph import Graph


@dataclass(frozen=True)
class Step:
    """One step of a run: the kernels of a region, or a call that PyTorch runs.

    Values are identified by their nodes in the captured graph.  Inputs may be views.
    """

    action: StitchedGraph | FxNode
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    last_uses: tuple[int, ...] = ()
    """Values that no later step reads; they are released after this step."""


def order_steps(
    steps: list[Step], results: set[int], nodes: Iterable[FxNode], graph: Graph
) -> list[Step]:
    """Sort steps topologically and set the last uses of each; ``results`` are never released.

    A step that reads a view of ``graph`` uses the viewed value.

    Calls that touch memory which one of them changes keep the order that they have in ``nodes``.
    So do calls that draw random numbers, unless a region would have to run before and after one.
    """
    producer = {index: at for at, step in enumerate(steps) for index in step.outputs}
    predecessors = {
        at: {producer[i] for i in map(graph.base, step.inputs) if i in producer}
        for at, step in enumerate(steps)
    }
    place = {step.action: at for at, step in enumerate(steps) if isinstance(step.action, FxNode)}
    for before, after in _changes_in_order(list(nodes)):
        if before in place and after in place:
            predecessors[place[after]].add(place[before])
    random = [at for at, step in enumerate(steps) if _is_random(step.action)]
    in_order = {at: set(before) for at, before in predecessors.items()}
    for before_at, at in pairwise(random):
        in_order[at].add(before_at)
    try:
        order = list(TopologicalSorter(in_order).static_order())
    except CycleError:
        order = list(TopologicalSorter(predecessors).static_order())
    return _with_last_uses([steps[at] for at in order], results, graph)


def _with_last_uses(ordered: Sequence[Step], results: set[int], graph: Graph) -> list[Step]:
    used_later = set(results)
    reversed_steps = []
    for step in reversed(ordered):
        # A result that no step reads is released by the step that computes it.
        last_uses = {*map(graph.base, step.inputs), *step.outputs} - used_later
        used_later |= last_uses
        reversed_steps.append(replace(step, last_uses=tuple(sorted(last_uses))))
    return reversed_steps[::-1]


def _changes_in_order(nodes: list[FxNode]) -> Iterator[tuple[FxNode, FxNode]]:
    """Pairs of calls (one, the next) that touch a memory which some call changes."""
    memory, mutated = shared_memory(nodes), mutated_tensors(nodes)
    last: dict[FxNode, FxNode] = {}
    for node in nodes:
        if node.op == "call_function":
            for touched in {memory[n] for n in (node, *node.all_input_nodes) if n in mutated}:
                if touched in last:
                    yield last[touched], node
                last[touched] = node


def _is_random(action: StitchedGraph | FxNode) -> bool:
    if not isinstance(action, FxNode):
        return False
    is_nested = isinstance(action.target, HigherOrderOperator)
    return is_nested or draws_random_numbers(action.target, action.args, action.kwargs)


def results_to_copy(captured: CapturedGraph, module: GraphModule) -> frozenset[FxNode]:
    """Results that would share memory with an input, an attribute or a result with other memory.

    Capture leaves out copies, such as ``x ** 1``; the user may change a result in place.
    """
    graph, memory = captured.graph, shared_memory(module.graph.nodes)
    owner: dict[int, FxNode] = {}
    (output,) = module.graph.find_nodes(op="output")
    sources = [node for node in module.graph.nodes if node.op in ("placeholder", "get_attr")]
    copied = set()
    for node in (*sources, *output.all_input_nodes):
        index = captured.values[node]
        base = graph.base(index) if isinstance(index, int) else None
        if base is None or graph[base].kind == "constant":
            continue  # several tensors, or a tensor that each reading makes anew
        if owner.setdefault(base, memory[node]) is not memory[node]:
            copied.add(node)
    return frozenset(copied)
