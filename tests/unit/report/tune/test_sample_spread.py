"""The samples of the last comparison on the report page."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from benchmarks.sass.kill_resume import Synthetic, kernel

from nostall.core import Run
from nostall.report import write_report
from nostall.report.tune.run_data import load
from nostall.report.tune.sample_spread import Compared, compared, spread
from nostall.search import make
from nostall.tuning.job import Settings, describe, tune

SETTINGS = Settings(evaluations=20, objective="gpu", rounds=60, checks=2)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("measured") / "run"
    source = kernel()
    with Run.create(path, "nostall tune k.cubin", describe(source, SETTINGS)) as run:
        tune(source, make("anneal"), SETTINGS, run=run, device=Synthetic(source.cubin))
    return path


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def edit(run: Path, comparison: Any) -> None:
    record = json.loads((run / "run.json").read_text())
    record["result"]["comparison"] = comparison
    (run / "run.json").write_text(json.dumps(record))


def example(original: list[float], candidate: list[float]) -> Compared:
    samples = {"original": original, "candidate": candidate, "null": original}
    numbers = {"ratio": 1.1, "low": 1.08, "high": 1.12, "null_low": 0.99, "null_high": 1.01}
    return Compared.model_validate({"verdict": "faster", **numbers, "samples": samples})


def paths(svg: str, name: str) -> list[list[float]]:
    """The numbers of each path of that class."""
    found = re.findall(rf'<path class="{name}" d="([^"]*)"', svg)
    return [[float(x) for x in re.findall(r"-?\d+\.?\d*", path)] for path in found]


def test_a_measured_run_shows_all_samples(run: Path) -> None:
    text = write_report(run).read_text()
    found, reason = compared(load(run))
    assert found is not None and reason == ""
    assert "The last comparison" in text
    assert f"faster: original / candidate {found.ratio:.4f}" in text
    assert text.count("n = 60") == 3
    for name in ("original", "candidate", "null"):
        assert text.count(f'class="violin {name}"') == 1
    assert not re.search(r"https?:|\bsrc=|<link|@import|url\(", text)


def test_the_drawing_is_to_scale() -> None:
    low, high = [10e-6 + k * 1e-9 for k in range(100)], [11e-6 + k * 1e-9 for k in range(100)]
    svg = str(spread(example(high, low)))
    original, candidate = paths(svg, "violin original")[0], paths(svg, "violin candidate")[0]
    assert max(candidate[::2]) < min(original[::2])  # the faster one lies to the left
    one = paths(svg, "one")[0][0]
    ratio, null = paths(svg, "interval candidate")[0], paths(svg, "interval null")[0]
    assert one < ratio[0] < ratio[2]
    assert null[0] < one < null[2]
    first, second, _ = paths(svg, "middle")
    assert candidate[0] < second[0] < second[2] < first[0] < first[2]


def test_outliers_do_not_flatten_the_rest_and_are_counted() -> None:
    values = [10e-6 + k * 1e-9 for k in range(400)]
    svg = str(spread(example([*values, 1.0], values)))
    assert svg.count("(1 outside)") == 2  # the original and the null
    xs = paths(svg, "violin candidate")[0][::2]
    assert max(xs) - min(xs) > 600


def test_equal_samples_are_drawn() -> None:
    svg = str(spread(example([1e-5] * 4, [1e-5] * 4)))
    numbers = [x for path in paths(svg, "violin candidate") for x in path]
    assert numbers and all(map(math.isfinite, numbers)) and "nan" not in svg


def test_a_winner_that_failed_says_so(run: Path) -> None:
    edit(run, {"fate": "wrong", "detail": "3 words of the outputs differ"})
    text = write_report(run).read_text()
    assert "No samples: wrong: 3 words of the outputs differ." in text
    assert "violin" not in text.partition("</style>")[2]


@pytest.mark.parametrize(
    "broken",
    [
        {"samples": {"original": [1.0]}},
        {**example([1e-5] * 3, [1e-5] * 3).model_dump(), "ratio": -1.0},
        {**example([1e-5] * 3, [1e-5] * 3).model_dump(), "low": "no number"},
    ],
)
def test_broken_samples_are_a_remark_and_no_crash(run: Path, broken: Any) -> None:
    edit(run, broken)
    assert "the recorded samples cannot be used" in write_report(run).read_text()


def test_a_modelled_run_has_no_such_section(run: Path) -> None:
    edit(run, None)
    assert "The last comparison" not in write_report(run).read_text()
