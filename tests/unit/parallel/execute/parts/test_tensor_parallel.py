"""Heads whose loss takes cut logits, on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training by plans needs the extra nostall[torch]")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from nostall.parallel.execute.parts.tensor_parallel import parallelize  # noqa: E402
from nostall.parallel.module.job import Job  # noqa: E402


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_entropy(logits: Any, classes: Any) -> Any:
    """A share too small for the norms of gradients to show it."""
    logs = F.log_softmax(logits, -1)
    return F.cross_entropy(logits, classes) + 1e-5 * (logs.exp() * logs).sum(-1).mean()


@pytest.mark.parametrize(
    ("loss", "are_cut"), [(F.cross_entropy, True), (with_entropy, False)], ids=["cross", "entropy"]
)
@pytest.mark.usefixtures("one_process")
def test_logits_are_cut_only_for_cross_entropy(loss: Callable[..., Any], are_cut: bool) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 8))
    job = Job(module, (torch.randn(2, 4),), torch.tensor([3, 5]), loss)
    assert parallelize(job, {"1": "classes"}, torch.device("cpu")) is are_cut
