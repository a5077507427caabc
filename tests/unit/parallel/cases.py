"""Small profiles, clusters and plans whose times can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.profile.layers import Layer, Profile, chain

FREE = 1e12
"""A link, in GB/s, that costs nothing."""


def profile(
    layers: int,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    boundary: float = 0.0,
    parameters: float = 0.0,
    stored: float | None = 1.0,
) -> Profile:
    """Equal layers, batch 1."""
    made = [Layer(f"l{i}", forward, backward, parameters, stored) for i in range(layers)]
    return chain("even", made, [boundary] * (layers - 1), 1)


def servers(
    count: int,
    gpus: int,
    *,
    inside: float = FREE,
    between: float = FREE,
    duplex: str = "full",
    memory: float = 16,
) -> Cluster:
    """Servers of equal GPUs; bandwidths in GB/s."""
    return parse_cluster(
        f'name = "test"\nduplex = "{duplex}"\n[[servers]]\ncount = {count}\ngpus = {gpus}\n'
        f"memory_gib = {memory}\nlink = {{ bandwidth_gbytes = {inside} }}\n"
        f"[network]\nbandwidth_gbytes = {between}\n"
    )


def straight(ends: Sequence[int], policy: Policy = "1f1b", **more: object) -> Plan:
    """One GPU a stage."""
    first = [0, *ends[:-1]]
    stages = tuple(Stage(a, b, (g,)) for g, (a, b) in enumerate(zip(first, ends, strict=True)))
    return Plan(stages, policy, **more)  # type: ignore[arg-type]


def pipeline(stages: int, micro_batches: int, **layer: float) -> Workload:
    """As many equal layers and free-linked GPUs as stages."""
    return Workload(profile(stages, **layer), servers(1, stages), micro_batches)
