"""Plans of a user's own: what a line says, its stages, and the changes that are named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nostall.parallel.errors import BadPlan
from nostall.parallel.plan import Stage, Workload
from nostall.parallel.planners.own_plan import (
    OwnPlan,
    best_changes,
    own_workload,
    parse_own_plan,
    read_own_plans,
    stages_plan,
)
from nostall.parallel.profile import Profile
from nostall.parallel.simulate import simulated_s
from tests.unit.parallel.cases import profile, servers

LINE = "dp=2 pp=2 schedule=1F1B micro-batches=4"


def work(layers: int = 8, gpus: int = 4, samples: int = 16) -> Workload:
    return Workload(profile(layers, parameters=1e6), servers(1, gpus), samples, 1)


def test_a_line_is_stages_on_consecutive_gpus() -> None:
    own = parse_own_plan(LINE)
    assert own == OwnPlan(2, 2, "1f1b", 4)
    workload = own_workload(work(), own)
    assert (workload.micro_batch, workload.micro_batches) == (4, 4)
    assert stages_plan(workload, own).stages == (Stage(0, 4, (0, 1)), Stage(4, 8, (2, 3)))
    chunked = parse_own_plan("pp=4 schedule=Interleaved1F1B micro-batches=8")
    plan = stages_plan(work(), chunked)
    assert [stage.gpus for stage in plan.stages] == [(0,), (1,), (2,), (3,)] * 2
    assert simulated_s(own_workload(work(), chunked), plan) > 0


@pytest.mark.parametrize("count", [2, 4, 6, 8])
def test_changes_that_an_order_does_not_take_are_left_out(count: int) -> None:
    """Half of six micro-batches are no multiple of two workers."""
    own = parse_own_plan(f"dp=2 pp=2 vp=2 schedule=interleaved micro-batches={count}")
    workload = own_workload(work(samples=48), own)
    texts = [change.text for change in best_changes(workload, own, count=20)]
    assert all("micro-batches=3" not in text for text in texts)


def test_a_key_is_given_once() -> None:
    with pytest.raises(BadPlan, match="--mine has pp twice, as 2 and 4"):
        parse_own_plan("pp=2 pp=4 micro-batches=4")


def test_stages_of_equal_times_are_named_first_where_they_gain_most() -> None:
    even = work()
    slow = replace(even.profile.layers[0], forward_s=8.0, backward_s=16.0)
    uneven = Profile("uneven", (slow, *even.profile.layers[1:]), even.profile.tensors, 1)
    own = parse_own_plan(LINE)
    workload = own_workload(replace(even, profile=uneven), own)
    changes = best_changes(workload, own, count=20)
    assert [c.speedup for c in changes] == sorted((c.speedup for c in changes), reverse=True)
    by_text = {change.text: change for change in changes}
    found = by_text["cut after layers 0 (equal times)"]
    changed = stages_plan(workload, own, balanced=True)
    assert found.iteration_s == simulated_s(workload, changed)
    assert found.speedup == pytest.approx(
        simulated_s(workload, stages_plan(workload, own)) / found.iteration_s
    )
    assert all(change.speedup >= 1.005 for change in changes)
    assert len(best_changes(workload, own)) == min(3, len(changes))


def test_groups_of_tensor_parallelism_take_the_place_of_gpus() -> None:
    own = parse_own_plan("dp=2 tp=2 pp=2 micro-batches=4")
    assert (own.replicas, own.tensor, own.stages) == (2, 2, 2)
    texts = [change.text for change in best_changes(own_workload(work(), own), own, count=20)]
    assert "dp=4 tp=2 pp=1" in texts
    with pytest.raises(BadPlan, match=r"for 8 GPUs \(dp=2 x tp=2 x pp=2\) and the cluster has 4"):
        own_workload(work(gpus=2), own)
    flags = "--tensor-model-parallel-size 2 --micro-batch-size 1"
    assert read_own_plans(flags, 4, 16)[0][1] == OwnPlan(2, 1, "1f1b", 8, 1, 16, 2)


def test_a_plan_that_nothing_improves_has_no_changes() -> None:
    one = parse_own_plan("micro-batches=1")
    assert best_changes(own_workload(work(gpus=1, samples=1), one), one) == []


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("dp=two micro-batches=4", "dp=two; allowed is a number from 1 on"),
        ("dp=0 micro-batches=4", "dp=0"),
        ("zp=2 micro-batches=4", "key of --mine"),
        ("1F1B", "key of --mine"),
        ("pp=2 schedule=1F2B micro-batches=4", "schedule '1F2B'"),
        ("pp=2 vp=2 micro-batches=4", "allowed is vp above 1 with schedule=interleaved"),
        ("dp=2 pp=2", "lacks micro-batches=N"),
    ],
)
def test_a_line_that_says_something_else_is_refused(line: str, text: str) -> None:
    with pytest.raises(BadPlan, match=text):
        parse_own_plan(line)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("dp=2 micro-batches=4", "for 2 GPUs .* the cluster has 4"),
        ("dp=2 pp=2 micro-batches=3", "not equal parts of whole samples"),
        ("dp=2 pp=2 micro-batches=16", "not equal parts of whole samples"),
    ],
)
def test_a_line_that_does_not_fit_the_workload_is_refused(line: str, text: str) -> None:
    with pytest.raises(BadPlan, match=text):
        own_workload(work(), parse_own_plan(line))
    with pytest.raises(BadPlan, match="has 4 stages and the model 3 layers"):
        stages_plan(work(3), OwnPlan(1, 4, "1f1b", 4))


FLAGS = """torchrun --nproc-per-node 8 pretrain_gpt.py \\
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size=2 --num-layers 8 \\
    --num-layers-per-virtual-pipeline-stage 2  # two chunks
    --micro-batch-size 2 --global-batch-size 16 --lr 3e-4 --bf16 --hidden-size 512"""


def test_flags_of_megatron_are_a_plan(tmp_path: Path) -> None:
    expected = OwnPlan(2, 2, "interleaved", 4, 2, 16)
    assert [own for _, own in read_own_plans(FLAGS, 4, 64)] == [expected]
    (tmp_path / "run.sh").write_text(FLAGS)
    assert [own for _, own in read_own_plans(str(tmp_path / "run.sh"), 4, 64)] == [expected]
    workload = own_workload(work(), expected)
    assert workload.micro_batch == 4  # of both replicas
    assert [stage.gpus for stage in stages_plan(workload, expected).stages] == [(0, 1), (2, 3)] * 2
    plain = "--micro-batch-size 4 --num-virtual-stages-per-pipeline-rank 2"
    ((_, own),) = read_own_plans(plain, 4, 16)
    assert own == OwnPlan(4, 1, "1f1b", 1, 1, 16)


SCRIPT = """#!/bin/bash
TP_SIZE=1
PP="2"
DISTRIBUTED_ARGS=(--nproc_per_node 4 --nnodes 1)
MODEL_ARGS=(
    --num-layers 8 --lr-warmup-fraction .001 --tokenizer-type GPT2BPETokenizer)
PARALLEL_ARGS=(
\t--tensor-model-parallel-size\t$TP_SIZE
\t--pipeline-model-parallel-size ${PP} --micro-batch-size '2' --global-batch-size 16 )
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py ${MODEL_ARGS[@]} ${PARALLEL_ARGS[@]}
"""


def test_a_script_may_have_its_flags_and_numbers_in_variables(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    ((_, own),) = read_own_plans(str(tmp_path / "train.sh"), 4, 64)
    assert own == OwnPlan(2, 2, "1f1b", 4, 1, 16)


def test_a_file_has_a_plan_in_each_line(tmp_path: Path) -> None:
    file = tmp_path / "plans.txt"
    file.write_text(f"# two plans\n{LINE}\n\n  pp=4 micro-batches=8  # no replicas\n")
    found = read_own_plans(str(file), 4, 16)
    assert found == [
        (LINE, parse_own_plan(LINE)), ("pp=4 micro-batches=8", OwnPlan(1, 4, "1f1b", 8)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("--tensor-model-parallel-size 3 --micro-batch-size 1", "groups of 3 GPUs"),
        ("--context-parallel-size=2 --micro-batch-size 1", "knows no context parallelism"),
        ("--pipeline-model-parallel-size 2", "lacks --micro-batch-size"),
        ("--micro-batch-size 3", "samples one of micro-batch size x replicas"),
        ("--pipeline-model-parallel-size 3 --micro-batch-size 1", "4 GPUs must be a multiple"),
        ("--micro-batch-size 1 --use-distributed-optimizer --recompute-activations",
         "has --use-distributed-optimizer, --recompute-activations, whose effect"),
        ("--micro-batch-size 1 --num-layers-per-virtual-pipeline-stage 2", "needs --num-layers"),
        ("--micro-batch-size one", "micro-batch=one; allowed is a number"),
        ("--pipeline-model-parallel-size --micro-batch-size 1", "has pp without a value"),
        ("--pipeline-model-parallel-size $PP --micro-batch-size 1", r"has pp=\$PP; allowed"),
        ("nothing.txt", "cannot be read as a file"),
        (".", "cannot be read as a file"),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_priced_are_refused(text: str, message: str) -> None:
    with pytest.raises(BadPlan, match=message):
        read_own_plans(text, 4, 16)


def test_a_file_without_a_plan_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("# nothing\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 3}}')
    for name, message in (
        ("empty", "has no plan"), ("binary", "cannot be read as a file"), ("json", "are not read"),
    ):  # fmt: skip
        with pytest.raises(BadPlan, match=message):
            read_own_plans(str(tmp_path / name), 4, 16)
