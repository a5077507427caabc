"""The report page: what it says, what it is made from, and what it does with odd runs."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest

from nostall.core import BadRun, Run, Trial
from nostall.report import write_report
from nostall.report.tune.ablation import carried
from nostall.report.tune.protections import names, protections
from nostall.report.tune.run_data import load
from nostall.report.tune.search_curve import curve, improvements
from nostall.report.tune.side_by_side import lineup, out_of_order
from nostall.report.tune.summary import Summary, summarise
from nostall.report.units import Scale, ticks
from nostall.sass.program import registers
from nostall.sass.safety.hazards import HazardValidator
from nostall.search import make
from nostall.tuning.job import Settings, describe, tune
from nostall.tuning.source import compile_triton

EXAMPLE = Path(__file__).parents[4] / "examples" / "softmax.py"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 250 evaluations."""
    pytest.importorskip("triton", reason="the run is made from a Triton example")
    path = tmp_path_factory.mktemp("report") / "run"
    source = compile_triton(EXAMPLE, "softmax", None, "sm_90")
    settings = Settings("anneal", seed=1, evaluations=250)
    with Run.create(path, "nostall tune softmax.py:softmax", describe(source, settings)) as run:
        tune(source, make("anneal"), settings, run=run)
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "run"))


def edit(run: Path, **changes: object) -> None:
    """Replace keys of the record's result; ``settings_x`` those of its settings; None deletes."""
    record = json.loads((run / "run.json").read_text())
    for key, value in changes.items():
        part = "settings" if key.startswith("settings_") else "result"
        name = key.removeprefix("settings_")
        record[part].pop(name, None)
        if value is not None:
            record[part][name] = value
    (run / "run.json").write_text(json.dumps(record))


def page(run: Path) -> str:
    return write_report(run).read_text()


def head(run: Path) -> Summary:
    """The head of the page, without the rest."""
    return summarise(load(run), [])


def data(text: str) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found
    return json.loads(found[1])


def test_the_page_is_one_file_without_any_address(run: Path) -> None:
    before = set(run.iterdir())
    target = write_report(run)
    assert target == run / "report.html"
    assert set(run.iterdir()) - before == {target}
    text = target.read_text()
    assert not re.search(r"https?:|\bsrc=|<link|@import|url\(", text)
    assert target.stat().st_size < 1_000_000
    assert write_report(run).read_text() == text


def test_what_carried_the_gain(run: Path) -> None:
    kept = json.loads((run / "ablation.json").read_text())
    assert kept["kind"] == "modelled" and kept["rows"]
    assert len(kept["rows"]) + kept["idle"] == kept["total"]
    found, text = carried(run), page(run)
    assert found is not None and found.shown and "What carried the gain" in text
    assert all(row.text in text for row in found.shown)
    for odd in ("", "{}", json.dumps({**kept, "rows": [{"text": 1}]})):
        (run / "ablation.json").write_text(odd)
        assert carried(run) is None
    text = page(run)
    assert "What carried the gain" not in text and "ablation.json cannot be read" in text


def test_the_head_says_what_was_found_and_what_to_do(run: Path) -> None:
    text = page(run)
    for said in (
        "<h1>softmax</h1>",
        "sm_90 · anneal · done",
        "original, modelled",
        "best, modelled",
        "modelled gain",
        "verifier: safe",
        f"nostall verify {run / 'original.cubin'} {run / 'best.cubin'}",
        "nostall tune softmax.py:softmax",
        "sha256 of original.cubin",
        "nvdisasm",
    ):
        assert said in text, said


def test_every_total_is_called_modelled(run: Path) -> None:
    text = page(run)
    assert "Modelled warp cycles by reason" in text
    assert "Longest modelled waits" in text
    assert re.search(r"original, modelled [\d.]+ (ns|µs|ms)</text>", text)


def test_the_data_describe_both_schedules(run: Path) -> None:
    found = data(page(run))
    loaded = load(run)
    count = len(loaded.original.instructions)
    first, second = found["sides"]
    assert first["order"] == list(range(count))
    assert sorted(second["order"]) == first["order"]
    assert second["order"] == [i.index for i in loaded.candidate.instructions]
    assert first["control"] == [str(i.control) for i in loaded.original.instructions]
    assert [b["start"] for b in found["blocks"]] == [b.start for b in loaded.original.blocks]
    assert len(found["text"]) == len(first["cycles"]) == count
    assert not any(".reuse" in text for text in found["text"])
    issued = [row[0] for row in first["cycles"] if row]
    assert issued and min(issued) > 0


def test_the_second_schedule_is_told_as_a_difference(run: Path) -> None:
    first, second = data(page(run))["sides"]
    loaded = load(run)
    for name in ("links", "waits"):
        gone = set(second[name]["without"])
        kept = [item for at, item in enumerate(first[name]) if at not in gone]
        rebuilt = {tuple(item) for item in kept + second[name]["added"]}
        analysed = protections(loaded.candidate, loaded.program.sm)
        if name == "links":
            wanted = {(k.first, k.second, k.kind, k.registers, *k.how) for k in analysed.links}
        else:
            wanted = {(w.waiter, w.producer, w.what, w.boards) for w in analysed.waits}
        assert rebuilt == wanted


def test_links_agree_with_the_verifier(made: Path) -> None:
    loaded = load(made)
    sm = loaded.program.sm
    for function in (loaded.original, loaded.candidate):
        observed = HazardValidator(sm).analyse(function)
        assert not observed.findings
        links = protections(function, sm).links
        assert not [link for link in links if link.how[0] == "open"]
        close = {
            (link.first, link.second, link.kind): link
            for link in links
            if link.how[0] == "distance"
        }
        for (first, second, kind, register), cycles in observed.distances.items():
            link = close.get((first, second, kind))
            if link is not None and registers.name(register) == link.registers:
                assert link.how[1] == cycles
        assert {key[:3] for key in observed.distances} >= {
            key for key in close if key[2] != "RAW" or key[0] != key[1]
        }


def test_a_lost_wait_shows_as_no_protection(made: Path) -> None:
    loaded = load(made)
    found = protections(loaded.original, loaded.program.sm)
    waiter = next(
        link.how[2] for link in found.links if link.kind == "RAW" and link.how[0] == "board"
    )
    broken = loaded.original.reordered(
        [
            i.with_control(i.control.with_(wait=0)) if i.index == waiter else i
            for i in loaded.original.instructions
        ]
    )
    links = protections(broken, loaded.program.sm).links
    assert [link for link in links if link.how == ("open",)]


def test_a_run_that_has_not_ended_is_shown_as_far_as_it_got(run: Path) -> None:
    (run / "best.cubin").unlink()
    (run / "provenance.json").unlink()
    record = json.loads((run / "run.json").read_text())
    record.update(result=None, status="running")
    (run / "run.json").write_text(json.dumps(record))
    text = page(run)
    assert "best so far, modelled" in text
    assert "has not judged" in text
    assert f"nostall tune --resume {run}" in text


def test_a_refused_candidate_is_shown_with_the_reasons(run: Path) -> None:
    (run / "best.cubin").rename(run / "refused.cubin")
    finding = "short-latency at k+0x0010: IADD3 <R0>: 1 cycle </script><b>"
    edit(run, verdict={"safe": False, "findings": [finding]})
    text = page(run)
    assert "verifier: refused, 1 findings" in text
    assert "short-latency at k+0x0010: IADD3 &lt;R0&gt;" in text
    assert "</script><b>" not in text
    assert f"{run / 'refused.cubin'}" in text
    assert data(text)["names"] == ["original", "refused"]


def test_optional_parts_may_be_missing(run: Path) -> None:
    for name in ("trials.csv", "provenance.json", "checkpoint.json"):
        (run / name).unlink()
    edit(run, settings_launch=None, settings_strategy=None, settings_provenance=None, model=None)
    text = page(run)
    assert "logged no evaluation" in text
    assert "No timeline: the run records no launch" in text
    assert data(text)["reasons"] == []


def test_a_launch_may_be_wrong(run: Path) -> None:
    edit(run, settings_launch={"grid": [0, 1, 1]})
    assert "the recorded launch cannot be used" in page(run)
    (run / "provenance.json").write_text("{")
    assert "provenance.json cannot be read" in page(run)


def test_values_are_shown_with_a_fitting_unit(run: Path) -> None:
    edit(run, original=12.5e-6, best=10e-6, ratio=1.25)
    said = head(run)
    assert (said.original, said.best, said.ratio) == ("12.5 µs", "10 µs", "1.2500×")


@pytest.mark.parametrize("odd", [{"kind": "guessed"}, {"best": "low"}, {"ratio": []}])
def test_numbers_that_are_none_are_refused(run: Path, odd: dict[str, object]) -> None:
    edit(run, **odd)
    with pytest.raises(BadRun, match=f"result.{next(iter(odd))}"):
        head(run)


def test_a_unit_is_text_and_no_markup(run: Path) -> None:
    edit(run, unit="<script>")
    assert "<script></text>" not in page(run)


def test_numbers_of_a_run_under_way_are_called_what_they_are(run: Path) -> None:
    for name, kind in (("model", "modelled"), ("gpu", "measured")):
        edit(run, settings_objective=name, **dict.fromkeys(("kind", "original", "best", "ratio")))
        assert head(run).kind == kind


def test_a_refused_candidate_is_no_gain(run: Path) -> None:
    assert head(run).gained
    (run / "best.cubin").rename(run / "refused.cubin")
    said = head(run)
    assert not said.gained
    assert said.next_line.endswith(f"{run / 'original.cubin'} {run / 'refused.cubin'}")


def test_measured_numbers_are_called_measured(run: Path) -> None:
    edit(run, kind="measured")
    text = page(run)
    assert "original, measured" in text
    assert "A model ranks" not in text


def test_another_original_is_noted(run: Path) -> None:
    edit(run, settings_original_sha256="0" * 64)
    assert "is not the file that run.json recorded" in page(run)


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("run.json", "is not a run directory"),
        ("original.cubin", "no readable original.cubin"),
    ],
)
def test_an_essential_file_is_missing(run: Path, missing: str, said: str) -> None:
    (run / missing).unlink()
    with pytest.raises(BadRun, match=said):
        write_report(run)


def test_nothing_to_show_yet(run: Path) -> None:
    (run / "best.cubin").unlink()
    (run / "checkpoint.json").unlink()
    with pytest.raises(BadRun, match=r"neither best\.cubin nor a checkpoint"):
        write_report(run)


def test_foreign_files_are_refused(run: Path) -> None:
    whole = (run / "best.cubin").read_bytes()
    text = load(run).original.text
    other = bytearray(whole)
    other[text.file_offset : text.file_offset + 16] = other[
        text.file_offset + 16 : text.file_offset + 32
    ]
    (run / "best.cubin").write_bytes(other)
    with pytest.raises(BadRun, match="is not a re-scheduling"):
        write_report(run)
    (run / "best.cubin").write_bytes(b"junk")
    with pytest.raises(BadRun, match=r"best\.cubin cannot be read"):
        write_report(run)
    (run / "best.cubin").write_bytes(whole)
    edit(run, settings_kernel="other")
    with pytest.raises(BadRun, match=r"settings\.kernel is 'other'"):
        write_report(run)


def test_only_the_slid_instruction_counts_as_moved() -> None:
    assert out_of_order([0, 1, 2, 3], [0, 1, 2, 3]) == []
    assert out_of_order([3, 0, 1, 2], [3, 0, 1, 2]) == [3]
    assert len(out_of_order([5, 4, 3], [5, 4, 3])) == 2
    assert out_of_order([], []) == []


def test_the_lineup_finds_every_change(made: Path) -> None:
    loaded = load(made)
    same = lineup(loaded.original, loaded.original)
    assert not any(block.changed or block.moved for block in same)
    blocks = lineup(loaded.original, loaded.candidate)
    pairs = zip(loaded.original.instructions, loaded.candidate.instructions, strict=True)
    assert sum(b.shifted for b in blocks) == sum(a.index != b.index for a, b in pairs)
    assert all(set(b.moved) <= set(range(b.start, b.end)) for b in blocks)


def test_registers_are_named_as_ranges() -> None:
    assert names([4, 5, 6, 7]) == "R4-R7"
    assert names([9, 10, 12]) == "R9-R10, R12"
    assert names([254, 256, 257]) == "R254, UR0-UR1"
    assert names([390, 392]) == "P6, UP0"
    assert names([382, 384]) == "UR126, P0"


def trial(index: int, value: float, *, accepted: bool = True, failure: str | None = None) -> Trial:
    return Trial(index, value, accepted, value, f"move {index}", 0, 0.1 * index, failure)


def test_improvements_and_curve() -> None:
    trials = [
        trial(0, 2e-6),
        trial(1, 3e-6, accepted=False),
        trial(2, math.inf, accepted=False, failure="fault"),
        trial(3, 1e-6),
    ]
    assert [i.index for i in improvements(trials)] == [0, 3]
    drawn = curve(trials, Scale("s", 2e-6), "modelled")
    for name in ("tried", "accepted", "failed", "best", "start"):
        assert f'class="dot {name}"' in drawn or f'class="{name}"' in drawn
    assert "modelled µs" in drawn
    assert "inf" not in drawn and "nan" not in drawn
    assert curve([], Scale("s", 1.0), "modelled") == ""
    assert "<svg" in curve([trial(0, 5.0)], Scale("cycles", 5.0), "modelled")


def test_units_and_ticks() -> None:
    assert Scale("s", 9e-6)(8.75e-6) == "8.75 µs"
    assert Scale("s", 2e-3)(2e-3) == "2 ms"
    assert Scale("us", 3.0)(12.0) == "12 µs"
    assert Scale("cycles", 12345.0)(12345.0) == "12,345 cycles"
    assert Scale("s", 1.0)(math.inf) == "failed"
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(1.0, 1.0) == [1.0]
