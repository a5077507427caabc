"""Files of benchmark steps: reading, lanes, limits, and what a second run repeats."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from time import monotonic

import pytest
from benchmarks.__main__ import main, make_parser
from benchmarks.harness.steps import Outcome, Step, make_lanes, read_steps, run_steps
from benchmarks.registry import ROOT, find

from benchmarks.harness import steps as module
from nostall.core.errors import BadInput

CHILD = """
import pathlib, sys, time
words = sys.argv[1:]
out = pathlib.Path(words[words.index("--out") + 1])
if "--fail" in words:
    sys.exit("no luck")
if "--sleep" in words:
    time.sleep(60)
out.write_text("{}")
print("measured 2 things")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for results; steps run a child that does what its options say."""
    child = tmp_path / "benchmarks.py"
    child.write_text(CHILD)
    started = subprocess.Popen

    def start(command: list[str], **options: object) -> object:
        assert command[:4] == [sys.executable, "-m", "benchmarks", "run"]
        return started([sys.executable, str(child), *command[4:]], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(module.subprocess, "Popen", start)
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "steps.txt"
    file.write_text(text)
    return file


def ran(steps: list[Step], folder: Path, seconds: float = 100.0, lanes: int = 1) -> list[Outcome]:
    return list(run_steps(steps, make_lanes(["0"], lanes, folder), folder, seconds))


def test_each_line_is_a_step(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "# comment\n\n120 fusion.unseen_chains --set test\n90.5 fusion.list_plans  # short\n"
        "30 fusion.unseen_chains --chains 'a b'\n60 torch_compile.user_models --zoo users\n",
    )
    first, second, third, fourth = read_steps(file)
    assert (first.name, first.seconds, first.options) == (
        "fusion.unseen_chains", 120.0, ("--set", "test"),
    )  # fmt: skip
    assert (second.seconds, second.options) == (90.5, ())
    assert (third.stem, third.options) == ("fusion.unseen_chains-2", ("--chains", "a b"))
    assert first.result == "fusion.unseen_chains.json"
    assert fourth.result == "torch_compile.user_models"  # it writes a folder


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("soon fusion.list_plans", "SECONDS BENCHMARK"),
        ("10", "SECONDS BENCHMARK"),
        ("10 fusion.no_such", "unknown benchmark"),
        ("0 fusion.list_plans", "above 0"),
        ("nan fusion.list_plans", "above 0"),
        ("10 fusion.list_plans 'open", "SECONDS BENCHMARK"),
    ],
)
def test_a_wrong_line_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, problem: str
) -> None:
    file = written(tmp_path, f"5 fusion.list_plans\n{line}\n")
    with pytest.raises(BadInput, match="line 2"):
        read_steps(file)
    assert main(["steps", str(file), "--out", str(tmp_path)]) == 2
    assert problem in capsys.readouterr().err


def test_a_missing_file_is_bad_input(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="not readable"):
        read_steps(tmp_path / "none.txt")


def test_a_file_that_is_no_text_is_bad_input(tmp_path: Path) -> None:
    file = tmp_path / "steps.txt"
    file.write_bytes(b"\xff\xfe10")
    with pytest.raises(BadInput, match="not readable as text"):
        read_steps(file)


def test_only_steps_that_take_turns_share_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    module.check_sharing(
        read_steps(written(tmp_path, "60 torch_compile.user_models\n60 parallel.peers\n"))
    )
    file = written(tmp_path, "60 torch_compile.user_models\n60 fusion.list_plans\n")
    assert main(["steps", str(file), "--out", str(tmp_path), "--lanes", "2"]) == 2
    assert "fusion.list_plans does not take turns" in capsys.readouterr().err


def test_lanes_divide_the_cpus(tmp_path: Path) -> None:
    lanes = make_lanes(["2", "3"], 2, tmp_path)
    assert [lane.gpu for lane in lanes] == ["2", "2", "3", "3"]
    assert lanes[0].lock == lanes[1].lock != lanes[2].lock
    assert frozenset[int]().union(*(lane.cpus for lane in lanes)) == os.sched_getaffinity(0)
    assert all(lane.cpus for lane in lanes)


def test_only_what_did_not_end_well_runs_again(tmp_path: Path, folder: Path) -> None:
    steps = read_steps(
        written(tmp_path, "20 fusion.list_plans\n20 fusion.coverage --fail\n20 sass.mobility\n")
    )
    texts = {outcome.step.name: outcome.text for outcome in ran(steps, folder)}
    assert texts == {
        "fusion.list_plans": "measured 2 things",
        "fusion.coverage": "failed (1): no luck",
        "sass.mobility": "measured 2 things",
    }
    assert (folder / "fusion.list_plans.json").exists()
    again = {outcome.step.name: outcome.text for outcome in ran(steps, folder)}
    assert again["fusion.list_plans"] == again["sass.mobility"] == "was done before"
    assert again["fusion.coverage"] == "failed (1): no luck"


def test_a_step_ends_at_its_limit(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 1.0)
    steps = read_steps(written(tmp_path, "1 fusion.list_plans --sleep\n500 sass.mobility\n"))
    start = monotonic()
    first, second = ran(steps, folder)
    assert first.text == "ended at its limit of 1 s"
    assert second.text == "not started: less than 500 s are left"
    assert monotonic() - start < 30
    assert not (folder / "fusion.list_plans.done").exists()


def test_leaving_early_ends_the_running_steps(tmp_path: Path, folder: Path) -> None:
    steps = read_steps(written(tmp_path, "20 sass.mobility\n90 fusion.list_plans --sleep\n"))
    outcomes = run_steps(steps, make_lanes(["0"], 2, folder), folder, 100.0)
    start = monotonic()
    assert next(outcomes).step.name == "sass.mobility"
    outcomes.close()  # type: ignore[attr-defined]
    assert monotonic() - start < 30


@pytest.mark.parametrize("file", sorted(ROOT.rglob("*.steps")), ids=lambda file: file.name)
def test_committed_steps_are_commands(file: Path) -> None:
    steps = read_steps(file)
    assert steps
    for step in steps:
        benchmark = find(step.name)
        parser = make_parser(benchmark)
        benchmark.load().add_options(parser)
        parser.parse_args([*step.options, "--out", step.result])


def test_steps_on_all_gpus_run_behind_those_on_one(folder: Path, tmp_path: Path) -> None:
    lines = "9 parallel.peers\n9 fusion.list_plans\n9 parallel.automap\n9 fusion.opinfo\n"
    steps = read_steps(written(tmp_path, lines))
    outcomes = [*run_steps(steps, make_lanes(["4", "5"], 2, folder), folder, 100.0)]
    assert [outcome.text for outcome in outcomes] == ["measured 2 things"] * 4
    on_one, on_all = outcomes[:2], outcomes[2:]
    assert {outcome.step.name for outcome in on_one} == {"fusion.list_plans", "fusion.opinfo"}
    assert [(o.step.name, o.gpu) for o in on_all] == [
        ("parallel.peers", "4,5"), ("parallel.automap", "4,5"),
    ]  # fmt: skip
