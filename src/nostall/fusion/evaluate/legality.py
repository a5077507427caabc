"""Which sets of operators one kernel can compute.

The limits are those of the code generator, not of FusionStitching, whose paper leaves them open.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nostall.fusion.evaluate.work import Work
from nostall.fusion.plan import Mask, members

MOST_OPERATORS = 64
"""As Inductor's ``max_fusion_size``: longer kernels spill and compile for long."""
MOST_ARGUMENTS = 64
"""As BladeDISC's ``max_num_arguments_per_kernel``."""
WIDEST_ROW = 65536
"""Elements of a row that one block can pass over several times."""
MOST_PACKED = 8
"""Independent parts of one kernel, as Inductor's combo kernels."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """How a set of connected operators is laid out: ``rows`` independent pieces, each of at most
    ``columns`` elements; ``levels`` reductions one after the other inside a row (0: none is used
    by what follows in the same kernel)."""

    rows: int
    columns: int
    levels: int


def mapping(work: Work, mask: Mask) -> Mapping | None:
    """The layout of connected operators; None where no kernel can compute them together.

    A reduction whose value the kernel uses itself has to meet what it reads in rows, and so has
    everything that depends on it.  Anything else can be computed or read again where it is needed.
    Leaves may reduce across rows: they end in partial results and a second stage.  What is added to
    a set only adds constraints, so a superset of a set without a layout has none either.
    """
    rows = widest = 0
    middle = False
    for index in members(mask):
        widest = max(widest, work.iterated[index])
        used = bool(work.used[index] & mask)
        reduces = bool(work.reductions >> index & 1)
        middle = middle or (reduces and used)
        for edge in work.edges[index]:
            if _waits(work, edge.source, mask) if not reduces else used:
                rows = math.gcd(rows, edge.rows)
    rows = max(1, rows)
    columns = -(-widest // rows)
    if not middle:
        return Mapping(rows, columns, 0)
    return Mapping(rows, columns, _levels(work, mask)) if columns <= WIDEST_ROW else None


def _waits(work: Work, source: int, mask: Mask) -> bool:
    """Whether a value inside the kernel has a reduction above it there, so that no row can just
    compute it again."""
    if not mask >> source & 1:
        return False
    above = work.graph.ancestors[source] | 1 << source
    return bool(above & mask & work.reductions)


def _levels(work: Work, mask: Mask) -> int:
    """Most reductions on a path that stays inside the kernel, without those at its end."""
    level: dict[int, int] = {}
    most = 0
    for index in members(mask):
        above = max((level[e.source] for e in work.edges[index] if e.source in level), default=0)
        if work.reductions >> index & 1 and work.used[index] & mask:
            above += 1
        level[index] = above
        most = max(most, above)
    return most


def connected(work: Work, mask: Mask) -> list[Mask]:
    """The parts of a set that neither pass data to each other nor read a common source."""
    parts: list[tuple[Mask, set[int]]] = []
    for index in members(mask):
        touched = {edge.source for edge in work.edges[index]} | {index}
        joined = 1 << index
        apart = []
        for part, sources in parts:
            if sources & touched:
                joined |= part
                touched |= sources
            else:
                apart.append((part, sources))
        parts = [*apart, (joined, touched)]
    return sorted((part for part, _ in parts), key=lambda part: part & -part)
