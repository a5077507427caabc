"""Where the time of one step goes: T = T_data + T_compute + T_memory + T_weight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nostall.workload.hardware.description import Hardware
from nostall.workload.jobs.record import Job, Resource
from nostall.workload.model.traffic import traffic

PARTS = ("data", "compute", "memory", "weights")
"""Names of the parts, in the order in which they are drawn."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Modelled seconds of one step; ``media`` splits ``weights`` by what it travels over."""

    data: float
    compute: float
    memory: float
    media: Mapping[Resource, float]

    @property
    def weights(self) -> float:
        """Weight and gradient traffic, summed over the media."""
        return sum(self.media.values())

    @property
    def total(self) -> float:
        """The published sum: nothing overlaps."""
        return self.data + self.compute + self.memory + self.weights

    @property
    def overlapped(self) -> float:
        """The bound with perfect overlap: input, GPU and network work at the same time.

        Compute and memory stay a sum: both kinds of kernels occupy the one GPU.
        """
        return max(self.data, self.compute + self.memory, self.weights)

    def part(self, name: str) -> float:
        """Seconds of one of :data:`PARTS`."""
        found: float = getattr(self, name)
        return found

    def share(self, name: str) -> float:
        """A part over the total."""
        return self.part(name) / self.total

    def resource(self, resource: Resource) -> float:
        """Seconds spent on one resource, whatever for."""
        own = {
            Resource.COMPUTE: self.compute,
            Resource.MEMORY: self.memory,
            Resource.PCIE: self.data,
        }
        return own.get(resource, 0.0) + self.media.get(resource, 0.0)


def step(job: Job, hardware: Hardware) -> Breakdown:
    """The modelled step of one replica (arXiv:1910.05930, its analytical framework).

    Replicas in one server share its PCIe links for their input.  Ours: a job that lists its
    operators, on hardware with fitted ones, is timed operator by operator.  Raises
    :class:`~nostall.core.errors.BadHardware` where the job needs a link or a precision that the
    hardware lacks.
    """
    local = min(job.replicas, hardware.gpus_per_server) if job.architecture.colocated else 1
    sharing = -(-local // hardware.pcie_links)
    moved = traffic(job, hardware.gpus_per_server)
    compute, memory = _work(job, hardware)
    return Breakdown(
        data=hardware.seconds(Resource.PCIE, job.input_bytes * sharing),
        compute=compute,
        memory=memory,
        media={medium: hardware.seconds(medium, size) for medium, size in moved.items()},
    )


def _work(job: Job, hardware: Hardware) -> tuple[float, float]:
    """Seconds of compute-bound and of memory-bound operators."""
    if not (job.operators and hardware.operators):
        compute = hardware.seconds(Resource.COMPUTE, job.flops, job.precision)
        return compute, hardware.seconds(Resource.MEMORY, job.memory_bytes)
    compute = memory = 0.0
    for operator in job.operators:
        seconds = hardware.operator_seconds(operator, job.precision)
        if operator.kind.computes:
            compute += seconds
        else:
            memory += seconds
    return compute, memory
