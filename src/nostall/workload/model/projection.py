"""What another architecture would change: PS/Worker to AllReduce, AllReduce to PEARL, and so on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nostall.core.errors import BadJob
from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Architecture, Job
from nostall.workload.model.breakdown import Breakdown, step


@dataclass(frozen=True, slots=True)
class Projection:
    """A job as it is and as it would be.

    ``per_replica``: how much faster one replica's step gets.  ``throughput``: how much more all
    replicas together process; lower where a server holds fewer replicas than the job had.
    ``obstacle`` says why the job cannot run so (empty: it can); the times then say what it would
    bring if it could.
    """

    before: Job
    after: Job
    step_before: Breakdown
    step_after: Breakdown
    obstacle: str

    @property
    def per_replica(self) -> float:
        return self.step_before.total / self.step_after.total

    @property
    def throughput(self) -> float:
        return self.per_replica * self.after.replicas / self.before.replicas


def project(job: Job, target: Architecture, hardware: Hardware) -> Projection:
    """Port ``job`` to ``target``; a target of one server caps the replicas at its GPUs.

    Raises :class:`~nostall.core.errors.BadJob` for 1w1g, which would drop replicas for nothing.
    """
    if target is Architecture.SINGLE:
        raise BadJob(
            f"job {job.name!r} cannot be projected to 1w1g; choose one of "
            f"{', '.join(a for a in Architecture if a is not Architecture.SINGLE)}"
        )
    replicas = min(job.replicas, hardware.gpus_per_server) if target.one_server else job.replicas
    after = replace(job, architecture=target, replicas=replicas)
    return Projection(
        before=job,
        after=after,
        step_before=step(job, hardware),
        step_after=step(after, hardware),
        obstacle=_obstacle(after, hardware),
    )


def _obstacle(job: Job, hardware: Hardware) -> str:
    """Why the weights do not fit a GPU; activations and optimiser state beyond them are unknown."""
    held = held_bytes(job)
    if held <= hardware.memory_size:
        return ""
    return (
        f"weights need {held / 1e9:.3g} GB on each GPU, {hardware.name} has "
        f"{hardware.memory_size / 1e9:.3g} GB"
    )


def held_bytes(job: Job) -> float:
    """Bytes of weights that one GPU holds under the job's architecture."""
    match job.architecture:
        case Architecture.MULTI_GPU | Architecture.PS_WORKER:
            return job.dense_bytes + job.touched_bytes
        case Architecture.PEARL:
            return job.dense_bytes + job.embedding_bytes / job.replicas
        case _:
            return job.dense_bytes + job.embedding_bytes
