"""Terminal output of ``nostall fuse``: tables of kernels, totals, verdicts and explanations."""

from __future__ import annotations

from collections.abc import Iterator

from nostall.cli.terminal.console import out, show_table
from nostall.core.text.plurals import pluralize
from nostall.report.units import Scale, format_bytes
from nostall.tuning.fusing.document import Document, FusedKernel, Pass

MAX_REASONS = 30
"""Lines for each kind of reason; ``--format json`` and the report have all of them."""


def show_document(document: Document) -> None:
    """Print the kernels and times of each pass, the verdicts and the tuning results."""
    for traced_pass in document.passes:
        _show_pass(document, traced_pass)
    out.print(
        "model:    fusion cost model, of memory traffic and occupancy; that of tune gives others"
    )
    for line in _binary_lines(document):
        out.print(line)
    if document.measured_on:
        out.print(f"measured: each kernel alone, on {document.measured_on}")
    for line in _tuning_lines(document):
        out.print(line)
    if document.status == "interrupted":
        out.print("interrupted: results are incomplete")


def _show_pass(document: Document, traced_pass: Pass) -> None:
    scale = Scale("s", traced_pass.seconds)
    rows = [_row(document, kernel, count, scale) for kernel, count in traced_pass.groups]
    num_opaque = sum(node.kind == "opaque" for node in traced_pass.nodes)
    if rows:
        show_table(
            f"{document.target}, {traced_pass.name} ({', '.join(document.inputs)})",
            (
                "kernel",
                "schedule",
                "launches\nbefore → after",
                "bytes\nbefore → after",
                f"modelled {scale.unit}\nbefore → after",
                *([f"measured\n{scale.unit}"] if document.measured_on else []),
            ),
            rows,
            optional=("schedule",),
        )
    alone = f" and {len(traced_pass.alone)} alone" if traced_pass.alone else ""
    out.print(
        f"{traced_pass.name}: {pluralize(traced_pass.operators, 'operator')} in "
        f"{pluralize(len(traced_pass.kernels), 'kernel')}{alone}; "
        f"{pluralize(num_opaque, 'call')} outside"
    )
    if not traced_pass.operators:
        out.print("  there is nothing to fuse; --explain prints the reasons")
        return
    for line in _total_lines(document, traced_pass):
        out.print(line)
    for note in traced_pass.notes:
        out.print(f"  note: {note}")


def _total_lines(document: Document, traced_pass: Pass) -> Iterator[str]:
    """Kernels and modelled times without fusion, with greedy fusion, and of the result."""
    totals = [
        ("unfused", pluralize(traced_pass.operators, "kernel"), traced_pass.seconds_unfused),
        ("greedy", pluralize(traced_pass.greedy_kernels, "kernel"), traced_pass.greedy_seconds),
        (document.strategy, pluralize(len(traced_pass.kernels), "kernel"), traced_pass.seconds),
    ]
    if document.strategy == "greedy":
        del totals[1]
    explanations = {
        "unfused": "one kernel per operator",
        "greedy": "fuses by bytes saved, as Inductor's scheduler does",
    }
    scale = Scale("s", traced_pass.seconds)
    for name, count, seconds in totals:
        explanation = f"  ({explanations[name]})" if name in explanations else ""
        yield f"  {name:<9}{count:>13}, modelled {scale(seconds):>10}{explanation}"


def _row(document: Document, kernel: FusedKernel, count: int, scale: Scale) -> tuple[str, ...]:
    """Cells of a kernel that occurs ``count`` times."""
    times = f"{count} x " if count > 1 else ""
    seconds = document.measured(kernel)
    measured = "" if seconds is None else scale.number(seconds)
    return (
        times + kernel.name,
        kernel.plan,
        f"{len(kernel.operators)} → {len(kernel.launches)}",
        f"{format_bytes(kernel.bytes_before)} → {format_bytes(kernel.bytes_after)}",
        f"{scale.number(kernel.seconds_before)} → {scale.number(kernel.seconds_after)}",
        *([measured] if document.measured_on else []),
    )


def _binary_lines(document: Document) -> Iterator[str]:
    """Verdicts, and kernels that were not compiled, verified or measured."""
    binaries = document.binaries
    accepted = [b for b in binaries if b.file and not b.findings and not b.not_judged]
    if accepted:
        yield (
            f"verifier: accepts {len(accepted)} of {len(binaries)} kernels compiled for "
            f"{document.arch} ({sum(binary.instructions for binary in accepted)} instructions)"
        )
    for binary in document.unknown:
        yield (
            f"verifier: {binary.name}: {pluralize(binary.findings, 'finding')}, such as operations "
            "that the mined tables lack; the kernel runs in the compiler's own order and is not "
            f"tuned; first: {binary.first_finding}"
        )
    for binary in binaries:
        if binary.not_judged:
            yield f"verifier: {binary.name}: not verified: {binary.not_judged}"
        if binary.failure:
            yield f"not compiled: {binary.name}: {binary.failure}"
        if binary.not_measured:
            yield f"not measured: {binary.name}: {binary.not_measured}"


def _tuning_lines(document: Document) -> Iterator[str]:
    """Results of ``--tune-sass``."""
    for tuned in document.tuned:
        if tuned.note:
            yield f"sass:     {tuned.name}: not tuned: {tuned.note}"
        elif tuned.improved:
            yield (
                f"sass:     {tuned.name}: modelled {tuned.ratio:.4f}x after {tuned.evaluations} "
                "evaluations; verifier: safe"
            )
        else:
            yield (
                f"sass:     {tuned.name}: nothing better than the compiler's order was found "
                f"({tuned.evaluations} evaluations, modelled)"
            )


def show_explanation(document: Document) -> None:
    """Print which calls are not fused and why, and how each schedule was selected."""
    for traced_pass in document.passes:
        num_unfused = sum(reason.count for reason in traced_pass.refused if reason.what)
        out.print(
            f"{traced_pass.name}: {traced_pass.taken} ATen calls can be fused, {num_unfused} stay "
            f"as they are; {pluralize(traced_pass.regions, 'region')}; "
            f"{format_bytes(sum(reason.bytes for reason in traced_pass.refused))} cross borders"
        )
        for reason in traced_pass.refused[:MAX_REASONS]:
            what = f"{reason.count:4} x {reason.what}: " if reason.what else "       "
            cost = f" ({format_bytes(reason.bytes)})" if reason.bytes else ""
            out.print(f"  {what}{reason.reason}{cost}")
            out.print(f"         change: {reason.change}")
        for reason in traced_pass.splits[:MAX_REASONS]:
            out.print(
                f"  {reason.count:4} x kernel split into smaller ones, for example: {reason.reason}"
            )
        for reason in traced_pass.no_kernel[:MAX_REASONS]:
            out.print(f"  {reason.count:4} x run by PyTorch, for example: {reason.reason}")
        for kernel, _ in traced_pass.groups:
            _show_schedules(kernel)


def _show_schedules(kernel: FusedKernel) -> None:
    schedules = kernel.schedules
    out.print(
        f"{kernel.name}: {kernel.plan}: the lowest modelled time of "
        f"{pluralize(schedules.legal - schedules.last_choices, 'schedule')}"
    )
    for alternative in schedules.next_best:
        out.print(f"  {alternative.ratio:6.3f} x its time: {alternative.plan}")
    if schedules.last_choices:
        out.print(
            f"  {schedules.last_choices:4} legal, but selected only if they are measured as faster"
        )
    for reason in schedules.refused[:MAX_REASONS]:
        out.print(f"  {reason.count:4} illegal, for example: {reason.reason}")
