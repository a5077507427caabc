"""What does it bring to read a prefix that requests share once for their group?

    python -m benchmarks run serving.prefix_groups --out prefix_groups.json --seconds 100

Decodes and verifies whose first keys are the same pages, by plans that read the prefix for each
sequence (``apart``, and ``null``, the same again) and once for the group (``together``, also with
other tile sets). These form every group that saves more than its partial results cost
(``least_saved_ns`` 0), so that the samples can judge the default. Every plan's result is compared
with fp64 first; times are for one layer, in CUDA graphs, taken in turns, with caches that rotate.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness.result_file import save
from nostall.serving.batch.examples import make_batch
from nostall.serving.batch.ragged import PrefixGroup, RaggedBatch

if TYPE_CHECKING:
    from nostall.serving.attention.config import AttentionPlan, AttentionShape


@dataclass(frozen=True)
class Case:
    """Sequences of one group, all with the same lengths."""

    sequences: int
    query: int
    shared: int
    """Keys that all sequences share."""
    own: int
    """Further keys of each sequence."""

    @property
    def name(self) -> str:
        return f"{self.sequences} x {self.query}, {self.shared} + {self.own}"

    def batch(self) -> RaggedBatch:
        """The batch, with pages of 16."""
        keys = self.shared + self.own
        return make_batch(
            [self.query] * self.sequences,
            [keys] * self.sequences,
            [self.query > 1] * self.sequences,
            prefix_groups=(PrefixGroup(tuple(range(self.sequences)), self.shared),),
        )


CASES = (
    *(Case(64, 1, shared, 512) for shared in (256, 512, 1024, 2048, 4096)),
    *(Case(16, 1, shared, 512) for shared in (512, 2048, 4096)),
    Case(256, 1, 1024, 256),
    Case(4, 1, 4096, 512),
    Case(8, 16, 4096, 256),
    Case(64, 8, 2048, 512),
)
SMALL = (Case(3, 1, 128, 40), Case(3, 4, 256, 20))
"""Cases for machines without a GPU, in Triton's interpreter."""
HEADS = ((32, 8), (28, 4))


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--seconds", type=float, default=100.0, help="seconds in all")


def plans_of(
    batch: RaggedBatch, heads: tuple[int, int]
) -> dict[str, tuple[AttentionShape, AttentionPlan]]:
    """The shape and plan of each name."""
    from nostall.serving.attention.config import AttentionShape, TileConfig
    from nostall.serving.attention.rules import VERIFY, plan_for
    from nostall.serving.attention.winners.on_gpu import kind_of

    shape = AttentionShape(*heads)
    grouped = replace(shape, has_prefixes=True)
    apart = plan_for(shape, kind_of(batch))
    together = replace(plan_for(grouped, kind_of(batch)), least_saved_ns=0)
    wide = replace(VERIFY, tiles=(*VERIFY.tiles, TileConfig(128, 64, 2, "branch")), warps=8)
    return {
        "apart": (shape, apart),
        "null": (shape, apart),
        "together": (grouped, together),
        "together, 2 units": (grouped, replace(together, units_per_program=2)),
        "together, 16 rows": (grouped, replace(apart, least_saved_ns=0)),
        "together, 128 rows": (grouped, replace(together, kernel=replace(wide, programs_per_sm=1))),
    }


def measure(case: Case, heads: tuple[int, int]) -> dict[str, Any]:
    """Samples in us of each plan of one case; of a plan that fails its error."""
    import torch

    from benchmarks.serving.attention.cuda_graphs import GraphedCalls, interleaved_us
    from nostall.serving.attention.config import AttentionShape
    from nostall.serving.attention.space import plan_fields
    from nostall.serving.attention.winners.on_gpu import GpuBatch

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    sms = torch.cuda.get_device_properties(0).multi_processor_count if has_gpu else 2
    batch, shape = case.batch(), AttentionShape(*heads)
    plans = plans_of(batch, heads)
    tensors = GpuBatch.of(batch, shape, torch.bfloat16 if has_gpu else torch.float16, device)
    calls, errors = {}, {}
    for name, (of_plan, plan) in plans.items():
        try:
            calls[name] = GraphedCalls([replace(tensors, shape=of_plan).run(plan, sms)])
        except (RuntimeError, ValueError) as error:
            errors[name] = str(error)[:200]
    samples = interleaved_us(calls, 200, 0.6)
    return {
        "case": asdict(case),
        "heads": list(heads),
        "gpu": torch.cuda.get_device_name(0) if has_gpu else "none (interpreter)",
        "plans": {name: plan_fields(plan) for name, (_, plan) in plans.items()},
        "samples_us": {
            name: [value / len(tensors.caches) for value in values]
            for name, values in samples.items()
        },
        "errors": errors,
    }


def table(results: list[dict[str, Any]]) -> str:
    """One line a case: medians in us, and apart / each other plan."""
    lines = []
    for result in results:
        medians = {name: statistics.median(row) for name, row in result["samples_us"].items()}
        case = Case(**result["case"])
        cells = [
            f"{name} {value:.1f} ({medians['apart'] / value:.2f})"
            for name, value in medians.items()
            if "apart" in medians
        ]
        failed = [f"{name}: {error[:60]}" for name, error in result["errors"].items()]
        heads = "/".join(map(str, result["heads"]))
        lines.append(f"{heads} {case.name:22} " + "; ".join([*cells, *failed]))
    return "\n".join(lines)


def main(options: argparse.Namespace) -> int:
    """Measure all cases within the time; prints a table; returns 1 if a plan failed."""
    import torch

    if not torch.cuda.is_available():
        from tools.interpreters.triton_interpreter import prepare

        prepare()
    end = time.monotonic() + options.seconds
    results: list[dict[str, Any]] = []
    cases = CASES if torch.cuda.is_available() else SMALL
    for heads in HEADS:
        for case in cases:
            if time.monotonic() > end:
                print(f"out of time before {case.name}", flush=True)
                continue
            results.append(measure(case, heads))
            save(options.out, results=results)
    print(table(results))
    return int(any(result["errors"] for result in results) or not np.size(results))
