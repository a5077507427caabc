"""Modelled against published memory of DAPPLE: micro-batches, recomputation, largest model.

Two numbers that the profiles lack are the same for all rows: BERT-48 stores 3.47 GB of activations
per sample (the examples of HPGO, the authors' planner) and a parameter has 16 bytes of state
(arXiv:2007.01045, table 7, Adam).  GB are 1e9 bytes; GPUs have 16 GiB.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parallel.dapple.profiles import load_published
from nostall.parallel.cluster import Cluster
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.profile import Profile
from nostall.parallel.profile.layers import chain
from nostall.parallel.simulate import simulate
from nostall.parallel.simulate.memory import held_bytes, memory, state_bytes, working_bytes

GB = 1e9
STORED_BYTES_PER_SAMPLE = 3.47 * GB
SAMPLES, LAYERS, HALF = 2, 48, 28
"""Samples per micro-batch, layers of BERT-48, and index of its second half (after four nodes)."""
TOLERANCE = 0.10

TABLE_5: tuple[tuple[Policy, bool, int, float | None, float | None], ...] = (
    ("gpipe", False, 2, 5.10, 12.1),
    ("gpipe", False, 3, None, None),
    ("gpipe", True, 2, 4.00, 9.9),
    ("gpipe", True, 5, 5.53, 13.2),
    ("gpipe", True, 8, None, None),
    ("pa", False, 2, 5.10, 10.6),
    ("pa", False, 8, 7.60, 10.6),
    ("pa", False, 16, 8.18, 10.6),
    ("pa", True, 2, 4.24, 8.5),
    ("pa", True, 8, 6.23, 8.5),
    ("pa", True, 16, 6.77, 8.5),
)
"""Order, recomputation, micro-batches, samples/s and GB; None: out of memory in the paper."""
TABLE_7 = {1: 48, 2: 106, 4: 215, 8: 428}
"""Layers of the largest BERT that trains with recomputation, by number of GPUs."""


def bert(folder: Path, layers: int = LAYERS) -> Profile:
    """The profile of BERT-48 with another number of its equal layers, with stored activations."""
    profile = load_published(folder / "bert-48-pbs-2.txt")
    cut_bytes = profile.tensors[HALF].bytes
    stored_bytes = STORED_BYTES_PER_SAMPLE * SAMPLES / LAYERS
    layer = replace(profile.layers[HALF], stored_bytes=stored_bytes)
    before = [replace(x, stored_bytes=0.0) for x in profile.layers[:4]]
    after = [replace(x, stored_bytes=0.0) for x in profile.layers[4 + LAYERS :]]
    all_layers = [*before, *[layer] * layers, *after]
    return chain(f"BERT-{layers}", all_layers, [cut_bytes] * (len(all_layers) - 1), SAMPLES)


def table_5(folder: Path, cluster: Cluster) -> list[dict[str, Any]]:
    """BERT-48 in two stages on configuration B; memory is the mean of both GPUs."""
    records = []
    profile = bert(folder)
    stages = (Stage(0, HALF, (0,)), Stage(HALF, len(profile), (1,)))
    for policy, recompute, micro_batches, published_rate, published_gb in TABLE_5:
        work = Workload(profile, cluster, SAMPLES * micro_batches)
        plan = Plan(stages, policy, recompute=recompute)
        timeline = simulate(work, plan)
        needs = memory(work, plan, timeline)
        mean = sum(needs.peak) / len(needs.peak) / GB
        rate = work.global_batch / timeline.iteration_s
        records.append(
            {
                "order": policy,
                "recompute": recompute,
                "micro_batches": micro_batches,
                "modelled_gb": mean,
                "modelled_fits": bool(needs.fits),
                "published_gb": published_gb,
                "memory_matches": not needs.fits
                if published_gb is None
                else _is_near(mean, published_gb),
                "modelled_samples_per_s": rate,
                "published_samples_per_s": published_rate,
                "speed_matches": None if published_rate is None else _is_near(rate, published_rate),
            }
        )
    return records


def table_7(folder: Path, cluster: Cluster) -> list[dict[str, Any]]:
    """The largest BERT on 1, 2, 4 and 8 GPUs with recomputation; stages are filled in order."""
    records = []
    for gpus, published_layers in TABLE_7.items():
        max_layers = _max_layers(bert(folder, 2 * published_layers), cluster, gpus)
        records.append(
            {
                "gpus": gpus,
                "modelled_layers": max_layers,
                "published_layers": published_layers,
                "matches": _is_near(max_layers, published_layers),
            }
        )
    return records


def _max_layers(profile: Profile, cluster: Cluster, gpus: int) -> int:
    """Layers that fit if each GPU takes as many as possible.

    The order is PA: stage i of S holds S - i micro-batches.
    """
    work = Workload(profile, cluster, SAMPLES * gpus)
    head = len(profile) - 4 - sum(layer.stored_bytes != 0 for layer in profile.layers)
    start, layers = 0, 0
    for gpu in range(gpus):
        tail = head if gpu == gpus - 1 else 0
        free_bytes = cluster.memory[gpu] - (
            state_bytes(work, Stage(len(profile) - tail, len(profile), (gpu,))) if tail else 0.0
        )
        end = start + 1
        while (
            end < len(profile)
            and _needed_bytes(work, Stage(start, end + 1, (gpu,)), gpus - gpu) <= free_bytes
        ):
            end += 1
        layers += end - start - (4 if gpu == 0 else 0)
        start = end
    return layers


def _needed_bytes(work: Workload, stage: Stage, held: int) -> float:
    return (
        state_bytes(work, stage)
        + held * held_bytes(work, stage, True, False)
        + working_bytes(work, stage, True, False)
    )


def _is_near(modelled: float, published: float) -> bool:
    return abs(modelled / published - 1) <= TOLERANCE
