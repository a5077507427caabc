"""The headlines of a plan's page, beside data parallelism and without it."""

from __future__ import annotations

import re
from pathlib import Path

from nostall.parallel.evaluation import evaluate_plan
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.report.plan.gantt import write_gantt
from nostall.report.plan.summary import cards, exposed_allreduce, lead, reading, sentences
from tests.unit.parallel.cases import profile, servers, straight

WORK = Workload(profile(2), servers(1, 2), 8, 4)


def test_the_cards_of_a_plan_name_data_parallelism_and_the_bubble() -> None:
    plan = evaluate_plan(WORK, straight([1, 2]), "test")
    peer = evaluate_plan(WORK, Plan((Stage(0, 2, (0, 1)),), "1f1b"), "data-parallel")
    found = {label: (value, detail) for label, value, detail in cards(plan, peer)}
    assert list(found) == [
        "iteration, modelled", "speed-up over one GPU, modelled",
        "beside data parallelism, modelled", "bubble, modelled",
    ]  # fmt: skip
    times = peer.timeline.iteration_s / plan.timeline.iteration_s
    assert found["beside data parallelism, modelled"][0] == f"{times:.2f}×"
    assert found["speed-up over one GPU, modelled"] == (
        f"{plan.speedup:.2f}×", f"data parallelism: {peer.speedup:.2f}×"
    )  # fmt: skip
    assert re.fullmatch(r"\d+%", found["bubble, modelled"][0])
    assert 0 < 1 - plan.utilization < 1


def test_no_gain_is_said_in_words() -> None:
    plan = evaluate_plan(WORK, straight([1, 2]), "test")
    assert (
        "beside data parallelism, modelled",
        "no faster",
        "time of data parallelism / time of this plan",
    ) in cards(plan, plan)
    assert any(line.endswith(": no faster") for line in sentences(plan, plan))


def test_the_cards_without_data_parallelism_compare_nothing() -> None:
    labels = [label for label, _, _ in cards(evaluate_plan(WORK, straight([1, 2]), "test"), None)]
    assert labels == [
        "iteration, modelled", "speed-up over one GPU, modelled", "bubble, modelled",
    ]  # fmt: skip


def test_the_first_sentence_has_the_time_and_the_gain() -> None:
    plan = evaluate_plan(WORK, straight([1, 2]), "test")
    peer = evaluate_plan(WORK, Plan((Stage(0, 2, (0, 1)),), "1f1b"), "data-parallel")
    times = peer.timeline.iteration_s / plan.timeline.iteration_s
    alone = lead(plan, None).removesuffix(".")
    assert re.fullmatch(r"2 stages on 2 GPUs: an iteration takes \S+ \w+ \(modelled\)", alone)
    assert lead(plan, peer) == f"{alone}, {times:.2f}× as fast as data parallelism."
    assert lead(plan, plan) == f"{alone}, no faster than data parallelism."


def test_the_short_form_of_a_plan_is_explained() -> None:
    workload = Workload(profile(2), servers(1, 3), 8, 4)
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2,))), "pb")
    text = reading(evaluate_plan(workload, plan, "test"))
    assert text.startswith(
        "2:1: stage 0 has 2 GPUs, stage 1 has 1 GPU. Order pb: forward and backward "
    )
    assert reading(evaluate_plan(WORK, straight([1, 2]), "test")).startswith(
        "straight: one GPU in each stage. Order "
    )


def test_the_exposed_all_reduce_of_data_parallelism_is_named_only_if_it_is_most() -> None:
    peer = evaluate_plan(WORK, Plan((Stage(0, 2, (0, 1)),), "1f1b"), "data-parallel")
    exposed = peer.time_components()["after_last_backward_s"]
    lines = exposed_allreduce(peer)
    assert exposed < peer.timeline.iteration_s / 2 and not lines
    heavy = profile(2, forward=1e-3, backward=2e-3, parameters=1e8)
    data_parallel = Plan((Stage(0, 2, (0, 1)),), "1f1b")
    work = Workload(heavy, servers(2, 1, between=1), 8, 4)
    slow = evaluate_plan(work, data_parallel, "data-parallel")
    assert (
        "the all-reduce of the gradients has nothing to hide behind" in exposed_allreduce(slow)[0]
    )


def test_the_page_of_a_plan_says_how_to_run_it(tmp_path: Path) -> None:
    evaluation = evaluate_plan(WORK, straight([1, 2]), "test")
    page = write_gantt(evaluation, tmp_path / "a.html", None, "nostall launch p.json").read_text()
    assert "<code>nostall launch p.json</code>" in page and "Order " in page
    assert "next step" not in write_gantt(evaluation, tmp_path / "b.html").read_text()
