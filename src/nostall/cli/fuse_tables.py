"""A fusion plan as tables and lines."""

from __future__ import annotations

from collections.abc import Iterator

from nostall.cli.console import out, show_table
from nostall.report.units import Scale, amount, several
from nostall.tuning.fusing.document import Document, FusedKernel, Pass

MOST_REASONS = 30
"""Lines for each kind of reason; the rest is in ``--format json`` and the report."""


def show_document(document: Document) -> None:
    """The kernels of each pass, what they were before, and what the verifier says."""
    for found in document.passes:
        _show_pass(document, found)
    for line in _binaries(document):
        out.print(line)
    if document.measured_on:
        out.print(f"measured: each kernel on its own, on {document.measured_on}")
    for line in _tuned(document):
        out.print(line)
    if document.status == "interrupted":
        out.print("interrupted: what was found until then is kept")


def _show_pass(document: Document, found: Pass) -> None:
    scale = Scale("s", found.seconds)
    rows = [_row(document, kernel, times, scale) for kernel, times in found.groups]
    opaque = sum(node.kind == "opaque" for node in found.nodes)
    if rows:
        show_table(
            f"{document.target}, {found.name} ({', '.join(document.inputs)})",
            (
                "kernel",
                "schedule",
                "launches\nbefore → after",
                "bytes\nbefore → after",
                f"modelled {scale.unit}\nbefore → after",
                *([f"measured\n{scale.unit}"] if document.measured_on else []),
            ),
            rows,
        )
    alone = f" and {len(found.alone)} alone" if found.alone else ""
    out.print(
        f"{found.name}: {several(found.operators, 'operator')} in "
        f"{several(len(found.kernels), 'kernel')}{alone}; {several(opaque, 'call')} outside"
    )
    if not found.operators:
        out.print("  there is nothing to fuse; --explain says why")
        return
    compared = [
        ("unfused", several(found.operators, "launch"), found.seconds_unfused),
        ("greedy", several(found.greedy_kernels, "kernel"), found.greedy_seconds),
        (document.strategy, several(found.launches, "launch"), found.seconds),
    ]
    if document.strategy == "greedy":
        del compared[1]
    said = {
        "unfused": "every operator a kernel of its own",
        "greedy": "by bytes saved, as Inductor's scheduler does",
    }
    for name, count, seconds in compared:
        why = f"  ({said[name]})" if name in said else ""
        out.print(f"  {name:<9}{count:>13}, modelled {scale(seconds):>10}{why}")
    for note in found.notes:
        out.print(f"  note: {note}")


def _row(document: Document, kernel: FusedKernel, times: int, scale: Scale) -> tuple[str, ...]:
    many = f"{times} x " if times > 1 else ""
    measured = document.measured(kernel)
    said = "" if measured is None else scale.number(measured)
    return (
        many + kernel.name,
        kernel.plan,
        f"{len(kernel.operators)} → {len(kernel.launches)}",
        f"{amount(kernel.bytes_before)} → {amount(kernel.bytes_after)}",
        f"{scale.number(kernel.seconds_before)} → {scale.number(kernel.seconds_after)}",
        *([said] if document.measured_on else []),
    )


def _binaries(document: Document) -> Iterator[str]:
    every = document.binaries
    fine = [b for b in every if b.file and not b.findings and not b.not_judged]
    instructions = sum(binary.instructions for binary in fine)
    if fine:
        yield (
            f"verifier: nostall's rules hold for {len(fine)} of {len(every)} kernels compiled for "
            f"{document.arch} ({instructions} instructions)"
        )
    for binary in document.unknown:
        yield (
            f"verifier: {binary.name}: {binary.findings} places that nostall's rules do not know "
            "(mined tables lack them; the kernel is the compiler's own and runs, it is not tuned); "
            f"first: {binary.first_finding}"
        )
    for binary in every:
        if binary.not_judged:
            yield f"verifier: {binary.name}: not judged: {binary.not_judged}"
        if binary.failure:
            yield f"not compiled: {binary.name}: {binary.failure}"
        if binary.not_measured:
            yield f"not measured: {binary.name}: {binary.not_measured}"


def _tuned(document: Document) -> Iterator[str]:
    for each in document.tuned:
        if each.note:
            yield f"sass:     {each.name}: not tuned: {each.note}"
        elif each.improved:
            yield (
                f"sass:     {each.name}: modelled {each.ratio:.4f}x after {each.evaluations} "
                "evaluations; verifier: safe"
            )
        else:
            yield (
                f"sass:     {each.name}: nothing better than the compiler's order was found "
                f"({each.evaluations} evaluations, modelled)"
            )


def show_explanation(document: Document) -> None:
    """What stayed outside and why, and what each schedule was chosen from."""
    for found in document.passes:
        stay = sum(reason.count for reason in found.refused)
        out.print(f"{found.name}: {found.taken} ATen calls can be fused, {stay} stay as they are")
        for reason in found.refused[:MOST_REASONS]:
            out.print(f"  {reason.count:4} x {reason.what}: {reason.reason}")
        for reason in found.splits[:MOST_REASONS]:
            out.print(f"  {reason.count:4} x planned kernel made smaller, such as: {reason.reason}")
        for reason in found.no_kernel[:MOST_REASONS]:
            out.print(f"  {reason.count:4} x left to PyTorch, such as: {reason.reason}")
        for kernel, _ in found.groups:
            _explain_schedule(kernel)


def _explain_schedule(kernel: FusedKernel) -> None:
    said = kernel.schedules
    out.print(f"{kernel.name}: {kernel.plan}: the least modelled time of {said.legal} schedules")
    for other in said.next_best:
        out.print(f"  {other.ratio:6.3f} x its time: {other.plan}")
    for reason in said.refused[:MOST_REASONS]:
        out.print(f"  {reason.count:4} refused, such as: {reason.reason}")
