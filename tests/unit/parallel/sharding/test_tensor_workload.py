"""Measured layers in groups of GPUs with tensor parallelism."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="tensor parallelism needs the extra nostall[torch]")
pytest.importorskip("scipy", reason="shardings need the extra nostall[sharding]")

from torch import nn  # noqa: E402

from nostall.parallel.errors import BadPlan  # noqa: E402
from nostall.parallel.module import Job  # noqa: E402
from nostall.parallel.plan import Workload  # noqa: E402
from nostall.parallel.profile import Layer, Profile  # noqa: E402
from nostall.parallel.sharding.cost.rates import DeviceRates  # noqa: E402
from nostall.parallel.sharding.tensor_workload import tensor_workload  # noqa: E402
from tests.unit.parallel.cases import servers  # noqa: E402

RATES = DeviceRates("slow", {"float32": 1e6}, 1e9)
"""Products take most of the time, and collectives hardly any."""


class Pair(nn.Module):
    """Two layers, under names that Megatron's rules know or not."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.add_module(names[0], nn.Linear(8, 32))
        self.add_module(names[1], nn.Linear(32, 8))

    def forward(self, x: Any) -> Any:
        first, second = (getattr(self, name) for name in self.names)
        return second(torch.relu(first(x)))


def workload(batch: int = 4) -> Workload:
    seconds = batch / 4
    layers = tuple(Layer(n, seconds, 2 * seconds, 1000.0, 100.0) for n in "ab")
    return Workload(Profile("pair", layers, (), batch), servers(2, 2), 8, 4)


def job(*names: str) -> Job:
    return Job(Pair(*names), (torch.randn(4, 8),), torch.randn(4, 8), nn.functional.mse_loss)


def test_cut_layers_take_their_share_on_groups_of_gpus() -> None:
    found = tensor_workload(workload(), job("fc1", "fc2"), RATES, 2, 4)
    assert (len(found.cluster), found.cluster.server) == (2, (0, 1))
    for own in found.profile.layers:
        assert own.forward_s == pytest.approx(0.5, rel=0.02)
        assert own.backward_s == pytest.approx(1.0, rel=0.02)
        assert own.parameter_bytes == pytest.approx(500.0, rel=0.02)
        assert own.stored_bytes is not None and 50 < own.stored_bytes < 100


def test_collectives_take_their_time_whatever_number_of_samples_was_measured() -> None:
    slow = DeviceRates("slow", {"float32": 1e6}, 1e9, launch_s=0.5)
    for samples in (2, 4):
        seconds = [
            sum(own.forward_s for own in found.profile.layers) * samples / batch
            for batch in (4, 8)
            for found in [tensor_workload(workload(batch), job("fc1", "fc2"), slow, 2, samples)]
        ]
        assert seconds[0] > samples / 4 + 0.4, "the collectives are most of it"
        assert seconds[0] == pytest.approx(seconds[1])


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(BadPlan, match="no parameter has a name of Megatron's rules"):
        tensor_workload(workload(), job("first", "second"), RATES, 2, 4)
    with pytest.raises(BadPlan, match="tp=3 and the cluster 4 GPUs"):
        tensor_workload(workload(), job("fc1", "fc2"), RATES, 3, 4)
