"""Regions of an FX graph: calls over lists that one kernel can compute together."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch.fx import Graph, Node

from nostall.fusion.capture.call import Unsupported
from nostall.fusion.lists.calls import (
    ListCall,
    NormCall,
    is_list_call,
    is_norm,
    list_call,
    norm_call,
    results,
)
from nostall.fusion.lists.expression import check_call
from nostall.fusion.lists.slots import Slot, slot_of

Key = tuple[torch.device, tuple[Slot, ...]]
"""Device and slots of a list; calls with equal keys can share a kernel."""


@dataclass(frozen=True)
class Region:
    """Pointwise calls over lists of equal layouts, in topological order."""

    calls: tuple[ListCall, ...]
    slots: tuple[Slot, ...]

    @property
    def nodes(self) -> list[Node]:
        return [call.node for call in self.calls]


@dataclass
class FoundLists:
    """The list calls of a graph."""

    regions: list[Region] = field(default_factory=list)
    norms: list[NormCall] = field(default_factory=list)
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Calls that stay as they are, counted by (reason, operator)."""


def find_lists(graph: Graph) -> FoundLists:
    """The regions and the norms of a functional ATen graph whose nodes carry fake tensors.

    A kernel computes all calls of a region at once: no path leaves a region and returns to it.
    """
    found = FoundLists()
    keys: dict[Node, Key] = {}
    calls: dict[Node, ListCall] = {}
    for node in graph.nodes:
        if not is_list_call(node):
            continue
        try:
            if is_norm(node):
                found.norms.append(_checked_norm(norm_call(node)))
                continue
            call = list_call(node)
            key = _key(node)
            check_call(call, key[1])
            calls[node], keys[node] = call, key
        except Unsupported as reason:
            found.refused[str(reason), str(node.target)] += 1
    for key in dict.fromkeys(keys.values()):
        members = [node for node in calls if keys[node] == key]
        for segment in _segments(graph, members):
            found.regions.append(Region(tuple(calls[node] for node in segment), key[1]))
    return found


def _key(node: Node) -> Key:
    values = node.meta["val"]
    if not values:
        raise Unsupported("an empty list")
    devices = {value.device for value in values}
    if len(devices) > 1:
        raise Unsupported("tensors on several devices")
    return devices.pop(), tuple(map(slot_of, values))


def _checked_norm(call: NormCall) -> NormCall:
    values = [node.meta["val"] for node in call.tensors]
    outputs = call.node.meta["val"]
    if len({value.device for value in (*values, *outputs)}) > 1:
        raise Unsupported("tensors on several devices")
    for value in (*values, *outputs):
        if value.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise Unsupported(f"a norm of {value.dtype}")
    if len({x.dtype for x in values}) > 1 or len({x.dtype for x in outputs}) > 1:
        raise Unsupported("a list of several dtypes")
    slots = [slot_of(value) for value in values]
    if not any(slot.elements for slot in slots):
        raise Unsupported("an empty list")
    if call.order == float("inf") and not all(slot.elements for slot in slots):
        raise Unsupported("the largest element of an empty tensor")
    return call


def _segments(graph: Graph, members: Collection[Node]) -> Iterator[list[Node]]:
    """The members, so divided that no path between two of a part leaves the part."""
    level: dict[Node, int] = {}
    inside = set(members)
    for node in graph.nodes:
        within = node in inside
        level[node] = max(
            (level[i] + _leaves(i, node, inside, within) for i in node.all_input_nodes), default=0
        )
    levels = sorted({level[node] for node in members})
    for each in levels:
        yield [node for node in members if level[node] == each]


def _leaves(operand: Node, node: Node, inside: Collection[Node], within: bool) -> bool:
    """Whether the edge from an operand to a node leaves the members' kernels."""
    call = _call_of(operand)
    if call not in inside or operand is call:
        return False  # an edge between other nodes, or from a call to one of its results
    return not (within and _is_aligned(call, node))


def _call_of(node: Node) -> Node:
    """The list call that a node is a result of; the node itself for all others."""
    first = node.args[0] if node.target is operator.getitem else None
    return first if isinstance(first, Node) and is_list_call(first) else node


def _is_aligned(call: Node, user: Node) -> bool:
    """Whether a call reads the results of another one in their own slots only."""
    own = set(results(call).values())
    slots = {node: slot for slot, node in results(call).items()}
    for argument in (*user.args, *user.kwargs.values()):
        if isinstance(argument, Node) and argument in own:
            return False
        for slot, each in enumerate(argument if isinstance(argument, (list, tuple)) else ()):
            if isinstance(each, Node) and each in own and slots[each] != slot:
                return False
    return True
