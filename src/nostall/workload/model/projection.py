"""Projection of a job to another architecture, for example from PS/Worker to AllReduce."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nostall.core.errors import BadJob
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Architecture, Job
from nostall.workload.model.breakdown import StepBreakdown, model_step


@dataclass(frozen=True, slots=True)
class Projection:
    """A job before and after porting, with its modelled steps."""

    before: Job
    after: Job
    step_before: StepBreakdown
    step_after: StepBreakdown
    obstacle: str
    """Why the ported job cannot run; empty if it can.  The speed-ups ignore the obstacle."""

    @property
    def replica_speedup(self) -> float:
        """Step time of one replica before over after."""
        return self.step_before.total / self.step_after.total

    @property
    def throughput_speedup(self) -> float:
        """Throughput of all replicas after over before.

        Less than :attr:`replica_speedup` if porting reduces the number of replicas.
        """
        return self.replica_speedup * self.after.replicas / self.before.replicas


def project_job(job: Job, target: Architecture, hardware: Hardware) -> Projection:
    """Port ``job`` to ``target``; a single-server target caps the replicas at its GPUs.

    Raises :class:`~nostall.core.errors.BadJob` for 1w1g, which would only drop replicas.
    """
    if target is Architecture.SINGLE:
        raise BadJob(
            f"job {job.name!r} cannot be projected to 1w1g; use one of "
            f"{', '.join(a for a in Architecture if a is not Architecture.SINGLE)}"
        )
    gpus = hardware.gpus_per_server
    replicas = min(job.replicas, gpus) if target.is_single_server else job.replicas
    after = replace(job, architecture=target, replicas=replicas)
    return Projection(
        before=job,
        after=after,
        step_before=model_step(job, hardware),
        step_after=model_step(after, hardware),
        obstacle=_obstacle(after, hardware),
    )


def _obstacle(job: Job, hardware: Hardware) -> str:
    """The reason if the weights do not fit a GPU; activations and optimiser state are unknown."""
    size = weight_bytes_per_gpu(job)
    if size <= hardware.memory_size:
        return ""
    return (
        f"weights need {size / 1e9:.3g} GB on each GPU, {hardware.name} has "
        f"{hardware.memory_size / 1e9:.3g} GB"
    )


def weight_bytes_per_gpu(job: Job) -> float:
    """Bytes of weights that one GPU stores under the job's architecture."""
    match job.architecture:
        case Architecture.MULTI_GPU | Architecture.PS_WORKER:
            return job.dense_bytes + job.touched_bytes
        case Architecture.PEARL:
            return job.dense_bytes + job.embedding_bytes / job.replicas
        case _:
            return job.dense_bytes + job.embedding_bytes
