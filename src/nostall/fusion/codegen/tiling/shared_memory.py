"""Where buffers lie in shared memory: those that do not live together may share it.

A kernel is a row of passes; each walks over the columns in chunks, reads chunks of buffers, then
writes chunks of the ones that it leaves.  A buffer lives from the pass that leaves it to the last
one that reads it.  Two that meet in one pass, one read for the last time and the other left there,
may lie at exactly the same place where their chunks have the same size: each chunk is read before
it is written.  Not so *early* ones, which are written before their first pass begins.

Reuse is ``"none"``, by ``"dominance"`` (arXiv:1811.05213, 2009.10924: a buffer takes the place of
one that its maker dominates, which holds in any order of the operators) or by ``"order"`` (ours:
of one that is dead in the order in which the kernel runs).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal

Reuse = Literal["none", "dominance", "order"]


@dataclass(frozen=True)
class Buffer:
    """Row-wide memory: left by pass ``first_pass`` (``is_prefetched``: there when it begins), read for the last
    time by pass ``last_pass``; ``element_bytes`` bytes for each column."""

    name: int
    first_pass: int
    last_pass: int
    element_bytes: int
    is_prefetched: bool = False


@dataclass(frozen=True)
class Arena:
    """Buffers of ``chunks`` chunks of ``chunk_lanes`` columns each, and where they begin, in bytes."""

    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    chunks: int
    chunk_lanes: int

    @property
    def alignment_bytes(self) -> int:
        """Bytes of a chunk of the widest element: the places of buffers are multiples of it."""
        return self.chunk_lanes * max((b.element_bytes for b in self.buffers), default=1)

    def buffer_bytes(self, buffer: Buffer) -> int:
        """Bytes of a buffer, in whole units."""
        return (
            -(-self.chunks * self.chunk_lanes * buffer.element_bytes // self.alignment_bytes)
            * self.alignment_bytes
        )

    @property
    def total_bytes(self) -> int:
        ends = (o + self.buffer_bytes(b) for b, o in zip(self.buffers, self.offsets, strict=True))
        return max(ends, default=0)

    @property
    def peak_live_bytes(self) -> int:
        """The most that is live from one pass to the next: no assignment takes less."""
        passes = range(max((b.last_pass for b in self.buffers), default=0))
        live = (
            sum(self.buffer_bytes(b) for b in self.buffers if b.first_pass <= p < b.last_pass)
            for p in passes
        )
        return max(live, default=0)

    def overlapping_pairs(self) -> list[tuple[Buffer, Buffer]]:
        """Pairs that share memory, the one that is left first in front."""
        found = []
        for (a, x), (b, y) in combinations(zip(self.buffers, self.offsets, strict=True), 2):
            if x < y + self.buffer_bytes(b) and y < x + self.buffer_bytes(a):
                found.append((a, b) if a.first_pass <= b.first_pass else (b, a))
        return found


def allocate(
    buffers: Sequence[Buffer],
    chunks: int,
    width: int,
    reuse: Reuse,
    dominated: Collection[tuple[int, int]] = (),
) -> Arena:
    """Place buffers one after the other, each as low as the ones before it allow.

    ``dominated``: pairs of names (a, b) where the maker of b dominates the maker of a.
    """
    size = Arena(tuple(buffers), (0,) * len(buffers), chunks, width).buffer_bytes
    places: dict[Buffer, int] = {}

    def fits(buffer: Buffer, at: int) -> bool:
        for other, there in places.items():
            apart = at >= there + size(other) or there >= at + size(buffer)
            if not apart and not _may_share(other, buffer, there == at, reuse, dominated):
                return False
        return True

    for buffer in sorted(buffers, key=lambda b: (b.first_pass, -b.element_bytes, b.name)):
        ends = [there + size(other) for other, there in places.items()]
        places[buffer] = min(at for at in (0, *places.values(), *ends) if fits(buffer, at))
    offsets = tuple(places[buffer] for buffer in buffers)
    return Arena(tuple(buffers), offsets, chunks, width)


def _may_share(
    before: Buffer, after: Buffer, same: bool, reuse: Reuse, dominated: Collection[tuple[int, int]]
) -> bool:
    """Whether a buffer may lie where an earlier one does; ``same``: at exactly its place."""
    if reuse == "none" or (reuse == "dominance" and (before.name, after.name) not in dominated):
        return False
    if before.last_pass < after.first_pass:
        return True
    in_place = same and before.element_bytes == after.element_bytes and not after.is_prefetched
    return before.last_pass == after.first_pass and in_place


def immediate_postdominators(after: Sequence[Sequence[int]]) -> list[int]:
    """Of every step of a graph the next one that all ways to the end go through; the end, which
    follows steps without successors, is ``len(after)``.

    Steps stand in the order in which they run, so one walk back finds what the algorithm of Cooper,
    Harvey and Kennedy (2001) would.
    """
    end = len(after)
    above = [end] * (end + 1)

    def common(a: int, b: int) -> int:
        while a != b:
            a, b = (above[a], b) if a < b else (a, above[b])
        return a

    for step in reversed(range(end)):
        found = None
        for later in after[step]:
            found = later if found is None else common(found, later)
        above[step] = end if found is None else found
    return above[:end]
