"""Result files of GPU measurements: schema, committed files, and the pages made from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from benchmarks.harness.rank_agreement import agreement, kendall
from benchmarks.harness.result_file import ROOT, load, results, save
from benchmarks.harness.schema import (
    SCHEMA,
    BadResults,
    Modelled,
    Record,
    ResultFile,
    measured_files,
    read,
    schema_text,
)
from benchmarks.kernels.suite import Entry
from benchmarks.sass.pages import issue_distances, measured, modelled
from benchmarks.sass.pages.agreement import agreement_of
from benchmarks.sass.pages.suite_section import (
    HEADLINE,
    best_of_all,
    deployed,
    seeds,
    suite_section,
)
from benchmarks.sass.suite_cell import Cell, CountingDevice, make_record
from pydantic import ValidationError

from benchmarks.front import readme
from benchmarks.ptx import page as assembler_page
from nostall.core import Comparison, LaunchSpec
from nostall.sass.model.agreement import load_agreement, model_caution
from nostall.search import Anneal
from nostall.tuning.job import tune
from nostall.tuning.settings import Settings
from nostall.tuning.sources.source import load_cubin
from tests.unit.tuning.fake_device import FakeDevice

NVCC = Path(__file__).resolve().parents[2] / "examples" / "nvcc"
FILES = measured_files()
PATH = ROOT / "sass" / "results" / "x.json"
"""Path of a file that does not exist, for records made by tests."""


def example(**changes: Any) -> dict[str, Any]:
    """A valid record with these changes."""
    original = [10.0 + step / 100 for step in range(20)]
    candidate = [x / 1.25 for x in original]
    samples = {"original": original, "candidate": candidate, "null": original}
    comparison = Comparison.from_samples(original, candidate, original, kind="measured")
    record: dict[str, Any] = {
        "kernel": "k",
        "shape": {"grid": [4, 1, 1], "block": [128, 1, 1]},
        "strategy": HEADLINE,
        "seed": 0,
        "baseline": None,
        "original_us": 10.1,
        "best_us": 8.08,
        "ratio": comparison.ratio,
        "deployed_ratio": comparison.ratio,
        "ci_low": comparison.low,
        "ci_high": comparison.high,
        "null_low": comparison.null_low,
        "null_high": comparison.null_high,
        "candidates": 5,
        "faults": 0,
        "seconds": 1.0,
        "gpu": "G",
        "driver": "1",
        "versions": {"triton": "3.6.0"},
        "command": "c",
        "date": "2026-01-01T00:00:00+00:00",
        "samples": samples,
    }
    return {**record, **changes}


def records(**by_kernel: list[tuple[str, int, float]]) -> list[Record]:
    """Records of each kernel with these (strategy, seed, deployed ratio)."""
    made = []
    for kernel, rows in by_kernel.items():
        for strategy, seed, ratio in rows:
            x = [10.0, 10.0]
            interval = {"ci_low": ratio, "ci_high": ratio, "null_low": 1.0, "null_high": 1.0}
            made.append(
                Record.model_validate(
                    example(
                        kernel=kernel,
                        strategy=strategy,
                        seed=seed,
                        ratio=ratio,
                        deployed_ratio=ratio,
                        original_us=10.0,
                        best_us=10.0 / ratio,
                        samples={"original": x, "candidate": [10.0 / ratio] * 2, "null": x},
                        **interval,
                    )
                )
            )
    return made


def test_the_schema_is_the_models() -> None:
    assert SCHEMA.read_text() == schema_text(), "run `python -m benchmarks page schema`"


def test_there_are_measured_files() -> None:
    assert results("sass") / "suite.json.gz" in FILES
    assert results("sass") / "strategies_on_model.json" not in FILES  # modelled
    assert results("workload") / "hta.json" not in FILES  # measured, but no kernels


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_committed_file_conforms_and_its_samples_give_its_numbers(path: Path) -> None:
    result_file = read(path)
    assert result_file.records
    keys = [(r.kernel, r.strategy, r.seed) for r in result_file.records]
    assert len(set(keys)) == len(keys)
    body = load(path)
    # The models have checked every record; the schema made of them sees some.
    jsonschema.validate({**body, "records": body["records"][::10]}, json.loads(SCHEMA.read_text()))
    for r in result_file.records[::4]:
        if r.samples is None or r.ratio is None or r.ci_low is None or r.null_high is None:
            continue
        samples = r.samples
        comparison = Comparison.from_samples(
            samples.original, samples.candidate, samples.null, kind="measured", loads=samples.loads
        )
        assert comparison.ratio == pytest.approx(r.ratio, rel=2e-3)
        assert comparison.low == pytest.approx(r.ci_low, rel=2e-3)
        assert comparison.null_high == pytest.approx(r.null_high, rel=2e-3)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"deployed_ratio": 1.3}, "deployed_ratio"),
        ({"ratio": 1.4, "ci_high": 1.5, "deployed_ratio": 1.0}, "the samples say"),
        ({"null_high": 1.3}, "deployed_ratio"),
        ({"ci_low": 1.26, "deployed_ratio": 1.0}, "is not in"),
        ({"best_us": 5.0}, "far from the ratio"),
        ({"samples": None}, "no failure"),
        ({"failure": "wrong: 3 words", "deployed_ratio": 1.0}, "no failure"),
        ({"baseline": [{"num_warps": 4, "num_stages": 2, "us": 3.0}] * 19}, "at least 20"),
        ({"baseline": [{"num_warps": 4, "num_stages": 2, "us": None}] * 20}, "no configuration"),
        ({"kind": "modelled"}, "measured"),
        ({"speedup": 2.0}, "xtra"),
        ({"original_us": float("nan")}, "greater than 0|finite"),
    ],
)
def test_a_record_that_contradicts_itself_is_refused(changes: dict[str, Any], why: str) -> None:
    Record.model_validate(example())
    with pytest.raises(ValidationError, match=why):
        Record.model_validate(example(**changes))


def test_a_record_can_have_a_candidate_that_failed_in_the_last_comparison() -> None:
    numbers = ("best_us", "ratio", "ci_low", "ci_high", "null_low", "null_high", "samples")
    nulls = dict.fromkeys(numbers)
    r = Record.model_validate(example(**nulls, deployed_ratio=1.0, failure="wrong: 3 words"))
    assert not r.faster
    assert "wrong: 3 words" in suite_section(PATH, [r])


def test_an_invalid_file_is_named_in_the_error(tmp_path: Path) -> None:
    path = tmp_path / "sass" / "results" / "x.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"records": [{"kernel": "k", "kind": "measured"}]}))
    assert measured_files(tmp_path) == [path]
    with pytest.raises(BadResults, match=r"x\.json"):
        read(path)


@pytest.mark.parametrize("name", ["sass", "sass-modelled", "issue-distances", "assembler"])
def test_a_page_is_what_the_command_writes(name: str) -> None:
    pages = {
        "sass": measured,
        "sass-modelled": modelled,
        "issue-distances": issue_distances,
        "assembler": assembler_page,
    }
    module: Any = pages[name]
    assert module.PAGE.read_text() == module.text(), f"run `python -m benchmarks page {name}`"


def test_the_readmes_are_what_the_command_writes() -> None:
    text, table = readme.README.read_text(), readme.TABLE.read_text()
    assert text == readme.readme(text), "run `python -m benchmarks page readme`"
    assert table == readme.benchmark_table(table), "run `python -m benchmarks page readme`"
    start = readme.START_PAGE.read_text()
    assert start == readme.start_page(start), "run `python -m benchmarks page readme`"


def test_a_compressed_result_file_is_read_like_any_other(tmp_path: Path) -> None:
    save(tmp_path / "x.json.gz", values=[1, 2])
    assert load(tmp_path / "x.json.gz")["values"] == [1, 2]
    assert load(tmp_path / "x.json") == load(tmp_path / "x.json.gz")


def test_the_headline_is_a_median_over_seeds_and_a_mean_over_kernels() -> None:
    made = records(
        a=[(HEADLINE, 0, 1.0), (HEADLINE, 1, 1.1), (HEADLINE, 2, 1.5), ("sip", 0, 2.0)],
        b=[(HEADLINE, 0, 1.0), ("sip", 0, 1.0)],
    )
    assert deployed(made, HEADLINE) == {"a": 1.1, "b": 1.0}
    assert best_of_all(made) == {"a": 2.0, "b": 1.0}
    text = suite_section(PATH, made)
    assert f"**Headline: {1.1**0.5:.4f}**" in text
    assert f"{2.0**0.5:.4f} over 2 kernels" in text
    assert "Kendall" not in text


def test_kendalls_tau_equals_a_count_of_pairs() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 6, (2, 40)).astype(float)
    pairs = [(i, j) for i in range(40) for j in range(i)]
    same = sum((x[i] - x[j]) * (y[i] - y[j]) > 0 for i, j in pairs)
    opposite = sum((x[i] - x[j]) * (y[i] - y[j]) < 0 for i, j in pairs)
    untied = [sum(v[i] != v[j] for i, j in pairs) for v in (x, y)]
    assert kendall(x, y) == pytest.approx((same - opposite) / (untied[0] * untied[1]) ** 0.5)
    assert kendall(x, x) == pytest.approx(1.0) and kendall(x, -x) == pytest.approx(-1.0)
    assert kendall(x, np.ones(40)) is None
    assert agreement([(1.0, 2.0), (2.0, 4.0), (9.0, 3.0)]) == (pytest.approx(1 / 3), 0.5)


def model_sample(*us: tuple[float, float]) -> dict[str, Any]:
    tau, error = agreement(us)
    return {"us": us, "kendall_tau": tau, "error": error}


def test_the_model_agreement_is_shown_beside_measured_ratios() -> None:
    up, down = ((1.0, 2.0), (2.0, 3.0)), ((1.0, 3.0), (2.0, 2.0))
    made = [example(seed=n, modelled=model_sample(*us)) for n, us in enumerate((up, down, up))]
    text = suite_section(PATH, [Record.model_validate(r) for r in made])
    assert "| k | 1.00 [-1.00, 1.00] | 42 % | 6 |" in text
    assert "Kendall" not in suite_section(PATH, [Record.model_validate(example())])
    with pytest.raises(ValidationError, match="`us` says"):
        Modelled.model_validate({**model_sample(*up), "kendall_tau": 0.3})
    with pytest.raises(ValidationError, match="`us` says"):
        Modelled.model_validate({**model_sample(*up), "kendall_tau": None})


def sized(kernel: str, size: str | None, ratio: float, us: float = 10.0) -> Record:
    made = records(**{kernel: [(HEADLINE, 0, ratio)]})[0]
    x, y = [us] * 2, [us / ratio] * 2
    samples = {"original": x, "candidate": y, "null": x}
    changes = {
        "size": size,
        "instructions": kernel.partition("@")[2] or None,
        "original_us": us,
        "best_us": us / ratio,
        "samples": samples,
    }
    return Record.model_validate({**made.model_dump(), **changes})


def test_each_size_has_its_own_mean() -> None:
    made = [
        sized("a-1@mma", "published", 1.21, us=20.0),
        sized("a-1@wgmma", "published", 1.0),
        sized("a-9@mma", "filling", 1.5),
        sized("b", None, 1.3),
    ]
    text = suite_section(PATH, made)
    assert "**Headline, published small shapes: 1.1000**" in text
    assert "two kinds of matrix instructions: 1.0000 over 1 kernels." in text
    assert "\nShapes that fill the GPU: 1.5000, " in text
    assert "\nOther kernels: 1.3000, " in text
    assert text.count("**Headline") == 1


def test_the_package_ships_the_agreement_of_the_committed_suite() -> None:
    assert load_agreement() == agreement_of(read(measured.SUITE).records, measured.SUITE.name), (
        "run `python -m benchmarks page sass`"
    )


def test_a_mean_comes_with_its_error() -> None:
    ratios = {"anneal": (1.1, 1.3), "random": (1.05,)}
    rows = [
        {"kernel": "k", "strategy": strategy, "seed": seed, "ratio": ratio}
        for strategy, values in ratios.items()
        for seed, ratio in enumerate(values)
    ]
    assert modelled.search(rows).endswith("| k | 1.2000 ± 0.1000 | – | 1.0500 |")


def test_the_caution_beside_a_modelled_gain_has_tau(monkeypatch: pytest.MonkeyPatch) -> None:
    up, down = ((1.0, 2.0), (2.0, 3.0)), ((1.0, 3.0), (2.0, 2.0))
    made = [example(kernel=k, modelled=model_sample(*us)) for k, us in (("a", up), ("b", down))]
    agreement_record = agreement_of([Record.model_validate(r) for r in made], "x.json")
    assert agreement_record is not None and agreement_record.candidates == 4
    assert agreement_record.tau == {"a": 1.0, "b": -1.0}
    assert agreement_of([Record.model_validate(example())], "x.json") is None
    monkeypatch.setattr("nostall.sass.model.agreement.load_agreement", lambda: agreement_record)
    assert "on G its ranking of 4 measured candidates of 2 kernels" in model_caution()
    assert "a Kendall tau of 0.00 (-1.00 to 1.00 by kernel" in model_caution()


def test_number_of_seeds_in_words() -> None:
    one = records(a=[(HEADLINE, 0, 1.1)], b=[(HEADLINE, 0, 1.2)])
    some = records(a=[(HEADLINE, 0, 1.1), (HEADLINE, 1, 1.3)], b=[(HEADLINE, 0, 1.2)])
    assert (seeds(one, HEADLINE), seeds(some, HEADLINE)) == ("one seed", "1 to 2 seeds")


def test_no_headline_without_its_strategy() -> None:
    assert "`anneal` was not measured" in suite_section(PATH, records(a=[("sip", 0, 1.5)]))


def test_the_suite_writes_records_that_conform() -> None:
    launch = LaunchSpec.from_toml(NVCC / "dot_product.toml")
    source = load_cubin(NVCC / "dot_product.sm_90.cubin", None, launch)
    settings = Settings(evaluations=12, objective="gpu", rounds=8, checks=2)
    device = CountingDevice(FakeDevice(0.9, 0.8, source.cubin))
    tuned = tune(source, Anneal(), settings, device=device)
    entry = Entry("dot_product", NVCC / "dot_product.sm_90.cubin")
    made = make_record(Cell(entry, "anneal", 0, 1.0), source, settings, tuned, device, 1.5)
    assert made.faster and made.deployed_ratio == pytest.approx(1.25)
    assert (made.original_us, made.best_us) == pytest.approx((10.0, 8.0))
    assert made.candidates == sum(device.outcome_counts.values()) > 12
    head = {"date": made.date, "command": "c", "python": "3", "processor": "p", "versions": {}}
    text = ResultFile(**head, records=(made,)).model_dump_json()
    jsonschema.validate(json.loads(text), json.loads(SCHEMA.read_text()))
    assert ResultFile.model_validate_json(text).records == (made,)
