"""The kernels that a schedule can become: composition scheme, tile, warps; all of them, or why not.

``thread``: values stay in a thread's registers.  ``warp``: several rows for each warp, reductions
by shuffles.  ``block``: a row is held by all warps, across several reductions.  Both keep the row
in registers in one power of two or, where that would leave many lanes idle, in several (ours),
equal ones or as few as possible.
``looped``: the row is read again for each level of reductions.  ``shared``: what several levels
need is kept in shared memory.  ``split``: a row is shared by several programs, one kernel for each
level of reductions.  ``column``: ``warp`` or ``block`` whose programs walk over groups of rows and
leave partial sums for a second kernel.  ``matrix``: small dots, a program for each element of the
batch.  ``turned``: of such, those with vectors by turns of a few places of a sequence.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from nostall.fusion.codegen.loops.dot_axes import groups_of
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import refused
from nostall.fusion.codegen.tiling.loop_peeling import peeled
from nostall.fusion.codegen.tiling.on_chip import demotions, unfit
from nostall.fusion.codegen.tiling.sequence_tiles import LEAST, Walk, walk
from nostall.fusion.codegen.tiling.tile_sizes import (
    lanes_beside,
    largest_matrix,
    matrix_widths,
    power_above,
)
from nostall.fusion.errors import BadFusion
from nostall.fusion.hardware import H200

Scheme = Literal[
    "thread", "warp", "block", "looped", "shared", "split", "column", "matrix", "turned"
]

HELD: tuple[Scheme, ...] = ("thread", "warp", "block")
"""Schemes that have all of a row, or of what has none, in registers at once."""
MOST_IDLE = 1 / 16
"""Share of masked lanes above which a row is cut into several powers of two."""
VECTOR = 8
"""Numbers of two bytes that are read at once."""
MOST_WARPS = 32
WIDE = 512
"""Columns from which that is held to; of fewer, several rows share a warp and either may win."""
LEAST_CHUNK = 128
"""Columns of an equal chunk: fewer would be many of few elements for each thread."""
WARP = 32
REGISTERS_SM = H200.registers
REGISTERS_THREAD = H200.max_registers
# Addresses, row values and what else the compiler keeps besides the tile's values.
REGISTERS_OTHER = 24
# Of one register for each live value and element, the share that a dozen chains compiled for sm_90
# came to: fp16 values stay packed, and the compiler reorders element by element.
LEAST_SHARE, MOST_SHARE = 0.25, 0.8
MOST_TILE = 1 << 17
"""Elements of one tensor in Triton are at most 2^20; tiles far below that already spill."""
MOST_UNROLLED = 1536
"""Products of a thread in fp32, which Triton unrolls: the backward pass of attention with 64 places
of 64 (5120, compiled for sm_90) has 350 KB of code, spills and takes 19 s to compile."""
MOST_PARTS = 256
"""Partial results of one row that the next kernel loads at once."""
MOST_EACH = 32
"""Elements of a thread in a turn of small dots, which are few so that many programs fit."""
LARGE = H200.l2_bytes
"""Bytes of an output beyond which the kernel that reads it next begins with what L2 has no more."""
MOST_GROUPS = 512
"""Of one column: four programs for each SM, where registers let so many be resident."""


def idle_share(count: int, chunks: tuple[int, ...]) -> float:
    """Share of the lanes of ``chunks`` that ``count`` columns leave masked."""
    return 1 - count / sum(chunks)


def cut(count: int, most_idle: float = MOST_IDLE) -> tuple[int, ...]:
    """The fewest powers of two that hold ``count`` columns with at most ``most_idle`` masked.

    Largest first; among equally many the ones that leave the fewest masked.  Each column is in
    exactly one, so only the last one can be masked.
    """
    for parts in range(1, count.bit_length() + 1):
        # Rounding up at the parts-th highest bit leaves at most that many bits set.
        total = count
        while total.bit_count() > parts:
            total += total & -total
        if 1 - count / total <= most_idle:
            break
    return tuple(1 << bit for bit in reversed(range(total.bit_length())) if total >> bit & 1)


def even(count: int, most_idle: float = MOST_IDLE) -> tuple[int, ...]:
    """The fewest equal powers of two that hold ``count`` columns with at most ``most_idle`` masked,
    or as few as chunks of :data:`LEAST_CHUNK` leave.

    Equal chunks lie in threads alike: they are added up before they are reduced, and nothing goes
    from one layout to another by way of shared memory.
    """
    width = power_above(count)
    while -(-count // width) * width * (1 - most_idle) > count and width > LEAST_CHUNK:
        width //= 2
    return (width,) * -(-count // width)


@dataclass(frozen=True)
class KernelPlan:
    """One way to run a schedule: tile of ``rows`` by ``chunks`` columns for each program.

    ``parts``: for ``split`` programs that share a row, for ``column`` groups of rows.
    ``demoted``: for ``shared`` how much less than everything is kept
    (:func:`~nostall.fusion.codegen.tiling.on_chip.demotions`); ``ahead``: what it reads is copied to shared
    memory before it is needed, in loops (of all schemes but ``shared``) some turns before.
    ``peeled``: rows at odd places are walked over from multiples of 16 bytes on.  ``early``: what
    all rows share is read with the row, not where it is needed; of ``thread``, and where rows share
    nothing, that everything is read before anything is computed, whatever the compiler would
    prefer, and the next kernel may begin then.  ``streamed``: outputs larger than L2 leave it
    first, and of ``thread`` all warps of a program write together
    (:mod:`~nostall.fusion.codegen.tiling.plan_variants`).
    For ``matrix`` ``chunks`` is the largest tensor's size, for ``turned`` that of a turn.
    """

    scheme: Scheme
    rows: int
    chunks: tuple[int, ...]
    num_warps: int
    parts: int = 1
    demoted: int = 0
    ahead: bool = False
    peeled: bool = False
    early: bool = False
    streamed: bool = False

    @property
    def elements_per_thread(self) -> float:
        return self.rows * sum(self.chunks) / (WARP * self.num_warps)

    @property
    def is_even(self) -> bool:
        """Whether all chunks are equal, as one is."""
        return len(set(self.chunks)) == 1

    def __str__(self) -> str:
        columns = "+".join(map(str, self.chunks))
        if self.is_even and len(self.chunks) > 1:
            columns = f"{self.chunks[0]}x{len(self.chunks)}"
        parts = f", {self.parts} parts" if self.parts > 1 else ""
        demoted = f", {self.demoted} demoted" if self.demoted else ""
        ahead = ", copied ahead" if self.ahead else ""
        peeled = ", peeled" if self.peeled else ""
        early = ", early" if self.early else ""
        streamed = ", streamed" if self.streamed else ""
        told = f"{parts}{demoted}{ahead}{peeled}{early}{streamed}"
        return f"{self.scheme} {self.rows}x{columns}, {self.num_warps} warps{told}"


@dataclass(frozen=True)
class PackedPlan:
    """Patterns that share nothing but a launch, a plan for each."""

    parts: tuple[KernelPlan, ...]

    def __str__(self) -> str:
        return f"packed ({'; '.join(map(str, self.parts))})"


@dataclass(frozen=True)
class Refused:
    """A plan that was looked at and left out."""

    plan: KernelPlan
    reason: str


@dataclass(frozen=True)
class Plans:
    """All plans of a schedule; ``refused`` says why others are none."""

    legal: tuple[KernelPlan, ...]
    refused: tuple[Refused, ...]


def plans(of: Schedule) -> Plans:
    """Every plan worth a look; the refused ones with their reasons."""
    legal, others = [], []
    for plan in _candidates(of):
        reason = _idle(of, plan) or refusal(of, plan)
        if reason is None:
            legal.append(plan)
        else:
            others.append(Refused(plan, reason))
    return Plans(tuple(legal), tuple(others))


def first_refusal(of: Schedule) -> str | None:
    """None where some plan is legal, else the first reason why one is not."""
    first = None
    for plan in _candidates(of):
        reason = _idle(of, plan) or refusal(of, plan)
        if reason is None:
            return None
        first = first or reason
    return first


def turn_of(of: Schedule) -> Walk:
    """What is done by turns.  Raises :class:`BadFusion` with the reason where nothing is."""
    found = walk(of)
    if isinstance(found, str):
        raise BadFusion(f"{found}; take one of plans(schedule).legal")
    return found


def turn_places(of: Schedule, plan: KernelPlan) -> int:
    """How many places a turn of a ``turned`` plan has."""
    return plan.chunks[0] // lanes_beside(of, turn_of(of).group)


def _by_turns(of: Schedule) -> Iterator[KernelPlan]:
    found = walk(of)
    for places in (LEAST, 2 * LEAST, 4 * LEAST):
        beside = lanes_beside(of, 0 if isinstance(found, str) else found.group)
        for warps in (1, 2, 4):
            yield KernelPlan("turned", 1, (places * beside,), warps)
            if isinstance(found, str):
                # The reason is told once.
                return


def _unturned(of: Schedule, plan: KernelPlan) -> str | None:
    """Why a pattern cannot be taken by turns; None if it can."""
    found = walk(of)
    if isinstance(found, str):
        return found
    count, places = of.count(of.groups[found.group]), turn_places(of, plan)
    if places < LEAST or places != power_above(places) or places >= count:
        return f"{places} places at once of {count}; powers of two from {LEAST} on, and fewer"
    if plan.elements_per_thread > MOST_EACH:
        return f"{plan.elements_per_thread:.0f} elements for each thread; at most {MOST_EACH}"
    if largest_matrix(of, found.group) > plan.chunks[0]:
        return "what has no places is larger than a turn"
    return None


def _unrolled(of: Schedule, plan: KernelPlan) -> int:
    """Products in fp32 of one thread."""
    widths, mapping, found = matrix_widths(of), of.mapping, 0
    for index in mapping.operators:
        node = mapping.graph[index]
        if node.kind == "dot" and node.dtype == "float32":
            loops = mapping.loops[index] | mapping.reduced[index]
            found += math.prod(widths[at] for at in groups_of(loops, of.groups))
    return found // (WARP * plan.num_warps)


def _candidates(of: Schedule) -> Iterator[KernelPlan]:
    if of.kind == "dots":
        for warps in (1, 2, 4, 8):
            yield KernelPlan("matrix", 1, (largest_matrix(of),), warps)
        yield from _by_turns(of)
        return
    if of.kind == "flat":
        for warps in (1, 2, 4, 8):
            for each in (1, 2, 4, 8, 16):
                yield KernelPlan("thread", 1, (WARP * warps * each,), warps)
        return
    columns = of.column_count
    shapes = [(power_above(columns),), *([even(columns)] if columns >= WIDE else []), cut(columns)]
    shapes = list(dict.fromkeys(shapes))
    for chunks in shapes:
        for warps in (1, 2, 4, 8, 16, 32):
            for rows in (1, 2, 4, 8, 16, 32, 64):
                scheme: Scheme = "warp" if rows >= warps else "block"
                if of.kind == "dual":
                    for parts in _parts(of.count(of.summed), rows, MOST_GROUPS):
                        plan = KernelPlan("column", rows, chunks, warps, parts)
                        yield from (plan, replace(plan, ahead=True))
                else:
                    yield KernelPlan(scheme, rows, chunks, warps)
    if of.kind == "rows":
        for plan in _in_pieces(of):
            yield from (plan, replace(plan, ahead=True))
            if plan.rows == 1 and columns >= WIDE and peeled(of):
                odd = replace(plan, peeled=True)
                yield from (odd, replace(odd, ahead=True))
        yield from _on_chip(of)


def _in_pieces(of: Schedule) -> Iterator[KernelPlan]:
    """Plans that do not hold a row at once."""
    columns = of.column_count
    tiles = [(rows, width) for width in (256, 1024, 4096) for rows in (1, 4, 16, 64)]
    if of.along_rows:
        # Whole lines of memory, few of them at once: sums over rows read nothing else.
        tiles += [(64, 32), (128, 32)]
    for rows, width in tiles:
        if width * 2 > columns and width > 256:
            continue
        warps = min(16, max(1, rows * width // (WARP * 8)))
        yield KernelPlan("looped", rows, (width,), warps)
        for parts in _parts(columns, width):
            if parts > 1:
                yield KernelPlan("split", rows, (width,), warps, parts)


def _on_chip(of: Schedule) -> Iterator[KernelPlan]:
    """Plans that keep a row in shared memory, which takes one of several chunks."""
    ways = [
        (demoted, ahead, odd)
        for odd in ((False, True) if peeled(of) else (False,))
        for ahead in (False, True)
        for demoted in range(len(demotions(of, ahead, odd)))
    ]
    for way in ways:
        for warps in (4, 8, 16, 32):
            for each in (8, 16):
                width = WARP * warps * each
                if width < of.column_count:
                    yield KernelPlan("shared", 1, (width,), warps, 1, *way)


def _parts(count: int, step: int, most: int = MOST_PARTS) -> list[int]:
    """Into how many groups of whole ``step``s ``count`` things may be split."""
    limit = min(most, -(-count // step))
    return [parts for parts in (1, 4, 16, 64, MOST_PARTS, MOST_GROUPS) if parts <= limit]


def _idle(of: Schedule, plan: KernelPlan) -> str | None:
    """Why a plan that fits is not worth a look for the lanes that it leaves idle."""
    if plan.scheme in ("warp", "block", "column") and of.column_count >= WIDE:
        idle = idle_share(of.column_count, plan.chunks)
        if idle > MOST_IDLE:
            return f"{idle:.0%} of the lanes would be masked; {MOST_IDLE:.1%} are possible"
    return None


def refusal(of: Schedule, plan: KernelPlan) -> str | None:
    """Why a plan is none for this schedule; None if it is one."""
    lanes = WARP * plan.num_warps
    tile = plan.rows * sum(plan.chunks)
    if tile > MOST_TILE:
        return f"a tile of {tile} elements; at most {MOST_TILE}"
    if plan.rows > power_above(of.row_count):
        return f"{plan.rows} rows in a program; there are {of.row_count}"
    if plan.rows * min(plan.chunks) < lanes and plan.num_warps > 1:
        return f"{lanes} threads would repeat the work of {plan.rows * min(plan.chunks)}"
    if plan.peeled and (plan.rows > 1 or not peeled(of)):
        return "peeled are single rows, one for each program, that begin at odd places"
    if plan.early and plan.scheme not in HELD:
        return "what is not held in registers cannot all be read before anything is computed"
    if plan.streamed and not (plan.scheme in HELD and large_outputs(of)):
        return f"only outputs of more than {LARGE / 1e6:.0f} MB, from registers, are streamed"
    if plan.scheme == "shared":
        told = plan.demoted, plan.chunks[0], plan.ahead, plan.peeled
        if reason := unfit(of, *told):
            return reason
    walks = plan.scheme in ("looped", "split", "column")
    if walks and plan.ahead and (reason := refused(of, tile, plan.peeled)):
        return reason
    if plan.scheme == "turned" and (reason := _unturned(of, plan)):
        return reason
    if plan.scheme == "matrix" and (products := _unrolled(of, plan)) > MOST_UNROLLED:
        return f"{products} products in fp32 for each thread; at most {MOST_UNROLLED}"
    needed, most = registers(of, plan, LEAST_SHARE), most_registers(plan)
    if needed > most:
        return f"at least {needed} registers for each thread (modelled); {most} at {lanes} threads"
    return None


def large_outputs(of: Schedule) -> frozenset[int]:
    """The outputs that are larger than L2."""
    graph, outputs = of.mapping.graph, of.mapping.outputs
    return frozenset(index for index in outputs if graph[index].bytes > LARGE)


def most_registers(plan: KernelPlan) -> int:
    """Registers that a thread can have."""
    return min(REGISTERS_THREAD, REGISTERS_SM // (WARP * plan.num_warps))


def registers(of: Schedule, plan: KernelPlan, share: float) -> int:
    """Registers that a thread needs, *modelled*: ``share`` of the live values of the tile times
    the elements of each; between the least and the most share only a compiler knows."""
    each = max(1.0, plan.elements_per_thread)
    return math.ceil(of.live_values * each * share) + REGISTERS_OTHER
