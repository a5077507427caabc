"""Section of ``docs/results/serving.md`` on native schedules of the attention kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results

FOLDER = results("serving")
PORTFOLIO = FOLDER / "native_portfolio.json"
WINNERS = FOLDER / "native_winners_h200.json"

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
    return "\n\n".join(["## Native schedules", about, _portfolios(rows), *_measured()])


def _measured() -> list[str]:
    """The searches on a GPU: each kernel's last comparison, and the deployed step."""
    content = load(WINNERS)
    done = [result for result in content["results"] if "kernels" in result]
    kernels = [(result["step"], row) for result in done for row in result["kernels"]]
    stored = [row for _, row in kernels if row["stored"]]
    gains = [_deployed(result)[2] for result in done if result["deployed"]["replaced"]]
    seconds = content["command"].partition("--seconds ")[2].split()[0]
    wrong = [row for _, row in kernels if row["checked"] not in ("timed", "no candidate")]
    about = wrapped(
        f"On {done[0]['gpu']}, {seconds} s a kernel: the last comparison of each search, of the "
        "step with the kernel that Triton compiled over that with the best candidate, in a fresh "
        "process (interval of 95 %), beside the interval of the original over itself (the null). "
        "A cubin is stored if the first interval lies above 1 and above the null. "
        "(`python -m benchmarks run serving.native_winners`, "
        f"{link(WINNERS)})"
    )
    lines = [
        [
            step, f"`{row['kernel']}`", str(row["evaluations"]),
            "{:.4f} [{:.4f}, {:.4f}]".format(*row["ratio"]) if row["ratio"] else row["checked"],
            "[{:.4f}, {:.4f}]".format(*row["null"]) if row["null"] else "–",
            "yes" if row["stored"] else "no",
        ]
        for step, row in kernels
    ]  # fmt: skip
    head = ("step", "kernel", "candidates", "step, original / best", "null", "stored")
    deployed = wrapped(
        "The same steps in another fresh process, as a program runs them: with what Triton "
        "compiles, with the same again (the null), and with the cubins that the store delivers. "
        "Medians of CUDA graphs, taken in turns, with caches that rotate."
    )
    rows = []
    for result in done:
        us, null, native = _deployed(result)
        replaced = result["deployed"]["replaced"]
        shown = f"{native:.4f}" if replaced else "–"
        rows.append([result["step"], f"{us:.1f}", f"{null:.4f}", shown, ", ".join(replaced) or "–"])
    columns = ("step", "compiled, us", "compiled / null", "compiled / native", "from the store")
    gained = " and ".join(f"{gain:.4f}" for gain in gains) or "no"
    answer = wrapped(
        f"{len(stored)} of {len(kernels)} searches end in a cubin that is stored; deployed, the "
        f"steps with them are {gained} times as fast. {len(wrong)} of the best candidates had a "
        "wrong result or did not run in the last check. In this run the processes that assemble "
        "started within the seconds of the search, so that large kernels had few candidates; the "
        "command starts them before."
    )
    return [about, table(head, lines), deployed, table(columns, rows), answer]


def _deployed(result: Row) -> tuple[float, float, float]:
    """Microseconds of the step as compiled, and its time over the null's and the native one's."""
    times = {name: median(row) for name, row in result["deployed"]["samples_us"].items()}
    return times["compiled"], *(times["compiled"] / times[name] for name in ("null", "native"))


def _portfolios(rows: Iterable[tuple[str, Row]]) -> str:
    lines = []
    for step, row in rows:
        built, tried = row["statuses"].get("built", 0), sum(row["statuses"].values())
        lines.append([
            step, f"`{row['kernel']}`", str(row["registers"]), f"{built}/{tried}",
            str(row["codes"]), str(len(row["refused"])),
        ])  # fmt: skip
    return table(("step", "kernel", "registers", "assembled", "codes", "refused"), lines)
