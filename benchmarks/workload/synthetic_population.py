"""Modelled findings for a SYNTHETIC population, next to the paper's findings for a real one.

python -m benchmarks run workload.synthetic_population \\
    --out benchmarks/workload/results/synthetic_population.json

The real population is not public.  The generator of this one was written before its first run and
was not fitted afterwards.  Its distributions are not the three findings that are compared: they are
the class mix and the size quantile that readers of arXiv:1910.05930 report (partly unverified, see
docs/explanation/workload.md), and assumptions for everything else.  Agreement would be weak
evidence; disagreement means that these distributions do not determine the findings.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np

from benchmarks.harness.result_file import save
from nostall.workload import Architecture, Job, Population, load_hardware
from nostall.workload.jobs.record import Resource
from nostall.workload.model.population import project_job, sweep_rate

JOBS = 4000
SEEDS = range(5)
PAPER_FINDINGS = {
    "weight_share": 0.62,
    "ps_faster_on_allreduce_local": 0.60,
    "25_to_100_gigabit": 1.7,
}
"""From the abstract of arXiv:1910.05930."""

ARCHITECTURE_SHARES = {
    Architecture.SINGLE: 0.59,
    Architecture.MULTI_GPU: 0.12,
    Architecture.PS_WORKER: 0.29,
}
"""29 % PS/Worker (readers' notes), 59 % 1w1g (recollection), the rest 1wng."""

SIZE_MEDIAN, SIZE_SIGMA, MAX_SIZE = 300e6, 2.74, 300e9
"""Bytes of a model, log-normal: 90 % below 10 GB, at most 300 GB (recollection); the median is an
assumption."""


def draw_population(seed: int) -> Population:
    """Independently drawn jobs; each number without a comment is an assumption."""
    rng = np.random.default_rng(seed)
    hardware = load_hardware("pai-2018")
    architectures = rng.choice(
        len(ARCHITECTURE_SHARES), size=JOBS, p=list(ARCHITECTURE_SHARES.values())
    )
    jobs = []
    for number, architecture_index in enumerate(architectures):
        architecture = list(ARCHITECTURE_SHARES)[architecture_index]
        gpu_seconds = float(np.exp(rng.uniform(np.log(0.02), np.log(2.0))))
        memory_share = float(rng.beta(4.4, 2.6))  # mean 22 / (13 + 22) (recollection)
        data_seconds = gpu_seconds * float(rng.lognormal(np.log(0.05), 1.0))
        size = min(SIZE_MEDIAN * float(rng.lognormal(0.0, SIZE_SIGMA)), MAX_SIZE)
        # Large models have large embeddings, because a GPU of 2018 had 16 GB.
        dense = min(size * float(rng.uniform(0.05, 1.0)), 2e9)
        jobs.append(
            Job(
                name=f"synthetic {seed}/{number}",
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


def findings(population: Population) -> dict[str, float]:
    """The three findings of the paper, and further figures of the population."""
    hardware = population.hardware
    ps_workers = population.select(Architecture.PS_WORKER)
    assert ps_workers is not None
    ported = [project_job(j, Architecture.ALLREDUCE_LOCAL, hardware) for j in ps_workers.jobs]
    is_faster = [not p.obstacle and p.throughput_speedup > 1 for p in ported]
    fourfold = sweep_rate(ps_workers.jobs, hardware, Resource.ETHERNET, [4])
    gpu_times = population.weights("gpu")
    ps_gpu_times = [
        gpu_time
        for gpu_time, job in zip(gpu_times, population.jobs, strict=True)
        if job.architecture is Architecture.PS_WORKER
    ]
    return {
        "weight_share": population.mean_share("weights", "gpu"),
        "weight_share_by_job": population.mean_share("weights", "job"),
        "ps_faster_on_allreduce_local": float(np.mean(is_faster)),
        "ps_faster_per_replica": float(np.mean([p.replica_speedup > 1 for p in ported])),
        "25_to_100_gigabit": fourfold.mean_speedups()[0],
        "perfect_overlap_gain": float(np.mean([s.total / s.overlapped for s in population.steps])),
        "ps_gpu_time": sum(ps_gpu_times) / sum(gpu_times),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    runs = [findings(draw_population(seed)) for seed in SEEDS]
    records = {
        key: {
            "modelled": round(float(np.mean([r[key] for r in runs])), 4),
            "spread_over_seeds": round(float(np.ptp([r[key] for r in runs])), 4),
            **({"paper": PAPER_FINDINGS[key]} if key in PAPER_FINDINGS else {}),
        }
        for key in runs[0]
    }
    for key, value in records.items():
        print(key, value)
    save(options.out, kind="modelled", population="synthetic", jobs=JOBS, records=records)
