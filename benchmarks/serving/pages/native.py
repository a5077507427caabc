"""Section of ``docs/results/serving.md`` on native schedules of the attention kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results

FOLDER = results("serving")
PORTFOLIO = FOLDER / "native_portfolio.json"
WINNERS = FOLDER / "native_winners_h200.json"
LATER = FOLDER / "native_winners_later_h200.json"
"""A run with workers that start before the seconds of the search."""

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
    contents = [load(WINNERS), load(LATER)]
    done = [(number, result) for number, content in enumerate(contents, 1)
            for result in content["results"] if "kernels" in result]  # fmt: skip
    kernels = [(number, result["step"], row) for number, result in done
               for row in result["kernels"]]  # fmt: skip
    seconds = [content["command"].partition("--seconds ")[2].split()[0] for content in contents]
    about = wrapped(
        f"On {done[0][1]['gpu']}, {seconds[0]} s a kernel in run 1 and {seconds[1]} s in run 2: "
        "the last comparison of each search, of the step with the kernel that Triton compiled over "
        "that with the best candidate, in a fresh process (interval of 95 %), beside the interval "
        "of the original over itself (the null). A cubin is stored if the first interval lies "
        "above 1 and above the null. The plan of verifies is the winner of the search for plans, "
        "the others are those of the rules. In run 1 the processes that assemble started within "
        "the seconds of the search, so that large kernels had few candidates; since run 2 they "
        "start before. (`python -m benchmarks run serving.native_winners`, "
        f"{link(WINNERS)}, {link(LATER)})"
    )
    lines = [
        [
            str(number), step, f"`{row['kernel']}`", str(row["evaluations"]),
            "{:.4f} [{:.4f}, {:.4f}]".format(*row["ratio"]) if row["ratio"] else row["checked"],
            "[{:.4f}, {:.4f}]".format(*row["null"]) if row["null"] else "–",
            "yes" if row["stored"] else "no",
        ]
        for number, step, row in kernels
    ]  # fmt: skip
    head = ("run", "step", "kernel", "candidates", "step, original / best", "null", "stored")
    deployed = wrapped(
        "The same steps in another fresh process, as a program runs them: with what Triton "
        "compiles, with the same again (the null), and with the cubins that the store delivers. "
        "Medians of CUDA graphs, taken in turns, with caches that rotate."
    )
    rows = []
    for number, result in done:
        us, null, native = _deployed(result)
        replaced = result["deployed"]["replaced"]
        shown = [f"{native:.4f}", ", ".join(replaced)] if replaced else ["–", "–"]
        rows.append([str(number), result["step"], f"{us:.1f}", f"{null:.4f}", *shown])
    columns = (
        "run",
        "step",
        "compiled, us",
        "compiled / null",
        "compiled / native",
        "from the store",
    )
    return [about, table(head, lines), deployed, table(columns, rows), _answer(done, kernels)]


def _answer(done: Sequence[tuple[int, Row]], kernels: Sequence[tuple[int, str, Row]]) -> str:
    """Whether it pays, and what has not run."""
    stored = [row for _, _, row in kernels if row["stored"]]
    wrong = [row for _, _, row in kernels if row["checked"] not in ("timed", "no candidate")]
    gains = [_deployed(result) for _, result in done if result["deployed"]["replaced"]]
    few = {step for _, step, row in kernels if not row["ratio"]}
    few -= {step for _, step, row in kernels if row["ratio"] and "meta" in row["kernel"]}
    steps = {step for _, step, _ in kernels}
    missing = [row["step"] for row in load(PORTFOLIO)["results"] if row["step"] not in steps]
    gained = " and ".join(f"{gain:.4f} (null {null:.4f})" for _, null, gain in gains) or "no"
    return wrapped(
        f"{len(stored)} of {len(kernels)} searches end in a cubin that is stored; deployed, the "
        f"step with it is {gained} times as fast. {len(wrong)} of the best candidates had a wrong "
        f"result or did not run in the last check. *{', '.join(sorted(few))}* was searched with "
        f"too few candidates to say anything, and *{', '.join(missing)}* did not run on a GPU. So "
        "native schedules gain well under 1 % where they gain anything."
    )


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
