"""Headers of job tables: which field a column is, and what its unit multiplies by."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from nostall.core.errors import BadJob

_HEADER = re.compile(r"\s*(\w+)\s*(?:\[\s*([^\]]*?)\s*\])?\s*")
_SCALES = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_BYTES = {f"{prefix}B": factor for prefix, factor in {**_SCALES, **_BINARY}.items()}
_FLOPS = {**_SCALES, **{f"{prefix}FLOP": factor for prefix, factor in _SCALES.items()}}
_HOURS = {"h": 1.0, "s": 1 / 3600, "min": 1 / 60, "d": 24.0}


@dataclass(frozen=True, slots=True)
class Column:
    """A field of the record and what a cell is multiplied by."""

    field: str
    factor: float


def columns(headers: Iterable[str], fields: Collection[str], where: str) -> dict[str, Column]:
    """Each header's column.

    Raises :class:`~nostall.core.errors.BadJob` for a column or a unit that is not known, for a
    field that comes twice, and for a table without ``architecture``.
    """
    found: dict[str, Column] = {}
    for header in headers:
        match = _HEADER.fullmatch(header)
        name = match[1].lower() if match else header
        if match is None or name not in fields:
            raise BadJob(
                f"{where}: column {header!r} is not known; allowed are {', '.join(fields)}, each "
                "with a unit in brackets where it has one; rename or remove it"
            )
        if name in {column.field for column in found.values()}:
            raise BadJob(f"{where}: column {name!r} comes twice; keep one of them")
        found[header] = Column(name, _factor(name, match[2], header, where))
    if "architecture" not in {column.field for column in found.values()}:
        raise BadJob(
            f"{where}: there is no column 'architecture' (found: {', '.join(found) or 'nothing'}); "
            "a job table is CSV with a header line, or Parquet"
        )
    return found


def _factor(name: str, unit: str | None, header: str, where: str) -> float:
    if unit is None:
        return 1.0
    units = _units(name)
    if unit not in units:
        allowed = ", ".join(u for u in units if u) or "none"
        raise BadJob(
            f"{where}: column {header!r} has the unit {unit!r}; allowed for {name} are {allowed}; "
            "convert the column"
        )
    return units[unit]


def _units(name: str) -> dict[str, float]:
    if name.endswith("_bytes") or name == "weight_traffic":
        return _BYTES
    if name == "flops":
        return _FLOPS
    return _HOURS if name == "gpu_hours" else {}
