"""Hybrid plans: the search against enumeration, and training on four processes."""

from __future__ import annotations

import itertools
import math
import os
import random
import socket
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")
pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from torch import nn  # noqa: E402

from nostall.parallel.cluster import Cluster, parse_cluster  # noqa: E402
from nostall.parallel.errors import Infeasible  # noqa: E402
from nostall.parallel.module import Job, Model  # noqa: E402
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh  # noqa: E402
from nostall.parallel.sharding.cost.prices import Prices  # noqa: E402
from nostall.parallel.sharding.cost.rates import DeviceRates  # noqa: E402
from nostall.parallel.sharding.cost.timeline import timeline  # noqa: E402
from nostall.parallel.sharding.hybrid import planner  # noqa: E402
from nostall.parallel.sharding.hybrid.messages import StageProcesses  # noqa: E402
from nostall.parallel.sharding.hybrid.planner import HybridEffort, plan_hybrid  # noqa: E402
from nostall.parallel.sharding.hybrid.run import (  # noqa: E402
    CapturedStage,
    HybridRank,
    capture_stage,
)
from nostall.parallel.sharding.hybrid.search import (  # noqa: E402
    HybridStage,
    best_hybrid,
    cost_table,
)
from nostall.parallel.sharding.planners.rules import RULES  # noqa: E402
from nostall.parallel.sharding.planners.sharding import (  # noqa: E402
    Options,
    ShardingPlan,
    plan_by_rule,
)

SAMPLES, MICRO_BATCHES = 4, 3
RATES = DeviceRates("slow", {"float64": 1e6}, 1e6)


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_the_least_step(seed: int) -> None:
    layers, devices, count = 4, 4, 5
    draw = random.Random(seed)
    table = cost_table(layers, devices, lambda first, end, size: (end - first) * draw.random())
    transfer_s = [0.0, *(0.1 * draw.random() for _ in range(layers - 1))]

    def step_s(stages: list[tuple[int, int, int]]) -> float:
        own = [table[s] + (transfer_s[s[1]] if s[1] < layers else 0.0) for s in stages]
        return sum(own) + (count - 1) * max(own)

    every = [
        list(zip((0, *cuts), (*cuts, layers), sizes, strict=True))
        for n in range(1, layers + 1)
        for cuts in itertools.combinations(range(1, layers), n - 1)
        for sizes in itertools.product((1, 2, 4), repeat=n)
        if sum(sizes) == devices
    ]
    found = best_hybrid(table, layers, devices, count, transfer_s)
    assert found.step_s == pytest.approx(min(map(step_s, every)))
    assert sum(stage.devices for stage in found.stages) == devices
    for kinds in (["sharding"], ["pipeline"]):
        pure = best_hybrid(table, layers, devices, count, transfer_s, kinds)
        assert pure.kind == kinds[0] and pure.step_s >= found.step_s


def test_a_table_without_plans_is_refused() -> None:
    table = cost_table(2, 2, lambda first, end, size: None)
    with pytest.raises(Infeasible, match="no stages cover 2 layers and 2 GPUs"):
        best_hybrid(table, 2, 2, 1, [0.0, 0.0])


class Net(nn.Module):
    """Residual layers between two linear ones; the first layer of all is tied to none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
             for _ in range(2)]
        )  # fmt: skip

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.last(x)


def model() -> Model:
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, 8).double(), torch.randn(SAMPLES, 4).double()
    return Model(Job(Net().double(), (x,), y, nn.functional.mse_loss))


def micro_batches() -> list[Any]:
    torch.manual_seed(1)
    return [
        ((torch.randn(SAMPLES, 8).double(),), torch.randn(SAMPLES, 4).double())
        for _ in range(MICRO_BATCHES)
    ]


def stages(own: Model, rule: str) -> list[CapturedStage]:
    """Two stages on two devices each, sharded by a rule."""
    cut = next(c for c in range(len(own) // 2, len(own)) if len(own.crossing(c)) == 1)
    cluster = parse_cluster(
        'name = "2"\n[[servers]]\ngpus = 2\nmemory_gib = 1\nlink = { bandwidth_gbytes = 300 }\n'
    )
    result = []
    for first, end in ((0, cut), (cut, len(own))):
        captured = capture_stage(own, first, end, SAMPLES, 2)
        prices = Prices(captured.step.graph, ClusterMesh(cluster, (2,)), RATES)
        plan = plan_by_rule(prices, RULES[rule], Options(seconds=20))
        assert plan is not None
        result.append(CapturedStage(captured.stage, captured.step, plan.assignment))
    return result


@pytest.mark.slow
def test_stages_are_priced_once_and_compared_with_pure_plans() -> None:
    cluster = parse_cluster(
        'name = "4"\n[[servers]]\ncount = 2\ngpus = 2\nmemory_gib = 1\n'
        "link = { bandwidth_gbytes = 300 }\n[network]\nbandwidth_gbytes = 1e-3\n"
    )
    own = model()
    found = plan_hybrid(own, cluster, RATES, SAMPLES, 8, 2.0)
    assert found.priced < found.entries
    assert {"sharding", "pipeline"} == set(found.by_kind)
    assert all(found.best.step_s <= plan.step_s for plan in found.by_kind.values())
    assert [s.first for s in found.best.stages] == [0, *(s.end for s in found.best.stages)][:-1]
    assert found.best.stages[-1].end == len(own)
    assert sum(s.devices for s in found.best.stages) == 4
    assert found.why_one_stage == ""


def slow_cluster(memory_gib: float = 1.0) -> Cluster:
    """Two GPUs, between which transfers are slow."""
    return parse_cluster(
        f'name = "2"\n[[servers]]\ncount = 2\ngpus = 1\nmemory_gib = {memory_gib}\n'
        "link = { bandwidth_gbytes = 300 }\n[network]\nbandwidth_gbytes = 1e-2\n"
    )


@pytest.mark.slow
def test_the_priced_shardings_are_those_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """No stage is solved again, also where two equal stages share an entry."""
    module = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).double()
    x = torch.randn(SAMPLES, 8).double()
    own = Model(Job(module, (x,), torch.zeros_like(x), nn.functional.mse_loss))
    found = plan_hybrid(own, slow_cluster(), RATES, SAMPLES, 8, 2.0, HybridEffort(units=4))
    assert found.priced < found.entries
    monkeypatch.setattr(planner, "plan_sharding", _is_not_called)
    pipeline = found.planned(found.by_kind["pipeline"])
    assert len(pipeline) == 2
    for stage, plan in [*found.planned(found.by_kind["sharding"]), *pipeline]:
        forward = timeline(plan.prices, plan.assignment, forward_only=True)
        repeated_s = 0.0 if stage.end == len(own) else forward.step_s
        sent_s = 0.0 if stage.end == len(own) else transfer_s(own, stage.end)
        assert stage.seconds == pytest.approx(plan.step_s + repeated_s + sent_s)


def _is_not_called(*_: object) -> None:
    raise AssertionError("a stage was solved again")


def transfer_s(own: Model, cut: int) -> float:
    return planner.transfer_s(own, slow_cluster(), cut, SAMPLES)


@pytest.mark.slow
def test_memory_counts_what_a_stage_receives_for_each_micro_batch() -> None:
    own, effort = model(), HybridEffort(units=2)

    def stages(micro_batches: int) -> list[tuple[HybridStage, ShardingPlan]]:
        found = plan_hybrid(own, slow_cluster(), RATES, SAMPLES, micro_batches, 2.0, effort)
        return found.planned(found.by_kind["pipeline"])

    few, many = stages(2), stages(5)
    second = few[1][0].first
    sent = sum(8 * math.prod(own.shape(name, SAMPLES)) for name in own.crossing(second))
    given = [8 * SAMPLES * 8, sent + 8 * SAMPLES * 4]  # inputs; received tensors and targets
    peaks = [[plan.memory.peak for _, plan in own_stages] for own_stages in (few, many)]
    assert [b - a for a, b in zip(*peaks, strict=True)] == [3 * size for size in given]


def test_why_there_are_no_stages_is_said() -> None:
    with pytest.raises(Infeasible, match=r"no plan of 8 micro-batches.*layers 0.*GiB"):
        plan_hybrid(model(), slow_cluster(1e-6), RATES, SAMPLES, 8, 2.0, HybridEffort(units=2))
    one = Model(Job(nn.Linear(8, 8), (torch.ones(4, 8),), torch.ones(4, 8), nn.functional.mse_loss))
    found = plan_hybrid(one, slow_cluster(), DeviceRates("slow", {"float32": 1e6}, 1e6), 4, 2, 2.0)
    assert found.best.kind == "sharding" and found.why_one_stage == "the model has one layer"
    tied = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    tied[2].weight = tied[0].weight
    job = Job(tied.double(), (torch.ones(4, 8).double(),), torch.ones(4, 8).double(),
              nn.functional.mse_loss)  # fmt: skip
    why = plan_hybrid(Model(job), slow_cluster(), RATES, 4, 2, 2.0).why_one_stage
    assert "share a parameter" in why


@pytest.mark.slow
def test_a_hybrid_trains_as_one_process_does(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    mp.spawn(_rank, (port, str(tmp_path)), nprocs=4)
    reference = model().job
    loss = sum(reference.loss(reference.module(*x), y) for x, y in micro_batches())
    loss = loss / MICRO_BATCHES
    loss.backward()
    expected = {name: p.grad for name, p in reference.module.named_parameters()}
    for rule in ("data-parallel", "fsdp"):
        seen: set[str] = set()
        for rank in range(4):
            own_loss, gradients = torch.load(tmp_path / f"{rule}-{rank}.pt")
            if rank >= 2:
                assert own_loss == pytest.approx(float(loss.detach()), rel=1e-14)
            for name, gradient in gradients.items():
                error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
                assert error < 1e-12, (rule, name)
            seen |= gradients.keys()
        assert seen == expected.keys()


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    for rule in ("data-parallel", "fsdp"):
        own = model()
        processes = StageProcesses([stage.devices for stage in stages(own, rule)])
        hybrid = HybridRank(stages(own, rule)[processes.number], processes)
        loss = float(hybrid.step(micro_batches())) / MICRO_BATCHES
        result = loss, hybrid.own.whole_gradients(1 / MICRO_BATCHES)
        torch.save(result, Path(folder) / f"{rule}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
