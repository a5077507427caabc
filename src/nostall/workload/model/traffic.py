"""Bytes of weights and gradients that one replica moves over each medium in one step.

As published (arXiv:1910.05930, its framework as readers report it): the job's S_w goes once over
every medium of its architecture.  Ours: closed forms from the sizes of the dense weights and of the
embedding rows that a batch touches.
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
"""What the weights of each architecture travel over."""


def traffic(job: Job, gpus_per_server: int) -> dict[Resource, float]:
    """Bytes per medium; ``job.weight_traffic`` on each of them where the job gives it.

    A replica alone exchanges nothing, except with parameter servers.
    """
    media = MEDIA[job.architecture]
    if job.weight_traffic is not None:
        alone = job.replicas == 1 and job.architecture is not Architecture.PS_WORKER
        return dict.fromkeys(media, 0.0 if alone else job.weight_traffic)
    found = _closed_form(job, gpus_per_server)
    return {medium: found.get(medium, 0.0) for medium in media}


def _closed_form(job: Job, gpus_per_server: int) -> dict[Resource, float]:
    n, dense, touched = job.replicas, job.dense_bytes, job.touched_bytes
    match job.architecture:
        case Architecture.SINGLE:
            return {}
        case Architecture.MULTI_GPU:
            both_ways = 2 * (dense + touched) if n > 1 else 0.0
            return {Resource.PCIE: both_ways}
        case Architecture.PS_WORKER:
            # Gradients are pushed, then weights are pulled.
            both_ways = 2 * (dense + touched)
            return {Resource.ETHERNET: both_ways, Resource.PCIE: both_ways}
        case Architecture.ALLREDUCE_LOCAL:
            return {Resource.NVLINK: ring_allreduce(n, dense) + ring_allgather(n, touched)}
        case Architecture.PEARL:
            # Each replica fetches the rows that other GPUs hold and sends their gradients back.
            exchanged = 2 * (n - 1) / n * touched
            return {Resource.NVLINK: ring_allreduce(n, dense) + exchanged}
        case Architecture.ALLREDUCE_CLUSTER:
            return _hierarchical(n, dense, touched, gpus_per_server)


def _hierarchical(
    n: int, dense: float, touched: float, gpus_per_server: int
) -> dict[Resource, float]:
    """Reduce inside each server, between servers, and back; Ethernet bytes are a server's."""
    local = min(n, gpus_per_server)
    servers = -(-n // local)
    return {
        Resource.NVLINK: ring_allreduce(local, dense) + ring_allgather(n, touched),
        Resource.ETHERNET: ring_allreduce(servers, dense)
        + ring_allgather(servers, local * touched),
    }


def ring_allreduce(n: int, size: float) -> float:
    """Bytes each of ``n`` members sends in a ring AllReduce of ``size`` bytes: 2 (n - 1) / n x."""
    return 2 * (n - 1) / n * size


def ring_allgather(n: int, size: float) -> float:
    """Bytes each of ``n`` members receives when each contributes ``size`` bytes: (n - 1) x."""
    return (n - 1) * size
