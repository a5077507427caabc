"""Heads whose loss takes cut logits, on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training by plans needs the extra nostall[torch]")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy, log_softmax  # noqa: E402

from nostall.parallel.execute.parts.tensor_parallel import parallelize  # noqa: E402
from nostall.parallel.execute.trainer.build import build  # noqa: E402
from nostall.parallel.module.job import Job  # noqa: E402
from nostall.parallel.sharding.engine_file import EngineFile  # noqa: E402
from tests.unit.parallel.execute.trainer.models import servers  # noqa: E402
from tests.unit.parallel.execute.trainer.ranks import adamw  # noqa: E402


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_entropy(logits: Any, classes: Any) -> Any:
    """A share too small for the norms of gradients to show it."""
    logs = log_softmax(logits, -1)
    return cross_entropy(logits, classes) + 1e-5 * (logs.exp() * logs).sum(-1).mean()


@pytest.mark.parametrize(
    ("loss", "are_cut"), [(cross_entropy, True), (with_entropy, False)], ids=["cross", "entropy"]
)
@pytest.mark.usefixtures("one_process")
def test_logits_are_cut_only_for_cross_entropy(loss: Callable[..., Any], are_cut: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))
    job = Job(module, (torch.randn(2, 4),), torch.tensor([3, 5]), loss)
    assert parallelize(job, {"1": "classes"}, torch.device("cpu")) is are_cut


@pytest.mark.usefixtures("one_process")
def test_gradients_are_cut_as_their_parameters() -> None:
    """Else clipping takes the norm of sums over ranks that were not computed."""
    module = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8))
    job = Job(module, (torch.tensor([1, 6]),), torch.tensor([3, 5]), cross_entropy)
    plan = EngineFile("tp", 1.0, "job", 2, servers(1, 1), "tp", (), styles={"0": "words"})
    trainer = build(plan, job, adamw)
    trainer.forward_backward((torch.tensor([1, 6]), torch.tensor([3, 5])))
    for name, parameter in trainer.named_parameters():
        assert parameter.grad.placements == parameter.placements, name  # type: ignore[union-attr]
    trainer.close()
