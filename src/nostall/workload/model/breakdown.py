"""Modelled time of one training step: T = T_data + T_compute + T_memory + T_weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Job, Resource
from nostall.workload.model.traffic import traffic_by_medium

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
