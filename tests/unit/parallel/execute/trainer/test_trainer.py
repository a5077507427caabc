"""Trainers on gloo processes train as a single process does, in float32 up to rounding."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="training by plans needs the extra nostall[torch]")
pytest.importorskip("scipy", reason="shardings need the extra nostall[sharding]")
ROOT = Path(__file__).parents[5]
TIMEOUT_S = 570
ROUNDING = 1e-5


def run(folder: Path, *scenarios: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.unit.parallel.execute.trainer.scenarios", str(folder),
         *scenarios],
        cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return results


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("few"), "few", "few_moves", "few_accumulations")


def check(result: dict[str, Any]) -> None:
    assert result["loss"] < ROUNDING  # and the norms before clipping
    assert result["weight"] < ROUNDING
    assert result["missing"] == []


def test_accumulation_clipping_and_a_schedule_are_those_of_one_process(few: dict[str, Any]) -> None:
    """A tied weight crosses stages, one parameter is never read, and one has no gradient."""
    assert {name: result["engine"] for name, result in few["few"].items()} == {
        "language, pipeline": "p2p", "language, fsdp": "sharded",
    }  # fmt: skip
    for result in few["few"].values():
        check(result)


def test_a_rank_reads_its_own_samples_only(few: dict[str, Any]) -> None:
    whole = list(range(8))  # the first stage reads the inputs, the last one the targets
    assert few["few"]["language, pipeline"]["own"] == [whole, whole]
    assert few["few"]["language, fsdp"]["own"] == [whole[:4], whole[4:]]


def test_a_checkpoint_goes_on_by_another_plan_on_other_processes(few: dict[str, Any]) -> None:
    check(few["few_moves"])


def check_accumulation(result: dict[str, Any], *, is_hybrid: bool = False) -> None:
    """Passes without a reduction have fewer collectives than the last one, which has all."""
    assert result["error"] < ROUNDING
    assert "so the gradients are not yet summed over ranks" in "".join(result["refused"])
    for each, once in zip(result["each"], result["once"], strict=True):
        if is_hybrid:  # it reduces in every micro-batch, but after an accumulation in the last one
            assert sum(once[2].values()) < sum(each[2].values())
        else:
            assert once[2].get("gloo:all_reduce") == each[2]["gloo:all_reduce"]
            assert once[2].get("gloo:all_to_all") == each[2].get("gloo:all_to_all")
    total = [sum(sum(own[0].values()) for own in result[key]) for key in ("each", "once")]
    assert total[1] < total[0]


def test_an_accumulation_reduces_gradients_once(few: dict[str, Any]) -> None:
    results = few["few_accumulations"]
    for result in results.values():
        check_accumulation(result)
    # The sum of the losses is the only one.
    assert [own[1]["gloo:all_reduce"] for own in results["language, ddp"]["once"]] == [1, 1]


@pytest.mark.slow
def test_an_accumulation_by_any_plan_reduces_gradients_once(tmp_path: Path) -> None:
    results = run(tmp_path, "accumulation")["accumulation"]
    cut = results.pop("language, tp")  # its gradients need no reduction
    assert cut["error"] < ROUNDING and cut["each"] == cut["once"]
    for name, result in results.items():
        check_accumulation(result, is_hybrid=name.endswith("hybrid"))
    for name in ("language, ddp", "language, fsdp2", "language, data parallel"):
        assert all(own[1]["gloo:all_reduce"] == 1 for own in results[name]["once"])


def check_compiled(results: dict[str, Any], kinds: set[str]) -> None:
    """Inductor has compiled functions on each rank, and a capture is refused by name on a CPU."""
    assert set(results) == kinds
    for name, result in results.items():
        check(result)
        refused = name.endswith("zero bubble")
        assert all((count == 0) == refused for count in result["functions"])
        for notes in result["notes"]:
            assert notes[-1] == "not captured: a CUDA graph needs a GPU, and this run is on a CPU"
            assert (len(notes) == 2) == refused


@pytest.mark.slow
def test_compiled_plans_of_each_kind_train_as_one_process_does(tmp_path: Path) -> None:
    """A pipeline with split backward passes says by name that it is not compiled."""
    kinds = {
        "chain, fsdp", "chain, pipeline", "chain, pipeline 2", "summed, data parallel",
        "chain, hybrid", "chain, ddp", "chain, fsdp2", "chain, pipeline 1:2, zero bubble",
    }  # fmt: skip
    check_compiled(run(tmp_path, "compiled")["compiled"], kinds)


@pytest.mark.slow
def test_a_launched_rank_makes_its_own_samples_only(tmp_path: Path) -> None:
    results = run(tmp_path, "own_batches")["own_batches"]
    halves, whole = [[0, 1, 2, 3], [4, 5, 6, 7]], list(range(8))
    assert {kind: result["asked"] for kind, result in results.items()} == {
        "fsdp": halves, "ddp": halves,
        "pipeline 1:2:1": [[], whole, whole, []],  # rank 2 has the inputs, rank 1 the targets
        "hybrid": [[0, 2, 4, 6], [1, 3, 5, 7], whole],
    }  # fmt: skip
    for result in results.values():
        assert result["given"] == [[len(own)] for own in result["asked"]]
        assert all(by_whole == by_own for by_whole, by_own in result["losses"])


@pytest.mark.slow
def test_two_hundred_steps_of_three_models_are_those_of_one_process(tmp_path: Path) -> None:
    results = run(tmp_path, "others")["others"]
    engines = {result["engine"] for result in results.values()}
    assert engines == {"torch", "p2p", "sharded", "hybrid", "ddp", "fsdp2"}
    for result in results.values():
        check(result)
    assert results["language, pipeline 1:2:1"]["own"][0] == []  # in the middle of the pipeline
    assert results["language, pipeline 1:2:1"]["own"][2] == list(range(8))


@pytest.mark.slow
def test_the_engines_of_torch_train_as_one_process_does(tmp_path: Path) -> None:
    """FSDP2 on three processes has shards of different sizes."""
    engines = run(tmp_path, "engines")["engines"]
    for refused in engines.pop("cuts"):
        assert (refused.pop("plain"), refused.pop("frozen")) == ("no error", "0.up.weight")
        for text in refused.values():
            assert text.startswith("tensor parallelism changes what the module computes (")
            assert "any number of heads" in text
        assert "(ValueError: the width is 4 and not 8)" in refused["checked"]
        assert "(the loss is nan and not " in refused["deviation"]
    assert engines["tp"]["engine"] == "tp" and engines["tp"]["own"] == [list(range(8))] * 2
    assert engines["ddp"]["engine"] == "ddp" and engines["fsdp2 3"]["engine"] == "fsdp2"
    for result in engines.values():
        check(result)


@pytest.mark.slow
def test_a_checkpoint_moves_between_seven_plans_of_one_to_four_processes(tmp_path: Path) -> None:
    check(run(tmp_path, "moves")["moves"])


@pytest.mark.slow
def test_a_killed_rank_costs_no_more_than_the_steps_since_the_last_checkpoint(
    tmp_path: Path,
) -> None:
    """The resumed run is equal bit for bit, dropout included."""
    killed = run(tmp_path, "killed")["killed"]
    assert [killed[where]["ends"].count("None") for where in ("run", "save")] == [1, 1]
    assert killed["run"]["checkpoint"] == "step-00000004" and killed["run"]["steps"] == 3
    assert killed["save"]["checkpoint"] == "step-00000002" and killed["save"]["steps"] == 5
    assert killed["run"]["is_equal"] and killed["save"]["is_equal"]


@pytest.mark.slow
def test_evaluation_short_batches_and_norms_are_those_of_one_process(tmp_path: Path) -> None:
    for results in run(tmp_path, "modes")["modes"].values():
        for result in results:
            assert "call train()" in result.pop("in eval mode")
            assert max(result.values()) < ROUNDING


@pytest.mark.slow
def test_bfloat16_steps_have_float32_weights(tmp_path: Path) -> None:
    results = run(tmp_path, "precision")["precision"]
    for kind, ranks in results.items():
        for result in ranks:
            assert result["dtypes"] == ["torch.float32"]
            # A sharding sums over samples in another order, in bfloat16.
            assert result["loss"] <= (0.02 if kind == "fsdp" else ROUNDING)


@pytest.mark.slow
def test_dcp_loads_a_trainer_into_another_plan(tmp_path: Path) -> None:
    losses = run(tmp_path, "stateful")["stateful"]
    for steps in (0, 3):
        assert losses[f"fsdp {steps}"] == pytest.approx(losses[f"pipeline {steps}"], rel=ROUNDING)
