"""Outputs larger than L2 that leave it first, beside ones that do not, and what reads them next.

    python -m benchmarks run fusion.streamed_outputs --out OUT.json

The kernel of the committed result of every chain with one such output, as it is and ``streamed``:
alone, and in front of a kernel of PyTorch that reads that output, as CUDA graphs over copies of the
inputs, replays in turns.  Both write the same bytes.  Needs a GPU, a minute of it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.fusion.chains.page import load_chains
from benchmarks.fusion.chains.programs import CHAINS, Chain
from benchmarks.fusion.chains.stitched import graph_of, plans_of, taken
from benchmarks.fusion.chains.timing import Inputs, Method, Run, copies, in_turns
from benchmarks.harness.result_file import save
from nostall.fusion.codegen.generate import PlanChooser
from nostall.fusion.codegen.loops.schedule import Schedule
from nostall.fusion.codegen.runtime.stitched_graph import StitchedGraph, schedule_operators, stitch
from nostall.fusion.codegen.tiling.plan_variants import plans_with_variants, with_evict_first
from nostall.fusion.codegen.tiling.planned_kernel import PlannedKernel, plan_kernel

LOADS = 3
"""How many times memory is laid out anew."""
FEATURES = 512
"""Columns of the matrix that the output is multiplied by."""

Reader = Callable[[Tensor], Tensor]


def readers(columns: int) -> dict[str, Reader]:
    """What may read an output of so many columns next, in fp16: element by element, row by row, and
    a matrix product, each from its beginning on."""
    weight = torch.randn(columns, FEATURES, device="cuda", dtype=torch.float16) * 0.02
    return {
        "relu": torch.relu,
        "softmax": lambda x: torch.softmax(x, -1),
        "matmul": lambda x: x @ weight,
    }


def chosen(plan: str, is_streamed: bool) -> PlanChooser:
    """The plan of that name, streamed or not."""

    def choice(of: Schedule) -> PlannedKernel:
        (found,) = [one for one in plans_with_variants(of) if str(one) == plan]
        return plan_kernel(of, replace(found.plan, evict_first=is_streamed))

    return choice


def both_ways(whole: StitchedGraph, plan: str, folder: Path) -> dict[str, StitchedGraph]:
    """The only kernel of a chain, as it is and streamed."""
    groups = [whole.graph.operators]
    return {
        name: stitch(whole.graph, groups, choice=chosen(plan, way), folder=folder)
        for name, way in (("kept", False), ("streamed", True))
    }


def is_judged(whole: StitchedGraph) -> bool:
    """Whether a chain is one kernel that could stream its only output."""
    if len(plans_of(whole)) != 1 or len(whole.graph.outputs) != 1:
        return False
    of = schedule_operators(whole.graph, whole.graph.operators)
    (plan,) = plans_of(whole)
    return any(str(one) == plan and with_evict_first(one) for one in plans_with_variants(of))


def before(whole: StitchedGraph, reader: Reader | None) -> Run:
    """The chain, and what reads its output."""

    def run(inputs: Inputs) -> Tensor:
        (found,) = whole(*inputs)
        return reader(found) if reader else found

    return run


def measured(chain: Chain, whole: StitchedGraph, folder: Path, times: int) -> dict[str, Any]:
    (plan,) = plans_of(whole)
    ways = both_ways(whole, plan.removesuffix(", streamed"), folder)
    sets = [chain.tensors("cuda") for _ in range(copies(chain))]
    (one,), (other,) = (way(*sets[0]) for way in ways.values())
    is_half = one.dtype == torch.float16
    samples = {}
    behind = {"alone": None, **(readers(one.shape[-1]) if is_half else {})}
    for name, reader in behind.items():
        methods = {how: Method(before(way, reader)) for how, way in ways.items()}
        samples[name] = in_turns(methods, sets, times, loads=LOADS)
    return {
        "plan": plan,
        "output_bytes": one.nbytes,
        "equal": torch.equal(one, other),
        "samples_us": samples,
    }


def told(samples: dict[str, dict[str, Sequence[float]]]) -> str:
    """How many times as long it takes without, of each reader."""
    found = []
    for name, of in samples.items():
        pairs = zip(of["kept"], of["streamed"], strict=True)
        found.append(f"{name} {median(a / b for a, b in pairs):.3f}")
    return ", ".join(found)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--times", type=int, default=24, help="samples of each way")


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here; run this on one")
    found = {}
    for result in load_chains():
        chain = CHAINS[result["chain"]]
        with tempfile.TemporaryDirectory(prefix="nostall-") as folder, torch.no_grad():
            if len(graph_of(chain).inputs) > len(chain.inputs):
                continue  # dropout's seeds are drawn beside the kernel
            whole = taken(chain, result["stitched"], Path(folder))
            if is_judged(whole):
                one = measured(chain, whole, Path(folder), options.times)
                found[chain.name] = one
                print(f"{chain.name}: {told(one['samples_us'])}; equal {one['equal']}", flush=True)
    save(options.out, gpu=torch.cuda.get_device_name(), torch=torch.__version__, chains=found)
    return 0 if all(one["equal"] for one in found.values()) else 1
