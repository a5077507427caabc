"""Texts of pages with their figures: templates that are read like the page.

A template lies beside the module that computes its figures, with the suffix ``.md.in``. A line
``%% NAME`` begins a part that is shown by itself. Blank lines separate blocks:

* a paragraph is filled to 100 columns, and so is each item that begins with ``- ``;
* a block that begins with ``|`` is a table: its head, then groups of rows. A line ``|--- ROWS``
  names a list or mapping of rows, and the pattern of a row follows; rows without a pattern are
  sequences of cells. A line ``|---`` is followed by single rows;
* headings, code, HTML and a block that is one figure stay as they are;
* a block that begins with ``{?NAME}`` is left out if the figure is empty.

A figure is ``{PATH}``, ``{PATH:FORMAT}`` or ``{PATH|TEXT WITHOUT IT:FORMAT}``. ``PATH`` names keys
of a row (also ``key`` and ``value`` in rows of a mapping), then of all figures, with dots between
nested keys; a list has ``count``, ``least``, ``most``, ``mean``, ``gmean`` and ``median``.
``{*PATH}`` in a table is a cell for each element. ``FORMAT`` is Python's, or ``YES/NO`` for a truth
value, or Python's and a unit: ``.1f %`` and ``.2f ms`` take a ratio and seconds and show the unit,
``.2f [ms]`` scales alone. ``day`` is that of a date, ``card`` a GPU without its maker. None is a
dash, a path is a link.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

from benchmarks.harness.markdown import link, page, table, wrapped
from benchmarks.harness.result_file import load

Values = Mapping[str, Any]
_FIGURE = re.compile(r"\{(\*?)([A-Za-z_0-9][^{}|:]*)(?:\|([^{}:]*))?(?::([^{}]*))?\}")
_CONDITION = re.compile(r"^\{\?([^{}]+)\}\s*")
_PART = re.compile(r"^%% (.+)\n", re.MULTILINE)
_CELLS = re.compile(r"(?<= )\|(?= )")
_REDUCTIONS: Mapping[str, Callable[[Any], Any]] = {
    "count": len, "least": min, "most": max, "mean": fmean, "gmean": geometric_mean,
    "median": median,
}  # fmt: skip
"""Keys of a list; a mapping has ``count`` alone."""
_WORDS: Mapping[str, Callable[[str], str]] = {
    "day": lambda date: date[:10],
    "card": lambda gpu: gpu.removeprefix("NVIDIA "),
}
"""Formats of strings."""
_SCALES = {"%": 100.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9, "GB": 1e-9, "MB": 1e-6}


def render(module: str, values: Values, part: str = "") -> str:
    """The template beside a module (its ``__file__``), or a part of it, with figures.

    Raises KeyError if the template lacks the part, or has a figure that ``values`` lacks, and
    ValueError for a brace that belongs to no figure.
    """
    parts = _parts(module)
    if part not in parts:
        raise KeyError(f"the template of {module} has no part {part!r}; it has {', '.join(parts)}")
    return _filled(module, parts[part], values)


def render_page(module: str, path: Path, values: Values) -> str:
    """The page ``path``: its template begins with the title, and may have a part ``results``.

    What is in front of that part, or of the first heading, is the method, which is folded.
    """
    parts = _parts(module)
    title, _, method = parts[""].partition("\n")
    texts = [_filled(module, text, values) for text in (method, parts.get("results", ""))]
    return page(title.removeprefix("# "), f"python -m benchmarks page {path.stem}", texts)


def _parts(module: str) -> dict[str, str]:
    """The parts of a module's template; that without a name is the beginning."""
    text = Path(module).with_suffix(".md.in").read_text("utf-8")
    whole, *parts = _PART.split(text)
    return {"": whole, **dict(zip(parts[::2], parts[1::2], strict=True))}


def _filled(module: str, text: str, values: Values) -> str:
    try:
        return filled(text, values)
    except (KeyError, ValueError) as error:
        error.add_note(f"in {Path(module).with_suffix('.md.in')}")
        raise


def source(path: Path) -> dict[str, Any]:
    """A result file as values of a template; ``file`` is its path."""
    return {**load(path), "file": path}


def filled(text: str, values: Values) -> str:
    """The text of a template with its figures; see the module."""
    blocks = (_block(block, values) for block in re.split(r"\n{2,}", text.strip("\n")))
    return "\n\n".join(block for block in blocks if block)


def _block(block: str, values: Values) -> str:
    if condition := _CONDITION.match(block):
        if not _value(condition[1], [values], is_optional=True):
            return ""
        block = block[condition.end() :]
    if block.startswith("| "):
        return _table(block, values)
    if block.startswith(("#", "<", "```", "!")) or _FIGURE.fullmatch(block):
        return _text(block, [values])
    if block.startswith("- "):
        return "\n".join(_item(" ".join(map(str.strip, item.split("\n"))), values)
                         for item in re.split(r"\n(?=- )", block))  # fmt: skip
    return wrapped(_text(" ".join(block.split("\n")), [values]))


def _item(item: str, values: Values) -> str:
    return wrapped(_text(item, [values])).replace("\n", "\n  ")


def _table(block: str, values: Values) -> str:
    head, *groups = re.split(r"\n\|--- ?", block)
    rows: list[list[str]] = []
    for group in groups:
        name, *patterns = group.split("\n")
        if not name:
            rows += [_cells(pattern, [values]) for pattern in patterns]
            continue
        for row in _rows(_value(name, [values])):
            rows.append(_cells(patterns[0], [row, values]) if patterns else list(map(shown, row)))
    return table(_cells(head, [values]), rows)


def _rows(found: Any) -> Iterator[Any]:
    if isinstance(found, Mapping):
        for key, value in found.items():
            fields = value if isinstance(value, Mapping) else {}
            yield {**fields, "key": key, "value": value}
    else:
        yield from found


def _cells(pattern: str, scopes: Sequence[Any]) -> list[str]:
    cells: list[str] = []
    for cell in _CELLS.split(pattern.removeprefix("|").removesuffix("|")):
        figure = _FIGURE.fullmatch(cell.strip())
        if figure and figure[1]:
            elements = _value(figure[2], scopes)
            cells += [shown(element, figure[4] or "") for element in elements]
        else:
            cells.append(_text(cell.strip(), scopes))
    return cells


def _text(text: str, scopes: Sequence[Any]) -> str:
    if re.search("[{}]", _FIGURE.sub("", text)):
        raise ValueError(f"a brace of {text!r} belongs to no figure")
    return _FIGURE.sub(lambda found: _figure(found, scopes), text)


def _figure(found: re.Match[str], scopes: Sequence[Any]) -> str:
    _, path, without, spec = found.groups()
    value = _value(path, scopes, is_optional=without is not None)
    return without if value is None and without is not None else shown(value, spec or "")


def _value(path: str, scopes: Sequence[Any], *, is_optional: bool = False) -> Any:
    """The value at a path, whose first key selects the scope; None below a value that is None.

    Raises KeyError if it is missing, unless it is optional.
    """
    first, *rest = path.split(".")
    try:
        found = _field(next((each for each in scopes if _has(each, first)), scopes[-1]), first)
        for key in rest:
            found = None if found is None else _field(found, key)
    except (KeyError, AttributeError, IndexError):
        if not is_optional:
            raise KeyError(f"there is no figure {path!r}") from None
        return None
    return found


def _has(scope: Any, key: str) -> bool:
    return key in scope if isinstance(scope, Mapping) else hasattr(scope, key)


def _field(value: Any, key: str) -> Any:
    if isinstance(value, Mapping) and (key in value or key != "count"):
        return value[key]
    if isinstance(value, Mapping | Sequence) and key in _REDUCTIONS:
        return _REDUCTIONS[key](value)
    if isinstance(value, Sequence) and key.isdecimal():
        return value[int(key)]
    return getattr(value, key)


def shown(value: Any, spec: str = "") -> str:
    """A value in a format of templates."""
    if value is None:
        return "–"
    if "/" in spec:
        yes, no = spec.split("/")
        return yes if value else no
    if isinstance(value, str):
        return _WORDS[spec](value) if spec in _WORDS else value
    if isinstance(value, Path):
        return link(value, spec or "JSON")
    if isinstance(value, list | tuple):
        return ", ".join(shown(each, spec) for each in value)
    number, _, unit = spec.partition(" ")
    if not unit:
        return format(value, spec)
    name = unit.strip("[]")
    if name not in _SCALES:
        raise ValueError(f"unit {name!r} of a figure; allowed are {', '.join(_SCALES)}")
    return format(value * _SCALES[name], number) + (f" {name}" if name == unit else "")
