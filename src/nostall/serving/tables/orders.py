"""Orders of units: how they are sorted, and how sorted units are dealt to programs.

An order is a pair of pure functions. A *sort* gives each query tile the rank of its first unit. A
*deal* gives each rank a program; a program runs its units in ascending rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import njit
from numpy.typing import NDArray

from nostall.core.text.suggest import unknown
from nostall.serving.errors import BadTables
from nostall.serving.tables.cut_rules import NO_REFERENCE_COUNTS
from nostall.serving.tables.query_tiles import TILE_COST, TILE_INDEX, TILE_RANK, TILE_UNITS

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

Sort = Callable[[Int32s, int], None]
Deal = Callable[[Int32s, int, int, Int32s, Int32s], int]


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def sort_as_given(tiles: Int32s, classes: int) -> None:
    """Rank units in the order of the batch."""
    rank = 0
    for row in tiles:
        row[TILE_RANK] = rank
        rank += row[TILE_UNITS]


@njit(cache=True)  # type: ignore[untyped-decorator]
def sort_by_class(tiles: Int32s, classes: int) -> None:
    """Rank units by descending class of cost; a class keeps the order of the batch.

    A unit of cost c has the class ``c * classes // (largest cost + 1)``.
    """
    largest = 0
    for row in tiles:
        largest = max(largest, row[TILE_COST])
    # A counting sort: place 0 is the class of the largest costs, and ``starts[place]`` becomes the
    # rank of its next unit. All units of a tile have neighbouring ranks.
    starts = np.zeros(classes + 1, np.int64)
    for row in tiles:
        starts[classes - row[TILE_COST] * classes // (largest + 1)] += row[TILE_UNITS]
    for place in range(classes):
        starts[place + 1] += starts[place]
    for row in tiles:
        place = classes - 1 - row[TILE_COST] * classes // (largest + 1)
        row[TILE_RANK] = starts[place]
        starts[place] += row[TILE_UNITS]


@njit(cache=True)  # type: ignore[untyped-decorator]
def sort_by_cost(tiles: Int32s, classes: int) -> None:
    """Rank units by descending cost; equal costs keep the order of the batch."""
    rank = 0
    for index in np.argsort(-tiles[:, TILE_COST], kind="mergesort"):
        tiles[index, TILE_RANK] = rank
        rank += tiles[index, TILE_UNITS]


@njit(cache=True)  # type: ignore[untyped-decorator]
def sort_in_pairs(tiles: Int32s, classes: int) -> None:
    """Rank units of the largest tile by descending class of cost, then the others by ascending one.

    Programs that take units from both ends of the list then start with the longest units of
    each kind; the units that remain for the last programs are short.
    """
    largest_cost = largest_tile = 0
    for row in tiles:
        largest_cost = max(largest_cost, row[TILE_COST])
        largest_tile = max(largest_tile, row[TILE_INDEX])
    # As :func:`sort_by_class` with twice as many places: the largest tile from the largest costs to
    # the least, then all other tiles from the least costs to the largest.
    starts = np.zeros(2 * classes + 1, np.int64)
    for row in tiles:
        place = row[TILE_COST] * classes // (largest_cost + 1)
        place = classes - 1 - place if row[TILE_INDEX] == largest_tile else classes + place
        starts[place + 1] += row[TILE_UNITS]
    for place in range(2 * classes):
        starts[place + 1] += starts[place]
    for row in tiles:
        place = row[TILE_COST] * classes // (largest_cost + 1)
        place = classes - 1 - place if row[TILE_INDEX] == largest_tile else classes + place
        row[TILE_RANK] = starts[place]
        starts[place] += row[TILE_UNITS]


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def deal_ranges(costs: Int32s, units: int, programs: int, offsets: Int32s, places: Int32s) -> int:
    """Give each program a range of neighbours; ranges differ by one unit at most."""
    for program in range(programs + 1):
        offsets[program] = program * units // programs
    for rank in range(units):
        places[rank] = rank
    return programs


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def deal_cyclic(costs: Int32s, units: int, programs: int, offsets: Int32s, places: Int32s) -> int:
    """Deal units to the programs 0, 1, ..., C - 1, 0, 1, ... .

    Writes the offset of each program and the place of each rank in the Task-Table; returns the
    number of programs. ``costs`` are the costs by rank.
    """
    rounds, rest = divmod(units, programs)
    for program in range(programs + 1):
        offsets[program] = program * rounds + min(program, rest)
    for rank in range(units):
        places[rank] = 0
    rank = 0
    for turn in range(rounds + 1):
        for program in range(min(programs, units - rank)):
            places[rank + program] = offsets[program] + turn
        rank += min(programs, units - rank)
    return programs


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def deal_snake(costs: Int32s, units: int, programs: int, offsets: Int32s, places: Int32s) -> int:
    """Deal units to the programs 0, ..., C - 1, C - 1, ..., 0, 0, ... (paper, section 2.4)."""
    rounds, rest = divmod(units, programs)
    # The last round is not full. If it runs backwards, its units go to the last programs.
    first_extra = programs - rest if rounds % 2 else 0
    offsets[0] = 0
    for program in range(programs):
        is_extra = first_extra <= program < first_extra + rest
        offsets[program + 1] = offsets[program] + rounds + is_extra
    rank = 0
    for turn in range(rounds + 1):
        dealt = min(programs, units - rank)
        for step in range(dealt):
            program = programs - 1 - step if turn % 2 else step
            places[rank + step] = offsets[program] + turn
        rank += dealt
    return programs


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def deal_one_each(costs: Int32s, units: int, programs: int, offsets: Int32s, places: Int32s) -> int:
    """One unit a program: the hardware scheduler starts them in ascending rank."""
    for rank in range(units):
        offsets[rank] = rank
        places[rank] = rank
    offsets[units] = units
    return units


@njit(cache=True)  # type: ignore[untyped-decorator]
def deal_to_least_loaded(
    costs: Int32s, units: int, programs: int, offsets: Int32s, places: Int32s
) -> int:
    """Give each unit to the program with the least cost so far, then the lowest number (a heap)."""
    # An entry is load * programs + program: one integer, so equal loads are ordered by program.
    heap = np.arange(programs).astype(np.int64)
    for program in range(programs + 1):
        offsets[program] = 0
    chosen = np.empty(units, np.int32)
    for rank in range(units):
        load, program = divmod(heap[0], programs)
        chosen[rank] = program
        offsets[program + 1] += 1
        _replace_least(heap, (load + costs[rank]) * programs + program)
    # Only now is it known how many units each program has, so where its range begins.
    for program in range(programs):
        offsets[program + 1] += offsets[program]
    following = offsets[:programs].copy()
    for rank in range(units):
        places[rank] = following[chosen[rank]]
        following[chosen[rank]] += 1
    return programs


@njit(**NO_REFERENCE_COUNTS)  # type: ignore[untyped-decorator]
def _replace_least(heap: Int64s, value: int) -> None:
    """Replace the least element of a binary heap."""
    place = 0
    while True:
        child = 2 * place + 1
        if child >= len(heap):
            break
        if child + 1 < len(heap) and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= value:
            break
        heap[place] = heap[child]
        place = child
    heap[place] = value


@dataclass(frozen=True)
class Order:
    """How units are sorted and dealt."""

    sort: Sort
    deal: Deal
    is_persistent: bool
    """Whether a fixed number of programs runs all units."""
    summary: str


ORDERS: dict[str, Order] = {
    "given": Order(sort_as_given, deal_cyclic, True, "order of the batch, round robin"),
    "snake": Order(sort_by_class, deal_snake, True, "descending cost, symmetric round robin"),
    "lpt": Order(sort_by_cost, deal_to_least_loaded, True, "descending cost, least loaded program"),
    "sorted": Order(sort_by_class, deal_one_each, False, "descending cost, one unit a program"),
    "paired": Order(
        sort_in_pairs,
        deal_ranges,
        True,
        "largest tiles first, the others last; for programs that take from both ends",
    ),
}
"""The orders by name."""


def find_order(name: str) -> Order:
    """The order of a name. Raises :class:`BadTables` for an unknown one."""
    if name not in ORDERS:
        raise BadTables(unknown("order", name, ORDERS))
    return ORDERS[name]
