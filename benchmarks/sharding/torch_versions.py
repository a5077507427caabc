"""Capture, strategies and execution of shardings on the installed PyTorch.

    python -m benchmarks run sharding.torch_versions --out OUT_DIR

Captures each narrow model on two devices, counts the strategies that DTensor's rules give, and runs
the plans of the planner and of the rules on two devices simulated in one process, in double
precision.  Writes OUT_DIR/torch_versions_VERSION.json.  The exit code is 1 if a plan's loss or
gradients differ from the module's own.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from benchmarks.harness.result_file import save
from benchmarks.sharding.clusters import one_server
from benchmarks.sharding.correctness import SLOW, SMALLEST_GRADIENT
from benchmarks.sharding.local_devices import LocalDevices
from benchmarks.sharding.models import MODELS, Size
from nostall.parallel.module import Job
from nostall.parallel.sharding.capture.dtensor_rules import missing_part
from nostall.parallel.sharding.capture.operators import CapturedStep, capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.placements import REPLICATED
from nostall.parallel.sharding.planners.sharding import Options, ShardingPlan, plan_sharding
from nostall.parallel.sharding.program.devices import redistribute
from nostall.parallel.sharding.program.program import ShardedProgram

MESH = (2,)
TOLERANCE = 1e-12
"""Of the largest entry of a gradient, and of the loss."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    records = [_record(name) for name in options.models]
    version = torch.__version__
    plans = [plan for record in records for plan in record["plans"]]
    same = sum(plan["same"] for plan in plans)
    save(
        options.out / f"torch_versions_{version.partition('+')[0]}.json",
        kind="measured",
        about={"torch": version, "lacking": missing_part()},
        same=f"{same} of {len(plans)}",
        models=records,
    )
    print(f"torch {version}: {same} of {len(plans)} plans agree with one process")
    sys.exit(0 if same == len(plans) else 1)


def _record(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    size = Size()
    job = MODELS[name](size)
    step = capture(job, size.samples, MESH, name)
    graph = step.graph
    prices = Prices(graph, ClusterMesh(one_server(2, 3e4), MESH), SLOW)
    best, rules = plan_sharding(prices, Options())
    strategies = {
        operator.signature: sorted((s.inputs, s.outputs) for s in operator.strategies[0])
        for operator in graph.operators
        if operator.kind == "operation"
    }
    record = {
        "model": name,
        "operators": len(graph.operators),
        "without_rule": sorted(set(graph.without_rule)),
        "signatures": len(strategies),
        "strategies": sum(map(len, strategies.values())),
        "strategies_digest": hashlib.sha256(repr(sorted(strategies.items())).encode()).hexdigest(),
        "plans": [_check(job, step, plan) for plan in (best, *rules)],
    }
    print({k: v for k, v in record.items() if k != "plans"}, flush=True)
    return record


def _check(job: Job, step: CapturedStep, plan: ShardingPlan) -> dict[str, Any]:
    """Largest relative errors of the loss and of a gradient."""
    devices = LocalDevices(MESH)
    program = ShardedProgram(step, plan.assignment, devices)
    inputs, targets = job.example_batch(Size().samples)
    named = dict(job.module.named_parameters())
    with torch.no_grad():
        buffers = dict(job.module.named_buffers())
        local = program.shard_parameters(named)
        result = program.run(local, buffers, tree_leaves((inputs, targets)))
    output = job.module(**inputs) if isinstance(inputs, dict) else job.module(*inputs)
    loss = job.loss(output, targets)
    worst = 0.0
    for name, expected in zip(named, torch.autograd.grad(loss, list(named.values())), strict=True):
        placements = program.parameter_placements(name)
        size = max(float(expected.abs().max()), SMALLEST_GRADIENT)
        for got in redistribute(devices, result.gradients[name], placements, (REPLICATED,)):
            worst = max(worst, float((got - expected).abs().max()) / size)
    loss_error = abs(float(result.loss[0]) / float(loss.detach()) - 1)
    same = worst <= TOLERANCE and loss_error <= TOLERANCE
    return {"plan": plan.name, "same": same, "loss_error": loss_error, "gradient_error": worst}
