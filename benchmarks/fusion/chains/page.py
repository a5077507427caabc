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
from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import results
from nostall.core.files.atomic import write_atomically
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
_SHARES = ("share of copy bandwidth", "of a copy of as many bytes")
_COLUMNS = ("chain, fp16", "fused us", *METHODS, *_SHARES, "kernels")

Chain = Mapping[str, Any]


def text() -> str:
    """The whole page from the committed files."""
    chains = load_chains()
    missing = len(CHAINS) - len(chains)
    return chains_page(chains, missing, load_by_chain(TRAFFIC), load_by_chain(COPIES))


def write() -> None:
    write_atomically(PAGE, text().encode())


def chains_page(
    chains: Sequence[Chain],
    missing: int,
    traffic: Mapping[str, Any] | None = None,
    copies: Mapping[str, Any] | None = None,
) -> str:
    """The page. ``missing``: number of chains of the benchmark that were not measured."""
    copies = copies or {}
    parts = [wrapped(_method(chains)), _targets(chains, missing, copies)]
    parts += ["## Time", _times(chains, copies)]
    if failures := _failures(chains):
        parts += ["Methods that failed:", failures]
    parts += ["## Bytes", _bytes(chains, traffic or {}), shared_memory_section()]
    return page("Fused chains, measured", "python -m benchmarks page fusion-chains", parts)


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


def _method(chains: Sequence[Chain]) -> str:
    gpus = ", ".join(sorted({f"{c['gpu']}, PyTorch {c['torch']}" for c in chains}))
    last = max(c["date"][:10] for c in chains)
    reloaded = sum(c.get("loads", 1) > 1 for c in chains)
    return (
        f"Measured with `python -m benchmarks run fusion.chains` on {gpus}; {last}. "
        "`benchmarks/fusion/results/chains` has one JSON for each chain with every sample. Each "
        "method runs as a CUDA graph over copies of its inputs that are larger than L2, at least "
        f"24 runs, interleaved; {reloaded} of the chains were loaded four times at other "
        "addresses. A ratio is the other method's time divided by the fused chain's, with its 95 % "
        "interval. `compile` is torch.compile. `max-autotune` is its mode "
        "max-autotune-no-cudagraphs. `best Inductor` is the fastest of these two and of Inductor's "
        "own options (programmatic dependent launch, which nostall's kernels use too, combo "
        "kernels, multi-kernel, cooperative and mixed-order reductions), alone and combined. "
        "`liger` is Liger's kernel if it has one for the chain. The partition and the kernel plans "
        "were chosen by a short autotuning run on the same GPU. – means not measured. The "
        "[torch.compile backend](../explanation/torch-compile.md) tries fewer plans; "
        "[whole models](torch-compile.md) are on a page of their own. Seeds of "
        "dropout are drawn in a branch of the CUDA graph, which costs nothing if the graph has "
        "several runs. What kernels are called: [names of "
        "plans](../explanation/codegen.md#names-of-plans)."
    )


def _targets(chains: Sequence[Chain], missing: int, copies: Mapping[str, Any]) -> str:
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
    return table(("target", "result", "met"), rows)


def _mean_target(chains: Sequence[Chain], method: str, target: float) -> tuple[str, str, bool]:
    ratio = mean(chains, method)
    assert ratio is not None
    return f"geometric mean over {method} at least {target:.2f}", f"{ratio:.2f}", ratio >= target


def _times(chains: Sequence[Chain], copies: Mapping[str, Any]) -> str:
    intro = (
        f"The copy bandwidth is {H200.copy_bytes_per_second / 1e12:.1f} TB/s, that of copies of "
        "gigabytes; every input and output counts once. `<` marks single-pass chains below "
        f"{100 * TARGET_SHARE:.0f} %, `*` chains that need several passes over memory. Chains of "
        f"less than {LARGE_BYTES / 1e6:.0f} MB are measured but not judged by it. The next column "
        "compares with PyTorch's elementwise kernel that reads and writes as many bytes, half and "
        f"half (`python -m benchmarks run fusion.copy_bandwidth`, {link(COPIES)})."
    )
    return wrapped(intro) + "\n\n" + table(_COLUMNS, [_row(c, copies) for c in chains])


def _row(chain: Chain, copies: Mapping[str, Any]) -> list[str]:
    us = median(chain["samples_us"]["stitched"])
    ratios = [_ratio(chain, method) for method in METHODS]
    plans = "; ".join(chain["stitched"]["plans"])
    is_single = CHAINS[chain["chain"]].is_single_pass
    mark = "*" if not is_single else "<" if share(chain) < TARGET_SHARE else ""
    percent = f"{100 * share(chain):.0f} % {mark}".strip()
    copied = share_of_a_copy(chain, copies)
    copy = f"{100 * copied:.0f} %" if copied is not None else "–"
    return [chain["chain"], f"{us:.1f}", *ratios, percent, copy, plans]


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
    counted = [
        (c, traffic[c["chain"]]) for c in chains if "stitched" in traffic.get(c["chain"], {})
    ]
    if not counted:
        return wrapped(
            "The bytes that the kernels move were not counted (`python -m benchmarks run "
            "fusion.dram_traffic`). The share above is *modelled* in one respect: it counts one "
            "transfer for each input and output."
        )
    intro = (
        f"Counted by ncu (`python -m benchmarks run fusion.dram_traffic`, {link(TRAFFIC)}): MB "
        "read from and written to DRAM by one run of a method from a cold cache, the multiple of "
        "the least possible, and the number of kernels. A chain that was timed again with another "
        "plan keeps its counts."
    )
    methods = ("stitched", "compile", "max-autotune")
    rows = [
        [c["chain"], f"{c['bytes_least'] / 1e6:.1f}", *_moved(c, t, methods)] for c, t in counted
    ]
    head = ("chain", "least MB", "fused", "compile", "max-autotune")
    return wrapped(intro) + "\n\n" + table(head, rows)


def _moved(chain: Chain, traffic: Mapping[str, Any], methods: Sequence[str]) -> list[str]:
    cells = []
    for counts in (traffic[method] for method in methods):
        moved = counts["read_bytes"] + counts["written_bytes"]
        kernels = f"{counts['kernels']} kernel{'s' if counts['kernels'] > 1 else ''}"
        cells.append(f"{moved / 1e6:.1f} ({moved / chain['bytes_least']:.2f} x), {kernels}")
    return cells


def load_chains(folder: Path = FOLDER) -> list[Chain]:
    """The measured chains in the benchmark's order."""
    chains = {c["chain"]: c for c in (json.loads(p.read_text()) for p in folder.glob("*.json"))}
    return [chains[name] for name in CHAINS if name in chains]


def load_by_chain(path: Path) -> Mapping[str, Any]:
    """The part of a result file that is keyed by chain; empty if the file does not exist."""
    chains: Mapping[str, Any] = json.loads(path.read_text())["chains"] if path.exists() else {}
    return chains
