"""Small profiles, clusters and plans whose times can be computed by hand."""

from __future__ import annotations

from collections.abc import Sequence

from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.profile.layers import Layer, Profile, chain

FREE = 1e12
"""Bandwidth in GB/s of a link whose transfers take practically no time."""


def profile(
    layers: int,
    *,
    forward: float = 1.0,
    backward: float = 2.0,
    boundary: float = 0.0,
    parameters: float = 0.0,
    stored: float | None = 1.0,
) -> Profile:
    """A chain of equal layers with batch size 1; times in seconds, sizes in bytes."""
    chain_layers = [Layer(f"l{i}", forward, backward, parameters, stored) for i in range(layers)]
    return chain("even", chain_layers, [boundary] * (layers - 1), 1)


def servers(
    count: int,
    gpus: int,
    *,
    inside: float = FREE,
    between: float = FREE,
    duplex: str = "full",
    memory: float = 16,
) -> Cluster:
    """A cluster of equal servers; bandwidths in GB/s, memory in GiB per GPU."""
    return parse_cluster(
        f'name = "test"\nduplex = "{duplex}"\n[[servers]]\ncount = {count}\ngpus = {gpus}\n'
        f"memory_gib = {memory}\nlink = {{ bandwidth_gbytes = {inside} }}\n"
        f"[network]\nbandwidth_gbytes = {between}\n"
    )


def straight(ends: Sequence[int], policy: Policy = "1f1b", **fields: object) -> Plan:
    """A plan with one GPU per stage, stage i on GPU i; ``ends`` are the ends of the stages."""
    firsts = [0, *ends[:-1]]
    stages = tuple(Stage(a, b, (g,)) for g, (a, b) in enumerate(zip(firsts, ends, strict=True)))
    return Plan(stages, policy, **fields)  # type: ignore[arg-type]


def pipeline(stages: int, micro_batches: int, **layer: float) -> Workload:
    """A workload with one layer and one GPU per stage, and links that take no time."""
    return Workload(profile(stages, **layer), servers(1, stages), micro_batches)
