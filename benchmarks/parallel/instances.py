"""Seeded random planning problems for the benchmarks of ``nostall.parallel``."""

from __future__ import annotations

import numpy as np

from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.plan import Workload
from nostall.parallel.profile.layers import Layer, Profile, chain

LAYOUTS = ("one server", "two servers", "uneven links")


def random_chain(layers: int, rng: np.random.Generator) -> Profile:
    """A chain of layers with random costs, all log-uniform.

    Forward passes take 1 to 20 ms, outputs have 1 to 60 MB, parameters have 1 to 200 MB.
    """

    def log_uniform(low: float, high: float) -> float:
        return float(np.exp(rng.uniform(np.log(low), np.log(high))))

    chain_layers = []
    for i in range(layers):
        forward = log_uniform(1e-3, 20e-3)
        chain_layers.append(
            Layer(
                f"layer {i}",
                forward,
                forward * float(rng.uniform(1.5, 2.5)),
                log_uniform(1e6, 200e6),
                stored_bytes=log_uniform(1e6, 60e6),
            )
        )
    boundary_bytes = [log_uniform(1e6, 60e6) for _ in range(layers - 1)]
    return chain(f"random {layers}", chain_layers, boundary_bytes, 1)


def random_cluster(gpus: int, layout: str, rng: np.random.Generator) -> Cluster:
    """A cluster with one of :data:`LAYOUTS`: one server, two servers, or links that all differ."""
    slow, fast = float(rng.uniform(0.5, 5)), float(rng.uniform(5, 50))
    duplex = str(rng.choice(["full", "half"]))
    header = f'name = "{layout}"\nduplex = "{duplex}"\n'
    if layout == "uneven links":
        pairs = [(a, b) for a in range(gpus) for b in range(a)]
        links = "".join(
            f"[[links]]\ngpus = [{a}, {b}]\nlatency_us = 10\nbandwidth_gbytes = "
            f"{np.exp(rng.uniform(np.log(0.5), np.log(50))):.3f}\n"
            for a, b in pairs
        )
        return parse_cluster(f"{header}[[servers]]\ngpus = {gpus}\nmemory_gib = 32\n{links}")
    servers = 2 if layout == "two servers" and gpus > 1 else 1
    sizes = [gpus - gpus // servers * (servers - 1), *[gpus // servers] * (servers - 1)]
    server_tables = "".join(
        f"[[servers]]\ngpus = {size}\nmemory_gib = 32\n"
        f"link = {{ bandwidth_gbytes = {fast:.3f}, latency_us = 5 }}\n"
        for size in sizes
    )
    network = f"[network]\nbandwidth_gbytes = {slow:.3f}\nlatency_us = 20\n"
    return parse_cluster(header + server_tables + network)


def small_problem(seed: int) -> tuple[Workload, str]:
    """A problem of at most 8 layers, 4 GPUs and 8 micro-batches, and the layout of its cluster."""
    rng = np.random.default_rng(seed)
    layout = LAYOUTS[seed % len(LAYOUTS)]
    profile = random_chain(int(rng.integers(3, 9)), rng)
    cluster = random_cluster(int(rng.integers(2, 5)), layout, rng)
    return Workload(profile, cluster, int(rng.integers(2, 9)), fractions=True), layout


def uneven_problem(seed: int) -> Workload:
    """A problem of 16 to 32 layers, 8 GPUs with links that all differ, and 16 micro-batches."""
    rng = np.random.default_rng(seed)
    profile = random_chain(int(rng.integers(16, 33)), rng)
    return Workload(profile, random_cluster(8, "uneven links", rng), 16, fractions=True)
