"""Auto-MAP's pipeline explorer against the cuts that its paper prints (modelled).

    NOSTALL_DAPPLE_PROFILES=FOLDER python -m benchmarks run sharding.automap_pipelines \\
        --out benchmarks/sharding/results/automap_pipelines.json

2, 3 and 4 servers of 8 V100 (NVLink, 25 Gb/s between), one stage a server.  FOLDER contains the
profile of BERT-48 of DAPPLE's authors, which is not in this repository; without it, BERT-48 is left
out.  The T5 models are profiles by their numbers of FLOP.  Each game is played with both rewards
and three seeds, and all lists of cuts that the masks allow are enumerated.  Source:
arXiv:2007.04069, tables of section 6.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, get_args

import torch

from benchmarks.harness.result_file import save
from benchmarks.parallel.dapple.profiles import load_published
from nostall.papers.automap.pipeline import (
    PipelineGame,
    Reward,
    best_of,
    explore_pipeline,
)
from nostall.parallel.cluster import Cluster, parse_cluster
from nostall.parallel.errors import Infeasible
from nostall.parallel.plan import Workload
from nostall.parallel.profile import Profile
from nostall.parallel.profile.layers import Layer, Tensor

PUBLISHED: dict[tuple[str, int], tuple[int, ...]] = {
    ("bert-48", 2): (8,), ("bert-48", 3): (8, 16), ("bert-48", 4): (8, 16, 24),
    ("t5-base", 4): (8, 16, 22),
    ("t5-3b", 2): (8,), ("t5-3b", 3): (8, 16), ("t5-3b", 4): (8, 16, 24),
    ("t5-11b", 4): (8, 16, 24),
}  # fmt: skip
PUBLISHED_LAYERS: dict[tuple[str, int], tuple[int, ...]] = {
    ("bert-48", 2): (23,), ("bert-48", 3): (17, 32), ("bert-48", 4): (14, 27, 40)
}  # fmt: skip
MICRO_BATCHES = 16
SEEDS = 3
STEPS = 3000
"""Of the paper's 10,000: all lists of cuts have been played long before."""
FLOPS = 15.7e12 * 0.7
"""A V100 in single precision, and the share that large products reach."""
LENGTH, SAMPLES = 512, 16


@dataclass(frozen=True)
class T5:
    """Sizes of a T5 with equal numbers of encoder and decoder layers."""

    layers: int
    width: int
    inner: int
    """Width of all heads together."""
    feed_forward: int
    vocabulary: int = 32_128


T5S = {
    "t5-base": T5(12, 768, 768, 3072),
    "t5-3b": T5(24, 1024, 4096, 16_384),
    "t5-11b": T5(24, 1024, 16_384, 65_536),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--models", nargs="+", default=["bert-48", *T5S])


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    records = []
    for model in options.models:
        profile = _profile(model)
        if profile is None:
            print(f"{model}: no profile; set NOSTALL_DAPPLE_PROFILES")
            continue
        for servers in (2, 3, 4):
            records.append(_record(model, profile, servers, options.steps))
            print(records[-1], flush=True)
            save(options.out, kind="modelled", steps=options.steps, records=records)


def _record(model: str, profile: Profile, servers: int, steps: int) -> dict[str, Any]:
    samples = profile.batch or 1
    workload = Workload(
        profile, _cluster(servers), samples * MICRO_BATCHES, samples, fractions=True
    )
    published = PUBLISHED.get((model, servers))
    record: dict[str, Any] = {"model": model, "servers": servers, "published": published}
    game = PipelineGame(workload, servers)
    try:
        best = best_of(game, game.complete())
    except Infeasible as error:
        return {**record, "infeasible": str(error)}
    record |= {
        "lists_of_cuts": len(game.latencies),
        "enumerated": best.cuts,
        "layers": [stage.end for stage in best.plan.stages[:-1]],
        "published_layers": PUBLISHED_LAYERS.get((model, servers)),
        "latency_s": best.latency_s,
        "games": [_play(workload, servers, r, seed, steps, best.latency_s)
                  for r in get_args(Reward) for seed in range(SEEDS)],
    }  # fmt: skip
    if published is not None:
        latency = game.latency(published)
        record |= {
            "matches": best.cuts == published,
            "published_over_best": abs(latency) * game.ideal_s / best.latency_s,
            "published_fits": latency > 0,
        }
    return record


def _play(
    workload: Workload, stages: int, reward: Reward, seed: int, steps: int, best_s: float
) -> dict[str, Any]:
    start = perf_counter()
    found = explore_pipeline(workload, stages, seed, reward, steps)
    return {
        "reward": reward,
        "seed": seed,
        "cuts": found.cuts,
        "gap": found.latency_s / best_s - 1,
        "states": found.states,
        "episodes": found.episodes,
        "seconds": round(perf_counter() - start, 1),
    }


def _profile(model: str) -> Profile | None:
    if model in T5S:
        return t5_profile(model, T5S[model])
    folder = os.environ.get("NOSTALL_DAPPLE_PROFILES")
    return load_published(Path(folder) / "bert-48-pbs-2.txt") if folder else None


def t5_profile(name: str, size: T5) -> Profile:
    """Layers by their FLOP; the encoder's result is read by all layers of the decoder."""
    tokens = LENGTH * SAMPLES
    attention = 4 * size.width * size.inner
    feed_forward = 2 * size.width * size.feed_forward
    embedding = size.width * size.vocabulary
    layers = [_layer("embedding", 0, tokens, size, stored=embedding)]
    layers += [_layer(f"encoder {i}", attention + feed_forward, tokens, size)
               for i in range(size.layers)]  # fmt: skip
    layers += [_layer(f"decoder {i}", 2 * attention + feed_forward, tokens, size)
               for i in range(size.layers)]  # fmt: skip
    layers.append(_layer("head", embedding, tokens, size, stored=0))
    activation = 4.0 * tokens * size.width
    count = len(layers)
    tensors = [Tensor(i, i + 1, activation) for i in range(count - 1)]
    tensors.append(Tensor(size.layers, count - 2, activation))
    return Profile(name, tuple(layers), tuple(tensors), SAMPLES)


def _layer(name: str, weights: int, tokens: int, size: T5, stored: int | None = None) -> Layer:
    """A layer of ``weights`` parameters in products; ``stored`` are those that it stores."""
    forward = 2 * weights * tokens / FLOPS
    parameters = 4.0 * (weights if stored is None else stored)
    kept = 4.0 * tokens * (8 * size.width + 4 * size.inner + 2 * size.feed_forward)
    return Layer(name, forward, 2 * forward, parameters, kept, forward)


def _cluster(servers: int) -> Cluster:
    """DAPPLE's configuration A with V100 of 32 GB, which the paper of Auto-MAP does not state."""
    return parse_cluster(
        f'name = "{servers} x 8 V100"\nduplex = "half"\n[[servers]]\ncount = {servers}\ngpus = 8\n'
        "memory_gib = 32\nlink = { bandwidth_gbytes = 25, allreduce_gbytes = 100 }\n"
        "[network]\nbandwidth_gbytes = 3.125\n"
    )
