"""SVG drawing of a pass after fusion: a card for each kernel with its operators; data flows down.

Cards and the calls outside of kernels form one layered drawing; the operators in a card form
another. A chain of elementwise operators is drawn as one stack without edges.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from html import escape

from markupsafe import Markup

from nostall.core.text.plurals import pluralize
from nostall.report.fusion.layout import Layout, layered_layout
from nostall.report.units import Scale, format_bytes
from nostall.tuning.fusing.document import FusedKernel, GraphNode, Pass

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
