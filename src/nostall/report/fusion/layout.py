"""Layered drawing of an acyclic graph (Sugiyama, Tagawa, Toda 1981) with a limited width.

The four classical steps: assign nodes to layers, add bends where an edge crosses a layer, order
each layer by barycentres to reduce crossings, and assign coordinates. A node that does not fit into
its layer moves to the next one. The coordinates of a layer are as close to those of neighbours as
order and distances allow (isotonic regression, solved exactly layer by layer).
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

_SWEEPS = 12
_BEND_WIDTH = 10.0
"""Width that an edge takes in a layer that it crosses."""

Size = tuple[float, float]
"""Width and height of a box."""
Edge = tuple[int, int]
"""Numbers of two nodes, the first smaller than the second."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Layout:
    """Coordinates of a drawing; y grows downward."""

    places: tuple[Point, ...]
    """Upper left corner of each box."""
    routes: tuple[tuple[Point, ...], ...]
    """Points of each edge, from the lower side of its first box to the upper side of its second."""
    width: float
    height: float


@dataclass
class _Cell:
    """A node or a bend in a layer."""

    node: int
    """The number of the node; -1 for a bend."""
    width: float
    above: list[int] = field(default_factory=list)
    """Connected cells of the layer above."""
    below: list[int] = field(default_factory=list)
    """Connected cells of the layer below."""
    center: float = 0.0


def layered_layout(
    sizes: Sequence[Size], edges: Sequence[Edge], *, max_width: float, gap: tuple[float, float]
) -> Layout:
    """Place boxes of these sizes in layers, each box below those that have edges to it.

    Nodes are numbered in topological order, so each edge leads to a larger number. ``gap`` is the
    smallest horizontal distance between boxes and the vertical distance between layers.
    """
    if not sizes:
        return Layout((), (), 0.0, 0.0)
    layer_of = _assign_layers(sizes, edges, max_width, gap[0])
    cells, layers, paths = _add_bends(sizes, edges, layer_of)
    _order_layers(cells, layers)
    _assign_centers(cells, layers, gap[0])
    return _coordinates(sizes, cells, layers, paths, gap[1])


def _assign_layers(
    sizes: Sequence[Size], edges: Sequence[Edge], max_width: float, gap: float
) -> list[int]:
    """The layer of each node: the first one with room below all nodes that it reads."""
    above: list[list[int]] = [[] for _ in sizes]
    below: list[list[int]] = [[] for _ in sizes]
    for first, second in edges:
        above[second].append(first)
        below[first].append(second)
    layer_of: list[int] = []
    used: dict[int, float] = {}
    for node, (width, _) in enumerate(sizes):
        layer = max((layer_of[source] + 1 for source in above[node]), default=0)
        while used.get(layer, 0.0) and used[layer] + gap + width > max_width:
            layer += 1
        used[layer] = used.get(layer, -gap) + gap + width
        layer_of.append(layer)
    # A node with at least as many readers as sources moves right above its first reader, if there
    # is room, so that fewer edges are long.
    for node in reversed(range(len(sizes))):
        if below[node] and len(below[node]) >= len(above[node]):
            layer, width = min(layer_of[reader] for reader in below[node]) - 1, sizes[node][0]
            if layer > layer_of[node] and used.get(layer, -gap) + gap + width <= max_width:
                used[layer] = used.get(layer, -gap) + gap + width
                used[layer_of[node]] -= gap + width
                layer_of[node] = layer
    compacted = {layer: at for at, layer in enumerate(sorted(set(layer_of)))}
    return [compacted[layer] for layer in layer_of]


def _add_bends(
    sizes: Sequence[Size], edges: Sequence[Edge], layer_of: Sequence[int]
) -> tuple[list[_Cell], list[list[int]], list[list[int]]]:
    """All cells, the cells of each layer, and the cells along each edge."""
    cells = [_Cell(node, width) for node, (width, _) in enumerate(sizes)]
    layers: list[list[int]] = [[] for _ in range(max(layer_of) + 1)]
    for node, layer in enumerate(layer_of):
        layers[layer].append(node)
    paths = []
    for first, second in edges:
        path = [first]
        for layer in range(layer_of[first] + 1, layer_of[second]):
            layers[layer].append(len(cells))
            path.append(len(cells))
            cells.append(_Cell(-1, _BEND_WIDTH))
        path.append(second)
        for upper, lower in pairwise(path):
            cells[upper].below.append(lower)
            cells[lower].above.append(upper)
        paths.append(path)
    return cells, layers, paths


def _order_layers(cells: list[_Cell], layers: list[list[int]]) -> None:
    """Sort each layer by the mean position of neighbours, in alternating sweeps down and up.

    Keeps the order with the fewest crossings.
    """
    best, fewest = [list(layer) for layer in layers], _count_crossings(cells, layers)
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        position = {cell: float(at) for layer in layers for at, cell in enumerate(layer)}
        for layer in layers if down else reversed(layers):
            means = {}
            for cell in layer:
                near = cells[cell].above if down else cells[cell].below
                means[cell] = sum(position[n] for n in near) / len(near) if near else position[cell]
            layer.sort(key=means.__getitem__)
            position.update((cell, float(at)) for at, cell in enumerate(layer))
        crossings = _count_crossings(cells, layers)
        if crossings < fewest:
            best, fewest = [list(layer) for layer in layers], crossings
    for layer, order in zip(layers, best, strict=True):
        layer[:] = order


def _count_crossings(cells: Sequence[_Cell], layers: Sequence[Sequence[int]]) -> int:
    """The number of pairs of edges between adjacent layers that cross."""
    total = 0
    for layer, following in pairwise(layers):
        position = {cell: at for at, cell in enumerate(following)}
        seen: list[int] = []
        for cell in layer:
            ends = sorted(position[lower] for lower in cells[cell].below)
            total += sum(len(seen) - bisect_right(seen, end) for end in ends)
            for end in ends:
                insort(seen, end)
    return total


def _assign_centers(cells: list[_Cell], layers: Sequence[Sequence[int]], gap: float) -> None:
    """Move the centers of cells close to those of neighbours, keeping order and distances."""
    for layer in layers:
        left = 0.0
        for index in layer:
            cells[index].center = left + cells[index].width / 2
            left += cells[index].width + gap
    for sweep in range(_SWEEPS):
        down = sweep % 2 == 0
        for layer in layers if down else reversed(layers):
            targets = []
            for index in layer:
                cell = cells[index]
                near = (cell.above if down else cell.below) or cell.above + cell.below
                centers = [cells[n].center for n in near]
                targets.append(sum(centers) / len(centers) if centers else cell.center)
            widths = [cells[index].width for index in layer]
            for index, center in zip(layer, _separate(targets, widths, gap), strict=True):
                cells[index].center = center


def _separate(targets: Sequence[float], widths: Sequence[float], gap: float) -> list[float]:
    """The centers closest to ``targets`` (least squares) that keep order and distances."""
    offsets = [0.0]
    for left, right in pairwise(widths):
        offsets.append(offsets[-1] + left / 2 + gap + right / 2)
    # Pool adjacent violators: a block is a run of touching cells at the mean of their
    # targets, stored as (sum, count).
    blocks: list[tuple[float, int]] = []
    for center, offset in zip(targets, offsets, strict=True):
        total, count = center - offset, 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / count:
            previous_total, previous_count = blocks.pop()
            total, count = total + previous_total, count + previous_count
        blocks.append((total, count))
    starts = [total / count for total, count in blocks for _ in range(count)]
    return [start + offset for start, offset in zip(starts, offsets, strict=True)]


def _coordinates(
    sizes: Sequence[Size],
    cells: Sequence[_Cell],
    layers: Sequence[Sequence[int]],
    paths: Sequence[Sequence[int]],
    gap: float,
) -> Layout:
    left = min(cell.center - cell.width / 2 for cell in cells)
    top, y = {}, 0.0
    layer_height = {}
    for layer in layers:
        tallest = max((sizes[c][1] for c in layer if cells[c].node >= 0), default=0.0)
        for cell in layer:
            top[cell], layer_height[cell] = y, tallest
        y += tallest + gap
    places = tuple(
        (cells[node].center - width / 2 - left, top[node]) for node, (width, _) in enumerate(sizes)
    )
    routes = []
    for path in paths:
        first, *bends, last = path
        x = cells[first].center - left
        points = [(x, top[first] + sizes[first][1])]
        if layer_height[first] > sizes[first][1]:  # straight down past taller boxes of the layer
            points.append((x, top[first] + layer_height[first]))
        for bend in bends:
            x = cells[bend].center - left
            points += [(x, top[bend]), (x, top[bend] + layer_height[bend])]
        points.append((cells[last].center - left, top[last]))
        routes.append(tuple(points))
    width = max(cell.center + cell.width / 2 for cell in cells) - left
    return Layout(places, tuple(routes), width, y - gap)
