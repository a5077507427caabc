"""What does attention of a decode step cost beside reading its keys?

    python -m benchmarks run serving.fixed_cost --out fixed_cost.json [--peers FOLDER]

Decodes of equal lengths by the rule's plan, of shapes without and with shared prefixes (nothing is
shared). Microseconds of a layer in a CUDA graph, taken in turns, with caches that rotate:

- ``start``: the kernel with tables without units: the launch, and programs that find no work;
- ``kernel``: the kernel with the batch, without the launch of the reduction;
- ``whole``: what a step runs, the kernel and the reduction; ``null``: the same again;
- ``dependent``: with the reduction as a programmatic dependent launch;
- ``units``: one program a unit in the place of the queue, as outside of CUDA graphs;
- ``FA3``: FlashAttention-3, if ``--peers`` names its folder.

``reduction`` is whole less kernel. ``tail`` is kernel less start less the time in which the memory
moves the bytes of keys, values, queries and results at its nominal rate.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.harness.result_file import save
from nostall.core.errors import MissingPart
from nostall.serving.batch.examples import make_batch

if TYPE_CHECKING:
    from nostall.serving.attention.config import AttentionPlan
    from nostall.serving.attention.winners.on_gpu import GpuBatch

CASES = tuple(
    (sequences, keys) for sequences in (1, 8, 32, 64, 128, 256) for keys in (16, 512, 2048)
)
SMALL = ((2, 16), (3, 40))
"""Cases for machines without a GPU, in Triton's interpreter."""
HEADS = (32, 8)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the benchmark."""
    parser.add_argument("--out", type=Path, required=True, help="result file (JSON)")
    parser.add_argument("--seconds", type=float, default=0.4, help="seconds of a case")
    parser.add_argument("--peers", type=Path, help="folder with FlashAttention-3")


def calls_of(
    tensors: GpuBatch, plan: AttentionPlan, sms: int
) -> dict[str, list[Callable[[], object]]]:
    """Launches with each cache, by what is measured."""
    import torch

    out = torch.empty_like(tensors.query)

    def calls(
        plan: AttentionPlan, reduces: bool | None = None, is_empty: bool = False
    ) -> list[Callable[[], object]]:
        launch = tensors.launch(plan, sms)
        if is_empty:
            launch.buffers.tables.counts.zero_()
        if reduces is not None:
            launch = replace(launch, kernel=replace(launch.kernel, reduces=reduces))
        return [lambda cache=cache: launch(cache, out) for cache in tensors.caches]  # type: ignore[misc]

    dependent = replace(plan, kernel=replace(plan.kernel, dependent=True))
    units = replace(plan, kernel=replace(plan.kernel, schedule="unit"))
    found = {
        "start": calls(plan, False, is_empty=True),
        "kernel": calls(plan, False),
        "whole": calls(plan, True),
        "null": calls(plan, True),
    }
    if torch.cuda.is_available():
        found |= {"dependent": calls(dependent, True), "units": calls(units, True)}
    return found


def measure(
    case: tuple[int, int], has_prefixes: bool, options: argparse.Namespace
) -> dict[str, Any]:
    """Samples in us of one case, and the parts of its cost."""
    import torch

    from benchmarks.serving.attention.batches import bound
    from benchmarks.serving.attention.cuda_graphs import GraphedCalls, interleaved_us
    from nostall.serving.attention.config import AttentionShape
    from nostall.serving.attention.rules import plan_for
    from nostall.serving.attention.winners.on_gpu import GpuBatch, kind_of

    has_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if has_gpu else ("cpu", torch.float16)
    sms = torch.cuda.get_device_properties(0).multi_processor_count if has_gpu else 2
    sequences, keys = case
    batch = make_batch([1] * sequences, [keys] * sequences)
    shape = AttentionShape(*HEADS, has_prefixes=has_prefixes)
    plan = plan_for(shape, kind_of(batch))
    tensors = GpuBatch.of(batch, shape, dtype, torch.device(device))
    tensors.run(plan, sms)()  # Raises for a wrong result.
    calls = calls_of(tensors, plan, sms)
    if options.peers is not None and not has_prefixes:
        calls |= fa3(tensors, options.peers)
    graphs = {name: GraphedCalls(each) for name, each in calls.items()}
    samples = interleaved_us(graphs, 400, options.seconds)
    us = {name: median(values) for name, values in samples.items()}
    gpu = torch.cuda.get_device_name(0) if has_gpu else ""
    least = bound(batch, *HEADS, shape.head_dim, gpu).us
    parts = {
        "start": us["start"],
        "tail": us["kernel"] - us["start"] - least,
        "reduction": us["whole"] - us["kernel"],
        "bytes": least,
    }
    return {
        "sequences": sequences, "keys": keys, "has_prefixes": has_prefixes, "us": us,
        "parts": parts, "samples": samples,
    }  # fmt: skip


def fa3(tensors: GpuBatch, folder: Path) -> dict[str, list[Callable[[], object]]]:
    """Calls of FlashAttention-3, if its file is there."""
    from benchmarks.serving.attention.peers import PEERS

    try:
        call = PEERS["FA3"](tensors, folder)
    except MissingPart as error:
        print(error)
        return {}
    return {"FA3": [lambda cache=cache: call(cache) for cache in tensors.caches]}  # type: ignore[misc]


def line(row: dict[str, Any]) -> str:
    """One line of a case."""
    parts = " ".join(f"{name} {value:6.1f}" for name, value in row["parts"].items())
    rest = " ".join(f"{name} {value:.1f}" for name, value in row["us"].items())
    kind = "prefixes" if row["has_prefixes"] else "plain"
    return f"{row['sequences']:4} x {row['keys']:5} {kind:8} {parts} | {rest}"


def about() -> dict[str, str]:
    """The GPU and its driver; empty without one."""
    import torch

    from nostall.attach.program.machine import driver_version

    if not torch.cuda.is_available():
        return {}
    return {"gpu": torch.cuda.get_device_name(0), "driver": driver_version() or ""}


def main(options: argparse.Namespace) -> int:
    """Measure all cases."""
    import torch

    cases = CASES if torch.cuda.is_available() else SMALL
    rows = []
    for has_prefixes in (False, True):
        for case in cases:
            rows.append(measure(case, has_prefixes, options))
            print(line(rows[-1]), flush=True)
            save(options.out, kind="measured", **about(), heads=HEADS, rows=rows)
    return 0
