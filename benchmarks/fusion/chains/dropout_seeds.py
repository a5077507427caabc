"""Seeds of dropout drawn in a branch of a CUDA graph, beside seeds drawn in order.

    python -m benchmarks run fusion.dropout_seeds --out OUT.json [--rounds 200]

For every chain with dropout the kernels of the committed result run in two CUDA graphs, one with
each way of drawing, replays in turns.  After ``torch.manual_seed`` every byte of the two has to be
equal, no two runs of a replay and no two replays may give the same, and the first seed has to bring
the first results back.  Nothing has run in a branch before the capture that has the first one.
Needs a GPU, half a minute of it.
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

from benchmarks.fusion.chains.chains import LOADS
from benchmarks.fusion.chains.page import load_chains
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.stitched import taken
from benchmarks.fusion.chains.timing import Inputs, Method, Run, copies, in_turns
from benchmarks.harness.result_file import save
from nostall.fusion.capture.randomness import seeds, seeds_in_order
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph

Draw = Callable[[int, torch.device], Tensor]
RUNS = 24
"""Of one graph, where results are compared."""


def run_with(whole: StitchedGraph, given: int, draw: Draw) -> Run:
    """The chain with its last inputs drawn."""
    counts = [whole.graph[index].elements for index in whole.graph.inputs[given:]]

    def run(inputs: Inputs) -> tuple[Tensor, ...]:
        return whole(*inputs, *(draw(count, inputs[0].device) for count in counts))

    return run


class Played:
    """A CUDA graph of :data:`RUNS` runs on the same inputs."""

    def __init__(self, run: Run, inputs: Inputs) -> None:
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.results: list[Sequence[Tensor]] = [run(inputs) for _ in range(RUNS)]  # type: ignore[misc]

    def __call__(self, seed: int | None = None) -> list[Tensor]:
        """The first result of every run of a replay; a ``seed`` is set before."""
        if seed is not None:
            torch.manual_seed(seed)
        self.graph.replay()
        torch.cuda.synchronize()
        return [first.clone() for first, *_ in self.results]


def unequal(one: Sequence[Tensor], other: Sequence[Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(one, other, strict=True))


def checked(branch: Played, in_order: Played, rounds: int) -> dict[str, int]:
    """How many results were compared, and how many were not as they have to be."""
    first, second = branch(0), branch()
    again = unequal(branch(0), first)
    stale = len(first) - unequal(first, second)
    stale += sum(torch.equal(a, b) for a, b in pairwise(first))
    wrong = sum(unequal(branch(seed), in_order(seed)) for seed in range(rounds))
    return {
        "results": rounds * len(first),
        "unequal": wrong,
        "repeated numbers": stale,
        "not brought back": again,
    }


def measured(chain: Chain, how: dict[str, Any], rounds: int, times: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="nostall-") as folder, torch.no_grad():
        whole = taken(chain, how, Path(folder))
        given = len(chain.inputs)
        sets = [chain.tensors("cuda") for _ in range(copies(chain))]
        ways: dict[str, Draw] = {"branch": seeds, "in order": seeds_in_order}
        runs = {name: run_with(whole, given, draw) for name, draw in ways.items()}
        runs["in order"](sets[0])  # kernels are loaded before anything is captured
        played = {name: Played(run, sets[0]) for name, run in runs.items()}
        found = checked(played["branch"], played["in order"], rounds)
        del played
        methods = {name: Method(run) for name, run in runs.items()}
        samples = in_turns(methods, sets, times, loads=LOADS)
    return {"plans": how["plans"], "checked": found, "samples_us": samples, "loads": LOADS}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=200, help="of results compared")
    parser.add_argument("--times", type=int, default=40, help="samples of each way")


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here; run this on one")
    found = {}
    for result in load_chains():
        name = result["chain"]
        if "dropout" in name:
            one = measured(CHAINS[name], result["stitched"], options.rounds, options.times)
            found[name] = one
            times = ", ".join(f"{k} {median(v):.2f} us" for k, v in one["samples_us"].items())
            print(f"{name}: {times}; {one['checked']}", flush=True)
    save(options.out, gpu=torch.cuda.get_device_name(), torch=torch.__version__, chains=found)
    checks = [one["checked"] for one in found.values()]
    wrong = sum(sum(told.values()) - told["results"] for told in checks)
    return 1 if wrong else 0
