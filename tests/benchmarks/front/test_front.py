"""The headline numbers, their picture, and the limits of README."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import pytest
from benchmarks.front.headline import Headline
from benchmarks.front.leads import lead_pictures, leads
from benchmarks.front.levels import by_kernel, headlines
from benchmarks.front.picture import FOLDER, NARROW, pictures
from benchmarks.harness.result_file import ROOT

from benchmarks.front import measured_code
from benchmarks.harness import markdown

README = ROOT.parent / "README.md"
RUN = "run `python -m benchmarks page readme`"


def test_each_result_file_of_a_headline_is_the_recorded_one() -> None:
    """A changed result needs new texts, and a new entry of the code that it was measured with."""
    assert measured_code.unrecorded(f for h in headlines() for f in h.files) == [], RUN
    assert set(json.loads(measured_code.RECORD.read_text())) == {
        str(f.relative_to(ROOT)) for h in headlines() for f in h.files
    }, RUN


def test_a_changed_result_file_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.json"
    file.write_text("1")
    monkeypatch.setattr(measured_code, "ROOT", tmp_path)
    monkeypatch.setattr(measured_code, "RECORD", tmp_path / "record.json")
    measured_code.recorded.cache_clear()
    entry = {"sha256": measured_code._sha256(file), "code": measured_code._hash_files([])}
    (tmp_path / "record.json").write_text(json.dumps({"a.json": entry}))
    assert measured_code.unrecorded([file]) == []
    assert not measured_code.has_changed([file], ("no/such/folder",))
    assert measured_code.has_changed([file], ("ptx",))
    file.write_text("2")
    assert measured_code.unrecorded([file]) == [file]
    measured_code.recorded.cache_clear()


def test_the_pictures_are_what_the_command_writes() -> None:
    for name, text in pictures(headlines()).items():
        assert (FOLDER / name).read_text("utf-8") == text, RUN
        root = ElementTree.fromstring(text)
        page = name.removeprefix("gains").rpartition("-")[0]
        page = page.removesuffix(NARROW.suffix).removeprefix("-")
        shown = [h for h in headlines() if not page or h.page == f"{page}.md"]
        dots = [element for element in root.iter() if element.tag.endswith("circle")]
        assert len(dots) == sum(len(h.ratios) for h in shown) > 0
        assert all(h.label in root.attrib["aria-label"] for h in shown)


def test_a_narrow_picture_has_the_same_dots_within_a_narrow_screen() -> None:
    found = pictures(headlines())
    wide, narrow = found["gains-light.svg"], found["gains-narrow-light.svg"]
    assert (
        wide.count("<circle") == narrow.count("<circle") == sum(len(h.ratios) for h in headlines())
    )
    assert NARROW.width <= 390
    assert all(0 < float(x) < NARROW.width for x in re.findall(r'cx="([\d.]+)"', narrow))
    assert all(escape(h.label) in narrow for h in headlines())
    assert "narrow-dark.svg" in README.read_text("utf-8")


def test_the_pictures_of_leads_are_what_the_command_writes() -> None:
    for name, text in lead_pictures().items():
        assert (FOLDER / name).read_text("utf-8") == text, RUN
        page = name.removeprefix("gains-").rpartition("-")[0].removesuffix(NARROW.suffix)
        lead = leads()[f"{page}.md"]
        dots = [e for e in ElementTree.fromstring(text).iter() if e.tag.endswith("circle")]
        assert len(dots) == sum(len(row.values) for row in lead.rows) > 0
        assert all(
            lead.axis.ticks[0] <= v <= lead.axis.ticks[-1] for r in lead.rows for v in r.values
        )


def test_each_result_page_begins_with_an_answer_and_a_picture() -> None:
    for path in sorted(markdown.PAGES.glob("*.md")):
        if path.name != "index.md":
            _, first, *rest = path.read_text("utf-8").split("\n\n")
            assert first.startswith("**"), path.name
            assert any("{image}" in part for part in rest[:8]), path.name


def test_long_tables_are_folded() -> None:
    short, long = (markdown.table(("a", "b"), [("1", "2")] * n) for n in (14, 15))
    assert markdown.fold_tables(short) == short
    folded = markdown.fold_tables(f"before\n\n{long}\n\nafter")
    assert folded.startswith("before\n\n<details><summary>All 15 rows: a, b, …</summary>\n\n| a")
    assert folded.endswith("\n\n</details>\n\nafter")


def test_losses_are_beside_gains() -> None:
    found = {h.label: h for h in headlines()}
    assert found["attention / FlashAttention-3"].mean < 1
    assert min(found["whole models / torch.compile"].ratios) < 1
    assert all(h.no_help and h.beside and h.gpu and h.date for h in headlines())


def test_a_kernel_counts_once_with_its_faster_kind() -> None:
    rows = [
        {"kernel": "a@mma", "original_us": 9.0, "deployed": 1.2},
        {"kernel": "a@wgmma", "original_us": 6.0, "deployed": 1.02},
        {"kernel": "a@wgmma", "original_us": 6.1, "deployed": 1.02},
        {"kernel": "b", "original_us": 1.0, "deployed": 1.0},
    ]
    assert by_kernel(rows) == pytest.approx({"a": 1.02, "b": 1.0})


def test_a_result_page_begins_with_its_headlines() -> None:
    for headline in headlines():
        page = " ".join((markdown.PAGES / headline.page).read_text("utf-8").split())
        assert headline.sentence in page, RUN


def test_means_are_geometric_and_ratios_in_one_direction() -> None:
    headline = replace(headlines()[0], ratios=(2.0, 0.5))
    assert headline.mean == pytest.approx(1.0)
    assert headline.gain == "**1.00** (0.50 to 2.00)"
    assert isinstance(headline, Headline)


def test_readme_is_short() -> None:
    """At most 600 words outside tables and code, and at most 12 words in a cell."""
    text = README.read_text("utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|")]
    cells = [
        re.sub(r"\]\([^)]*\)", "]", cell).split() for row in rows for cell in row.split("|")[1:-1]
    ]
    assert [" ".join(words) for words in cells if len(words) > 12] == []
    prose = re.sub(r"```.*?```|^\|.*?$|<[^>]*>", "", text, flags=re.DOTALL | re.MULTILINE)
    assert len(re.sub(r"\]\([^)]*\)", "]", prose).split()) <= 600
