"""Auto-MAP's games on the paper's models: dimensions partitioned, episodes, seconds.

    python -m benchmarks run sharding.automap --out benchmarks/sharding/results/automap.json

8 devices. The paper (arXiv:2007.04069, table 4) partitions 111 dimensions of a T5 with 188
variables in half an hour; HF's T5 with 6 + 6 layers has 131, because its layers have no biases.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.harness.result_file import save
from benchmarks.sharding.models import MODELS, Size
from benchmarks.sharding.planning import SIZES
from nostall.papers.automap.planner import EXPLORERS, explore
from nostall.parallel.errors import Infeasible
from nostall.parallel.sharding.capture.operators import capture
from nostall.parallel.sharding.graph import ShardingGraph
from nostall.parallel.sharding.planners.sharding import Options

MODELS_AND_SIZES: dict[str, Size] = {
    "t5": SIZES["t5"],
    "vgg": SIZES["vgg"],
    "bert": replace(SIZES["bert"], layers=2),
    "resnet": replace(SIZES["resnet"], layers=2),
}
SECONDS = 100.0
"""Time limit, of which each explorer has three tenths, and a quarter of these for fine-tuning."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    records = []
    for model, size in MODELS_AND_SIZES.items():
        with torch.device("meta"):
            job = MODELS[model](size)
        graph = capture(job, size.samples, (8,), model).graph
        records += [_play(graph, explorer) for explorer in EXPLORERS]
        print({k: v for k, v in records[-1].items() if k != "placements"}, flush=True)
        save(options.out, records=records)


def _play(graph: ShardingGraph, explorer: Any) -> dict[str, Any]:
    head = {"model": graph.name, "explorer": explorer.name}
    start = perf_counter()
    try:
        result = explore(graph, explorer, Options(seconds=SECONDS), seed=0)
    except Infeasible as error:
        return {**head, "nothing_to_decide": str(error)}
    return {
        **head,
        "tensors": len(result.placements),
        "dimensions": result.dimensions,
        "partitioned": result.partitioned,
        "fine_tuned": result.fine_tuned,
        "episodes": result.episodes,
        "conflicts": result.conflicts,
        "steps": result.steps,
        "seconds": round(perf_counter() - start, 1),
        "placements": {
            graph.operators[number].target: placement
            for number, placement in result.placements.items()
        },
    }
