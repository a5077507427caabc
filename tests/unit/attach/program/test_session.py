"""The half of `nostall optimize` inside a program, driven in this process."""

from __future__ import annotations

import gc
import json
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nostall.attach.program.channel import EVENTS, ORDERS, Channel

torch = pytest.importorskip("torch")

from nostall.attach.program.changes import OptimizerFlag, can_set, make_change  # noqa: E402
from nostall.attach.program.roots import Switch, find_roots, obstacle  # noqa: E402
from nostall.attach.program.session import Session  # noqa: E402

nn = torch.nn


class Program:
    """A model, its optimiser and a session that watches them."""

    def __init__(self, folder: Path, optimizer: str = "AdamW") -> None:
        self.folder, self.numbers = folder, 0
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), lr=0.01)
        self.session = Session({
            "folder": str(folder), "director": os.getpid(), "step": None, "watch_steps": 6,
            "watch_seconds": 60,
        })  # fmt: skip

    def step(self, rows: int = 4) -> None:
        self.optimizer.zero_grad()
        self.model(torch.ones(rows, 8)).square().mean().backward()
        self.optimizer.step()
        self.session.on_optimizer(self.optimizer)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def order(self, **fields: Any) -> None:
        self.numbers += 1
        text = json.dumps({"number": self.numbers, "agree": False, **fields})
        (self.folder / ORDERS).write_text(text)
        os.utime(self.folder / ORDERS, ns=(self.numbers, self.numbers))

    def events(self, kind: str) -> list[Any]:
        path = self.folder / EVENTS
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    original = torch.autograd.backward
    program.session.segments.watch_backward()
    program.session.segments.watch_backward()
    yield program
    program.session.segments.remove()
    assert torch.autograd.backward is original


FUSED = {"name": "fused", "kind": "optimizer", "value": "fused"}


def test_a_watch_tells_what_runs(program: Program) -> None:
    program.run(12)
    (watched,) = program.events("watched")
    assert watched["roots"] == ["Sequential"] and watched["optimizers"] == ["AdamW"]
    assert watched["flags"] == ["fused", "foreach"] and watched["obstacle"] == ""
    assert len(watched["steps"]) == 6 and len({key for key, _ in watched["steps"]}) == 1
    assert watched["device"].startswith("CPU ") and watched["world"] == 1
    assert len(watched["parts"]["forward"]) == 6 and all(watched["parts"]["forward"])


def test_a_watch_tells_of_a_backward_pass_that_keeps_its_graph(program: Program) -> None:
    """A compiled one would fail in it."""
    run = torch.autograd._engine_run_backward
    x = torch.ones(2, requires_grad=True)
    (x**2).sum().backward()
    assert program.session.segments.kept_graph == ""
    torch.autograd.grad((x**2).sum(), x, create_graph=True)
    assert program.session.segments.kept_graph == "create_graph=True"
    program.run(12)
    (watched,) = program.events("watched")
    assert watched["kept_graph"] == "create_graph=True"
    assert torch.autograd._engine_run_backward is run.__wrapped__


def test_calls_with_gradients_are_counted(program: Program) -> None:
    def calls(count: int, evaluated: int) -> int:
        session = program.session
        for number in range(count + evaluated):
            with torch.set_grad_enabled(number >= evaluated):
                program.model(torch.ones(4, 8))
        return session._count_calls(session._key())

    program.run(12)
    program.session._key()
    assert calls(1, 0) == 1 and calls(3, 2) == 3 and calls(0, 30) == 0
    assert calls(30, 0) == 30 and calls(0, 0) == 0 and calls(2, 20) >= 0


def test_blocks_switch_between_steps_and_back(program: Program) -> None:
    program.run(12)
    program.order(do="warm", arm=["fused"], changes=[FUSED], limit_steps=20, limit_seconds=60)
    program.run(10)
    assert program.optimizer.param_groups[0]["fused"] is True
    program.order(
        do="blocks",
        arms=[[], ["fused"], []],
        blocks=[0, 1, 2],
        steps=2,
        each=False,
        changes=[FUSED],
    )
    seen = []
    for _ in range(12):
        program.step()
        seen.append(program.optimizer.param_groups[0]["fused"])
    blocks = program.events("block")
    assert [block["arm"] for block in blocks] == [0, 1, 2]
    assert all(len(block["steps"]) == 2 and block["seconds"] > 0 for block in blocks)
    assert seen[:10] == [None] * 3 + [True] * 3 + [None] * 4
    assert [event["order"] for event in program.events("done")] == [1, 2]


def test_a_check_leaves_the_program_alone_and_tells_the_class(program: Program) -> None:
    program.run(12)
    before = [p.detach().clone() for p in program.model.parameters()]
    program.order(do="check", name="fused", changes=[FUSED])
    program.session.on_border()  # without a step of the program
    program.step()
    (done,) = program.events("done")
    assert done["result_class"] == "within rounding" and done["refusal"] == ""
    assert not all(map(torch.equal, before, program.model.parameters()))


def test_the_end_takes_everything_out(program: Program) -> None:
    program.run(12)
    assert isinstance(program.model._compiled_call_impl, Switch)
    program.order(do="end", arm=[], exit=True)
    with pytest.raises(SystemExit) as end:
        program.step()
    assert end.value.code == 0
    assert "_compiled_call_impl" not in program.model.__dict__
    program.run(3)  # a program that catches the exit runs on, unwatched
    (ended,) = program.events("ended")
    assert ended["steps"] == program.session.steps


@pytest.mark.parametrize("place", ["border", "call"])
def test_an_interrupt_while_nostall_compiles_ends_the_program_if_that_was_ordered(
    place: str, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `finally` then writes its files; without an order the interrupt is the user's."""
    program.run(12)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    if place == "border":
        monkeypatch.setattr(program.session, "_border", interrupted)
    else:
        program.session.switches[0].target = interrupted
    with pytest.raises(KeyboardInterrupt):
        program.step()
    program.order(do="end", arm=[], exit=True)
    with pytest.raises(SystemExit):
        program.step()
    assert program.events("ended")[0]["exits"]


def test_run_to_end_goes_on_as_it_was(program: Program) -> None:
    program.run(12)
    program.order(do="end", arm=[], exit=False)
    program.run(3)
    assert program.events("ended") and "_compiled_call_impl" not in program.model.__dict__


def test_an_unknown_change_stops_the_watch_and_not_the_program(program: Program) -> None:
    program.run(12)
    program.order(do="check", name="x", changes=[{"name": "x", "kind": "magic", "value": "1"}])
    program.run(3)
    (failed,) = program.events("failed")
    assert "'magic' is unknown" in failed["reason"]
    assert "_compiled_call_impl" not in program.model.__dict__


def test_another_optimiser_ends_the_watch_and_the_end_is_still_obeyed(program: Program) -> None:
    program.run(12)
    for _ in range(3):  # a sweep makes a model and an optimiser for each trial
        program.model = nn.Linear(8, 1)
        program.optimizer = torch.optim.SGD(program.model.parameters(), lr=0.1)
        program.session.segments.watch_backward()
        program.run(3)
    (failed,) = program.events("failed")
    assert "other optimisers" in failed["reason"]
    program.order(do="end", arm=["fused"], exit=True)
    with pytest.raises(SystemExit):
        program.step()


def test_no_optimiser_or_model_is_kept_alive(program: Program) -> None:
    program.run(12)
    program.order(do="end", arm=[], exit=False)
    program.run(1)
    model, optimizer = map(weakref.ref, (program.model, program.optimizer))
    del program.model, program.optimizer
    gc.collect()
    assert model() is None and optimizer() is None


def test_without_a_director_the_program_runs_on(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.run(12)
    monkeypatch.setattr(Channel, "is_abandoned", lambda self: True)
    monkeypatch.setattr("nostall.attach.program.session.ABANDONED_SECONDS", 0.0)
    program.run(3)
    assert not program.folder.exists()
    assert "_compiled_call_impl" not in program.model.__dict__


@pytest.mark.parametrize("steps", [0, 12])
def test_a_program_that_ends_without_a_director_leaves_no_folder(
    program: Program, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    program.run(steps)
    program.session.at_exit()
    assert program.folder.exists()
    monkeypatch.setattr(Channel, "is_abandoned", lambda self: True)
    program.session.at_exit()
    assert not program.folder.exists()


def test_skipped_steps_are_told(program: Program) -> None:
    program.run(12)
    program.order(do="blocks", arms=[[]], blocks=[0], steps=2, each=False, changes=[])
    program.run(2)
    program.session.on_optimizer(program.optimizer, True)
    program.run(2)
    (block,) = program.events("block")
    assert [skipped for _, _, skipped in block["steps"]] == [True, False]


def test_shapes_and_evaluation_make_other_steps(program: Program) -> None:
    program.run(12)
    program.order(do="blocks", arms=[[]], blocks=[0], steps=4, each=True, changes=[])
    program.run(2)
    program.step(rows=6)
    with torch.no_grad():
        program.model(torch.ones(4, 8))
    program.run(3)
    (block,) = program.events("block")
    keys = [key for key, _, _ in block["steps"]]
    assert len(set(keys)) == 3 and keys[2] == keys[3]


def test_ranks_begin_at_one_step(tmp_path: Path) -> None:
    channel = Channel(str(tmp_path), os.getpid())
    assert channel.start(3) is None
    channel.agree(3, 17)
    assert channel.start(3) == 17 and channel.start(4) is None


def test_roots_are_the_outermost_modules() -> None:
    inner = nn.Linear(3, 3)
    outer = nn.Sequential(inner, nn.ReLU())
    other = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(outer.parameters(), lr=0.1)
    assert find_roots([optimizer]) == [outer]
    assert obstacle(outer) is None
    outer[0].compile()
    assert "runs under torch.compile already" in str(obstacle(outer))
    assert any(root is other for root in find_roots([]))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: torch.optim.AdamW(p), ["fused", "foreach"]),
        (lambda p: torch.optim.AdamW(p, fused=True), []),
        (lambda p: torch.optim.AdamW(p, foreach=True), []),
        (lambda p: torch.optim.AdamW(p, capturable=False, differentiable=True), []),
        (lambda p: torch.optim.RMSprop(p), ["foreach"]),
        (lambda p: torch.optim.LBFGS(p), []),
        (lambda p: type("Own", (torch.optim.Adam,), {})(p), []),
    ],
)
def test_options_that_an_optimiser_can_take(
    make: Callable[[Any], Any], expected: list[str]
) -> None:
    optimizer = make(list(nn.Linear(2, 2).parameters()))
    assert [flag for flag in ("fused", "foreach") if can_set(optimizer, flag)] == expected


def test_a_flag_is_taken_back() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    change = make_change({"kind": "optimizer", "value": "foreach"}, [], [optimizer])
    assert isinstance(change, OptimizerFlag)
    change.on()
    assert optimizer.param_groups[0]["foreach"] is True
    change.off()
    assert optimizer.param_groups[0]["foreach"] is None


def test_the_precision_of_products_is_set_and_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    change = make_change({"kind": "matmul_precision", "value": "high"}, [], [])
    before = torch.get_float32_matmul_precision()
    change.off()
    assert torch.get_float32_matmul_precision() == before
    change.on()
    change.on()
    assert torch.get_float32_matmul_precision() == "high"
    change.off()
    assert torch.get_float32_matmul_precision() == before
    finding = change.check({})
    assert finding.result_class == "changes numbers" and not finding.refusal

    def fails() -> str:
        raise RuntimeError("PyTorch is checking whether allow_tf32 is set by the new API")

    monkeypatch.setattr(torch, "get_float32_matmul_precision", fails)
    assert "by library" in change.check({}).refusal
