"""A fusion plan: which operators become one kernel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph

Mask = int
"""A set of nodes; bit i stands for node i."""


def mask_of(indices: Iterable[int]) -> Mask:
    """The set of these nodes."""
    found = 0
    for index in indices:
        found |= 1 << index
    return found


# Explorers ask for the same sets again and again.
@lru_cache(maxsize=1 << 16)
def members(mask: Mask) -> tuple[int, ...]:
    """The nodes of a set, ascending."""
    found = []
    # Counted from the first node: sets are small, numbers of a long graph are not.
    first = (mask & -mask).bit_length() - 1
    mask >>= max(0, first)
    while mask:
        lowest = mask & -mask
        found.append(first + lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Plan:
    """Disjoint sets of operators that cover all operators of a graph; each becomes one kernel.

    ``groups`` are sorted by their first operator, so equal plans are equal.
    """

    groups: tuple[Mask, ...]

    @classmethod
    def of(cls, groups: Iterable[Mask]) -> Plan:
        """The plan with these kernels, in any order."""
        return cls(tuple(sorted(groups, key=lambda mask: mask & -mask)))

    @classmethod
    def unfused(cls, graph: Graph) -> Plan:
        """Every operator by itself."""
        return cls(tuple(1 << index for index in graph.operators))

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def kernels(self) -> tuple[tuple[int, ...], ...]:
        """The operators of each kernel, ascending."""
        return tuple(members(mask) for mask in self.groups)

    def check(self, graph: Graph) -> None:
        """Raise :class:`BadFusion` where this is no partition, or kernels wait for each other."""
        covered = 0
        for mask in self.groups:
            if not mask or covered & mask:
                raise BadFusion(
                    f"kernel {members(mask)} is empty or shares operators with another; "
                    "every operator belongs to one kernel"
                )
            covered |= mask
        wanted = mask_of(graph.operators)
        if covered != wanted:
            raise BadFusion(
                f"nodes {members(covered ^ wanted)} are operators in no kernel, or none; a "
                "plan covers the operators of its graph and nothing else"
            )
        if not graph.is_acyclic(self.kernels):
            raise BadFusion("kernels of the plan wait for each other in a circle; split one")


def reads(graph: Graph, mask: Mask) -> tuple[int, ...]:
    """Inputs, operators and opaque nodes that a kernel reads from memory, ascending."""
    found = {source for index in members(mask) for source in graph.sources[index]}
    return tuple(sorted(index for index in found if not mask >> index & 1))


def writes(graph: Graph, mask: Mask) -> tuple[int, ...]:
    """Operators of a kernel that others read, or that are results, ascending."""
    return tuple(
        index
        for index in members(mask)
        if index in graph.results or any(not mask >> user & 1 for user in graph.consumers[index])
    )
