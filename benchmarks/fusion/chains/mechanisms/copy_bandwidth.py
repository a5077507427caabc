"""Benchmark of copies that move as many bytes as each chain: a lower bound for its time.

    python -m benchmarks run fusion.copy_bandwidth --out OUT.json

A GPU's copy bandwidth is that of very long copies; the start and end of a 20 MB copy take a notable
share of its time.  For every chain of ``benchmarks.fusion.chains.programs`` PyTorch's elementwise
kernel ``torch.neg`` reads half of the chain's bytes and writes the other half, in CUDA graphs over
buffers larger than L2, as chains are timed.  Needs a GPU for about ten seconds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.stitched import chain_graph, min_bytes
from benchmarks.fusion.chains.timing import (
    COLD_BYTES,
    MAX_COPIES,
    Inputs,
    capture_graph,
    repeat_sets,
    time_replay,
)
from benchmarks.harness.result_file import save

ROUNDS, WARM_UP = 40, 3
_ELEMENT_BYTES = 2  # fp16


def time_copies(sets: Sequence[Inputs], rounds: int = ROUNDS) -> list[float]:
    """Microseconds of one copy from the first to the second tensor of a set, for each round."""
    run_sets = repeat_sets(sets)
    graph = capture_graph(_copy, run_sets)
    return [round(time_replay(graph, len(run_sets)), 4) for _ in range(rounds + WARM_UP)][WARM_UP:]


def _copy(pair: Inputs) -> torch.Tensor:
    source, destination = pair
    return torch.neg(source, out=destination)


def copy_buffers(byte_count: int, device: str = "cuda") -> list[Inputs]:
    """Pairs of source and destination tensors, ``byte_count`` bytes together in each pair."""
    set_count = max(1, min(MAX_COPIES, -(-2 * COLD_BYTES // byte_count)))
    size = (byte_count // (2 * _ELEMENT_BYTES),)
    source = torch.ones(size, dtype=torch.float16, device=device)
    return [(source.clone(), torch.empty_like(source)) for _ in range(set_count)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("no GPU is visible; run this on a machine with a GPU", file=sys.stderr)
        return 3
    by_bytes: dict[int, list[float]] = {}
    results = {}
    for name, chain in CHAINS.items():
        byte_count = min_bytes(chain_graph(chain))
        if byte_count not in by_bytes:
            by_bytes[byte_count] = time_copies(copy_buffers(byte_count))
        results[name] = {"bytes": byte_count, "samples_us": by_bytes[byte_count]}
        print(
            f"{name}: {byte_count / 1e6:.1f} MB in {median(by_bytes[byte_count]):.2f} us",
            flush=True,
        )
    gpu = torch.cuda.get_device_name()
    save(options.out, kind="measured", gpu=gpu, torch=torch.__version__, chains=results)
    return 0
