"""Report page of a run of ``nostall fuse``: one HTML file that contains its style and figures."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from nostall.core import Run
from nostall.core.files.atomic import write_text_atomically
from nostall.core.text.plurals import pluralize
from nostall.report import html
from nostall.report.fusion.picture import MAX_DRAWN, draw_pass
from nostall.report.tune.page import REPORT_FILE
from nostall.report.units import Scale, format_bytes
from nostall.tuning.fusing.document import FILE, Document, Pass, load_document

SCHEMES = {
    "thread": "values stay in a thread",
    "warp": "several rows a warp; reductions by shuffles",
    "block": "a row in the registers of one block",
    "looped": "the row is read again for each level of reductions",
    "shared": "values for several levels of reductions are kept in shared memory",
    "split": "several blocks share a row; partial results in memory",
    "column": "reductions by row and by column; two kernels",
}
"""Short descriptions of the kernel schemes, by scheme name."""


def is_fusion(path: Path) -> bool:
    """Whether a run directory was made by ``nostall fuse``."""
    return (path / FILE).exists()


def write_page(path: Path) -> Path:
    """Write ``report.html`` into a run directory made by ``nostall fuse``; returns its path.

    Raises :class:`~nostall.core.errors.BadRun` if ``fusion.json`` or ``run.json`` cannot be used.
    """
    document = load_document(path)
    measure = tune_command(document, path)
    page = render(document, Run.open(path).record.command, measure and f"{measure} --objective gpu")
    target = path / REPORT_FILE
    write_text_atomically(target, page)
    return target


def tune_command(document: Document, path: Path) -> str:
    """The command that tunes the first kernel that the verifier accepts; empty without one."""
    kernels = [kernel for traced_pass in document.passes for kernel in traced_pass.kernels]
    sources = {name: kernel.source for kernel in kernels for name in kernel.launches}
    for binary in document.binaries:
        if binary.file and not binary.findings:
            kernel = f"{path / sources[binary.name]}:{binary.name}"
            return shlex.join(["nostall", "tune", kernel, "--arch", document.arch])
    return ""


def render(document: Document, command: str, measure: str = "") -> str:
    """The HTML text of the page; ``measure`` is the command to offer as the next step."""
    return html.render(
        "fusion.html",
        styles=("page.css", "fusion.css"),
        scripts=("fusion.js",),
        filters={
            "bytes": format_bytes,
            "us": Scale("s", 1e-6).number,
            "microseconds": lambda seconds: f"{1e6 * seconds:,.2f} µs",
        },
        document=document,
        name=document.target.rpartition(":")[2],
        passes=[
            (traced_pass, _facts(traced_pass), draw_pass(traced_pass, document.measured))
            for traced_pass in document.passes
        ],
        leads=[_lead(traced_pass, document) for traced_pass in document.passes],
        schemes=SCHEMES,
        max_drawn=MAX_DRAWN,
        command=command,
        measure=measure,
    )


def _lead(traced_pass: Pass, document: Document) -> str:
    """The answer of a pass in a sentence: its kernels, and their gain over the other ways."""
    where = f"{traced_pass.name.capitalize()}: " if len(document.passes) > 1 else ""
    if not traced_pass.operators:
        return f"{where}no operator can be fused; the reasons are below."
    kernels = pluralize(len(traced_pass.kernels), "kernel")
    lead = f"{where}{pluralize(traced_pass.operators, 'operator')} become {kernels}"
    facts = _facts(traced_pass)
    if facts["over_unfused"]:
        lead += ": modelled, "
        if document.strategy != "greedy":
            lead += f"{_gain(facts['over_greedy'], 2)} greedy fusion, "
        lead += f"{_gain(facts['over_unfused'], 1)} one kernel per operator"
    return f"{lead}."


def _gain(ratio: float, digits: int) -> str:
    """A gain in words; none is said so."""
    text = f"{ratio:.{digits}f}"
    return "no faster than" if float(text) == 1 else f"{text}× as fast as"


def _facts(traced_pass: Pass) -> dict[str, Any]:
    """Values of a pass that are computed here instead of in the template."""
    kernels, seconds = traced_pass.kernels, traced_pass.seconds
    return {
        "over_unfused": traced_pass.seconds_unfused / seconds if seconds else None,
        "over_greedy": traced_pass.greedy_seconds / seconds if seconds else None,
        "before": sum(kernel.bytes_before for kernel in kernels),
        "after": sum(kernel.bytes_after for kernel in kernels),
        "opaque": sum(node.kind == "opaque" for node in traced_pass.nodes),
        "stay": sum(reason.count for reason in traced_pass.refused),
        # A kernel that occurs several times has the number of its first occurrence.
        "numbers": {kernel.name: at + 1 for at, kernel in reversed([*enumerate(kernels)])},
    }
