"""Reader of PipeDream's graph text, in which DAPPLE's profiles are published too.

``nodeN -- name -- forward_compute_time=ms, backward_compute_time=ms, activation_size=bytes or
[a; b], parameter_size=bytes``, then indented lines ``nodeA -- nodeB``.
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
    activation: float
    parameters: float
    stored: float | None

    @property
    def is_input(self) -> bool:
        return self.name.startswith("Input")


def parse_graph(text: str, name: str, batch: int | None = None) -> Profile:
    """A profile from graph text.

    Nodes named "Input..." are no layers: their time goes to the first layer and their tensors are
    read there, so that no measured time is lost.  Raises :class:`BadProfile` with the line for
    text that is none of the above, missing or negative figures, unknown nodes and cycles.
    """
    nodes: dict[str, _Node] = {}
    edges: dict[tuple[str, str], None] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        if match := _NODE.match(line):
            if match[1] in nodes:
                raise BadProfile(f"{where}: {match[1]} is there twice; each node once is allowed")
            nodes[match[1]] = _node(match[2], match[3], where)
        elif match := _EDGE.match(line):
            edges[match[1], match[2]] = None
        else:
            raise BadProfile(
                f"{where}: {line.strip()[:60]!r} is neither a node "
                "('nodeN -- name -- forward_compute_time=...') nor an edge ('nodeA -- nodeB'); "
                "give PipeDream graph text or a profile that nostall wrote"
            )
    for a, b in edges:
        for end in (a, b):
            if end not in nodes:
                raise BadProfile(
                    f"{name}: edge {a} -- {b} names {end}, which has no line of its own; add it"
                )
    return _profile(nodes, list(edges), name, batch)


def _node(name: str, fields: str, where: str) -> _Node:
    found = dict(_FIELD.findall(fields))
    forward, backward = (_number(found, key, where) for key in _TIMES)
    activation, parameters = (_number(found, key, where) for key in _SIZES)
    stored = _number(found, "stored_size", where) if "stored_size" in found else None
    return _Node(name.strip(), forward, backward, activation, parameters, stored)


def _number(found: Mapping[str, str], key: str, where: str) -> float:
    """One figure; a list in brackets is the sizes of several outputs, which go together."""
    text = found.get(key)
    if text is None:
        raise BadProfile(f"{where}: {key} is missing; give it (0 where there is none)")
    parts = text.strip("[]").split(";")
    try:
        values = [float(part) for part in parts if part.strip()]
    except ValueError:
        raise BadProfile(
            f"{where}: {key}={text} is not a number; allowed are numbers >= 0"
        ) from None
    if any(not 0 <= value < float("inf") for value in values):
        raise BadProfile(f"{where}: {key}={text}; allowed are finite numbers >= 0")
    return sum(values)


def _profile(
    nodes: Mapping[str, _Node], edges: Sequence[tuple[str, str]], name: str, batch: int | None
) -> Profile:
    order = topological(list(nodes), edges, name)
    inputs = [n for n in order if nodes[n].is_input]
    kept = [n for n in order if not nodes[n].is_input]
    if not kept:
        raise BadProfile(f"{name}: there is no node besides inputs; a model needs layers")
    at = {n: i for i, n in enumerate(kept)} | dict.fromkeys(inputs, 0)
    layers = [_layer(nodes[n]) for n in kept]
    extra_forward = sum(nodes[n].forward_ms for n in inputs) * 1e-3
    extra_backward = sum(nodes[n].backward_ms for n in inputs) * 1e-3
    first = layers[0]
    layers[0] = Layer(
        first.name,
        first.forward_s + extra_forward,
        first.backward_s + extra_backward,
        first.parameter_bytes + sum(nodes[n].parameters for n in inputs),
        first.stored_bytes,
    )
    last: dict[str, int] = {}
    for a, b in edges:
        last[a] = max(last.get(a, 0), at[b])
    trained = _trained(order, nodes, edges)
    tensors = [
        Tensor(at[n], end, nodes[n].activation, n in trained)
        for n, end in last.items()
        if end > at[n]
    ]
    return Profile(name, tuple(layers), tuple(tensors), batch)


def _trained(
    order: Sequence[str], nodes: Mapping[str, _Node], edges: Sequence[tuple[str, str]]
) -> set[str]:
    """Nodes with a gradient: parameters or backward time of their own, or behind such a node."""
    before: dict[str, list[str]] = {}
    for a, b in edges:
        before.setdefault(b, []).append(a)
    trained: set[str] = set()
    for name in order:
        own = nodes[name].parameters > 0 or nodes[name].backward_ms > 0
        if own or any(a in trained for a in before.get(name, ())):
            trained.add(name)
    return trained


def _layer(node: _Node) -> Layer:
    return Layer(
        node.name, node.forward_ms * 1e-3, node.backward_ms * 1e-3, node.parameters, node.stored
    )


def topological(names: Sequence[str], edges: Sequence[tuple[str, str]], where: str) -> list[str]:
    """Names so that every edge runs forward; among several the one that is listed first.

    Raises :class:`BadProfile` naming a node on a cycle.
    """
    place = {name: i for i, name in enumerate(names)}
    waiting = dict.fromkeys(names, 0)
    after: dict[str, list[str]] = {name: [] for name in names}
    for a, b in edges:
        waiting[b] += 1
        after[a].append(b)
    ready = [place[n] for n in names if waiting[n] == 0]
    heapq.heapify(ready)
    order: list[str] = []
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(name)
        for b in after[name]:
            waiting[b] -= 1
            if waiting[b] == 0:
                heapq.heappush(ready, place[b])
    if len(order) < len(names):
        stuck = next(n for n in names if waiting[n] > 0)
        raise BadProfile(
            f"{where}: the graph has a cycle through or before {stuck}; a model's forward pass "
            "has none; remove the edge that runs back"
        )
    return order
