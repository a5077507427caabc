"""Templates of pages: figures with formats and units, tables, conditions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.result_file import ROOT
from benchmarks.harness.template import filled, render, render_page, shown


@pytest.mark.parametrize(
    ("value", "form", "text"),
    [
        (0.1234, ".1f %", "12.3 %"),
        (0.0021, ".2f ms", "2.10 ms"),
        (0.0021, ".2f [ms]", "2.10"),
        (1234, ",", "1,234"),
        (None, ".2f", "–"),
        ("failed", ".2f", "failed"),
        (False, "yes/**no**", "**no**"),
        ([1.5, None], ".2f", "1.50, –"),
        ("2026-11-29T12:00", "day", "2026-11-29"),
        ("NVIDIA H200", "card", "H200"),
        (ROOT / "a" / "b.json", "file", "[file](../../benchmarks/a/b.json)"),
    ],
)
def test_a_value_has_a_format_and_a_unit(value: Any, form: str, text: str) -> None:
    assert shown(value, form) == text


def test_a_table_has_a_row_for_each_record() -> None:
    template = (
        "| name | {*gpus} | at |\n|--- runs\n| {name} | {*times:.1f} | {key|none} |\n"
        "|--- ends\n|---\n| {ends.count} | b | – |\n| c | d | e |"
    )
    runs = [{"name": "x|y", "times": [1, 2]}, {"name": "z", "times": [3, None], "key": 4}]
    ends = [["one", 2, None]]
    assert filled(template, {"gpus": ["A", "B"], "runs": runs, "ends": ends}).splitlines() == [
        "| name | A | B | at |", "|---|---|---|---|",
        "| x\\|y | 1.0 | 2.0 | none |", "| z | 3.0 | – | 4 |",
        "| one | 2 | – |", "| 1 | b | – |", "| c | d | e |",
    ]  # fmt: skip


def test_rows_of_a_mapping_have_its_keys() -> None:
    template = "| a |\n|--- rows\n| {key}: {x.0|nothing} |"
    assert filled(template, {"rows": {"k": {"x": [7]}, "l": {}}}).splitlines()[2:] == [
        "| k: 7 |", "| l: nothing |",
    ]  # fmt: skip


def test_a_list_is_reduced_and_a_mapping_is_counted() -> None:
    text = "{x.count} {x.least} {x.most} {x.mean:.1f} {x.gmean:.2f} {x.median} {m.count} {m.least}"
    values = {"x": [1, 2, 4, 8], "m": {"a": 1, "least": 9}}
    assert filled(text, values) == "4 1 8 3.8 2.83 3.0 2 9"


def test_a_page_has_the_title_and_the_results_of_its_template(tmp_path: Path) -> None:
    (tmp_path / "p.md.in").write_text("# The title\n\nMethod {n}.\n\n%% results\n\n## Result\n")
    page = render_page(str(tmp_path / "p.py"), tmp_path / "p.md", {"n": 3})
    assert page.startswith("# The title\n\nMethod 3.\n\n## Result\n\n*Generated")
    assert "`python -m benchmarks page p`" in page


def test_paragraphs_are_filled_and_blocks_without_figures_are_left_out() -> None:
    words = " ".join(["word"] * 15)
    text = filled(f"# T\n\n{words}\n{words} {{n}}\n\n{{?none}} left out\n\n- a\n  b\n- c\n\n{{n}}",
                  {"n": 1, "none": []})  # fmt: skip
    title, paragraph, items, last = text.split("\n\n")
    assert (title, items, last) == ("# T", "- a b\n- c", "1")
    assert paragraph.split() == ["word"] * 30 + ["1"]
    assert max(map(len, paragraph.split("\n"))) <= 100


def test_a_missing_figure_and_a_missing_part_are_named(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match=r"no figure 'a\.c'"):
        filled("see {a.c}", {"a": {"b": 1}})
    with pytest.raises(KeyError, match=r"no figure 'a\.c'"):
        filled("| x |\n|--- rows\n| {a.c} |", {"rows": [{"a": {}}], "a": {"c": 1}})
    with pytest.raises(ValueError, match="no figure"):
        filled("see {a b", {})
    with pytest.raises(ValueError, match="unit 'mile'"):
        shown(1.0, ".1f mile")
    (tmp_path / "page.md.in").write_text("whole {x}\n%% end\nthe end\n")
    module = str(tmp_path / "page.py")
    assert render(module, {"x": 1}) == "whole 1" and render(module, {}, "end") == "the end"
    with pytest.raises(KeyError, match="no figure 'x'") as raised:
        render(module, {})
    assert "page.md.in" in raised.value.__notes__[0]
    with pytest.raises(KeyError, match="no part 'start'"):
        render(module, {}, "start")
