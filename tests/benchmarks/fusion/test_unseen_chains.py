"""Tests of the benchmark of unseen chains without a GPU: order, resuming, summaries, the fit."""

from __future__ import annotations

from argparse import Namespace
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.chains.generated import KINDS, generated_names
from benchmarks.fusion.chains.reported import REPORTED
from benchmarks.fusion.chains.stitched import chain_graph
from benchmarks.fusion.cost_model.fit import FITTED_GPU_FIELDS, STORED_NAMES
from benchmarks.fusion.cost_model.summary import modelled_best
from benchmarks.fusion.unseen import run
from benchmarks.fusion.unseen.measure import (
    ALL_CHAINS,
    INDUCTOR,
    Job,
    _without_copies,
    earlier_plan,
    sample,
)
from benchmarks.harness.result_file import load, results

from nostall.fusion.codegen.cost.gpu import H200
from nostall.fusion.recompute.kernels import default_kernels

EARLIER = "looped 4x256, 4 warps", "warp 32x256, 8 warps"


@pytest.mark.parametrize("half", ["train", "test"])
def test_the_first_chains_of_a_half_are_of_all_kinds(half: str) -> None:
    names = run.names_of(half)
    assert sorted(names) == sorted(generated_names(half))  # type: ignore[arg-type]
    kinds = {name.rsplit(" ", 1)[0] for name in names[: len(KINDS)]}
    assert kinds == set(KINDS)


@pytest.mark.parametrize("name", REPORTED)
def test_reported_chains_are_captured_completely(name: str) -> None:
    assert not [node for node in chain_graph(REPORTED[name]) if node.kind == "opaque"]


def test_a_sample_has_a_program_for_every_kernel_and_plan() -> None:
    name = "rms norm backward 32x3000"
    work = sample(name, 10)
    assert len(work.kernels) == len(work.partitions["explorer"].groups) == 2
    keys = {program.key for program in work.programs()}
    assert {p.key for kernel in work.kernels for p in kernel.programs()} <= keys
    only_best = sample(name, 1)
    assert not only_best.kernels
    assert 2 <= len(only_best.programs()) < len(keys)


def test_a_sample_has_the_plans_of_another_commit() -> None:
    kernels = sample("attention pooling 2048x200x128", 2, EARLIER).kernels
    for kernel, plan in zip(kernels, EARLIER, strict=True):
        assert plan in map(str, kernel.plans)
    names = {kernel.operators: plan for kernel, plan in zip(kernels, EARLIER, strict=True)}
    assert [str(earlier_plan(names, k.schedule).plan) for k in kernels] == list(EARLIER)


def test_the_summary_has_ratios_and_problems() -> None:
    result = {
        "us": {INDUCTOR: 10.0, "explorer": 5.0},
        "versions": {"explorer": {"plans": ["block 1x1024, 4 warps"]}},
        "failures": {"greedy": "no plan"},
        "wrong": {},
        "seconds": {"gpu": 1.0},
    }
    line = run.summary_line("chain", result)
    assert "explorer 2.00" in line and "no plan" in line and "block 1x1024" in line


def test_last_choices_are_the_modelled_best_only_without_others() -> None:
    rows = [
        {"plan": "a", "modelled_us": 1.0, "samples_us": [1.0], "last": True},
        {"plan": "b", "modelled_us": 2.0, "samples_us": [1.0], "last": False},
    ]
    assert modelled_best({"plans": rows}) == "b"
    assert modelled_best({"plans": rows[:1]}) == "a"


def test_the_gpu_has_the_fitted_parameters() -> None:
    path = results("fusion") / "unseen_fit.json"
    if not path.exists():
        pytest.skip("the installed package has no result files")
    fitted = load(path)["figures"]["machine"]
    for name in FITTED_GPU_FIELDS:
        assert getattr(H200, name) == float(f"{fitted[STORED_NAMES.get(name, name)]:.3g}"), name


def fake_job(job: Job) -> dict[str, Any]:
    """A result without a measurement; raises for one chain."""
    if "cosine" in job.chain:
        raise ValueError("a fault")
    return {"us": {}, "versions": {}, "failures": {}, "wrong": {}, "seconds": {}}


@pytest.mark.slow
def test_a_second_run_measures_the_missing_chains_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    pool = SimpleNamespace(apply_async=lambda function, arguments: None)
    monkeypatch.setattr(run, "compiler_pool", lambda *_: nullcontext(pool))
    options = Namespace(
        out=tmp_path / "out.json", set="reported", limit=120.0, most=1, rounds=1, earlier=None
    )
    options.workers, options.capability, options.device = 1, 90, "cpu"
    options.autotune = False
    names = list(REPORTED)[:2]
    run.run(options, names, ["0"], fake_job)
    stored = load(options.out)
    assert list(stored["chains"]) == names[1:]
    assert "a fault" in stored["failed"][names[0]]
    assert "1 of 2 chains" in capsys.readouterr().out
    run.run(options, names[1:], ["0"], fake_job)
    assert "has all 1 chains" in capsys.readouterr().out


def test_kernels_with_copies_are_named_by_operators_of_the_chain() -> None:
    graph = chain_graph(ALL_CHAINS["rms norm backward 64x50304"])
    kernels = default_kernels(graph)
    assert kernels.graph is not graph
    assert any(_without_copies(kernels, group) != group for group in kernels.groups)
    for group in kernels.groups:
        known = _without_copies(kernels, group)
        names = ([graph[i].op for i in known], [kernels.graph[i].op for i in group])
        assert sorted(names[0]) == sorted(names[1])
