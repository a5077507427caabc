"""The headlines of a plan's page, beside data parallelism and without it."""

from __future__ import annotations

import re

from nostall.parallel.evaluation import evaluate_plan
from nostall.parallel.plan import Plan, Stage, Workload
from nostall.report.plan.summary import cards, lead, sentences
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
    assert ("beside data parallelism, modelled", "no faster", "its time / this") in cards(
        plan, plan
    )
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
