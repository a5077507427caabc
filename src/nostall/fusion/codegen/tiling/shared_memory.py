"""Shared-memory allocation: buffers with disjoint lifetimes share memory.

A kernel is a sequence of passes.  Each pass loops over the columns in chunks: it reads chunks of
buffers, then writes chunks of the buffers that it creates.  A buffer is live from the pass that
creates it to the last pass that reads it.  If one pass reads a buffer for the last time and creates
another one, both may have the same offset if their chunks have the same size, because each chunk is
read before it is written.  *Prefetched* buffers are excluded, because they are written before their
first pass begins.

Three rules of reuse:

- ``"none"``: no buffer reuses memory.
- ``"dominance"`` (arXiv:1811.05213, arXiv:2009.10924): a buffer reuses the memory of one whose
  producer its own producer dominates.  This is valid for every order of the operators.
- ``"order"`` (this project): a buffer reuses the memory of one that is dead in the order in which
  the kernel runs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Reuse = Literal["none", "dominance", "order"]


@dataclass(frozen=True)
class Buffer:
    """Shared memory for one value of a row, with its lifetime."""

    name: int
    first_pass: int  # creates the buffer
    last_pass: int  # reads it for the last time
    element_bytes: int  # for each column
    is_prefetched: bool = False  # filled before the first pass begins


@dataclass(frozen=True)
class Arena:
    """An allocation: buffers with their offsets in shared memory."""

    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]  # bytes, one for each buffer
    chunks: int  # of each buffer
    chunk_lanes: int  # columns of a chunk

    @property
    def alignment_bytes(self) -> int:
        """Bytes of a chunk of the widest buffer: all offsets are multiples of it."""
        return self.chunk_lanes * max((b.element_bytes for b in self.buffers), default=1)

    def buffer_bytes(self, buffer: Buffer) -> int:
        """Bytes of a buffer, rounded up to a multiple of :attr:`alignment_bytes`."""
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
        """The maximum bytes that are live between two passes: a lower bound of every allocation."""
        passes = range(max((b.last_pass for b in self.buffers), default=0))
        live = (
            sum(self.buffer_bytes(b) for b in self.buffers if b.first_pass <= p < b.last_pass)
            for p in passes
        )
        return max(live, default=0)


def allocate(
    buffers: Sequence[Buffer],
    chunks: int,
    chunk_lanes: int,
    reuse: Reuse,
    dominated: Collection[tuple[int, int]] = (),
) -> Arena:
    """Allocate buffers greedily in order of creation, each at the lowest offset that is allowed.

    ``dominated``: pairs of names (a, b) such that the producer of b dominates the producer of a.
    """
    size = Arena(tuple(buffers), (0,) * len(buffers), chunks, chunk_lanes).buffer_bytes
    offsets: dict[Buffer, int] = {}

    def fits(buffer: Buffer, offset: int) -> bool:
        for earlier, start in offsets.items():
            is_disjoint = offset >= start + size(earlier) or start >= offset + size(buffer)
            is_same_offset = start == offset
            if not is_disjoint and not _may_share(
                earlier, buffer, is_same_offset, reuse, dominated
            ):
                return False
        return True

    for buffer in sorted(buffers, key=lambda b: (b.first_pass, -b.element_bytes, b.name)):
        ends = [start + size(earlier) for earlier, start in offsets.items()]
        offsets[buffer] = min(at for at in (0, *offsets.values(), *ends) if fits(buffer, at))
    ordered_offsets = tuple(offsets[buffer] for buffer in buffers)
    return Arena(tuple(buffers), ordered_offsets, chunks, chunk_lanes)


def _may_share(
    earlier: Buffer,
    later: Buffer,
    is_same_offset: bool,
    reuse: Reuse,
    dominated: Collection[tuple[int, int]],
) -> bool:
    """Whether a later buffer may overlap an earlier one in memory."""
    if reuse == "none" or (reuse == "dominance" and (earlier.name, later.name) not in dominated):
        return False
    if earlier.last_pass < later.first_pass:
        return True
    in_place = (
        is_same_offset and earlier.element_bytes == later.element_bytes and not later.is_prefetched
    )
    return earlier.last_pass == later.first_pass and in_place


def immediate_postdominators(successors: Sequence[Sequence[int]]) -> list[int]:
    """The immediate postdominator of every step of a directed acyclic graph.

    It is the next step on all paths to the end.  The end is ``len(successors)``; it follows steps
    without successors.  Steps are in topological order, so one backward sweep yields the result of
    the iterative algorithm of Cooper, Harvey and Kennedy (2001).
    """
    end = len(successors)
    postdominators = [end] * (end + 1)

    def common(a: int, b: int) -> int:
        while a != b:
            a, b = (postdominators[a], b) if a < b else (a, postdominators[b])
        return a

    for step in reversed(range(end)):
        nearest = None
        for successor in successors[step]:
            nearest = successor if nearest is None else common(nearest, successor)
        postdominators[step] = end if nearest is None else nearest
    return postdominators[:end]
