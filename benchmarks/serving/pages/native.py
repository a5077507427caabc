"""Section of ``docs/results/serving.md`` on native schedules of the attention kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results

FOLDER = results("serving")
PORTFOLIO = FOLDER / "native_portfolio.json"

Row = Mapping[str, Any]


def native() -> str:
    """What the search of native schedules builds, and what it gains."""
    content = load(PORTFOLIO)["results"]
    rows = [(result["step"], row) for result in content for row in result["portfolio"]]
    about = wrapped(
        "`nostall serving native` searches native schedules of the kernels of a plan, and stores a "
        "cubin if the verifier proves it, its results have the original's bits, and the attention "
        "step is measured as faster ([how](../explanation/serving.md#native-schedules)). The start "
        "of each search, assembled and verified for sm_90 without a GPU: the candidates that ptxas "
        "assembles, their different machine codes, and how many of these the verifier refuses. "
        "(`python -m benchmarks run serving.native_winners --assemble-only`, "
        f"{link(PORTFOLIO)})"
    )
    return "\n\n".join(["## Native schedules", about, _portfolios(rows)])


def _portfolios(rows: Iterable[tuple[str, Row]]) -> str:
    lines = []
    for step, row in rows:
        built, tried = row["statuses"].get("built", 0), sum(row["statuses"].values())
        lines.append([
            step, f"`{row['kernel']}`", str(row["registers"]), f"{built}/{tried}",
            str(row["codes"]), str(len(row["refused"])),
        ])  # fmt: skip
    return table(("step", "kernel", "registers", "assembled", "codes", "refused"), lines)
