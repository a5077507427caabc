"""What carried the gain, as the page shows it: ``ablation.json`` of a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

NAME = "ablation.json"
SHOWN = 20


class Row(BaseModel):
    """A change; ``lost``: how much slower it is without, in per cent of the original's time."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    text: str
    block: int
    index: int
    lost: float | None


class Ablation(BaseModel):
    """The whole file; ``total`` counts all changes, ``idle`` those that were taken back together
    without any loss."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    schema_version: Literal[1]
    kind: Literal["modelled", "measured"]
    total: int
    idle: int
    rows: tuple[Row, ...]

    @property
    def shown(self) -> tuple[Row, ...]:
        """Those that could be taken back alone and matter, the greatest first."""
        return tuple(r for r in self.rows if r.lost is not None and r.lost > 0)[:SHOWN]

    @property
    def together(self) -> int:
        """Changes that cannot be taken back alone."""
        return sum(row.lost is None for row in self.rows)


def carried(path: Path) -> Ablation | None:
    """The run's ablation; None where it has none, or one that cannot be read."""
    try:
        return Ablation.model_validate_json((path / NAME).read_text())
    except (OSError, UnicodeDecodeError, ValidationError):
        return None


def has_ablation(path: Path) -> bool:
    """Whether the file is there at all."""
    return (path / NAME).exists()
