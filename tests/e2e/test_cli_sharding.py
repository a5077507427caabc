"""End-to-end tests of ``nostall plan --planner sharding|automap`` and of launching such a plan."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

import pytest

from nostall.parallel.errors import BadPlan
from tests.e2e.cli import error_line, nostall, nostall_here

pytest.importorskip("torch", reason="modules need the extra nostall[torch]")
pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

MODULE = """
import torch

def build():
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8), torch.nn.LayerNorm(8)
    ).double()
    x = torch.randn(4, 8).double()
    return module, (x,), x.clone(), torch.nn.functional.mse_loss

def two_blocks():
    return blocks(2)

def four_blocks():
    return blocks(4)

def blocks(count):
    torch.manual_seed(0)
    blocks = [
        torch.nn.Sequential(torch.nn.Linear(8, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
        for _ in range(count)
    ]
    x = torch.randn(4, 8).double()
    return torch.nn.Sequential(*blocks).double(), (x,), x.clone(), torch.nn.functional.mse_loss

class Branching(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) if x.sum() > 0 else x

def odd():
    module = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    return module, (torch.randn(9, 7),), torch.randn(9, 3), torch.nn.functional.mse_loss

def branching():
    return Branching(), (torch.randn(4, 4),), torch.randn(4, 4), torch.nn.functional.mse_loss
"""
CLUSTER = """
name = "two"
[[servers]]
gpus = 2
memory_gib = {memory}
link = {{ bandwidth_gbytes = 300, latency_us = 1 }}
"""
SLOW = """
name = "slow"
[[servers]]
count = 2
gpus = {gpus}
memory_gib = {memory}
link = {{ bandwidth_gbytes = 1, latency_us = 1 }}
[network]
bandwidth_gbytes = 1e-3
latency_us = 1
"""
"""Two servers; moving a parameter between them takes longer than its products on SLOW_GPU."""
SLOW_GPU = """
name = "slow-gpu"
memory = "1 GB/s"
memory_size = "1 GB"
pcie = "1 GB/s"
nvlink = "1 GB/s"
ethernet = "1 Gb/s"
gpus_per_server = 1
pcie_links = 1
[flops]
fp64 = "0.1 GFLOP/s"
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(MODULE)
    (tmp_path / "two.toml").write_text(CLUSTER.format(memory=1))
    (tmp_path / "tiny.toml").write_text(CLUSTER.format(memory=1e-5))
    (tmp_path / "slow.toml").write_text(SLOW.format(gpus=1, memory=1))
    (tmp_path / "four.toml").write_text(SLOW.format(gpus=2, memory=6e-5))
    (tmp_path / "slow-gpu.toml").write_text(SLOW_GPU)
    return tmp_path


def _arguments(files: Path, build: str = "build", cluster: str = "two.toml") -> tuple[object, ...]:
    target = f"{files / 'train.py'}:{build}"
    return ("plan", target, "--cluster", files / cluster, "--planner", "sharding")


def _seconds(plan: Mapping[str, float]) -> float:
    """Of a step with its optimiser, by which plans are chosen."""
    return plan["predicted_step_s"] + plan["predicted_update_s"]


@pytest.mark.slow
def test_a_plan_is_written_and_trains_as_one_process_does(files: Path) -> None:
    plan = files / "plan.json"
    done = nostall_here(
        *_arguments(files), "--global-batch", 4096, "--format", "json", "--out", plan
    )
    assert done.code == 0, done.err
    assert json.loads(plan.read_text()) == done.json
    keys = ["planner", "predicted_step_s", "predicted_update_s", "kind"]
    assert list(done.json)[:4] == keys and done.json["predicted_update_s"] >= 0
    assert (done.json["planner"], done.json["kind"]) == ("sharding", "modelled")
    step_s, bound_s = done.json["predicted_step_s"], done.json["bound_s"]
    assert 0 < bound_s <= step_s
    assert done.json["is_proven"] == (step_s <= bound_s * (1 + 1e-4))
    names = {row["planner"] for row in done.json["runners_up"]}
    assert names == {"data-parallel", "fsdp", "megatron", "replicated", "tensor-parallel"}
    assert all(_seconds(row) >= _seconds(done.json) for row in done.json["runners_up"])
    ran = nostall("launch", plan, "--steps", 2, "--device", "cpu", "--check", "--format", "json")
    assert ran.code == 0, ran.err
    assert ran.json["engine"] == "sharded"
    assert ran.json["equal"]
    assert ran.json["worst_gradient"] <= 1e-3  # 1e-12 of the largest entry
    calls = {row["kind"]: row["calls"] for row in done.json["collectives"]}
    assert ran.json["collectives"] == calls


def test_the_table_names_placements_collectives_and_runners_up(files: Path) -> None:
    styles = files / "styles.py"
    options = ("--global-batch", 4096, "--mesh", 2, "--quiet", "--export", styles,
               "--picture", files / "plan.svg")  # fmt: skip
    done = nostall_here(*_arguments(files), *options)
    assert done.code == 0, done.err
    compile(styles.read_text(), "styles.py", "exec")
    assert f"styles:   {styles}: " in done.out
    picture = ElementTree.parse(files / "plan.svg").getroot()
    words = "".join(picture.itertext())
    assert all(text in words for text in ("0.weight 32x8", "addmm", "replicated", "modelled step"))
    svg = "{http://www.w3.org/2000/svg}"
    boxes = [box for box in picture.iter(f"{svg}rect") if box.get("x") == "510"]
    ends = {path.get("d", "").split()[-1] for path in picture.iter(f"{svg}path")}
    assert {f"510,{int(box.get('y', 0)) + 10.0}" for box in boxes} <= ends, "unread operators"
    assert "note: the cluster file has no latency" not in done.out
    for text in ("0.weight", "32x8", "collectives of a step", "data-parallel", "modelled step"):
        assert text in done.out


def test_automap_is_shown_beside_the_other_plans(files: Path) -> None:
    arguments = [*_arguments(files)[:-1], "automap", "--seconds", 4, "--format", "json"]
    done = nostall_here(*arguments, "--seed", 1)
    assert done.code == 0, done.err
    assert done.json["planner"] == "automap"
    assert not done.json["is_proven"]
    assert {"sharding", "automap-data"} <= {row["planner"] for row in done.json["runners_up"]}


def check_launch(plan: Path, engine: str) -> None:
    done = nostall("launch", plan, "--steps", 2, "--device", "cpu", "--check")
    assert done.code == 0 and f"engine {engine}" in done.out, done.err


def test_the_engines_of_torch_are_planned(files: Path) -> None:
    plan = files / "engine.json"
    for engine in ("ddp", "fsdp2"):
        planned = nostall_here(*_arguments(files)[:-1], engine, "--out", plan)
        assert planned.code == 0 and f"{engine}: modelled step" in planned.out, planned.err
    assert "no such pair" in error_line(nostall_here(*_arguments(files)[:-1], "tp"))
    refused = nostall_here("launch", plan, "--device", "cpu", "--try", 2)
    assert "lists no candidates" in error_line(refused)
    assert "--mesh does not change a plan of fsdp2" in error_line(
        nostall_here(*_arguments(files)[:-1], "fsdp2", "--mesh", 2)
    )


@pytest.mark.slow
def test_a_launch_tries_the_plan_and_the_engines_of_torch(files: Path) -> None:
    plan = files / "tried.json"
    for engine in ("ddp", "fsdp2"):
        assert nostall_here(*_arguments(files)[:-1], engine, "--out", plan).code == 0
        check_launch(plan, engine)
    assert nostall_here(*_arguments(files), "--mesh", 2, "--out", plan).code == 0
    tried = nostall("launch", plan, "--device", "cpu", "--steps", 2, "--try", 2, "--format", "json")
    assert tried.code == 0, tried.err
    assert {row["plan"] for row in tried.json["trials"]} == {"the plan", "ddp", "fsdp2"}


def test_errors_are_one_line(files: Path) -> None:
    profile = files / "profile.json"
    profile.write_text("{}")
    cluster = ("--cluster", files / "two.toml", "--planner", "sharding")
    assert "needs a module" in error_line(nostall_here("plan", profile, *cluster))
    branching = _arguments(files, "branching")
    assert "no branches on values" in error_line(nostall_here(*branching))
    tiny = _arguments(files, cluster="tiny.toml")
    both = error_line(nostall_here(*tiny, "--out", files / "plan.json"))
    assert "no sharding fits" in both and "no plan of 4 micro-batches was found" in both
    assert "no sharding fits" in error_line(nostall_here(*tiny, "--mesh", 2))
    assert not (files / "plan.json").exists()
    assert "product is 2" in error_line(nostall_here(*_arguments(files), "--mesh", "2x2"))
    assert "--mesh 'two'" in error_line(nostall_here(*_arguments(files), "--mesh", "two"))
    odd = _arguments(files, "odd")
    divides = error_line(nostall_here(*odd, "--global-batch", 9, "--mesh", 2))
    assert "no dimension" in divides and "multiple of 2" in divides
    assert nostall_here(*odd, "--global-batch", 8).code == 0  # the batch divides
    for factor in ("inf", "nan", "0.5", "1e300"):
        refused = nostall_here(*_arguments(files), "--state-factor", factor)
        assert "--state-factor" in error_line(refused)
    assert not (files / "plan.json").exists()
    refused = nostall_here(*_arguments(files), "--micro-batch", 3, "--global-batch", 8)
    assert "not a multiple of --micro-batch 3" in error_line(refused)
    refused = nostall_here(*_arguments(files), "--micro-batch", 2, "--mesh", 2)
    assert "--mesh is not for pipelines whose stages are sharded" in error_line(refused)
    automap = (*_arguments(files)[:-1], "automap", "--micro-batch", 2, "--mesh", 2)
    assert "leave one of them out" in error_line(nostall_here(*automap))
    pipeline = ("plan", profile, "--cluster", files / "two.toml", "--mesh", "2")
    assert "is for the planners sharding and automap" in error_line(nostall_here(*pipeline))


def test_a_plan_of_another_module_is_refused(files: Path) -> None:
    plan = files / "plan.json"
    assert nostall_here(*_arguments(files), "--global-batch", 4, "--out", plan).code == 0
    from nostall.parallel.module import load_job
    from nostall.parallel.sharding.capture.operators import capture
    from nostall.parallel.sharding.plan_file import load_sharding_plan

    loaded = load_sharding_plan(plan)
    target = f"{files / 'train.py'}:build"
    graph = capture(load_job(target), 4, (2,)).graph
    assert len(loaded.assignment(graph)[0]) == len(graph.operators)
    (files / "train.py").write_text(MODULE.replace("torch.nn.GELU(), ", ""))
    other = capture(load_job(target), 4, (2,)).graph
    with pytest.raises(BadPlan, match="made for another training step"):
        loaded.assignment(other)
    assert "--engine is for pipeline plans" in error_line(
        nostall_here("launch", plan, "--engine", "p2p")
    )
    document = json.loads(plan.read_text())
    for key, value in (
        ("state_factor", float("inf")),
        ("state_factor", float("nan")),
        ("global_batch", 0),
        ("mesh", []),
        ("mesh", [2, 0]),
        ("mesh", [3]),
    ):
        changed = {**document, "inputs": {**document["inputs"], key: value}}
        plan.write_text(json.dumps(changed))
        assert key in error_line(nostall_here("launch", plan)), (key, value)
    plan.write_text(json.dumps({"nostall_sharding_plan": 1}))
    assert "planner is missing" in error_line(nostall_here("launch", plan))


@pytest.mark.slow
def test_stages_that_are_sharded_are_compared_with_pure_plans(files: Path) -> None:
    options = ("--global-batch", 64, "--micro-batch", 8, "--quiet")
    done = nostall_here(*_arguments(files), *options, "--format", "json")
    assert done.code == 0, done.err
    plans = done.json["plans"]
    assert done.json["micro_batches"] == 8
    assert min(p["predicted_step_s"] for p in plans.values()) == plans["best"]["predicted_step_s"]
    shown = nostall_here(*_arguments(files), *options)
    assert "modelled step" in shown.out and "pure sharding" in shown.out


@pytest.mark.slow
def test_a_pipeline_of_sharded_stages_is_written_and_trains_as_one_process_does(
    files: Path,
) -> None:
    """No GPU can hold the whole model, and links between servers are slow."""
    plan = files / "hybrid.json"
    options = ("--global-batch", 8, "--micro-batch", 4, "--quiet", "--out", plan)
    done = nostall_here(*_on_slow_gpus(files, "four.toml"), *options, "--format", "json")
    assert done.code == 0, done.err
    gpus = [stage["gpus"] for stage in done.json["stages"]]
    assert len(gpus) >= 2 and max(gpus) > 1 and sum(gpus) == 4
    assert _trains(plan)["engine"] == "hybrid"
    document = json.loads(plan.read_text())
    document["stages"][-1]["gpus"] += 1
    plan.write_text(json.dumps(document))
    assert "allowed are stages" in error_line(nostall_here("launch", plan))


@pytest.mark.slow
def test_without_a_micro_batch_a_faster_pipeline_is_written_and_trains(files: Path) -> None:
    plan = files / "pipeline.json"
    options = ("--global-batch", 16, "--quiet", "--out", plan)
    done = nostall_here(*_on_slow_gpus(files, "slow.toml"), *options)
    assert done.code == 0, done.err
    assert "pipeline, the best" in done.out and "the whole batch at once" in done.out
    document = json.loads(plan.read_text())
    assert [stage["gpus"] for stage in document["stages"]] == [1, 1]
    assert document["inputs"]["micro_batch"] == 4
    assert _trains(plan)["engine"] == "hybrid"


@pytest.mark.slow
def test_the_pipeline_explorer_of_automap_wins_over_slow_links(files: Path) -> None:
    plan = files / "automap.json"
    options = ("--global-batch", 16, "--seconds", 6, "--quiet", "--out", plan)
    done = nostall_here(*_on_slow_gpus(files, "slow.toml", "automap"), *options)
    assert done.code == 0, done.err
    document = json.loads(plan.read_text())
    assert document["planner"] == "automap" and "nostall_sharding_plan" not in document
    assert "GPUs" in done.out and ": sharding" in done.out
    assert _trains(plan)["engine"] == "torch"


def test_a_batch_that_no_sharding_serves_is_planned_as_a_pipeline(files: Path) -> None:
    plan = files / "plan.json"
    done = nostall_here(*_arguments(files, "odd"), "--global-batch", 9, "--quiet", "--out", plan)
    assert done.code == 0, done.err
    assert "the whole batch at once: no dimension" in done.out
    assert [stage["gpus"] for stage in json.loads(plan.read_text())["stages"]] == [1, 1]


def _on_slow_gpus(files: Path, cluster: str, planner: str = "sharding") -> tuple[object, ...]:
    build = "two_blocks" if cluster == "four.toml" else "four_blocks"
    arguments = _arguments(files, build, cluster)[:-1]
    return (*arguments, planner, "--hardware", files / "slow-gpu.toml")


def _trains(plan: Path) -> dict[str, object]:
    """The record of two steps by a plan, which are those of one process."""
    ran = nostall("launch", plan, "--steps", 2, "--device", "cpu", "--check", "--format", "json")
    assert ran.code == 0, ran.err
    assert ran.json["equal"] is True
    return dict(ran.json)
