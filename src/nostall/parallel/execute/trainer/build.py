"""Build of a trainer from a plan, in the process group of the user's program."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from nostall.core.errors import BadInput
from nostall.parallel.errors import BadModel, BadPlan
from nostall.parallel.execute.engines.executor import check_same_model
from nostall.parallel.execute.parts.any_plan import AnyPlan, load_any_plan
from nostall.parallel.execute.parts.computation import Computation, float_weights, in_types_of
from nostall.parallel.execute.parts.hybrid_part import HybridPart
from nostall.parallel.execute.parts.part import Part, PartOptions
from nostall.parallel.execute.parts.pipeline_part import PipelinePart, planned_model
from nostall.parallel.execute.parts.sharded_part import ShardedPart
from nostall.parallel.execute.preconditions import check_optimizer
from nostall.parallel.execute.reference import make_optimizer
from nostall.parallel.execute.run_config import Engine
from nostall.parallel.execute.trainer.named_state import NamedParameters
from nostall.parallel.execute.trainer.trainer import Trainer
from nostall.parallel.module.eager import SAMPLES, compare_with_eager
from nostall.parallel.module.job import Job, load_job
from nostall.parallel.module.loss_parts import Found, Watched
from nostall.parallel.module.model import Model
from nostall.parallel.plan import Plan, Workload
from nostall.parallel.sharding.engine_file import EngineFile
from nostall.parallel.sharding.hybrid.plan_file import HybridFile
from nostall.parallel.sharding.placements import is_sharded
from nostall.parallel.sharding.plan_file import PlanFile

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

JobOrTarget = Job | str
OptimizerFunction = Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]


def build(
    plan: str | Path | AnyPlan,
    job: JobOrTarget,
    optimizer: OptimizerFunction | None = None,
    device_mesh: DeviceMesh | None = None,
    *,
    precision: MixedPrecisionPolicy | None = None,
    engine: Engine = "auto",
    seed: int = 0,
    deadline: float | None = None,
) -> Trainer:
    """One rank's trainer of a plan; every process of the run calls this.

    ``plan`` is a plan file of any kind, or what its reader returned; ``job`` is as for ``nostall
    plan``, a ``Job`` or ``path.py:build``.  ``optimizer`` makes the optimiser of the rank's
    parameters; None takes the job's.  The process group is torch's default one, which torchrun's
    variables make if there is none; rank r is GPU r of the plan.  All ranks start from rank 0's
    weights.

    With ``precision``, the step computes in its ``param_dtype`` and the weights are float32.
    ``seed`` is that of random numbers in passes, ``deadline`` the longest wait for another rank in
    seconds.  Raises :class:`BadInput` with one line if the plan, the job, the optimiser and the
    processes do not fit together, or if the step would train otherwise than the module.
    """
    found = load_any_plan(Path(plan)) if isinstance(plan, str | Path) else plan
    device = _device(device_mesh, deadline)
    shape = found.mesh if isinstance(found, PlanFile) else None
    cluster = found[0].cluster if isinstance(found, tuple) else found.cluster
    _check_world(len(cluster), shape, device_mesh)
    job = load_job(job) if isinstance(job, str) else job
    if optimizer is not None:
        job = replace(job, optimizer=optimizer)
    _broadcast_weights(job.module, device)
    options = PartOptions(device, engine, deadline=deadline)
    part: Part
    watched: tuple[Watched, ...] = ()
    if isinstance(found, EngineFile):
        float_weights(job, precision)
        computation = Computation(job, job)
        # Imports FSDP and the tracer, which no other plan needs.
        from nostall.parallel.execute.parts.engine_part import EnginePart

        part = EnginePart(job, found, options, precision)
    else:
        computation = in_types_of(job, precision)
        part, (notes, watched) = _part(found, computation, options)
        for note in notes:
            part.note(note)
    if len(cluster) > 1:
        _check_distributed(found, part, job)
    meshes = [
        device_mesh if device_mesh is not None and device_mesh.shape == own.shape
        else DeviceMesh(device.type, own.ranks) for own in part.meshes
    ]  # fmt: skip
    named = NamedParameters(part, meshes)
    made = _optimizer(job, part, device)
    return Trainer(computation, part, named, made, device, seed, watched)


def _device(mesh: DeviceMesh | None, deadline: float | None) -> torch.device:
    """The device of this process; starts the default process group if torchrun described it."""
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise BadInput(
                "there is no process group; start the program with torchrun --nproc-per-node N, or "
                "call torch.distributed.init_process_group before"
            )
        timeout = {} if deadline is None else {"timeout": timedelta(seconds=deadline)}
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **timeout)
    kind = mesh.device_type if mesh is not None else ""
    kind = kind or ("cuda" if "nccl" in dist.get_backend() else "cpu")
    if kind != "cuda":
        return torch.device(kind)
    local = int(os.environ.get("LOCAL_RANK", torch.cuda.current_device()))
    torch.cuda.set_device(local)
    return torch.device("cuda", local)


def _check_world(gpus: int, shape: tuple[int, ...] | None, mesh: DeviceMesh | None) -> None:
    """Raise :class:`BadPlan` unless the processes, and the mesh if given, are those of the plan."""
    if dist.get_world_size() != gpus:
        raise BadPlan(
            f"{dist.get_world_size()} processes run and the plan's cluster has {gpus} GPUs; start "
            f"{gpus} (torchrun --nproc-per-node {gpus}), or plan for {dist.get_world_size()}"
        )
    if mesh is None:
        return
    ranks = mesh.mesh.flatten().tolist()
    wanted = shape or tuple(mesh.shape)
    if ranks != list(range(gpus)) or tuple(mesh.shape) not in (wanted, (gpus,)):
        raise BadPlan(
            f"the device mesh has the shape {tuple(mesh.shape)} and ranks {ranks[:8]}; allowed are "
            f"{wanted} and ({gpus},) with ranks 0 to {gpus - 1} in order; leave device_mesh out"
        )


def _broadcast_weights(module: torch.nn.Module, device: torch.device) -> None:
    """Give all ranks the parameters and buffers of rank 0; the modules have to be equal else."""
    described = [(n, t.shape, t.dtype) for n, t in module.state_dict(keep_vars=True).items()]
    check_same_model(repr(described))
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            value = tensor.detach().to(device).contiguous()
            dist.broadcast(torch.view_as_real(value) if value.is_complex() else value, 0)
            tensor.copy_(value)


def _part(
    plan: PlanFile | HybridFile | tuple[Workload, Plan, str],
    computation: Computation,
    options: PartOptions,
) -> tuple[Part, Found]:
    if isinstance(plan, PlanFile):  # of the operators of a whole batch
        return ShardedPart(computation, plan, options), ((), ())
    job = computation.job
    if isinstance(plan, HybridFile):
        found = _compare(job, Model(job))
        return HybridPart(computation, plan, options), found
    workload, pipeline, _ = plan
    model = planned_model(computation, workload)
    found = _compare(job, model if computation.traced is job else Model(job))
    return PipelinePart(model, workload, pipeline, options), found


def _compare(job: Job, model: Model) -> Found:
    """Compare the traced layers' gradients with the module's, on rank 0 and a CPU.

    Raises :class:`BadModel` on all ranks if they differ.
    """
    verdict: list[Any] = ["", ((), ())]
    if dist.get_rank() == 0:
        try:
            verdict[1] = compare_with_eager(model, SAMPLES, torch.device("cpu"))
        except BadModel as error:
            verdict[0] = str(error)
    dist.broadcast_object_list(verdict, 0)
    if verdict[0]:
        raise BadModel(verdict[0])
    found: Found = verdict[1]
    return found


def _check_distributed(plan: AnyPlan, part: Part, job: Job) -> None:
    """Raise :class:`BadModel` for what several ranks would compute otherwise than one."""
    is_pipeline = isinstance(plan, tuple)
    if part.random_operators and not isinstance(plan, tuple | EngineFile):
        raise BadModel(
            f"the step draws random numbers ({', '.join(part.random_operators[:3])}), and shards "
            "would draw others than the whole tensor; set the dropout to 0, or use a pipeline plan"
        )
    has_shards = any(is_sharded(p) for own in part.placements.values() for p in own)
    is_replicated = isinstance(plan, PlanFile) and not has_shards
    if not is_replicated and not (isinstance(plan, EngineFile) and plan.engine == "ddp"):
        check_optimizer(job, is_sharded=not is_pipeline)


def _optimizer(job: Job, part: Part, device: torch.device) -> torch.optim.Optimizer:
    """The job's optimiser of what the rank trains, or of a placeholder if it trains nothing."""
    own = [p for name, p in part.parameters.items() if name in part.trained]
    if not own:
        own = [torch.nn.Parameter(torch.zeros(0, device=device))]
    optimizer = make_optimizer(job, own)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadModel(
            f"the optimizer function returned a {type(optimizer).__name__}; allowed is a "
            "torch.optim.Optimizer of the parameters that it is given"
        )
    known = {id(p) for p in own}
    if any(id(p) not in known for group in optimizer.param_groups for p in group["params"]):
        raise BadModel(
            "the optimizer function uses other parameters than those that it is given, which are "
            "the rank's own (a shard is another tensor than the module's); use these"
        )
    return optimizer
