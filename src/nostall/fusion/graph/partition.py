"""Partition of a graph's operators into kernels, and sets of operators as bit masks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from nostall.fusion.errors import BadFusion
from nostall.fusion.graph.graph import Graph

Mask = int
"""A set of nodes; bit i stands for node i."""


def to_mask(indices: Iterable[int]) -> Mask:
    """The set of the nodes with these indices."""
    mask = 0
    for index in indices:
        mask |= 1 << index
    return mask


# Explorers decode the same masks many times.
@lru_cache(maxsize=1 << 16)
def members(mask: Mask) -> tuple[int, ...]:
    """The indices of the nodes in a set, ascending."""
    indices = []
    # Shift the lowest member to bit 0: the set is small, but its numbers grow with the graph.
    first = (mask & -mask).bit_length() - 1
    mask >>= max(0, first)
    while mask:
        lowest = mask & -mask
        indices.append(first + lowest.bit_length() - 1)
        mask ^= lowest
    return tuple(indices)


@dataclass(frozen=True, slots=True)
class Partition:
    """Disjoint sets of operators that cover all operators of a graph; each becomes one kernel."""

    groups: tuple[Mask, ...]
    """Sorted by their first operator, so equal partitions compare equal."""

    @classmethod
    def from_groups(cls, groups: Iterable[Mask]) -> Partition:
        """The partition with these kernels, given in any order."""
        return cls(tuple(sorted(groups, key=lambda mask: mask & -mask)))

    @classmethod
    def unfused(cls, graph: Graph) -> Partition:
        """The partition with one kernel for each operator."""
        return cls(tuple(1 << index for index in graph.operators))

    def __len__(self) -> int:
        return len(self.groups)

    @property
    def kernels(self) -> tuple[tuple[int, ...], ...]:
        """The operators of each kernel, ascending."""
        return tuple(members(mask) for mask in self.groups)

    def check(self, graph: Graph) -> None:
        """Raise :class:`BadFusion` if this is no partition of the graph or kernels form a cycle."""
        covered = 0
        for mask in self.groups:
            if not mask or covered & mask:
                raise BadFusion(
                    f"kernel {members(mask)} is empty or shares operators with another kernel; "
                    "put each operator into exactly one kernel"
                )
            covered |= mask
        operators = to_mask(graph.operators)
        if covered != operators:
            raise BadFusion(
                f"nodes {members(covered ^ operators)} are operators without a kernel, or are no "
                "operators; a partition covers the operators of its graph and nothing else"
            )
        if not graph.is_acyclic(self.kernels):
            raise BadFusion(
                "kernels of the partition depend on each other in a cycle; split one of them"
            )


def kernel_inputs(graph: Graph, mask: Mask) -> tuple[int, ...]:
    """Inputs, operators and opaque nodes that a kernel reads from memory, ascending."""
    sources = {source for index in members(mask) for source in graph.sources[index]}
    return tuple(sorted(index for index in sources if not mask >> index & 1))


def kernel_outputs(graph: Graph, mask: Mask) -> tuple[int, ...]:
    """Operators of a kernel that are graph results or are read outside the kernel, ascending."""
    return tuple(
        index
        for index in members(mask)
        if index in graph.results or any(not mask >> user & 1 for user in graph.consumers[index])
    )
