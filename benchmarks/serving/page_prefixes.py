"""Parts of the page on serving: prefix groups, the best GEMM candidates, and the plan search."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results

FOLDER = results("serving")
PREFIXES = FOLDER / "prefix_groups_h200.json.gz"
CHECK = FOLDER / "kernel_check_prefixes.json"
GEMM_BEST = FOLDER / "gemm_best_h200.json.gz"
SEARCH = FOLDER / "plan_search_h200.json"

Row = Mapping[str, Any]
PLANS = ("together", "together, 16 rows", "together, 128 rows")


def prefixes() -> str:
    """Time of batches that share a prefix, by plans with and without groups."""
    rows = load(PREFIXES)["results"]
    checked = load(CHECK)["results"]
    about = wrapped(
        f"Sequences that share their first keys, on {rows[0]['gpu']}. *Apart*: the rule's plan "
        "without groups, which reads the prefix for each sequence (much of it from the L2 cache). "
        "The other columns are apart / the plan with groups: the rule's tiles, only tiles of 16 "
        "rows, and tiles of up to 128 rows. Each result was compared with fp64 first. (`python -m "
        f"benchmarks run serving.prefix_groups`, {link(PREFIXES)})"
    )
    lines = []
    for row in rows:
        times = {name: median(samples) for name, samples in row["samples_us"].items()}
        case = row["case"]
        lines.append([
            "/".join(map(str, row["heads"])), f"{case['sequences']} x {case['query']}",
            str(case["shared"]), str(case["own"]), f"{times['apart']:.1f}",
            *(f"{times['apart'] / times[name]:.2f}" for name in PLANS),
        ])  # fmt: skip
    columns = ("heads", "sequences x tokens", "shared keys", "own keys", "apart, us", *PLANS)
    batches, wrong = (
        sum(row["cases"] for row in checked),
        sum(len(row["wrong"]) for row in checked),
    )
    rule = wrapped(
        "The rule of `serving.tables.prefixes` groups where the modelled saving of a program "
        "exceeds 4 us. It was chosen after this run, from these samples: it does not group 4 "
        "sequences of 28/4 (0.85), 16 of them with 512 shared keys (1.00), nor the 8 verifies of "
        "28/4 (1.35, which it forgoes: their modelled saving is 1.2 us). Prefixes are read once "
        "by the Triton kernel; the Gluon kernel of prefills, which gain nothing by it, has no "
        "groups. vLLM names no groups to a back end, so the plug-in uses none."
    )
    check = wrapped(
        f"`serving.kernel_check` of ragged batches with random groups: {batches} batches, {wrong} "
        "wrong; the call's time ended before its other variants, so that the device builder with "
        f"groups is compared with the host's in Triton's interpreter only ({link(CHECK)})."
    )
    return "\n\n".join(["## Shared prefixes", about, table(columns, lines), rule, check])


def best_candidates() -> str:
    """The deployed GEMM table beside the best candidate of each point."""
    content = load(GEMM_BEST)
    lines = []
    for low, high in ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096), (1, 4096)):
        points = [point for point in content["points"] if low <= point["m"] <= high]
        deployed = [
            median(p["samples_us"]["linear"]) / median(p["samples_us"]["deployed"]) for p in points
        ]
        best = [1 / point["best"]["ratio"] for point in points]
        gains = geometric_mean(deployed), geometric_mean(best)
        lines.append([
            f"{low} to {high}", str(len(points)), f"{gains[0]:.4f}", f"{gains[1]:.4f}",
            f"{gains[1] / gains[0] - 1:.1%}",
        ])  # fmt: skip
    about = wrapped(
        "The table beside the best of up to 24 candidates of cublasLt and Triton at each point "
        f"(the layers of Llama-3-8B, 10 values of M, {content['gpu']}). Wanted was at most 2 %. "
        "In 1.5 minutes the tuner reaches M = 64 or less; above, the table keeps F.linear, so "
        f"that 1.2 % to 3.7 % of the best are left. ({link(GEMM_BEST)})"
    )
    columns = ("M", "points", "F.linear / table", "F.linear / best", "best over table")
    return "\n\n".join([about, table(columns, lines)])


def plan_search() -> str:
    """What the search for plans found on a GPU."""
    printed = load(SEARCH)["printed"]
    about = wrapped(
        "`nostall serving search` for 25 s a kind of batch, on one H200. A plan is stored where "
        "two comparisons say faster; the rules are within 1 % of what it finds. The winners are "
        "plans of the Triton kernel. They do not go on to the assembler search: that is not built. "
        f"({link(SEARCH)})"
    )
    lines = []
    for line in printed.values():
        kind, _, rest = line.partition(": ")
        plans, _, shown = rest.partition(" plans; rule / best: ")
        lines.append([kind, plans, shown])
    search = table(("kind", "plans", "time of the rule / of the best"), lines)
    return "\n\n".join(["## Search for plans", about, search])
