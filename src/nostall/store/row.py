"""Row of the store's index: its fields, and the checks of a row that is read from the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from nostall.core.measurement import Kind
from nostall.core.text.terminal import is_printable
from nostall.store.artefacts import is_sha256
from nostall.store.errors import DamagedIndex

Origin = Literal["tuned", "imported", "repaired"]
"""How a record came to this store; ``repaired``: found among the files of a damaged index."""


@dataclass(frozen=True)
class Row:
    """One record of the store.  Field names are the table's columns."""

    id: str
    """sha256 of the provenance file."""
    original: str
    """sha256 of the original cubin."""
    optimised: str
    """sha256 of the optimised cubin."""
    kernel: str
    architecture: str
    """Such as ``sm_90``."""
    kind: Kind
    gpu: str | None
    """Name of the GPU on which the gain was measured; None if it is modelled."""
    ratio: float
    """Time of the original / time of the optimised cubin."""
    low: float
    """Lower end of the measured ratio's interval, or the modelled ratio."""
    created: str
    source: Origin


def _is_hash(value: Any) -> bool:
    return isinstance(value, str) and is_sha256(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and is_printable(value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


_CHECKS: dict[str, Callable[[Any], bool]] = {
    "id": _is_hash,
    "original": _is_hash,
    "optimised": _is_hash,
    "kernel": _is_text,
    "architecture": _is_text,
    "kind": lambda value: value in get_args(Kind),
    "gpu": lambda value: value is None or _is_text(value),
    "ratio": _is_positive,
    "low": _is_positive,
    "created": _is_text,
    "source": lambda value: value in get_args(Origin),
}
"""Whether a value may stand in a column.  Rows name files and are printed on terminals."""


def parse_row(values: Sequence[Any], path: Path) -> Row:
    """The row with these values, in the order of the fields.

    Raises :class:`DamagedIndex` if a value cannot be one of its column.
    """
    for field, value in zip(fields(Row), values, strict=True):
        if not _CHECKS[field.name](value):
            raise DamagedIndex(path, f"a record has {field.name} {str(value)[:80]!r}")
    return Row(*values)
