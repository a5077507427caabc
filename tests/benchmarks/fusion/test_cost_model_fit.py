"""Fitting and judging the schedule model, and the page about it, with made-up measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benchmarks.harness.result_file import load

pytest.importorskip("triton")
pytest.importorskip("torch")
pytest.importorskip("scipy")

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.stitched import chain_graph
from benchmarks.fusion.cost_model.fit import (
    FITTED,
    MEASURED,
    fit_counts,
    fit_machine,
    half_of,
    judged,
    kernels,
    model,
    today,
    told,
)
from benchmarks.fusion.cost_model.page import PAGE, cost_model_page, text
from benchmarks.fusion.cost_model.race import means, races
from benchmarks.fusion.cost_model.sample import sample
from benchmarks.fusion.cost_model.sample import told as told_plan
from benchmarks.fusion.cost_model.summary import summary

from nostall.fusion.codegen.autotune.candidates import candidates
from nostall.fusion.codegen.cost.gpu import H200, Gpu, kernel_seconds
from nostall.fusion.codegen.cost.kernel import kernel_costs
from nostall.fusion.codegen.cost.tile import COEFFICIENTS
from nostall.fusion.codegen.runtime.stitched_graph import schedule_operators
from nostall.fusion.codegen.tiling.kernel_plan import KernelPlan

FIT, HELD = "softmax + mask 16384x3000", "residual + RMSNorm 16384x4096"


def chain_on(machine: Gpu, name: str) -> dict[str, Any]:
    """A chain as a machine of our making would have measured it."""
    graph = chain_graph(CHAINS[name])
    of = schedule_operators(graph, graph.operators)
    rows = []
    for plan in sample(of, 16, seed=0):
        time = 1e6 * sum(
            kernel_seconds(demand, machine) for demand in kernel_costs(of, plan, COEFFICIENTS)
        )
        used = {"registers": 32, "stack_bytes": 0, "instructions": 200}
        before = {"modelled_us": 1.0 / time, "samples_us": [time], "kernels": [used]}
        rows.append({**told_plan(plan), **before})
    kernel: dict[str, Any] = {"operators": graph.operators, "kind": of.kind, "plans": rows}
    best = min(row["samples_us"][0] for row in rows)
    kernel["modelled_us"] = {"delta": best, "latency": 1.0 / best}
    names = ("explorer, first", "explorer, raced")
    ablation = {
        "variants": {one: {"as": one, "plans": [rows[0]["plan"]]} for one in names},
        "samples_us": {names[0]: [12.0, 12.0], names[1]: [10.0, 10.0]},
    }
    return {"kernels": [kernel], "ablation": ablation, "gpu": "G", "torch": "2"}


@pytest.fixture(scope="module")
def chains() -> dict[str, Any]:
    return {name: chain_on(H200, name) for name in (FIT, HELD)}


def test_halves_are_of_different_functions() -> None:
    halves = [
        {chain.function for name, chain in CHAINS.items() if half_of(name) == half}
        for half in (0, 1)
    ]
    assert not halves[0] & halves[1]
    assert abs(len(halves[0]) - len(halves[1])) <= 1
    assert half_of(FIT) != half_of(HELD)


def test_what_the_model_made_it_finds_in_order(chains: dict[str, Any]) -> None:
    rows = [today(kernel) for kernel in kernels(chains)]
    assert [row["today"]["tau"] for row in rows] == [1.0, 1.0]
    assert [row["today"]["regret"] for row in rows] == [0.0, 0.0]
    assert [row["today"]["off"] for row in rows] == [0.0, 0.0]
    # The recorded model has everything the wrong way round.
    assert [row["before"]["tau"] for row in rows] == [-1.0, -1.0]
    means = told(rows)
    assert list(means) == ["before", "today"]
    assert means["before"]["regret"]["mean"] > 0.5


def test_a_race_is_played_back_from_what_was_measured() -> None:
    one, two, three, four = (KernelPlan("block", 1, (1024,), warps) for warps in (1, 2, 4, 8))
    times = {one: 1.0, two: 1.1, three: 1.2, four: 1.3}
    samples = {one: [5.0, 5.1, 4.9] * 4, three: [4.0, 4.1, 3.9] * 4, four: [4.9, 5.2, 4.9] * 4}
    found = races(times, samples)
    # Nobody measured the second one, and the last one is not faster beyond the noise.
    assert found["2"] == {"candidates": 2, "unknown": 1, "winner": str(one), "regret": 0.25}
    assert found["4"] == {"candidates": 4, "unknown": 1, "winner": str(three), "regret": 0.0}
    assert found["10"] == found["4"]
    only_last = races(times, {three: samples[three], four: samples[four]})
    assert list(only_last) == ["4", "5", "6", "8", "10"]
    assert only_last["4"]["unknown"] == 2
    mean = means([found, only_last])
    assert mean["2"]["regret"] == {"mean": 0.25, "median": 0.25, "least": 0.25, "most": 0.25}
    assert mean["4"]["unknown"]["mean"] == 1.5


def test_a_model_that_is_right_wins_every_race(chains: dict[str, Any]) -> None:
    for row in (today(kernel) for kernel in kernels(chains)):
        assert {race["regret"] for race in row["today"]["races"].values()} == {0.0}
        assert row["today"]["races"]["1"]["winner"] == row["today"]["first"]


def test_a_fit_finds_the_machine_that_measured() -> None:
    slow = replace(
        H200,
        dependent_issue_cycles=1.5 * H200.dependent_issue_cycles,
        reduction_phase_s=3 * H200.reduction_phase_s,
    )
    # Fewer chains hardly tell what a reduction takes from what its loads take.
    names = FIT, HELD, "softmax + mask 32768x1024", "log-softmax + entropy 8192x5000"
    found = kernels({name: chain_on(slow, name) for name in names})
    machine = fit_machine(found, COEFFICIENTS)
    assert machine.reduction_phase_s == pytest.approx(slow.reduction_phase_s, rel=0.2)
    assert machine.sms == H200.sms and machine.copy_bytes_per_s == H200.copy_bytes_per_s
    for kernel in found:
        row = judged(kernel, model(COEFFICIENTS, machine))
        assert row["tau"] > 0.9 and row["off"] < 0.05


def test_a_fit_finds_what_kernels_take(chains: dict[str, Any]) -> None:
    """Every kernel is said to have 32 registers and 200 instructions."""
    counts = fit_counts(kernels(chains))
    assert (
        counts.base_registers > COEFFICIENTS.base_registers
        and counts.element_registers < COEFFICIENTS.element_registers
    )


def test_the_page_says_what_is_reached_and_what_is_not(chains: dict[str, Any]) -> None:
    rows = [today(kernel) for kernel in kernels(chains)]
    rows = [{**row, "held out": row["today"]} for row in rows]
    measured = {"chains": chains, "date": "2026-01-01", "summary": summary(chains), "failed": {}}
    page = cost_model_page(measured, {"kernels": rows, "summary": told(rows)})
    flat = page.replace("\n", " ")
    assert "Held out: tau 1.00 (reached: 0.7), regret 0.0 % (reached: 5 %)" in flat
    assert "none gave another result" in flat
    assert "delta-evaluator tau 1.00, off by 0 %" in flat
    assert "latency-evaluator tau -1.00" in flat and "cost model tau 1.00" in flat
    assert f"| {HELD} | 16 | 1.00 | 1.00 | 0.0 % |" in page
    assert "| **geometric mean of 2** (0 not shown: all 1) | 1.200 |" in page
    graphs = [chain_graph(CHAINS[name]) for name in (FIT, HELD)]
    every = [candidates(schedule_operators(graph, graph.operators), 8) for graph in graphs]
    counts = [sum(not plan.eager_loads for plan in plans) for plans in every]
    told_counts = f"{sum(counts) / 2:.1f} ({max(counts)})"
    assert f"| 8 | {told_counts} | 0.0 | 0.0 % (0.0 %) | 0.0 % (0.0 %) |" in page
    bad = {**rows[0]["today"], "tau": 0.5, "regret": 0.2}
    worse = [{**row, "held out": bad} for row in rows]
    measured["failed"] = {"a chain": "a fault"}
    flat = cost_model_page(measured, {"kernels": worse, "summary": told(worse)}).replace("\n", " ")
    assert "tau 0.50 (not reached: 0.7), regret 20.0 % (not reached: 5 %)" in flat
    assert "Not measured: a chain" in flat


committed = pytest.mark.skipif(
    not MEASURED.exists(),
    reason="no measurement is committed (benchmarks.fusion.cost_model.evaluate)",
)


@committed
def test_the_page_is_that_of_the_committed_files() -> None:
    assert PAGE.read_text() == text(), "run `python -m benchmarks page fusion-cost-model`"


@committed
def test_the_committed_judgement_is_that_of_todays_model() -> None:
    """Of two chains; ``python -m benchmarks run fusion.cost_model_fit --judge`` makes it anew."""
    kept = load(MEASURED)["chains"]
    some = {name: kept[name] for name in (FIT, HELD)}
    rows = load(FITTED)["kernels"]
    every = {(row["chain"], row["number"]): row for row in rows}
    for kernel in kernels(some):
        row = every[kernel.chain, kernel.number]
        assert today(kernel) == {key: value for key, value in row.items() if key != "held out"}


@committed
def test_the_order_of_measured_plans_is_mostly_the_models() -> None:
    """What the model is there for; the figures stand in docs/fusion_evaluator.md."""
    means = load(FITTED)["summary"]
    held, today, before = means["held out"], means["today"], means["before"]
    assert held["tau"]["mean"] > 0.7 and held["regret"]["mean"] < 0.05
    # The one before chose which plans were measured, and had seen none of these times.
    assert today["tau"]["mean"] > before["tau"]["mean"] > 0.67
    assert today["regret"]["mean"] < min(0.05, before["regret"]["mean"])
