"""Some consecutive layers of a traced job as one function."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from nostall.parallel.module.graph import Traced
from nostall.parallel.module.job import Job


@dataclass(frozen=True, eq=False)
class Piece:
    """A function of own tensors, leaves of the batch and received tensors.

    ``received`` and ``sent`` name the tensors that come from the layers before and go to the
    layers behind, in order; those in both are handed through and are no part of the function.
    The last piece of a model returns the loss instead.
    """

    function: GraphModule
    own: tuple[torch.Tensor, ...]
    leaves: tuple[int, ...]
    received: tuple[str, ...]
    sent: tuple[str, ...]
    used: tuple[str, ...]
    made: tuple[str, ...]

    def __call__(
        self, received: dict[str, torch.Tensor], inputs: Any, targets: Any
    ) -> dict[str, torch.Tensor]:
        """What the piece makes, by name; the last piece's loss is called ``loss``."""
        leaves = tree_leaves((inputs, targets))
        values = self.function(
            *self.own, *(leaves[i] for i in self.leaves), *(received[name] for name in self.used)
        )
        return dict(zip(self.made, values, strict=True))


def make_piece(
    job: Job,
    traced: Traced,
    inside: set[str],
    received: Sequence[str],
    sent: Sequence[str],
    device: torch.device,
) -> Piece:
    """The operations ``inside``, with what they need that depends on no parameter.

    Own tensors are the module's parameters themselves, moved to the device, so that gradients
    arrive where the optimiser looks for them.
    """
    made = [name for name in sent if name in inside] or ["loss"]
    ends = {traced.loss.name if name == "loss" else name for name in made}
    wanted = _closure(traced, inside, ends, set(received))
    graph = Graph()
    copies: dict[Node, Node] = {}
    own: list[torch.Tensor] = []
    leaves: list[int] = []
    used = [name for name in received if any(n.name == name for n in wanted)]
    groups: dict[str, list[Node]] = {"own": [], "leaf": [], "received": []}
    for node in wanted:
        if node.name in traced.sources:
            kind = "leaf" if traced.sources[node.name][0] == "input" else "own"
            groups[kind].append(node)
    groups["received"] = [next(n for n in wanted if n.name == name) for name in used]
    for node in (*groups["own"], *groups["leaf"], *groups["received"]):
        copies[node] = graph.placeholder(node.name)
    for node in groups["own"]:
        own.append(_own(job, traced, node, device))
    for node in groups["leaf"]:
        leaves.append(traced.sources[node.name][1])
    for node in wanted:
        if node not in copies:
            copies[node] = graph.node_copy(node, lambda before: copies[before])
            _move(copies[node], device)
    by_name = {node.name: copy for node, copy in copies.items()}
    graph.output(tuple(by_name[traced.loss.name if name == "loss" else name] for name in made))
    return Piece(
        GraphModule(traced.program, graph),
        tuple(own),
        tuple(leaves),
        tuple(received),
        tuple(sent),
        tuple(used),
        tuple(made),
    )


def _closure(traced: Traced, inside: set[str], ends: set[str], received: set[str]) -> list[Node]:
    """Nodes behind the ends, in order; received ones without what made them."""
    order = {node: i for i, node in enumerate(traced.program.graph.nodes)}
    found: set[Node] = set()
    waiting = [node for node in order if node.name in ends]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        if node.name not in received or node.name in inside:
            waiting.extend(node.all_input_nodes)
    return sorted(found, key=lambda node: order[node])


def _own(job: Job, traced: Traced, node: Node, device: torch.device) -> torch.Tensor:
    kind, name = traced.sources[node.name]
    if kind == "constant":
        return traced.constants[name].to(device)
    found = job.module.get_parameter(name) if kind == "parameter" else job.module.get_buffer(name)
    if found.device != device:
        found.data = found.data.to(device)
    return found


def _move(node: Node, device: torch.device) -> None:
    """A trace made on one device names it in operations that make tensors."""

    def other(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    node.args = map_aggregate(node.args, other)
    node.kwargs = map_aggregate(node.kwargs, other)
