"""Parts of the page on serving: prefix groups, the best GEMM candidates, and the plan search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import geometric_mean, median
from typing import Any, NamedTuple

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results
from benchmarks.serving.attention.prefix_groups import Case
from nostall.serving.attention.config import AttentionShape
from nostall.serving.attention.space import plan_of
from nostall.serving.tables.columns import PREFIX_ROWS
from nostall.serving.tables.host import build_tables
from nostall.serving.tables.prefix.forest import saved_ns
from nostall.serving.tables.tiles import LEAST_SAVED_NS

FOLDER = results("serving")
PREFIXES = FOLDER / "prefix_groups_h200.json.gz"
CHECK = FOLDER / "kernel_check_prefixes.json"
GEMM_BEST = FOLDER / "gemm_best_h200.json.gz"
SEARCH = FOLDER / "plan_search_h200.json"
SEARCH_FROM_RULE = FOLDER / "plan_search_from_rule_h200.json"

Row = Mapping[str, Any]
RANGES = ((1, 16), (17, 64), (65, 256), (257, 1024), (1025, 4096))
"""Ranges of M."""
SMS = 132
"""Of an H100 and an H200."""
PLANS = ("together", "together, 16 rows", "together, 128 rows")


def prefixes() -> str:
    """Time of batches that share a prefix, by plans with and without groups."""
    rows = load(PREFIXES)["results"]
    judged = [_judged(row) for row in rows]
    about = wrapped(
        f"Sequences that share their first keys, on {rows[0]['gpu']}. *Apart*: the rule's plan "
        "without groups, which reads the prefix for each sequence (much of it from the L2 cache). "
        "The columns *together* are apart / the plan with groups: the rule's tiles, only tiles of "
        "16 rows, and tiles of up to 128 rows. *Saving*: time of each program that groups save, "
        "modelled. Each result was compared with fp64 first. (`python -m benchmarks run "
        f"serving.prefix_groups`, {link(PREFIXES)})"
    )
    lines = [
        [*case.cells, f"{case.saved_ns / 1e3:.1f}", "yes" if case.is_grouped else "no"]
        for case in judged
    ]
    columns = ("heads", "sequences x tokens", "shared keys", "own keys", "apart, us", *PLANS)
    shown = table((*columns, "saving, us", "grouped by the rule"), lines)
    return "\n\n".join(["## Shared prefixes", about, shown, _rule(judged), _checked()])


class Judged(NamedTuple):
    """A batch that was measured, and whether the rule groups it."""

    name: str
    cells: list[str]
    """The cells of its row from the heads to the plans."""
    gain: float
    """Time apart / time with groups."""
    saved_ns: float
    """Modelled time of each program that groups save."""
    is_grouped: bool


def _judged(row: Row) -> Judged:
    """The row of a batch, with the decision of the rule for the plan that was measured."""
    times = {name: median(samples) for name, samples in row["samples_us"].items()}
    case, heads = Case(**row["case"]), "/".join(map(str, row["heads"]))
    plan = replace(plan_of(row["plans"]["together"]), least_saved_ns=LEAST_SAVED_NS)
    settings = plan.table_settings(AttentionShape(*row["heads"], has_prefixes=True), SMS)
    batch = case.batch()
    gains = [times["apart"] / times[name] for name in PLANS]
    cells = [
        heads, f"{case.sequences} x {case.query}", str(case.shared), str(case.own),
        f"{times['apart']:.1f}", *(f"{gain:.2f}" for gain in gains),
    ]  # fmt: skip
    return Judged(
        f"{heads} {case.name}",
        cells,
        gains[0],
        saved_ns(batch.query_lengths, batch.prefix_groups[0], settings),
        bool(build_tables(batch, settings).counts[PREFIX_ROWS]),
    )


def _rule(judged: Sequence[Judged]) -> str:
    """What the rule decides, beside what was measured."""
    grouped = [case.gain for case in judged if case.is_grouped]
    rejected = [case for case in judged if not case.is_grouped]
    lost = max(rejected, key=lambda case: case.gain)
    named = ", ".join(f"{case.name} ({case.gain:.2f})" for case in rejected)
    return wrapped(
        "The rule of `serving.tables.prefix.forest` groups where the modelled saving exceeds the "
        "cost of the partial results that it adds, and is at least "
        f"{LEAST_SAVED_NS / 1e3:g} us a program (`least_saved_ns`). This value was chosen from the "
        "samples of an earlier run on a GPU of the same kind. The plan *together* makes the "
        f"{len(grouped)} batches that the rule groups {min(grouped):.2f} to {max(grouped):.2f} "
        f"times as fast. The rule rejects {len(rejected)} of {len(judged)}: {named}. Of these, "
        f"{lost.name} (saving {lost.saved_ns / 1e3:.1f} us) is rejected although grouping made it "
        f"{lost.gain:.2f} times as fast. Prefixes are read once by the Triton kernel; the Gluon "
        "kernel of prefills, which gain nothing by it, has no groups. The vLLM plug-in finds "
        "prefixes in the block table ([its rates](#shared-prompts))."
    )


def _checked() -> str:
    """Which checks of groups ran on a GPU."""
    rows = load(CHECK)["results"]
    plain = [row for row in rows if not row["memcheck"]]
    checked = [row for row in rows if row["memcheck"]]
    batches, planned = (sum(row[name] for row in plain) for name in ("cases", "planned"))
    wrong = sum(len(row["wrong"]) for row in rows)
    grouped = ", ".join(f"*{row['variant']}*" for row in plain if "prefixes" in row["variant"])
    under = ", ".join(f"*{row['variant']}* ({row['cases']})" for row in checked)
    errors = sum(row["memory_errors"] for row in checked)
    return wrapped(
        f"`serving.kernel_check` of ragged batches ran {batches} of {planned} batches of "
        f"{len(plain)} variants on a GPU, {wrong} wrong; {grouped} have random groups. Under "
        f"memcheck ran batches of {under}, with {errors} memory errors ({link(CHECK)}). "
        "*tables+prefixes* compares the device builder's tables with the host's."
    )


def best_candidates() -> str:
    """The deployed GEMM table beside the best candidate of each point."""
    content = load(GEMM_BEST)
    lines, left = [], {}
    for low, high in (*RANGES, (1, 4096)):
        points = [point for point in content["points"] if low <= point["m"] <= high]
        deployed = [
            median(p["samples_us"]["linear"]) / median(p["samples_us"]["deployed"]) for p in points
        ]
        best = [1 / point["best"]["ratio"] for point in points]
        gains = geometric_mean(deployed), geometric_mean(best)
        left[low, high] = gains[1] / gains[0] - 1
        lines.append([
            f"{low} to {high}", str(len(points)), f"{gains[0]:.4f}", f"{gains[1]:.4f}",
            f"{left[low, high]:.1%}",
        ])  # fmt: skip
    values = {point["m"] for point in content["points"]}
    reached = max(point["m"] for point in content["points"] if point["entry"] != "Cublas")
    above = [gain for (low, _), gain in left.items() if low > reached]
    about = wrapped(
        "The table beside the best candidate of cublasLt (24 proposals at most) and Triton at "
        f"each point (the layers of Llama-3-8B, {len(values)} values of M, {content['gpu']}). "
        f"Wanted was at most 2 %. The table has rows other than F.linear up to M = {reached}; "
        "above, the time of the tuner was spent, and the best of the candidates is "
        f"{100 * min(above):.1f} % to {100 * max(above):.1f} % faster by range. ({link(GEMM_BEST)})"
    )
    columns = ("M", "points", "F.linear / table", "F.linear / best", "best over table")
    return "\n\n".join([about, table(columns, lines)])


def plan_search() -> str:
    """What the search for plans found on a GPU."""
    content = load(SEARCH)
    stored = content["stored"]
    found = [_found(line) for line in content["printed"].values()]
    least, most = min(found, key=lambda kind: kind.ratio), max(found, key=lambda kind: kind.ratio)
    languages = sorted({row["plan"]["kernel"]["language"].capitalize() for row in stored})
    seconds = content["command"].partition("--seconds ")[2]
    change = max(least.ratio, 1 / least.ratio) - 1
    about = (
        f"`nostall serving search` for {seconds} s a kind of batch, on {stored[0]['key']['gpu']}. "
        f"A plan is stored where two comparisons say faster: {len(stored)} of {len(found)} kinds, "
        f"with kernels in {' and '.join(languages)}. The best plan for *{most.kind}* is "
        f"{100 * (most.ratio - 1):.1f} % faster than the rule's; the best plan for *{least.kind}* "
        f"is {100 * change:.1f} % {'slower' if least.ratio < 1 else 'faster'}. "
    )
    later = load(SEARCH_FROM_RULE)
    again = [_found(line) for line in later["printed"].values()]
    about += (
        "This run began at a fixed plan, from which it did not reach the rule's. The command "
        f"begins at the rule's plan; a later run, for {later['command'].partition('--seconds ')[2]}"
        f" s on {later['stored'][0]['key']['gpu']}, is in the last row. Plans go on to the search "
        f"of native schedules, below. ({link(SEARCH)}, {link(SEARCH_FROM_RULE)})"
    )
    lines = [[kind.kind, kind.plans, kind.shown] for kind in found]
    lines += [[f"{kind.kind}, from the rule's", kind.plans, kind.shown] for kind in again]
    search = table(("kind", "plans", "time of the rule / of the best"), lines)
    return "\n\n".join(["## Search for plans", wrapped(about), search])


class FoundPlan(NamedTuple):
    """What the search prints for a kind of batch."""

    kind: str
    plans: str
    ratio: float
    """Time of the rule's plan / time of the best."""
    shown: str
    """The ratio with its interval."""


def _found(line: str) -> FoundPlan:
    kind, _, rest = line.partition(": ")
    plans, _, shown = rest.partition(" plans; rule / best: ")
    return FoundPlan(kind, plans, float(shown.split()[0]), shown)
