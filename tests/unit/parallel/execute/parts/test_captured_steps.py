"""Replays of captured steps: a stand-in for CUDA graphs runs a step again into the same memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training by plans needs the extra nostall[torch]")
pytest.importorskip("scipy", reason="shardings need the extra nostall[sharding]")

import torch.distributed as dist  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

from nostall.core.errors import BadInput  # noqa: E402
from nostall.parallel.errors import CaptureFailed  # noqa: E402
from nostall.parallel.execute.parts import captured_steps  # noqa: E402
from nostall.parallel.execute.trainer.build import build  # noqa: E402
from nostall.parallel.execute.trainer.trainer import Trainer  # noqa: E402
from tests.unit.parallel.execute.trainer.models import (  # noqa: E402
    Single,
    chain,
    data,
    engine,
    language,
    pipeline,
    sharding,
)
from tests.unit.parallel.execute.trainer.ranks import adamw  # noqa: E402


def kept_whole(job: Any) -> Any:
    """FSDP2 that frees gathered parameters after the backward pass."""
    return replace(engine(job, "fsdp2", 1), reshard_after_forward=False)


PLANS: dict[str, Callable[[Any], Any]] = {
    "sharding": lambda job: sharding(job, "data-parallel", 1),
    "one stage": lambda job: pipeline(job, (0,)),
    "ddp": lambda job: engine(job, "ddp", 1),
}


class Graph:
    """Runs the action again, and writes its gradients where the capture left them."""

    closed = 0

    def __init__(self, trainer: Trainer, action: Callable[[], Any]) -> None:
        self.trainer, self.action = trainer, action
        self.loss = action()
        self.gradients = self._gradients()

    def _gradients(self) -> dict[str, Any]:
        return {n: p.grad for n, p in self.trainer.named_parameters() if p.grad is not None}

    def __call__(self) -> Any:
        self.loss.copy_(self.action())
        for name, gradient in self._gradients().items():
            self.gradients[name].copy_(gradient)
        for _, parameter in self.trainer.named_parameters():
            parameter.grad = None
        return self.loss

    def close(self) -> None:
        Graph.closed += 1


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class StaleGraph(Graph):
    """Reads the weights of the capture."""

    def __call__(self) -> Any:
        return self.loss


@contextmanager
def captured(
    monkeypatch: pytest.MonkeyPatch,
    plan: Any,
    wait: str = "",
    failure: str = "",
    graph: type[Graph] = Graph,
    job: Any = None,
) -> Iterator[Trainer]:
    """A trainer whose capture uses the stand-in."""
    trainer = build(plan(job or chain()), job or chain(), adamw)

    class Capture:
        @staticmethod
        def capture(action: Callable[[], Any], **_: Any) -> Graph:
            if failure:
                raise CaptureFailed(failure)
            return graph(trainer, action)

    def wait_in(action: Callable[[], Any]) -> str:
        action()
        return wait

    stream = type("Stream", (), {"wait_stream": lambda *_: None})
    monkeypatch.setattr(captured_steps, "CudaGraph", Capture)
    monkeypatch.setattr(captured_steps, "_refusal", lambda *_: "")
    monkeypatch.setattr(captured_steps, "all_ranks", bool)
    monkeypatch.setattr(captured_steps, "wait_in", wait_in)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream())
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: stream())
    monkeypatch.setattr(torch.cuda, "stream", lambda *_: nullcontext())
    yield trainer.capture()
    trainer.close()


def batch(first: int, samples: int = 8) -> Any:
    return default_collate(data("chain")[first : first + samples])


def check(trainer: Trainer, reference: Single) -> None:
    """Compare gradients, step both and compare the weights."""
    expected = dict(reference.job.module.named_parameters())
    for name, parameter in trainer.named_parameters():
        wanted = expected[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        if wanted is not None:
            torch.testing.assert_close(parameter.grad, wanted)
    for process in (trainer, reference):
        process.optimizer.step()
        process.zero_grad()
    for name, parameter in trainer.named_parameters():
        torch.testing.assert_close(
            parameter.detach(), expected[name].detach(), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("kind", PLANS)
def test_replays_train_as_one_process_does(
    kind: str, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where passes add up, are scaled, accumulate without a reduction, or are short."""
    before = Graph.closed
    monkeypatch.setattr(captured_steps.CapturedSteps, "_pointers", lambda *_: [])
    with captured(monkeypatch, PLANS[kind]) as trainer:
        reference, losses = Single(chain(), adamw), []
        for passes in (
            [(0, 8, 1.0, True)], [(8, 8, 1.0, True)],
            [(16, 8, 1.0, True), (24, 8, 0.5, True), (0, 8, 0.25, True)],
            [(8, 8, 0.5, False), (16, 8, 0.5, True)], [(24, 4, 1.0, True)], [(0, 8, 2.0, True)],
        ):  # fmt: skip
            for first, samples, scale, reduce in passes:
                own = batch(first, samples)
                found = trainer.forward_backward(own, scale=scale, samples=samples, reduce=reduce)
                losses.append((found, reference.forward_backward(own, scale)))
            check(trainer, reference)
        for found, expected in losses:  # no loss is in memory that a later step overwrites
            assert float(found) == pytest.approx(expected, rel=1e-6)
        assert trainer._steps.is_captured
        assert trainer.notes == [
            "launched operator by operator: passes of an accumulation with reduce=False",
            "launched operator by operator: batches of 4 samples, as the last one of an epoch",
        ]
        with pytest.raises(BadInput, match=r"compile\(\) after capture\(\)"):
            trainer.compile()
        assert trainer.capture() is trainer
    assert Graph.closed == before + 1


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({"wait": "model.py, line 3"}, "a step waits for the GPU (model.py, line 3)"),
        ({"failure": "no kernel"}, "no kernel"),
    ],
)
def test_a_capture_that_fails_trains_by_launches(
    given: dict[str, str], note: str, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with captured(monkeypatch, PLANS["ddp"], **given) as trainer:
        reference = Single(chain(), adamw)
        for first in (0, 8):
            trainer.forward_backward(batch(first))
            reference.forward_backward(batch(first))
            check(trainer, reference)
        assert trainer.notes == [f"not captured: {note}"]
        assert not trainer._steps.is_captured


def test_a_replay_that_differs_from_a_launched_step_is_refused(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with captured(monkeypatch, PLANS["sharding"], graph=StaleGraph) as trainer:
        reference = Single(chain(), adamw)
        trainer.forward_backward(batch(0))
        reference.forward_backward(batch(0))
        check(trainer, reference)
        (note,) = trainer.notes
        assert "a replay differs from a launched step: the loss is " in note
        assert not trainer._steps.is_captured


class WrongGradients(Graph):
    """Has the loss of a launched step and half of its gradients."""

    def __call__(self) -> Any:
        loss = super().__call__()
        for gradient in self.gradients.values():
            gradient.mul_(0.5)
        return loss


def test_a_large_loss_hides_no_wrong_gradient(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = replace(chain(), loss=lambda output, wanted: 1e6 + (output - wanted).square().mean())
    with captured(monkeypatch, PLANS["ddp"], graph=WrongGradients, job=job) as trainer:
        trainer.forward_backward(batch(0))
        assert "launched step: the norm of the gradient of" in trainer.notes[0]


class Exhausted(Graph):
    """Has no memory for a replay."""

    def __call__(self) -> Any:
        raise torch.OutOfMemoryError("no memory")


def test_weights_stay_after_an_error_of_the_first_replay(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with captured(monkeypatch, PLANS["ddp"], graph=Exhausted) as trainer:
        before = [own.detach().clone() for own in trainer.parameters()]
        with pytest.raises(torch.OutOfMemoryError):
            trainer.forward_backward(batch(0))
        for own, value in zip(trainer.parameters(), before, strict=True):
            assert torch.equal(own, value)


class Branches(torch.nn.Linear):
    """Control that depends on values, which no trace repeats."""

    def __init__(self) -> None:
        super().__init__(8, 4)

    def forward(self, x: Any) -> Any:
        return super().forward(x if x.sum() > 0 else -2 * x)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_engines_run_modules_that_cannot_be_traced(kind: str, one_process: None) -> None:
    torch.manual_seed(0)
    job = replace(chain(), module=Branches())
    reference = Single(copy.deepcopy(job), adamw)
    trainer = build(engine(job, kind, 1), job, adamw).capture()
    assert "the module cannot be traced" in trainer._part.no_graph
    for first in (0, 8, 16):
        trainer.forward_backward(batch(first))
        reference.forward_backward(batch(first))
        gradients = trainer._part.whole_gradients()
        for name, parameter in reference.job.module.named_parameters():
            torch.testing.assert_close(gradients[name], parameter.grad)
        for process in (trainer, reference):
            process.optimizer.step()
            process.zero_grad()


class Counted(torch.nn.Linear):
    """Counts its calls, as a running mean does."""

    def __init__(self) -> None:
        super().__init__(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return super().forward(x)


def test_buffers_change_once_a_step(one_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes of the capture leave no trace."""
    own = replace(chain(), module=Counted())
    with captured(monkeypatch, PLANS["ddp"], job=own) as trainer:
        start = float(own.module.calls)
        for first in (0, 8):
            trainer.forward_backward(batch(first))
        assert trainer._steps.is_captured and float(own.module.calls) == start + 2


def test_numbers_of_python_are_not_captured(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace sees a constant in their place, and a replay the one of the capture."""
    with captured(
        monkeypatch, PLANS["ddp"], graph=StaleGraph, job=replace(chain(), module=Drawn())
    ) as trainer:
        trainer.forward_backward(batch(0))
        assert "a replay differs from a launched step" in trainer.notes[-1]


class Drawn(torch.nn.Linear):
    """A factor that Python draws."""

    def __init__(self) -> None:
        super().__init__(8, 4)

    def forward(self, x: Any) -> Any:
        return super().forward(x) * (1 + random.random())


def test_fsdp2_does_not_go_on_after_a_capture_that_failed(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        captured(monkeypatch, kept_whole, failure="no kernel") as trainer,
        pytest.raises(BadInput, match=r"fsdp2: no kernel; leave --capture or Trainer"),
    ):
        trainer.forward_backward(batch(0))


def test_what_cannot_be_captured_is_named(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = build(engine(chain(), "ddp", 1), chain(), adamw)._part
    assert unused.no_graph == "DDP asks all ranks in each step which parameters have gradients"
    sharded = build(engine(chain(), "fsdp2", 1), chain(), adamw)._part
    assert sharded.no_graph == "FSDP2 frees and gathers parameters in each step"
    assert build(kept_whole(chain()), chain(), adamw)._part.no_graph == ""
    cut = engine(language(), "tp", 1)
    assert build(cut, language(), adamw)._part.no_graph == ""
    trainer = build(pipeline(chain(), (0,)), chain(), adamw)
    part, gpu = trainer._part, torch.device("cuda")
    refusal = captured_steps._refusal
    assert "on a CPU" in refusal(part, torch.device("cpu"))
    assert refusal(part, gpu) == "the processor runs the collectives of gloo"
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert refusal(part, gpu) == ""
    part.random_operators = ("aten.dropout",)
    assert refusal(part, gpu) == "each step draws other random numbers (aten.dropout)"
    part.random_operators, part.no_graph = (), "its own reason"
    assert refusal(part, gpu) == "its own reason"


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # Dynamo reads it
@pytest.mark.parametrize("kind", PLANS)
def test_what_cannot_be_compiled_is_named_and_trains(
    kind: str, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as on a machine without a compiler of C++."""

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nmore lines")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    torch._dynamo.reset()
    trainer, reference = (
        build(PLANS[kind](chain()), chain(), adamw).compile(),
        Single(chain(), adamw),
    )
    for first in (0, 8):
        trainer.forward_backward(batch(first))
        reference.forward_backward(batch(first))
        check(trainer, reference)
    assert trainer.notes == ["not compiled: RuntimeError: no compiler"]
    trainer.close()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_groups_of_fsdp2_that_cannot_be_compiled_are_refused(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fail)
    torch._dynamo.reset()
    trainer = build(engine(chain(), "fsdp2", 1), chain(), adamw).compile()
    with pytest.raises(BadInput, match=r"groups are not compiled: .*leave --compile out"):
        trainer.forward_backward(batch(0))
