"""SVG drawing of a pass after fusion: a card for each kernel with its operators; data flows down.

Cards and the calls outside of kernels form one layered drawing; the operators in a card form
another. A chain of elementwise operators is drawn as one stack without edges.

Layered drawing of an acyclic graph (Sugiyama, Tagawa, Toda 1981) with a limited width.

The four classical steps: assign nodes to layers, add bends where an edge crosses a layer, order
each layer by barycentres to reduce crossings, and assign coordinates. A node that does not fit into
its layer moves to the next one. The coordinates of a layer are as close to those of neighbours as
order and distances allow (isotonic regression, solved exactly layer by layer).
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import TopologicalSorter
from html import escape
from itertools import pairwise

from markupsafe import Markup

from nostall.core.text.plurals import pluralize
from nostall.report.units import Scale, format_bytes
from nostall.tuning.fusing.document import FusedKernel, GraphNode, Pass

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


MAX_DRAWN = 1000
"""If a pass has more operators than this, cards show only how many they contain."""
MARGIN, PAD, HEAD_HEIGHT = 12, 10, 54
ROW_HEIGHT, PILL_HEIGHT = 17, 24
MAX_PLAN_LETTERS = 48
"""Letters of the plan in a card's first line."""
LETTER_WIDTH = 6.9
"""Width of a letter in the font of code."""
MAX_WIDTH, MAX_CARD_WIDTH = 1500.0, 460.0
_OUTER_GAP, _INNER_GAP = (26.0, 34.0), (14.0, 20.0)

Nodes = Mapping[int, GraphNode]
"""The nodes of a pass by index."""
Box = tuple[float, float, float, float]
"""Left, top, width, height."""


@dataclass(frozen=True)
class Item:
    """A box of the outer drawing: a kernel, or a single call outside of kernels."""

    members: tuple[int, ...]
    """Indices of the graph nodes in it."""
    kernel: FusedKernel | None = None
    number: int = 0
    """Number of the kernel, from 1."""
    measured: float | None = None
    """Measured seconds of the kernel, if known."""

    @property
    def title(self) -> str:
        return f"K{self.number}" if self.kernel else "call"


@dataclass(frozen=True)
class CardContent:
    """The operators of a card as stacks, with the layout of the stacks."""

    stacks: tuple[tuple[int, ...], ...]
    layout: Layout


def _not_measured(kernel: FusedKernel) -> float | None:
    return None


def draw_pass(
    traced_pass: Pass, measured: Callable[[FusedKernel], float | None] = _not_measured
) -> Markup:
    """The drawing of a forward or backward pass as an SVG element.

    ``measured`` returns the measured seconds of a kernel, or None; all other times are modelled.
    """
    nodes = {node.index: node for node in traced_pass.nodes}
    items = [
        replace(item, measured=measured(item.kernel)) if item.kernel else item
        for item in _items(traced_pass, nodes)
    ]
    flows = _flows(items, nodes)
    contents = {
        at: _card_content(item, nodes)
        for at, item in enumerate(items)
        if item.kernel is not None and traced_pass.operators <= MAX_DRAWN
    }
    sizes = [_item_size(item, contents.get(at), nodes) for at, item in enumerate(items)]
    layout = layered_layout(sizes, list(flows), max_width=MAX_WIDTH, gap=_OUTER_GAP)
    width, height = layout.width + 2 * MARGIN, layout.height + 2 * MARGIN
    readers = _readers(traced_pass.nodes)
    parts = [
        f'<svg class="fusion" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{-MARGIN} {-MARGIN} {width:.0f} {height:.0f}" role="img" '
        f'aria-label="fusion plan, {escape(traced_pass.name)}">'
    ]
    for (edge, moved_bytes), route in zip(flows.items(), layout.routes, strict=True):
        first, second = (_item_name(items[end], nodes) for end in edge)
        parts.append(
            f'<path class="flow" data-from="{edge[0]}" data-to="{edge[1]}" '
            f'stroke-width="{_line_width(moved_bytes):.1f}" d="{_curve(route)}">'
            f"<title>{escape(first)} → {escape(second)}: {format_bytes(moved_bytes)}</title></path>"
        )
    for at, (item, place, size) in enumerate(zip(items, layout.places, sizes, strict=True)):
        box = (*place, *size)
        if item.kernel is None:
            parts.append(_draw_call(at, nodes[item.members[0]], box, nodes))
        else:
            parts += _draw_card(at, item, box, contents.get(at), nodes, readers)
    return Markup("".join([*parts, "</svg>"]))


def _items(traced_pass: Pass, nodes: Nodes) -> list[Item]:
    """Kernels, single operators and opaque calls in topological order."""
    kernels = [Item(k.operators, k, at + 1) for at, k in enumerate(traced_pass.kernels)]
    opaque = [node.index for node in traced_pass.nodes if node.kind == "opaque"]
    items = [*kernels, *(Item((index,)) for index in (*opaque, *traced_pass.alone))]
    item_of = {index: at for at, item in enumerate(items) for index in item.members}
    predecessors: dict[int, set[int]] = {at: set() for at in range(len(items))}
    for at, item in enumerate(items):
        for index in item.members:
            predecessors[at] |= {item_of[s] for s in nodes[index].reads if s in item_of} - {at}
    return [items[at] for at in TopologicalSorter(predecessors).static_order()]


def _flows(items: Sequence[Item], nodes: Nodes) -> dict[tuple[int, int], int]:
    """Bytes that one item passes to another, by the pair of items."""
    item_of = {index: at for at, item in enumerate(items) for index in item.members}
    passed: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for at, item in enumerate(items):
        for index in item.members:
            for source in nodes[index].reads:
                if source in item_of and item_of[source] != at:
                    passed[item_of[source], at].add(source)
    return {edge: sum(nodes[s].bytes for s in sources) for edge, sources in passed.items()}


def _readers(nodes: Iterable[GraphNode]) -> Mapping[int, set[int]]:
    """For each node: the nodes that read it."""
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for node in nodes:
        for source in node.reads:
            readers[source].add(node.index)
    return readers


# -- content of a card -----------------------------------------------------------------------------


def _card_content(item: Item, nodes: Nodes) -> CardContent:
    stacks = _stacks(item, nodes)
    stack_of = {index: at for at, stack in enumerate(stacks) for index in stack}
    edges = dict.fromkeys(
        (stack_of[source], at)
        for at, stack in enumerate(stacks)
        for index in stack
        for source in nodes[index].reads
        if source in stack_of and stack_of[source] != at
    )
    sizes = [(_stack_width(stack, nodes), ROW_HEIGHT * len(stack)) for stack in stacks]
    layout = layered_layout(sizes, list(edges), max_width=MAX_CARD_WIDTH, gap=_INNER_GAP)
    return CardContent(stacks, layout)


def _stacks(item: Item, nodes: Nodes) -> tuple[tuple[int, ...], ...]:
    """The operators of a kernel as stacks in topological order.

    An elementwise operator joins the stack of its source if the source is elementwise, has no other
    reader in the kernel, and is all that the operator reads of the kernel.
    """
    inside = set(item.members)
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for index in item.members:
        for source in nodes[index].reads:
            readers[source].add(index)
    stacks: list[list[int]] = []
    stack_of: dict[int, int] = {}
    for index in item.members:
        sources = [source for source in nodes[index].reads if source in inside]
        is_chain = len(sources) == 1 and readers[sources[0]] == {index}
        if is_chain and all(nodes[i].kind in ("light", "heavy") for i in (index, sources[0])):
            stack_of[index] = stack_of[sources[0]]
            stacks[stack_of[index]].append(index)
        else:
            stack_of[index] = len(stacks)
            stacks.append([index])
    # Stacks are numbered by their first operators; an edge can lead to a later one of a stack.
    predecessors = {
        at: {stack_of[s] for i in stack for s in nodes[i].reads if s in inside} - {at}
        for at, stack in enumerate(stacks)
    }
    return tuple(tuple(stacks[at]) for at in TopologicalSorter(predecessors).static_order())


def _stack_width(stack: Sequence[int], nodes: Nodes) -> float:
    return max(52.0, 26 + LETTER_WIDTH * max(len(nodes[index].name) for index in stack))


# -- drawing ---------------------------------------------------------------------------------------


def _item_size(item: Item, content: CardContent | None, nodes: Nodes) -> tuple[float, float]:
    if item.kernel is None:
        return 22 + LETTER_WIDTH * len(nodes[item.members[0]].name), PILL_HEIGHT
    width = 2 * PAD + LETTER_WIDTH * max(map(len, _head_lines(item)))
    if content is None:
        return width, HEAD_HEIGHT + PAD
    return max(width, content.layout.width + 2 * PAD), HEAD_HEIGHT + content.layout.height + PAD


def _head_lines(item: Item) -> tuple[str, str, str]:
    """The three lines of text at the top of a card."""
    kernel = item.kernel
    assert kernel is not None
    scale = Scale("s", kernel.seconds_after)
    measured = "" if item.measured is None else f", measured {scale(item.measured)}"
    saved = f"{format_bytes(kernel.bytes_before)} → {format_bytes(kernel.bytes_after)}"
    return (
        f"{item.title} {_shorten(kernel.plan)}",
        f"{pluralize(len(kernel.operators), 'operator')}, "
        f"{pluralize(len(kernel.launches), 'launch')}",
        f"{saved}, {scale(kernel.seconds_after)}" + measured,
    )


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_PLAN_LETTERS else f"{text[: MAX_PLAN_LETTERS - 1]}…"


def _draw_call(at: int, node: GraphNode, box: Box, nodes: Nodes) -> str:
    """A call outside of kernels, as a pill."""
    left, top, width, height = box
    kind = "opaque" if node.kind == "opaque" else f"alone {node.kind}"
    return (
        f'<g class="item" data-item="{at}"><title>{escape(_node_text(node, nodes))}</title>'
        f'<rect class="pill {kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
        f'height="{height:.1f}" rx="12"/>'
        f'<text class="name" x="{left + width / 2:.1f}" y="{top + 16:.1f}" '
        f'text-anchor="middle">{escape(node.name)}</text></g>'
    )


def _draw_card(
    at: int,
    item: Item,
    box: Box,
    content: CardContent | None,
    nodes: Nodes,
    readers: Mapping[int, set[int]],
) -> Iterator[str]:
    """A kernel as a card; without operators if ``content`` is None."""
    kernel = item.kernel
    assert kernel is not None
    left, top, width, height = box
    first, *rest = _head_lines(item)
    yield (
        f'<g class="item" data-item="{at}"><rect class="card-box s-{kernel.scheme}" '
        f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8">'
        f"<title>{escape(kernel.name)}</title></rect>"
        f'<text class="head" x="{left + PAD:.1f}" y="{top + 16:.1f}">{escape(first)}</text>'
    )
    for line, text in enumerate(rest):
        y = top + 31 + 14 * line
        yield f'<text class="sub" x="{left + PAD:.1f}" y="{y:.1f}">{escape(text)}</text>'
    if content is not None:
        shift = left + (width - content.layout.width) / 2
        yield from _draw_operators(item, content, (shift, top + HEAD_HEIGHT), nodes, readers)
    yield "</g>"


def _draw_operators(
    item: Item,
    content: CardContent,
    corner: tuple[float, float],
    nodes: Nodes,
    readers: Mapping[int, set[int]],
) -> Iterator[str]:
    x, y = corner
    for route in content.layout.routes:
        shifted = tuple((px + x, py + y) for px, py in route)
        yield f'<path class="edge" d="{_curve(shifted)}"/>'
    members = set(item.members)
    for stack, (left, top) in zip(content.stacks, content.layout.places, strict=True):
        width = _stack_width(stack, nodes)
        for line, index in enumerate(stack):
            node = nodes[index]
            row = y + top + ROW_HEIGHT * line
            yield (
                f'<g class="op {node.kind}"><title>{escape(_node_text(node, nodes))}</title>'
                f'<rect x="{x + left:.1f}" y="{row:.1f}" width="{width:.1f}" '
                f'height="{ROW_HEIGHT - 1}" '
                f'rx="3"/><text class="name" x="{x + left + width / 2:.1f}" y="{row + 12:.1f}" '
                f'text-anchor="middle">{escape(node.name)}</text>'
            )
            if not members.issuperset(node.reads):
                yield _memory_mark(x + left + 2, row + 3)
            if node.result or not members.issuperset(readers.get(index, ())):
                yield _memory_mark(x + left + width - 9, row + 8)
            yield "</g>"


def _memory_mark(x: float, y: float) -> str:
    """A triangle for memory access: at an operator's left it reads, at its right it writes."""
    return f'<path class="memory" d="M{x:.1f} {y:.1f}h7l-3.5 5z"/>'


def _node_text(node: GraphNode, nodes: Nodes) -> str:
    """Tooltip of a node: its name, dtype and shape, and those of its operands."""

    def tensor(node: GraphNode) -> str:
        return f"{node.dtype} {'×'.join(map(str, node.shape)) or 'scalar'}"

    reads = "; ".join(f"{nodes[s].name} {tensor(nodes[s])}" for s in node.reads[:6])
    more = " …" if len(node.reads) > 6 else ""
    return f"{node.name} {tensor(node)}" + (f"\nreads {reads}{more}" if reads else "")


def _item_name(item: Item, nodes: Nodes) -> str:
    return item.title if item.kernel else nodes[item.members[0]].name


def _line_width(moved_bytes: int) -> float:
    """Line width by the logarithm of bytes: 1 for kilobytes, 5 for gigabytes."""
    return min(5.0, max(1.0, math.log10(max(1, moved_bytes)) - 3))


def _curve(route: Sequence[tuple[float, float]]) -> str:
    """SVG path through the points that leaves and reaches each of them vertically."""
    (x, y), *rest = route
    text = [f"M{x:.1f} {y:.1f}"]
    for nx, ny in rest:
        middle = (y + ny) / 2
        text.append(
            f"V{ny:.1f}"
            if abs(nx - x) < 0.05
            else f"C{x:.1f} {middle:.1f} {nx:.1f} {middle:.1f} {nx:.1f} {ny:.1f}"
        )
        x, y = nx, ny
    return "".join(text)
