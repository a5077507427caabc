"""Tests of the fusion report: the layered layout, the SVG drawing and the page."""

from __future__ import annotations

import html
import random
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nostall.core import Run
from nostall.core.errors import BadRun
from nostall.fusion.graph.operations import Kind
from nostall.report.fusion.page import is_fusion, write_page
from nostall.report.fusion.picture import MAX_DRAWN, draw_pass, layered_layout
from nostall.tuning.fusing.document import (
    FILE,
    Binary,
    Document,
    FusedKernel,
    GraphNode,
    Pass,
    ReasonCount,
    Schedules,
    TunedBinary,
    count_reasons,
)

ROOT = Path(__file__).resolve().parents[4]
GAP = (10.0, 20.0)
MAX_WIDTH = 300.0


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[tuple[float, float]], list[tuple[int, int]]]:
    """Box sizes and edges of a random acyclic graph."""
    rng = random.Random(draw(st.integers(0, 2**32)))
    count = draw(st.integers(1, 25))
    sizes = [(rng.uniform(5, 120), rng.uniform(5, 60)) for _ in range(count)]
    pairs = [(a, b) for b in range(count) for a in range(b)]
    return sizes, [pair for pair in pairs if rng.random() < 0.15]


@settings(max_examples=30, deadline=None)
@given(graphs())
def test_boxes_do_not_overlap_and_readers_are_below(
    graph: tuple[list[tuple[float, float]], list[tuple[int, int]]],
) -> None:
    sizes, edges = graph
    layout = layered_layout(sizes, edges, max_width=MAX_WIDTH, gap=GAP)
    boxes = [(*place, *size) for place, size in zip(layout.places, sizes, strict=True)]
    for at, (x, y, width, height) in enumerate(boxes):
        assert -1e-6 <= x <= layout.width - width + 1e-6
        assert 0 <= y <= layout.height - height + 1e-6
        for other_x, other_y, other_width, other_height in boxes[:at]:
            is_beside = x + width <= other_x + 1e-6 or other_x + other_width <= x + 1e-6
            assert is_beside or y + height <= other_y or other_y + other_height <= y
    for top in {y for _, y, _, _ in boxes}:
        row = sorted(box for box in boxes if box[1] == top)
        used = sum(box[2] for box in row) + GAP[0] * (len(row) - 1)
        assert used <= MAX_WIDTH + 1e-6
        assert all(a[0] + a[2] + GAP[0] <= b[0] + 1e-6 for a, b in pairwise(row))
    for (first, second), route in zip(edges, layout.routes, strict=True):
        assert boxes[first][1] + boxes[first][3] < boxes[second][1]
        heights = [y for _, y in route]
        assert heights == sorted(heights)
        for (x, y), box in ((route[0], boxes[first]), (route[-1], boxes[second])):
            assert x == pytest.approx(box[0] + box[2] / 2)
            assert y in (pytest.approx(box[1]), pytest.approx(box[1] + box[3]))


def test_layout_avoids_crossings() -> None:
    """Two independent chains with interleaved numbers become two straight columns."""
    edges = [(0, 3), (1, 2), (2, 5), (3, 4)]
    layout = layered_layout([(40.0, 20.0)] * 6, edges, max_width=MAX_WIDTH, gap=GAP)
    first, second = [0, 3, 4], [1, 2, 5]
    for chain in (first, second):
        assert len({round(layout.places[node][0], 3) for node in chain}) == 1


def node(index: int, name: str, kind: Kind, *reads: int, result: bool = False) -> GraphNode:
    return GraphNode(
        index=index,
        name=name,
        kind=kind,
        shape=(64, 500),
        dtype="float16",
        reads=reads,
        bytes=64000,
        result=result,
    )


def kernel(name: str, operators: tuple[int, ...], scheme: str = "block") -> FusedKernel:
    return FusedKernel(
        name=name,
        operators=operators,
        scheme=scheme,
        plan=f"{scheme} 1x512, 4 warps",
        launches=(name,),
        source=f"kernels/{name}.py",
        bytes_before=1000,
        bytes_after=100,
        seconds_before=2e-5,
        seconds_after=3e-6,
        schedules=Schedules(legal=3, next_best=(), refused=()),
    )


def make_pass(nodes: tuple[GraphNode, ...], kernels: tuple[FusedKernel, ...], *alone: int) -> Pass:
    return Pass(
        name="forward",
        nodes=nodes,
        kernels=kernels,
        alone=alone,
        taken=len(nodes),
        refused=(ReasonCount(reason="random <numbers>", count=2, what="aten.rand.default"),),
        splits=(),
        no_kernel=(),
        seconds_unfused=2e-5,
        seconds_alone=1e-6 * len(alone),
        greedy_kernels=len(kernels),
        greedy_seconds=3e-6,
        notes=(),
    )


SMALL = make_pass(
    (
        node(0, "input", "input"),
        node(1, "mul", "light", 0),
        node(2, "exp", "heavy", 1),
        node(3, "sum", "reduce", 2),
        node(4, "mm", "opaque", 3),
        node(5, "div", "heavy", 2, 3, result=True),
        node(6, "neg", "light", 4, result=True),
    ),
    (kernel("stitched_a", (1, 2, 3, 5)),),
    6,
)


def chain_of_kernels(kernels: int, operators: int) -> Pass:
    """A chain of kernels with matrix products between them, as in a Transformer."""
    nodes = [node(0, "input", "input")]
    fused = []
    for number in range(kernels):
        first = len(nodes)
        for at in range(operators):
            reads = {len(nodes) - 1, first} if at else {len(nodes) - 1}
            kind: Kind = "reduce" if at % 5 == 3 else "light"
            name = "sum" if kind == "reduce" else "mul"
            nodes.append(node(len(nodes), name, kind, *sorted(reads)))
        fused.append(kernel(f"stitched_{number}", tuple(range(first, len(nodes)))))
        nodes.append(node(len(nodes), "mm", "opaque", len(nodes) - 1))
    return make_pass(tuple(nodes), tuple(fused))


def drawn_names(figure: str) -> list[str]:
    """Names of the operators that a figure shows."""
    root = ElementTree.fromstring(figure)
    return [text.text or "" for text in root.iter() if text.get("class") == "name"]


def test_all_operators_are_drawn_once_with_memory_marks() -> None:
    figure = str(draw_pass(SMALL))
    assert sorted(drawn_names(figure)) == ["div", "exp", "mm", "mul", "neg", "sum"]
    root = ElementTree.fromstring(figure)
    titles = [title.text or "" for title in root.iter() if title.tag == "title"]
    assert "mul float16 64×500\nreads input float16 64×500" in titles
    assert "K1 → mm: 64 kB" in titles
    # Memory marks: mul reads the input, sum and div are written.
    assert figure.count('class="memory"') == 3


@pytest.mark.parametrize(("kernels", "operators"), [(10, 30), (30, 10)])
def test_300_operators_are_all_drawn(kernels: int, operators: int) -> None:
    traced_pass = chain_of_kernels(kernels, operators)
    assert traced_pass.operators == 300
    assert len(drawn_names(str(draw_pass(traced_pass)))) == 300 + kernels


def test_large_graphs_show_only_cards() -> None:
    traced_pass = chain_of_kernels(26, 40)
    assert traced_pass.operators > MAX_DRAWN
    figure = str(draw_pass(traced_pass))
    assert set(drawn_names(figure)) == {"mm"}
    assert figure.count("40 operators") == 26


def document(*passes: Pass) -> Document:
    """A document with a compiled, an unknown and a failed kernel."""
    return Document(
        target="<f>.py:f",
        inputs=("float16[64, 500]",),
        strategy="explore",
        arch="sm_90",
        hardware="H200",
        traced_on="cpu",
        status="done",
        versions={"torch": "2"},
        passes=passes,
        binaries=(
            Binary(name="stitched_a", file="kernels/a.cubin", instructions=5),
            Binary(name="stitched_b", findings=2, first_finding="latency at b: IADD3"),
            Binary(name="stitched_c", failure="no fp8"),
        ),
        tuned=(
            TunedBinary(name="stitched_a", folder="sass/a", ratio=1.02, improved=True),
            TunedBinary(
                name="stitched_b",
                note="the verifier reports 2 findings in the compiler's own order",
            ),
        ),
    )


def test_page_needs_only_the_run_directory(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "nostall fuse <f>.py:f", {}) as run:
        assert not is_fusion(run.path)
        run.write(FILE, document(SMALL, chain_of_kernels(2, 6)).model_dump_json().encode())
    page = write_page(run.path).read_text()
    assert is_fusion(run.path)
    assert page.count("<svg") == 2 and "<f>" not in page and "random &lt;numbers&gt;" in page
    assert "all times on this page are modelled" in page
    leads = re.findall(r'class="lead">([^<]*)<', page)
    assert len(leads) == 2
    assert all(
        re.match(
            r"\w+: \d+ operators? become \d+ kernels?: modelled, [^,]* greedy fusion, "
            r"[^,]* as fast as one kernel per operator\.$", line,
        ) for line in leads
    )  # fmt: skip
    assert page.index(">nostall (") < page.index(">greedy fusion<") < page.index(">one kernel per")
    assert "2 findings, such as operations" in page and "not compiled: no fp8" in page
    assert 'href="sass/a/report.html">modelled 1.0200×' in page
    assert not re.search(r'(src|href)="(?!sass/)', page)


def test_measured_times_are_marked(tmp_path: Path) -> None:
    fusion = document(SMALL)
    timed = tuple(
        binary.model_copy(update={"measured": 4e-6 if binary.name == "stitched_a" else None})
        for binary in fusion.binaries
    )
    fusion = fusion.model_copy(update={"binaries": timed, "measured_on": "NVIDIA H200"})
    with Run.create(tmp_path / "run", "nostall fuse f.py:f", {}) as run:
        run.write(FILE, fusion.model_dump_json().encode())
    page = write_page(run.path).read_text()
    assert "unless marked as measured (NVIDIA H200)" in page
    assert "1 kB → 100 B, 3.000 µs, measured 4.000 µs" in page and "measured 4.000</td>" in page


def test_invalid_documents_are_rejected(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", "nostall fuse f.py:f", {}) as run:
        run.write(FILE, b'{"schema_version": 1}')
    with pytest.raises(BadRun, match=r"fusion\.json: target: Field required"):
        write_page(run.path)


def test_reasons_that_differ_only_in_numbers_are_merged() -> None:
    counts = count_reasons(
        [
            "a tile of 8 elements",
            "%3 = sum(%1, dims=(1,), keepdim=True) float32 8x1 is not a last step",
            "a tile of 1,024 elements",
            "a tile of 16 elements",
            "%7 = sum(%2, dims=(0,), keepdim=False) float16 scalar is not a last step",
            "nothing of the kind",
        ]
    )
    assert [(count.count, count.reason[:8]) for count in counts] == [
        (3, "a tile o"),
        (2, "%3 = sum"),
        (1, "nothing "),
    ]


def test_equal_kernels_are_grouped() -> None:
    names = (("stitched_a", (1, 2)), ("stitched_a", (3, 5)), ("stitched_b", (6,)))
    traced_pass = make_pass(SMALL.nodes, tuple(kernel(name, members) for name, members in names))
    assert [(group.name, times) for group, times in traced_pass.groups] == [
        ("stitched_a", 2),
        ("stitched_b", 1),
    ]
    assert traced_pass.launches == 3 and traced_pass.seconds == pytest.approx(9e-6)


def test_the_next_step_measures_the_first_kernel_that_the_verifier_accepts(tmp_path: Path) -> None:
    fusion = document(SMALL)
    accepted = Binary(name="stitched_a", file="sass/a.cubin", instructions=8)
    for binaries, count in (((accepted,), 1), ((), 0)):
        changed = fusion.model_copy(update={"binaries": binaries})
        with Run.create(tmp_path / f"a run {count}", "nostall fuse f.py:f", {}) as run:
            run.write(FILE, changed.model_dump_json().encode())
        page = html.unescape(write_page(run.path).read_text())
        kernel = run.path / "kernels" / "stitched_a.py"
        command = f"nostall tune '{kernel}:stitched_a' --arch {fusion.arch} --objective gpu"
        assert page.count(f"<code>{command}</code>") == count
