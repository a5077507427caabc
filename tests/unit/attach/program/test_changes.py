"""Changes on real modules and optimisers: what they check, and how they are taken back."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import defaultdict, namedtuple
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from nostall.attach.program import changes, shadow  # noqa: E402
from nostall.attach.program.changes import (  # noqa: E402
    MARKED,
    ChannelsLast,
    Compile,
    OptimizerFlag,
    has_images,
)
from nostall.attach.program.roots import Switch  # noqa: E402

nn = torch.nn
Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Record:
    a: Any
    b: Any


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 4, 1)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Any) -> Any:
        return self.out(self.second(self.norm(self.first(x)).relu()).mean((2, 3)))


class Features(Images):
    def forward(self, x: Any) -> Any:
        return self.first(x)


def call(x: Any) -> dict[int, list[shadow.Call]]:
    return {0: [shadow.Call((x,), {}, True, True, None)]}


def switch_of(root: Any) -> Switch:
    return Switch(root, [], lambda *_: None)


def step(root: Any, optimizer: Any, set_to_none: bool = True) -> None:
    optimizer.zero_grad(set_to_none=set_to_none)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    root(images).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_channels_last_is_switched_and_taken_back(
    options: dict[str, bool], set_to_none: bool
) -> None:
    torch.manual_seed(0)
    root = Images()
    twin = Images()
    twin.load_state_dict(root.state_dict())
    # With the default eps the sign of a gradient that is 0 but for rounding would move by lr.
    optimizer = torch.optim.AdamW(root.parameters(), eps=0.1, **options)
    other = torch.optim.AdamW(twin.parameters(), eps=0.1, **options)
    for pair in ((root, optimizer), (twin, other)):
        step(*pair, set_to_none)
    change = ChannelsLast([switch_of(root)], [optimizer])
    assert change.check(call(torch.randn(2, 3, 8, 8))).refusal == ""
    identities = [id(p) for p in root.parameters()]
    moment = optimizer.state[root.first.weight]["exp_avg"]
    for _ in range(2):
        change.on()
        change.on()
        assert root.first.weight.is_contiguous(memory_format=torch.channels_last)
        assert not root.first.weight.is_contiguous() and not moment.is_contiguous()
        for pair in ((root, optimizer), (twin, other)):
            step(*pair, set_to_none)
        change.off()
        change.off()
        assert root.first.weight.is_contiguous() and moment.is_contiguous()
        assert root.first.weight.grad.is_contiguous()
        for pair in ((root, optimizer), (twin, other)):
            step(*pair, set_to_none)
    assert identities == [id(p) for p in root.parameters()]
    for mine, its in zip(root.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.allclose(mine, its, rtol=1e-4, atol=1e-6)


class Dropping(Images):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Any) -> Any:
        return self.out(self.second(self.drop(self.first(x))).mean((2, 3)))


def test_dropout_in_another_layout_draws_other_numbers() -> None:
    """In the order of memory: the values are compared without it."""
    found = ChannelsLast([switch_of(Dropping())], []).check(call(torch.randn(2, 3, 8, 8)))
    assert found.refusal == "" and found.result_class == "other random numbers"

    def no_dropout(module: Any, _: bool) -> Any:
        return lambda x: module.out(module.second(module.first(x)).mean((2, 3)))

    calls = call(torch.randn(2, 3, 8, 8))[0]
    skip = shadow.check_module(Dropping(), calls, no_dropout, drops=False)
    assert "two seeds differ by 0.00e+00" in skip.refusal


def test_channels_last_is_for_convolutions_of_images() -> None:
    assert has_images(Images()) and not has_images(nn.Linear(2, 2))
    assert not has_images(nn.Sequential(nn.Conv1d(2, 2, 1)))
    assert not has_images(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Linear(16, 16)))
    assert not has_images(Images().to(memory_format=torch.channels_last))


def test_outputs_have_the_layout_that_a_program_may_rely_on() -> None:
    """It could view them, which fails for another layout."""
    root, x = Features(), torch.randn(2, 3, 8, 8)
    change = ChannelsLast([switch_of(root)], [])
    assert change.check(call(x)).refusal == ""
    change.on()
    assert root(x).view(2, -1).shape == (2, 512)
    assert copy.deepcopy(root)(x).is_contiguous()
    saved = pickle.dumps(root)  # as a program does that saves a whole module
    assert b"nostall" not in saved.replace(Features.__module__.encode(), b"")
    assert torch.equal(pickle.loads(saved)(x), root(x))
    change.off()
    assert not root._forward_hooks


def test_a_module_of_pytorch_is_compiled() -> None:
    """Its own method ``compile`` would compile nothing."""
    root = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    switch, before = switch_of(root), changes.compiled_graphs()
    change = Compile([switch], "aot_eager")
    assert change.check(call(torch.randn(4, 8))).refusal == ""
    change.on()
    root(torch.randn(4, 8)).sum().backward()
    assert changes.compiled_graphs() > before and switch.failure is None
    shadow.restore_version_limit()


def test_dynamo_compiles_the_versions_of_all_attempts() -> None:
    from torch._dynamo import config

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return self.layer(x)

    shadow.restore_version_limit()  # other tests leave changes on
    limit = config.recompile_limit
    root = Net()
    for number in range(limit + 2):
        before = changes.compiled_graphs()
        options = {"x": number}
        change = Compile([switch_of(root)], "eager")
        change._version = lambda m, _, o=options: torch.compile(  # type: ignore[method-assign]
            m._call_impl, backend=lambda graph, inputs, o=o: graph.forward
        )
        assert change.check(call(torch.randn(4, 8))).refusal == ""
        assert changes.compiled_graphs() > before
    assert config.recompile_limit > limit
    shadow.restore_version_limit()
    assert config.recompile_limit == limit


def test_a_step_is_marked_when_marked_graphs_are_switched_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # `nostall apply` switches them on behind a step that nothing marked.
    marks: list[int] = []
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: marks.append(1))
    root = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(root.parameters(), lr=0.1)
    change = Compile([Switch(root, [], lambda *_: None)], MARKED, optimizer)
    change.on()
    assert len(marks) == 1
    root(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert len(marks) == 2
    change.off()


def test_outputs_of_a_graph_are_copied() -> None:
    buffer = torch.ones(3)
    version = changes._with_own_outputs(lambda: {"loss": buffer, "none": None})
    result = version()
    buffer.zero_()
    assert result["none"] is None and torch.equal(result["loss"], torch.ones(3))
    with pytest.raises(TypeError, match="is a Opaque"):
        changes._with_own_outputs(lambda: (buffer, Opaque(buffer)))()


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x) if self.training else Opaque(self.layer(x))


def test_copied_outputs_are_what_they_were() -> None:
    class Named(dict[str, Any]):
        """A subclass with a constructor and attributes of its own."""

        def __init__(self, first: Any) -> None:
            super().__init__(first=first)
            self.steps = 0

    made: Any = Named(torch.ones(2))
    made["more"], made.steps = torch.ones(3), 7
    call = changes._with_own_outputs(lambda value: value)
    lists = call(defaultdict(list, a=torch.ones(2)))
    assert lists["new"] == [] and lists["a"].sum() == 2
    found = shadow.map_tensors(made, lambda tensor: tensor.clone())
    assert type(found) is Named and list(found) == ["first", "more"] and found.steps == 7
    assert found["more"] is not made["more"]


def test_a_refused_output_of_an_applied_graph_leaves_the_original(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Sometimes()
    switch = switch_of(model)
    switch.target = changes._with_own_outputs(model._call_impl)
    switch.settle()
    x = torch.ones(1, 2)
    assert torch.is_tensor(model(x)) and capsys.readouterr().err == ""
    model.eval()
    assert isinstance(model(x), Opaque) and isinstance(model(x), Opaque)
    line = "nostall: Sometimes runs as it was: an output is a Opaque, whose tensors the next replay"
    assert capsys.readouterr().err.count(line) == 1
    assert "_compiled_call_impl" not in model.__dict__


def flat_gradients(root: Any) -> None:
    flat = torch.zeros(root.first.weight.numel() + 8)
    root.first.weight.grad = flat[8:].view_as(root.first.weight)


def flat_parameters(root: Any) -> None:
    root.first.weight.data = torch.zeros(2, *root.first.weight.shape)[1]


def tied(root: Any) -> None:
    root.third = nn.Conv2d(3, 8, 3, padding=1, bias=False)
    root.third.weight.data = root.first.weight.data


@pytest.mark.parametrize(
    ("alias", "reason"),
    [
        (flat_gradients, "is part of other memory"),
        (flat_parameters, "is part of other memory"),
        (tied, "has the memory of another one"),
        (nn.Module.share_memory, "that processes share"),
    ],
)
def test_another_layout_of_memory_with_two_owners_is_refused(alias: Any, reason: str) -> None:
    root = Images()
    alias(root)
    change = ChannelsLast([switch_of(root)], [])
    refusal = change.check(call(torch.randn(2, 3, 8, 8))).refusal
    assert reason in refusal and change.missing() == refusal


def test_gradients_keep_their_identity_in_another_layout() -> None:
    root = Images()
    step(root, torch.optim.SGD(root.parameters(), lr=0.1))
    change, gradient = ChannelsLast([switch_of(root)], []), root.first.weight.grad
    change.on()
    assert root.first.weight.grad is gradient
    assert gradient.is_contiguous(memory_format=torch.channels_last)
    change.off()
    assert root.first.weight.grad is gradient and gradient.is_contiguous()


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Wrapping(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.layer, self.wrap = nn.Linear(8, 8), wrap

    def forward(self, x: Any) -> Any:
        return self.wrap(self.layer(x))


@pytest.mark.parametrize(
    ("wrap", "cheat", "reason"),
    [
        (lambda y: Pair(y, 1), lambda y: Pair(2 * y, 1), "off by"),
        (lambda y: Record(y, [y]), lambda y: Record(y, [2 * y]), "off by"),
        (lambda y: Pair(y, 1), lambda y: Pair(y, 2), "outputs are"),
        (lambda y: (y, Opaque(y)), lambda y: (y, y), "outputs are"),
        (lambda y: Opaque(y), lambda y: Opaque(2 * y), "off by"),
        (lambda y: Slots(y), lambda y: Slots(y), "no tensors are found"),
        (lambda y: None, lambda y: None, "no tensors are found"),
    ],
)
def test_outputs_of_all_kinds_are_compared(wrap: Any, cheat: Any, reason: str) -> None:
    root = Wrapping(wrap)
    calls = call(torch.randn(4, 8))[0]
    found = shadow.check_module(root, calls, lambda m, _: lambda x: cheat(m.layer(x)))
    assert reason in found.refusal
    if reason != "no tensors are found":
        assert shadow.check_module(root, calls, lambda m, _: m._call_impl).refusal == ""


def test_an_optimiser_is_checked_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Images()
    optimizer = torch.optim.AdamW(root.parameters())
    step(root, optimizer)
    monkeypatch.setattr(shadow, "CHUNK", 16)
    assert len(list(shadow._chunks(optimizer))) > 3
    change = OptimizerFlag([optimizer], "foreach")
    assert change.check({}).result_class == "bit-equal"

    def skip_large(twin: Any) -> None:
        if twin.param_groups[0]["params"][0].numel() == root.first.weight.numel():
            twin.param_groups[0]["lr"] = 0.0

    assert "off by" in shadow.check_optimizer(optimizer, skip_large).refusal


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_fused_optimiser_is_taken_back(dtype: Any) -> None:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        layer = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(layer.parameters())
        layer(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        before = optimizer.state[layer.weight]["step"].clone()
        change = OptimizerFlag([optimizer], "fused")
        change.on()
        assert optimizer._step_supports_amp_scaling  # as the constructor sets it
        assert optimizer.state[layer.weight]["step"].dtype == torch.float32
        optimizer.step()
        change.off()
        after = optimizer.state[layer.weight]["step"]
        assert after.dtype == before.dtype and float(after) == float(before) + 1
        assert "_step_supports_amp_scaling" not in vars(optimizer)
    finally:
        torch.set_default_dtype(previous)


def test_a_scaler_lets_the_fused_kernel_unscale() -> None:
    torch.manual_seed(0)
    roots = [nn.Linear(4, 4) for _ in range(2)]
    roots[1].load_state_dict(roots[0].state_dict())
    optimizers = [torch.optim.AdamW(root.parameters(), lr=0.01) for root in roots]
    change = OptimizerFlag(optimizers[:1], "fused")
    for number in range(6):
        (change.on if number % 3 else change.off)()
        for root, optimizer in zip(roots, optimizers, strict=True):
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            optimizer.zero_grad()
            scaler.scale(root(torch.ones(2, 4)).square().sum()).backward()
            scaler.step(optimizer)
    assert torch.allclose(roots[0].weight, roots[1].weight, rtol=1e-5, atol=1e-7)


def test_the_failed_call_holds_no_memory_while_the_original_answers() -> None:
    root, alive = nn.Linear(2, 2), []

    class Held:
        pass

    def failing(x: Any) -> Any:
        import weakref

        held = Held()
        alive.append(weakref.ref(held))
        raise RuntimeError("out of memory")

    switch = switch_of(root)
    eager = switch.eager
    switch.target = failing
    switch.eager = lambda x: (alive.append(alive[0]()), eager(x))[1]
    root(torch.ones(1, 2))
    assert alive[1] is None


def test_the_back_end_nostall_is_warm_once_it_has_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclasses.dataclass
    class Report:
        reason: str = ""

    reports = [Report()]
    monkeypatch.setattr(changes, "_nostall_reports", lambda: reports)
    change = Compile([], "nostall")
    change.on()
    reports.append(Report())
    assert not change.is_settled()
    reports[1].reason = "faster"
    assert change.is_settled() and Compile([], "inductor").is_settled()
