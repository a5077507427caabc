"""How long a copy takes that moves as many bytes as a chain has to: what its time can be.

    python -m benchmarks run fusion.copy_bandwidth --out OUT.json

The copy bandwidth of a GPU is that of very long copies; one of 20 MB begins and ends, too.  For
every chain of ``benchmarks.fusion.chains.programs`` PyTorch's own elementwise kernel (``torch.neg``)
reads half of the chain's inputs and outputs and writes the other half, as a CUDA graph over copies
larger than L2, as chains are timed.  Needs a GPU, some ten seconds of it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.stitched import graph_of, least_bytes
from benchmarks.fusion.chains.timing import (
    COLD_BYTES,
    MOST_COPIES,
    Inputs,
    captured_graph,
    replayed,
    walked,
)
from benchmarks.harness.result_file import save

ROUNDS, WARM_UP = 40, 3
_ELEMENT = 2
"""Bytes of fp16."""


def copied(sets: Sequence[Inputs], rounds: int = ROUNDS) -> list[float]:
    """Microseconds of one copy from the first to the second tensor of a set, in every round."""
    every = walked(sets)
    graph = captured_graph(_copy, every)
    return [round(replayed(graph, len(every)), 4) for _ in range(rounds + WARM_UP)][WARM_UP:]


def _copy(pair: Inputs) -> torch.Tensor:
    source, place = pair
    return torch.neg(source, out=place)


def pairs(moved: int, device: str = "cuda") -> list[Inputs]:
    """Sets of tensors to copy from and to, ``moved`` bytes each in all."""
    count = max(1, min(MOST_COPIES, -(-2 * COLD_BYTES // moved)))
    size = (moved // (2 * _ELEMENT),)
    one = torch.ones(size, dtype=torch.float16, device=device)
    return [(one.clone(), torch.empty_like(one)) for _ in range(count)]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True)


def main(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        print("this needs a GPU", file=sys.stderr)
        return 3
    by_bytes: dict[int, list[float]] = {}
    found = {}
    for name, chain in CHAINS.items():
        moved = least_bytes(graph_of(chain))
        if moved not in by_bytes:
            by_bytes[moved] = copied(pairs(moved))
        found[name] = {"bytes": moved, "samples_us": by_bytes[moved]}
        print(f"{name}: {moved / 1e6:.1f} MB in {median(by_bytes[moved]):.2f} us", flush=True)
    gpu = torch.cuda.get_device_name()
    save(options.out, kind="measured", gpu=gpu, torch=torch.__version__, chains=found)
    return 0
