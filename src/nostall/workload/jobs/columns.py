"""Parser for the header of a job table: the job field and the unit of each column."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from nostall.core.errors import BadJob

_HEADER = re.compile(r"\s*(\w+)\s*(?:\[\s*([^\]]*?)\s*\])?\s*")
_DECIMAL_PREFIXES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY_PREFIXES = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTE_UNITS = {
    f"{prefix}B": factor for prefix, factor in {**_DECIMAL_PREFIXES, **_BINARY_PREFIXES}.items()
}
_FLOP_UNITS = {
    **_DECIMAL_PREFIXES,
    **{f"{prefix}FLOP": factor for prefix, factor in _DECIMAL_PREFIXES.items()},
}
_SECOND_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0}
_HOUR_UNITS = {"h": 1.0, "s": 1 / 3600, "min": 1 / 60, "d": 24.0}


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a job table."""

    field: str
    """Name of the field of :class:`~nostall.workload.jobs.record.Job`."""
    factor: float
    """Converts a cell from the unit of the header to the base unit (FLOP, bytes, hours)."""


def parse_header(
    headers: Iterable[str], fields: Collection[str], table: str, required: Sequence[str]
) -> dict[str, Column]:
    """Map each header cell (``flops [T]``) to its :class:`Column`.

    ``table`` names the file in error messages.  Raises :class:`~nostall.core.errors.BadJob` if a
    column or a unit is unknown, if a field occurs twice, or if one of ``required`` is missing.
    """
    columns: dict[str, Column] = {}
    for header in headers:
        match = _HEADER.fullmatch(header)
        name = match[1].lower() if match else header
        if match is None or name not in fields:
            raise BadJob(
                f"{table}: unknown column {header[:80]!r}; allowed are {', '.join(fields)}, each "
                "with an optional unit in brackets; rename or remove the column"
            )
        if name in {column.field for column in columns.values()}:
            raise BadJob(f"{table}: column {name!r} occurs twice; remove one of them")
        columns[header] = Column(name, _unit_factor(name, match[2], header, table))
    for name in required:
        if name not in {column.field for column in columns.values()}:
            raise BadJob(
                f"{table}: the column {name!r} is missing (columns: "
                f"{', '.join(columns) or 'none'}); a table is a CSV file with a header line, or a "
                f"Parquet file, and has the columns {', '.join(required)}"
            )
    return columns


def field_names(headers: Iterable[str]) -> set[str]:
    """The fields that a header names, known or not."""
    return {match[1].lower() for header in headers if (match := _HEADER.fullmatch(header))}


def _unit_factor(name: str, unit: str | None, header: str, table: str) -> float:
    if unit is None:
        return 1.0
    units = _units(name)
    if unit not in units:
        allowed = ", ".join(u for u in units if u) or "none"
        raise BadJob(
            f"{table}: column {header!r} has the unit {unit!r}; allowed units for {name} are "
            f"{allowed}; convert the column"
        )
    return units[unit]


def _units(name: str) -> Mapping[str, float]:
    """Factors of the units that a field may have in its header."""
    if name.endswith("_bytes") or name == "weight_traffic":
        return _BYTE_UNITS
    if name == "flops":
        return _FLOP_UNITS
    if name == "seconds":
        return _SECOND_UNITS
    return _HOUR_UNITS if name == "gpu_hours" else {}
