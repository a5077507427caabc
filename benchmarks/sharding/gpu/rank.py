"""One rank of ``benchmarks.sharding.gpu.plans``: measures, plans, then runs plans and peers.

All ranks make the same calls in the same order.  Rank 0 writes the records.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.sharding.gpu.candidates import candidates
from benchmarks.sharding.gpu.measure import measure_launches, measure_rates
from benchmarks.sharding.gpu.models import MODELS, GpuModel, cross_entropy
from benchmarks.sharding.gpu.peers import peers
from benchmarks.sharding.gpu.results import Results, interval
from benchmarks.sharding.gpu.session import Mesh, Session, about, measure
from nostall.parallel.errors import CaptureFailed
from nostall.parallel.sharding.cost.device_mesh import mesh_text
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.timeline import timeline
from nostall.parallel.sharding.placements import REPLICATED
from nostall.parallel.sharding.planners.sharding import ShardingPlan, priced_plan
from nostall.parallel.sharding.program.cuda_graph import CudaGraph
from nostall.parallel.sharding.program.devices import redistribute
from nostall.parallel.sharding.program.program import ShardedProgram

WARM_UPS = 3
STATE_FACTOR = 2.0
"""Parameters and gradients; the steps are without an optimiser."""
Step = Callable[[], object]


def main(out: Path) -> None:
    session = start(out)
    planned = plan_all(session, list(MODELS))
    session.say("plans made")
    for name in MODELS:
        run_model(session, name, partial(plan_makers, session, planned))
    end()


def start(out: Path) -> Session:
    """Join the process group and measure; the results of this rank's session go to ``out``."""
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
    rates = measure_rates("measured", device)
    results = Results.load(out, options["tiny"])
    session = Session(options, device, results, until, rates, rates)
    measured = measure(session)
    results.begin(about(session), measured)
    return session


def end() -> None:
    """End this process when all ranks are done."""
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # to destroy a process group, NCCL waits for graphs that still exist


def plan_all(
    session: Session, models: Sequence[str], rules: Sequence[str] | None = None
) -> dict[tuple[str, Mesh], list[ShardingPlan]]:
    """Capture all steps on each rank; plan each of them on one rank, several at once."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    prices: dict[tuple[str, Mesh], Prices] = {}
    own: dict[tuple[str, Mesh], list[tuple[str, Any]]] = {}
    tasks = [(name, mesh) for name in models for mesh in session.devices]
    for number, (name, mesh) in enumerate(tasks):
        prices[name, mesh] = session.prices(name, mesh)
        if number % ranks == rank:
            seconds = session.options["planning_seconds"]
            plans = candidates(prices[name, mesh], seconds, rules)
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


Expected = tuple[float, dict[str, torch.Tensor]]
"""Loss and gradients of one process."""
Make = Callable[[], tuple[Step, dict[str, Any]]]
"""Builds a plan or peer; returns its step and what its record says about it."""
Makers = Iterable[tuple[dict[str, Any], Make]]
"""Records of plans, each with what builds it."""


def run_model(
    session: Session, name: str, plans: Callable[[str, GpuModel, Expected], Makers]
) -> None:
    """Run the plans of a model, then these and its peers in rounds; each round adds records."""
    reference = session.build(name)
    expected = _reference(reference)
    session.start_pool()
    runners: list[Runner] = []
    for record, make in plans(name, reference, expected):
        if not session.results.has(record):
            runners += _prepare(session, record, make)
    _run_round(session, runners)
    session.say(f"{name}: {len(runners)} plans")
    for peer, parallelize in peers(session.options["gpus"]).items():
        record = {"model": name, "mesh": "", "plan": peer}
        if not session.results.has(record):
            runners += _prepare(session, record, _peer_maker(session, name, parallelize))
    for _ in range(session.options["rounds"] - 1):
        _run_round(session, runners)
    session.say(f"{name}: {len(runners)} plans and peers")
    runners.clear()
    session.shards.clear()
    gc.collect()
    if session.device.type == "cuda":
        torch.cuda.empty_cache()


def plan_makers(
    session: Session,
    planned: Mapping[tuple[str, Mesh], list[ShardingPlan]],
    name: str,
    reference: GpuModel,
    expected: Expected,
) -> Makers:
    """The plans of a model on all meshes."""
    for mesh in session.devices:
        for plan in planned.get((name, mesh), []):
            record = {"model": name, "mesh": mesh_text(mesh), "plan": plan.name}
            yield record, _plan_maker(session, reference, plan, expected)


def _run_round(session: Session, runners: list[Runner]) -> None:
    """Time some steps of each plan; nothing happens if time is over."""
    for runner in runners:
        if not session.is_over:
            runner.seconds += _time(runner.step, session)
            session.results.put({**runner.record, **interval(runner.seconds)})
    session.results.write()


def _prepare(session: Session, record: dict[str, Any], make: Make) -> list[Runner]:
    """The runner after its warm-up steps; none if time is over or it fails, which is printed."""
    if session.is_over:
        return []
    try:
        step, more = make()
        for _ in range(WARM_UPS):
            step()
        session.wait()
    except Exception as error:  # every rank makes the same calls, so that all of them fail
        session.results.put({**record, "error": f"{type(error).__name__}: {error}"[:300]})
        return []
    return [Runner({**record, **more}, step)]


def _reference(model: GpuModel) -> Expected:
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
    expected: Expected,
) -> Make:
    mesh = plan.prices.graph.mesh

    def make() -> tuple[Step, dict[str, Any]]:
        name = plan.prices.graph.name
        program = ShardedProgram(
            session.captured(name, mesh), plan.assignment, session.devices[mesh], session.device
        )
        buffers, leaves = dict(model.module.named_buffers()), [model.inputs, model.targets]
        with torch.no_grad():
            local = session.local_parameters(name, mesh, program, model)
            run = partial(program.run, local, buffers, leaves)
            launch_s, alone_s = measure_launches(run, session.device)
            graph, not_captured = _capture(session, run)
            more = _errors(program, graph() if graph is not None else run(), expected)
        more |= {
            **_predictions(session, plan, in_graph=graph is not None),
            "launch_s": launch_s,
            "launched_alone_s": alone_s,
            "not_captured": not_captured,
        }
        if graph is not None:
            graph.release()
            return graph, more
        return torch.no_grad()(run), more

    return make


def _capture(session: Session, run: Callable[[], Any]) -> tuple[CudaGraph[Any] | None, str | None]:
    """The graph of a step, if the session uses graphs, or why it cannot be captured."""
    if not session.uses_graphs:
        return None, None
    try:
        return CudaGraph.capture(run, session.pool), None
    except CaptureFailed as error:
        return None, str(error)


def _predictions(session: Session, plan: ShardingPlan, *, in_graph: bool) -> dict[str, Any]:
    """Modelled times of a plan, also with the processor's, and its collectives."""
    eager = replace(plan.prices, rates=session.eager)
    launched_s = timeline(eager, plan.assignment).step_s
    return {
        "in_graph": in_graph,
        "predicted_s": plan.times.step_s if in_graph or not session.uses_graphs else launched_s,
        "predicted_launched_s": launched_s,
        "operators_s": plan.times.operators_s,
        "collectives_s": plan.times.collectives_s,
        "without_overlap_s": plan.cost.step_s,
        "collectives": plan.times.counts,
    }


def _errors(program: ShardedProgram, result: Any, expected: Expected) -> dict[str, float]:
    """Relative error of the loss, and largest relative error of a gradient's Euclidean norm."""
    loss, gradients = expected
    whole = (REPLICATED,) * len(program.devices.mesh)
    worst = 0.0
    for name, values in result.gradients.items():
        placements = program.parameter_placements(name)
        (got,) = redistribute(program.devices, values, placements, whole)
        worst = max(worst, gradient_error(got, gradients[name]))
    return {"loss_error": abs(float(result.loss[0]) / loss - 1), "gradient_error": worst}


def gradient_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of a gradient's Euclidean norm."""
    difference = (got.float() - expected.float()).norm()
    error = float(difference / expected.float().norm().clamp_min(1e-12))
    return error if math.isfinite(error) else math.inf


def _peer_maker(
    session: Session, name: str, parallelize: Callable[[GpuModel, str], Callable[[], object]]
) -> Make:
    def make() -> tuple[Step, dict[str, Any]]:
        return parallelize(session.build(name), session.device.type), {}

    return make


def _time(step: Step, session: Session) -> list[float]:
    """Seconds of each of several steps that follow each other; those of the slowest rank."""
    count = session.options["steps"]
    step()
    dist.barrier()
    session.wait()
    if session.device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        session.wait()
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
