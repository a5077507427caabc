"""Steps of an optimiser that are recorded and replayed; here a list of calls is the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.program.changes import OptimizerFlag  # noqa: E402
from nostall.attach.program.changing import captured  # noqa: E402
from nostall.attach.program.changing.captured import (  # noqa: E402
    CapturedOptimizer,
    CapturedSteps,
    can_capture,
)
from nostall.attach.program.roots import LastGradients  # noqa: E402

nn = torch.nn


class Recorder:
    """Counts what is recorded and replayed; a replay is the same work on the host."""

    def __init__(self) -> None:
        self.recorded = self.replayed = 0

    def __call__(self, device: Any, function: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            function()

        return replay


def made(momentum: float = 0.9) -> tuple[Any, Any, CapturedSteps, Recorder]:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=momentum)
    recorder = Recorder()
    return layer, optimizer, CapturedSteps(optimizer, recorder), recorder


def stepped(count: int, halves: bool = False) -> Any:
    """The weight after plain steps."""
    layer, optimizer, _, _ = made()
    for at in range(count):
        if halves and at == count // 2:
            optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()
    return layer.weight


def test_steps_at_the_same_addresses_are_replayed() -> None:
    layer, optimizer, steps, recorder = made()
    steps.on()
    for _ in range(6):
        optimizer.step()
    # The first step makes the momentum, the second shows its address, the third is recorded.
    assert (recorder.recorded, recorder.replayed) == (1, 4) and steps.is_settled()
    assert torch.equal(layer.weight, stepped(6))
    steps.off()
    assert "step" not in vars(optimizer)
    optimizer.step()
    assert recorder.replayed == 4 and torch.equal(layer.weight, stepped(7))


def test_another_learning_rate_or_gradient_runs_as_it_was() -> None:
    layer, optimizer, steps, recorder = made()
    steps.on()
    for at in range(6):
        if at == 3:
            optimizer.param_groups[0]["lr"] /= 2
        optimizer.step()
    assert recorder.recorded == 2 and torch.equal(layer.weight, stepped(6, halves=True))
    before = recorder.replayed
    layer.weight.grad = layer.weight.grad.clone()
    optimizer.step()
    assert recorder.replayed == before
    optimizer.step(lambda: None)  # a closure may do anything
    assert recorder.replayed == before


def test_gradients_that_never_stay_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured, "MOST_MISSES", 3)
    layer, optimizer, steps, recorder = made()
    steps.on()
    kept = []
    for _ in range(6):
        kept.append(layer.weight.grad)
        layer.weight.grad = torch.ones_like(layer.weight)
        optimizer.step()
    assert recorder.recorded == 0 and "other addresses" in steps.failure and steps.is_settled()
    assert torch.equal(layer.weight, stepped(6))


def test_hooks_schedulers_and_failures_keep_their_place() -> None:
    layer, optimizer, steps, recorder = made()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    before = optimizer.step
    steps.on()
    for _ in range(4):
        optimizer.step()
        schedule.step()  # it warns unless the optimiser has stepped
    assert recorder.replayed == 2
    handle = optimizer.register_step_post_hook(lambda *_: None)  # of the program
    optimizer.step()
    assert recorder.replayed == 2
    handle.remove()

    def fail(*_: Any) -> Any:
        raise RuntimeError("operation not permitted")

    steps.record, steps.graphs = fail, {}
    for _ in range(2):
        optimizer.step()
    assert "not permitted" in steps.failure and torch.equal(layer.weight, stepped(7))
    steps.off()
    assert optimizer.step == before


def test_only_steps_on_one_gpu_are_recorded() -> None:
    assert not can_capture(made()[1])


def test_gradients_that_live_on_are_seen() -> None:
    layer, optimizer, _, _ = made()
    gradients = LastGradients()
    assert not gradients.live_on([layer])
    assert gradients.live_on([layer])  # nothing has made them anew
    optimizer.zero_grad(set_to_none=False)
    assert gradients.live_on([layer])
    optimizer.zero_grad()
    layer(torch.ones(2, 4)).sum().backward()
    assert not gradients.live_on([layer])
    kept = layer.weight.grad.flatten()  # as a program does that compares gradients of steps
    optimizer.zero_grad()
    assert gradients.live_on([layer])
    del kept
    assert not gradients.live_on([layer])


def test_all_gradients_are_looked_at() -> None:
    """Another optimiser may keep those of the last layer."""
    layers = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(6)))
    gradients = LastGradients()
    for _ in range(2):
        layers[:5].zero_grad()
        layers(torch.ones(1, 2)).sum().backward()
        found = gradients.live_on([layers])
    assert found


@pytest.mark.parametrize(("share", "reason"), [(1, ""), (0, "off by")])
def test_a_graph_that_leaves_work_out_is_refused(share: int, reason: str) -> None:
    _, optimizer, steps, _ = made()
    optimizer.step()

    def record(device: Any, function: Callable[[], None]) -> Callable[[], None]:
        return function if share else lambda: None

    change = CapturedOptimizer([steps], OptimizerFlag([], "fused"), record)
    found = change.check({})
    assert (reason in found.refusal) if reason else found.refusal == ""
    assert "step" not in vars(optimizer)


def test_only_parameters_that_step_are_counted() -> None:
    layer, _, _, _ = made()
    optimizer = torch.optim.Adagrad(layer.parameters())
    optimizer.step()
    layer.bias.grad = None

    def record(device: Any, function: Callable[[], None]) -> Callable[[], None]:
        function()  # the host's part of it, which is not repeated
        return lambda: None

    steps = CapturedSteps(optimizer, record)
    steps.on()
    for _ in range(4):
        optimizer.step()
    counted = [float(optimizer.state[p]["step"]) for p in layer.parameters()]
    assert steps.graphs and counted == [5.0, 1.0]
