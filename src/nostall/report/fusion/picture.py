"""A fusion plan as one SVG: a card for each kernel with its operators inside, data flows downward.

Cards and the calls that stay as they are form one layered drawing, the operators of a card another
inside it.  Elementwise operators that only hand on to the next stand directly upon each other.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import TopologicalSorter
from html import escape

from markupsafe import Markup

from nostall.report.fusion.layout import Layout, layered
from nostall.report.units import Scale, amount, several
from nostall.tuning.fusing.document import Drawn, FusedKernel, Pass

MOST_DRAWN = 1000
"""Operators of a pass; of more, cards say how many they hold and draw none."""
MARGIN, PAD, HEAD = 12, 10, 54
ROW, PILL = 17, 24
LONGEST = 48
"""Letters of a card's first line."""
LETTER = 6.9
"""Width of a letter at the size of the page's code."""
WIDEST, WIDEST_CARD = 1500.0, 460.0
_OUTER, _INNER = (26.0, 34.0), (14.0, 20.0)

Box = tuple[float, float, float, float]
"""Left, top, width, height."""


@dataclass(frozen=True)
class Item:
    """What the outer drawing places: a kernel (``number`` counts from 1) or a single call."""

    members: tuple[int, ...]
    kernel: FusedKernel | None = None
    number: int = 0
    measured: float | None = None

    @property
    def title(self) -> str:
        return f"K{self.number}" if self.kernel else "call"


@dataclass(frozen=True)
class Inside:
    """The operators of a card: stacks, and where they stand."""

    stacks: tuple[tuple[int, ...], ...]
    layout: Layout


def _nothing(kernel: FusedKernel) -> float | None:
    return None


def picture(found: Pass, measured: Callable[[FusedKernel], float | None] = _nothing) -> Markup:
    """The plan of a pass; times are modelled unless ``measured`` knows one in seconds."""
    nodes = {node.index: node for node in found.nodes}
    items = [
        replace(item, measured=measured(item.kernel)) if item.kernel else item
        for item in _items(found, nodes)
    ]
    flows = _flows(items, nodes)
    inner = {at: _inside(item, nodes) for at, item in enumerate(items) if _open(item, found)}
    sizes = [_size(item, inner.get(at), nodes) for at, item in enumerate(items)]
    drawing = layered(sizes, list(flows), most_width=WIDEST, gap=_OUTER)
    width, height = drawing.width + 2 * MARGIN, drawing.height + 2 * MARGIN
    readers = _readers(found.nodes)
    parts = [
        f'<svg class="fusion" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="{-MARGIN} {-MARGIN} {width:.0f} {height:.0f}" role="img" '
        f'aria-label="fusion plan, {escape(found.name)}">'
    ]
    for (edge, moved), route in zip(flows.items(), drawing.routes, strict=True):
        first, second = (_called(items[end], nodes) for end in edge)
        parts.append(
            f'<path class="flow" data-from="{edge[0]}" data-to="{edge[1]}" '
            f'stroke-width="{_thickness(moved):.1f}" d="{_curve(route)}">'
            f"<title>{escape(first)} → {escape(second)}: {amount(moved)}</title></path>"
        )
    for at, (item, place, size) in enumerate(zip(items, drawing.places, sizes, strict=True)):
        parts += _item(at, item, (*place, *size), inner.get(at), nodes, readers)
    return Markup("".join([*parts, "</svg>"]))


def _open(item: Item, found: Pass) -> bool:
    return item.kernel is not None and found.operators <= MOST_DRAWN


def _items(found: Pass, nodes: Mapping[int, Drawn]) -> list[Item]:
    """Kernels, operators without one and other calls, so that readers come later."""
    kernels = [Item(k.operators, k, at + 1) for at, k in enumerate(found.kernels)]
    single = [n.index for n in found.nodes if n.kind == "opaque"] + list(found.alone)
    items = [*kernels, *(Item((index,)) for index in single)]
    holder = {index: at for at, item in enumerate(items) for index in item.members}
    before: dict[int, set[int]] = {at: set() for at in range(len(items))}
    for at, item in enumerate(items):
        for index in item.members:
            before[at] |= {holder[s] for s in nodes[index].reads if s in holder} - {at}
    return [items[at] for at in TopologicalSorter(before).static_order()]


def _flows(items: Sequence[Item], nodes: Mapping[int, Drawn]) -> dict[tuple[int, int], int]:
    """Bytes that pass from one item to another."""
    holder = {index: at for at, item in enumerate(items) for index in item.members}
    passed: defaultdict[tuple[int, int], set[int]] = defaultdict(set)
    for at, item in enumerate(items):
        for index in item.members:
            for source in nodes[index].reads:
                if source in holder and holder[source] != at:
                    passed[holder[source], at].add(source)
    return {edge: sum(nodes[s].bytes for s in sources) for edge, sources in passed.items()}


def _readers(nodes: Iterable[Drawn]) -> Mapping[int, set[int]]:
    found: defaultdict[int, set[int]] = defaultdict(set)
    for node in nodes:
        for source in node.reads:
            found[source].add(node.index)
    return found


# -- inside a card ---------------------------------------------------------------------------------


def _inside(item: Item, nodes: Mapping[int, Drawn]) -> Inside:
    stacks = _stacks(item, nodes)
    holder = {index: at for at, stack in enumerate(stacks) for index in stack}
    edges = dict.fromkeys(
        (holder[source], at)
        for at, stack in enumerate(stacks)
        for index in stack
        for source in nodes[index].reads
        if source in holder and holder[source] != at
    )
    sizes = [(_stack_width(stack, nodes), ROW * len(stack)) for stack in stacks]
    return Inside(stacks, layered(sizes, list(edges), most_width=WIDEST_CARD, gap=_INNER))


def _stacks(item: Item, nodes: Mapping[int, Drawn]) -> tuple[tuple[int, ...], ...]:
    """Operators in topological order; an elementwise one that is the only reader of an elementwise
    one, and reads nothing else of the kernel, stands in its stack."""
    inside = set(item.members)
    readers: defaultdict[int, set[int]] = defaultdict(set)
    for index in item.members:
        for source in nodes[index].reads:
            readers[source].add(index)
    stacks: list[list[int]] = []
    place: dict[int, int] = {}
    for index in item.members:
        own = [source for source in nodes[index].reads if source in inside]
        joins = len(own) == 1 and readers[own[0]] == {index}
        if joins and all(nodes[i].kind in ("light", "heavy") for i in (index, own[0])):
            place[index] = place[own[0]]
            stacks[place[index]].append(index)
        else:
            place[index] = len(stacks)
            stacks.append([index])
    # A stack ends later than it begins: number them by their last operator's needs.
    before = {
        at: {place[s] for i in stack for s in nodes[i].reads if s in inside} - {at}
        for at, stack in enumerate(stacks)
    }
    return tuple(tuple(stacks[at]) for at in TopologicalSorter(before).static_order())


def _stack_width(stack: Sequence[int], nodes: Mapping[int, Drawn]) -> float:
    return max(52.0, 26 + LETTER * max(len(nodes[index].name) for index in stack))


# -- drawing ---------------------------------------------------------------------------------------


def _size(item: Item, inside: Inside | None, nodes: Mapping[int, Drawn]) -> tuple[float, float]:
    if item.kernel is None:
        return 22 + LETTER * len(nodes[item.members[0]].name), PILL
    width = 2 * PAD + LETTER * max(map(len, _head(item)))
    if inside is None:
        return width, HEAD + PAD
    return max(width, inside.layout.width + 2 * PAD), HEAD + inside.layout.height + PAD


def _head(item: Item) -> tuple[str, str, str]:
    kernel = item.kernel
    assert kernel is not None
    scale = Scale("s", kernel.seconds_after)
    known = "" if item.measured is None else f", measured {scale(item.measured)}"
    saved = f"{amount(kernel.bytes_before)} → {amount(kernel.bytes_after)}"
    return (
        f"{item.title} {_cut(kernel.plan)}",
        f"{several(len(kernel.operators), 'operator')}, {several(len(kernel.launches), 'launch')}",
        f"{saved}, {scale(kernel.seconds_after)}" + known,
    )


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _item(
    at: int,
    item: Item,
    box: Box,
    inside: Inside | None,
    nodes: Mapping[int, Drawn],
    readers: Mapping[int, set[int]],
) -> Iterator[str]:
    left, top, width, height = box
    if item.kernel is None:
        node = nodes[item.members[0]]
        kind = "opaque" if node.kind == "opaque" else f"alone {node.kind}"
        yield (
            f'<g class="item" data-item="{at}"><title>{escape(_told(node, nodes))}</title>'
            f'<rect class="pill {kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}" rx="12"/>'
            f'<text class="name" x="{left + width / 2:.1f}" y="{top + 16:.1f}" '
            f'text-anchor="middle">{escape(node.name)}</text></g>'
        )
        return
    first, *rest = _head(item)
    yield (
        f'<g class="item" data-item="{at}"><rect class="card-box s-{item.kernel.scheme}" '
        f'x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="8">'
        f"<title>{escape(item.kernel.name)}</title></rect>"
        f'<text class="head" x="{left + PAD:.1f}" y="{top + 16:.1f}">{escape(first)}</text>'
    )
    for line, text in enumerate(rest):
        y = top + 31 + 14 * line
        yield f'<text class="sub" x="{left + PAD:.1f}" y="{y:.1f}">{escape(text)}</text>'
    if inside is not None:
        shift = left + (width - inside.layout.width) / 2
        yield from _operators(item, inside, (shift, top + HEAD), nodes, readers)
    yield "</g>"


def _operators(
    item: Item,
    inside: Inside,
    corner: tuple[float, float],
    nodes: Mapping[int, Drawn],
    readers: Mapping[int, set[int]],
) -> Iterator[str]:
    x, y = corner
    for route in inside.layout.routes:
        moved = tuple((px + x, py + y) for px, py in route)
        yield f'<path class="edge" d="{_curve(moved)}"/>'
    members = set(item.members)
    for stack, (left, top) in zip(inside.stacks, inside.layout.places, strict=True):
        width = _stack_width(stack, nodes)
        for line, index in enumerate(stack):
            node = nodes[index]
            row = y + top + ROW * line
            yield (
                f'<g class="op {node.kind}"><title>{escape(_told(node, nodes))}</title>'
                f'<rect x="{x + left:.1f}" y="{row:.1f}" width="{width:.1f}" height="{ROW - 1}" '
                f'rx="3"/><text class="name" x="{x + left + width / 2:.1f}" y="{row + 12:.1f}" '
                f'text-anchor="middle">{escape(node.name)}</text>'
            )
            if not members.issuperset(node.reads):
                yield _mark(x + left + 2, row + 3)
            if node.result or not members.issuperset(readers.get(index, ())):
                yield _mark(x + left + width - 9, row + 8)
            yield "</g>"


def _mark(x: float, y: float) -> str:
    """A triangle downward: a value comes from memory (left) or goes there (right)."""
    return f'<path class="memory" d="M{x:.1f} {y:.1f}h7l-3.5 5z"/>'


def _told(node: Drawn, nodes: Mapping[int, Drawn]) -> str:
    """All of a node, for the pointer."""

    def shape(one: Drawn) -> str:
        return f"{one.dtype} {'×'.join(map(str, one.shape)) or 'scalar'}"

    reads = "; ".join(f"{nodes[s].name} {shape(nodes[s])}" for s in node.reads[:6])
    more = " …" if len(node.reads) > 6 else ""
    return f"{node.name} {shape(node)}" + (f"\nreads {reads}{more}" if reads else "")


def _called(item: Item, nodes: Mapping[int, Drawn]) -> str:
    return item.title if item.kernel else nodes[item.members[0]].name


def _thickness(moved: int) -> float:
    """1 for kilobytes, 5 for gigabytes."""
    return min(5.0, max(1.0, math.log10(max(1, moved)) - 3))


def _curve(route: Sequence[tuple[float, float]]) -> str:
    """Through the points, leaving and reaching each of them vertically."""
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
