"""What a rank of ``benchmarks.sharding.gpu.plans`` keeps: options, rates, links, captured steps."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.sharding.clusters import one_server
from benchmarks.sharding.gpu.candidates import meshes
from benchmarks.sharding.gpu.measure import (
    SIZES,
    measure_collectives,
    measure_contention,
    measure_kernel,
    measure_launches,
)
from benchmarks.sharding.gpu.models import MODELS, GpuModel
from benchmarks.sharding.gpu.results import Results
from nostall.parallel.errors import CaptureFailed
from nostall.parallel.sharding.capture.operators import CapturedStep, capture
from nostall.parallel.sharding.cost.device_mesh import ClusterMesh, CollectiveCost, mesh_text
from nostall.parallel.sharding.cost.prices import Prices
from nostall.parallel.sharding.cost.rates import DeviceRates
from nostall.parallel.sharding.graph import replicated
from nostall.parallel.sharding.placements import Placements
from nostall.parallel.sharding.planners.rules import RULES
from nostall.parallel.sharding.planners.sharding import Options, plan_by_rule
from nostall.parallel.sharding.program.cuda_graph import CudaGraph
from nostall.parallel.sharding.program.devices import ProcessDevices, Values
from nostall.parallel.sharding.program.program import ShardedProgram, StepResult

Mesh = tuple[int, ...]


@dataclass
class Session:
    """What all steps of a rank share."""

    options: dict[str, Any]
    device: torch.device
    results: Results
    until: float
    rates: DeviceRates
    """Rates of plans as they run: without the processor's time if a CUDA graph starts them."""
    eager: DeviceRates
    """Rates with the processor's time for each operator and collective."""
    uses_graphs: bool = False
    """Whether plans run as CUDA graphs."""
    pool: Any = None
    """Memory pool of a model's CUDA graphs, which run one at a time."""
    first_graph: CudaGraph[object] | None = None
    """A small graph that keeps the pool alive: a pool without graphs cannot be used again."""
    steps: dict[tuple[str, Mesh], CapturedStep] = field(default_factory=dict)
    devices: dict[Mesh, ProcessDevices] = field(default_factory=dict)
    costs: dict[Mesh, dict[Any, CollectiveCost]] = field(default_factory=dict)
    shards: dict[tuple[str, Mesh, str, Placements], Values] = field(default_factory=dict)
    """Local parameters of a model by mesh, name and placements: plans share them."""

    @property
    def is_over(self) -> bool:
        """Whether the time limit of rank 0 is reached; the same on all ranks."""
        flag = torch.tensor(float(monotonic() > self.until), device=self.device)
        dist.broadcast(flag, 0)
        return bool(flag)

    def say(self, text: str) -> None:
        """Print what is done and the seconds so far, on rank 0."""
        if dist.get_rank() == 0:
            left = self.until - monotonic()
            print(f"{text}: {self.options['seconds'] - left:.0f} s so far", flush=True)

    def captured(self, name: str, mesh: Mesh) -> CapturedStep:
        """The step of a model, captured once without values."""
        if (name, mesh) not in self.steps:
            with torch.device("meta"):
                job = MODELS[name](self.options["tiny"]).job
            self.steps[name, mesh] = capture(job, job.samples, mesh, name)
        return self.steps[name, mesh]

    def prices(self, name: str, mesh: Mesh) -> Prices:
        """Prices of a model's step by the measured links and rates."""
        cluster = ClusterMesh(one_server(self.options["gpus"], 300.0), mesh, self.costs[mesh])
        return Prices(self.captured(name, mesh).graph, cluster, self.rates)

    def start_pool(self) -> None:
        """Give the CUDA graphs that follow a memory pool of their own."""
        if self.uses_graphs:
            marker = torch.zeros(1, device=self.device)
            self.pool = torch.cuda.graph_pool_handle()
            self.first_graph = CudaGraph.capture(lambda: marker.add_(1.0), self.pool)

    def build(self, name: str) -> GpuModel:
        """The model with the same values on all ranks."""
        torch.manual_seed(0)
        with self.device:
            return MODELS[name](self.options["tiny"])

    def local_parameters(
        self, name: str, mesh: Mesh, program: ShardedProgram, model: GpuModel
    ) -> dict[str, Values]:
        """Local parameters of a plan."""
        found = program.shard_parameters(dict(model.module.named_parameters()))
        return {
            own: self.shards.setdefault((name, mesh, own, program.parameter_placements(own)), value)
            for own, value in found.items()
        }

    def wait(self) -> None:
        """Wait for the GPU."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(session: Session) -> dict[str, Any]:
    """Measure the links, the GPU and the processor; the result has them as JSON values."""
    device, is_cuda = session.device, session.device.type == "cuda"
    in_graph = is_cuda and bool(session.options["graphs"])
    session.say("process group")
    for mesh in meshes(session.options["gpus"]):
        session.devices[mesh] = ProcessDevices(mesh)
        sizes = SIZES[:3] if session.options["tiny"] else SIZES
        session.costs[mesh] = measure_collectives(
            session.devices[mesh], device, sizes, in_graph=in_graph
        )
    contention = measure_contention(session.devices[session.options["gpus"],], device)
    session.rates = replace(session.rates, contention=contention)
    session.say("links measured")
    _measure_processor(session, in_graph)
    if session.uses_graphs:
        kernel_s = measure_kernel(device)
        session.rates = replace(session.rates, kernel_s=kernel_s, launch_s=0.0, send_s=0.0)
    session.say("processor measured")
    return _as_json(session)


def _measure_processor(session: Session, in_graph: bool) -> None:
    """Time in which the processor launches an operator and starts a collective of a program.

    The step of the first model is launched without collectives and data parallel; these plans'
    times on the GPU are not read.  If the step can be a CUDA graph, so are those of all plans.
    """
    mesh, name = (session.options["gpus"],), next(iter(MODELS))
    model, step = session.build(name), session.captured(name, mesh)
    data_parallel = plan_by_rule(session.prices(name, mesh), RULES["data-parallel"], Options())
    assert data_parallel is not None
    buffers, leaves = dict(model.module.named_buffers()), [model.inputs, model.targets]
    seconds = []
    with torch.no_grad():
        for assignment in (replicated(step.graph), data_parallel.assignment):
            program = ShardedProgram(step, assignment, session.devices[mesh], session.device)
            local = session.local_parameters(name, mesh, program, model)

            def run(program: Any = program, local: Any = local) -> StepResult:
                return program.run(local, buffers, leaves)  # type: ignore[no-any-return]

            seconds.append(measure_launches(run, session.device)[0])
        if in_graph:
            try:
                CudaGraph.capture(run)
                session.uses_graphs = True
            except CaptureFailed as error:
                session.say(f"no graphs: {error}")
    session.shards.clear()
    operators = len(step.graph.of_kind("operation"))
    collectives = len(data_parallel.times.calls)
    session.eager = session.rates = replace(
        session.rates,
        launch_s=seconds[0] / operators,
        send_s=max(0.0, seconds[1] - seconds[0]) / max(1, collectives),
    )


def about(session: Session) -> dict[str, Any]:
    """Versions and devices."""
    is_cuda = session.device.type == "cuda"
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "gpus": session.options["gpus"],
        "device": torch.cuda.get_device_name(session.device) if is_cuda else "cpu",
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else "",
    }


def _as_json(session: Session) -> dict[str, Any]:
    return {
        "flops": dict(session.rates.flops),
        "memory_bytes_per_s": session.rates.memory,
        "uses_graphs": session.uses_graphs,
        "kernel_s": session.rates.kernel_s,
        "launch_s": session.eager.launch_s,
        "send_s": session.eager.send_s,
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
