"""Modelled time of one training step: T = T_data + T_compute + T_memory + T_weights.

Weight and gradient bytes that one replica moves over each medium in one step.

As published (arXiv:1910.05930, as its readers report), the S_w of a job crosses every medium of its
architecture once.  If a job has no S_w, nostall uses closed forms of the sizes of the dense weights
and of the embedding rows that a batch reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Architecture, Job, Resource

MEDIA: Mapping[Architecture, tuple[Resource, ...]] = {
    Architecture.SINGLE: (),
    Architecture.MULTI_GPU: (Resource.PCIE,),
    Architecture.PS_WORKER: (Resource.ETHERNET, Resource.PCIE),
    Architecture.ALLREDUCE_LOCAL: (Resource.NVLINK,),
    Architecture.ALLREDUCE_CLUSTER: (Resource.ETHERNET, Resource.NVLINK),
    Architecture.PEARL: (Resource.NVLINK,),
}
"""Links that carry the weights and gradients of each architecture."""


def traffic_by_medium(job: Job, gpus_per_server: int) -> dict[Resource, float]:
    """Bytes per medium: ``job.weight_traffic`` on each if the job has it, else closed forms.

    A single replica exchanges nothing, except with parameter servers.
    """
    media = MEDIA[job.architecture]
    if job.weight_traffic is not None:
        exchanges = job.replicas > 1 or job.architecture is Architecture.PS_WORKER
        return dict.fromkeys(media, job.weight_traffic if exchanges else 0.0)
    traffic = _closed_form(job, gpus_per_server)
    return {medium: traffic.get(medium, 0.0) for medium in media}


def _closed_form(job: Job, gpus_per_server: int) -> dict[Resource, float]:
    n, dense, touched = job.replicas, job.dense_bytes, job.touched_bytes
    match job.architecture:
        case Architecture.SINGLE:
            return {}
        case Architecture.MULTI_GPU:
            both_ways = 2 * (dense + touched) if n > 1 else 0.0
            return {Resource.PCIE: both_ways}
        case Architecture.PS_WORKER:
            # A worker pushes gradients and pulls weights.
            both_ways = 2 * (dense + touched)
            return {Resource.ETHERNET: both_ways, Resource.PCIE: both_ways}
        case Architecture.ALLREDUCE_LOCAL:
            return {
                Resource.NVLINK: ring_allreduce_bytes(n, dense) + ring_allgather_bytes(n, touched)
            }
        case Architecture.PEARL:
            # A replica fetches the rows that other GPUs store and sends their gradients back.
            exchanged = 2 * (n - 1) / n * touched
            return {Resource.NVLINK: ring_allreduce_bytes(n, dense) + exchanged}
        case Architecture.ALLREDUCE_CLUSTER:
            return _hierarchical_allreduce(n, dense, touched, gpus_per_server)


def _hierarchical_allreduce(
    n: int, dense: float, touched: float, gpus_per_server: int
) -> dict[Resource, float]:
    """AllReduce inside each server and between servers; Ethernet bytes are those of a server."""
    local = min(n, gpus_per_server)
    servers = -(-n // local)
    return {
        Resource.NVLINK: ring_allreduce_bytes(local, dense) + ring_allgather_bytes(n, touched),
        Resource.ETHERNET: ring_allreduce_bytes(servers, dense)
        + ring_allgather_bytes(servers, local * touched),
    }


def ring_allreduce_bytes(n: int, size: float) -> float:
    """Bytes that each of ``n`` ranks sends in a ring AllReduce of ``size`` bytes."""
    return 2 * (n - 1) / n * size


def ring_allgather_bytes(n: int, size: float) -> float:
    """Bytes that each of ``n`` ranks receives if each contributes ``size`` bytes."""
    return (n - 1) * size


STEP_PARTS = ("data", "compute", "memory", "weights")
"""Parts of a modelled step, in the order in which plots show them."""


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """Modelled seconds of one step of one replica."""

    data: float
    """Copying the input to the GPU."""
    compute: float
    """Compute-bound operators."""
    memory: float
    """Memory-bound operators."""
    media: Mapping[Resource, float]
    """Weight and gradient traffic, by the medium that carries it."""

    @property
    def weights(self) -> float:
        """Weight and gradient traffic, summed over the media."""
        return sum(self.media.values())

    @property
    def total(self) -> float:
        """Step time without overlap, as published."""
        return self.data + self.compute + self.memory + self.weights

    @property
    def overlapped(self) -> float:
        """Step time if input, GPU work and weight traffic overlap perfectly: a lower bound.

        Compute and memory access are still added, because both occupy the same GPU.
        """
        return max(self.data, self.compute + self.memory, self.weights)

    def part(self, name: str) -> float:
        """Seconds of one of :data:`STEP_PARTS`."""
        seconds: float = getattr(self, name)
        return seconds

    def share(self, name: str) -> float:
        """Share of one of :data:`STEP_PARTS` in the step time without overlap."""
        return self.part(name) / self.total

    def resource_seconds(self, resource: Resource) -> float:
        """Seconds of all parts that use a resource."""
        seconds = {
            Resource.COMPUTE: self.compute,
            Resource.MEMORY: self.memory,
            Resource.PCIE: self.data,
        }
        return seconds.get(resource, 0.0) + self.media.get(resource, 0.0)


def model_step(job: Job, hardware: Hardware) -> StepBreakdown:
    """Model one step of one replica (arXiv:1910.05930, analytical framework).

    The replicas in one server share its PCIe links for their input.  An extension of nostall: if
    the job lists its operators and the hardware has fitted operator times, each operator is
    modelled.  Raises :class:`~nostall.core.errors.BadHardware` if the job needs a link or a
    precision that the hardware lacks.
    """
    per_server = min(job.replicas, hardware.gpus_per_server) if job.architecture.is_colocated else 1
    replicas_per_link = -(-per_server // hardware.pcie_links)
    traffic = traffic_by_medium(job, hardware.gpus_per_server)
    compute, memory = _gpu_seconds(job, hardware)
    return StepBreakdown(
        data=hardware.seconds(Resource.PCIE, job.input_bytes * replicas_per_link),
        compute=compute,
        memory=memory,
        media={medium: hardware.seconds(medium, size) for medium, size in traffic.items()},
    )


def _gpu_seconds(job: Job, hardware: Hardware) -> tuple[float, float]:
    """Seconds of the compute-bound and of the memory-bound operators."""
    if not (job.operators and hardware.operators):
        compute = hardware.seconds(Resource.COMPUTE, job.flops, job.precision)
        return compute, hardware.seconds(Resource.MEMORY, job.memory_bytes)
    compute = memory = 0.0
    for operator in job.operators:
        seconds = hardware.operator_seconds(operator, job.precision)
        if operator.kind.is_compute_bound:
            compute += seconds
        else:
            memory += seconds
    return compute, memory
