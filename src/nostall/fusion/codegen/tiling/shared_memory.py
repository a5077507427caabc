"""Shared-memory allocation: buffers with disjoint lifetimes share memory.

A kernel is a sequence of passes.  Each pass loops over the columns in chunks: it reads chunks of
buffers, then writes chunks of the buffers that it creates.  A buffer is live from the pass that
creates it to the last pass that reads it.  If one pass reads a buffer for the last time and creates
another one, both may have the same offset if their chunks have the same size, because each chunk is
read before it is written.  *Prefetched* buffers are excluded, because they are written before their
first pass begins.

A buffer reuses the memory of one that is dead in the order in which the kernel runs.  (In
arXiv:1811.05213 and arXiv:2009.10924 its producer also has to dominate the other one's, which is
valid for every order of the operators: ``benchmarks.fusion.chains.mechanisms.reuse_rules``.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Buffer:
    """Shared memory for one value of a row, with its lifetime."""

    name: int
    first_pass: int  # creates the buffer
    last_pass: int  # reads it for the last time
    element_bytes: int  # for each column
    is_prefetched: bool = False  # filled before the first pass begins


SharingRule = Callable[[Buffer, Buffer], bool]
"""Whether a buffer, the second one, may take the memory of one that is dead."""


def any_dead_buffer(earlier: Buffer, later: Buffer) -> bool:
    """The rule of kernels; only benchmarks and tests have others."""
    return True


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


def allocate(
    buffers: Sequence[Buffer],
    chunks: int,
    chunk_lanes: int,
    may_reuse: SharingRule = any_dead_buffer,
) -> Arena:
    """Allocate buffers greedily in order of creation, each at the lowest offset that is allowed."""
    size = Arena(tuple(buffers), (0,) * len(buffers), chunks, chunk_lanes).buffer_bytes
    offsets: dict[Buffer, int] = {}

    def fits(buffer: Buffer, offset: int) -> bool:
        for earlier, start in offsets.items():
            is_disjoint = offset >= start + size(earlier) or start >= offset + size(buffer)
            may_share = may_reuse(earlier, buffer) and _is_dead(earlier, buffer, start == offset)
            if not (is_disjoint or may_share):
                return False
        return True

    for buffer in sorted(buffers, key=lambda b: (b.first_pass, -b.element_bytes, b.name)):
        ends = [start + size(earlier) for earlier, start in offsets.items()]
        offsets[buffer] = min(at for at in (0, *offsets.values(), *ends) if fits(buffer, at))
    ordered_offsets = tuple(offsets[buffer] for buffer in buffers)
    return Arena(tuple(buffers), ordered_offsets, chunks, chunk_lanes)


def _is_dead(earlier: Buffer, later: Buffer, is_same_offset: bool) -> bool:
    """Whether nothing reads a buffer after a later one is written in its memory."""
    if earlier.last_pass < later.first_pass:
        return True
    in_place = (
        is_same_offset and earlier.element_bytes == later.element_bytes and not later.is_prefetched
    )
    return earlier.last_pass == later.first_pass and in_place
