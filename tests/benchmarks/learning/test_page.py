"""The learning benchmark: summary of its records, page and figure."""

from __future__ import annotations

import json
from xml.etree import ElementTree

from benchmarks.learning.figure import COLOURS, figure
from benchmarks.learning.page import FIGURE, PAGE, RESULT, compared, saved, text
from benchmarks.learning.summary import PARTS, quartiles, reached, summary


def record(kernel: str, strategy: str, seed: int, *curve: tuple[int, float]) -> dict:
    return {
        "kernel": kernel,
        "strategy": strategy,
        "seed": seed,
        "ratio": curve[-1][1],
        "evaluations": 16,
        "processor_s": 2.0,
        "curve": [list(point) for point in curve],
    }


def result(*records: dict) -> dict:
    return {
        "date": "2026-01-01T00:00:00+00:00",
        "command": "c",
        "processor": "p",
        "arch": "sm_90",
        "evaluations": 16,
        "rollouts": 3,
        "records": list(records),
    }


def test_evaluations_to_a_ratio() -> None:
    curve = [[1, 1.0], [4, 1.1], [9, 1.2]]
    assert [reached(curve, r) for r in (1.0, 1.05, 1.2, 1.3)] == [None, 4, 9, None]


def test_the_best_known_is_over_all_strategies() -> None:
    rows = summary(
        [
            record("k", "a", 1, (1, 1.0), (3, 1.195)),
            record("k", "a", 0, (1, 1.0), (8, 1.2)),
            record("k", "b", 0, (1, 1.0), (2, 1.1)),
        ]
    )
    first, second = rows
    assert first["strategy"] == "a" and first["evaluations_to"]["0.95"] == [8, 3]
    assert second["best_known"] == 1.2
    assert second["evaluations_to"] == {"0.5": [2], "0.8": [None], "0.95": [None]}
    assert (first["median_ratio"], first["low"], first["high"]) == (1.1975, 1.195, 1.2)


def test_quartiles_wherever_a_curve_rises() -> None:
    curves = [[[1, 1.0], [8, 1.2]], [[1, 1.0], [3, 1.1]]]
    assert quartiles(curves) == [
        [1, 1.0, 1.0, 1.0],
        [3, 1.025, 1.05, 1.075],
        [8, 1.125, 1.15, 1.175],
    ]


def test_what_training_saves() -> None:
    """A factor on kernel a; a lower bound on b, which ppo never solves; no factor on c."""
    comparison = result(
        record("a", "ppo", 0, (1, 1.0), (12, 1.2)),
        record("a", "ppo-trained", 0, (1, 1.0), (3, 1.2)),
        record("b", "ppo", 0, (1, 1.0), (9, 1.01)),
        record("b", "ppo-trained", 0, (1, 1.0), (4, 1.1)),
        record("c", "ppo", 0, (1, 1.0)),
        record("c", "ppo-trained", 0, (1, 1.0)),
        record("c", "anneal", 0, (1, 1.0), (2, 1.5)),
        record("c", "anneal", 1, (1, 1.0), (2, 1.5)),
    )
    rows = summary(comparison["records"])
    assert saved(rows, PARTS[-1], 16) == {"a": 4.0, "b": 4.0}
    section = compared(comparison, rows)
    words = " ".join(section.split())
    assert "95 % of the best known **no**, 2.5 times fewer in the geometric mean" in words
    assert "3 times or more on 2 of 3 kernels (a, b)" in words
    assert (
        "| c | – | – | – |" in section
        and "| a, 20.00 % | – | 12 / 12 / 12 | 3 / 3 / 3 |" in section
    )
    assert "**50.00** (50.00–50.00)" in section and "(0.00–0.00, seeds: 1)" in section
    assert "*Modelled*" in section
    two = result(*(r for r in comparison["records"] if r["kernel"] != "c"))
    assert "**yes**, 4.0 times fewer" in compared(two, summary(two["records"]))
    slower = [
        {**r, "strategy": {"ppo": "ppo-trained", "ppo-trained": "ppo"}.get(r["strategy"])}
        for r in comparison["records"]
        if r["kernel"] != "c"
    ]
    assert "**no**, 0.2 times fewer" in compared(result(*slower), summary(slower))


def test_the_figure_is_an_svg_with_a_panel_for_each_kernel() -> None:
    records = [
        record(kernel, strategy, seed, (1, 1.0), (9 + seed, 1.1))
        for kernel in ("a", "b@c", "d", "e")
        for strategy in COLOURS
        for seed in (0, 1)
    ]
    root = ElementTree.fromstring(figure(summary(records), 16))
    space = "{http://www.w3.org/2000/svg}"
    panels = root.findall(f"{space}g")
    assert len(panels) == 4
    for panel in panels:
        lines = [p for p in panel.iter(f"{space}path") if p.get("class") == "line"]
        assert [p.get("stroke") for p in lines] == list(COLOURS.values())


def test_the_page_is_the_committed_result() -> None:
    result = json.loads(RESULT.read_text())
    assert PAGE.read_text() == text(), "run `python -m benchmarks page learning`"
    assert FIGURE.read_text() == figure(summary(result["records"]), result["evaluations"])
