"""Step tables: measured slow-down over nodes, the fitted network, predictions for more nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from nostall.core import BadInput, BadJob
from nostall.workload import load_hardware
from nostall.workload.characterization import (
    ScalingCharacterization,
    characterize_steps,
    parse_what_if,
)
from nostall.workload.characterization.scaling import Configuration, measured_step
from nostall.workload.hardware.description import EfficiencyCurve
from nostall.workload.jobs.steps import is_step_table, read_steps
from nostall.workload.model.slowdown import SlowdownModel

HARDWARE = load_hardware("pai-2018")
TRUTH = SlowdownModel(EfficiencyCurve(0.4, 2e-3), 0.25, HARDWARE.ethernet, pair_share=0.5)
GRADIENTS = {"small": 6e6, "middle": 60e6, "large": 400e6, "larger": 900e6}
HEADER = "model,nodes,gpus,batch,seconds [ms],gradient_bytes [MB]\n"


def rows_of(model: str, nodes: tuple[int, ...] = (1, 2, 3, 4)) -> str:
    """Exact steps of :data:`TRUTH` for eight batches."""
    rows = ""
    for batch in range(1, 9):
        one_node = 0.02 * batch
        for count in nodes:
            step = measured_step(model, one_node, GRADIENTS[model], count, 0.0)
            seconds = TRUTH.seconds(step) if count > 1 else one_node
            rows += f"{model},{count},8,{batch},{seconds * 1e3},{GRADIENTS[model] / 1e6}\n"
    return rows


def characterize(tmp_path: Path, text: str, *questions: str) -> ScalingCharacterization:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    what_if = [parse_what_if(question) for question in questions]
    return characterize_steps([read_steps(path)], HARDWARE, what_if)


def test_the_network_is_recovered_and_predicts_more_nodes(tmp_path: Path) -> None:
    table = HEADER + "".join(map(rows_of, GRADIENTS))
    result = characterize(tmp_path, table, "nodes=16")
    assert result.network is not None
    assert result.network.curve.share == pytest.approx(0.4, rel=0.05)
    assert result.network.hidden_share == pytest.approx(0.25, abs=0.05)
    assert len(result.measured) == 4 * 8 * 3
    for row in result.measured:
        assert row.modelled_seconds == pytest.approx(row.measured_seconds, rel=0.03)
    [(_, answers)] = result.predictions
    large = next(row for row in answers if row.configuration == Configuration("large", 8, 1))
    exact = TRUTH.seconds(measured_step("large", 0.02, 400e6, 16, 0.0))
    assert large.modelled_seconds == pytest.approx(exact, rel=0.05)
    assert large.interval is not None and large.interval[0] <= large.interval[1]
    document = result.as_json()
    rate = document["network"]["bytes_per_second"]
    assert rate == pytest.approx(0.4 * HARDWARE.ethernet, rel=0.05)
    assert document["what_if"][0]["answers"][0]["modelled_slowdown"] >= 1


def test_measured_slow_down_without_a_model(tmp_path: Path) -> None:
    result = characterize(tmp_path, HEADER + "a,1,8,1,100,50\na,2,8,1,150,50\na,2,8,1,170,50\n")
    [row] = result.measured
    assert row.as_json()["measured_slowdown"] == pytest.approx(1.6)
    assert result.network is None
    assert "two different amounts" in result.notes[0]
    with pytest.raises(BadInput, match="different gradient_bytes"):
        characterize(tmp_path, HEADER + "a,1,8,1,100,50\na,2,8,1,150,50\n", "nodes=4")


def test_steps_without_a_baseline_are_remarked(tmp_path: Path) -> None:
    table = HEADER + "a,1,8,1,100,50\na,2,8,1,150,50\na,2,8,4,150,50\n"
    result = characterize(tmp_path, table)
    assert len(result.measured) == 1
    assert any("1 of 2 combinations" in note for note in result.notes)
    with pytest.raises(BadJob, match="nodes = 1"):
        characterize(tmp_path, HEADER + "a,2,8,1,150,50\n")


@pytest.mark.parametrize(
    "row", ["a,0,8,1,9,9", "a,2,8,1,-1,9", "a,2,8,1,nan,9", "a,2,8,1,9,1e30", "a,2.5,8,1,9,9"]
)
def test_impossible_steps_are_skipped(tmp_path: Path, row: str) -> None:
    result = characterize(tmp_path, HEADER + "a,1,8,1,100,50\na,2,8,1,150,50\n" + row + "\n")
    assert (result.num_steps, result.num_skipped) == (2, 1)
    assert "line 4" in result.skip_reasons[0]


@pytest.mark.parametrize("question", ["memory=x2", "to=pearl", "ethernet=100Gb/s"])
def test_other_questions_need_a_job_table(tmp_path: Path, question: str) -> None:
    with pytest.raises(BadInput, match="job table"):
        characterize(tmp_path, HEADER + "a,1,8,1,100,50\na,2,8,1,150,50\n", question)


@pytest.mark.parametrize(
    "text", ["nodes=1", "nodes=x2", "nodes=", "nodes=4,gradients=9", "nodes=9999999"]
)
def test_impossible_numbers_of_nodes_are_rejected(text: str) -> None:
    with pytest.raises(BadInput):
        parse_what_if(text)


def test_step_tables_are_recognised_by_their_header(tmp_path: Path) -> None:
    for header, expected in (
        ("nodes,Seconds [ms],gradient_bytes", True),
        ("name,architecture,flops", False),
        ("architecture,nodes,seconds", False),
        ("", False),
    ):
        path = tmp_path / "t.csv"
        path.write_text(header)
        assert is_step_table(path) is expected
    assert is_step_table(tmp_path / "absent.csv") is False
