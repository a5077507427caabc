"""Modules whose traced layers would train otherwise than the module does, and effects in graphs."""

from __future__ import annotations

import dataclasses
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
from nostall.parallel.module import Job, Model, profile_job  # noqa: E402
from nostall.parallel.module.eager import SAMPLES, compare_with_eager, compared_model  # noqa: E402

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
    notes = compare_with_eager(Model(own), 4, CPU)
    # A mean over the batch makes the gradients of a batch others than those of its parts.
    assert len(notes) == (function is no_grad_scale)
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


def test_a_loss_over_pairs_of_samples_is_noted() -> None:
    def contrastive(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output @ targets.T, torch.arange(len(output)))

    plain = job(lambda block, x: block.linear(x))
    (note,) = compare_with_eager(Model(dataclasses.replace(plain, loss=contrastive)), SAMPLES, CPU)
    assert note.startswith("the loss of a batch is not the mean of the losses of its parts")
