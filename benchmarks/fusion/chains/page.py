"""``docs/results/fusion-chains.md``: fused chains beside torch.compile and other methods.

python -m benchmarks page fusion-chains
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.fusion.chains.shared_memory_section import shared_memory_section
from benchmarks.harness.markdown import PAGES
from benchmarks.harness.result_file import results
from benchmarks.harness.template import render, render_page
from nostall.fusion.hardware import H200

FOLDER = results("fusion") / "chains"
TRAFFIC = results("fusion") / "dram_traffic.json"
COPIES = results("fusion") / "copy_bandwidth.json"
PAGE = PAGES / "fusion-chains.md"
METHODS = ("eager", "compile", "max-autotune", "best Inductor", "liger")
COMPETITORS = METHODS[1:]
"""Methods that should not be faster than any fused chain."""
TARGET_SHARE, TARGET_CHAINS = 0.85, 16
LARGE_BYTES = 100e6
"""Chains that move at least this many bytes (twice the L2 of an H200) are judged by the copy
bandwidth. A copy of fewer bytes does not reach that bandwidth either."""

Chain = Mapping[str, Any]
Rows = list[tuple[str, str, str]]


def text() -> str:
    """The whole page from the committed files."""
    chains = load_chains()
    missing = len(CHAINS) - len(chains)
    return chains_page(chains, missing, load_by_chain(TRAFFIC), load_by_chain(COPIES))


def chains_page(
    chains: Sequence[Chain],
    missing: int,
    traffic: Mapping[str, Any] | None = None,
    copies: Mapping[str, Any] | None = None,
) -> str:
    """The page. ``missing``: number of chains of the benchmark that were not measured."""
    copies = copies or {}
    values = {
        "gpus": sorted({f"{c['gpu']}, PyTorch {c['torch']}" for c in chains}),
        "dates": [c["date"] for c in chains],
        "reloaded": sum(c.get("loads", 1) > 1 for c in chains),
        "targets": _targets(chains, missing, copies),
        "copy_tb_s": H200.copy_bytes_per_second / 1e12,
        "target_share": TARGET_SHARE,
        "large_bytes": LARGE_BYTES,
        "copies_file": COPIES,
        "methods": METHODS,
        "times": [_row(chain, copies) for chain in chains],
        "failures": _failures(chains),
        "bytes": _bytes(chains, traffic or {}),
        "shared_memory": shared_memory_section(),
    }
    return render_page(__file__, PAGE, values)


def share(chain: Chain) -> float:
    """Share of the copy bandwidth: inputs and outputs once, divided by time and bandwidth."""
    seconds = 1e-6 * median(chain["samples_us"]["stitched"])
    return float(chain["bytes_least"]) / seconds / H200.copy_bytes_per_second


def share_of_a_copy(chain: Chain, copies: Mapping[str, Any]) -> float | None:
    """Time of a copy of as many bytes divided by the chain's; None if it was not measured."""
    copy = copies.get(chain["chain"])
    if copy is None or copy["bytes"] != chain["bytes_least"]:
        return None
    return float(median(copy["samples_us"]) / median(chain["samples_us"]["stitched"]))


def mean(chains: Sequence[Chain], method: str) -> float | None:
    """Geometric mean of the ratios to a method; None if it was never measured."""
    ratios = [c["compared"][method]["ratio"] for c in chains if method in c["compared"]]
    return geometric_mean(ratios) if ratios else None


def slower(chains: Sequence[Chain]) -> list[str]:
    """Methods that are faster than a fused chain, and whether that is within the noise."""
    return [
        f"{c['chain']} ({c['compared'][method]['ratio']:.3f} of {method}"
        f"{'' if c['compared'][method]['verdict'] == 'slower' else ', within the noise'})"
        for c in chains
        for method in COMPETITORS
        if method in c["compared"] and c["compared"][method]["ratio"] < 1
    ]


def _targets(chains: Sequence[Chain], missing: int, copies: Mapping[str, Any]) -> Rows:
    """The targets that were set before the measurement, and whether they are met."""
    single = [c for c in chains if CHAINS[c["chain"]].is_single_pass]
    large = [c for c in single if c["bytes_least"] >= LARGE_BYTES]
    all_sizes, reached = (sum(share(c) >= TARGET_SHARE for c in some) for some in (single, large))
    at = f"single-pass chains{{}} at {100 * TARGET_SHARE:.0f} % of the copy bandwidth"
    losses = slower(chains)
    targets = [
        (f"at least {TARGET_CHAINS} chains measured", f"{len(chains)}, {missing} not measured",
         len(chains) >= TARGET_CHAINS),
        _mean_target(chains, "compile", 1.25),
        _mean_target(chains, "max-autotune", 1.10),
        (at.format(f" of at least {LARGE_BYTES / 1e6:.0f} MB"), f"{reached} of {len(large)}",
         reached == len(large)),
        ("no chain slower than another method", "; ".join(losses) or "none", not losses),
    ]  # fmt: skip
    rows = [(target, result, "yes" if met else "**no**") for target, result, met in targets]
    rows.append((at.format(" of any size"), f"{all_sizes} of {len(single)}", "no target"))
    copied = [value for c in single if (value := share_of_a_copy(c, copies)) is not None]
    if copied:
        at = f"single-pass chains at {100 * TARGET_SHARE:.0f} % of a copy of as many bytes"
        count = sum(value >= TARGET_SHARE for value in copied)
        rows.append((at, f"{count} of {len(copied)}", "no target"))
    for method in ("eager", "best Inductor", "liger"):
        if (ratio := mean(chains, method)) is not None:
            rows.append((f"geometric mean over {method}", f"{ratio:.2f}", "no target"))
    return rows


def _mean_target(chains: Sequence[Chain], method: str, target: float) -> tuple[str, str, bool]:
    ratio = mean(chains, method)
    assert ratio is not None
    return f"geometric mean over {method} at least {target:.2f}", f"{ratio:.2f}", ratio >= target


def _row(chain: Chain, copies: Mapping[str, Any]) -> Mapping[str, Any]:
    is_single = CHAINS[chain["chain"]].is_single_pass
    mark = "*" if not is_single else "<" if share(chain) < TARGET_SHARE else ""
    return {
        "chain": chain["chain"],
        "us": median(chain["samples_us"]["stitched"]),
        "ratios": [_ratio(chain, method) for method in METHODS],
        "share": f"{100 * share(chain):.0f} % {mark}".strip(),
        "copied": share_of_a_copy(chain, copies),
        "plans": "; ".join(chain["stitched"]["plans"]),
    }


def _ratio(chain: Chain, method: str) -> str:
    result = chain["compared"].get(method)
    if result is None:
        return "–"
    option = f": {chain['inductor']['taken']}" if method == "best Inductor" else ""
    return f"{result['ratio']:.3f} [{result['low']:.3f}, {result['high']:.3f}]{option}"


def _failures(chains: Sequence[Chain]) -> str:
    """Methods that exist for a chain and could not be measured, with the reason."""
    return "\n".join(
        f"- {c['chain']}, {method}: {reason}"
        for c in chains
        for method, reason in c.get("failures", {}).items()
        if "has no kernel" not in reason
    )


def _bytes(chains: Sequence[Chain], traffic: Mapping[str, Any]) -> str:
    rows = [
        {**c, "moved": [_moved(c, counts[method]) for method in _COUNTED]}
        for c in chains
        if "stitched" in (counts := traffic.get(c["chain"], {}))
    ]
    return render(__file__, {"file": TRAFFIC, "chains": rows}, "bytes" if rows else "no bytes")


_COUNTED = ("stitched", "compile", "max-autotune")


def _moved(chain: Chain, counts: Mapping[str, Any]) -> str:
    moved = counts["read_bytes"] + counts["written_bytes"]
    kernels = f"{counts['kernels']} kernel{'s' if counts['kernels'] > 1 else ''}"
    return f"{moved / 1e6:.1f} ({moved / chain['bytes_least']:.2f} x), {kernels}"


def load_chains(folder: Path = FOLDER) -> list[Chain]:
    """The measured chains in the benchmark's order."""
    chains = {c["chain"]: c for c in (json.loads(p.read_text()) for p in folder.glob("*.json"))}
    return [chains[name] for name in CHAINS if name in chains]


def load_by_chain(path: Path) -> Mapping[str, Any]:
    """The part of a result file that is keyed by chain; empty if the file does not exist."""
    chains: Mapping[str, Any] = json.loads(path.read_text())["chains"] if path.exists() else {}
    return chains
