"""Write docs/fusion_measured.md from the chains that were measured.

python -m benchmarks.fusion_chains_page

``benchmarks/results/fusion_chains/`` holds one JSON for each chain, as ``benchmarks.fusion_chains``
leaves them.  The share of the copy bandwidth counts every input and output once; what a kernel
really moves was not counted.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.fusion_chain_programs import CHAINS
from benchmarks.readme_regions import wrapped
from benchmarks.record import RESULTS
from nostall.core.run import write_atomically
from nostall.fusion.evaluate.hardware import H200

FOLDER = RESULTS / "fusion_chains"
PAGE = RESULTS.parents[1] / "docs" / "fusion_measured.md"
AGAINST = ("eager", "compile", "max-autotune")
_COLUMNS = ("chain, fp16", "stitched us", *AGAINST, "share of copy bandwidth", "kernels")
_HEAD = "# Stitched chains, measured\n"

Chain = Mapping[str, Any]


def share(chain: Chain) -> float:
    """Inputs and outputs once / (time x copy bandwidth)."""
    seconds = 1e-6 * median(chain["samples_us"]["stitched"])
    return float(chain["bytes_least"]) / seconds / H200.copy_bytes_per_second


def means(chains: Sequence[Chain]) -> dict[str, float]:
    """The geometric mean of the ratios against each other method."""
    return {name: geometric_mean(c["compared"][name]["ratio"] for c in chains) for name in AGAINST}


def page(chains: Sequence[Chain], left: int) -> str:
    """The whole page; ``left``: chains of the benchmark that were not measured."""
    found = means(chains)
    slower = [
        f"{c['chain']} ({c['compared'][name]['ratio']:.3f} of {name})"
        for c in chains
        for name in AGAINST
        if c["compared"][name]["verdict"] == "slower"
    ]
    gpus = ", ".join(sorted({f"{c['gpu']}, PyTorch {c['torch']}" for c in chains}))
    dates = sorted(c["date"][:10] for c in chains)
    bytes_ = sum(share(c) >= 0.85 for c in chains)
    said = [
        f"Written by `python -m benchmarks.fusion_chains_page` from "
        f"[these files](../benchmarks/results/fusion_chains), which hold every sample "
        f"(`python -m benchmarks.fusion_chains OUT`; {gpus}; {dates[-1]}). Each method runs as a "
        "CUDA graph over copies of its inputs larger than L2, replays in turns; a ratio is the "
        "other method's time / the stitched chain's, with its 95 % interval. `compile` is "
        "torch.compile, `max-autotune` its mode max-autotune-no-cudagraphs. Which partition "
        "and which schedules run was chosen by a short race before, on the same GPU.",
        f"**{found['compile']:.2f} over torch.compile, {found['max-autotune']:.2f} over "
        f"max-autotune**, {found['eager']:.2f} over eager: the geometric means over {len(chains)} "
        f"chains; {left} more were not measured yet. {bytes_} of {len(chains)} reach 85 % of the "
        f"copy bandwidth ({H200.copy_bytes_per_second / 1e12:.1f} TB/s), every input and output "
        f"counted once. Slower than another method: {', '.join(slower) or 'none'}.",
    ]
    rows = [f"| {' | '.join(_row(c))} |" for c in chains]
    table = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS), *rows]
    return "\n".join([_HEAD, *(wrapped(part) + "\n" for part in said), *table]) + "\n"


def _row(chain: Chain) -> list[str]:
    compared = [
        f"{c['ratio']:.3f} [{c['low']:.3f}, {c['high']:.3f}]"
        for c in (chain["compared"][name] for name in AGAINST)
    ]
    us = median(chain["samples_us"]["stitched"])
    plans = "; ".join(chain["stitched"]["plans"])
    return [chain["chain"], f"{us:.1f}", *compared, f"{100 * share(chain):.0f} %", plans]


def load(folder: Path = FOLDER) -> list[Chain]:
    """The chains that are there, in the benchmark's order."""
    found = {c["chain"]: c for c in (json.loads(p.read_text()) for p in folder.glob("*.json"))}
    return [found[name] for name in CHAINS if name in found]


def main() -> int:
    chains = load()
    if not chains:
        print(f"no chain in {FOLDER}; run benchmarks.fusion_chains on a GPU", file=sys.stderr)
        return 2
    write_atomically(PAGE, page(chains, len(CHAINS) - len(chains)).encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
