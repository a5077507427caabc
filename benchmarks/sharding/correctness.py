"""Loss, gradients and collectives of sharding plans on gloo, against one process.

    python -m benchmarks run sharding.correctness \\
        --out benchmarks/sharding/results/correctness.json

Narrow models with two layers in double precision, dropout off, on 2 and 4 processes: the plan of
the planner and of each rule. HF's RMSNorm, which computes in single precision, is replaced.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from benchmarks.harness.result_file import save
from benchmarks.sharding.clusters import one_server
from benchmarks.sharding.models import MODELS, Size
from nostall.parallel.module import Job
from nostall.parallel.sharding.capture.operators import CapturedStep, capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, mesh_text
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.placements import COLLECTIVES, REPLICATED
from nostall.parallel.sharding.planners.sharding import Options, ShardingPlan, plan_sharding
from nostall.parallel.sharding.program.devices import ProcessDevices, redistribute
from nostall.parallel.sharding.program.program import ShardedProgram

MESHES = ((2,), (4,), (2, 2))
SLOW = DeviceRates("slow", {"float64": 1e8, "float32": 1e8}, 1e9)
"""Rates at which sharding narrow models pays, so that plans shard almost everything."""
SMALLEST_GRADIENT = 1e-6
"""Differences are relative to a gradient's largest entry, or to this: some are 0 but for rounding,
such as that of the bias of attention's keys."""
Planned = tuple[str, Job, CapturedStep, list[ShardingPlan]]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    records: list[dict[str, Any]] = []
    for mesh in MESHES:
        for model in options.models:
            planned = _plan(model, mesh)
            records += _run_on_gloo(planned, mesh)
            for record in records[-len(planned[3]) :]:
                print({k: record[k] for k in ("model", "mesh", "plan", "gradient_error")})
    summary = {
        "plans": len(records),
        "worst_gradient_error": max(r["gradient_error"] for r in records),
        "worst_loss_error": max(r["loss_error"] for r in records),
        "as_predicted": sum(r["collectives"] == r["predicted"] for r in records),
    }
    print(summary)
    save(options.out, summary=summary, records=records)


def _plan(model: str, mesh: Sequence[int]) -> Planned:
    torch.manual_seed(0)
    size = Size()
    job = MODELS[model](size)
    step = capture(job, size.samples, mesh, model)
    prices = Prices(step.graph, ClusterMesh(one_server(math.prod(mesh), 3e4), tuple(mesh)), SLOW)
    best, rules = plan_sharding(prices, Options())
    return model, job, step, [best, *rules]


def _run_on_gloo(planned: Planned, mesh: Sequence[int]) -> list[dict[str, Any]]:
    """Run all plans of a model on one process for each device."""
    context = multiprocessing.get_context("fork")
    count = math.prod(mesh)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, count, Path(folder), planned))
            for rank in range(count)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            raise SystemExit(f"{planned[0]} on {mesh_text(mesh)}: a rank failed")
        parts = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(count)]
    return [_largest(list(own)) for own in zip(*parts, strict=True)]


def _largest(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The record of a plan with the largest errors of all ranks."""
    errors = {name: max(part[name] for part in parts) for name in ("gradient_error", "loss_error")}
    return {**parts[0], **errors}


def _rank(rank: int, count: int, folder: Path, planned: Planned) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count
    )
    model, job, step, plans = planned
    records = [_check(model, job, step, plan) for plan in plans]
    (folder / f"{rank}.json").write_text(json.dumps(records))
    dist.barrier()
    dist.destroy_process_group()


def _check(model: str, job: Job, step: CapturedStep, plan: ShardingPlan) -> dict[str, Any]:
    """Run one step and compare it with the module itself."""
    mesh = step.graph.mesh
    devices = ProcessDevices(mesh)
    program = ShardedProgram(step, plan.assignment, devices)
    inputs, targets = job.example_batch(Size().samples)
    with torch.no_grad():
        parameters = program.shard_parameters(dict(job.module.named_parameters()))
        devices.collectives.clear()
        buffers = dict(job.module.named_buffers())
        result = program.run(parameters, buffers, tree_leaves((inputs, targets)))
    called = {kind: devices.collectives[kind] for kind in COLLECTIVES if devices.collectives[kind]}
    output = job.module(**inputs) if isinstance(inputs, dict) else job.module(*inputs)
    loss = job.loss(output, targets)
    named = dict(job.module.named_parameters())
    expected = torch.autograd.grad(loss, list(named.values()))
    worst = 0.0
    for name, gradient in zip(named, expected, strict=True):
        placements, whole = program.parameter_placements(name), (REPLICATED,) * len(mesh)
        (got,) = redistribute(devices, result.gradients[name], placements, whole)
        size = max(float(gradient.abs().max()), SMALLEST_GRADIENT)
        worst = max(worst, float((got - gradient).abs().max()) / size)
    return {
        "model": model,
        "mesh": mesh_text(mesh),
        "plan": plan.name,
        "gradient_error": worst,
        "loss_error": abs(float(result.loss[0]) - float(loss.detach())) / abs(float(loss.detach())),
        "collectives": dict(sorted(called.items())),
        "predicted": dict(sorted(plan.times.counts.items())),
        "sharded_tensors": _sharded_share(program),
        "is_integral": [solution.is_integral for solution in plan.solutions],
    }


def _sharded_share(program: ShardedProgram) -> float:
    """Share of the tensors that are not replicated on all mesh dimensions."""
    placements = program.placements
    sharded = sum(any(p != REPLICATED for p in own) for own in placements)
    return round(sharded / len(placements), 3)
