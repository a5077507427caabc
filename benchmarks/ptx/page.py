"""Write ``docs/results/assembler.md``: what a search of the input of ptxas gains on a GPU.

python -m benchmarks page assembler
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from benchmarks.harness.markdown import PAGES, link, page, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.harness.schema import read
from benchmarks.ptx.page_sections import (
    ablation_section,
    budgets_section,
    long_section,
    peers_section,
    stalls_section,
    transfer_section,
)
from benchmarks.ptx.page_targets import targets_section
from nostall.core.files.atomic import write_atomically
from nostall.report.tune.change_words import setting_words

PAGE = PAGES / "assembler.md"
FOLDER = results("ptx")
SUITE = FOLDER / "assembler_suite.json"
FILLING = FOLDER / "assembler_filling.json"
UNSEEN = FOLDER / "unseen_suite.json"
LOW_BUDGETS = FOLDER / "assembler_low_budgets.json"
"""Kernels of the other files, searched without register budgets above the original's number."""
RANKED = results("sass") / "suite.json.gz"
"""Measured on the card that ranked the compiler's configurations."""
PEERS = FOLDER / "assembler_peers.json"
ABLATION = FOLDER / "assembler_ablation.json"
LONG = FOLDER / "assembler_long.json"
CHAINS = FOLDER / "dependent_launch.json"
TRANSFER = FOLDER / "transfer.json"
STALLS = FOLDER / "stall_reasons.json"
VALIDATOR = FOLDER / "validator.json"
_DROPPED = {
    "wrong": "gave other outputs",
    "fault": "faulted",
    "hang": "did not end",
    "hazards": "had hazards in their machine code",
    "unsafe": "were rejected by the verifier of machine code",
    "unproved": "had PTX that the validator could not prove",
    "serialized": "got a message of ptxas about lost asynchronous execution",
    "error": "were rejected by ptxas",
}
"""Counted result -> why such candidates were dropped."""

Row = Mapping[str, Any]

GROUPS: tuple[tuple[str, Callable[[Row], bool]], ...] = (
    ("published small shapes", lambda r: r["set"] == "published"),
    ("their mma kernels", lambda r: r["set"] == "published" and r["kernel"].endswith("@mma")),
    ("their wgmma kernels", lambda r: r["set"] == "published" and r["kernel"].endswith("@wgmma")),
    ("shapes that fill the GPU", lambda r: r["set"] == "filling"),
    ("kernels not developed with", lambda r: r["set"] == "unseen"),
)
"""Groups of kernels of the summary."""


def text() -> str:
    """The whole page."""
    rows = all_rows()
    return page(
        "The assembler's input, measured",
        "python -m benchmarks page assembler",
        [
            _introduction(rows),
            _summary(rows),
            _targets(rows, load(CHAINS)["records"]),
            _kernels(rows),
            _chains(load(CHAINS)["records"]),
            budgets_section(load(LOW_BUDGETS)["records"], rows, link(LOW_BUDGETS)),
            ablation_section(load(ABLATION)["records"], rows, link(ABLATION)),
            long_section(load(LONG)["records"], rows, link(LONG)),
            peers_section(_with_assembler(load(PEERS)["records"], rows), link(PEERS)),
            transfer_section(load(TRANSFER)["kernels"], link(TRANSFER)),
            stalls_section(load(STALLS)["kernels"], link(STALLS)),
            _candidates([*rows, *_other_searches()]),
            _open(),
        ],
    )


def all_rows() -> list[Row]:
    """Records of the assembler in all files, each with its set of kernels."""
    files = (("published", SUITE), ("filling", FILLING), ("unseen", UNSEEN))
    rows = [{**row, "set": name} for name, path in files for row in load(path)["records"]]
    return [row for row in rows if row["method"] == "assembler"]


def _other_searches() -> list[Row]:
    """Records of the assembler that are in no table of gains: other settings, beside peers."""
    rows = [row for path in (LOW_BUDGETS, ABLATION, LONG, PEERS) for row in load(path)["records"]]
    return [row for row in rows if "dropped" in row]


def _with_assembler(peers: Sequence[Row], rows: Sequence[Row]) -> list[Row]:
    """The records of peers, with those of the assembler for the same kernels and seeds."""
    wanted = {(row["kernel"], row["seed"]) for row in peers}
    known = {(row["kernel"], row["seed"]) for row in peers if row["method"] == "assembler"}
    own = [row for row in rows if (row["kernel"], row["seed"]) in wanted - known]
    return [*peers, *own]


def write() -> None:
    """Write the page."""
    write_atomically(PAGE, text().encode())


def order_gain(row: Row) -> float:
    """Deployed gain of the order alone, over the best of name, options and budgets."""
    over = row.get("over_b")
    return float(over["ratio"]) if over and over["verdict"] == "faster" else 1.0


def _introduction(rows: Sequence[Row]) -> str:
    gpus = " and ".join(sorted({row["gpu"]["gpu"] for row in rows}))
    drivers = " and ".join(sorted({row["gpu"]["driver_version"] for row in rows}))
    seconds = sorted({row["seconds_searched"] for row in rows})
    seeds = ", ".join(sorted({str(row["seed"]) for row in rows}))
    return wrapped(
        f"[`--strategy assembler`](../explanation/search.md#the-assemblers-input) on {gpus} "
        f"(driver {drivers}, Triton 3.6), {seconds[0]:.0f} to {seconds[-1]:.0f} s of search for "
        f"each kernel, seeds {seeds}. Baseline (a) is the fastest of the compiler's configurations "
        "(24 to 30 for the published kernels, up to 6 for those not developed with) by an earlier "
        f"ranking; {_retimed(rows)} of them were timed anew beside the search, so another one may "
        f"be the fastest on the day of the search. {_other_card(rows)} Baseline (b) is the fastest "
        "of other kernel names, register budgets, options and versions of ptxas with the "
        "compiler's order, so a gain over (b) is that of the order alone. A fresh process "
        "compares the result with each baseline; where the interval or the null does not show a "
        "gain, the deployed ratio is 1. Searches with seed 0 had no register budgets above the "
        "original's. In one search of seed 3 (gemm_leakyrelu-1024x1024x1024@wgmma) the verifier "
        "refused every finalist because of a minimum distance that compilers do not keep (R2UR, "
        "then I2F); the minimum is mended, the search was not repeated, and its ratio is 1. "
        f"(`python -m benchmarks run ptx.assembler_suite`, JSON: {link(SUITE)}, {link(FILLING)}, "
        f"{link(UNSEEN)})"
    )


def _other_card(rows: Sequence[Row]) -> str:
    """How many kernels were searched on another card than that of their ranking."""
    (ranked,) = {record.gpu for record in read(RANKED).records}
    filling = [row for row in rows if row["set"] == "filling"]
    apart = [row for row in filling if row["gpu"]["gpu"] != ranked]
    card = apart[0]["gpu"]["gpu"].removeprefix("NVIDIA ").split()[0]
    return (
        f"{len(apart)} of the {len(filling)} searches of shapes that fill the GPU ran on an "
        f"{card}, with the ranking of an {ranked.removeprefix('NVIDIA ')}."
    )


def _retimed(rows: Sequence[Row]) -> str:
    counts = sorted({len(row["baseline"]) or 1 for row in rows})
    return f"{counts[0]} to {counts[-1]}"


def _summary(rows: Sequence[Row]) -> str:
    lines = []
    for title, belongs in GROUPS:
        group = [row for row in rows if belongs(row)]
        over_a = [row["deployed"] for row in group]
        over_b = [order_gain(row) for row in group]
        lines.append([
            title, str(len({row["kernel"] for row in group})), str(len(group)),
            f"{geometric_mean(over_a):.3f}", f"{max(over_a):.3f}",
            f"{geometric_mean(over_b):.3f}", f"{max(over_b):.3f}",
        ])  # fmt: skip
    head = ("kernels", "number", "searches", "over (a)", "best", "over (b)", "best")
    note = wrapped(
        "Geometric means of deployed ratios over all searches (kernels and seeds). The mma kernels "
        "are compiled without wgmma and stay slower than the same kernel with it; the first "
        "sentence of this page has the faster kind of each kernel only."
    )
    return f"## Summary\n\n{table(head, lines)}\n\n{note}"


def _targets(rows: Sequence[Row], chains: Sequence[Row]) -> str:
    ratios = {}
    for title, belongs in GROUPS:
        group = [row for row in rows if belongs(row)]
        ratios[title] = [row["deployed"] for row in group], [order_gain(row) for row in group]
    both = [
        float(_deployed(row["figures"]["best"])) for row in chains if row["figures"].get("best")
    ]
    return targets_section(ratios, geometric_mean(both))


def _kernels(rows: Sequence[Row]) -> str:
    head = (
        "kernel", "seed", "GPU", "(a), us", "over (a)", "interval", "null", "over (b)", "candidate"
    )  # fmt: skip
    return f"## Kernels\n\n{table(head, [_kernel(row) for row in rows])}"


def _kernel(row: Row) -> list[str]:
    """The cells of one kernel."""
    over = row.get("over_a")
    interval = null = "–"
    if over:
        interval = f"{over['low']:.3f} to {over['high']:.3f}"
        null = f"{over['null_low']:.4f} to {over['null_high']:.4f}"
    levers = row["search"].get("winner", {}).get("levers", []) if row["deployed"] > 1 else []
    gpu = row["gpu"]["gpu"].removeprefix("NVIDIA ").split()[0]
    return [
        row["kernel"], str(row["seed"]), gpu, f"{row['original_us']:.2f}",
        f"{row['deployed']:.3f}", interval, null,
        f"{order_gain(row):.3f}", "; ".join(map(setting_words, levers)) or "none faster",
    ]  # fmt: skip


def _chains(rows: Sequence[Row]) -> str:
    """Kernels back to back with dependent launch; the figures of isolated launches are above."""
    names = ("order", "wait", "best", "triton")
    full = [row for row in rows if all(row["figures"].get(name) for name in names)]
    lines = [
        [row["kernel"], f"{row['chain_us']:.2f}", *(_deployed(row["figures"][n]) for n in names)]
        for row in full
    ]
    means = [
        f"{geometric_mean(float(_deployed(row['figures'][name])) for row in full):.3f}"
        for name in names
    ]
    lines.append(["geometric mean", "", *means])
    head = ("kernel", "chain, us", "best order", "own wait", "both", "Triton's launch_pdl")
    gpus = " and ".join(sorted({row["gpu"]["gpu"] for row in rows}))
    about = wrapped(
        f"Launches of one kernel back to back on {gpus}: time of the chain without dependent "
        "launch over that with the best order (no dependent launch), with a wait that "
        "`--pdl` places before the first access of memory, with both, and with the wait that "
        "Triton's own `launch_pdl` places at the start. (`python -m benchmarks run "
        f"ptx.dependent_launch`, {link(CHAINS)})"
    )
    return f"## Chains of dependent launches\n\n{about}\n\n{table(head, lines)}"


def _deployed(figure: Row) -> str:
    """A ratio, or 1 where the gain is not beyond the noise."""
    return f"{figure['ratio'] if figure['verdict'] == 'faster' else 1.0:.3f}"


def _candidates(rows: Sequence[Row]) -> str:
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row["counts"])
    dropped = ", ".join(f"{counts[name]:,} {why}" for name, why in _DROPPED.items())
    idle = [row["search"]["idle_share"] for row in rows]
    validator = load(VALIDATOR)
    return "## Candidates\n\n" + wrapped(
        f"{counts['timed']:,} candidates were timed, in all searches of this page, after their "
        f"outputs were compared with the original's. Of the others, {dropped}. The GPU measured "
        f"nothing in {min(idle):.0%} to {max(idle):.0%} of a search, with "
        f"{max(row['search']['workers'] for row in rows)} processes that build candidates. "
        f"Without a GPU, the PTX validator judged {validator['violations_checked']:,} seeded "
        f"violations, {validator['orders']['checked']:,} random orders and "
        f"{validator['legal_checked']:,} other legal changes; {validator['failed']} answers were "
        f"wrong (`python -m benchmarks run ptx.validator`, {link(VALIDATOR)})."
    )


def _open() -> str:
    return "## Not measured\n\n" + wrapped(
        "Searches of ten minutes, because a call on the GPU machine ends after ten minutes; other "
        "drivers; all methods on all kernels in one call; the parts of the evolution on other "
        "kernels (`--methods assembler assembler-one-sigma assembler-all-blocks "
        "assembler-two-parents assembler-without-recombination assembler-without-immigrants`)."
    )
