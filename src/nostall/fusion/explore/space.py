"""Search space of partitions with moves that merge, split or regroup connected legal kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nostall.core import BadInput, IllegalMove, Space, Tags
from nostall.core.space import NO_TAGS
from nostall.fusion.evaluate.delta import DeltaEvaluator
from nostall.fusion.explore.joining import ContractedGraph, neighbours
from nostall.fusion.graph.partition import Mask, Partition, members


@dataclass(frozen=True, slots=True)
class Move:
    """One change of a partition.

    - ``merge``: the kernels of operators a and b become one.
    - ``move``: operator a leaves its kernel and joins the kernel of b.
    - ``alone``: operator a leaves its kernel and becomes a kernel.
    - ``split``: operator a and all that depend on it in its kernel become a kernel.
    """

    kind: str
    a: int
    b: int = -1

    @property
    def tags(self) -> Tags:
        """The kind of the move."""
        return frozenset({self.kind})

    def __str__(self) -> str:
        return f"{self.kind} {self.a}" + (f" {self.b}" if self.b >= 0 else "")


class PartitionSpace(Space[Partition, Move]):
    """All partitions into connected legal kernels that moves can reach from ``first``.

    Several pairs of neighbours can describe the same change; only the first of them is a legal
    move.
    """

    def __init__(self, delta: DeltaEvaluator, first: Partition) -> None:
        first.check(delta.graph)
        self.delta = delta
        self.first = first
        self.neighbours = neighbours(delta.graph)
        operators = delta.graph.operators
        pairs = [(a, b) for a in operators for b in members(self.neighbours[a])]
        self._all = [
            *(Move("merge", a, b) for a, b in pairs if a < b),
            *(Move("move", a, b) for a, b in pairs),
            *(Move(kind, a) for kind in ("alone", "split") for a in operators),
        ]

    def start(self) -> Partition:
        return self.first

    def draw(
        self, state: Partition, rng: np.random.Generator, required_tags: Tags = NO_TAGS
    ) -> Move | None:
        candidates = (
            self._all if not required_tags else [m for m in self._all if required_tags <= m.tags]
        )
        if not candidates:
            return None
        move = candidates[int(rng.integers(len(candidates)))]
        return move if self._after(state, move) is not None else None

    def moves(self, state: Partition) -> Iterator[Move]:
        for move in self._all:
            if self._after(state, move) is not None:
                yield move

    def apply(self, state: Partition, move: Move) -> Partition:
        after = self._after(state, move)
        if after is None:
            raise IllegalMove(
                f"{move} does not apply to this partition of {len(state)} kernels; allowed are the "
                "moves of PartitionSpace.moves"
            )
        return after

    def key(self, state: Partition) -> bytes:
        return self.dump(state).encode()

    def dump(self, state: Partition) -> str:
        return " ".join(format(mask, "x") for mask in state.groups)

    def load(self, text: str) -> Partition:
        try:
            partition = Partition.from_groups(int(word, 16) for word in text.split())
        except ValueError:
            raise BadInput(
                f"{text[:60]!r} is no partition; allowed are hexadecimal masks separated by "
                "spaces; load the text of dump()"
            ) from None
        partition.check(self.delta.graph)
        return partition

    def _after(self, state: Partition, move: Move) -> Partition | None:
        """The partition after a move; None if the move is illegal."""
        if move.a not in self.neighbours:
            return None
        kernel = _kernel_of(state, move.a)
        own = 1 << move.a
        if move.kind == "alone":
            if kernel.bit_count() < 3 and move.a != kernel.bit_length() - 1:
                return None  # of two operators, only the last can leave
            return self._replaced(state, (kernel,), (own, kernel ^ own))
        if move.kind == "split":
            part = kernel & (self.delta.graph.descendants[move.a] | own)
            if min(part.bit_count(), (kernel ^ part).bit_count()) < 2:
                return None
            return self._replaced(state, (kernel,), (part, kernel ^ part))
        if move.b not in self.neighbours:
            return None
        target = _kernel_of(state, move.b)
        if kernel == target:
            return None
        if move.kind == "merge":
            if (move.a, move.b) != self._first_pair(kernel, target):
                return None
            return self._replaced(state, (kernel, target), (kernel | target,))
        candidates = self.neighbours[move.a] & target
        if kernel == own or candidates & -candidates != 1 << move.b:
            return None
        return self._replaced(state, (kernel, target), (kernel ^ own, target | own))

    def _first_pair(self, first: Mask, second: Mask) -> tuple[int, int]:
        """The first pair of neighbours (a < b) between two kernels."""
        for a in members(first | second):
            opposite = second if first >> a & 1 else first
            later = self.neighbours[a] & opposite & ~((1 << a) - 1)
            if later:
                return a, (later & -later).bit_length() - 1
        return -1, -1

    def _replaced(
        self, state: Partition, old: tuple[Mask, ...], new: tuple[Mask, ...]
    ) -> Partition | None:
        """The partition with the kernels ``old`` replaced by ``new``; None if it is illegal."""
        if any(not mask for mask in new):
            return None
        for mask in new:
            if not self.delta.is_connected(mask) or not self.delta.can_fuse(mask):
                return None
        unchanged = [mask for mask in state.groups if mask not in old]
        kernels = ContractedGraph(self.delta.graph)
        for mask in unchanged:
            kernels.add(mask)
        for mask in new:
            if not kernels.admits(mask):
                return None
            kernels.add(mask)
        return Partition.from_groups([*unchanged, *new])


def _kernel_of(state: Partition, index: int) -> Mask:
    return next(mask for mask in state.groups if mask >> index & 1)
