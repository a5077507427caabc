"""Section of ``docs/results/parallel.md``: why predictions for the GPT were too low."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness.markdown import link, table, wrapped
from benchmarks.harness.result_file import load, results

Row = Mapping[str, Any]
FOLDER = results("parallel")
PASSES = FOLDER / "pass_times_4.json"
PROFILES = (FOLDER / "profile_error_2.json", FOLDER / "profile_error_4.json")
AHEAD, NEEDED = "one operation ahead", "when needed"
LABELS = {
    "default": AHEAD,  # of the first version of the benchmark
    "received one operation ahead": AHEAD,
    "received when needed": NEEDED,
    "messages first": f"{AHEAD}, messages before operators",
}
"""When receives start, by the setting of a record."""


def section() -> str:
    """The whole section."""
    records = [{**r, "setting": LABELS[r["setting"]]} for r in load(PASSES)["records"]]
    return "\n\n".join([_explanation(records), _passes(records), _replicas(records), _profiles()])


def _explanation(records: list[Row]) -> str:
    ahead, needed = (_find(records, "even 1f1b", setting) for setting in (AHEAD, NEEDED))
    return wrapped(
        "Iterations of the GPT took longer than predicted because of messages: NCCL's kernel that "
        "waits for a message takes multiprocessors from the operators beside it. With receives "
        f"that start {AHEAD}, passes take up to {_slowest(ahead):.2f} times their profile; with "
        f"receives that start {NEEDED}, {_slowest(needed):.2f} times (`parallel.pass_times`, "
        f"{link(PASSES)}). An iteration of the even plan with 1F1B takes {_ms(needed)} instead of "
        f"{_ms(ahead)} ms; {_ms(needed, 'predicted_s')} are predicted. Uneven plans hide this: "
        "their slowest stage never waits. Receives within a server therefore start when a pass "
        "needs them, and only those from other servers earlier. Each cell of the table is the "
        "median of the forward, then of the backward passes on a GPU, over the profile:"
    )


def _passes(records: list[Row]) -> str:
    rows = [
        [r["plan"], r["setting"], _ms(r, "predicted_s"), _ms(r), *map(_ratio, r["ranks"])]
        for r in records
        if r["plan"] != "data-parallel"
    ]
    gpus = [f"GPU {number}" for number in range(len(records[0]["ranks"]))]
    return table(("plan", "receives start", "predicted, ms", "measured, ms", *gpus), rows)


def _ratio(rank: Row) -> str:
    ratios = (rank[f"{k}_s"] / rank[f"predicted_{k}_s"] for k in ("forward", "backward"))
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _slowest(record: Row) -> float:
    return max(
        rank[f"{kind}_s"] / rank[f"predicted_{kind}_s"]
        for rank in record["ranks"]
        for kind in ("forward", "backward")
    )


def _replicas(records: list[Row]) -> str:
    """What data parallelism adds: its last backward pass runs beside all-reduces."""
    record = next(r for r in records if r["plan"] == "data-parallel")
    rank, count = record["ranks"][0], len(record["ranks"])
    return wrapped(
        f"Data parallelism takes {_ms(record)} ms where {_ms(record, 'predicted_s')} are "
        "predicted. It sends no messages; of its two micro-batches, the last backward pass runs "
        "beside the all-reduces of the gradients, which take multiprocessors as well: the median "
        f"of both backward passes is {1e3 * rank['backward_s']:.1f} ms, "
        f"{1e3 * count * rank['predicted_backward_s']:.1f} in the profile. The simulator hides "
        "all-reduces behind the pass at no cost to it. How much they cost depends on the "
        "operators: for the chain, whose products are larger, this prediction is "
        f"{_chain()} ms."
    )


def _chain() -> str:
    """Predicted and measured times of the chain's data parallelism."""
    record = next(
        r
        for r in load(FOLDER / "predicted_vs_measured_4.json")["records"]
        if (r["model"], r["links"]) == ("chain", "fast") and "data-parallel" in r["name"]
    )
    return f"{_ms(record, 'predicted_s')} and the measured time {_ms(record)}"


def _profiles() -> str:
    rows = [
        [f"{load(path)['gpus']} ({link(path)})", str(r["samples"]), str(r["gpus_at_once"]),
         *(f"{1e3 * r[key]:.1f}" for key in ("layers_s", "whole_s", "following_s", "launch_s"))]
        for path in PROFILES
        for r in load(path)["records"]
    ]  # fmt: skip
    text = wrapped(
        "The profile is not the reason, and neither are GPUs that slow each other down: at 8 "
        "samples, the sum of the profiled layers is the time of a whole pass (`parallel."
        "profile_error`; other work used the processors of the host with four GPUs). At 2 samples "
        "a pass takes as long as the processor takes to launch it, and more than a quarter of 8 "
        "samples."
    )
    head = ("GPUs of the host", "samples", "GPUs at once", "sum of layers, ms", "whole pass, ms",
            "passes in a row, ms", "launches, ms")  # fmt: skip
    return f"{text}\n\n{table(head, rows)}"


def _find(records: list[Row], plan: str, setting: str) -> Row:
    return next(r for r in records if (r["plan"], r["setting"]) == (plan, setting))


def _ms(record: Row, key: str = "measured_s") -> str:
    return f"{1e3 * record[key]:.1f}"
