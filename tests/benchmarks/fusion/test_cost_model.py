"""Tests of the cost model's benchmark without a GPU: samples, compilation, resuming, statistics."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from itertools import pairwise
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

pytest.importorskip("triton")
pytest.importorskip("torch")

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.stitched import chain_graph
from benchmarks.fusion.cost_model import evaluate
from benchmarks.fusion.cost_model.compile import wait_for_programs
from benchmarks.fusion.cost_model.evaluate import Job
from benchmarks.fusion.cost_model.sample import (
    plan_from_record,
    plan_record,
    sample_chain,
    sample_plans,
)
from benchmarks.fusion.cost_model.summary import modelled_best, regret, summarize, variant_ratios

from nostall.attach.torch_compile.workers.codegen_job import TargetOnlyDriver
from nostall.fusion.codegen.autotune.autotuner import MAX_CANDIDATES
from nostall.fusion.codegen.autotune.candidates import candidates
from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.generate import schedule_operators
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from tests.unit.fusion.codegen.interpreter_process import run_interpreted

pytestmark = pytest.mark.slow

CHAIN = "SwiGLU 16384x5504"


def test_a_sample_has_the_tuning_candidates_and_the_whole_range() -> None:
    graph = chain_graph(CHAINS["residual + RMSNorm 16384x4096"])
    schedule = schedule_operators(graph, graph.operators)
    plan_sample = sample_plans(schedule, 20, seed=0)
    ranked = sorted(
        plans(schedule).legal_plans,
        key=lambda plan: (modelled_seconds(PlannedKernel(schedule, plan)), str(plan)),
    )
    assert len(plan_sample) == len(set(plan_sample)) == 20
    tuned = {k.plan for k in candidates(schedule, MAX_CANDIDATES) if not k.plan.eager_loads}
    assert tuned <= set(plan_sample) <= set(ranked)
    ranks = [ranked.index(plan) for plan in plan_sample]
    assert ranks == sorted(ranks)
    drawn_count = len(plan_sample) - len(tuned)
    piece_size = -(-(len(ranked) - len(plan_sample) + drawn_count) // drawn_count)
    assert piece_size > 1  # so the sample leaves plans out
    assert max(b - a for a, b in pairwise(ranks)) <= 2 * piece_size + len(tuned)
    assert ranks[-1] >= len(ranked) - piece_size
    assert sample_plans(schedule, 20, seed=0) == plan_sample != sample_plans(schedule, 20, seed=1)
    assert sample_plans(schedule, 1000, seed=0) == tuple(ranked)
    assert [plan_from_record(plan_record(plan)) for plan in plan_sample] == list(plan_sample)


def test_programs_of_all_partitions_are_compiled() -> None:
    sample = sample_chain(CHAINS["norm backward 16384x3000"], max_plans=8)
    assert {len(groups) for groups in sample.partitions.values()} == {1, 2, 3}
    keys = {program.key for program in sample.programs()}
    assert {p.key for kernel in sample.kernels for p in kernel.programs()} < keys
    assert len(keys) == len(sample.programs())


# -- running ---------------------------------------------------------------------------------------


class NoOpDriver(TargetOnlyDriver):
    """Fake Triton driver that loads and launches nothing."""

    @property
    def utils(self) -> Any:
        return self

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *_: object) -> tuple[object, ...]:
        return object(), object(), 32, 0, 1024

    def unload_module(self, _: object) -> None: ...

    def launcher_cls(self, *_: object) -> Any:
        return lambda *_: None


def launch_all(job: Job) -> dict[str, Any]:
    """Fake of ``measure``: launch every program with :class:`NoOpDriver`.

    ``new`` in the result is the number of entries that this added to Triton's cache.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from nostall.fusion.codegen.runtime.kernel import load_kernel

    sample = sample_chain(CHAINS[job.chain], job.max_plans, job.seed)
    programs = sample.programs()
    resources = wait_for_programs(
        job.settings.folder, [program.key for program in programs], monotonic() + 60
    )
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    cached = set(cache.rglob("*"))
    triton.runtime.driver.set_active(NoOpDriver(GPUTarget("cuda", 90, 32)))
    for program in programs:
        graph = program.graph
        inputs, outputs = (
            [torch.empty(graph[i].shape, dtype=getattr(torch, graph[i].dtype)) for i in nodes]
            for nodes in (program.inputs, program.outputs)
        )
        load_kernel(program, job.settings.folder).launch(inputs, outputs, {})
    rows = [
        {"plan": str(p.plan), "modelled_us": 1.0, "samples_us": [2.0], **resources[p.key]}
        for p in programs
    ]
    times = {"variants": {"explorer, raced": {"as": "a", "plans": []}}, "samples_us": {"a": [1.0]}}
    new_entries = len(set(cache.rglob("*")) - cached)
    return {"kernels": [{"plans": rows}], "ablation": times, "new": new_entries, "seconds": {}}


def test_launches_find_the_binaries_of_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(evaluate, "process_count", lambda gpus: 1)
    options = Namespace(limit=120.0, most=1, seed=0, rounds=3, capability=90)
    out = tmp_path / "found.json"
    evaluate.run(out, [CHAIN], ["0"], options, launch_all)
    result = json.loads(out.read_text())
    chain = result["chains"][CHAIN]
    assert chain["new"] == 0
    rows = chain["kernels"][0]["plans"]
    assert len(rows) >= 4
    for row in rows:
        (kernel,) = row["kernels"]
        assert 16 <= kernel["registers"] <= 64
        assert kernel["instructions"] > 50 and kernel["stack_bytes"] == 0
    assert "1 of 1 chains; left: none" in capsys.readouterr().out
    # A second run skips the chain; with a limit of 0 s it could not measure it.
    evaluate.run(out, [CHAIN], ["0"], Namespace(**vars(options) | {"limit": 0}), launch_all)
    assert json.loads(out.read_text()) == result


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kernels")
    return run_interpreted("tests.unit.fusion.evaluate.evaluator_cases", folder)


def test_plans_are_timed_and_wrong_results_detected(interpreted: Any) -> None:
    (kernel,) = interpreted["kernels"]
    rows = kernel["plans"]
    assert len(rows) == 10 and kernel["legal"] > 10
    assert [row["wrong"] for row in rows if "wrong" in row].count(True) == 1
    assert rows[3]["wrong"] and rows[3]["difference"] > 0.02
    assert "samples_us" not in rows[4] and rows[4]["error"] == "no"
    for row in rows[:4] + rows[5:]:
        assert row["samples_us"] == [float(row["num_warps"])] * 3
    assert kernel["first"] == rows[0]["plan"]


def test_variants_with_equal_kernels_are_measured_once(interpreted: Any) -> None:
    result = interpreted["ablation"]
    assert len(result["variants"]) == 6
    assert {variant["as"] for variant in result["variants"].values()} == {"explorer, first"}
    assert list(result["samples_us"]) == ["explorer, first"]
    assert result["variants"]["explorer, first"]["largest_errors"][0] < 0.01
    assert len(result["null_us"]) == 6
    assert set(variant_ratios(result).values()) == {1.0}


# -- numbers ---------------------------------------------------------------------------------------


def make_kernel(*times: tuple[float, float | None]) -> dict[str, Any]:
    """A kernel with these modelled and measured times of its plans; None if it did not run."""
    rows = []
    for at, (modelled, us) in enumerate(times):
        row: dict[str, Any] = {"plan": f"plan {at}", "modelled_us": modelled, "wrong": False}
        rows.append(row | ({"error": "no"} if us is None else {"samples_us": [us, us, 99.0]}))
    return {"plans": rows}


def make_chain(kernel: dict[str, Any], full: list[float], other: list[float]) -> dict[str, Any]:
    variants = {
        "explorer, first": {"as": "explorer, first", "plans": ["plan 0"]},
        "explorer, raced": {"as": "explorer, raced", "plans": ["plan 1"]},
    }
    samples = {"explorer, first": other, "explorer, raced": full}
    return {"kernels": [kernel], "ablation": {"variants": variants, "samples_us": samples}}


def test_tau_regret_and_ratios_of_known_numbers() -> None:
    kernel = make_kernel((1.0, 12.0), (2.0, 10.0), (3.0, 15.0), (0.5, None))
    assert modelled_best(kernel) == "plan 0"
    assert regret(kernel, "plan 0") == pytest.approx(0.2)
    statistics = summarize({"c": make_chain(kernel, [10.0, 20.0, 10.0], [12.0, 26.0, 11.0])})
    # One of three pairs is in the wrong order.
    assert statistics["tau"]["mean"] == pytest.approx(1 / 3, abs=1e-3)
    assert statistics["regret"]["mean"] == pytest.approx(0.2)
    assert statistics["regret_raced"]["mean"] == 0.0
    assert statistics["plans"] == 3 and statistics["plans_that_did_not_run"] == 1
    assert statistics["ablation"]["explorer, first"]["mean"] == pytest.approx(1.2)
    assert statistics["ablation"]["explorer, first"]["other_kernels"] == 1


def test_pooled_tau_is_over_all_plans() -> None:
    first_kernel, second_kernel = (
        make_kernel((1.0, 10.0), (2.0, 20.0)),
        make_kernel((30.0, 3.0), (40.0, 4.0)),
    )
    chains = {
        str(at): make_chain(k, [1.0], [1.0]) for at, k in enumerate((first_kernel, second_kernel))
    }
    statistics = summarize(chains)
    assert statistics["tau"]["mean"] == 1.0
    # Two pairs of six are in order, four are not.
    assert statistics["pooled_tau"] == pytest.approx(-1 / 3, abs=1e-3)
