"""Write docs/fusion_measured.md from the chains that were measured.

python -m benchmarks page fusion-chains

``benchmarks/fusion/results/chains/`` holds one JSON for each chain, as ``benchmarks.fusion.chains.chains``
leaves them, ``fusion_traffic.json`` what ``benchmarks.fusion.chains.dram_traffic`` counted, and
``fusion_copies.json`` how long ``benchmarks.fusion.chains.copy_bandwidth`` took for as many bytes.  The share of
the copy bandwidth counts every input and output once.  Older files have fewer methods.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

from benchmarks.fusion.chains.programs import CHAINS
from benchmarks.harness.markdown import wrapped
from benchmarks.harness.result_file import ROOT, results
from nostall.core.files import write_atomically
from nostall.fusion.hardware import H200

FOLDER = results("fusion") / "chains"
TRAFFIC = results("fusion") / "dram_traffic.json"
COPIES = results("fusion") / "copy_bandwidth.json"
PAGE = ROOT.parent / "docs" / "fusion_measured.md"
AGAINST = ("eager", "compile", "max-autotune", "best Inductor", "liger")
RIVALS = AGAINST[1:]
"""Whom no chain may be slower than."""
GOAL_SHARE, GOAL_CHAINS = 0.85, 16
BEYOND_L2 = 100e6
"""Bytes from which a chain is one of those that are judged by the copy bandwidth: twice an H200's
L2.  A copy of fewer does not reach that bandwidth either."""
_SHARES = ("share of copy bandwidth", "of a copy of as many bytes")
_COLUMNS = ("chain, fp16", "stitched us", *AGAINST, *_SHARES, "kernels")
_HEAD = "# Stitched chains, measured\n"

Chain = Mapping[str, Any]


def share(chain: Chain) -> float:
    """Inputs and outputs once / (time x copy bandwidth)."""
    seconds = 1e-6 * median(chain["samples_us"]["stitched"])
    return float(chain["bytes_least"]) / seconds / H200.copy_bytes_per_second


def share_of_a_copy(chain: Chain, copies: Mapping[str, Any]) -> float | None:
    """The time of a copy of as many bytes / the chain's; None where it was not measured."""
    copy = copies.get(chain["chain"])
    if copy is None or copy["bytes"] != chain["bytes_least"]:
        return None
    return float(median(copy["samples_us"]) / median(chain["samples_us"]["stitched"]))


def mean(chains: Sequence[Chain], name: str) -> float | None:
    """The geometric mean of the ratios against a method; None where it was never measured."""
    ratios = [c["compared"][name]["ratio"] for c in chains if name in c["compared"]]
    return geometric_mean(ratios) if ratios else None


def below(chains: Sequence[Chain]) -> list[str]:
    """Whatever is faster than a stitched chain, and whether that is more than noise."""
    return [
        f"{c['chain']} ({c['compared'][name]['ratio']:.3f} of {name}"
        f"{'' if c['compared'][name]['verdict'] == 'slower' else ', within the noise'})"
        for c in chains
        for name in RIVALS
        if name in c["compared"] and c["compared"][name]["ratio"] < 1
    ]


# -- the page --------------------------------------------------------------------------------------


def page(
    chains: Sequence[Chain],
    left: int,
    traffic: Mapping[str, Any] | None = None,
    copies: Mapping[str, Any] | None = None,
) -> str:
    """The whole page; ``left``: chains of the benchmark that were not measured."""
    copies = copies or {}
    parts = [_HEAD, wrapped(_how(chains)), _goals(chains, left, copies)]
    parts.append("## Time\n\n" + _times(chains, copies))
    if failures := _failures(chains):
        parts.append("Methods that were left out:\n\n" + failures)
    parts.append("## Bytes\n\n" + _bytes(chains, traffic or {}))
    return "\n".join(f"{part.rstrip()}\n" for part in parts)


def _how(chains: Sequence[Chain]) -> str:
    gpus = ", ".join(sorted({f"{c['gpu']}, PyTorch {c['torch']}" for c in chains}))
    dates = sorted(c["date"][:10] for c in chains)
    return (
        f"Written by `python -m benchmarks page fusion-chains` from "
        f"[these files](../benchmarks/fusion/results/chains), which hold every sample "
        f"(`python -m benchmarks run fusion.chains --out OUT`; {gpus}; {dates[-1]}). Each method runs as a "
        "CUDA graph over copies of its inputs larger than L2, at least 24 runs, replays in turns "
        f"({sum(c.get('loads', 1) > 1 for c in chains)} of the chains four times, with memory "
        "elsewhere); a ratio is the "
        "other method's time / the stitched chain's, with its 95 % interval. `compile` is "
        "torch.compile, `max-autotune` its mode max-autotune-no-cudagraphs, `best Inductor` the "
        "fastest of these and of Inductor's own options (programmatic dependent launch, which ours "
        "have too, combo kernels, multi-kernel, cooperative and mixed-order reductions), alone and "
        "those that gained together; `liger` is Liger's "
        "kernel where it computes the same. Which partition and which schedules run was chosen by "
        "a short race before, on the same GPU; – was not measured. The [torch.compile "
        "backend](compile.md) races fewer plans; what it makes of whole models is on [another "
        "page](compile_measured.md). Ours draws dropout's seeds in "
        "a branch of that graph, beside the run before ([in "
        "order](fusion_codegen.md#random-numbers) it takes 2 to 3 us longer, and a graph of one "
        "run gains nothing)."
    )


def _goals(chains: Sequence[Chain], left: int, copies: Mapping[str, Any]) -> str:
    """What was to be reached, and whether it was."""
    single = [c for c in chains if CHAINS[c["chain"]].is_single_pass]
    large = [c for c in single if c["bytes_least"] >= BEYOND_L2]
    every, reached = (sum(share(c) >= GOAL_SHARE for c in some) for some in (single, large))
    at = f"single-pass chains{{}} at {100 * GOAL_SHARE:.0f} % of the copy bandwidth"
    slower = below(chains)
    rows = [
        (f"at least {GOAL_CHAINS} chains measured", f"{len(chains)}, {left} not yet",
         len(chains) >= GOAL_CHAINS),
        _mean_goal(chains, "compile", 1.25),
        _mean_goal(chains, "max-autotune", 1.10),
        (at.format(f" of at least {BEYOND_L2 / 1e6:.0f} MB"), f"{reached} of {len(large)}",
         reached == len(large)),
        ("no chain slower than another method", "; ".join(slower) or "none", not slower),
    ]  # fmt: skip
    told = [(goal, found, "yes" if met else "**no**") for goal, found, met in rows]
    told.append((at.format(" of any size"), f"{every} of {len(single)}", "no goal"))
    beside = [found for c in single if (found := share_of_a_copy(c, copies)) is not None]
    if beside:
        at = f"single-pass chains at {100 * GOAL_SHARE:.0f} % of a copy of as many bytes"
        told.append((at, f"{sum(s >= GOAL_SHARE for s in beside)} of {len(beside)}", "no goal"))
    for name in ("eager", "best Inductor", "liger"):
        if (ratio := mean(chains, name)) is not None:
            told.append((f"geometric mean over {name}", f"{ratio:.2f}", "no goal"))
    return _table(("goal", "found", "met"), told)


def _mean_goal(chains: Sequence[Chain], name: str, goal: float) -> tuple[str, str, bool]:
    found = mean(chains, name)
    assert found is not None
    return f"geometric mean over {name} at least {goal:.2f}", f"{found:.2f}", found >= goal


def _times(chains: Sequence[Chain], copies: Mapping[str, Any]) -> str:
    said = (
        f"Of the copy bandwidth ({H200.copy_bytes_per_second / 1e12:.1f} TB/s), every input and "
        f"output counted once; `<` marks single-pass chains below {100 * GOAL_SHARE:.0f} %, `*` "
        "chains that need several passes over memory. That bandwidth is one of gigabytes, asked "
        f"for were sizes beyond L2: chains of less than {BEYOND_L2 / 1e6:.0f} MB are measured, "
        "not judged by it. In "
        "the next column PyTorch's elementwise kernel reads and writes as many bytes, half and "
        "half, which is slower where they are few (`python -m benchmarks run fusion.copy_bandwidth`, "
        "[JSON](../benchmarks/fusion/results/copy_bandwidth.json))."
    )
    return wrapped(said) + "\n\n" + _table(_COLUMNS, [_row(c, copies) for c in chains])


def _row(chain: Chain, copies: Mapping[str, Any]) -> list[str]:
    us = median(chain["samples_us"]["stitched"])
    compared = [_compared(chain, name) for name in AGAINST]
    plans = "; ".join(chain["stitched"]["plans"])
    is_single = CHAINS[chain["chain"]].is_single_pass
    mark = "*" if not is_single else "<" if share(chain) < GOAL_SHARE else ""
    percent = f"{100 * share(chain):.0f} % {mark}".strip()
    beside = share_of_a_copy(chain, copies)
    copy = f"{100 * beside:.0f} %" if beside is not None else "–"
    return [chain["chain"], f"{us:.1f}", *compared, percent, copy, plans]


def _compared(chain: Chain, name: str) -> str:
    found = chain["compared"].get(name)
    if found is None:
        return "–"
    taken = f": {chain['inductor']['taken']}" if name == "best Inductor" else ""
    return f"{found['ratio']:.3f} [{found['low']:.3f}, {found['high']:.3f}]{taken}"


def _failures(chains: Sequence[Chain]) -> str:
    """Whatever could have been measured and was not, with its reason."""
    return "\n".join(
        f"- {c['chain']}, {name}: {reason}"
        for c in chains
        for name, reason in c.get("failures", {}).items()
        if "has no kernel" not in reason
    )


def _bytes(chains: Sequence[Chain], traffic: Mapping[str, Any]) -> str:
    counted = [
        (c, traffic[c["chain"]]) for c in chains if "stitched" in traffic.get(c["chain"], {})
    ]
    if not counted:
        return wrapped(
            "What the kernels really move was not counted yet (`python -m "
            "benchmarks.fusion.chains.dram_traffic`); the share above is *modelled* in that it takes each "
            "input and output for one transfer."
        )
    said = (
        "Counted by ncu (`python -m benchmarks run fusion.dram_traffic`, "
        "[JSON](../benchmarks/fusion/results/dram_traffic.json)): MB read from and written to DRAM by "
        "one run of a method from a cold cache, of the least that is possible, and kernels. A "
        "chain that was timed again with another plan keeps its counts."
    )
    methods = ("stitched", "compile", "max-autotune")
    rows = [
        [c["chain"], f"{c['bytes_least'] / 1e6:.1f}", *_moved(c, t, methods)] for c, t in counted
    ]
    return wrapped(said) + "\n\n" + _table(("chain", "least MB", *methods), rows)


def _moved(chain: Chain, traffic: Mapping[str, Any], methods: Sequence[str]) -> list[str]:
    found = []
    for one in (traffic[name] for name in methods):
        moved = one["read_bytes"] + one["written_bytes"]
        kernels = f"{one['kernels']} kernel{'s' if one['kernels'] > 1 else ''}"
        found.append(f"{moved / 1e6:.1f} ({moved / chain['bytes_least']:.2f} x), {kernels}")
    return found


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows)])


# -- files -----------------------------------------------------------------------------------------


def load(folder: Path = FOLDER) -> list[Chain]:
    """The chains that are there, in the benchmark's order."""
    found = {c["chain"]: c for c in (json.loads(p.read_text()) for p in folder.glob("*.json"))}
    return [found[name] for name in CHAINS if name in found]


def load_by_chain(path: Path) -> Mapping[str, Any]:
    """What a file has of each chain; empty where there is none."""
    found: Mapping[str, Any] = json.loads(path.read_text())["chains"] if path.exists() else {}
    return found


def main() -> int:
    chains = load()
    if not chains:
        print(
            f"no chain in {FOLDER}; run benchmarks.fusion.chains.chains on a GPU", file=sys.stderr
        )
        return 2
    beside = load_by_chain(TRAFFIC), load_by_chain(COPIES)
    text = page(chains, len(CHAINS) - len(chains), *beside)
    write_atomically(PAGE, text.encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
