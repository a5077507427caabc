"""Hybrid plans: the search against enumeration, and training on four processes."""

from __future__ import annotations

import itertools
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

from nostall.parallel.cluster import parse_cluster  # noqa: E402
from nostall.parallel.errors import Infeasible  # noqa: E402
from nostall.parallel.module import Job, Model  # noqa: E402
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh  # noqa: E402
from nostall.parallel.sharding.cost.prices import Prices  # noqa: E402
from nostall.parallel.sharding.cost.rates import DeviceRates  # noqa: E402
from nostall.parallel.sharding.hybrid.planner import plan_hybrid  # noqa: E402
from nostall.parallel.sharding.hybrid.run import (  # noqa: E402
    CapturedStage,
    capture_stage,
    run_hybrid,
)
from nostall.parallel.sharding.hybrid.search import best_hybrid, cost_table  # noqa: E402
from nostall.parallel.sharding.planners.rules import RULES  # noqa: E402
from nostall.parallel.sharding.planners.sharding import Options, plan_by_rule  # noqa: E402

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
        result = run_hybrid(stages(own, rule), micro_batches())
        torch.save(result, Path(folder) / f"{rule}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
