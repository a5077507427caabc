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

from nostall.fusion.codegen.loops.dot_axes import find_groups
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.tiling.async_copies import illegal_async_copy_reason
from nostall.fusion.codegen.tiling.loop_peeling import find_peeling
from nostall.fusion.codegen.tiling.on_chip import illegal_on_chip_reason, rematerialization_options
from nostall.fusion.codegen.tiling.sequence_tiles import (
    MIN_TILE_POSITIONS,
    SequenceTiling,
    find_sequence_tiling,
)
from nostall.fusion.codegen.tiling.tile_sizes import (
    group_lanes,
    max_lanes_per_position,
    max_matrix_lanes,
    next_power_of_two,
)
from nostall.fusion.errors import BadFusion
from nostall.fusion.hardware import H200

Scheme = Literal[
    "thread", "warp", "block", "looped", "shared", "split", "column", "matrix", "turned"
]

REGISTER_SCHEMES: tuple[Scheme, ...] = ("thread", "warp", "block")
"""Schemes that have all of a row, or of what has none, in registers at once."""
MAX_IDLE_SHARE = 1 / 16
"""Share of masked lanes above which a row is cut into several powers of two."""
VECTOR_ELEMENTS = 8
"""Numbers of two bytes that are read at once."""
MAX_WARPS = 32
MIN_WIDE_COLUMNS = 512
"""Columns from which that is held to; of fewer, several rows share a warp and either may win."""
MIN_CHUNK = 128
"""Columns of an equal chunk: fewer would be many of few elements for each thread."""
WARP_SIZE = 32
REGISTERS_PER_SM = H200.registers
MAX_REGISTERS_PER_THREAD = H200.max_registers
# Addresses, row values and what else the compiler keeps besides the tile's values.
BASE_REGISTERS = 24
# Of one register for each live value and element, the share that a dozen chains compiled for sm_90
# came to: fp16 values stay packed, and the compiler reorders element by element.
MIN_LIVE_SHARE, MAX_LIVE_SHARE = 0.25, 0.8
MAX_TILE_ELEMENTS = 1 << 17
"""Elements of one tensor in Triton are at most 2^20; tiles far below that already spill."""
MAX_UNROLLED_PRODUCTS = 1536
"""Products of a thread in fp32, which Triton unrolls: the backward pass of attention with 64 places
of 64 (5120, compiled for sm_90) has 350 KB of code, spills and takes 19 s to compile."""
MAX_SPLITS = 256
"""Partial results of one row that the next kernel loads at once."""
MAX_SEQUENCE_ELEMENTS = 32
"""Elements of a thread in a turn of small dots, which are few so that many programs fit."""
EVICT_FIRST_BYTES = H200.l2_bytes
"""Bytes of an output beyond which the kernel that reads it next begins with what L2 has no more."""
MAX_ROW_GROUPS = 512
"""Of one column: four programs for each SM, where registers let so many be resident."""


def idle_share(count: int, chunks: tuple[int, ...]) -> float:
    """Share of the lanes of ``chunks`` that ``count`` columns leave masked."""
    return 1 - count / sum(chunks)


def mixed_chunks(count: int, most_idle: float = MAX_IDLE_SHARE) -> tuple[int, ...]:
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


def equal_chunks(count: int, most_idle: float = MAX_IDLE_SHARE) -> tuple[int, ...]:
    """The fewest equal powers of two that hold ``count`` columns with at most ``most_idle`` masked,
    or as few as chunks of :data:`MIN_CHUNK` leave.

    Equal chunks lie in threads alike: they are added up before they are reduced, and nothing goes
    from one layout to another by way of shared memory.
    """
    width = next_power_of_two(count)
    while -(-count // width) * width * (1 - most_idle) > count and width > MIN_CHUNK:
        width //= 2
    return (width,) * -(-count // width)


@dataclass(frozen=True)
class KernelPlan:
    """One way to run a schedule: tile of ``rows`` by ``chunks`` columns for each program.

    ``splits``: for ``split`` programs that share a row, for ``column`` groups of rows.
    ``rematerialized``: for ``shared`` how much less than everything is kept
    (:func:`~nostall.fusion.codegen.tiling.on_chip.rematerialization_options`); ``async_copies``: what it reads is copied to shared
    memory before it is needed, in loops (of all schemes but ``shared``) some turns before.
    ``find_peeling``: rows at odd places are walked over from multiples of 16 bytes on.  ``eager_loads``: what
    all rows share is read with the row, not where it is needed; of ``thread``, and where rows share
    nothing, that everything is read before anything is computed, whatever the compiler would
    prefer, and the next kernel may begin then.  ``evict_first``: outputs larger than L2 leave it
    first, and of ``thread`` all warps of a program write together
    (:mod:`~nostall.fusion.codegen.tiling.plan_variants`).
    For ``matrix`` ``chunks`` is the largest tensor's size, for ``turned`` that of a turn.
    """

    scheme: Scheme
    rows: int
    chunks: tuple[int, ...]
    num_warps: int
    splits: int = 1
    rematerialized: int = 0
    async_copies: bool = False
    peeled: bool = False
    eager_loads: bool = False
    evict_first: bool = False

    @property
    def elements_per_thread(self) -> float:
        return self.rows * sum(self.chunks) / (WARP_SIZE * self.num_warps)

    @property
    def has_equal_chunks(self) -> bool:
        """Whether all chunks are equal, as one is."""
        return len(set(self.chunks)) == 1

    def __str__(self) -> str:
        columns = "+".join(map(str, self.chunks))
        if self.has_equal_chunks and len(self.chunks) > 1:
            columns = f"{self.chunks[0]}x{len(self.chunks)}"
        parts = f", {self.splits} parts" if self.splits > 1 else ""
        demoted = f", {self.rematerialized} demoted" if self.rematerialized else ""
        ahead = ", copied ahead" if self.async_copies else ""
        peeled = ", peeled" if self.peeled else ""
        early = ", early" if self.eager_loads else ""
        streamed = ", streamed" if self.evict_first else ""
        told = f"{parts}{demoted}{ahead}{peeled}{early}{streamed}"
        return f"{self.scheme} {self.rows}x{columns}, {self.num_warps} warps{told}"


@dataclass(frozen=True)
class PackedPlan:
    """Patterns that share nothing but a launch, a plan for each."""

    plans: tuple[KernelPlan, ...]

    def __str__(self) -> str:
        return f"packed ({'; '.join(map(str, self.plans))})"


@dataclass(frozen=True)
class IllegalPlan:
    """A plan that was looked at and left out."""

    plan: KernelPlan
    reason: str


@dataclass(frozen=True)
class Plans:
    """All plans of a schedule; ``illegal`` says why others are none."""

    legal: tuple[KernelPlan, ...]
    illegal: tuple[IllegalPlan, ...]


def plans(schedule: Schedule) -> Plans:
    """Every plan worth a look; the refused ones with their reasons."""
    legal, others = [], []
    for plan in _candidates(schedule):
        reason = _idle(schedule, plan) or illegal_reason(schedule, plan)
        if reason is None:
            legal.append(plan)
        else:
            others.append(IllegalPlan(plan, reason))
    return Plans(tuple(legal), tuple(others))


def first_illegal_reason(schedule: Schedule) -> str | None:
    """None where some plan is legal, else the first reason why one is not."""
    first = None
    for plan in _candidates(schedule):
        reason = _idle(schedule, plan) or illegal_reason(schedule, plan)
        if reason is None:
            return None
        first = first or reason
    return first


def sequence_tiling(schedule: Schedule) -> SequenceTiling:
    """What is done by turns.  Raises :class:`BadFusion` with the reason where nothing is."""
    found = find_sequence_tiling(schedule)
    if isinstance(found, str):
        raise BadFusion(f"{found}; take one of plans(schedule).legal")
    return found


def positions_per_tile(schedule: Schedule, plan: KernelPlan) -> int:
    """How many places a turn of a ``turned`` plan has."""
    return plan.chunks[0] // max_lanes_per_position(schedule, sequence_tiling(schedule).group)


def _by_turns(schedule: Schedule) -> Iterator[KernelPlan]:
    found = find_sequence_tiling(schedule)
    for places in (MIN_TILE_POSITIONS, 2 * MIN_TILE_POSITIONS, 4 * MIN_TILE_POSITIONS):
        beside = max_lanes_per_position(schedule, 0 if isinstance(found, str) else found.group)
        for warps in (1, 2, 4):
            yield KernelPlan("turned", 1, (places * beside,), warps)
            if isinstance(found, str):
                # The reason is told once.
                return


def _unturned(schedule: Schedule, plan: KernelPlan) -> str | None:
    """Why a pattern cannot be taken by turns; None if it can."""
    found = find_sequence_tiling(schedule)
    if isinstance(found, str):
        return found
    count, places = (
        schedule.count(schedule.loop_groups[found.group]),
        positions_per_tile(schedule, plan),
    )
    if places < MIN_TILE_POSITIONS or places != next_power_of_two(places) or places >= count:
        return f"{places} places at once of {count}; powers of two from {MIN_TILE_POSITIONS} on, and fewer"
    if plan.elements_per_thread > MAX_SEQUENCE_ELEMENTS:
        return f"{plan.elements_per_thread:.0f} elements for each thread; at most {MAX_SEQUENCE_ELEMENTS}"
    if max_matrix_lanes(schedule, found.group) > plan.chunks[0]:
        return "what has no places is larger than a turn"
    return None


def _unrolled(schedule: Schedule, plan: KernelPlan) -> int:
    """Products in fp32 of one thread."""
    widths, mapping, found = group_lanes(schedule), schedule.mapping, 0
    for index in mapping.operators:
        node = mapping.graph[index]
        if node.kind == "dot" and node.dtype == "float32":
            loops = mapping.loops[index] | mapping.reduced_loops[index]
            found += math.prod(widths[at] for at in find_groups(loops, schedule.loop_groups))
    return found // (WARP_SIZE * plan.num_warps)


def _candidates(schedule: Schedule) -> Iterator[KernelPlan]:
    if schedule.kind == "dots":
        for warps in (1, 2, 4, 8):
            yield KernelPlan("matrix", 1, (max_matrix_lanes(schedule),), warps)
        yield from _by_turns(schedule)
        return
    if schedule.kind == "flat":
        for warps in (1, 2, 4, 8):
            for each in (1, 2, 4, 8, 16):
                yield KernelPlan("thread", 1, (WARP_SIZE * warps * each,), warps)
        return
    columns = schedule.column_count
    shapes = [
        (next_power_of_two(columns),),
        *([equal_chunks(columns)] if columns >= MIN_WIDE_COLUMNS else []),
        mixed_chunks(columns),
    ]
    shapes = list(dict.fromkeys(shapes))
    for chunks in shapes:
        for warps in (1, 2, 4, 8, 16, 32):
            for rows in (1, 2, 4, 8, 16, 32, 64):
                scheme: Scheme = "warp" if rows >= warps else "block"
                if schedule.kind == "dual":
                    for parts in _parts(
                        schedule.count(schedule.reduced_rows), rows, MAX_ROW_GROUPS
                    ):
                        plan = KernelPlan("column", rows, chunks, warps, parts)
                        yield from (plan, replace(plan, async_copies=True))
                else:
                    yield KernelPlan(scheme, rows, chunks, warps)
    if schedule.kind == "rows":
        for plan in _in_pieces(schedule):
            yield from (plan, replace(plan, async_copies=True))
            if plan.rows == 1 and columns >= MIN_WIDE_COLUMNS and find_peeling(schedule):
                odd = replace(plan, peeled=True)
                yield from (odd, replace(odd, async_copies=True))
        yield from _on_chip(schedule)


def _in_pieces(schedule: Schedule) -> Iterator[KernelPlan]:
    """Plans that do not hold a row at once."""
    columns = schedule.column_count
    tiles = [(rows, width) for width in (256, 1024, 4096) for rows in (1, 4, 16, 64)]
    if schedule.is_column_major:
        # Whole lines of memory, few of them at once: sums over rows read nothing else.
        tiles += [(64, 32), (128, 32)]
    for rows, width in tiles:
        if width * 2 > columns and width > 256:
            continue
        warps = min(16, max(1, rows * width // (WARP_SIZE * 8)))
        yield KernelPlan("looped", rows, (width,), warps)
        for parts in _parts(columns, width):
            if parts > 1:
                yield KernelPlan("split", rows, (width,), warps, parts)


def _on_chip(schedule: Schedule) -> Iterator[KernelPlan]:
    """Plans that keep a row in shared memory, which takes one of several chunks."""
    ways = [
        (demoted, ahead, odd)
        for odd in ((False, True) if find_peeling(schedule) else (False,))
        for ahead in (False, True)
        for demoted in range(len(rematerialization_options(schedule, ahead, odd)))
    ]
    for way in ways:
        for warps in (4, 8, 16, 32):
            for each in (8, 16):
                width = WARP_SIZE * warps * each
                if width < schedule.column_count:
                    yield KernelPlan("shared", 1, (width,), warps, 1, *way)


def _parts(count: int, step: int, most: int = MAX_SPLITS) -> list[int]:
    """Into how many groups of whole ``step``s ``count`` things may be split."""
    limit = min(most, -(-count // step))
    return [parts for parts in (1, 4, 16, 64, MAX_SPLITS, MAX_ROW_GROUPS) if parts <= limit]


def _idle(schedule: Schedule, plan: KernelPlan) -> str | None:
    """Why a plan that fits is not worth a look for the lanes that it leaves idle."""
    if plan.scheme in ("warp", "block", "column") and schedule.column_count >= MIN_WIDE_COLUMNS:
        idle = idle_share(schedule.column_count, plan.chunks)
        if idle > MAX_IDLE_SHARE:
            return f"{idle:.0%} of the lanes would be masked; {MAX_IDLE_SHARE:.1%} are possible"
    return None


def illegal_reason(schedule: Schedule, plan: KernelPlan) -> str | None:
    """Why a plan is none for this schedule; None if it is one."""
    lanes = WARP_SIZE * plan.num_warps
    tile = plan.rows * sum(plan.chunks)
    if tile > MAX_TILE_ELEMENTS:
        return f"a tile of {tile} elements; at most {MAX_TILE_ELEMENTS}"
    if plan.rows > next_power_of_two(schedule.row_count):
        return f"{plan.rows} rows in a program; there are {schedule.row_count}"
    if plan.rows * min(plan.chunks) < lanes and plan.num_warps > 1:
        return f"{lanes} threads would repeat the work of {plan.rows * min(plan.chunks)}"
    if plan.peeled and (plan.rows > 1 or not find_peeling(schedule)):
        return "peeled are single rows, one for each program, that begin at odd places"
    if plan.eager_loads and plan.scheme not in REGISTER_SCHEMES:
        return "what is not held in registers cannot all be read before anything is computed"
    if plan.evict_first and not (plan.scheme in REGISTER_SCHEMES and large_outputs(schedule)):
        return f"only outputs of more than {EVICT_FIRST_BYTES / 1e6:.0f} MB, from registers, are streamed"
    if plan.scheme == "shared":
        told = plan.rematerialized, plan.chunks[0], plan.async_copies, plan.peeled
        if reason := illegal_on_chip_reason(schedule, *told):
            return reason
    walks = plan.scheme in ("looped", "split", "column")
    if (
        walks
        and plan.async_copies
        and (reason := illegal_async_copy_reason(schedule, tile, plan.peeled))
    ):
        return reason
    if plan.scheme == "turned" and (reason := _unturned(schedule, plan)):
        return reason
    if plan.scheme == "matrix" and (products := _unrolled(schedule, plan)) > MAX_UNROLLED_PRODUCTS:
        return f"{products} products in fp32 for each thread; at most {MAX_UNROLLED_PRODUCTS}"
    needed, most = modelled_registers(schedule, plan, MIN_LIVE_SHARE), max_registers(plan)
    if needed > most:
        return f"at least {needed} registers for each thread (modelled); {most} at {lanes} threads"
    return None


def large_outputs(schedule: Schedule) -> frozenset[int]:
    """The outputs that are larger than L2."""
    graph, outputs = schedule.mapping.graph, schedule.mapping.outputs
    return frozenset(index for index in outputs if graph[index].bytes > EVICT_FIRST_BYTES)


def max_registers(plan: KernelPlan) -> int:
    """Registers that a thread can have."""
    return min(MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM // (WARP_SIZE * plan.num_warps))


def modelled_registers(schedule: Schedule, plan: KernelPlan, share: float) -> int:
    """Registers that a thread needs, *modelled*: ``share`` of the live values of the tile times
    the elements of each; between the least and the most share only a compiler knows."""
    each = max(1.0, plan.elements_per_thread)
    return math.ceil(schedule.peak_live_values * each * share) + BASE_REGISTERS
