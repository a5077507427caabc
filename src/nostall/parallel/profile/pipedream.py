"""Reader of PipeDream's graph text, the format in which DAPPLE's profiles are published, too.

Each node is one line, ``nodeN -- name -- forward_compute_time=ms, backward_compute_time=ms,
activation_size=bytes or [a; b], parameter_size=bytes``; each edge is an indented line
``nodeA -- nodeB``.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nostall.parallel.errors import BadProfile
from nostall.parallel.profile.layers import Layer, Profile, Tensor

_NODE = re.compile(r"^\s*(node\w+) -- (.*) -- (forward_compute_time=.*)$")
_EDGE = re.compile(r"^\s*(node\w+) -- (node\w+)\s*$")
_FIELD = re.compile(r"(\w+)=(\[[^\]]*\]|[^,\s]+)")
_TIMES = ("forward_compute_time", "backward_compute_time")
_SIZES = ("activation_size", "parameter_size")


@dataclass(frozen=True, slots=True)
class _Node:
    name: str
    forward_ms: float
    backward_ms: float
    activation_bytes: float
    parameter_bytes: float
    stored_bytes: float | None

    @property
    def is_input(self) -> bool:
        return self.name.startswith("Input")


def parse_graph(text: str, name: str, batch: int | None = None) -> Profile:
    """Parse graph text into a profile.

    Nodes named "Input..." do not become layers: their time is added to the first layer, and the
    tensors they produce are read there, so no measured time is lost.  Raises :class:`BadProfile`
    with the line number if a line is neither a node nor an edge or if a number is missing or
    invalid, and also if an edge names an unknown node or the graph has a cycle.
    """
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        location = f"{name}, line {number}"
        if match := _NODE.match(line):
            if match[1] in nodes:
                raise BadProfile(f"{location}: {match[1]} is defined twice; define each node once")
            nodes[match[1]] = _parse_node(match[2], match[3], location)
        elif match := _EDGE.match(line):
            edges[match[1], match[2]] = None
        else:
            raise BadProfile(
                f"{location}: {line.strip()[:60]!r} is neither a node "
                "('nodeN -- name -- forward_compute_time=...') nor an edge ('nodeA -- nodeB'); "
                "give PipeDream graph text or a profile that nostall wrote"
            )
    for a, b in edges:
        for end in (a, b):
            if end not in nodes:
                raise BadProfile(
                    f"{name}: edge {a} -- {b} names {end}, which has no line of its own; add it"
                )
    return _build_profile(nodes, list(edges), name, batch)


def _parse_node(name: str, text: str, location: str) -> _Node:
    fields = dict(_FIELD.findall(text))
    forward, backward = (_parse_number(fields, key, location) for key in _TIMES)
    activation, parameters = (_parse_number(fields, key, location) for key in _SIZES)
    stored = _parse_number(fields, "stored_size", location) if "stored_size" in fields else None
    return _Node(name.strip(), forward, backward, activation, parameters, stored)


def _parse_number(fields: Mapping[str, str], key: str, location: str) -> float:
    """Value of one field; a list in brackets holds sizes of several outputs, which are summed."""
    text = fields.get(key)
    if text is None:
        raise BadProfile(f"{location}: {key} is missing; add it (0 if the node has none)")
    parts = text.strip("[]").split(";")
    try:
        values = [float(part) for part in parts if part.strip()]
    except ValueError:
        raise BadProfile(
            f"{location}: {key}={text} is not a number; allowed are numbers >= 0"
        ) from None
    if any(not 0 <= value < float("inf") for value in values):
        raise BadProfile(f"{location}: {key}={text}; allowed are finite numbers >= 0")
    return sum(values)


def _build_profile(
    nodes: Mapping[str, _Node], edges: Sequence[tuple[str, str]], name: str, batch: int | None
) -> Profile:
    order = topological_order(list(nodes), edges, name)
    inputs = [n for n in order if nodes[n].is_input]
    layer_nodes = [n for n in order if not nodes[n].is_input]
    if not layer_nodes:
        raise BadProfile(f"{name}: there is no node besides inputs; add the layers of the model")
    layer_number = {n: i for i, n in enumerate(layer_nodes)} | dict.fromkeys(inputs, 0)
    layers = [_build_layer(nodes[n]) for n in layer_nodes]
    input_forward_s = sum(nodes[n].forward_ms for n in inputs) * 1e-3
    input_backward_s = sum(nodes[n].backward_ms for n in inputs) * 1e-3
    first = layers[0]
    layers[0] = Layer(
        first.name,
        first.forward_s + input_forward_s,
        first.backward_s + input_backward_s,
        first.parameter_bytes + sum(nodes[n].parameter_bytes for n in inputs),
        first.stored_bytes,
    )
    last_consumer: dict[str, int] = {}
    for a, b in edges:
        last_consumer[a] = max(last_consumer.get(a, 0), layer_number[b])
    trained = _nodes_with_gradient(order, nodes, edges)
    tensors = [
        Tensor(layer_number[n], consumer, nodes[n].activation_bytes, n in trained)
        for n, consumer in last_consumer.items()
        if consumer > layer_number[n]
    ]
    return Profile(name, tuple(layers), tuple(tensors), batch)


def _nodes_with_gradient(
    order: Sequence[str], nodes: Mapping[str, _Node], edges: Sequence[tuple[str, str]]
) -> set[str]:
    """Nodes whose output has a gradient: they, or a predecessor, have parameters or backward time.

    ``order`` is topological.
    """
    predecessors: dict[str, list[str]] = {}
    for a, b in edges:
        predecessors.setdefault(b, []).append(a)
    trained: set[str] = set()
    for name in order:
        is_trained = nodes[name].parameter_bytes > 0 or nodes[name].backward_ms > 0
        if is_trained or any(a in trained for a in predecessors.get(name, ())):
            trained.add(name)
    return trained


def _build_layer(node: _Node) -> Layer:
    return Layer(
        node.name,
        node.forward_ms * 1e-3,
        node.backward_ms * 1e-3,
        node.parameter_bytes,
        node.stored_bytes,
    )


def topological_order(
    names: Sequence[str], edges: Sequence[tuple[str, str]], graph: str
) -> list[str]:
    """Names ordered so that every edge points forward; ties keep the order of ``names``.

    Raises :class:`BadProfile` with the name of a blocked node if the graph has a cycle.
    """
    position = {name: i for i, name in enumerate(names)}
    unmet = dict.fromkeys(names, 0)
    successors: dict[str, list[str]] = {name: [] for name in names}
    for a, b in edges:
        unmet[b] += 1
        successors[a].append(b)
    ready = [position[n] for n in names if unmet[n] == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for b in successors[name]:
            unmet[b] -= 1
            if unmet[b] == 0:
                heapq.heappush(ready, position[b])
    if len(order) < len(names):
        blocked = next(n for n in names if unmet[n] > 0)
        raise BadProfile(
            f"{graph}: the graph has a cycle through or before {blocked}; a model's forward pass "
            "has no cycle; remove the edge that points back"
        )
    return order
