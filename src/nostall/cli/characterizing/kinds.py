"""``nostall characterize --kinds`` and ``--learn``: kinds of the programs that traces record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nostall.cli.terminal.console import err, out, show_table
from nostall.core.errors import BadInput
from nostall.core.text.labels import file_labels
from nostall.core.text.plurals import pluralize
from nostall.workload.characterization.kinds import KindsCharacterization, learn
from nostall.workload.jobs.table_rows import is_table
from nostall.workload.traces.kernel_names import parse_kernel_name
from nostall.workload.traces.nsight import is_sqlite

UNKNOWN = "unknown"
MAX_NAME = 100
"""Characters of a kernel's name in a table."""


def require_traces(paths: Sequence[Path], option: str) -> None:
    """Raise :class:`~nostall.core.errors.BadInput` for tables and Chakra traces."""
    for path in paths:
        if is_table(path) or path.suffix == ".et" or is_sqlite(path):
            raise BadInput(
                f"{option} needs traces of torch.profiler, whose operators tell the kind; {path} "
                "is none; leave it out"
            )


def learn_traces(paths: Sequence[Path], kind: str | None, corpus: Path) -> None:
    """Add traces to a file of labelled programs, and say what is in it."""
    require_traces(paths, "--learn")
    programs, reasons = learn(paths, kind or "", corpus)
    for reason in reasons:
        err.print(f"skipped: {reason}")
    out.print(f"{corpus}: {pluralize(programs, 'labelled program')}")


def show_kinds(result: KindsCharacterization, explain: bool) -> None:
    """Print the label of each trace, and the possible new kinds."""
    files = file_labels([Path(document.name) for document, _ in result.rows])
    show_table(
        f"kinds of the traces by their operators (learnt from {result.corpus})",
        ("trace", "kind", "probability", "nearest programs"),
        [
            (
                file,
                UNKNOWN if label.is_unknown else label.kind,
                f"novelty {label.novelty:.2f}" if label.is_unknown else f"{label.probability:.2f}",
                ", ".join(
                    f"{Path(n.name).name} ({n.kind}, {n.similarity:.2f})" for n in label.nearest
                ),
            )
            for file, (_, label) in zip(files, result.rows, strict=True)
        ],
    )
    if explain:
        _show_words(result, files)
    if result.kernels:
        _show_kernels(result)
    if result.new_kinds is not None:
        _show_new_kinds(result)


def _show_kernels(result: KindsCharacterization) -> None:
    show_table(
        "kernels that no rule names: kinds learnt from launch parameters and times",
        ("kernel", "time", "learnt kind", "probability"),
        [
            (
                parse_kernel_name(kernel.name).function[:MAX_NAME],
                f"{1e6 * kernel.seconds:.4g} us",
                kernel.kind,
                f"{kernel.probability:.2f}",
            )
            for kernel in result.kernels
        ],
    )


def _show_words(result: KindsCharacterization, files: Sequence[str]) -> None:
    show_table(
        "operators that decide (share of the trees that a label loses without the operator)",
        ("trace", "label", "operators"),
        [
            (
                file,
                label.kind,
                ", ".join(f"{word} {loss:.2f}" for word, loss in label.words) or "no single one",
            )
            for file, (_, label) in zip(files, result.rows, strict=True)
        ],
    )


def _show_new_kinds(result: KindsCharacterization) -> None:
    new = result.new_kinds
    assert new is not None
    show_table(
        "possible new kinds among the unknown traces",
        ("new kind", "traces", "typical operators"),
        [
            (
                str(number + 1),
                ", ".join(Path(name).name for name in kind.members),
                ", ".join(kind.words),
            )
            for number, kind in enumerate(new.kinds)
        ],
    )
    ranges = [
        f"{min(posterior)} to {max(posterior)}" if len(posterior) > 1 else str(min(posterior))
        for posterior in new.counts.values()
    ]
    out.print(
        "number of new kinds by the temper of the counts: "
        + ", ".join(f"{t:g}: {r}" for t, r in zip(new.counts, ranges, strict=True))
    )
