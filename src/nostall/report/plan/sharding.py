"""Summary of a sharding plan for the terminal: tables of placements and collectives, sentences.

SVG picture of the forward pass of a sharding plan: operators with placements, collectives.

One row for each operator, in the order in which they run; equal operators of repeated layers are
drawn once, with their number.  Parameters and the batch are on the left.  A red line is a tensor
that a collective changes on its way; a parameter's row also names the collective of its gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

from nostall.core.text.plurals import pluralize
from nostall.parallel.sharding.cost.device_mesh import mesh_text
from nostall.parallel.sharding.graph import Edge, output_placements
from nostall.parallel.sharding.layer_table import parameter_rows
from nostall.parallel.sharding.placements import Placements, is_partial, placement_text
from nostall.parallel.sharding.plan_file import collective_rows
from nostall.parallel.sharding.planners.sharding import ShardingPlan
from nostall.parallel.sharding.planners.tied import RADIUS, tie
from nostall.report.plan.gantt import plan_page
from nostall.report.units import Scale, format_bytes

_GIB = 2**30
_EQUAL = 1 - 1e-9
"""Speed-ups from here on are at least 1; differences below are rounding."""
Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def placement_table(plan: ShardingPlan) -> Table:
    """Column names and one row of cells for each group of equal parameters."""
    columns: tuple[str, ...] = ("parameter", "shape", "kept as", "read as", "result", "a GPU")
    rows: list[tuple[str, ...]] = [
        (
            row.name if row.count == 1 else f"{row.name} ({row.count})",
            "x".join(map(str, row.shape)),
            placement_text(row.placement),
            placement_text(row.read),
            placement_text(row.result),
            format_bytes(row.local_bytes * row.count),
        )
        for row in parameter_rows(plan)
    ]
    return columns, rows


def collective_table(plan: ShardingPlan) -> Table:
    """Column names and one row of cells for each kind of collective and mesh dimension."""
    time = Scale("s", plan.step_s)
    columns: tuple[str, ...] = (
        "collective",
        "mesh dimension",
        "calls",
        "bytes",
        f"modelled, {time.unit}",
    )
    rows: list[tuple[str, ...]] = [
        (
            str(row["kind"]),
            str(row["mesh_dim"]),
            str(row["calls"]),
            format_bytes(row["bytes"]),
            time.number(row["seconds"]),
        )
        for row in collective_rows(plan)
    ]
    return columns, rows


def runner_up_table(plan: ShardingPlan, others: Sequence[ShardingPlan]) -> Table:
    """Column names and one row of cells for the plan and each runner-up."""
    time = Scale("s", plan.step_s)
    memory = min(plan.prices.mesh.cluster.memory)
    columns: tuple[str, ...] = (
        "plan",
        "mesh",
        f"modelled step, {time.unit}",
        "memory, GiB",
        "fits",
    )
    rows: list[tuple[str, ...]] = [
        (
            own.name,
            mesh_text(own.prices.graph.mesh),
            time.number(own.step_s),
            f"{own.memory.peak / _GIB:.3g}",
            "yes" if own.fits(memory) else "no",
        )
        for own in (plan, *others)
    ]
    return columns, rows


def sharding_lead(plan: ShardingPlan, others: Sequence[ShardingPlan]) -> str:
    """The modelled step in a sentence, beside data parallelism if that is one of ``others``."""
    time = Scale("s", plan.step_s)
    text = f"modelled step {time(plan.step_s)}"
    peer = data_parallel(others)
    if peer is None or plan.name == peer.name:
        return text
    gain = f"{peer.step_s / plan.step_s:.2f}"
    words = "no faster than" if gain == "1.00" else f"{gain}× as fast as"
    return f"{text}, {words} data parallelism ({time(peer.step_s)})"


def data_parallel(plans: Sequence[ShardingPlan]) -> ShardingPlan | None:
    """The fastest plan of data parallelism; None without one."""
    found = [plan for plan in plans if plan.name == "data-parallel"]
    return min(found, key=lambda plan: plan.step_s, default=None)


def sharding_cards(
    plan: ShardingPlan, others: Sequence[ShardingPlan]
) -> list[tuple[str, str, str]]:
    """Label, number and detail of the plan's headlines, beside data parallelism if it is given."""
    time, peer = Scale("s", plan.step_s), data_parallel(others)
    one_gpu_s, exposed = plan.one_gpu_s, time(plan.times.exposed_s)

    def own(each: ShardingPlan) -> tuple[str, str, str]:
        speedup, peak = one_gpu_s / each.step_s, each.memory.peak / _GIB
        return time(each.step_s), f"{speedup:.2f}×", f"{peak:.3g} GiB"

    beside = [f"data parallelism: {value}" for value in own(peer)] if peer else ["", "", ""]
    names = ("step", "speed-up over one GPU", "memory of a GPU")
    rows = zip(names, own(plan), beside, strict=True)
    collectives = time(plan.times.collectives_s)
    return [
        *((f"{name}, modelled", value, detail) for name, value, detail in rows),
        ("collectives, modelled", collectives, f"{exposed} are not hidden behind operators"),
    ]


def sharding_sentences(plan: ShardingPlan) -> list[str]:
    """Lines on the modelled step, the proof of the plan, its memory and its limits."""
    time, graph = Scale("s", plan.step_s), plan.prices.graph
    memory = min(plan.prices.mesh.cluster.memory) / _GIB
    lines = [
        f"modelled step {time(plan.step_s)}: operators {time(plan.times.operators_s)}, collectives "
        f"{time(plan.times.collectives_s)}, of which {time(plan.times.exposed_s)} are not hidden "
        f"behind operators; the optimiser takes {time(plan.update_s)} more",
        f"modelled memory of a GPU {plan.memory.peak / _GIB:.3g} of {memory:.3g} GiB: "
        f"{plan.memory.state / _GIB:.3g} GiB of parameter state, "
        f"{plan.memory.tensors / _GIB:.3g} GiB of other tensors",
    ]
    lines.append(speedup_sentence(plan.one_gpu_s / plan.step_s))
    if plan.is_proven:
        lines.append(
            "the plan meets its bound: under this model, no plan that treats equal layers equally "
            "is faster"
        )
    elif plan.bound_s:
        lines.append(
            f"under this model, a plan that treats equal layers equally takes {time(plan.bound_s)} "
            "at least"
        )
    if not plan.prices.mesh.cluster.latency.any():
        lines.append(
            "note: the cluster file has no latency, so small collectives take longer than "
            "modelled; measure it and add latency_us"
        )
    if graph.without_rule:
        names = [f"{name} ({count})" for name, count in Counter(graph.without_rule).most_common(5)]
        lines.append(
            f"note: {pluralize(len(graph.without_rule), 'operator')} without a sharding rule run "
            f"replicated: {', '.join(names)}"
        )
    return lines


def speedup_sentence(speedup: float) -> str:
    """A line on the modelled speed-up of a plan over one GPU; it says if that is below 1."""
    line = f"modelled speed-up {speedup:.4g}x over one GPU"
    return line if speedup >= _EQUAL else f"{line}: this plan is SLOWER than one GPU"


_ROW, _TOP, _WIDTH, _BOX = 24, 151, 980, 250
_LEFT = {"parameter": 20, "input": 20, "constant": 20}
_MIDDLE = 510
_LETTER = 5.6
"""Pixels of a letter of the labels."""
_COLOURS = {"R": "#d9d9d9", "S0": "#9ecae1", "S1": "#a1d99b", "S2": "#bcbddc", "P": "#fdd0a2"}
_OTHER = "#fbb4c4"
_STYLE = (
    ".sharding{--paper:#ffffff;--ink:#000000;--soft:#333333}"
    "@media(prefers-color-scheme:dark){"
    ".sharding{--paper:#171d25;--ink:#dfe6ee;--soft:#b8c2cc}}"
    ".sharding .paper{fill:var(--paper)}.sharding text{fill:var(--ink)}"
    ".sharding .in{fill:#000000}"
    ".sharding .soft{fill:var(--soft);stroke:var(--paper);stroke-width:3;paint-order:stroke}"
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


def sharding_picture(plan: ShardingPlan, others: Sequence[ShardingPlan] = ()) -> str:
    """The picture as the text of an SVG file.

    Its header compares the plan with data parallelism, if that is one of ``others``.
    """
    graph = plan.prices.graph
    rows, members, left_out = _rows(plan)
    place = {member: row for row in rows for member in members[row.operator]}
    collectives = _collectives(plan)
    branches = {e.consumer: e for e in graph.edges if graph.operators[e.consumer].kind == "branch"}
    gradients = {
        edge.consumer: ", ".join(kinds)
        for edge, kinds in collectives.items()
        if graph.operators[edge.consumer].kind == "parameter"
    }
    after = {row.operator: _label(plan, row, gradients.get(row.operator, "")) for row in rows}
    lines = []
    for edge in graph.edges:
        # The first of equal operators stands for all as a reader.
        if edge.consumer not in members or graph.operators[edge.consumer].kind == "parameter":
            continue
        producer, kinds = _origin(edge, branches, collectives)
        if producer in place and edge.consumer in place:
            label = after[place[producer].operator]
            lines.append(_line(place[producer], place[edge.consumer], ", ".join(kinds), label))
    boxes = [_box(plan, row, after[row.operator]) for row in rows]
    height = _TOP + _ROW * (len(rows) + 1)
    title = f"{graph.name} on a mesh of {mesh_text(graph.mesh)}: {plan.name}"
    note = f"; {left_out} operators are left out" if left_out else ""
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'class="sharding" width="{_WIDTH}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f"<title>{escape(title)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        f'<text x="20" y="22" font-size="14">{escape(title)}</text>',
        *(
            f'<text x="20" y="{40 + 15 * number}">{escape(part)}</text>'
            for number, part in enumerate((sharding_lead(plan, others) + note).split(", ", 1))
        ),
        *_legend(),
        *lines, *boxes, "</svg>", "",
    ])  # fmt: skip


def sharding_page(plan: ShardingPlan, others: Sequence[ShardingPlan], launch: str) -> str:
    """The picture within an HTML page; ``launch`` is the command that runs the plan, or empty."""
    graph = plan.prices.graph
    return plan_page(
        title=f"{graph.name} on {plan.prices.mesh.cluster.name}",
        lead=f"{sharding_lead(plan, others).capitalize()}.",
        cards=sharding_cards(plan, others),
        next_command=launch,
        next_reason="Runs the plan, and measures what this page models.",
        first=f"Planner {plan.name}, mesh {mesh_text(graph.mesh)}. Kept as S(0): split along axis "
        "0, one part on each GPU; R: replicated. A red line is a collective.",
        figure_name="Placements",
        figure_note="forward pass; scroll to see all of it",
        figure=Markup(sharding_picture(plan, others)),
        tables=[
            ("Parameters", "", *placement_table(plan), 5),
            ("Collectives of a step", "", *collective_table(plan), 1),
            ("Plans", "", *runner_up_table(plan, others), 2),
        ],
        sentences=sharding_sentences(plan),
    )


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


def _placements(plan: ShardingPlan, row: _Row) -> Placements:
    """Those of the first result of an operator; none without one."""
    graph = plan.prices.graph
    outputs = graph.operators[row.operator].outputs
    return output_placements(graph, plan.assignment, outputs[0]) if outputs else ()


def _label(plan: ShardingPlan, row: _Row, gradient: str) -> str:
    """The text after a box."""
    text = placement_text(_placements(plan, row))
    return text + (f"; gradient: {gradient}" if gradient else "")


def _box(plan: ShardingPlan, row: _Row, after: str) -> str:
    graph = plan.prices.graph
    operator = graph.operators[row.operator]
    placements = _placements(plan, row)
    shape = ""
    if operator.outputs:
        shape = "x".join(map(str, graph.tensors[operator.outputs[0]].shape))
    name = operator.target.removeprefix("aten.").removesuffix(".default")
    text = f"{name} {shape}" + (f" ({row.count})" if row.count > 1 else "")
    return (
        f"<g><title>{escape(text)}</title>"
        f'<rect x="{row.x}" y="{row.y}" width="{_BOX}" height="{_ROW - 5}" rx="3" '
        f'fill="{_colour(placements)}" stroke="#636363"/>'
        f'<text class="in" x="{row.x + 6}" y="{row.y + 13}">{escape(text[:41])}</text>'
        f'<text class="soft" x="{row.x + _BOX + 6}" y="{row.y + 13}">{escape(after)}</text></g>'
    )


def _colour(placements: Placements) -> str:
    """That of the first placement that is not replicated."""
    first = next((p for p in placements if p != "R"), "R")
    return _COLOURS.get("P" if is_partial(first) else first, _OTHER)


def _line(source: _Row, target: _Row, collective: str, label: str) -> str:
    """A curve from a tensor's operator to one that reads it; it begins after the box's label."""
    is_left = source.x != target.x
    end = min(source.x + _BOX + 10 + _LETTER * len(label), _MIDDLE - 45)
    x1, x2 = (round(end), target.x) if is_left else (source.x, target.x)
    y1, y2 = source.y + _ROW / 2 - 2, target.y + _ROW / 2 - 2
    bend = 40 if is_left else -min(90.0, 12 + abs(y2 - y1) / 4)
    x3 = x2 - bend if is_left else x2 + bend
    style = 'stroke="#d62728" stroke-width="1.8"' if collective else 'stroke="#bdbdbd"'
    curve = f"M{x1},{y1} C{x1 + bend},{y1} {x3},{y2} {x2},{y2}"
    tip = f"<title>{escape(collective)}</title>" if collective else ""
    return f'<path d="{curve}" fill="none" {style}>{tip}</path>'


def _legend() -> list[str]:
    """Three rows that are no wider than the screen of a telephone, and the names of the columns."""
    names = {
        "R": "R: replicated",
        "S0": "S(0): split along axis 0",
        "S1": "S(1): split along axis 1",
        "S2": "S(2): split along axis 2",
        "P": "P, A: parts of a sum, a mean",
    }
    parts = [
        '<path d="M200,116 h14" stroke="#d62728" stroke-width="1.8"/>'
        '<text x="218" y="120">collective on the way</text>'
        f'<text x="20" y="{_TOP - 8}" class="soft">parameters and batch</text>'
        f'<text x="{_MIDDLE}" y="{_TOP - 8}" class="soft">operators</text>'
    ]
    for number, (placement, name) in enumerate(names.items()):
        x, y = 20 + 180 * (number % 2), 69 + 20 * (number // 2)
        parts.append(
            f'<rect x="{x}" y="{y}" width="14" height="14" fill="{_COLOURS[placement]}" '
            f'stroke="#636363"/><text x="{x + 18}" y="{y + 11}">{name}</text>'
        )
    return parts
