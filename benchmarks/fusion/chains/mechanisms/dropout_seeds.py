"""Benchmark of dropout seeds drawn in a parallel branch of a CUDA graph, against serial drawing.

    python -m benchmarks run fusion.dropout_seeds --out OUT.json [--rounds 200]

For every chain with dropout the kernels of the committed result run in two CUDA graphs, one
for each way of drawing; replays are interleaved.  After ``torch.manual_seed`` every byte of both
must be equal.  No two runs of a replay and no two consecutive replays may give the same result, and
setting the first seed again must restore the first results.  Needs a GPU for half a minute.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.chains.chains import LAYOUTS
from benchmarks.fusion.chains.page import load_chains
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.stitched import rebuild
from benchmarks.fusion.chains.timing import Inputs, Method, Run, copy_count, time_interleaved
from benchmarks.harness.result_file import save
from nostall.fusion.capture.randomness import seeds, seeds_in_order
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph

SeedSource = Callable[[int, torch.device], Tensor]
RUNS = 24
"""Runs in the CUDA graph whose results are compared."""


def run_with_seeds(stitched: StitchedGraph, input_count: int, draw_seeds: SeedSource) -> Run:
    """A run of the chain that draws the seeds: the inputs after the first ``input_count``."""
    counts = [stitched.graph[index].elements for index in stitched.graph.inputs[input_count:]]

    def run(inputs: Inputs) -> tuple[Tensor, ...]:
        return stitched(*inputs, *(draw_seeds(count, inputs[0].device) for count in counts))

    return run


class CapturedRuns:
    """A CUDA graph of :data:`RUNS` runs on the same inputs."""

    def __init__(self, run: Run, inputs: Inputs) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results: list[Sequence[Tensor]] = [run(inputs) for _ in range(RUNS)]  # type: ignore[misc]

    def __call__(self, seed: int | None = None) -> list[Tensor]:
        """Replay, after setting ``seed`` if it is given; returns the first output of every run."""
        if seed is not None:
            torch.manual_seed(seed)
        self.graph.replay()
        torch.cuda.synchronize()
        return [first.clone() for first, *_ in self.results]


def count_differing(first: Sequence[Tensor], second: Sequence[Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(first, second, strict=True))


def check_seeds(branch: CapturedRuns, in_order: CapturedRuns, rounds: int) -> dict[str, int]:
    """Number of compared results, and of those that violate each requirement."""
    first, second = branch(0), branch()
    not_restored = count_differing(branch(0), first)
    repeated = len(first) - count_differing(first, second)
    repeated += sum(torch.equal(a, b) for a, b in pairwise(first))
    differing = sum(count_differing(branch(seed), in_order(seed)) for seed in range(rounds))
    return {
        "results": rounds * len(first),
        "unequal": differing,
        "repeated numbers": repeated,
        "not brought back": not_restored,
    }


def measure(
    chain: Chain, description: dict[str, Any], rounds: int, sample_count: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder, torch.no_grad():
        stitched = rebuild(chain, description, Path(folder))
        input_count = len(chain.inputs)
        sets = [chain.tensors("cuda") for _ in range(copy_count(chain))]
        seed_sources: dict[str, SeedSource] = {"branch": seeds, "in order": seeds_in_order}
        runs = {
            name: run_with_seeds(stitched, input_count, draw) for name, draw in seed_sources.items()
        }
        runs["in order"](sets[0])  # loads the kernels before the capture
        captured = {name: CapturedRuns(run, sets[0]) for name, run in runs.items()}
        checks = check_seeds(captured["branch"], captured["in order"], rounds)
        del captured
        methods = {name: Method(run) for name, run in runs.items()}
        samples = time_interleaved(methods, sets, sample_count, layouts=LAYOUTS)
    return {
        "plans": description["plans"],
        "checked": checks,
        "samples_us": samples,
        "loads": LAYOUTS,
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=200, help="seeds whose results are compared")
    parser.add_argument(
        "--times", type=int, default=40, help="timed samples of each way of drawing"
    )


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("no GPU is visible; run this on a machine with a GPU")
    results = {}
    for chain_result in load_chains():
        name = chain_result["chain"]
        if "dropout" in name:
            result = measure(CHAINS[name], chain_result["stitched"], options.rounds, options.times)
            results[name] = result
            medians = ", ".join(f"{k} {median(v):.2f} us" for k, v in result["samples_us"].items())
            print(f"{name}: {medians}; {result['checked']}", flush=True)
    save(options.out, gpu=torch.cuda.get_device_name(), torch=torch.__version__, chains=results)
    checks = [result["checked"] for result in results.values()]
    failure_count = sum(sum(check.values()) - check["results"] for check in checks)
    return 1 if failure_count else 0
