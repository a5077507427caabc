"""DAPPLE's memory tables: what micro-batches and re-computation cost, how large a model fits.

Two figures stand in for what the profiles lack, the same for every row: BERT-48 keeps 3.47 GB of
activations a sample (the authors' planner, HPGO, examples) and a parameter has 16 bytes of state
(arXiv:2007.01045, table 7, Adam).  GB are 1e9 bytes, GPUs have 16 GiB.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.parallel.dapple_profiles import published
from nostall.parallel.cluster import Cluster
from nostall.parallel.plan import Plan, Policy, Stage, Workload
from nostall.parallel.profile import Profile
from nostall.parallel.profile.layers import chain
from nostall.parallel.simulate import simulate
from nostall.parallel.simulate.memory import held_bytes, memory, state_bytes, working_bytes

GB = 1e9
STORED_A_SAMPLE = 3.47 * GB
SAMPLES, LAYERS, HALF = 2, 48, 28
"""A micro-batch, BERT-48's layers, and where its second half begins (four nodes come first)."""
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
"""Order, re-computation, micro-batches; samples/s and GB, None where the paper says OOM."""
TABLE_7 = {1: 48, 2: 106, 4: 215, 8: 428}
"""GPUs: layers of the largest BERT that trains, with re-computation."""


def bert(folder: Path, layers: int = LAYERS) -> Profile:
    """BERT-48's profile with as many of its equal layers, and what each keeps."""
    found = published(folder / "bert-48-pbs-2.txt")
    cut = found.tensors[HALF].bytes
    stored = STORED_A_SAMPLE * SAMPLES / LAYERS
    one = replace(found.layers[HALF], stored_bytes=stored)
    before = [replace(x, stored_bytes=0.0) for x in found.layers[:4]]
    after = [replace(x, stored_bytes=0.0) for x in found.layers[4 + LAYERS :]]
    made = [*before, *[one] * layers, *after]
    return chain(f"BERT-{layers}", made, [cut] * (len(made) - 1), SAMPLES)


def table_5(folder: Path, cluster: Cluster) -> list[dict[str, Any]]:
    """BERT-48 in two stages on configuration B; memory in the mean of both GPUs."""
    found = []
    profile = bert(folder)
    stages = (Stage(0, HALF, (0,)), Stage(HALF, len(profile), (1,)))
    for policy, recompute, micro_batches, speed, size in TABLE_5:
        work = Workload(profile, cluster, SAMPLES * micro_batches)
        plan = Plan(stages, policy, recompute=recompute)
        timeline = simulate(work, plan)
        needs = memory(work, plan, timeline)
        mean = sum(needs.peak) / len(needs.peak) / GB
        rate = work.global_batch / timeline.iteration_s
        found.append(
            {
                "order": policy,
                "recompute": recompute,
                "micro_batches": micro_batches,
                "modelled_gb": mean,
                "modelled_fits": bool(needs.fits),
                "published_gb": size,
                "memory_matches": not needs.fits if size is None else _near(mean, size),
                "modelled_samples_per_s": rate,
                "published_samples_per_s": speed,
                "speed_matches": None if speed is None else _near(rate, speed),
            }
        )
    return found


def table_7(folder: Path, cluster: Cluster) -> list[dict[str, Any]]:
    """The largest BERT on 1, 2, 4 and 8 GPUs with re-computation, stages filled in turn."""
    found = []
    for gpus, published_layers in TABLE_7.items():
        most = _largest(bert(folder, 2 * published_layers), cluster, gpus)
        found.append(
            {
                "gpus": gpus,
                "modelled_layers": most,
                "published_layers": published_layers,
                "matches": _near(most, published_layers),
            }
        )
    return found


def _largest(profile: Profile, cluster: Cluster, gpus: int) -> int:
    """Layers that fit when every GPU takes what it can; PA holds S - i micro-batches."""
    work = Workload(profile, cluster, SAMPLES * gpus)
    head = len(profile) - 4 - sum(layer.stored_bytes != 0 for layer in profile.layers)
    at, layers = 0, 0
    for gpu in range(gpus):
        tail = head if gpu == gpus - 1 else 0
        room = cluster.memory[gpu] - (
            state_bytes(work, Stage(len(profile) - tail, len(profile), (gpu,))) if tail else 0.0
        )
        end = at + 1
        while end < len(profile) and _needs(work, Stage(at, end + 1, (gpu,)), gpus - gpu) <= room:
            end += 1
        layers += end - at - (4 if gpu == 0 else 0)
        at = end
    return layers


def _needs(work: Workload, stage: Stage, held: int) -> float:
    return (
        state_bytes(work, stage)
        + held * held_bytes(work, stage, True, False)
        + working_bytes(work, stage, True, False)
    )


def _near(mine: float, theirs: float) -> bool:
    return abs(mine / theirs - 1) <= TOLERANCE
