"""Markdown for generated pages: tables, wrapped text, links to result files, marked regions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill

from benchmarks.harness.result_file import ROOT

MAX_ROWS = 14
"""Rows of a table that is not folded."""
_NUMBER = re.compile(r"\*{0,2}[-+−]?\d[\d,.]*(e[-+]?\d+)?( ?(%|×|[mµun]?s|[kMGT]?i?B))?\*{0,2}")
_TABLE = re.compile(r"^\|.*(?:\n\|.*)+", re.MULTILINE)
PAGES = ROOT.parent / "docs" / "results"
"""Folder of the generated pages."""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; ``|`` in a cell is escaped."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, rows)])


def wrapped(text: str) -> str:
    """A paragraph in lines of at most 100 characters."""
    # MyST takes a line that begins with a percent sign as a comment.
    joined = text.replace(" %", "\0%")
    lines = fill(joined, 100, break_long_words=False, break_on_hyphens=False)
    return lines.replace("\0", " ")


def link(path: Path, text: str = "JSON") -> str:
    """A link from a page of ``docs/results`` to a file below ``benchmarks``."""
    return f"[{text}](../../benchmarks/{path.relative_to(ROOT)})"


def region(text: str, name: str, content: str) -> str:
    """``text`` with the part between ``<!-- NAME -->`` and ``<!-- /NAME -->`` replaced.

    Raises ValueError if the marks are missing.
    """
    before, opening, rest = text.partition(f"<!-- {name} -->")
    _, closing, after = rest.partition(f"<!-- /{name} -->")
    if not opening or not closing:
        raise ValueError(f"the text has no region {name!r}; add <!-- {name} --><!-- /{name} -->")
    return f"{before}{opening}\n{content}\n{closing}{after}"


def page(title: str, command: str, parts: Iterable[str]) -> str:
    """A whole page: title, its headlines or its lead with their picture, its parts, the command.

    The method is folded, and each long table.
    """
    # Headlines are computed by functions of pages, so the pages cannot import them at the top.
    from benchmarks.front.leads import lead_parts
    from benchmarks.front.levels import answers

    notice = f"*Generated from committed result files by `{command}`. Do not edit.*"
    name = f"{command.rpartition(' ')[2]}.md"
    shown = answers(name) or lead_parts(name)
    texts = [part.strip() for part in parts if part]
    if shown and texts and not texts[0].startswith(("#", "|")):
        method, heading, rest = texts[0].partition("\n\n## ")
        texts[0] = _folded("How it was measured", method) + heading + rest
    sections = [f"# {title}", *shown, *(fold_tables(align_numbers(part)) for part in texts), notice]
    return "\n\n".join(sections) + "\n"


def fold_tables(text: str) -> str:
    """``text`` with each table of more than :data:`MAX_ROWS` rows folded."""
    return _TABLE.sub(_fold_table, text)


def align_numbers(text: str) -> str:
    """``text`` with the columns of numbers of its tables aligned at the right."""
    return _TABLE.sub(_align_numbers, text)


def _align_numbers(found: re.Match[str]) -> str:
    """A table whose columns of numbers, with or without units, are aligned at the right."""
    head, rule, *rows = found[0].splitlines()
    rules = rule.strip("|").split("|")
    split = [re.split(r"(?<!\\)\|", row)[1:-1] for row in rows]
    if any(len(cells) != len(rules) for cells in split):
        return found[0]
    for at, column in enumerate(zip(*split, strict=True)):
        filled = [cell.strip() for cell in column if cell.strip() not in ("", "–", "-")]
        if filled and all(map(_NUMBER.fullmatch, filled)):
            rules[at] = "---:"
    return "\n".join([head, f"|{'|'.join(rules)}|", *rows])


def _fold_table(found: re.Match[str]) -> str:
    head, _, *rows = found[0].splitlines()
    if len(rows) <= MAX_ROWS:
        return found[0]
    names = ", ".join(cell.strip() for cell in head.strip("| ").split("|")[:4])
    return _folded(f"All {len(rows)} rows: {names}, …", found[0])


def _folded(summary: str, text: str) -> str:
    return f"<details><summary>{summary}</summary>\n\n{text}\n\n</details>"
