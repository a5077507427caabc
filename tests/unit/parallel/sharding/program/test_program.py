"""Sharded programs on simulated devices: loss, all gradients and collectives.

``python -m benchmarks run sharding.correctness`` does the same for all models, meshes and rules.
"""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="programs need the extra nostall[torch]")
pytest.importorskip("transformers", reason="models need the extra nostall[torch-tests]")
pytest.importorskip("scipy", reason="planning needs the extra nostall[sharding]")

from benchmarks.sharding.local_devices import LocalDevices  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from nostall.parallel.module import Job  # noqa: E402
from nostall.parallel.sharding.capture.operators import CapturedStep, capture  # noqa: E402
from nostall.parallel.sharding.placements import COLLECTIVES, Step  # noqa: E402
from nostall.parallel.sharding.planners.rules import RULES  # noqa: E402
from nostall.parallel.sharding.planners.sharding import (  # noqa: E402
    Options,
    ShardingPlan,
    plan_by_rule,
    plan_sharding,
)
from nostall.parallel.sharding.program.devices import (  # noqa: E402
    redistribute,
    together,
)
from nostall.parallel.sharding.program.program import ShardedProgram  # noqa: E402
from tests.unit.parallel.sharding.steps import SAMPLES, captured, job, prices  # noqa: E402


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("resnet", (4,)),
        ("wide_classifier", (2, 2)),
        ("experts", (2,)),
    ],
)
def test_a_plan_trains_as_one_device_does(model: str, mesh: tuple[int, ...]) -> None:
    step = captured(model, *mesh)
    plan, rules = plan_sharding(prices(step, mesh), Options())
    assert all(plan.whole_s <= rule.whole_s * (1 + 1e-6) for rule in rules)
    check(model, plan)


@pytest.mark.parametrize("rule", ["fsdp"])
def test_a_rule_trains_as_one_device_does(rule: str) -> None:
    step = captured("gpt2", 2)
    plan = plan_by_rule(prices(step, (2,)), RULES[rule], Options())
    assert plan is not None
    check("gpt2", plan)


def test_kernels_that_read_memory_without_strides_get_the_order_of_the_trace() -> None:
    """The backward pass of weight norm is one; the sum of gradients before it is of a transposed
    tensor, which the trace transposes back without a copy."""
    torch.manual_seed(0)
    last = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(8, 5))
    module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), last).double()
    targets = torch.randint(0, 5, (SAMPLES,))
    inputs = torch.randn(SAMPLES, 6).double()
    own = Job(module, (inputs,), targets, torch.nn.functional.cross_entropy)
    step = capture(own, SAMPLES, (2,))
    plan = plan_by_rule(prices(step, (2,)), RULES["data-parallel"], Options())
    assert plan is not None
    compare(own, step, plan)


def check(model: str, plan: ShardingPlan) -> None:
    """Compare loss, gradients and the number of collectives of one step."""
    mesh = plan.prices.graph.mesh
    compare(job(model), captured(model, *mesh), plan)


def compare(own: Job, step: CapturedStep, plan: ShardingPlan) -> None:
    mesh = plan.prices.graph.mesh
    devices = LocalDevices(mesh)
    program = ShardedProgram(step, plan.assignment, devices)
    inputs, targets = own.example_batch(SAMPLES)
    with torch.no_grad():
        parameters = program.shard_parameters(dict(own.module.named_parameters()))
        devices.collectives.clear()
        buffers = dict(own.module.named_buffers())
        result = program.run(parameters, buffers, tree_leaves((inputs, targets)))
    counts = {k: n for k, n in devices.collectives.items() if k in COLLECTIVES}
    assert counts == plan.times.counts
    loss, gradients = reference(own, inputs, targets)
    assert all(float(value) == pytest.approx(loss, rel=1e-12) for value in result.loss)
    assert result.gradients.keys() == gradients.keys()
    for name, expected in gradients.items():
        placements = program.parameter_placements(name)
        local = result.gradients[name]
        for got in redistribute(devices, local, placements, ("R",) * len(mesh)):
            size = max(float(expected.abs().max()), 1e-6)
            assert float((got - expected).abs().max()) <= 1e-12 * size, name


def reference(own: Any, inputs: Any, targets: Any) -> tuple[float, dict[str, Any]]:
    """Loss and gradients of the module itself."""
    module = own.module
    output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
    loss = own.loss(output, targets)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, [p for _, p in named])
    return float(loss.detach()), {name: g for (name, _), g in zip(named, gradients, strict=True)}


@pytest.mark.parametrize(
    ("kind", "target", "source"),
    [
        *((k, t, s) for k, t in (("all-reduce", "R"), ("reduce-scatter", "S1")) for s in "PA"),
        ("all-gather", "R", "S1"),
    ],
)
def test_tensors_that_share_a_collective_are_as_each_alone(
    kind: str, target: str, source: str
) -> None:
    """Tensors of different shapes on a mesh of two dimensions, along the inner one."""
    devices = LocalDevices((2, 2))
    generator = torch.Generator().manual_seed(0)
    tensors = [
        [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
        for shape in ((3, 4), (1, 2, 5), (6, 2))
    ]
    steps = [Step(1, source, target)] * 3
    if target == "S1":
        steps[2] = Step(1, source, "S0")
    if source == "S1":
        steps[2] = Step(1, "S0", target)
    shared = together(devices, tensors, steps)
    assert devices.collectives[kind] == 1
    for values, step, got in zip(tensors, steps, shared, strict=True):
        alone = redistribute(devices, values, ("R", step.source), ("R", step.target))
        for a, b in zip(alone, got, strict=True):
            assert a.shape == b.shape
            assert torch.allclose(a, b, rtol=1e-14, atol=1e-14)
