"""Tests of the report page of a tuning run: contents, data and incomplete or invalid runs."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest

from nostall.core import BadRun, Run, Trial
from nostall.report.tune.page import load_ablation, write_report
from nostall.report.tune.protections import analyze_dependences, register_ranges
from nostall.report.tune.run_data import load_run
from nostall.report.tune.search_curve import TOP, draw_search_curve, find_improvements
from nostall.report.tune.summary import Summary, compare_blocks, make_summary
from nostall.report.units import Scale, ticks
from nostall.sass.program import registers
from nostall.sass.safety.hazards.validator import HazardValidator
from nostall.sass.schedule.changes import out_of_order
from nostall.search import make
from nostall.search.episodes import ANNEALING_MOVE
from nostall.tuning.job import describe, tune
from nostall.tuning.settings import Settings
from nostall.tuning.sources.triton_source import compile_triton

EXAMPLE = Path(__file__).parents[4] / "examples" / "softmax.py"


@pytest.fixture(scope="module")
def modelled_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 250 evaluations."""
    pytest.importorskip("triton", reason="the run is made from a Triton example")
    path = tmp_path_factory.mktemp("report") / "run"
    source = compile_triton(EXAMPLE, "softmax", None, "sm_90")
    settings = Settings("anneal", seed=1, evaluations=250)
    with Run.create(path, "nostall tune softmax.py:softmax", describe(source, settings)) as run:
        tune(source, make("anneal"), settings, run=run)
    return path


@pytest.fixture
def run(modelled_run: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(modelled_run, tmp_path / "run"))


def edit_record(run: Path, **changes: object) -> None:
    """Set keys of the result, or of the settings if prefixed by ``settings_``; None deletes."""
    record = json.loads((run / "run.json").read_text())
    for key, value in changes.items():
        part = "settings" if key.startswith("settings_") else "result"
        name = key.removeprefix("settings_")
        record[part].pop(name, None)
        if value is not None:
            record[part][name] = value
    (run / "run.json").write_text(json.dumps(record))


def page_text(run: Path) -> str:
    """The HTML text of the report."""
    return write_report(run).read_text()


def summary(run: Path) -> Summary:
    """The summary at the top of the page."""
    return make_summary(load_run(run), [], None)


def embedded_data(text: str) -> dict:
    """The JSON data in a page."""
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert match
    return json.loads(match[1])


def test_page_is_one_file_without_external_addresses(run: Path) -> None:
    before = set(run.iterdir())
    target = write_report(run)
    assert target == run / "report.html"
    assert set(run.iterdir()) - before == {target}
    text = target.read_text()
    assert not re.search(r"https?:|\bsrc=|<link|@import|url\(", text)
    assert target.stat().st_size < 1_000_000
    assert write_report(run).read_text() == text


def test_changes_that_save_time_are_listed(run: Path) -> None:
    record = json.loads((run / "ablation.json").read_text())
    assert record["kind"] == "modelled" and record["rows"]
    assert len(record["rows"]) + record["idle"] == record["total"]
    ablation, text = load_ablation(run), page_text(run)
    assert ablation is not None and ablation.shown and "Changes that save time" in text
    assert all(effect.text in text for effect in ablation.shown)
    for invalid in ("", "{}", json.dumps({**record, "rows": [{"text": 1}]})):
        (run / "ablation.json").write_text(invalid)
        assert load_ablation(run) is None
    text = page_text(run)
    assert "Changes that save time" not in text and "ablation.json cannot be read" in text


def test_summary_has_times_verdict_next_command_and_provenance(run: Path) -> None:
    text = page_text(run)
    for expected in (
        "<h1>softmax</h1>",
        "sm_90 · anneal · done",
        "original, modelled",
        "best, modelled",
        "gain, modelled",
        "verifier: safe",
        f"nostall verify {run / 'original.cubin'} {run / 'best.cubin'}",
        "nostall tune softmax.py:softmax",
        "sha256 of original.cubin",
        "nvdisasm",
    ):
        assert expected in text, expected


def test_modelled_values_are_labelled(run: Path) -> None:
    text = page_text(run)
    assert "Modelled warp cycles by reason" in text
    assert "Longest modelled stalls" in text
    assert re.search(r"original, modelled [\d.]+ (ns|µs|ms)</text>", text)


def test_embedded_data_describe_both_schedules(run: Path) -> None:
    page = embedded_data(page_text(run))
    data = load_run(run)
    count = len(data.original.instructions)
    first, second = page["sides"]
    assert first["order"] == list(range(count))
    assert sorted(second["order"]) == first["order"]
    assert second["order"] == [i.index for i in data.candidate.instructions]
    assert first["control"] == [str(i.control) for i in data.original.instructions]
    assert [b["start"] for b in page["blocks"]] == [b.start for b in data.original.blocks]
    assert len(page["text"]) == len(first["cycles"]) == count
    assert not any(".reuse" in text for text in page["text"])
    issued = [row[0] for row in first["cycles"] if row]
    assert issued and min(issued) > 0


def test_candidate_is_stored_as_a_difference(run: Path) -> None:
    first, second = embedded_data(page_text(run))["sides"]
    data = load_run(run)
    analysis = analyze_dependences(data.candidate, data.program.sm)
    expected = {
        "dependences": {
            (d.first, d.second, d.kind, d.registers, *d.protection) for d in analysis.dependences
        },
        "waits": {(w.waiter, w.producer, w.role, w.scoreboards) for w in analysis.waits},
    }
    for name, items in expected.items():
        removed = set(second[name]["removed"])
        common = [item for at, item in enumerate(first[name]) if at not in removed]
        assert {tuple(item) for item in common + second[name]["added"]} == items


def test_dependences_agree_with_the_verifier(modelled_run: Path) -> None:
    data = load_run(modelled_run)
    sm = data.program.sm
    for function in (data.original, data.candidate):
        observed = HazardValidator(sm).analyse(function)
        assert not observed.findings
        dependences = analyze_dependences(function, sm).dependences
        assert not [d for d in dependences if d.protection[0] == "none"]
        fixed_latency = {
            (d.first, d.second, d.kind): d for d in dependences if d.protection[0] == "distance"
        }
        for (first, second, kind, register), cycles in observed.distances.items():
            dependence = fixed_latency.get((first, second, kind))
            if dependence is not None and registers.name(register) == dependence.registers:
                assert dependence.protection[1] == cycles
        assert {key[:3] for key in observed.distances} >= {
            key for key in fixed_latency if key[2] != "RAW" or key[0] != key[1]
        }


def test_removed_wait_leaves_no_protection(modelled_run: Path) -> None:
    data = load_run(modelled_run)
    analysis = analyze_dependences(data.original, data.program.sm)
    waiter = next(
        d.protection[2]
        for d in analysis.dependences
        if d.kind == "RAW" and d.protection[0] == "scoreboard"
    )
    broken = data.original.reordered(
        [
            i.with_control(i.control.with_(wait=0)) if i.index == waiter else i
            for i in data.original.instructions
        ]
    )
    dependences = analyze_dependences(broken, data.program.sm).dependences
    assert [d for d in dependences if d.protection == ("none",)]


def test_running_search_shows_its_best_so_far(run: Path) -> None:
    (run / "best.cubin").unlink()
    (run / "provenance.json").unlink()
    record = json.loads((run / "run.json").read_text())
    record.update(result=None, status="running")
    (run / "run.json").write_text(json.dumps(record))
    text = page_text(run)
    assert "best so far, modelled" in text
    assert "not verified yet" in text
    assert f"nostall tune --resume {run}" in text


def test_rejected_candidate_is_shown_with_its_findings(run: Path) -> None:
    (run / "best.cubin").rename(run / "refused.cubin")
    finding = "short-latency at k+0x0010: IADD3 <R0>: 1 cycle </script><b>"
    edit_record(run, verdict={"safe": False, "findings": [finding]})
    text = page_text(run)
    assert "verifier: unsafe, 1 finding" in text
    assert "short-latency at k+0x0010: IADD3 &lt;R0&gt;" in text
    assert "</script><b>" not in text
    assert f"{run / 'refused.cubin'}" in text
    assert embedded_data(text)["names"] == ["original", "rejected"]


def test_optional_parts_can_be_missing(run: Path) -> None:
    for name in ("trials.csv", "provenance.json", "checkpoint.json"):
        (run / name).unlink()
    edit_record(
        run, settings_launch=None, settings_strategy=None, settings_provenance=None, model=None
    )
    text = page_text(run)
    assert "has no logged evaluations" in text
    assert "Not available: the run records no launch" in text
    assert embedded_data(text)["reasons"] == []


def test_invalid_optional_parts_give_a_note(run: Path) -> None:
    edit_record(run, settings_launch={"grid": [0, 1, 1]})
    assert "the recorded launch cannot be used" in page_text(run)
    (run / "provenance.json").write_text("{")
    assert "provenance.json cannot be read" in page_text(run)


def test_times_have_a_suitable_unit(run: Path) -> None:
    edit_record(run, original=12.5e-6, best=10e-6, ratio=1.25)
    texts = summary(run)
    assert (texts.original, texts.best, texts.ratio) == ("12.50 µs", "10.00 µs", "1.2500×")
    assert texts.lead.startswith("20 % less time, but only in the model, which ranks schedules no")
    edit_record(run, original=10e-6, best=10e-6, ratio=1.0)
    texts = summary(run)
    assert texts.ratio == "none"
    assert texts.lead == (
        "Nothing better than the original was found in 250 evaluations (its limit: "
        "--evaluations 250)."
    )
    edit_record(run, evaluations=1, settings_evaluations=1)
    assert summary(run).lead.endswith(
        "in 1 evaluation, that of the original itself (its limit: --evaluations 1)."
    )


def test_a_result_of_the_model_is_to_be_measured_and_not_praised(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    record["command"] = (
        "nostall tune 'a b.py:k' --objective=model --seed 3 --evaluations 1 --out runs/a"
    )
    (run / "run.json").write_text(json.dumps(record))
    for ratio in (1.25, 1.0):
        edit_record(run, ratio=ratio)
        texts = summary(run)
        assert texts.next_command == "nostall tune 'a b.py:k' --seed 3 --objective gpu"
        assert texts.next_reason.startswith("Searches with measured times, on a GPU. ")
        assert texts.verdict.startswith("verifier: safe") and texts.verdict_tone == "plain"
    edit_record(run, kind="measured", ratio=1.0)
    assert summary(run).next_command == f"nostall tune --resume {run} --evaluations=250"


def test_a_learning_strategy_is_named_by_what_ran(run: Path) -> None:
    edit_record(run, settings_strategy="ppo")
    loaded = load_run(run)
    trials = [dataclasses.replace(t, move=ANNEALING_MOVE) for t in loaded.trials[1:]]
    learned = dataclasses.replace(loaded, trials=[loaded.trials[0], *trials])
    texts = make_summary(learned, [], None)
    assert texts.strategy == f"ppo: {len(trials)} annealing steps, 0 episodes"
    assert "by annealing, as no episode of ppo ran" in texts.lead
    curve = draw_search_curve(learned.trials, texts.scale, "modelled", len(trials))
    label = re.search(r'y="([\d.]+)">annealing<', curve)
    assert label is not None and float(label[1]) < TOP


@pytest.mark.parametrize("invalid", [{"kind": "guessed"}, {"best": "low"}, {"ratio": []}])
def test_invalid_results_are_rejected(run: Path, invalid: dict[str, object]) -> None:
    edit_record(run, **invalid)
    with pytest.raises(BadRun, match=f"result.{next(iter(invalid))}"):
        summary(run)


def test_unit_is_escaped(run: Path) -> None:
    edit_record(run, unit="<script>")
    assert "<script></text>" not in page_text(run)


def test_objective_decides_the_kind_of_a_running_search(run: Path) -> None:
    for name, kind in (("model", "modelled"), ("gpu", "measured")):
        edit_record(
            run, settings_objective=name, **dict.fromkeys(("kind", "original", "best", "ratio"))
        )
        assert summary(run).kind == kind


def test_a_modelled_gain_and_a_rejected_candidate_are_not_green(run: Path) -> None:
    text = page_text(run)
    assert 'class="card gain"' not in text and "gain, modelled" in text
    (run / "best.cubin").rename(run / "refused.cubin")
    texts = summary(run)
    assert not texts.gained
    assert texts.next_command.endswith(f"{run / 'original.cubin'} {run / 'refused.cubin'}")


def test_measured_values_are_labelled(run: Path) -> None:
    edit_record(run, kind="measured")
    text = page_text(run)
    assert "original, measured" in text
    assert "A model ranks" not in text


def test_changed_original_gives_a_note(run: Path) -> None:
    edit_record(run, settings_original_sha256="0" * 64)
    assert "is not the file that run.json recorded" in page_text(run)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("run.json", "is not a run directory"),
        ("original.cubin", "no readable original.cubin"),
    ],
)
def test_missing_required_file_is_an_error(run: Path, file: str, message: str) -> None:
    (run / file).unlink()
    with pytest.raises(BadRun, match=message):
        write_report(run)


def test_run_without_checkpoint_is_an_error(run: Path) -> None:
    (run / "best.cubin").unlink()
    (run / "checkpoint.json").unlink()
    with pytest.raises(BadRun, match=r"neither best\.cubin nor a checkpoint"):
        write_report(run)


def test_files_of_another_kernel_are_rejected(run: Path) -> None:
    original = (run / "best.cubin").read_bytes()
    text = load_run(run).original.text
    changed = bytearray(original)
    start = text.file_offset
    changed[start : start + 16] = changed[start + 16 : start + 32]
    (run / "best.cubin").write_bytes(changed)
    with pytest.raises(BadRun, match="is not a re-scheduling"):
        write_report(run)
    (run / "best.cubin").write_bytes(b"junk")
    with pytest.raises(BadRun, match=r"best\.cubin cannot be read"):
        write_report(run)
    (run / "best.cubin").write_bytes(original)
    edit_record(run, settings_kernel="other")
    with pytest.raises(BadRun, match=r"settings\.kernel is 'other'"):
        write_report(run)


def test_only_the_displaced_instruction_counts_as_moved() -> None:
    assert out_of_order([0, 1, 2, 3], [0, 1, 2, 3]) == []
    assert out_of_order([3, 0, 1, 2], [3, 0, 1, 2]) == [3]
    assert len(out_of_order([5, 4, 3], [5, 4, 3])) == 2
    assert out_of_order([], []) == []


def test_block_comparison_finds_all_changes(modelled_run: Path) -> None:
    data = load_run(modelled_run)
    unchanged = compare_blocks(data.original, data.original)
    assert not any(block.changed or block.moved for block in unchanged)
    blocks = compare_blocks(data.original, data.candidate)
    pairs = zip(data.original.instructions, data.candidate.instructions, strict=True)
    assert sum(b.num_shifted for b in blocks) == sum(a.index != b.index for a, b in pairs)
    assert all(set(b.moved) <= set(range(b.start, b.end)) for b in blocks)


def test_neighbouring_registers_form_ranges() -> None:
    assert register_ranges([4, 5, 6, 7]) == "R4-R7"
    assert register_ranges([9, 10, 12]) == "R9-R10, R12"
    assert register_ranges([254, 256, 257]) == "R254, UR0-UR1"
    assert register_ranges([390, 392]) == "P6, UP0"
    assert register_ranges([382, 384]) == "UR126, P0"


def make_trial(
    index: int, value: float, *, accepted: bool = True, failure: str | None = None
) -> Trial:
    return Trial(index, value, accepted, value, f"move {index}", 0, 0.1 * index, failure)


def test_search_curve_shows_all_kinds_of_trials() -> None:
    trials = [
        make_trial(0, 2e-6),
        make_trial(1, 3e-6, accepted=False),
        make_trial(2, math.inf, accepted=False, failure="fault"),
        make_trial(3, 1e-6),
    ]
    assert [i.index for i in find_improvements(trials)] == [0, 3]
    svg = draw_search_curve(trials, Scale("s", 2e-6), "modelled")
    for name in ("tried", "accepted", "failed", "best", "start"):
        assert f'class="dot {name}"' in svg or f'class="{name}"' in svg
    assert "modelled µs" in svg
    assert "inf" not in svg and "nan" not in svg
    assert draw_search_curve([], Scale("s", 1.0), "modelled") == ""
    assert "<svg" in draw_search_curve([make_trial(0, 5.0)], Scale("cycles", 5.0), "modelled")


def test_formatted_units_and_ticks() -> None:
    assert Scale("s", 9e-6)(8.75e-6) == "8.750 µs"
    assert Scale("s", 2e-3)(2e-3) == "2.000 ms"
    assert Scale("us", 3.0)(12.0) == "12.000 µs"
    assert Scale("cycles", 12345.0)(12345.0) == "12,345 cycles"
    assert Scale("s", 1.0)(math.inf) == "failed"
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(1.0, 1.0) == [1.0]
