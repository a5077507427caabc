"""Captured steps: operators, gradients, tied weights, strategies that are checked by numbers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capture needs the extra nostall[torch]")
pytest.importorskip("transformers", reason="models need the extra nostall[torch-tests]")

from benchmarks.sharding.local_devices import LocalDevices  # noqa: E402
from benchmarks.sharding.models import MODELS  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from nostall.core.errors import MissingPart  # noqa: E402
from nostall.parallel.errors import BadModel  # noqa: E402
from nostall.parallel.module import Job  # noqa: E402
from nostall.parallel.sharding.capture import dtensor_rules  # noqa: E402
from nostall.parallel.sharding.capture.operators import (  # noqa: E402
    FALLBACK_RULES,
    capture,
)
from nostall.parallel.sharding.graph import replicated  # noqa: E402
from nostall.parallel.sharding.placements import Strategy, is_partial, local_shape  # noqa: E402
from nostall.parallel.sharding.planners.rules import RULES  # noqa: E402
from nostall.parallel.sharding.planners.sharding import Options, plan_by_rule  # noqa: E402
from nostall.parallel.sharding.program.devices import (  # noqa: E402
    redistribute,
    scatter,
)
from nostall.parallel.sharding.program.program import (  # noqa: E402
    LocalOperator,
    ShardedProgram,
)
from tests.unit.parallel.sharding.steps import SAMPLES, captured, job, prices  # noqa: E402


def test_tied_weights_are_one_parameter_with_one_gradient() -> None:
    graph = captured("gpt2", 2).graph
    names = [graph.operators[number].target for number in graph.parameters]
    assert "transformer.wte.weight" in names
    assert "lm_head.weight" not in names
    assert all(len(graph.operators[number].inputs) == 1 for number in graph.parameters)


def test_megatron_strategies_of_a_linear_layer_are_found() -> None:
    graph = captured("wide_classifier", 2).graph
    product = next(o for o in graph.operators if o.target == "aten.addmm.default")
    assert Strategy(("S0", "R", "S1"), ("S1",)) in product.strategies[0]
    assert Strategy(("P", "S1", "S0"), ("P",)) in product.strategies[0]
    assert product.flops == 2 * SAMPLES * 16 * 16


def test_a_frozen_parameter_has_no_gradient() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    module[0].requires_grad_(False)
    batch = torch.randn(4, 4), torch.randn(4, 2)
    graph = capture(Job(module, batch[:1], batch[1], nn.functional.mse_loss), 4, (2,)).graph
    assert [len(graph.operators[number].inputs) for number in graph.parameters] == [0, 0, 1, 1]


def test_a_module_with_two_names_keeps_its_parameters() -> None:
    layer = nn.Linear(4, 4)
    module, weight = nn.Sequential(layer, nn.ReLU(), layer), layer.weight
    batch = torch.randn(4, 4), torch.randn(4, 4)
    graph = capture(Job(module, batch[:1], batch[1], nn.functional.mse_loss), 4, (2,)).graph
    assert layer.weight is weight and len(graph.parameters) == 2


def test_operators_without_a_rule_are_counted_and_replicated() -> None:
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return torch.cdist(self.linear(x), x)

    batch = torch.randn(4, 4), torch.randn(4, 4)
    graph = capture(Job(Distances(), batch[:1], batch[1], nn.functional.mse_loss), 4, (2,)).graph
    assert graph.without_rule == (
        "aten._cdist_forward.default",
        "aten._cdist_backward.default",
    )
    operator = next(o for o in graph.operators if "cdist" in o.target)
    assert [s.inputs for s in operator.strategies[0]] == [("R", "R")]


class Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return torch.linalg.inv(self.linear(x))


class RunningMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.linear(x - self.mean)


class ReplacedMean(RunningMean):
    def forward(self, x: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x - self.mean)


class Draws(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.generator = torch.Generator()

    def forward(self, x: Any) -> Any:
        return super().forward(x) * torch.rand(x.shape, generator=self.generator)


@pytest.mark.parametrize(
    ("module", "text"),
    [(ReplacedMean, "replaces the buffer mean"), (Draws, "uses a Generator of its own")],
)
def test_state_that_a_trace_does_not_have_is_refused(module: Any, text: str) -> None:
    batch = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(BadModel, match=text):
        capture(Job(module(), batch[:1], batch[1], nn.functional.mse_loss), 4, (2,))


class InPlace(nn.Linear):
    def forward(self, x: Any) -> Any:
        y = super().forward(x)
        z = y.clone()
        z[:, 0] = 0
        z[:, 1:3] *= 2
        return z + y


def test_changes_in_place_and_a_loss_that_reads_parameters_are_sharded() -> None:
    torch.manual_seed(0)
    module, batch = InPlace(4, 4).double(), torch.randn(2, 4, 4).double()

    def loss(y: Any, targets: Any) -> Any:
        return nn.functional.mse_loss(y, targets) + module.weight.square().sum()

    step = capture(Job(module, (batch[0],), batch[1], loss), 4, (2,))
    plan = plan_by_rule(prices(step, (2,)), RULES["data-parallel"], Options())
    assert plan is not None
    devices = LocalDevices((2,))
    program = ShardedProgram(step, plan.assignment, devices)
    parameters = program.shard_parameters(dict(module.named_parameters()))
    with torch.no_grad():
        result = program.run(parameters, {}, list(batch))
    loss(module(batch[0]), batch[1]).backward()
    for name, parameter in module.named_parameters():
        for own in result.gradients[name]:
            assert torch.allclose(own, parameter.grad, rtol=1e-12)


@pytest.mark.parametrize("module", [RunningMean, Inverse])
def test_a_forward_pass_with_an_effect_is_refused(module: type[nn.Module]) -> None:
    if module is Inverse and torch.__version__.startswith(("2.11", "2.12")):
        pytest.skip("the check of values is an effect of the graph since torch 2.13")
    batch = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(BadModel, match="has an effect besides its loss"):
        capture(Job(module(), batch[:1], batch[1], nn.functional.mse_loss), 4, (2,))


def test_a_branch_on_a_value_is_refused() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            return self.linear(x) if x.sum() > 0 else x

    batch = torch.randn(4, 4), torch.randn(4, 4)
    with pytest.raises(BadModel, match="no branches on values"):
        capture(Job(Branching(), batch[:1], batch[1], nn.functional.mse_loss), 4, (2,))


def test_an_unknown_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtensor_rules, "_PARTS", ("_op_schema.OpNothing",))
    dtensor_rules.missing_part.cache_clear()
    try:
        with pytest.raises(MissingPart, match=r"has no .*\.OpNothing"):
            dtensor_rules.require_parts()
    finally:
        dtensor_rules.missing_part.cache_clear()


def test_fallback_rules_compute_what_the_operators_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules for versions of torch whose rules shard nothing."""
    rules = dtensor_rules.strategies
    monkeypatch.setattr(
        dtensor_rules,
        "strategies",
        lambda target, *rest: [] if target in FALLBACK_RULES else rules(target, *rest),
    )
    captured.cache_clear()
    step, values = captured("vgg", 2), whole_values("vgg")
    checked = set()
    for number, operator in enumerate(step.graph.operators):
        node = step.nodes[number]
        if node is None or node.target not in FALLBACK_RULES:
            continue
        assert len(operator.strategies[0]) > 1
        for strategy in operator.strategies[0][1:]:
            assert strategy_error("vgg", number, strategy, values) < 1e-9, (node.target, strategy)
        checked.add(node.target)
    assert checked == FALLBACK_RULES.keys() and not step.graph.without_rule
    captured.cache_clear()


@pytest.mark.parametrize("model", ["gpt2", "experts"])
def test_every_strategy_computes_what_the_operator_computes(model: str) -> None:
    """Local operators on shards and on random partial sums give the values of the whole ones."""
    step, values = captured(model, 2), whole_values(model)
    checked = 0
    seen = set()
    for number, operator in enumerate(step.graph.operators):
        if operator.kind != "operation" or operator.signature in seen:
            continue
        seen.add(operator.signature)
        for strategy in operator.strategies[0][1:]:
            error = strategy_error(model, number, strategy, values)
            assert error < 1e-9, (operator.target, strategy, error)
            checked += 1
    assert checked > 50


class Lists(nn.Module):
    """Stacks, and cats whose inputs may be sharded in several ways, in both passes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 24)

    def forward(self, x: Any) -> Any:
        first, second, third = self.linear(x).view(-1, 3, 4, 2).unbind(1)
        turned = torch.cat((-first, second), -1)
        return torch.stack((turned, turned * torch.cat((third, third), 2)), -1).flatten(1)


def test_lists_of_tensors_are_sharded_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """DTensor replicates them if one of the tensors may be sharded in several ways."""
    torch.manual_seed(0)
    x, y = torch.randn(SAMPLES, 8).double(), torch.randn(SAMPLES, 32).double()
    own = Job(Lists().double(), (x,), y, nn.functional.mse_loss)
    monkeypatch.setitem(MODELS, "lists", lambda size: own)
    step, values = captured("lists", 2), whole_values("lists")
    found: dict[str, set[tuple[str, str]]] = {}
    for number, operator in enumerate(step.graph.operators):
        if operator.target not in ("aten.cat.default", "aten.stack.default"):
            continue
        for strategy in operator.strategies[0]:
            assert strategy_error("lists", number, strategy, values) < 1e-9, strategy
            found.setdefault(operator.target, set()).add((strategy.inputs[0], *strategy.outputs))
    assert found["aten.cat.default"] == {("R", "R"), ("S0", "S0"), ("S1", "S1"), ("P", "P")}
    # Forward along the last dimension, backward along the second.
    dims = {("S0", "S0"), ("S1", "S1"), ("S2", "S2"), ("S1", "S2"), ("S2", "S3")}
    assert found["aten.stack.default"] == {("R", "R"), ("P", "P"), *dims}


@pytest.mark.parametrize("model", ["gpt2", "vgg"])
def test_samples_of_layer_norms_and_losses_are_independent(model: str) -> None:
    """The rules of torch 2.11 give one placement for all outputs, or expect lists of one length."""
    by_target = {o.target: o for o in captured(model, 2).graph.operators}
    wanted = {
        "gpt2": ("aten.native_layer_norm.default", "aten.native_layer_norm_backward.default"),
        "vgg": ("aten.scatter.value",),
    }
    for target in wanted[model]:
        inputs = {strategy.inputs[0] for strategy in by_target[target].strategies[0]}
        assert {"R", "S0"} <= inputs, target


def whole_values(model: str) -> dict[int, Any]:
    """Values of all tensors of a step on one device, by number."""
    step, own = captured(model, 2), job(model)
    program = ShardedProgram(step, replicated(step.graph), LocalDevices((1,)))
    record: dict[int, Any] = {}
    parameters = {name: [p.detach()] for name, p in own.module.named_parameters()}
    leaves = tree_leaves(own.example_batch(SAMPLES))
    with torch.no_grad():
        program.run(parameters, dict(own.module.named_buffers()), leaves, record)
    return {tensor: value[0] for tensor, value in record.items()}


def strategy_error(model: str, number: int, strategy: Strategy, values: dict[int, Any]) -> float:
    """Largest difference of an output, relative to its largest value; infinite for integers."""
    step, devices = captured(model, 2), LocalDevices((2,))
    operator, node = step.graph.operators[number], step.nodes[number]
    assert node is not None
    inputs = [
        _split(devices, values[tensor], placement)
        for tensor, placement in zip(operator.inputs, strategy.inputs, strict=True)
    ]
    shapes = [
        local_shape(step.graph.tensors[tensor].shape, (placement,), (2,)) or ()
        for tensor, placement in zip(operator.outputs, strategy.outputs, strict=True)
    ]
    indices = step.output_indices[number]
    with torch.no_grad():
        run = LocalOperator(node, indices, shapes, torch.device("cpu"))
        local = [run([own[d] for own in inputs]) for d in range(2)]
    worst = 0.0
    for place, tensor in enumerate(operator.outputs):
        assert all(tuple(local[d][place].shape) == shapes[place] for d in range(2))
        placement = strategy.outputs[place]
        both = [local[d][place] for d in range(2)]
        for whole in redistribute(devices, both, (placement,), ("R",)):
            worst = max(worst, _difference(whole, values[tensor]))
    return worst


def _split(devices: Any, value: Any, placement: str) -> list[Any]:
    """Local tensors of a whole one; partial sums of floating-point numbers are random."""
    if not is_partial(placement):
        return scatter(devices, value, (placement,))
    total = value * 2 if placement == "A" else value
    first = torch.randn_like(total) if value.is_floating_point() else total // 2
    return [first, total - first]


def _difference(got: Any, expected: Any) -> float:
    """Relative difference; equal infinities are equal."""
    if not expected.is_floating_point():
        return 0.0 if torch.equal(got.to(expected.dtype), expected) else float("inf")
    finite = expected.isfinite()
    if not torch.equal(got[~finite], expected[~finite]):
        return float("inf")
    size = float(expected[finite].abs().max()) if finite.any() else 0.0
    error = float((got[finite] - expected[finite]).abs().max()) if finite.any() else 0.0
    return error / max(size, 1e-6)


@pytest.mark.parametrize("error", [RuntimeError, KeyError, ValueError, AssertionError])
def test_a_rule_that_rejects_arguments_gives_no_strategies(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _strategies_with_rule(monkeypatch, error("no")) == []


def test_a_defective_rule_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest is set to raise warnings, so a silent rejection would be seen here."""
    named = (
        r"rule of aten.relu.default failed \(TypeError: a defect\); the operator runs replicated"
    )
    with pytest.warns(RuntimeWarning, match=named):
        assert _strategies_with_rule(monkeypatch, TypeError("a defect")) == []


def test_a_defect_of_the_adapter_is_no_rejection(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("a defect")

    monkeypatch.setattr(dtensor_rules, "_with_strategies", broken)
    with pytest.raises(ValueError, match="a defect"):
        _strategies_with_rule(monkeypatch, RuntimeError("not asked"))


def _strategies_with_rule(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[Strategy]:
    """The strategies of relu with a rule in the first registry that raises ``error``."""

    def rule(_: object) -> None:
        raise error

    target = torch.ops.aten.relu.default
    monkeypatch.setitem(dtensor_rules._part(dtensor_rules._PARTS[0]), target, rule)
    return dtensor_rules.strategies(target, [torch.ones(4, 4)], {}, 2)
