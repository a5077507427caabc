"""Rows of ``trials.csv``: one for each evaluated proposal of a search.

A row that cannot be used costs itself: it is left out, and a remark says so.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nostall.core.errors import BadRun
from nostall.core.search import Trial
from nostall.core.text.plurals import pluralize

FIELDS = [f.name for f in dataclasses.fields(Trial)]
FILE = "trials.csv"
_ROW_START = re.compile(rb"\d+,[-+.\da-z]+,(True|False),")
_MAX_LINES = 3
"""Lines that a remark names."""


@dataclass(frozen=True)
class TrialLog:
    """The trials of a log by index, and what of the log could not be used."""

    trials: tuple[Trial, ...] = ()
    remarks: tuple[str, ...] = ()
    """A sentence for each kind of damage."""


class _BadRow(ValueError):
    """A row that is left out; the message is the reason."""


def read_trials(path: Path) -> TrialLog:
    """Read a log; empty without a file.

    If a resumed search logged a trial twice, the last row counts. Raises :class:`BadRun` if the
    file cannot be opened.
    """
    if not path.exists():
        return TrialLog()
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadRun(
            f"{path} cannot be read ({error.strerror}); move it away to go on without its trials"
        ) from error
    rows: dict[int, Trial] = {}
    damage: dict[str, list[int]] = defaultdict(list)
    for number, line in _rows(content):
        try:
            cells = _cells(line)
            if number == 1 and cells == FIELDS:
                continue
            trial = _parse(cells)
        except _BadRow as reason:
            damage[str(reason)].append(number)
        else:
            rows[trial.index] = trial
    trials = tuple(rows[index] for index in sorted(rows))
    return TrialLog(trials, tuple(_remarks(damage)))


def remove_partial_row(path: Path) -> int:
    """Remove a row without a line end from the end of a log; returns the bytes that remain.

    Otherwise the next row would be appended to the partial one. The search repeats its trial.
    """
    if not path.exists():
        return 0
    with path.open("r+b") as log:
        size = log.read().rfind(b"\n") + 1
        log.truncate(size)
    return size


def _rows(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Each row with the number of its first line.

    A quoted cell may hold line ends. A line that begins like a row ends a row whose quotes are
    damaged.
    """
    start, row = 1, b""
    for number, line in enumerate(content.splitlines(keepends=True), 1):
        if row and _ROW_START.match(line):
            yield start, row
            row = b""
        if not row:
            start = number
        row += line
        if row.endswith(b"\n") and row.count(b'"') % 2 == 0:
            yield start, row
            row = b""
    if row:
        yield start, row


def _cells(line: bytes) -> list[str]:
    """Raises _BadRow for a line that is not one whole row."""
    if not line.endswith(b"\n"):
        raise _BadRow("the row is cut off")
    try:
        (cells,) = csv.reader(io.StringIO(line.decode(), newline=""), strict=True)
    except (UnicodeDecodeError, ValueError, csv.Error):
        raise _BadRow("the row is not text in CSV form") from None
    if len(cells) != len(FIELDS):
        raise _BadRow(f"the row does not have {len(FIELDS)} cells")
    return cells


def _parse(cells: list[str]) -> Trial:
    row = dict(zip(FIELDS, cells, strict=True))
    failure = row["failure"] or None
    try:
        trial = Trial(
            index=int(row["index"]),
            value=float(row["value"]),
            accepted={"True": True, "False": False}[row["accepted"]],
            best=float(row["best"]),
            move=row["move"],
            rejected=int(row["rejected"]),
            seconds=float(row["seconds"]),
            failure=failure,
        )
    except (KeyError, ValueError):
        raise _BadRow("a cell is not of its column's type") from None
    if failure is None and not math.isfinite(trial.value):
        raise _BadRow("the evaluation has neither a time nor a failure")
    if math.isnan(trial.value) or math.isnan(trial.best) or not math.isfinite(trial.seconds):
        raise _BadRow("a number is not finite")
    return trial


def _remarks(damage: dict[str, list[int]]) -> Iterator[str]:
    for reason, lines in damage.items():
        named = ", ".join(map(str, lines[:_MAX_LINES]))
        more = ", ..." if len(lines) > _MAX_LINES else ""
        word = "line" if len(lines) == 1 else "lines"
        yield (
            f"{FILE}: {pluralize(len(lines), 'row')} left out, because {reason} "
            f"({word} {named}{more})"
        )
