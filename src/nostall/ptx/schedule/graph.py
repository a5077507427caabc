"""Dependences between the units of a block."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from nostall.ptx.program.blocks import Block
from nostall.ptx.program.resources import Reference


@dataclass(frozen=True)
class BlockGraph:
    """Which units of one block must keep their order."""

    block: Block
    predecessors: tuple[frozenset[int], ...]
    """Per unit, units that must come before it. Pairs that other pairs imply may be missing."""

    @cached_property
    def successors(self) -> tuple[frozenset[int], ...]:
        """Per unit, the units that have it as a predecessor."""
        found: list[set[int]] = [set() for _ in self.predecessors]
        for unit, before in enumerate(self.predecessors):
            for earlier in before:
                found[earlier].add(unit)
        return tuple(map(frozenset, found))

    @cached_property
    def freedom(self) -> int:
        """Number of pairs of units whose order is free."""
        units = len(self.predecessors)
        ancestors: list[int] = []
        ordered = 0
        for before in self.predecessors:
            bits = 0
            for earlier in before:
                bits |= ancestors[earlier] | 1 << earlier
            ancestors.append(bits)
            ordered += bits.bit_count()
        return units * (units - 1) // 2 - ordered

    def is_legal(self, order: tuple[int, ...]) -> bool:
        """Whether ``order`` is a permutation of the units that keeps all dependences."""
        if sorted(order) != list(range(len(self.predecessors))):
            return False
        position = {unit: at for at, unit in enumerate(order)}
        return all(
            position[unit] >= self.block.earliest[unit]
            and all(position[earlier] < position[unit] for earlier in before)
            for unit, before in enumerate(self.predecessors)
        )


def build_graph(block: Block) -> BlockGraph:
    """The dependences of a block: read after write, write after read, write after write."""
    last_write: dict[Reference, int] = {}
    reads_since: dict[Reference, list[int]] = {}
    predecessors: list[frozenset[int]] = []
    for number, unit in enumerate(block.units):
        before: set[int] = set()
        for name in unit.reads | unit.writes:
            if name in last_write:
                before.add(last_write[name])
        for name in unit.writes:
            before.update(reads_since.get(name, ()))
        for name in unit.writes:
            last_write[name] = number
            reads_since[name] = []
        for name in unit.reads - unit.writes:
            reads_since.setdefault(name, []).append(number)
        predecessors.append(frozenset(before))
    return BlockGraph(block, tuple(predecessors))
