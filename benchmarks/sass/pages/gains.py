"""Measured gains by kind of kernel, which `nostall inspect` prints before any search."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from benchmarks.harness.result_file import ROOT, load, results
from nostall.tuning.room import GAINS_FILE, KINDS, Gains, Kind, Search

GAINS = ROOT.parent / "src" / "nostall" / "tuning" / GAINS_FILE
"""Package file with the gains."""
SUITE = "suite.json.gz"
ASSEMBLER = ("assembler_suite.json", "assembler_filling.json")


def gains() -> Gains:
    """The gains of the committed result files whose kernels have a known kind."""
    suite = load(results("sass") / SUITE)["records"]
    searched = [r for name in ASSEMBLER for r in load(results("ptx") / name)["records"]]
    assembler = [r for r in searched if r["method"] == "assembler"]
    best: dict[Search, dict[Kind, dict[str, float]]] = {
        "native moves": _best((r["kernel"], r["deployed_ratio"]) for r in suite),
        "assembler": _best((r["kernel"], r.get("deployed")) for r in assembler),
    }
    gpus: dict[Search, tuple[str, ...]] = {
        "native moves": tuple(sorted({r["gpu"] for r in suite})),
        "assembler": tuple(sorted({r["gpu"]["gpu"] for r in assembler if r.get("gpu")})),
    }
    return Gains(gpus=gpus, sources=(SUITE, *ASSEMBLER), best=best)


def _best(pairs: Iterable[tuple[str, Any]]) -> dict[Kind, dict[str, float]]:
    """Kind -> kernel -> its largest ratio."""
    best: dict[Kind, dict[str, float]] = {kind: {} for kind in KINDS}
    for kernel, ratio in pairs:
        kind: Kind = "no matrix instructions"
        if kernel.endswith("@wgmma"):
            kind = "wgmma"
        elif kernel.endswith("@mma"):
            kind = "mma"
        if ratio:
            best[kind][kernel] = max(round(ratio, 4), best[kind].get(kernel, 0.0))
    return best
