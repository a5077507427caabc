"""Modules whose traced layers would train otherwise than the module does, and effects in graphs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="modules need the extra nostall[torch]")

import torch.nn.functional as F  # noqa: E402, N812
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from nostall.parallel.errors import BadModel  # noqa: E402
from nostall.parallel.module import (  # noqa: E402
    Job,
    Model,
    loss_parts,
    profile_job,
)
from nostall.parallel.module.eager import SAMPLES, compare_with_eager, compared_model  # noqa: E402
from nostall.parallel.module.loss_parts import refuse_uneven  # noqa: E402

CPU = torch.device("cpu")
Function = Callable[[nn.Module, torch.Tensor], torch.Tensor]
CALLS = [0]


class Block(nn.Module):
    """A linear layer; ``function`` maps the module and its input to the output."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.register_buffer("mean", torch.zeros(6))
        self.scale = nn.Parameter(torch.ones(6))
        self.calls, self.seen, self.flag = 0, [], False
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def job(function: Function, reduction: str = "mean") -> Job:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), Block(function), nn.Linear(6, 3))
    return Job(module, (torch.randn(8, 6),), torch.randn(8, 3), F.mse_loss)


class Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def straight_through(block: Any, x: torch.Tensor) -> torch.Tensor:
    return Rounding.apply(block.linear(x))


def hook(block: Any, x: torch.Tensor) -> torch.Tensor:
    y = block.linear(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: 1.001 * gradient)
    return y


def clip_hook(block: Any, x: torch.Tensor) -> torch.Tensor:
    """The gradients of a comparison are smaller than those that it clips."""
    y = block.linear(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient.clamp(-10.0, 10.0))
    return y


def global_counter(block: Any, x: torch.Tensor) -> torch.Tensor:
    CALLS[0] += 1
    return block.linear(x) * (1 + CALLS[0] % 2)


def running_mean(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        block.mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return block.linear(x - block.mean)


def view_of_running_mean(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        block.mean[:3].copy_(x.mean(0)[:3])
    return block.linear(x - block.mean)


def changed_in_autocast(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        block.mean.add_(1)
        y = block.linear(x)
    return y.float() + block.mean


def clamped_parameter(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        block.scale.clamp_(-0.5, 0.5)
    return block.linear(x) * block.scale


def functional_batch_norm(block: Any, x: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(block.linear(x), None, None, training=True)


def counter(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.calls += 1
    return block.linear(x)


def growing_list(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.seen.append(x.shape[0])
    return block.linear(x)


def toggle(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.flag = not block.flag
    return block.linear(x)


def python_random(block: Any, x: torch.Tensor) -> torch.Tensor:
    return block.linear(x) if random.random() < 0.99 else x


def numpy_random(block: Any, x: torch.Tensor) -> torch.Tensor:
    return block.linear(x) if np.random.rand() < 0.99 else x


def reentrant_checkpoint(block: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block.inner, x, use_reentrant=True)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (straight_through, r"gradient of 0\.weight from the traced layers differs"),
        (hook, r"gradient of 0\.weight from the traced layers differs"),
        (clip_hook, r"gradient of 0\.weight differs .* with 2\^20 times the loss"),
        (reentrant_checkpoint, r"gradient of 0\.weight from the traced layers differs"),
        (global_counter, "two passes of the module .* differ: the loss"),
        (running_mean, r"wrap_with_set_grad_enabled changes the buffer 1\.mean"),
        (view_of_running_mean, r"wrap_with_set_grad_enabled changes the buffer 1\.mean"),
        (changed_in_autocast, r"wrap_with_autocast changes the buffer 1\.mean"),
        (clamped_parameter, r"changes the parameter 1\.scale"),
        (functional_batch_norm, "batch_norm.* takes its statistics from the batch"),
        (counter, r"the attribute 1\.calls"),
        (growing_list, r"the attribute 1\.seen"),
        (toggle, r"the attribute 1\.flag"),
        (python_random, "the state of Python's random"),
        (numpy_random, "the state of numpy.random"),
    ],
)
def test_a_module_that_its_trace_does_not_equal_is_refused(
    function: Function, message: str
) -> None:
    # Neither draws a number above 0.99 soon, so that all passes take one branch.
    random.seed(0)
    np.random.seed(0)
    with pytest.raises(BadModel, match=message):
        profile_job(job(function), repeats=1)


def no_grad_scale(block: Any, x: torch.Tensor) -> torch.Tensor:
    y = block.linear(x)
    with torch.no_grad():
        size = y.abs().mean().mul_(2)
    return y / size


def autocast(block: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x + block.inner(block.linear(x)).float()


def initialised_once(block: Any, x: torch.Tensor) -> torch.Tensor:
    block.flag, block.size = True, tuple(x.shape[1:])
    return block.linear(x)


def module_called_twice(block: Any, x: torch.Tensor) -> torch.Tensor:
    return block.inner(x + block.inner(block.linear(x)))


def straight_through_by_operators(block: Any, x: torch.Tensor) -> torch.Tensor:
    y = block.linear(x)
    return y + (torch.round(y * 8) / 8 - y).detach()


def dropout(block: Any, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(block.linear(x), 0.5)


@pytest.mark.parametrize(
    "function",
    [
        no_grad_scale,
        autocast,
        initialised_once,
        module_called_twice,
        straight_through_by_operators,
        dropout,
    ],
)
def test_a_module_that_its_trace_equals_is_accepted_as_it_was(function: Function) -> None:
    own = job(function)
    before = {name: value.clone() for name, value in own.module.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    notes, _ = compare_with_eager(Model(own), 4, CPU)
    assert ["statistics of a batch" in note for note in notes] == [True] * (
        function is no_grad_scale
    )
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(value, before[n]) for n, value in own.module.state_dict().items())
    assert all(parameter.grad is None for parameter in own.module.parameters())


def test_activation_checkpointing_has_a_note_of_its_own() -> None:
    def recomputed(block: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(block.inner, x, use_reentrant=False)

    notes: list[str] = []
    compared_model(job(recomputed), notes.append, samples=4)
    (note,) = notes
    assert note.startswith("1.inner runs again in the backward pass (activation checkpointing)")


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_module_without_gradients_is_refused() -> None:
    layers = [Block(reentrant_checkpoint), Block(reentrant_checkpoint)]
    nothing = Job(nn.Sequential(*layers), (torch.randn(8, 6),), torch.randn(8, 6), F.mse_loss)
    with pytest.raises(BadModel, match=r"nothing to train .*use_reentrant=False"):
        compared_model(nothing, lambda note: None, samples=4)


def test_random_numbers_in_sub_graphs_are_seen() -> None:
    def under_autocast(block: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return F.dropout(block.linear(x), 0.5).float()

    assert Model(job(under_autocast)).random_operations == ("aten.dropout.default",)


@pytest.mark.parametrize(
    ("layers", "p", "is_random"), [(1, 0.0, False), (2, 0.0, False), (2, 0.5, True)]
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_draw_numbers_between_their_layers_alone(
    kind: Any, layers: int, p: float, is_random: bool
) -> None:
    recurrent = kind(6, 6, layers, dropout=p, batch_first=True)
    own = job(lambda block, x: recurrent(x[:, None])[0][:, 0])
    own.module[1].recurrent = recurrent
    assert bool(Model(own).random_operations) is is_random


def test_the_precision_of_a_computation_is_that_of_its_coarsest_value() -> None:
    def half_mask(block: Any, x: torch.Tensor) -> torch.Tensor:
        return block.linear(x) * (x > 0).to(torch.bfloat16).float()

    assert Model(job(autocast)).computation_dtype == torch.bfloat16
    assert Model(job(half_mask)).computation_dtype == torch.bfloat16
    assert Model(job(no_grad_scale)).computation_dtype == torch.float32


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_gradient_hooks_of_parameters_are_refused(register: str) -> None:
    own = job(no_grad_scale)
    getattr(own.module[1].scale, register)(lambda value: None)
    with pytest.raises(BadModel, match=r"parameter 1\.scale has a gradient hook"):
        Job(own.module, own.inputs, own.targets, own.loss)


def test_a_module_that_cannot_train_is_refused() -> None:
    def on_other_device(block: Any, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            raise ValueError("no kernel")
        return block.linear(x)

    with pytest.raises(BadModel, match=f"fails on {SAMPLES} samples: ValueError: no kernel"):
        compared_model(job(on_other_device), print)


@pytest.mark.parametrize(
    "loss",
    [
        lambda y, t: F.cross_entropy(y, t, weight=torch.tensor([1.0, 2.0, 0.5])),
        lambda y, t: F.cross_entropy(y, t, ignore_index=0),
        lambda y, t: (y / y.std(0)).abs().mean() + 0 * t.sum(),
    ],
)
def test_a_loss_that_is_not_the_mean_of_those_of_parts_is_refused(loss: Any) -> None:
    """Micro-batches and ranks would train on another one."""
    torch.manual_seed(0)
    targets = torch.tensor([0, 1, 1, 2, 1, 0, 2, 2])
    given = Job(nn.Linear(6, 3), (torch.randn(8, 6),), targets, loss)
    with pytest.raises(BadModel, match=r"the loss of \d samples is .*, and the mean of those"):
        compare_with_eager(Model(given), SAMPLES, CPU)
    smoothed = Job(
        nn.Linear(6, 3), given.inputs, targets,
        lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    )  # fmt: skip
    assert compare_with_eager(Model(smoothed), SAMPLES, CPU)[0] == ()


def labels(*values: float) -> torch.Tensor:
    return torch.tensor([*values, *[2] * (8 - len(values))])


@pytest.mark.parametrize(
    ("loss", "targets", "later"),
    [
        (F.cross_entropy, labels(0, 1), labels(-100, 1)),
        (lambda y, t: F.cross_entropy(y, t, ignore_index=255), labels(0, 1), labels(1, 1, 255)),
        (
            lambda y, t: F.cross_entropy(y, t, weight=torch.tensor([1.0, 2.0, 0.5])),
            labels(0) * 0,
            labels(1),
        ),
        (
            lambda y, t: (y.sum(1) * t).sum() / t.sum(),
            torch.ones(8),
            torch.tensor([1.0, 0, 1, 1, 1, 1, 1, 1]),
        ),
        (
            lambda y, t: (
                torch.where(t.isnan(), 0, y.sum(1) - t.nan_to_num()).sum() / (~t.isnan()).sum()
            ),
            torch.ones(8),
            torch.tensor([1.0, torch.nan, 1, 1, 1, 1, 1, 1]),
        ),
    ],
    ids=["default", "ignore_index", "class weights", "mask", "nan"],
)
def test_labels_that_a_loss_leaves_out_in_later_batches_alone_are_refused(
    loss: Any, targets: torch.Tensor, later: torch.Tensor
) -> None:
    torch.manual_seed(0)
    given = Job(nn.Linear(6, 3), (torch.randn(8, 6),), targets, loss)
    notes, watched = compare_with_eager(Model(given), SAMPLES, CPU)
    assert notes == ()
    refuse_uneven((given.inputs, targets), watched)
    with pytest.raises(BadModel, match=r"a sample has \d+ targets with the value"):
        refuse_uneven((given.inputs, later), watched)


def test_gradients_that_a_module_has_stay_as_they_are() -> None:
    torch.manual_seed(0)
    given = Job(nn.Linear(6, 3), (torch.randn(8, 6),), torch.randn(8, 3), F.mse_loss)
    given.run(given.inputs, given.targets).backward()
    before = given.module.weight.grad.clone()
    compare_with_eager(Model(given), SAMPLES, CPU)
    assert torch.equal(given.module.weight.grad, before)


def test_probes_take_the_loss_of_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of sixteen samples of a language model have gigabytes."""
    taken: list[int] = []
    loss_of = loss_parts._loss

    def counted(evaluate: Any, leaves: list[Any], part: range) -> Any:
        taken.append(len(part))
        return loss_of(evaluate, leaves, part)

    monkeypatch.setattr(loss_parts, "_loss", counted)
    torch.manual_seed(0)
    inputs, targets = (torch.randn(16, 6),), torch.randint(0, 3, (16,))
    given = Job(nn.Linear(6, 3), inputs, targets, F.cross_entropy)
    compare_with_eager(Model(given), SAMPLES, CPU)
    assert sum(taken) < 8 * len(targets)


def test_as_many_ignored_labels_in_each_sample_are_right() -> None:
    torch.manual_seed(0)
    targets = torch.randint(0, 3, (8, 4))
    targets[:, -1] = -100
    inputs = (torch.randn(8, 4, 6),)
    given = Job(nn.Linear(6, 3), inputs, targets, lambda y, t: F.cross_entropy(y.mT, t))
    _, watched = compare_with_eager(Model(given), SAMPLES, CPU)
    assert [(w.value, w.allowed) for w in watched] == [(-100, 1)]
    refuse_uneven((inputs, targets), watched)


class WithLoss(nn.Linear):
    """A module that computes its loss, as those of libraries do."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(super().forward(x), labels)


def test_labels_that_a_module_leaves_out_are_refused() -> None:
    torch.manual_seed(0)
    inputs = (torch.randn(8, 6), labels(0, 1))
    given = Job(WithLoss(6, 3), inputs, torch.zeros(8), lambda loss, _: loss)
    _, watched = compare_with_eager(Model(given), SAMPLES, CPU)
    with pytest.raises(BadModel, match="targets with the value -100"):
        refuse_uneven(((inputs[0], labels(-100)), torch.zeros(8)), watched)


def test_a_loss_that_compares_samples_is_refused() -> None:
    def loss(y: torch.Tensor, _: Any) -> torch.Tensor:
        return F.cross_entropy(y, torch.arange(y.shape[0]))

    torch.manual_seed(0)
    inputs = (torch.randn(8, 6), torch.randn(8, 6))
    given = Job(Products(), inputs, torch.zeros(8), loss)
    with pytest.raises(BadModel, match="the module compares samples"):
        compare_with_eager(Model(given), SAMPLES, CPU)


class Products(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ super().forward(y).T


def test_a_frozen_batch_norm_in_a_training_module_is_traced_as_it_is() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    module[1].eval(), module[2].eval()
    given = Job(module, (torch.randn(8, 6),), torch.randn(8, 3), F.mse_loss)
    assert compare_with_eager(Model(given), SAMPLES, CPU)[0] == ()
    assert [part.training for part in module] == [True, False, False]


def selected(block: Any, x: torch.Tensor) -> torch.Tensor:
    y, chosen = torch.zeros_like(x), x[:, 0] > 0
    y[chosen] = block.linear(x[chosen])
    return block.inner(y)


def test_no_cut_crosses_a_tensor_whose_shape_depends_on_values() -> None:
    model = Model(job(selected))
    crossing = {name for cut in range(1, len(model)) for name in model.crossing(cut)}
    assert len(model) > 2
    assert all(isinstance(n, int) for name in crossing for n in model.shape(name, 4))
    compare_with_eager(model, 4, CPU)


def test_sparse_gradients_are_refused() -> None:
    tokens = torch.randint(0, 5, (8, 2))
    module = nn.Embedding(5, 3, sparse=True)
    given = Job(module, (tokens,), torch.randn(8, 2, 3), F.mse_loss)
    with pytest.raises(BadModel, match="gradient of weight is sparse"):
        compare_with_eager(Model(given), SAMPLES, CPU)
