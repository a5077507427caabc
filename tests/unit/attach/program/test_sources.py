"""What ends a step of a program: real modules, profilers, optimisers and calls of generate."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nostall.attach.program.channel import EVENTS, ORDERS

torch = pytest.importorskip("torch")

from nostall.attach.program import sources as sources_module  # noqa: E402
from nostall.attach.program import start  # noqa: E402
from nostall.attach.program.roots import Switch  # noqa: E402
from nostall.attach.program.session import Session  # noqa: E402
from nostall.attach.program.sources import Sources  # noqa: E402

nn = torch.nn


class Watched:
    """A session that watches this process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = {"folder": str(folder), "director": os.getpid(), "watch_steps": 6,
                    "watch_seconds": 60, "step": None}  # fmt: skip
        self.session = Session(settings)
        self.sources = Sources(self.session)
        self.sources.modules.install(torch.nn.modules.module)

    def events(self, kind: str) -> list[Any]:
        path = self.folder / EVENTS
        lines = path.read_text().splitlines() if path.exists() else []
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def order(self, **fields: Any) -> None:
        text = json.dumps({"number": 1, "agree": False, "arm": [], "exit": True, **fields})
        (self.folder / ORDERS).write_text(text)

    def step(self, optimizer: Any) -> None:
        optimizer.step()
        self.sources.optimizer_stepped(optimizer)


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    # Other tests of this process may have left modules and optimisers.
    known = [*sources_module.find_roots([])]
    monkeypatch.setattr(
        sources_module, "find_roots",
        lambda found: [r for r in real_roots(found) if all(r is not k for k in known)],
    )  # fmt: skip
    optimizers = [
        o for o in sources_module.gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)
    ]
    monkeypatch.setattr(
        sources_module, "has_optimizer", lambda: any(all(o is not k for k in optimizers)
        for o in sources_module.gc.get_objects() if issubclass(type(o), torch.optim.Optimizer)),
    )  # fmt: skip
    program = Watched(tmp_path)
    original = torch.autograd.backward
    yield program
    program.session.segments.remove()
    program.sources.modules.remove()
    program.session._release()
    assert nn.Module._compiled_call_impl is None
    torch.autograd.backward = original


real_roots = sources_module.find_roots


def net() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def test_calls_of_one_module_are_steps(watched: Watched) -> None:
    model, x = net().eval(), torch.ones(4, 8)
    with torch.inference_mode():
        for _ in range(20):
            model(x)
    (seen,) = watched.events("watched")
    assert seen["step_is"] == "each call of Sequential" and seen["roots"] == ["Sequential"]
    assert seen["optimizers"] == [] and len({key for key, _ in seen["steps"]}) == 1
    assert isinstance(model._compiled_call_impl, Switch) and all(seen["parts"]["forward"])
    assert nn.Module._compiled_call_impl is None  # inner modules have their own speed
    watched.order(do="end")
    with pytest.raises(SystemExit), torch.inference_mode():
        model(x)


class Cache:
    """Has the attributes of a mapping, and is none."""

    def __init__(self) -> None:
        self.keys = self.values = self.items = torch.zeros(1)


class Proxy:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Any, other: Any = None) -> Any:
        return self.layer(x)


@pytest.mark.parametrize("make", [Cache, Proxy, lambda: {"a": Proxy()}, lambda: object])
def test_arguments_of_any_class_leave_the_program_alone(watched: Watched, make: Any) -> None:
    model, x, other = Reading(), torch.ones(4, 8), make()
    with torch.no_grad():
        for _ in range(20):
            assert model(x, other).shape == (4, 8)
    (seen,) = watched.events("watched")
    assert seen["step_is"] == "each call of Reading"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_told_by_their_type(watched: Watched) -> None:
    parts = [torch.ones(3, 8), torch.ones(2, 8)]
    model, x = Reading(), torch.nested.nested_tensor(parts)
    with torch.no_grad():
        for _ in range(20):
            assert model(x).is_nested
    assert watched.events("watched")


def test_an_error_of_the_watch_is_not_the_programs(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watched.sources.modules, "_look", lambda: [][0])
    model = net()
    with torch.no_grad():
        for _ in range(20):
            model(torch.ones(4, 8))
    (failed,) = watched.events("failed")
    assert "an argument of a call answers with IndexError" in failed["reason"]


def test_a_pipeline_is_one_step(watched: Watched) -> None:
    encoder, unet, decoder, x = net(), nn.Linear(8, 8), nn.Linear(8, 3), torch.ones(2, 8)
    images = []
    with torch.no_grad():
        for _ in range(16):
            y = encoder(x)
            for _ in range(8):
                y = unet(y)
            images.append(decoder(y))
    (seen,) = watched.events("watched")
    assert seen["step_is"] == "10 calls of Sequential, Linear, Linear"
    # The third image ends the search, the next two are left out.
    assert len(seen["steps"]) == 6 and len(seen["roots"]) == 3


def test_batches_of_different_lengths_are_told_apart(watched: Watched) -> None:
    model, draw = net(), random.Random(0)
    for _ in range(60):
        model(torch.ones(draw.randint(1, 9), 8))
    (seen,) = watched.events("watched")
    assert seen["step_is"] == "each call of Sequential"
    assert len({key for key, _ in seen["steps"]}) > 1


def test_training_by_hand_has_steps(watched: Watched) -> None:
    model = net()
    for _ in range(20):
        model(torch.ones(4, 8)).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
    (seen,) = watched.events("watched")
    assert seen["step_is"] == "each call of Sequential" and all(seen["parts"]["backward"])


def test_a_part_of_two_modules_is_switched_once(watched: Watched) -> None:
    """As of two losses that hold one net, of which only methods are called."""
    part = net()
    holders = [nn.ModuleList([part]), nn.ModuleList([part])]
    optimizer = torch.optim.SGD(part.parameters(), lr=0.01)
    for at in range(12):
        optimizer.zero_grad()
        holders[at % 2][0](torch.ones(4, 8)).sum().backward()
        watched.step(optimizer)
    (found,) = watched.events("watched")
    assert found["roots"] == ["Sequential"]


@pytest.mark.parametrize("parts", [1, 2, 9])
def test_parts_are_switched_where_the_module_around_them_is_not_called(
    parts: int, watched: Watched
) -> None:
    """As a LightningModule, whose method `training_step` calls them."""

    class Module(nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList([net() for _ in range(parts)])

        def training_step(self) -> Any:
            return sum(part(torch.ones(4, 8)).sum() for part in self.nets)

    module = Module()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    for _ in range(12):
        optimizer.zero_grad()
        module.training_step().backward()
        watched.step(optimizer)
    (found,) = watched.events("watched")
    if parts == 9:
        assert found["roots"] == ["Module"] and "only by a method" in found["obstacle"]
    else:
        assert found["roots"] == ["Sequential"] * parts and not found["obstacle"]
        assert found["calls"] == parts and found["parts"]["forward"][0] > 0


def test_an_optimiser_that_is_yet_to_step_ends_the_steps(watched: Watched) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():  # a check of the evaluation before training
        for _ in range(40):
            model(torch.ones(2, 8))
    assert watched.session.steps == 0
    for step in range(12):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        watched.step(optimizer)
        if step == 9:
            with torch.no_grad():
                model(torch.ones(2, 8))
    (seen,) = watched.events("watched")
    assert seen["step_is"] == "" and seen["period"] == [1] and seen["optimizers"] == ["SGD"]
    assert len({key for key, _ in seen["steps"]}) == 1 + (len(seen["steps"]) > 8)


def test_several_optimisers_with_evaluation_in_between(watched: Watched) -> None:
    critic, maker = net(), net()
    one, two = (torch.optim.Adam(m.parameters()) for m in (critic, maker))
    for step in range(14):
        for _ in range(3):
            one.zero_grad()
            critic(maker(torch.ones(4, 8)).detach()).square().mean().backward()
            watched.step(one)
        two.zero_grad()
        critic(maker(torch.ones(4, 8))).mean().backward()
        watched.step(two)
        if step == 9:
            with torch.no_grad():
                maker(torch.ones(1, 8))
    (seen,) = watched.events("watched")
    assert sorted(seen["period"]) == [1, 3] and len(seen["steps"]) == 6
    assert [key for key, _ in seen["steps"]].count(seen["steps"][0][0]) >= 5


@pytest.fixture
def profiled(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Watched:
    monkeypatch.setattr(torch.profiler.profile, "step", torch.profiler.profile.step)
    start._watch_profiler(torch.profiler.profiler, watched.sources)
    return watched


def test_steps_of_a_profiler_end_the_steps(profiled: Watched) -> None:
    weight = torch.ones(8, 8, requires_grad=True)  # no module and no optimiser
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        for _ in range(14):
            (torch.ones(4, 8) @ weight).sum().backward()
            own.step()
    (seen,) = profiled.events("watched")
    assert seen["step_is"] == "one step of torch.profiler" and seen["steps"]
    assert any("mm" in event.name for event in own.events())  # its own profile is whole


def test_an_optimiser_is_preferred_to_a_profiler(profiled: Watched) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as own:
        for micro in range(48):  # four micro-batches a step
            model(torch.ones(4, 8)).square().mean().backward()
            if micro % 4 == 3:
                profiled.step(optimizer)
                optimizer.zero_grad()
            own.step()
    (seen,) = profiled.events("watched")
    assert seen["step_is"] == "" and profiled.session.steps == 12


def test_steps_under_the_programs_profiler_are_other_steps(profiled: Watched) -> None:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.profiler.schedule(wait=8, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule
    ) as own:
        for _ in range(14):
            model(torch.ones(4, 8)).square().mean().backward()
            profiled.step(optimizer)
            optimizer.zero_grad()
            own.step()
    (seen,) = profiled.events("watched")
    keys = [key for key, _ in seen["steps"]]
    # Steps 10 and 11 are recorded; a recorded step is not compared with others.
    assert len(set(profiled.session._keys)) > 1 and len(set(keys)) <= 2


def test_an_order_that_changes_ends_the_watch(watched: Watched) -> None:
    one, two, x = net(), net(), torch.ones(2, 8)
    for _ in range(20):
        two(one(x))
    watched.order(do="warm", changes=[], limit_steps=90, limit_seconds=60, least_seconds=0)
    for _ in range(8):
        one(one(x))
    (failed,) = watched.events("failed")
    assert "modules are called in another order" in failed["reason"]


def test_an_order_that_changes_while_watched_is_looked_for_again(watched: Watched) -> None:
    one, two, x = net(), net(), torch.ones(2, 8)
    for _ in range(4):
        two(one(x))
    for _ in range(30):
        two(one(one(x)))
    assert watched.events("failed") == []
    (seen,) = watched.events("watched")
    assert seen["step_is"] == "3 calls of Sequential, Sequential"


def test_calls_without_a_period_are_refused(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources_module, "MOST_CALLS", 80)
    models, draw = [net(), net(), net()], random.Random(0)
    for _ in range(200):
        draw.choice(models)(torch.ones(2, 8))
    (failed,) = watched.events("failed")
    assert "where a step ends is not certain" in failed["reason"] and "--step" in failed["reason"]
    watched.order(do="end")
    with pytest.raises(SystemExit):
        models[0](torch.ones(2, 8))


def test_a_loop_that_grows_is_refused(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources_module, "MOST_CALLS", 80)
    model, x = nn.Embedding(16, 8), torch.zeros(1, 3, dtype=torch.long)
    for _ in range(100):
        model(x)
        x = torch.cat([x, x[:, :1]], dim=1)
    (failed,) = watched.events("failed")
    assert "grow one by one, as in a generation loop" in failed["reason"]


def test_compiled_modules_are_traced_as_without_a_watch(
    watched: Watched, request: pytest.FixtureRequest
) -> None:
    # A later test would take its program for one that is compiled already.
    request.addfinalizer(torch._dynamo.utils.counters.clear)
    model = torch.compile(net(), backend="eager", fullgraph=True)
    with torch.no_grad():
        for _ in range(24):
            model(torch.ones(4, 8))
    (seen,) = watched.events("watched")
    assert seen["step_is"] == "each call of OptimizedModule"
    assert "under torch.compile already" in seen["obstacle"]


def test_a_module_called_late_in_a_step_is_captured(watched: Watched) -> None:
    """After the calls whose shapes are noted."""
    network, decoder = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)

    def steps(count: int) -> None:
        for _ in range(count):
            for _ in range(12):
                network(torch.ones(4, 8))
            decoder(torch.ones(4, 8))

    with torch.no_grad():
        steps(20)
        (seen,) = watched.events("watched")
        assert seen["step_is"].startswith("13 calls of Linear")
        captured = watched.session._captures = {}
        steps(1)
    assert sorted(captured) == [0, 1]
    shapes_seen = {next(iter(found.values())).args[0].shape for found in captured.values()}
    assert shapes_seen == {(4, 8)}


def generating(lengths: Callable[[int], int], steps: int = 20) -> Any:
    """Calls generate of a small Llama; ``lengths`` gives the number of new tokens of each."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    for at in range(steps):
        x = torch.ones(2, 4, dtype=torch.long)
        model.generate(x, max_new_tokens=lengths(at), do_sample=False)
    return model


@pytest.fixture
def generated(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> Watched:
    pytest.importorskip("transformers")
    from transformers.generation import utils

    monkeypatch.setattr(utils.GenerationMixin, "generate", utils.GenerationMixin.generate)
    watched.sources.modules.watch_generate(utils)
    return watched


def test_a_call_of_generate_is_a_step(generated: Watched) -> None:
    generating(lambda at: 5)
    (seen,) = generated.events("watched")
    assert seen["step_is"] == "each call of LlamaForCausalLM.generate"
    assert seen["roots"] == ["LlamaForCausalLM"] and len({key for key, _ in seen["steps"]}) == 1
    assert seen["generates"] is True


def test_lengths_that_vary_are_refused(generated: Watched) -> None:
    draw = random.Random(0)
    generating(lambda at: draw.randint(2, 9))
    (failed,) = generated.events("failed")
    assert "their lengths vary: set min_new_tokens and max_new_tokens" in failed["reason"]
    assert "--step" in failed["reason"]
