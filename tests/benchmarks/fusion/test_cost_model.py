"""The benchmark of the evaluator, without a GPU: samples, compilers, resuming, numbers."""

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
from benchmarks.fusion.chains.stitched import graph_of
from benchmarks.fusion.cost_model import evaluate
from benchmarks.fusion.cost_model.compile import awaited
from benchmarks.fusion.cost_model.evaluate import Job
from benchmarks.fusion.cost_model.sample import plan_of, sample, told, work_of
from benchmarks.fusion.cost_model.summary import first, ratios, regret, summary

from nostall.attach.torch_compile.workers.codegen_job import TargetOnlyDriver
from nostall.fusion.codegen.autotune.autotuner import MAX_CANDIDATES
from nostall.fusion.codegen.autotune.candidates import candidates
from nostall.fusion.codegen.cost.default_plan import modelled_seconds
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators
from nostall.fusion.codegen.tiling.plan_space import plans
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel
from tests.unit.fusion.codegen.process import run_interpreted

FLAT = "SwiGLU 16384x5504"


def test_a_sample_has_what_races_and_the_whole_range() -> None:
    graph = graph_of(CHAINS["residual + RMSNorm 16384x4096"])
    of = schedule_operators(graph, graph.operators)
    found = sample(of, 20, seed=0)
    ranked = sorted(
        plans(of).legal_plans,
        key=lambda plan: (modelled_seconds(PlannedKernel(of, plan)), str(plan)),
    )
    assert len(found) == len(set(found)) == 20
    race = {k.plan for k in candidates(of, MAX_CANDIDATES) if not k.plan.eager_loads}
    assert race <= set(found) <= set(ranked)
    places = [ranked.index(plan) for plan in found]
    assert places == sorted(places)
    drawn = len(found) - len(race)
    piece = -(-(len(ranked) - len(found) + drawn) // drawn)
    assert piece > 1  # plans are left out
    assert max(b - a for a, b in pairwise(places)) <= 2 * piece + len(race)
    assert places[-1] >= len(ranked) - piece
    assert sample(of, 20, seed=0) == found != sample(of, 20, seed=1)
    assert sample(of, 1000, seed=0) == tuple(ranked)
    assert [plan_of(told(plan)) for plan in found] == list(found)


def test_all_that_will_run_is_compiled_before() -> None:
    work = work_of(CHAINS["norm backward 16384x3000"], most=8)
    assert {len(groups) for groups in work.partitions.values()} == {1, 2, 3}
    keys = {program.key for program in work.programs()}
    assert {p.key for kernel in work.kernels for p in kernel.programs()} < keys
    assert len(keys) == len(work.programs())


# -- running ---------------------------------------------------------------------------------------


class Idle(TargetOnlyDriver):
    """A GPU onto which nothing is loaded and that runs nothing."""

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


def launched(job: Job) -> dict[str, Any]:
    """In place of timing: launches every program with a driver that loads nothing, and says how
    many entries that added to Triton's cache."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from nostall.fusion.codegen.runtime.kernel import load_kernel

    work = work_of(CHAINS[job.chain], job.most, job.seed)
    programs = work.programs()
    known = awaited(job.here.folder, [program.key for program in programs], monotonic() + 60)
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    before = set(cache.rglob("*"))
    triton.runtime.driver.set_active(Idle(GPUTarget("cuda", 90, 32)))
    for program in programs:
        graph = program.graph
        inputs, outputs = (
            [torch.empty(graph[i].shape, dtype=getattr(torch, graph[i].dtype)) for i in nodes]
            for nodes in (program.inputs, program.outputs)
        )
        load_kernel(program, job.here.folder).launch(inputs, outputs, {})
    rows = [
        {"plan": str(p.plan), "modelled_us": 1.0, "samples_us": [2.0], **known[p.key]}
        for p in programs
    ]
    times = {"variants": {"explorer, raced": {"as": "a", "plans": []}}, "samples_us": {"a": [1.0]}}
    new = len(set(cache.rglob("*")) - before)
    return {"kernels": [{"plans": rows}], "ablation": times, "new": new, "seconds": {}}


def test_what_the_pool_compiles_is_not_compiled_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("NOSTALL_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(evaluate, "processes", lambda gpus: 1)
    options = Namespace(limit=120.0, most=1, seed=0, rounds=3, capability=90)
    out = tmp_path / "found.json"
    evaluate.run(out, [FLAT], ["0"], options, launched)
    found = json.loads(out.read_text())
    chain = found["chains"][FLAT]
    assert chain["new"] == 0
    rows = chain["kernels"][0]["plans"]
    assert len(rows) >= 4
    for row in rows:
        (kernel,) = row["kernels"]
        assert 16 <= kernel["registers"] <= 64
        assert kernel["instructions"] > 50 and kernel["stack_bytes"] == 0
    assert "1 of 1 chains; left: none" in capsys.readouterr().out
    # What is there is left alone: this would need more time than there is.
    evaluate.run(out, [FLAT], ["0"], Namespace(**vars(options) | {"limit": 0}), launched)
    assert json.loads(out.read_text()) == found


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("kernels")
    return run_interpreted("tests.unit.fusion.evaluate.evaluator_cases", folder)


def test_every_plan_is_timed_and_wrong_ones_are_seen(interpreted: Any) -> None:
    (kernel,) = interpreted["kernels"]
    rows = kernel["plans"]
    assert len(rows) == 10 and kernel["legal"] > 10
    assert [row["wrong"] for row in rows if "wrong" in row].count(True) == 1
    assert rows[3]["wrong"] and rows[3]["difference"] > 0.02
    assert "samples_us" not in rows[4] and rows[4]["error"] == "no"
    for row in rows[:4] + rows[5:]:
        assert row["samples_us"] == [float(row["num_warps"])] * 3
    assert kernel["first"] == rows[0]["plan"]


def test_variants_with_the_same_kernels_are_measured_once(interpreted: Any) -> None:
    found = interpreted["ablation"]
    assert len(found["variants"]) == 6
    assert {variant["as"] for variant in found["variants"].values()} == {"explorer, first"}
    assert list(found["samples_us"]) == ["explorer, first"]
    assert found["variants"]["explorer, first"]["largest_errors"][0] < 0.01
    assert len(found["null_us"]) == 6
    assert set(ratios(found).values()) == {1.0}


# -- numbers ---------------------------------------------------------------------------------------


def kernel_of(*times: tuple[float, float | None]) -> dict[str, Any]:
    """Plans with these modelled and measured times; None: it did not run."""
    rows = []
    for at, (modelled, us) in enumerate(times):
        row: dict[str, Any] = {"plan": f"plan {at}", "modelled_us": modelled, "wrong": False}
        rows.append(row | ({"error": "no"} if us is None else {"samples_us": [us, us, 99.0]}))
    return {"plans": rows}


def chain_of(kernel: dict[str, Any], full: list[float], other: list[float]) -> dict[str, Any]:
    variants = {
        "explorer, first": {"as": "explorer, first", "plans": ["plan 0"]},
        "explorer, raced": {"as": "explorer, raced", "plans": ["plan 1"]},
    }
    samples = {"explorer, first": other, "explorer, raced": full}
    return {"kernels": [kernel], "ablation": {"variants": variants, "samples_us": samples}}


def test_tau_regret_and_ratios_of_known_numbers() -> None:
    kernel = kernel_of((1.0, 12.0), (2.0, 10.0), (3.0, 15.0), (0.5, None))
    assert first(kernel) == "plan 0"
    assert regret(kernel, "plan 0") == pytest.approx(0.2)
    found = summary({"c": chain_of(kernel, [10.0, 20.0, 10.0], [12.0, 26.0, 11.0])})
    # Of three pairs one is in the wrong order.
    assert found["tau"]["mean"] == pytest.approx(1 / 3, abs=1e-3)
    assert found["regret"]["mean"] == pytest.approx(0.2)
    assert found["regret_raced"]["mean"] == 0.0
    assert found["plans"] == 3 and found["plans_that_did_not_run"] == 1
    assert found["ablation"]["explorer, first"]["mean"] == pytest.approx(1.2)
    assert found["ablation"]["explorer, first"]["other_kernels"] == 1


def test_pooled_tau_is_over_all_plans() -> None:
    one, two = kernel_of((1.0, 10.0), (2.0, 20.0)), kernel_of((30.0, 3.0), (40.0, 4.0))
    chains = {str(at): chain_of(k, [1.0], [1.0]) for at, k in enumerate((one, two))}
    found = summary(chains)
    assert found["tau"]["mean"] == 1.0
    # Two pairs of six are in order, four are not.
    assert found["pooled_tau"] == pytest.approx(-1 / 3, abs=1e-3)
