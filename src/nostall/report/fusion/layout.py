"""A layered drawing of an acyclic graph: who reads stands below, edges make few crossings.

The classical four steps (Sugiyama, Tagawa, Toda 1981): layers, bends where an edge passes a layer,
an order inside each layer by barycentres, and places.  A layer is never wider than asked; what does
not fit goes to the next.  Places are those nearest to the neighbours' that keep order and distance
(isotonic regression, solved exactly layer by layer).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_SWEEPS = 12
_BEND = 10.0
"""Width that an edge takes where it passes a layer."""


@dataclass(frozen=True, slots=True)
class Layout:
    """``places`` are left upper corners, ``routes`` the points of each edge, from the lower edge of
    its first node to the upper edge of its second."""

    places: tuple[tuple[float, float], ...]
    routes: tuple[tuple[tuple[float, float], ...], ...]
    width: float
    height: float


@dataclass
class _Cell:
    """A node, or a bend (``node`` is -1), with its neighbours above and below."""

    node: int
    width: float
    above: list[int] = field(default_factory=list)
    below: list[int] = field(default_factory=list)
    middle: float = 0.0


def layered(
    sizes: Sequence[tuple[float, float]],
    edges: Sequence[tuple[int, int]],
    *,
    most_width: float,
    gap: tuple[float, float],
) -> Layout:
    """Places for boxes of these sizes (width, height).

    ``edges`` lead from a number to a greater number: nodes stand in topological order.  ``gap`` is
    the least distance sideways and between layers.
    """
    if not sizes:
        return Layout((), (), 0.0, 0.0)
    layer = _layers(sizes, edges, most_width, gap[0])
    cells, rows, paths = _with_bends(sizes, edges, layer)
    _order(cells, rows)
    _place(cells, rows, gap[0])
    return _drawn(sizes, cells, rows, paths, gap[1])


def _layers(
    sizes: Sequence[tuple[float, float]],
    edges: Sequence[tuple[int, int]],
    most_width: float,
    gap: float,
) -> list[int]:
    """Of every node its layer: below all that it reads, in the first layer that has room."""
    above: list[list[int]] = [[] for _ in sizes]
    for first, second in edges:
        above[second].append(first)
    layer: list[int] = []
    used: dict[int, float] = {}
    for node, (width, _) in enumerate(sizes):
        at = max((layer[other] + 1 for other in above[node]), default=0)
        while used.get(at, 0.0) and used[at] + gap + width > most_width:
            at += 1
        used[at] = used.get(at, -gap) + gap + width
        layer.append(at)
    # What is read at as many places as it reads, or more, stands right above its first reader,
    # where there is room: fewer edges are long.
    below: list[list[int]] = [[] for _ in sizes]
    for first, second in edges:
        below[first].append(second)
    for node in reversed(range(len(sizes))):
        if below[node] and len(below[node]) >= len(above[node]):
            wanted, width = min(layer[other] for other in below[node]) - 1, sizes[node][0]
            if wanted > layer[node] and used.get(wanted, -gap) + gap + width <= most_width:
                used[wanted] = used.get(wanted, -gap) + gap + width
                used[layer[node]] -= gap + width
                layer[node] = wanted
    kept = {at: place for place, at in enumerate(sorted(set(layer)))}
    return [kept[at] for at in layer]


def _with_bends(
    sizes: Sequence[tuple[float, float]], edges: Sequence[tuple[int, int]], layer: Sequence[int]
) -> tuple[list[_Cell], list[list[int]], list[list[int]]]:
    """All cells, the cells of each layer, and the cells that each edge passes."""
    cells = [_Cell(node, width) for node, (width, _) in enumerate(sizes)]
    rows: list[list[int]] = [[] for _ in range(max(layer) + 1)]
    for node, at in enumerate(layer):
        rows[at].append(node)
    paths = []
    for first, second in edges:
        path = [first]
        for at in range(layer[first] + 1, layer[second]):
            rows[at].append(len(cells))
            path.append(len(cells))
            cells.append(_Cell(-1, _BEND))
        path.append(second)
        for one, other in pairwise(path):
            cells[one].below.append(other)
            cells[other].above.append(one)
        paths.append(path)
    return cells, rows, paths


def _order(cells: list[_Cell], rows: list[list[int]]) -> None:
    """Sort each layer by the mean place of the neighbours, downward and upward by turns; the order
    with the fewest crossings is kept."""
    best, fewest = [list(row) for row in rows], _crossings(cells, rows)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        place = {cell: float(at) for row in rows for at, cell in enumerate(row)}
        for row in rows if down else reversed(rows):
            means = {}
            for cell in row:
                near = cells[cell].above if down else cells[cell].below
                means[cell] = sum(place[n] for n in near) / len(near) if near else place[cell]
            row.sort(key=means.__getitem__)
            place.update((cell, float(at)) for at, cell in enumerate(row))
        crossings = _crossings(cells, rows)
        if crossings < fewest:
            best, fewest = [list(row) for row in rows], crossings
    for row, chosen in zip(rows, best, strict=True):
        row[:] = chosen


def _crossings(cells: Sequence[_Cell], rows: Sequence[Sequence[int]]) -> int:
    """How many pairs of edges between neighbouring layers cross."""
    total = 0
    for row, following in pairwise(rows):
        place = {cell: at for at, cell in enumerate(following)}
        seen: list[int] = []
        for cell in row:
            ends = sorted(place[other] for other in cells[cell].below)
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _place(cells: list[_Cell], rows: Sequence[Sequence[int]], gap: float) -> None:
    """Middles of all cells: near those of their neighbours, in order, and apart."""
    for row in rows:
        left = 0.0
        for cell in row:
            cells[cell].middle = left + cells[cell].width / 2
            left += cells[cell].width + gap
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            wanted = []
            for cell in row:
                known = cells[cell]
                near = (known.above if down else known.below) or known.above + known.below
                middles = [cells[n].middle for n in near]
                wanted.append(sum(middles) / len(middles) if middles else known.middle)
            widths = [cells[cell].width for cell in row]
            for cell, middle in zip(row, _apart(wanted, widths, gap), strict=True):
                cells[cell].middle = middle


def _apart(wanted: Sequence[float], widths: Sequence[float], gap: float) -> list[float]:
    """The middles nearest to the wanted ones (least squares) that keep order and distance."""
    offsets = [0.0]
    for one, other in pairwise(widths):
        offsets.append(offsets[-1] + one / 2 + gap + other / 2)
    # Pool adjacent violators: blocks of cells that touch, each at the mean of what it wants.
    blocks: list[tuple[float, int]] = []
    for middle, offset in zip(wanted, offsets, strict=True):
        total, count = middle - offset, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            before, many = blocks.pop()
            total, count = total + before, count + many
        blocks.append((total, count))
    starts = [total / count for total, count in blocks for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


def _drawn(
    sizes: Sequence[tuple[float, float]],
    cells: Sequence[_Cell],
    rows: Sequence[Sequence[int]],
    paths: Sequence[Sequence[int]],
    gap: float,
) -> Layout:
    left = min(cell.middle - cell.width / 2 for cell in cells)
    top, y = {}, 0.0
    height = {}
    for row in rows:
        tallest = max((sizes[c][1] for c in row if cells[c].node >= 0), default=0.0)
        for cell in row:
            top[cell], height[cell] = y, tallest
        y += tallest + gap
    places = tuple(
        (cells[node].middle - width / 2 - left, top[node]) for node, (width, _) in enumerate(sizes)
    )
    routes = []
    for path in paths:
        first, *bends, last = path
        x = cells[first].middle - left
        points = [(x, top[first] + sizes[first][1])]
        if height[first] > sizes[first][1]:  # down to where its taller neighbours end, too
            points.append((x, top[first] + height[first]))
        for bend in bends:
            x = cells[bend].middle - left
            points += [(x, top[bend]), (x, top[bend] + height[bend])]
        points.append((cells[last].middle - left, top[last]))
        routes.append(tuple(points))
    width = max(cell.middle + cell.width / 2 for cell in cells) - left
    return Layout(places, tuple(routes), width, y - gap)
