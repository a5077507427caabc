"""Summaries of run directories, in every state that a run can be in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nostall.core import BadRun, Checkpoint, Run
from nostall.tuning.records.run_summary import differences, find_runs, rank, summarize

SETTINGS = {"kernel": "k", "original_sha256": "a" * 64, "strategy": "anneal", "seed": 3}
RESULT: dict[str, Any] = {
    "kind": "modelled",
    "original": 4e-6,
    "best": 2e-6,
    "improved": True,
    "evaluations": 70,
    "seconds": 1.5,
}


def make(path: Path, **settings: Any) -> Run:
    return Run.create(path, "nostall tune k.cubin", {**SETTINGS, **settings})


def test_a_finished_run(tmp_path: Path) -> None:
    make(tmp_path / "a").finish("done", RESULT)
    run = summarize(tmp_path / "a")
    assert (run.state, run.subject, run.strategy, run.seed) == ("done", "k", "anneal", 3)
    assert (run.ratio, run.evaluations, run.seconds) == (2.0, 70, 1.5)


def test_a_running_and_a_stopped_run(tmp_path: Path) -> None:
    run = make(tmp_path / "a")
    run.on_checkpoint(Checkpoint("anneal", 3, 42, 0, "", 1.0, "", 1.0, {}, {}))
    with run:
        assert summarize(tmp_path / "a").state == "running"
    stopped = summarize(tmp_path / "a")
    assert (stopped.state, stopped.evaluations, stopped.ratio) == ("stopped", 42, None)


def test_a_fusion_run(tmp_path: Path) -> None:
    forward, backward = {"greedy": 3e-6, "fused": 1e-6}, {"greedy": 5e-6, "fused": 3e-6}
    passes = {"forward": forward, "backward": backward}
    settings = {"target": "f.py:f", "strategy": "explore"}
    run = Run.create(tmp_path / "a", "nostall fuse f.py:f", settings)
    run.finish("done", {"kind": "modelled", "passes": passes})
    summary = summarize(tmp_path / "a")
    assert summary.subject == "f.py:f" and summary.ratio == pytest.approx(2.0)
    assert summary.baseline == "greedy fusion"


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"schema_version": 9}', '{"command": "x", "created": "", "settings": {}}garbage'],
)
def test_an_unreadable_run_is_listed(tmp_path: Path, text: str) -> None:
    make(tmp_path / "good").finish("done", RESULT)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(text)
    (tmp_path / "other").mkdir()
    runs = {run.path.name: run.state for run in find_runs(tmp_path)}
    assert runs == {"good": "done", "bad": "unreadable"}


@pytest.mark.parametrize(
    "result", [{"original": "fast", "best": 1}, {"evaluations": "many"}, {"passes": {"f": {}}}]
)
def test_a_result_of_another_form(tmp_path: Path, result: dict[str, Any]) -> None:
    make(tmp_path / "a").finish("done", result)
    assert summarize(tmp_path / "a").state == "unreadable"


def test_a_measured_run_has_its_recorded_ratio_and_interval(tmp_path: Path) -> None:
    """The quotient of the two medians is another number than the median of the ratios."""
    compared = {"low": 1.005, "high": 1.0055}
    result = {"kind": "measured", "original": 7.949e-6, "best": 7.9101e-6, "ratio": 1.0053}
    make(tmp_path / "a").finish("done", {**result, "comparison": compared})
    make(tmp_path / "b").finish("done", RESULT)
    measured, modelled = summarize(tmp_path / "a"), summarize(tmp_path / "b")
    assert measured.ratio == 1.0053 and measured.interval == (1.005, 1.0055)
    assert modelled.ratio is not None and modelled.ratio > measured.ratio
    assert sorted([modelled, measured], key=rank) == [measured, modelled]


def test_other_code_of_one_kernel_is_not_another_kernel(tmp_path: Path) -> None:
    make(tmp_path / "a").finish("done", RESULT)
    make(tmp_path / "b", original_sha256="b" * 64).finish("done", RESULT)
    (remark,) = differences([summarize(tmp_path / "a"), summarize(tmp_path / "b")])
    assert "different cubins of the same kernel" in remark and "b" * 12 in remark


def test_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(BadRun, match="cannot list runs"):
        find_runs(tmp_path / "none")


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    make(tmp_path / "a").finish("done", RESULT)
    make(tmp_path / "b", original_sha256="b" * 64).finish("done", {**RESULT, "kind": "measured"})
    a, b = summarize(tmp_path / "a"), summarize(tmp_path / "b")
    assert differences([a, a]) == []
    assert len(differences([a, b])) == 2
