"""Models and plans that a run refuses, and the differences that a check reports."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="models need the extra nostall[torch]")

from nostall.parallel.errors import BadModel, BadPlan  # noqa: E402
from nostall.parallel.execute.preconditions import (  # noqa: E402
    check_deterministic,
    check_optimizer,
    check_sample_sums,
)
from nostall.parallel.execute.reference import Reference, make_optimizer  # noqa: E402
from nostall.parallel.execute.run_config import RunResult  # noqa: E402
from nostall.parallel.module import Model  # noqa: E402
from nostall.parallel.plan import Plan, Stage  # noqa: E402
from tests.unit.parallel import jobs  # noqa: E402
from tests.unit.parallel.ranks import Case, workload  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("first", "second", "is_refused"),
    [
        ((0, 1), (2,), True),
        ((0, 1), (2, 3), False),
        ((0,), (1, 2), False),
        ((0, 1), (2, 3, 4), True),
    ],
)
def test_a_value_of_samples_must_come_from_one_replica(
    first: tuple[int, ...], second: tuple[int, ...], is_refused: bool
) -> None:
    model = Model(jobs.penalty())
    work = workload(model, Case("penalty", "penalty", (), "pb", 12, 6))
    plan = Plan((Stage(0, 1, first), Stage(1, 2, second)), "pb")
    if is_refused:
        with pytest.raises(BadPlan, match=r"mean.*without a sample dimension.*2 replicas"):
            check_sample_sums(model, work, plan)
    else:
        check_sample_sums(model, work, plan)


def test_values_that_depend_on_parameters_alone_may_come_from_any_replica() -> None:
    class Penalised(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.linear(x), self.linear.weight.pow(2).sum()

    job = jobs.penalty()
    job.module[0] = Penalised().double()
    model = Model(job)
    (scalar,) = (name for name in model.crossing(1) if model.sample_dim[name] is None)
    assert model.sample_sums(1) == () and scalar


def test_a_check_refuses_random_forward_passes_by_name() -> None:
    model = Model(jobs.dropout())
    with pytest.raises(BadModel, match=r"random numbers \(aten\.dropout"):
        check_deterministic(model.random_operations)
    model.job.module.eval()
    check_deterministic(Model(model.job).random_operations)


def test_attention_without_dropout_draws_no_random_numbers() -> None:
    class Attention(torch.nn.Module):
        def __init__(self, dropout: float) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 6)
            self.dropout = dropout

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.linear(x)[:, None, None]
            attend = torch.nn.functional.scaled_dot_product_attention
            return attend(heads, heads, heads, dropout_p=self.dropout)[:, 0, 0, :5]

    def model(dropout: float) -> Model:
        job = jobs.complex_cut()
        return Model(jobs.replace(job, module=Attention(dropout).double()))

    assert model(0.0).random_operations == ()
    assert model(0.1).random_operations == ("aten.scaled_dot_product_attention.default",)


def test_a_model_with_frozen_parameters_only_is_refused() -> None:
    job = jobs.chain()
    job.module.requires_grad_(False)
    with pytest.raises(BadModel, match="all parameters are frozen"):
        Model(job)
    assert make_optimizer(job, job.module.parameters()) is None


class _Clipping(torch.optim.SGD):
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_(parameters, 0.01)
        super().step()


@pytest.mark.parametrize(
    ("optimizer", "is_sharded", "is_refused"),
    [
        (lambda p: _Clipping(p, lr=1.0), False, True),
        (lambda p: torch.optim.AdamW(p, lr=1e-3), True, False),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), True, False),
        (lambda p: torch.optim.Adafactor(p), False, False),
        (lambda p: torch.optim.Adafactor(p), True, True),
        (lambda p: torch.optim.LBFGS(p), False, True),
    ],
)
def test_optimisers_that_couple_parameters_of_ranks_are_refused(
    optimizer: Any, is_sharded: bool, is_refused: bool
) -> None:
    job = jobs.replace(jobs.chain(), optimizer=optimizer)
    if is_refused:
        with pytest.raises(BadModel, match="each rank has the gradients of its own"):
            check_optimizer(job, is_sharded=is_sharded)
    else:
        check_optimizer(job, is_sharded=is_sharded)


def test_the_tolerance_is_that_of_the_computation() -> None:
    reference = Reference(jobs.chain(), CPU, torch.bfloat16)
    assert reference.loss_error(2.0 + 1e-2, 2.0, torch.float64) < 1
    assert reference.loss_error(2.0 + 0.2, 2.0, torch.float64) > 1


def test_values_that_are_not_numbers_are_unequal() -> None:
    reference = Reference(jobs.chain(), CPU)
    inputs, targets = reference.job.example_batch(4)
    reference.step(inputs, targets)
    parameters = dict(reference.module.named_parameters())
    gradients = {name: p.grad for name, p in parameters.items()}
    assert reference.gradient_error(gradients) == 0
    assert reference.gradient_error({**gradients, next(iter(gradients)): None}) > 1
    assert reference.loss_error(2.0, 2.0, torch.float64) == 0
    assert reference.loss_error(2.0 + 1e-6, 2.0, torch.float64) > 1
    assert reference.loss_error(math.nan, math.nan, torch.float64) == math.inf
    next(iter(gradients.values())).fill_(math.nan)
    assert reference.gradient_error(gradients) == math.inf
    assert not RunResult("p2p", worst_gradient=math.inf, worst_loss=0.0).is_equal
    assert not RunResult("p2p", worst_gradient=0.0, worst_loss=2.0).is_equal
    assert RunResult("p2p", worst_gradient=1.0, worst_loss=1.0).is_equal
