"""SVG picture of the forward pass of a sharding plan: operators with placements, collectives.

One row for each operator, in the order in which they run; equal operators of repeated layers are
drawn once, with their number.  Parameters and the batch are on the left.  A red line is a tensor
that a collective changes on its way; a parameter's row also names the collective of its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from nostall.parallel.sharding.cost.device_mesh import mesh_text
from nostall.parallel.sharding.graph import Edge, output_placements
from nostall.parallel.sharding.placements import Placements, is_partial, placement_text
from nostall.parallel.sharding.planners.sharding import ShardingPlan
from nostall.parallel.sharding.planners.tied import RADIUS, tie

_ROW, _TOP, _WIDTH, _BOX = 24, 76, 980, 300
_LEFT = {"parameter": 20, "input": 20, "constant": 20}
_MIDDLE = 470
_COLOURS = {"R": "#d9d9d9", "S0": "#9ecae1", "S1": "#a1d99b", "S2": "#bcbddc", "P": "#fdd0a2"}
_OTHER = "#fbb4c4"
_STYLE = (
    ":root{--paper:#ffffff;--ink:#000000;--soft:#333333}"
    "@media(prefers-color-scheme:dark){:root{--paper:#171d25;--ink:#dfe6ee;--soft:#b8c2cc}}"
    ".paper{fill:var(--paper)}text{fill:var(--ink)}.in{fill:#000000}"
    ".soft{fill:var(--soft);stroke:var(--paper);stroke-width:3;paint-order:stroke}"
)
"""Colours of the paper and of texts, which follow the dark mode of the reader."""
MAX_ROWS = 400
"""Operators that are drawn; the picture says how many are left out."""


@dataclass(frozen=True)
class _Row:
    """An operator in the picture."""

    operator: int
    count: int
    x: int
    y: int


def sharding_picture(plan: ShardingPlan) -> str:
    """The picture as the text of an SVG file."""
    graph = plan.prices.graph
    rows, members, left_out = _rows(plan)
    place = {member: row for row in rows for member in members[row.operator]}
    collectives = _collectives(plan)
    branches = {e.consumer: e for e in graph.edges if graph.operators[e.consumer].kind == "branch"}
    lines = []
    for edge in graph.edges:
        # The first of equal operators stands for all as a reader.
        if edge.consumer not in members or graph.operators[edge.consumer].kind == "parameter":
            continue
        producer, kinds = _origin(edge, branches, collectives)
        if producer in place and edge.consumer in place:
            lines.append(_line(place[producer], place[edge.consumer], ", ".join(kinds)))
    gradients = {
        edge.consumer: ", ".join(kinds)
        for edge, kinds in collectives.items()
        if graph.operators[edge.consumer].kind == "parameter"
    }
    boxes = [_box(plan, row, gradients.get(row.operator, "")) for row in rows]
    height = _TOP + _ROW * (len(rows) + 1)
    title = (
        f"{graph.name} on a mesh of {mesh_text(graph.mesh)}: {plan.name}, modelled step "
        f"{plan.step_s * 1e3:.4g} ms"
    )
    note = f"{left_out} operators are left out" if left_out else ""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        f'<text x="20" y="22" font-size="14">{escape(title)}</text>',
        *_legend(),
        f'<text x="{_MIDDLE}" y="{_TOP - 12}">{escape(note)}</text>',
        *lines, *boxes, "</svg>", "",
    ])  # fmt: skip


def _collectives(plan: ShardingPlan) -> dict[Edge, tuple[str, ...]]:
    """The kinds of collectives on each edge."""
    found: dict[Edge, tuple[str, ...]] = {}
    for edge, priced in plan.cost.collectives:
        found[edge] = (*found.get(edge, ()), priced.step.kind)
    return found


def _origin(
    edge: Edge, branches: Mapping[int, Edge], collectives: Mapping[Edge, tuple[str, ...]]
) -> tuple[int, tuple[str, ...]]:
    """The operator that computes the tensor of an edge, and the collectives on its way.

    ``branches``: the input of each branch. A branch is not drawn: it returns its input.
    """
    kinds = collectives.get(edge, ())
    while edge.producer in branches:
        edge = branches[edge.producer]
        kinds = (*collectives.get(edge, ()), *kinds)
    return edge.producer, kinds


def _rows(plan: ShardingPlan) -> tuple[list[_Row], dict[int, tuple[int, ...]], int]:
    """Rows of the classes of operators in the forward pass.

    The first operator of each class, its class, and how many classes are not drawn.
    """
    graph = plan.prices.graph
    tied = tie(graph, plan.assignment, RADIUS)
    chosen = [
        members
        for members in tied.members
        if graph.operators[members[0]].is_forward and graph.operators[members[0]].kind != "branch"
    ]
    chosen.sort(key=lambda members: members[0])
    rows = [
        _Row(members[0], len(members), _LEFT.get(graph.operators[members[0]].kind, _MIDDLE),
             _TOP + _ROW * number)
        for number, members in enumerate(chosen[:MAX_ROWS])
    ]  # fmt: skip
    return rows, {members[0]: tuple(members) for members in chosen}, len(chosen) - len(rows)


def _box(plan: ShardingPlan, row: _Row, gradient: str) -> str:
    graph = plan.prices.graph
    operator = graph.operators[row.operator]
    placements: Placements = ()
    shape = ""
    if operator.outputs:
        placements = output_placements(graph, plan.assignment, operator.outputs[0])
        shape = "x".join(map(str, graph.tensors[operator.outputs[0]].shape))
    name = operator.target.removeprefix("aten.").removesuffix(".default")
    text = f"{name} {shape}" + (f" ({row.count})" if row.count > 1 else "")
    after = placement_text(placements) + (f"; gradient: {gradient}" if gradient else "")
    return (
        f'<g><rect x="{row.x}" y="{row.y}" width="{_BOX}" height="{_ROW - 5}" rx="3" '
        f'fill="{_colour(placements)}" stroke="#636363"/>'
        f'<text class="in" x="{row.x + 6}" y="{row.y + 13}">{escape(text[:48])}</text>'
        f'<text class="soft" x="{row.x + _BOX + 6}" y="{row.y + 13}">{escape(after)}</text></g>'
    )


def _colour(placements: Placements) -> str:
    """That of the first placement that is not replicated."""
    first = next((p for p in placements if p != "R"), "R")
    return _COLOURS.get("P" if is_partial(first) else first, _OTHER)


def _line(source: _Row, target: _Row, collective: str) -> str:
    """A curve from a tensor's operator to one that reads it."""
    is_left = source.x != target.x
    x1, x2 = (source.x + _BOX, target.x) if is_left else (source.x, target.x)
    y1, y2 = source.y + _ROW / 2 - 2, target.y + _ROW / 2 - 2
    bend = 40 if is_left else -min(90.0, 12 + abs(y2 - y1) / 4)
    x3 = x2 - bend if is_left else x2 + bend
    style = 'stroke="#d62728" stroke-width="1.8"' if collective else 'stroke="#bdbdbd"'
    curve = f"M{x1},{y1} C{x1 + bend},{y1} {x3},{y2} {x2},{y2}"
    tip = f"<title>{escape(collective)}</title>" if collective else ""
    return f'<path d="{curve}" fill="none" {style}>{tip}</path>'


def _legend() -> list[str]:
    names = {
        "R": "replicated",
        "S0": "split, axis 0",
        "S1": "split, axis 1",
        "S2": "split, axis 2",
        "P": "partial",
    }
    parts = []
    for number, (placement, name) in enumerate(names.items()):
        x = 20 + 110 * number
        parts.append(
            f'<rect x="{x}" y="34" width="14" height="14" fill="{_COLOURS[placement]}" '
            f'stroke="#636363"/><text x="{x + 20}" y="45">{name}</text>'
        )
    x = 20 + 110 * len(names)
    parts.append(
        f'<path d="M{x},41 h24" stroke="#d62728" stroke-width="1.8"/>'
        f'<text x="{x + 30}" y="45">collective</text>'
    )
    return parts
