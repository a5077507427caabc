"""What the framework says of a SYNTHETIC population, next to what the paper says of a real one.

python -m benchmarks run workload.synthetic_population --out benchmarks/workload/results/synthetic_population.json

The real population is not public.  This one is drawn from a generator that was written down before
it was run once, from other marginals than the three that are compared: the class mix and the size
quantile that readers of arXiv:1910.05930 report (partly unverified, see docs/workload.md), and
assumptions where nothing is known.  Nothing was fitted afterwards: agreement would be weak
evidence, disagreement says that these marginals do not determine the findings.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.harness.result_file import save
from nostall.workload import Architecture, Job, Population, load_hardware
from nostall.workload.jobs.record import Resource
from nostall.workload.model.projection import project
from nostall.workload.model.sweep import sweep

JOBS = 4000
SEEDS = range(5)
PAPER = {"weight_share": 0.62, "ps_faster_on_allreduce_local": 0.60, "25_to_100_gigabit": 1.7}
"""Abstract of arXiv:1910.05930."""

CLASSES = {Architecture.SINGLE: 0.59, Architecture.MULTI_GPU: 0.12, Architecture.PS_WORKER: 0.29}
"""29 % PS/Worker (readers' notes), 59 % 1w1g (recollection), the rest 1wng."""

SIZE_MEDIAN, SIZE_SIGMA, SIZE_MOST = 300e6, 2.74, 300e9
"""Model bytes, log-normal: 90 % below 10 GB, at most 300 GB (recollection); median assumed."""


def population(seed: int) -> Population:
    """Jobs drawn independently; every line that is not commented is an assumption."""
    rng = np.random.default_rng(seed)
    hardware = load_hardware("pai-2018")
    kinds = rng.choice(len(CLASSES), size=JOBS, p=list(CLASSES.values()))
    jobs = []
    for at, kind in enumerate(kinds):
        architecture = list(CLASSES)[kind]
        gpu_seconds = float(np.exp(rng.uniform(np.log(0.02), np.log(2.0))))
        memory_share = float(rng.beta(4.4, 2.6))  # mean 22 / (13 + 22) (recollection)
        data_seconds = gpu_seconds * float(rng.lognormal(np.log(0.05), 1.0))
        size = min(SIZE_MEDIAN * float(rng.lognormal(0.0, SIZE_SIGMA)), SIZE_MOST)
        # Large models are large by their embeddings: a GPU of that time holds 16 GB.
        dense = min(size * float(rng.uniform(0.05, 1.0)), 2e9)
        jobs.append(
            Job(
                name=f"synthetic {seed}/{at}",
                architecture=architecture,
                replicas=_replicas(architecture, rng),
                flops=gpu_seconds * (1 - memory_share) * 0.7 * hardware.flops["fp32"],
                memory_bytes=gpu_seconds * memory_share * 0.7 * hardware.memory,
                input_bytes=data_seconds * 0.7 * hardware.pcie,
                dense_bytes=dense,
                embedding_bytes=size - dense,
                touched_bytes=min(size - dense, float(rng.lognormal(np.log(10e6), 1.5))),
            )
        )
    return Population(tuple(jobs), hardware)


def _replicas(architecture: Architecture, rng: np.random.Generator) -> int:
    match architecture:
        case Architecture.SINGLE:
            return 1
        case Architecture.MULTI_GPU:
            return int(rng.choice([2, 4, 8]))
        case _:
            return int(np.clip(round(float(rng.lognormal(np.log(8), 1.2))), 2, 512))


def answers(some: Population) -> dict[str, float]:
    """The three findings, and the class's share of GPU time."""
    workers = some.select(Architecture.PS_WORKER)
    assert workers is not None
    ported = [project(j, Architecture.ALLREDUCE_LOCAL, some.hardware) for j in workers.jobs]
    faster = [not p.obstacle and p.throughput > 1 for p in ported]
    fourfold = sweep(workers.jobs, some.hardware, Resource.ETHERNET, [4 * some.hardware.ethernet])
    gpu = some.weights("gpu")
    own = [
        w for w, j in zip(gpu, some.jobs, strict=True) if j.architecture is Architecture.PS_WORKER
    ]
    return {
        "weight_share": some.share("weights", "gpu"),
        "weight_share_by_job": some.share("weights", "job"),
        "ps_faster_on_allreduce_local": float(np.mean(faster)),
        "ps_faster_per_replica": float(np.mean([p.per_replica > 1 for p in ported])),
        "25_to_100_gigabit": fourfold.mean()[0],
        "perfect_overlap_gain": float(np.mean([s.total / s.overlapped for s in some.steps])),
        "ps_gpu_time": sum(own) / sum(gpu),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    runs = [answers(population(seed)) for seed in SEEDS]
    found = {
        key: {
            "modelled": round(float(np.mean([r[key] for r in runs])), 4),
            "spread_over_seeds": round(float(np.ptp([r[key] for r in runs])), 4),
            **({"paper": PAPER[key]} if key in PAPER else {}),
        }
        for key in runs[0]
    }
    for key, value in found.items():
        print(key, value)
    save(options.out, kind="modelled", population="synthetic", jobs=JOBS, records=found)
