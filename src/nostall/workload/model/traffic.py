"""Weight and gradient bytes that one replica moves over each medium in one step.

As published (arXiv:1910.05930, as its readers report), the S_w of a job crosses every medium of its
architecture once.  If a job has no S_w, nostall uses closed forms of the sizes of the dense weights
and of the embedding rows that a batch reads.
"""

from __future__ import annotations

from collections.abc import Mapping

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
