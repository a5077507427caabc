"""Which operators a region holds: those between the same opaque nodes, as late as it pays.

Opaque nodes are borders: an operator can run once those above it have run, and has to before those
below it.  Between the two its place is free.  The derivative of an activation needs what the
forward pass saved and nothing else, so it could be the first thing that a backward pass computes;
it would be written, and read again behind the matrix product whose result it scales.  There it
belongs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from nostall.fusion.graph.graph import Graph
from nostall.fusion.graph.operations import COMPUTE

Unit = tuple[int, ...]
"""Operators of one call, or a node on its own."""


def levels(whole: Graph, calls: Mapping[int, object]) -> list[int]:
    """Of every node its level: a region holds the operators of one, regions run in their order.

    An opaque node runs behind its level and before the next.  Operators start on the lowest level
    that they can have, and sink to those that read them where that moves fewer bytes.  ``calls``
    says which operators belong to the same call; those stay together.
    """
    units = _Units(whole, calls)
    sinking = {unit for unit in units.every if unit[0] in units.computed}
    while True:
        found = _sunk(units, sinking)
        dearer = _dearer(units, found)
        if not dearer:
            return found
        sinking -= dearer


def _sunk(units: _Units, sinking: set[Unit]) -> list[int]:
    """Levels where these units go down to the first that reads them, and no others."""
    found = list(units.lowest)
    for unit in reversed(units.every):
        if unit in sinking:
            below = [found[i] for i in units.readers(unit)]
            for index in unit:
                found[index] = min(below, default=found[index])
    return found


def _dearer(units: _Units, level: list[int]) -> set[Unit]:
    """The units for which more bytes move where they are than if they were computed first.

    There they would be written and read; here what they need is read, less what is computed here,
    too.  That would be read there as well, but for what somebody there has anyway.
    """
    whole, stored = units.whole, units.stored
    needs: dict[int, frozenset[int]] = {}
    found: set[Unit] = set()

    def moved(nodes: Iterable[int]) -> int:
        return sum(whole[i].bytes * (1 if i in stored else 2) for i in nodes)

    def is_there(index: int, first: int) -> bool:
        return first in {level[i] for i in (index, *whole.consumers[index]) if i in units.computed}

    for unit in units.every:
        here, first = level[unit[0]], units.lowest[unit[0]]
        read: frozenset[int] = frozenset()
        for index in units.sources(unit):
            beside = level[index] == here and index not in stored
            read |= needs[index] if beside else frozenset((index,))
        needs |= dict.fromkeys(unit, read)
        gives = (i for i in unit if any(user not in unit for user in whole.consumers[i]))
        again = (i for i in read if is_there(i, first))
        if here > first and moved(again) >= moved(gives):
            found.add(unit)
    return found


@dataclass(frozen=True)
class _Units:
    """A graph as units, in its order."""

    whole: Graph
    calls: Mapping[int, object]

    @cached_property
    def every(self) -> tuple[Unit, ...]:
        found: list[list[int]] = []
        last: object = None
        for node in self.whole:
            if node.index not in self.computed and node.kind != "opaque":
                continue
            call = self.calls.get(node.index)
            if call is not None and call is last:
                found[-1].append(node.index)
            else:
                found.append([node.index])
            last = call
        return tuple(map(tuple, found))

    @cached_property
    def computed(self) -> frozenset[int]:
        return frozenset(self.whole.operators)

    def sources(self, unit: Unit) -> set[int]:
        return {i for index in unit for i in self.whole.sources[index]}.difference(unit)

    def readers(self, unit: Unit) -> set[int]:
        return {i for index in unit for i in self.whole.consumers[index]}.difference(unit)

    @cached_property
    def lowest(self) -> list[int]:
        """Of every node the most opaque nodes that a path to it passes through."""
        found = [0] * len(self.whole)
        for unit in self.every:
            above = (found[i] + (self.whole[i].kind == "opaque") for i in self.sources(unit))
            level = max(above, default=0)
            for index in unit:
                found[index] = level
        return found

    @cached_property
    def stored(self) -> frozenset[int]:
        """Nodes that are in memory wherever operators are computed."""
        whole = self.whole
        return frozenset(
            node.index
            for node in whole
            if node.kind not in COMPUTE
            or node.index in whole.results
            or any(whole[user].kind == "opaque" for user in whole.consumers[node.index])
        )
