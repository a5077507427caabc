"""One rank of ``benchmarks.sharding.gpu_plans``: measures, plans, then runs plans and peers.

All ranks make the same calls in the same order.  Rank 0 writes the records.
"""

from __future__ import annotations

import gc
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.sharding.clusters import one_server
from benchmarks.sharding.gpu_candidates import candidates, meshes
from benchmarks.sharding.gpu_models import MODELS, GpuModel, cross_entropy
from benchmarks.sharding.gpu_peers import peers
from benchmarks.sharding.gpu_results import Results, interval
from nostall.parallel.sharding.capture.operators import CapturedStep, capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, CollectiveCost, mesh_text
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.graph import replicated
from nostall.parallel.sharding.placements import REPLICATED
from nostall.parallel.sharding.planners.rules import RULES
from nostall.parallel.sharding.planners.sharding import (
    Options,
    ShardingPlan,
    plan_by_rule,
    priced_plan,
)
from nostall.parallel.sharding.program.devices import ProcessDevices, redistribute
from nostall.parallel.sharding.program.measure import (
    SIZES,
    measure_collectives,
    measure_contention,
    measure_launches,
    measure_rates,
)
from nostall.parallel.sharding.program.program import ShardedProgram

WARM_UPS = 3
STATE_FACTOR = 2.0
"""Parameters and gradients; the steps are without an optimiser."""
Mesh = tuple[int, ...]
Step = Callable[[], torch.Tensor]


@dataclass
class Session:
    """What all steps of a rank share."""

    options: dict[str, Any]
    device: torch.device
    results: Results
    until: float
    rates: DeviceRates
    steps: dict[tuple[str, Mesh], CapturedStep] = field(default_factory=dict)
    devices: dict[Mesh, ProcessDevices] = field(default_factory=dict)
    costs: dict[Mesh, dict[Any, CollectiveCost]] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """Whether the time limit of rank 0 is reached; the same on all ranks."""
        flag = torch.tensor(float(monotonic() > self.until), device=self.device)
        dist.broadcast(flag, 0)
        return bool(flag)


def main(out: Path) -> None:
    options = json.loads(os.environ["NOSTALL_OPTIONS"])
    until = monotonic() + options["seconds"]
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", rank) if options["device"] == "cuda" else torch.device("cpu")
    extra: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        extra = {"device_id": device}
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // options["gpus"]))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=240), **extra)
    results = Results.load(out, options["tiny"])
    session = Session(options, device, results, until, measure_rates("measured", device))
    _say(session, "process group")
    for mesh in meshes(options["gpus"]):
        session.devices[mesh] = ProcessDevices(mesh)
        sizes = SIZES[:3] if options["tiny"] else SIZES
        session.costs[mesh] = measure_collectives(session.devices[mesh], device, sizes)
    contention = measure_contention(session.devices[options["gpus"],], device)
    session.rates = replace(session.rates, contention=contention)
    _measure_processor(session)
    results.begin(_about(session), _measured(session))
    _say(session, "links measured")
    planned = _plan_all(session)
    _say(session, "plans made")
    for name in MODELS:
        _run_model(session, name, {mesh: planned[name, mesh] for mesh in session.devices})
    dist.barrier()
    dist.destroy_process_group()


def _measure_processor(session: Session) -> None:
    """Time in which the processor launches an operator and starts a collective of a program.

    The step of the first model is launched without collectives and data parallel; these plans'
    times on the GPU are not read.
    """
    mesh = (session.options["gpus"],)
    model = _build(session, next(iter(MODELS)))
    step = capture(model.job, model.job.samples, mesh)
    cluster = one_server(session.options["gpus"], 300.0)
    prices = Prices(step.graph, ClusterMesh(cluster, mesh, session.costs[mesh]), session.rates)
    data_parallel = plan_by_rule(prices, RULES["data-parallel"], Options())
    assert data_parallel is not None
    buffers, leaves = dict(model.module.named_buffers()), [model.inputs, model.targets]
    seconds = []
    for assignment in (replicated(step.graph), data_parallel.assignment):
        program = ShardedProgram(step, assignment, session.devices[mesh], session.device)
        with torch.no_grad():
            local = program.shard_parameters(dict(model.module.named_parameters()))
            run = partial(program.run, local, buffers, leaves)
            seconds.append(measure_launches(run, session.device))
    operators = len(step.graph.of_kind("operation"))
    collectives = len(data_parallel.cost.collectives)
    session.rates = replace(
        session.rates,
        launch_s=seconds[0] / operators,
        send_s=max(0.0, seconds[1] - seconds[0]) / max(1, collectives),
    )


def _say(session: Session, text: str) -> None:
    if dist.get_rank() == 0:
        left = session.until - monotonic()
        print(f"{text}: {session.options['seconds'] - left:.0f} s so far", flush=True)


def _about(session: Session) -> dict[str, Any]:
    is_cuda = session.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpus": session.options["gpus"],
        "device": torch.cuda.get_device_name(session.device) if is_cuda else "cpu",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else "",
    }


def _measured(session: Session) -> dict[str, Any]:
    """Measured rates and costs of collectives, as JSON values."""
    return {
        "flops": dict(session.rates.flops),
        "memory_bytes_per_s": session.rates.memory,
        "launch_s": session.rates.launch_s,
        "send_s": session.rates.send_s,
        "contention": session.rates.contention,
        "collectives": [
            {
                "mesh": mesh_text(mesh),
                "mesh_dim": mesh_dim,
                "kind": kind,
                "latency_s": cost.latency_s,
                "s_per_byte": cost.s_per_byte,
            }
            for mesh, costs in session.costs.items()
            for (kind, mesh_dim), cost in costs.items()
        ],
    }


def _plan_all(session: Session) -> dict[tuple[str, Mesh], list[ShardingPlan]]:
    """Capture all steps on each rank; plan each of them on one rank, several at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    prices: dict[tuple[str, Mesh], Prices] = {}
    own: dict[tuple[str, Mesh], list[tuple[str, Any]]] = {}
    tasks = [(name, mesh) for name in MODELS for mesh in session.devices]
    for number, (name, mesh) in enumerate(tasks):
        with torch.device("meta"):
            model = MODELS[name](session.options["tiny"])
        step = capture(model.job, model.job.samples, mesh, name)
        session.steps[name, mesh] = step
        cluster = one_server(session.options["gpus"], 300.0)
        on_mesh = ClusterMesh(cluster, mesh, session.costs[mesh])
        prices[name, mesh] = Prices(step.graph, on_mesh, session.rates)
        if number % ranks == rank:
            plans = candidates(prices[name, mesh], session.options["planning_seconds"])
            own[name, mesh] = [(plan.name, plan) for plan in plans]
    everything: list[Any] = [None] * ranks
    sent = {key: [(n, p.assignment) for n, p in plans] for key, plans in own.items()}
    dist.all_gather_object(everything, sent)
    return {
        key: [
            priced_plan(name, prices[key], assignment, STATE_FACTOR)
            for part in everything
            for name, assignment in part.get(key, ())
        ]
        for key in tasks
    }


@dataclass
class Runner:
    """One plan or peer that is ready to run."""

    record: dict[str, Any]
    step: Step
    seconds: list[float] = field(default_factory=list)


def _run_model(session: Session, name: str, planned: Mapping[Mesh, list[ShardingPlan]]) -> None:
    """Run the plans of a model, then these and its peers in rounds; each round adds records."""
    reference = _build(session, name)
    expected = _reference(reference)
    runners: list[Runner] = []
    for mesh, plans in planned.items():
        for plan in plans:
            record = {"model": name, "mesh": mesh_text(mesh), "plan": plan.name}
            if not session.results.has(record):
                make = _plan_maker(session, reference, plan, expected)
                runners += _prepare(session, record, make)
    _run_round(session, runners)
    _say(session, f"{name}: {len(runners)} plans")
    for peer, parallelize in peers(session.options["gpus"]).items():
        record = {"model": name, "mesh": "", "plan": peer}
        if not session.results.has(record):
            runners += _prepare(session, record, _peer_maker(session, name, parallelize))
    for _ in range(session.options["rounds"] - 1):
        _run_round(session, runners)
    _say(session, f"{name}: {len(runners)} plans and peers")
    runners.clear()
    gc.collect()
    if session.device.type == "cuda":
        torch.cuda.empty_cache()


def _run_round(session: Session, runners: list[Runner]) -> None:
    """Time some steps of each plan; nothing happens if time is over."""
    for runner in runners:
        if not session.is_over:
            runner.seconds += _time(runner.step, session)
            session.results.put({**runner.record, **interval(runner.seconds)})
    session.results.write()


def _prepare(
    session: Session, record: dict[str, Any], make: Callable[[], tuple[Step, dict[str, Any]]]
) -> list[Runner]:
    """The runner after its warm-up steps; none if time is over or it fails, which is printed."""
    if session.is_over:
        return []
    try:
        step, more = make()
        for _ in range(WARM_UPS):
            step()
        _wait(session.device)
    except Exception as error:  # every rank makes the same calls, so that all of them fail
        session.results.put({**record, "error": f"{type(error).__name__}: {error}"[:300]})
        return []
    return [Runner({**record, **more}, step)]


def _build(session: Session, name: str) -> GpuModel:
    """The model with the same values on all ranks."""
    torch.manual_seed(0)
    with session.device:
        return MODELS[name](session.options["tiny"])


def _reference(model: GpuModel) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one process."""
    loss = cross_entropy(model.module(model.inputs), model.targets)
    loss.backward()
    gradients = {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}
    for parameter in model.module.parameters():
        parameter.grad = None
    return float(loss.detach()), gradients


def _plan_maker(
    session: Session,
    model: GpuModel,
    plan: ShardingPlan,
    expected: tuple[float, dict[str, torch.Tensor]] | None,
) -> Callable[[], tuple[Step, dict[str, Any]]]:
    mesh = plan.prices.graph.mesh

    def make() -> tuple[Step, dict[str, Any]]:
        devices, captured = session.devices[mesh], session.steps[plan.prices.graph.name, mesh]
        program = ShardedProgram(captured, plan.assignment, devices, session.device)
        with torch.no_grad():
            local = program.shard_parameters(dict(model.module.named_parameters()))
        buffers, leaves = dict(model.module.named_buffers()), [model.inputs, model.targets]

        def step() -> torch.Tensor:
            with torch.no_grad():
                return program.run(local, buffers, leaves).loss[0]

        more: dict[str, Any] = {
            "predicted_s": plan.times.step_s,
            "operators_s": plan.times.operators_s,
            "collectives_s": plan.times.collectives_s,
            "without_overlap_s": plan.cost.step_s,
            "collectives": plan.cost.counts(),
        }
        if expected is not None:
            with torch.no_grad():
                result = program.run(local, buffers, leaves)
            more |= _errors(program, result, expected)
        return step, more

    return make


def _errors(
    program: ShardedProgram, result: Any, expected: tuple[float, dict[str, torch.Tensor]]
) -> dict[str, float]:
    """Relative error of the loss, and largest relative error of a gradient's Euclidean norm."""
    loss, gradients = expected
    whole = (REPLICATED,) * len(program.devices.mesh)
    worst = 0.0
    for name, values in result.gradients.items():
        placements = program.parameter_placements(name)
        (got,) = redistribute(program.devices, values, placements, whole)
        difference = (got.float() - gradients[name].float()).norm()
        error = float(difference / gradients[name].float().norm().clamp_min(1e-12))
        worst = max(worst, error if math.isfinite(error) else math.inf)
    return {"loss_error": abs(float(result.loss[0]) / loss - 1), "gradient_error": worst}


def _peer_maker(
    session: Session, name: str, parallelize: Callable[[GpuModel, str], Step]
) -> Callable[[], tuple[Step, dict[str, Any]]]:
    def make() -> tuple[Step, dict[str, Any]]:
        return parallelize(_build(session, name), session.device.type), {}

    return make


def _time(step: Step, session: Session) -> list[float]:
    """Seconds of each of several steps that follow each other; those of the slowest rank."""
    count = session.options["steps"]
    step()
    dist.barrier()
    _wait(session.device)
    if session.device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        _wait(session.device)
        seconds = [a.elapsed_time(b) * 1e-3 for a, b in pairwise(marks)]
    else:
        seconds = []
        for _ in range(count):
            start = perf_counter()
            step()
            seconds.append(perf_counter() - start)
    slowest = torch.tensor(seconds, dtype=torch.float64, device=session.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return [float(value) for value in slowest]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
