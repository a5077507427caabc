"""Rank agreement of the SM model with measured times: a table, and the record in the package."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from benchmarks.harness.markdown import table
from benchmarks.harness.result_file import ROOT
from benchmarks.harness.schema import Record
from nostall.sass.model.agreement import AGREEMENT_FILE, Agreement

AGREEMENT = ROOT.parent / "src" / "nostall" / "sass" / "model" / AGREEMENT_FILE
"""Package file with the agreement that `nostall tune` prints next to a modelled gain."""


def agreement_table(records: Sequence[Record]) -> str:
    """Kendall's tau and the model's error by kernel; empty if the model was not run."""
    modelled_records = [r for r in records if r.modelled is not None]
    if not modelled_records:
        return ""
    rows = []
    for kernel, values in taus(modelled_records).items():
        models = [
            r.modelled for r in modelled_records if r.kernel == kernel and r.modelled is not None
        ]
        span = f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]" if values else "–"
        error = f"{100 * median(model.error for model in models):.0f} %"
        rows.append([kernel, span, error, f"{sum(len(model.us) for model in models):,}"])
    return (
        "### How the SM model ranks measured candidates\n\n"
        "Kendall's tau between modelled and measured times: median and range over the searches "
        "(1: the same order, 0: none), and the median error of the modelled times.\n\n"
        + table(("kernel", "tau", "error", "candidates"), rows)
    )


def taus(records: Sequence[Record]) -> dict[str, list[float]]:
    """Kendall's tau of each search that has one, by kernel."""
    values: dict[str, list[float]] = {r.kernel: [] for r in records}
    for r in records:
        if r.modelled is not None and r.modelled.kendall_tau is not None:
            values[r.kernel].append(r.modelled.kendall_tau)
    return values


def agreement_of(records: Sequence[Record], source: str) -> Agreement | None:
    """The agreement that the package ships; None if the model was never run."""
    modelled_records = [r for r in records if r.modelled is not None]
    tau = {
        kernel: round(median(values), 4)
        for kernel, values in taus(modelled_records).items()
        if values
    }
    if not tau:
        return None
    count = sum(len(r.modelled.us) for r in modelled_records if r.modelled is not None)
    gpu = ", ".join(sorted({r.gpu for r in modelled_records}))
    return Agreement(gpu=gpu, source=source, candidates=count, tau=tau)
