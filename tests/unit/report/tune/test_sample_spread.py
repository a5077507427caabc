"""Tests of the figure with the samples and intervals of the final comparison."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from benchmarks.sass.robustness.kill_resume import Synthetic, kernel

from nostall.core import Run
from nostall.report.tune.page import write_report
from nostall.report.tune.run_data import load_run
from nostall.report.tune.sample_spread import ComparisonRecord, draw_samples, load_comparison
from nostall.report.tune.summary import make_summary
from nostall.search import make
from nostall.tuning.job import describe, tune
from nostall.tuning.settings import Settings

SETTINGS = Settings(evaluations=20, objective="gpu", rounds=60, checks=2)


@pytest.fixture(scope="module")
def measured_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a synthetic device, which measures without a GPU."""
    path = tmp_path_factory.mktemp("measured") / "run"
    source = kernel()
    with Run.create(path, "nostall tune k.cubin", describe(source, SETTINGS)) as run:
        tune(source, make("anneal"), SETTINGS, run=run, device=Synthetic(source.cubin))
    return path


@pytest.fixture
def run(measured_run: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may change."""
    return Path(shutil.copytree(measured_run, tmp_path / "run"))


def replace_comparison(run: Path, comparison: Any) -> None:
    """Replace the comparison in the result of ``run.json``."""
    record = json.loads((run / "run.json").read_text())
    record["result"]["comparison"] = comparison
    (run / "run.json").write_text(json.dumps(record))


def make_comparison(original: list[float], candidate: list[float]) -> ComparisonRecord:
    """A comparison with these samples; the null repeats those of the original."""
    samples = {"original": original, "candidate": candidate, "null": original}
    numbers = {"ratio": 1.1, "low": 1.08, "high": 1.12, "null_low": 0.99, "null_high": 1.01}
    return ComparisonRecord.model_validate({"verdict": "faster", **numbers, "samples": samples})


def path_numbers(svg: str, name: str) -> list[list[float]]:
    """The numbers in each path of a CSS class."""
    paths = re.findall(rf'<path class="{name}" d="([^"]*)"', svg)
    return [[float(x) for x in re.findall(r"-?\d+\.?\d*", path)] for path in paths]


def test_measured_run_shows_all_samples(run: Path) -> None:
    text = write_report(run).read_text()
    comparison, reason = load_comparison(load_run(run).result)
    assert comparison is not None and reason == ""
    assert "Final comparison" in text
    assert f"faster: original / candidate {comparison.ratio:.4f}" in text
    assert text.count("n = 60") == 3
    for name in ("original", "candidate", "null"):
        assert text.count(f'class="violin {name}"') == 1
    assert not re.search(r"https?:|\bsrc=|<link|@import|url\(", text)


def test_samples_and_intervals_are_drawn_to_scale() -> None:
    low, high = [10e-6 + k * 1e-9 for k in range(100)], [11e-6 + k * 1e-9 for k in range(100)]
    svg = str(draw_samples(make_comparison(high, low)))
    original, candidate = (
        path_numbers(svg, "violin original")[0],
        path_numbers(svg, "violin candidate")[0],
    )
    assert max(candidate[::2]) < min(original[::2])  # less time is further left
    line_at_1 = path_numbers(svg, "one")[0][0]
    ratio, null = path_numbers(svg, "interval candidate")[0], path_numbers(svg, "interval null")[0]
    assert line_at_1 < ratio[0] < ratio[2]
    assert null[0] < line_at_1 < null[2]
    quartiles_original, quartiles_candidate, _ = path_numbers(svg, "middle")
    assert candidate[0] < quartiles_candidate[0] < quartiles_candidate[2]
    assert quartiles_candidate[2] < quartiles_original[0] < quartiles_original[2]


def test_outliers_are_counted_and_do_not_compress_the_axis() -> None:
    values = [10e-6 + k * 1e-9 for k in range(400)]
    svg = str(draw_samples(make_comparison([*values, 1.0], values)))
    assert svg.count("(1 outside)") == 2  # the original and the null
    xs = path_numbers(svg, "violin candidate")[0][::2]
    assert max(xs) - min(xs) > 600


def test_equal_samples_have_an_outline() -> None:
    svg = str(draw_samples(make_comparison([1e-5] * 4, [1e-5] * 4)))
    numbers = [x for path in path_numbers(svg, "violin candidate") for x in path]
    assert numbers and all(map(math.isfinite, numbers)) and "nan" not in svg


def test_failure_replaces_the_samples(run: Path) -> None:
    replace_comparison(run, {"fate": "wrong", "detail": "3 words of the outputs differ"})
    text = write_report(run).read_text()
    assert "No samples: wrong: 3 words of the outputs differ." in text
    assert "violin" not in text.partition("</style>")[2]


@pytest.mark.parametrize(
    "comparison",
    [
        {"samples": {"original": [1.0]}},
        {**make_comparison([1e-5] * 3, [1e-5] * 3).model_dump(), "ratio": -1.0},
        {**make_comparison([1e-5] * 3, [1e-5] * 3).model_dump(), "low": "no number"},
    ],
)
def test_invalid_samples_give_a_note(run: Path, comparison: Any) -> None:
    replace_comparison(run, comparison)
    assert "the recorded samples cannot be used" in write_report(run).read_text()


def test_modelled_run_has_no_samples(run: Path) -> None:
    replace_comparison(run, None)
    assert "Final comparison" not in write_report(run).read_text()


@pytest.mark.parametrize(("verdict", "is_green"), [("faster", True), ("no difference", False)])
def test_only_a_gain_beyond_its_interval_is_green(run: Path, verdict: str, is_green: bool) -> None:
    found, _ = load_comparison(load_run(run).result)
    assert found is not None
    texts = make_summary(load_run(run), [], found.model_copy(update={"verdict": verdict}))
    assert texts.kind == "measured" and texts.gained is is_green
